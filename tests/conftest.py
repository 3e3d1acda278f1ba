"""Fixtures of every test: backends, shared data, leak guards, subprocesses; and the record for tests/census.py."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = {"core": "kvreuse._core", "fallback": "kvreuse._fallback"}


def _is_pure() -> bool:
    """A missing extension is an error, unless this run was told that the installed build has none."""
    return os.environ.get("KVREUSE_TEST_PURE") == "1" and importlib.util.find_spec(BACKENDS["core"]) is None


# ---- which backends ----


def pytest_addoption(parser):
    parser.addoption(
        "--backend",
        default=",".join(BACKENDS),
        metavar="LIST",
        help="backends to test, of core,fallback; tests of the others are deselected, never skipped",
    )


def _selected(config) -> list[str]:
    words = config.getoption("--backend").split(",")
    if not set(words) <= set(BACKENDS):
        raise pytest.UsageError(f"--backend {','.join(words)}: expected a list of {', '.join(BACKENDS)}")
    return words


def pytest_configure(config):
    _selected(config)


def pytest_collection_modifyitems(config, items):
    selected = _selected(config)
    kept, dropped = [], []
    for item in items:
        name = item.callspec.params.get("backend_name") if hasattr(item, "callspec") else None
        (kept if name is None or name in selected else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


_present = ["fallback"] if _is_pure() else list(BACKENDS)


@pytest.fixture(scope="session")
def backends_present() -> list[str]:
    return _present


@pytest.fixture(scope="session", params=_present)
def backend_name(request) -> str:
    """``"core"`` and ``"fallback"``: for what selects its backend at import, see `run_python`."""
    return request.param


@pytest.fixture(scope="session")
def backend(backend_name):
    """The backend module itself, `kvreuse._core` and `kvreuse._fallback`."""
    return importlib.import_module(BACKENDS[backend_name])


# ---- surroundings ----


@pytest.fixture(scope="session")
def root_dir() -> Path:
    """The checkout, or the unpacked sdist. Not where an installed package lies: see `kvreuse.__file__`."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The data that lies beside the checkout."""
    path = Path(os.environ.get("KVREUSE_SHARED") or ROOT.parent / "shared")
    if not path.is_dir():
        pytest.skip(f"no shared data: {path} (KVREUSE_SHARED names another place)")
    return path


@pytest.fixture
def run_python(tmp_path):
    """Run code in a fresh interpreter: ``run_python(code, *args, backend="core", env={...})`` -> CompletedProcess.

    Its directory is empty, so that it imports the installed package; a timeout kills it and raises TimeoutExpired.
    """

    def run(code, *args, backend=None, env=None, timeout=60.0):
        environ = {**os.environ, **(env or {})}
        if backend is not None:
            environ["KVREUSE_BACKEND"] = backend
        command = [sys.executable, "-X", "faulthandler", "-c", code, *map(str, args)]
        return subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run


@pytest.fixture(scope="session")
def fault_shim(tmp_path_factory) -> Path:
    """The library that makes system calls fail, for ``run_python(code, env={"LD_PRELOAD": fault_shim})``."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = ROOT / "tests" / "isolated" / "fault_shim.c"
    library = tmp_path_factory.mktemp("shim") / "fault_shim.so"
    command = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-O1", "-fPIC", "-shared", "-o", library, source, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return library


# ---- leaks ----


def _open_fds() -> dict[int, str]:
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        # The directory's own fd is closed by now.
        with contextlib.suppress(FileNotFoundError):
            fds[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return fds


def _mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:kvreuse" in line]


@contextlib.contextmanager
def _no_leaks():
    gc.collect()
    fds, mappings = _open_fds(), _mappings()
    yield
    gc.collect()
    fds_now, mappings_now = _open_fds(), _mappings()
    changed = sorted(set(fds_now.items()) ^ set(fds.items()))
    assert len(fds_now) == len(fds), f"open fds: {len(fds)} before, {len(fds_now)} after; changed: {changed}"
    assert mappings_now == mappings, "mappings of kvreuse memory changed"


@pytest.fixture(scope="session")
def leak_guard():
    """``with leak_guard():`` fails if fds or mappings of kvreuse memory differ after the block."""
    return _no_leaks


@pytest.fixture
def no_leaks():
    """The test ends with as many open fds, and the same mappings of kvreuse memory, as it began with."""
    with _no_leaks():
        yield


# ---- the record of outcomes, for tests/census.py ----

_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        _outcomes[report.nodeid] = f"skipped: {report.longrepr[2]}"
    elif report.when == "call" or report.failed:
        _outcomes[report.nodeid] = "ran"


def pytest_collectreport(report):
    if report.skipped:
        _outcomes[report.nodeid] = f"skipped: {report.longrepr[2]}"


def pytest_sessionfinish():
    path = os.environ.get("KVREUSE_CENSUS")
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(_outcomes, indent=1, sort_keys=True))
