"""include/kvreuse.h, read without a compiler: what it declares, and checks of it that say what is wrong.

Every check takes its inputs and returns a list of complaints, so that a test can hand it something damaged.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

from pycparser import c_ast, c_parser

HEADER = Path(__file__).resolve().parents[2] / "include" / "kvreuse.h"
FIXED = {
    name: getattr(ctypes, "c_" + name.removesuffix("_t"))
    for name in ("int8_t", "int16_t", "int32_t", "int64_t", "uint8_t", "uint16_t", "uint32_t", "uint64_t")
}
SECTIONS = ("In", "Out", "Owner", "After failure", "Errors", "Threads", "Since")


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str  # the base type: "int64_t", "char", "kvr_error", "void"
    pointer: bool
    const: bool


@dataclass(frozen=True)
class Member:
    name: str
    type: str
    count: int | None  # entries of an array


@dataclass
class Header:
    functions: dict[str, list[Parameter]] = field(default_factory=dict)
    returns: dict[str, str] = field(default_factory=dict)
    structs: dict[str, list[Member]] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)  # declarations that are neither a function nor a plain struct
    static_sizes: dict[str, int] = field(default_factory=dict)
    static_offsets: dict[str, dict[str, int]] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)  # the comment right above each prototype


def _constants(text: str) -> dict[str, int]:
    found = {}
    for name, value in re.findall(r"^#define (KVR_\w+) +(.+?) *(?:/\*.*)?$", text, re.M):
        value = re.sub(r"U?INT64_C\((\w+)\)", r"\1", value)
        found[name] = int(ast.literal_eval(value))
    return found


def _plain(text: str) -> str:
    """C that pycparser reads: no comments, no preprocessor lines, no static asserts, typedefs in front."""
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match.group().count("\n"), text, flags=re.S)
    text = re.sub(r"^[ \t]*#.*$", "", text, flags=re.M)
    text = re.sub(r'^extern "C" \{$|^\}$', "", text, flags=re.M)
    text = re.sub(r"_Static_assert\(.*?\);", "", text, flags=re.S)
    return "".join(f"typedef int {name};\n" for name in FIXED) + text


def _declared(node: Any) -> tuple[str, bool, bool, int | None]:
    """(base type, is pointer, is const, array entries) of a declaration."""
    kind, pointer, count = node.type, False, None
    if isinstance(kind, c_ast.ArrayDecl):
        dim = kind.dim.value if isinstance(kind.dim, c_ast.Constant) else None
        count, kind = int(dim) if dim else None, kind.type
    if isinstance(kind, c_ast.PtrDecl):
        pointer, kind = True, kind.type
    base = kind.type
    name = " ".join(base.names) if isinstance(base, c_ast.IdentifierType) else type(base).__name__
    return name, pointer, "const" in kind.quals, count


def parse(text: str) -> Header:
    header = Header(constants=_constants(text))
    tree = c_parser.CParser().parse(_plain(text))
    for node in tree.ext:
        if isinstance(node, c_ast.Typedef) and node.name in FIXED:
            continue
        if isinstance(node, c_ast.Typedef) and isinstance(node.type.type, c_ast.Struct) and node.type.type.decls:
            members = []
            for decl in node.type.type.decls:
                base, pointer, _, count = _declared(decl)
                members.append(Member(decl.name, base + (" *" if pointer else ""), count))
                if decl.bitsize is not None:
                    header.other.append(f"{node.name}.{decl.name}: bit-field")
            header.structs[node.name] = members
        elif isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl):
            parameters = []
            for decl in node.type.args.params if node.type.args else ():
                base, pointer, const, count = _declared(decl)
                if base == "void" and not pointer:
                    continue
                parameters.append(Parameter(decl.name or "", base, pointer or count is not None, const))
            header.functions[node.name] = parameters
            base, pointer, _, _ = _declared(node.type)
            header.returns[node.name] = base + (" *" if pointer else "")
        else:
            header.other.append(f"{getattr(node, 'name', None)}: {type(node).__name__}")
    for name, size in re.findall(r"_Static_assert\(sizeof\((\w+)\) == (\d+)", text):
        header.static_sizes[name] = int(size)
    for name, member, offset in re.findall(r"_Static_assert\(offsetof\((\w+), (\w+)\) == (\d+)", text):
        header.static_offsets.setdefault(name, {})[member] = int(offset)
    for comment, name in re.findall(r"/\*((?:(?!\*/).)*)\*/\n\w+ (\w+)\(", text, re.S):
        header.comments[name] = re.sub(r"\s*\n \*\s?", " ", comment).strip()
    return header


def read() -> Header:
    return parse(HEADER.read_text())


# ---- rules of the header itself ----


def check_widths(header: Header) -> list[str]:
    """H1: every integer has a fixed width; no enum, union, bit-field, bool, size_t."""
    allowed = set(FIXED) | set(header.structs)
    wrong = list(header.other)
    for name, parameters in header.functions.items():
        if header.returns[name] != "int32_t":
            wrong.append(f"{name}: returns {header.returns[name]}")
        for p in parameters:
            if p.type not in allowed and not (p.pointer and p.const and p.type in ("char", "void")):
                wrong.append(f"{name}({p.name}): {p.type}")
            if not p.name:
                wrong.append(f"{name}: a parameter has no name")
            if p.type in header.structs and not p.pointer:
                wrong.append(f"{name}({p.name}): a struct by value")
    for name, members in header.structs.items():
        for m in members:
            if m.type not in FIXED and (m.type, m.count is None) != ("char", False):
                wrong.append(f"{name}.{m.name}: {m.type}")
    return wrong


def _section(comment: str, section: str) -> re.Match[str] | None:
    """`Errors:` may say that it is ordered."""
    return re.search(rf"\b{section}(?:, in this order[^:]*)?: ", comment)


def check_comments(header: Header) -> list[str]:
    """Each prototype has its comment block, with every section in order, none of them empty."""
    wrong = []
    for name in header.functions:
        comment = header.comments.get(name, "")
        places = [match.start() if (match := _section(comment, section)) else -1 for section in SECTIONS]
        missing = [section for section, place in zip(SECTIONS, places, strict=True) if place < 0]
        if missing:
            wrong.append(f"{name}: its comment lacks {', '.join(missing)}")
        elif places != sorted(places):
            wrong.append(f"{name}: the sections of its comment are out of order")
        elif places[0] == 0:
            wrong.append(f"{name}: its comment does not say what it does")
        elif not re.search(r"Since: \d+$", comment):
            wrong.append(f"{name}: Since names no version")
    return wrong


def layout(header: Header, name: str) -> ctypes.Structure:
    """A ctypes class with the struct's members, as this machine's C lays them out."""
    kinds = {**FIXED, "char": ctypes.c_char}
    fields = [(m.name, kinds[m.type] if m.count is None else kinds[m.type] * m.count) for m in header.structs[name]]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def offsets(structure: Any) -> dict[str, int]:
    return {name: getattr(structure, name).offset for name, *_ in structure._fields_}


_PADDING = re.compile(r"(pad|reserved)\d*$")


def check_static_asserts(header: Header) -> list[str]:
    """The header's own numbers are right, complete, and no struct has a hole that nobody named."""
    wrong = []
    for name in header.structs:
        structure = layout(header, name)
        if header.static_sizes.get(name) != ctypes.sizeof(structure):
            wrong.append(f"{name}: {header.static_sizes.get(name)} bytes asserted, {ctypes.sizeof(structure)} computed")
        found = offsets(structure)
        asserted = header.static_offsets.get(name, {})
        for member, offset in found.items():
            if member in asserted and asserted[member] != offset:
                wrong.append(f"{name}.{member}: offset {asserted[member]} asserted, {offset} computed")
            elif member not in asserted and not _PADDING.match(member):
                wrong.append(f"{name}.{member}: offset not asserted")
        wrong += [f"{name}.{member}: no such member" for member in asserted.keys() - found.keys()]
        end = 0
        for member, _ in structure._fields_:
            if found[member] != end:
                wrong.append(f"{name}.{member}: a hole of {found[member] - end} bytes before it")
            end = found[member] + getattr(structure, member).size
        if end != ctypes.sizeof(structure):
            wrong.append(f"{name}: {ctypes.sizeof(structure) - end} bytes of padding at its end")
    return wrong


# ---- the header against Python ----


def python_name(c_name: str) -> str:
    """Without the prefix, and without "_get", which only keeps functions and structs apart."""
    return c_name.removeprefix("kvr_").removesuffix("_get")


def check_functions(
    header: Header, functions: Iterable[str], python_only: Iterable[str], c_only: Iterable[str]
) -> list[str]:
    """One list of functions: the header's and _api.FUNCTIONS, but for the named exceptions."""
    from_c = {python_name(name) for name in header.functions if name not in set(c_only)}
    from_python = set(functions) - set(python_only)
    wrong = [f"{name}: in the header, not in _api" for name in sorted(from_c - from_python)]
    wrong += [f"{name}: in _api, not in the header" for name in sorted(from_python - from_c)]
    wrong += [f"{name}: named as an exception, but in no list" for name in sorted(set(python_only) - set(functions))]
    wrong += [
        f"{name}: named as an exception, but not in the header" for name in sorted(set(c_only) - set(header.functions))
    ]
    return wrong


# Parameters that a buffer, a str or a returned value stands for.
_IMPLIED = {"nbytes": "data", "count": "slots", "key_count": "keys", "manifest_nbytes": "manifest", "capacity": "slots"}
_IMPLIED_IN = {
    "kvr_region_placement": {"capacity": "nodes"},
    "kvr_queue_completed": {"capacity": "operations"},
    "kvr_quarantine_get": {"capacity": "operations"},
    "kvr_copy_submit": {"count": "lengths", "after_count": "after"},
    "kvr_copy_slots": {"mapping_count": "mappings", "segment_count": "segments", "after_count": "after"},
}
_PYTHON_PARAMETER = {"key_stride_bytes": "key_stride"}


def python_parameters(header: Header, c_name: str) -> list[str]:
    """Names that the Python form must have in the header's order (crc32c: data first, since value has a default)."""
    parameters = header.functions[c_name]
    names = {p.name for p in parameters}
    buffers = {p.name for p in parameters if p.pointer}
    result = []
    implied = {**_IMPLIED, **_IMPLIED_IN.get(c_name, {})}
    for p in parameters:
        if p.name == "out" or p.name.startswith("out_"):
            continue
        if p.name in implied and implied[p.name] in names and implied[p.name] in buffers:
            continue
        if p.name == "capacity_nbytes":
            continue
        result.append(_PYTHON_PARAMETER.get(p.name, p.name))
    if c_name == "kvr_crc32c":
        result.sort()
    return result


def check_signatures(header: Header, protocol: type, c_only: Iterable[str]) -> list[str]:
    """Parameter names of _api.Backend against the header's."""
    wrong = []
    for c_name in header.functions:
        if c_name in set(c_only):
            continue
        name = python_name(c_name)
        found = list(inspect.signature(getattr(protocol, name)).parameters)[1:]
        expected = python_parameters(header, c_name)
        if found != expected:
            wrong.append(f"{name}: parameters {found}, the header has {expected}")
    return wrong


def check_module(module: Any, protocol: type, functions: Iterable[str]) -> list[str]:
    """A backend module has every function, callable, with the parameter names of _api.Backend."""
    wrong = []
    for name in functions:
        function = getattr(module, name, None)
        if not callable(function):
            wrong.append(f"{module.__name__}.{name}: absent")
            continue
        expected = list(inspect.signature(getattr(protocol, name)).parameters.values())[1:]
        try:
            found = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            wrong.append(f"{module.__name__}.{name}: has no readable signature")
            continue
        if [(p.name, p.default) for p in found] != [(p.name, p.default) for p in expected]:
            wrong.append(
                f"{module.__name__}.{name}: parameters {[str(p) for p in found]}, expected {[str(p) for p in expected]}"
            )
    return wrong


def check_numbers(header: Header, prefix: str, table: Mapping[int, str]) -> list[str]:
    """The header's constants of a prefix, {number: name}, against a table of the same."""
    expected = {value: name.removeprefix(prefix) for name, value in header.constants.items() if name.startswith(prefix)}
    wrong = [
        f"{prefix}{expected[n]} = {n}: missing, or named otherwise" for n in expected if table.get(n) != expected[n]
    ]
    return wrong + [f"{n} ({table[n]}): not in the header" for n in table if n not in expected]


def check_statuses(header: Header, status: Mapping[int, tuple[str, type]]) -> list[str]:
    return check_numbers(header, "KVR_ERROR_", {number: name for number, (name, _) in status.items()})


def check_details(header: Header, details: Mapping[int, str], text: str) -> list[str]:
    """Every detail has a text, and no text uses a value that the header does not give a meaning."""
    numbers = {value: name for name, value in header.constants.items() if name.startswith("KVR_DETAIL_")}
    wrong = [f"{name}: no text" for number, name in numbers.items() if number not in details]
    wrong += [f"detail {number}: not in the header" for number in details if number not in numbers]
    for number, name in numbers.items():
        line = re.search(rf"#define {name} \d+ +/\*(.*?)\*/", text)
        given = {int(digit) for digit in re.findall(r"\bv(\d)\b", line.group(1))} if line else set()
        used = {int(digit) for digit in re.findall(r"\{(?:\w*?)(\d)\}", details.get(number, ""))}
        wrong += [f"{name}: its text uses value {i}, which the header does not name" for i in sorted(used - given)]
    return wrong


def check_constants(header: Header, module: ModuleType) -> list[str]:
    """Every integer of a module whose name is a header constant (with or without KVR_) has the header's value."""
    wrong = []
    for name, value in vars(module).items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        c_name = name if name.startswith("KVR_") else "KVR_" + name
        if c_name in header.constants and header.constants[c_name] != value:
            wrong.append(f"{module.__name__}.{name} = {value}, {c_name} = {header.constants[c_name]}")
    return wrong


def check_structure(header: Header, name: str, structure: Any) -> list[str]:
    """A ctypes Structure against the header's struct: members, types by size, offsets, size."""
    expected = layout(header, name)
    if [f[0] for f in structure._fields_] != [f[0] for f in expected._fields_]:
        return [
            f"{name}: members {[f[0] for f in structure._fields_]}, the header has {[f[0] for f in expected._fields_]}"
        ]
    wrong = []
    for (member, found), (_, want) in zip(structure._fields_, expected._fields_, strict=True):
        if getattr(structure, member).offset != getattr(expected, member).offset:
            wrong.append(f"{name}.{member}: offset {getattr(structure, member).offset}")
        if _shape(found) != _shape(want):
            wrong.append(f"{name}.{member}: {_shape(found)}, the header has {_shape(want)}")
    if ctypes.sizeof(structure) != ctypes.sizeof(expected):
        wrong.append(f"{name}: {ctypes.sizeof(structure)} bytes, the header has {ctypes.sizeof(expected)}")
    return wrong


def check_abi(header: Header, abi: Mapping[str, Any]) -> list[str]:
    """What the extension's C compiler saw: sizes, offsets and constants, against this reading of the header."""
    wrong = []
    for name in header.structs:
        expected = layout(header, name)
        found = abi["structs"].get(name)
        if found is None:
            wrong.append(f"{name}: not reported by the extension")
            continue
        if found["size"] != ctypes.sizeof(expected):
            wrong.append(f"{name}: the extension has {found['size']} bytes, the header {ctypes.sizeof(expected)}")
        named = {member: offset for member, offset in offsets(expected).items() if not _PADDING.match(member)}
        seen = {member: offset for member, offset in found["offsets"].items() if not _PADDING.match(member)}
        if seen != named:
            wrong.append(
                f"{name}: the extension and the header differ in {sorted(set(seen.items()) ^ set(named.items()))}"
            )
    wrong += [
        f"{name}: reported by the extension, not in the header" for name in abi["structs"] if name not in header.structs
    ]
    for name, value in abi.get("constants", {}).items():
        if header.constants.get(name) != value:
            wrong.append(f"{name}: the extension has {value}, the header {header.constants.get(name)}")
    return wrong


def check_same_text(found: str, expected: str, name: str) -> list[str]:
    """Two texts are equal; else the first line that differs."""
    for number, (a, b) in enumerate(zip_longest(found.splitlines(True), expected.splitlines(True)), start=1):
        if a != b:
            return [f"{name}:{number}: {a!r}, generated {b!r}"]
    return []


def _shape(kind: Any) -> tuple[int, bool, int]:
    """(bytes of an entry, signed, entries); char and uint8_t arrays are the same bytes."""
    count = 1
    if hasattr(kind, "_length_") and hasattr(kind._type_, "_type_"):
        count, kind = kind._length_, kind._type_
    size = ctypes.sizeof(kind)
    return size, size > 1 and kind(-1).value < 0, count
