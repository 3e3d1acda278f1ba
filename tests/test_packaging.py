"""The package as it is built and installed; and the guards of this suite, each shown to catch what it is for."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kvreuse

VERSION = kvreuse.__version__


# ---- building ----


@pytest.fixture
def source(tmp_path, root_dir):
    """A copy of what the build reads, with a one-line extension, so that a build takes no time."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE"):
        shutil.copy(root_dir / name, copy)
    (copy / "README.md").write_text("kvreuse\n")
    built = shutil.ignore_patterns("*.so", "__pycache__", "native", "*.pyx", "*.pxd")
    shutil.copytree(root_dir / "kvreuse", copy / "kvreuse", ignore=built)
    shutil.copytree(root_dir / "include", copy / "include")
    (copy / "kvreuse" / "native").mkdir()
    (copy / "kvreuse" / "native" / "toy.c").write_text("int toy(void);\nint toy(void) { return 7; }\n")
    (copy / "kvreuse" / "_capi.pxd").write_text('cdef extern from *:\n    "int toy(void);"\n    int toy() nogil\n')
    (copy / "kvreuse" / "_core.pyx").write_text("from kvreuse._capi cimport toy\n\ndef answer():\n    return toy()\n")
    return copy


def build(source, word, *command, **env):
    environ = {**os.environ, "KVREUSE_BUILD": word, **env}
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *command],
        cwd=source,
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def wheel_of(source):
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return wheel.name, archive.namelist()


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.mark.parametrize("word", ["", "Auto", "fallback"])
def test_unknown_build_word_is_refused(source, word):
    done = build(source, word, "--version")
    assert done.returncode == 1
    assert done.stderr.strip().endswith(f"KVREUSE_BUILD is {word!r}; expected auto, native or pure")


def test_pure_wheel_is_for_any_platform(source):
    done = build(source, "pure", "bdist_wheel")
    assert done.returncode == 0, done.stderr
    name, files = wheel_of(source)
    assert name == f"kvreuse-{VERSION}-py3-none-any.whl"
    assert {file.split("/")[0] for file in files} == {"kvreuse", f"kvreuse-{VERSION}.dist-info"}
    assert {"kvreuse/py.typed", "kvreuse/include/kvreuse.h", "kvreuse/errors.py"} <= set(files)
    assert {Path(file).suffix for file in files if file.startswith("kvreuse/")} <= {".py", ".pxd", ".typed", ".h"}


@needs_compiler
def test_native_wheel_has_the_extension(source):
    done = build(source, "native", "bdist_wheel", KVREUSE_STRICT="1")
    assert done.returncode == 0, done.stderr
    name, files = wheel_of(source)
    assert not name.endswith("-any.whl")
    assert [file for file in files if file.startswith("kvreuse/_core.") and file.endswith(".so")]


@pytest.mark.parametrize("broken", ["compiler", pytest.param("cython", marks=needs_compiler)])
def test_auto_build_that_fails_says_why_and_gets_no_platform_tag(source, tmp_path, broken):
    """STYLE.md, fact 2: an optional extension that failed leaves a platform-tagged wheel without it."""
    if broken == "compiler":
        env, why = {"CC": "/nonexistent/cc", "LDSHARED": "/nonexistent/cc"}, "/nonexistent/cc"
    else:
        (tmp_path / "Cython").mkdir()
        (tmp_path / "Cython" / "__init__.py").write_text("raise ModuleNotFoundError('no Cython here')\n")
        env, why = {"PYTHONPATH": str(tmp_path)}, "no Cython here"
    done = build(source, "auto", "bdist_wheel", **env)
    assert done.returncode == 0, done.stderr
    assert "kvreuse._core was NOT built" in done.stderr
    assert re.search(f"kvreuse: why: .*{why}", done.stderr)
    name, files = wheel_of(source)
    assert name == f"kvreuse-{VERSION}-py3-none-any.whl"
    assert not [file for file in files if file.endswith(".so")]

    assert build(source, "native", "bdist_wheel", **env).returncode != 0


@needs_compiler
def test_failed_auto_build_leaves_no_older_extension(source):
    assert build(source, "auto", "build_ext", "--inplace").returncode == 0
    assert list((source / "kvreuse").glob("_core.*.so"))
    (source / "kvreuse" / "native" / "toy.c").write_text("broken\n")
    assert "NOT built" in build(source, "auto", "build_ext", "--inplace").stderr
    assert not list(source.rglob("_core.*.so"))


@needs_compiler
def test_warnings_in_our_c_are_errors_only_when_strict(source):
    (source / "kvreuse" / "native" / "toy.c").write_text("int toy(void);\nint toy(void) { long x = 7; return x; }\n")
    done = build(source, "native", "build_ext", "--inplace", KVREUSE_STRICT="0")
    assert done.returncode == 0
    assert "-Wconversion" in done.stderr
    assert build(source, "native", "build_ext", "--inplace", "--force", KVREUSE_STRICT="1").returncode != 0


def test_sdist_has_what_a_build_and_the_tests_need(source):
    done = build(source, "pure", "sdist")
    assert done.returncode == 0, done.stderr
    with tarfile.open(source / "dist" / f"kvreuse-{VERSION}.tar.gz") as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    top = {"pyproject.toml", "setup.py", "setup.cfg", "MANIFEST.in", "LICENSE", "README.md", "PKG-INFO", ""}
    assert {file.split("/")[0] for file in files} == top | {"kvreuse", "kvreuse.egg-info", "include"}
    assert {
        "include/kvreuse.h",
        "kvreuse/_capi.pxd",
        "kvreuse/_core.pyx",
        "kvreuse/native/toy.c",
        "kvreuse/py.typed",
    } <= files
    assert not [file for file in files if file.endswith((".so", ".pyc"))]


# ---- the installed package ----


def test_version_agrees(root_dir):
    assert importlib.metadata.version("kvreuse") == VERSION
    assert f'"{VERSION}"' in (root_dir / "kvreuse" / "_version.py").read_text()


def test_every_extra_is_declared():
    extras = importlib.metadata.metadata("kvreuse").get_all("Provides-Extra")
    assert set(extras) == {"all", "bench", "cli", "dev", "plot", "test", "vllm"}


@pytest.fixture
def extension_path(backends_present):
    if "core" not in backends_present:
        pytest.skip("this build has no extension")
    spec = importlib.util.find_spec("kvreuse._core")
    assert spec is not None
    return spec.origin


def test_native_functions_are_visible_in_the_extension(extension_path):
    """STYLE.md, fact 7: the raw C API can be driven by ctypes."""
    assert ctypes.CDLL(extension_path).kvr_error_get


def test_extension_links_to_no_cuda(extension_path):
    """H10; and memfd_create goes by syscall, since an older libc has no such function."""
    needed, undefined = elf_imports(Path(extension_path).read_bytes())
    assert not [name for name in needed if "cuda" in name]
    assert undefined
    assert "memfd_create" not in undefined


def elf_imports(data):
    """Return the DT_NEEDED names and the undefined dynamic symbols of a 64-bit little-endian ELF file."""
    assert data[:6] == b"\x7fELF\x02\x01"

    def number(offset, nbytes):
        return int.from_bytes(data[offset : offset + nbytes], "little")

    def string(offset):
        return data[offset : data.index(b"\0", offset)].decode()

    sections = []
    for index in range(number(0x3C, 2)):
        at = number(0x28, 8) + index * number(0x3A, 2)
        sections.append((number(at + 4, 4), number(at + 24, 8), number(at + 32, 8), number(at + 40, 4)))
    needed, undefined = set(), set()
    for kind, offset, nbytes, link in sections:
        strings = sections[link][1] if link else 0
        if kind == 6:  # SHT_DYNAMIC
            entries = [(number(at, 8), number(at + 8, 8)) for at in range(offset, offset + nbytes, 16)]
            needed |= {string(strings + value) for tag, value in entries if tag == 1}  # DT_NEEDED
        elif kind == 11:  # SHT_DYNSYM
            names = [(number(at, 4), number(at + 6, 2)) for at in range(offset, offset + nbytes, 24)]
            undefined |= {string(strings + name) for name, section in names if name and section == 0}
    return needed, undefined


@needs_compiler
def test_elf_reader_sees_libraries_and_undefined_symbols(tmp_path):
    (tmp_path / "a.c").write_text(
        "int memfd_create(const char *, unsigned);\nint f(void) { return memfd_create(0, 0); }\n"
    )
    (tmp_path / "b.c").write_text("int g(void) { return 0; }\n")
    for command in (
        ["cc", "-shared", "-fPIC", "-o", "libcuda.so.1", "-Wl,-soname,libcuda.so.1", "b.c"],
        ["cc", "-shared", "-fPIC", "-o", "a.so", "a.c", "-Wl,--no-as-needed", "./libcuda.so.1"],
    ):
        subprocess.run(command, cwd=tmp_path, timeout=60, check=True)
    needed, undefined = elf_imports((tmp_path / "a.so").read_bytes())
    assert "libcuda.so.1" in needed
    assert "memfd_create" in undefined


# ---- guards ----


def test_census_canary():
    pytest.skip("always: tests/census.py must report this one")


def census(root_dir, tmp_path, *records):
    paths = []
    for index, record in enumerate(records):
        paths.append(tmp_path / f"{index}.json")
        paths[-1].write_text(json.dumps(record))
    return subprocess.run(
        [sys.executable, root_dir / "tests" / "census.py", *paths],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


CANARY = {"tests/test_packaging.py::test_census_canary": "skipped: always"}


def test_census_accepts_a_test_that_some_leg_runs(root_dir, tmp_path):
    done = census(root_dir, tmp_path, {**CANARY, "a": "ran", "b": "skipped: no gpu"}, {**CANARY, "b": "ran"})
    assert done.returncode == 0, done.stdout
    assert "test_census_canary (the canary" in done.stdout


def test_census_finds_a_test_that_no_leg_runs(root_dir, tmp_path):
    done = census(root_dir, tmp_path, {**CANARY, "b": "skipped: no gpu"}, {**CANARY, "b": "skipped: no gpu"}, CANARY)
    assert done.returncode == 1
    assert "skipped in every leg: b (NOT ALLOWED; skipped: no gpu)" in done.stdout


def test_census_finds_a_missing_canary(root_dir, tmp_path):
    assert census(root_dir, tmp_path, {"a": "ran"}).returncode == 1


def test_leak_guard_catches_an_open_fd(leak_guard):
    fds = []
    with pytest.raises(AssertionError, match=r"open fds: \d+ before"), leak_guard():
        fds.append(os.open("/dev/null", os.O_RDONLY))
    os.close(fds[0])


def test_leak_guard_catches_a_mapping(leak_guard):
    fd = os.memfd_create("kvreuse-planted")
    os.ftruncate(fd, mmap.PAGESIZE)
    mappings = []

    def plant():
        mappings.append(mmap.mmap(fd, mmap.PAGESIZE))
        os.close(fd)  # mmap has dup'ed it: as many fds as before

    with pytest.raises(AssertionError, match="mappings of kvreuse memory changed"), leak_guard():
        plant()
    mappings[0].close()


def test_no_leaks_passes_where_all_is_closed(no_leaks):
    os.close(os.open("/dev/null", os.O_RDONLY))


def run_check(root_dir, script, *args):
    return subprocess.run(
        [sys.executable, root_dir / ".ci" / script, *args], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("module", "code", "problem"),
    [
        ("errors", "from .parts import Part", "errors may not import parts"),
        ("errors", "def late():\n    from kvreuse import parts", "errors may not import parts"),
        ("keeper/server", "from .. import replay", "keeper.server may not import replay"),
        ("parts", "import ctypes.util", "only _ctypes_*.py may import ctypes"),
        ("novelty", "", "has no layer"),
    ],
)
def test_layering_check_catches_a_violation(root_dir, tmp_path, module, code, problem):
    for name, text in {
        "__init__": "",
        "errors": "",
        "parts": "from . import errors",
        "replay": "",
        module: code,
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    done = run_check(root_dir, "layers.py", tmp_path)
    assert done.returncode == 1
    assert problem in done.stdout
    assert "layers: 1 problems" in done.stdout


def test_hint_check_catches_a_function_that_takes_the_gil(root_dir, tmp_path):
    """STYLE.md, fact 5."""
    text = "cdef void f() {}nogil:\n    pass\n\ndef g():\n    with nogil:\n        f()\n"
    (tmp_path / "good.pyx").write_text(text.format("noexcept "))
    (tmp_path / "bad.pyx").write_text(text.format(""))
    assert run_check(root_dir, "hints.py", tmp_path / "good.pyx").returncode == 0
    assert run_check(root_dir, "hints.py", tmp_path / "bad.pyx").returncode == 1


@needs_compiler
def test_layout_assertions_hold_here_and_catch_a_wrong_one(root_dir, tmp_path):
    header = root_dir / "include" / "kvreuse.h"
    text = run_check(root_dir, "sizes.py", header).stdout
    assert len(re.findall(r"^_Static_assert\(offsetof", text, re.MULTILINE)) > 50
    wrong = text.replace("sizeof(kvr_record) == 64", "sizeof(kvr_record) == 60")
    assert wrong != text
    for source, status in ((text, 0), (wrong, 1)):
        (tmp_path / "sizes.c").write_text(source)
        command = ["cc", "-std=c11", "-fsyntax-only", f"-I{header.parent}", tmp_path / "sizes.c"]
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == status


@pytest.fixture
def run_suite(root_dir, tmp_path):
    """Run this conftest.py over one test, with a package that has no extension."""
    suite = tmp_path / "tests"
    suite.mkdir()
    shutil.copy(root_dir / "tests" / "conftest.py", suite)
    (suite / "test_one.py").write_text("def test_one(backend):\n    assert backend.__name__.startswith('kvreuse._')\n")
    package = tmp_path / "package" / "kvreuse"
    package.mkdir(parents=True)
    # An editable install's finder would find the real extension.
    finders = "[f for f in sys.meta_path if 'editable' not in repr(f)]"
    (package / "__init__.py").write_text(f"import sys\nsys.meta_path[:] = {finders}\n")
    (package / "_fallback.py").touch()

    def run(*args, **env):
        environ = {
            **os.environ,
            "PYTHONPATH": str(package.parent),
            "KVREUSE_TEST_PURE": "",
            "KVREUSE_CENSUS": "",
            **env,
        }
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, suite, *args]
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def test_backend_option_deselects(run_suite):
    done = run_suite("--backend", "fallback")
    assert "1 passed, 1 deselected" in done.stdout
    assert done.returncode == 0


def test_unknown_backend_is_refused(run_suite):
    done = run_suite("--backend", "fallback,cuda")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "expected a list of core, fallback" in done.stderr


def test_missing_extension_is_an_error_unless_the_run_is_pure(run_suite):
    assert "1 passed, 1 error" in run_suite().stdout
    done = run_suite(KVREUSE_TEST_PURE="1")
    assert "1 passed in" in done.stdout
    assert done.returncode == 0


def test_run_python_selects_the_backend(run_python, backend_name):
    done = run_python("import kvreuse, sys; print(kvreuse.backend, sys.argv[1:])", 7, backend=backend_name)
    assert (done.stdout, done.returncode) == (f"{backend_name} ['7']\n", 0), done.stderr
