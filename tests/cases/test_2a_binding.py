"""Cases G1 and G3: integers through the boundary, and an extension that is not of this install."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import kvreuse
from kvreuse import _api, errors

PACKAGE = Path(kvreuse.__file__).parent


# ---- G1 ----


@pytest.mark.parametrize("value", [0, -1, 2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1, -(2**63)])
def test_g1_integers_come_back_whole(backend, value):
    """G1, H7: nothing is cut to 32 bits or changes its sign, numpy's integers neither."""
    assert backend.echo(value) == value
    assert type(backend.echo(value)) is int
    assert backend.echo(np.int64(value)) == value


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**64 + 5])
def test_g1_what_does_not_fit_is_a_range_error(backend, value):
    """G1, H7: RangeError that names the number; nothing wraps."""
    with pytest.raises(errors.RangeError, match=str(value)):
        backend.echo(value)


@pytest.mark.parametrize("value", [1.5, True, None, np.bool_(True), np.float64(1), "1", b"1"])
def test_g1_what_is_no_integer_is_a_type_error(backend, value):
    """G1, H7: bool, float, None are TypeError, not 1 and not 0."""
    with pytest.raises(TypeError, match="must be an integer"):
        backend.echo(value)


# ---- G3 ----


@pytest.fixture
def installed_with(tmp_path, run_python):
    """Import a copy of the package whose extension is a stub with these lines."""
    folder = tmp_path / "other" / "kvreuse"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("_core.*", "__pycache__", "native"))

    def run(stub, word, code="import kvreuse"):
        (folder / "_core.py").write_text(stub)
        return folder, run_python(code, env={"PYTHONPATH": str(folder.parent), "KVREUSE_BACKEND": word})

    return run


STUB = "def abi_version(): return {abi}\ndef _struct_nbytes(): return {sizes}\n"


def refused(folder, done) -> str:
    """The import failed with both paths in its text, and nothing else was taken instead."""
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert str(folder / "_core.py") in last
    assert str(folder / "_select.py") in last
    return last


@pytest.mark.parametrize("word", ["auto", "core"])
def test_g3_extension_of_another_abi_is_refused(installed_with, word):
    """G3: ImportError with both versions and both paths; no silent fallback."""
    folder, done = installed_with(STUB.format(abi=_api.ABI_VERSION + 1, sizes=_api.STRUCT_NBYTES), word)
    text = refused(folder, done)
    assert f"ABI version {_api.ABI_VERSION + 1}" in text
    assert f"needs {_api.ABI_VERSION}" in text


@pytest.mark.parametrize(("word", "name"), [("core", "kvr_record"), *(("auto", name) for name in _api.STRUCT_NBYTES)])
def test_g3_a_record_that_is_8_bytes_larger_is_refused(installed_with, word, name):
    """G3, H1: the same ABI version and one larger struct: ImportError with both sizes, versions and paths."""
    nbytes = _api.STRUCT_NBYTES[name]
    folder, done = installed_with(STUB.format(abi=1, sizes=_api.STRUCT_NBYTES | {name: nbytes + 8}), word)
    text = refused(folder, done)
    assert f"{name} of {nbytes + 8} bytes, expected {nbytes}" in text
    assert text.count("ABI version 1") == 2


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({}, "kvr_error of no bytes, expected 104"),
        (_api.STRUCT_NBYTES | {"kvr_new": 8}, "kvr_new of 8 bytes, expected none"),
    ],
)
def test_g3_a_record_that_only_one_side_has_is_refused(installed_with, sizes, complaint):
    """G3: a struct that is absent, or that this side does not know, is named."""
    folder, done = installed_with(STUB.format(abi=1, sizes=sizes), "auto")
    assert complaint in refused(folder, done)


def test_g3_extension_that_cannot_say_its_sizes_is_refused(installed_with):
    """G3: an extension from before the question: ImportError, not AttributeError."""
    folder, done = installed_with("def abi_version(): return 1\n", "auto")
    refused(folder, done)


def test_g3_the_stub_is_taken_where_nothing_is_wrong(installed_with):
    """The tests above can fail: the same stub with the right answers is imported as the core."""
    stub = STUB.format(abi=1, sizes=_api.STRUCT_NBYTES)
    _, done = installed_with(stub, "auto", "import kvreuse; print(kvreuse.backend, kvreuse.__file__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("core ")
    assert "other" in done.stdout


def test_g3_forced_fallback_ignores_the_extension(installed_with):
    """G3: fallback by its word is no silent fallback; the wrong extension is not even imported."""
    code = "import kvreuse, sys; print(kvreuse.backend, 'kvreuse._core' in sys.modules)"
    _, done = installed_with(STUB.format(abi=2, sizes={}), "fallback", code)
    assert (done.returncode, done.stdout) == (0, "fallback False\n")


def test_g3_sizes_are_the_headers(backend, root_dir):
    """G3, H1: each backend's own sizes, _api's, and the _Static_asserts of include/kvreuse.h are one list."""
    text = (root_dir / "include" / "kvreuse.h").read_text()
    asserted = dict(re.findall(r"sizeof\((kvr_\w+)\) == (\d+)", text))
    assert {name: int(nbytes) for name, nbytes in asserted.items()} == _api.STRUCT_NBYTES
    assert backend._struct_nbytes() == _api.STRUCT_NBYTES
