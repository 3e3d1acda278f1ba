"""Check DESIGN.md section 4: imports go one way, only _ctypes_*.py calls C libraries. Usage: layers.py [FOLDER]"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

# A module may import what stands in its own line or in one above it.
LAYERS = [
    ["_version", "errors", "_context", "_ctypes_cuda", "_status"],
    ["_api", "_select"],
    ["_core"],
    ["_fallback", "_fallback_*", "_ctypes_*"],
    ["observation"],
    ["_info", "handles", "trial"],
    ["memory", "copies"],
    ["manifest", "tickets", "parts", "readers", "groups"],
    ["profile", "hashing"],
    ["keeper", "keeper.*"],
    ["testing"],
    ["replay", "replay_*", "cli", "cli_*", "__main__"],
    ["integrations", "integrations.*"],  # last: nothing imports them
]
# The public names, and the choice of the backend, reach down.
EXEMPT = {"", "_select"}


def layer(module: str) -> int | None:
    for index, patterns in enumerate(LAYERS):
        if any(fnmatchcase(module, pattern) for pattern in patterns):
            return index
    return None


def imports(tree: ast.AST) -> Iterator[tuple[int, str, int, list[str]]]:
    """Yield (line, module, level, names) of each import, but for those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, 0, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "", node.level, [alias.name for alias in node.names]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (found for child in node.orelse for found in imports(ast.Module([child], [])))
        else:
            yield from imports(node)


def check(package: Path) -> list[str]:
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    problems = []
    for module, path in files.items():
        mine = layer(module)
        if module and mine is None:
            problems.append(f"{path}: has no layer; name it in LAYERS")
            continue
        base = module.split(".") if path.name == "__init__.py" and module else module.split(".")[:-1]
        for line, target, level, names in imports(ast.parse(path.read_text())):
            if level:
                target = ".".join(["kvreuse", *base[: len(base) - level + 1], *filter(None, [target])])
            if target.split(".")[0] == "ctypes" and not fnmatchcase(module, "_ctypes_*"):
                problems.append(f"{path}:{line}: only _ctypes_*.py may import ctypes")
            if target.split(".")[0] != "kvreuse" or module in EXEMPT:
                continue
            target = target.removeprefix("kvreuse").removeprefix(".")
            # `from . import errors` names a module; `from .errors import KVReuseError` a name in one.
            inner = [
                name for name in (f"{target}.{name}".lstrip(".") for name in names) if name in files or name == "_core"
            ]
            for other in inner or [target]:
                theirs = layer(other)
                if theirs is not None and mine is not None and theirs > mine:
                    problems.append(f"{path}:{line}: {module} may not import {other}, which stands above it")
    return problems


if __name__ == "__main__":
    found = check(Path(sys.argv[1] if len(sys.argv) > 1 else "kvreuse"))
    print("\n".join([*found, f"layers: {len(found)} problems"]))
    sys.exit(bool(found))
