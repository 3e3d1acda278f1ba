"""The header, _api, _status, _ctypes_structs and both backends say the same; each check can fail (planted faults)."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import random
import re
import subprocess
import sys
import types
from pathlib import Path

import header as h
import pytest

from kvreuse import _api, _ctypes_structs, _status, errors

TEXT = h.HEADER.read_text()
PARSED = h.parse(TEXT)
C_ONLY = {"kvr_error_get": "Python gets the record as an exception"}
HERE = Path(__file__).resolve().parent


def doctored(old: str, new: str) -> h.Header:
    """The header with one place changed."""
    assert TEXT.count(old) >= 1, f"the header has no {old!r} any more: plant this fault elsewhere"
    return h.parse(TEXT.replace(old, new, 1))


def reports(complaints: list[str], *words: str) -> None:
    """The check complains, and its complaint names the fault."""
    assert any(all(word in complaint for word in words) for complaint in complaints), complaints


# ---- the header itself ----


def test_every_width_is_fixed():
    """H1"""
    assert h.check_widths(PARSED) == []
    assert len(PARSED.functions) > 40
    assert len(PARSED.structs) > 12


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("kvr_host_allocate(int64_t nbytes,", "kvr_host_allocate(long nbytes,", ("kvr_host_allocate(nbytes)", "long")),
        ("kvr_crc32c(uint32_t value,", "kvr_crc32c(unsigned value,", ("kvr_crc32c(value)", "unsigned")),
        ("kvr_region_close(int64_t region)", "kvr_region_close(int64_t)", ("kvr_region_close", "no name")),
        ("int32_t kvr_abi_version(void);", "int kvr_abi_version(void);", ("kvr_abi_version", "returns int")),
        ("    int64_t mappings;", "    int mappings;", ("kvr_handle_counts.mappings", "int")),
        ("    int64_t mappings;", "    int64_t mappings : 40;", ("kvr_handle_counts.mappings", "bit-field")),
        ("    int64_t mappings;", "    _Bool mappings;", ("kvr_handle_counts.mappings", "_Bool")),
        ("int32_t kvr_abi_version(void);", "enum kvr_e { A };\nint32_t kvr_abi_version(void);", ("Decl",)),
        ("int32_t kvr_abi_version(void);", "typedef long kvr_size;\nint32_t kvr_abi_version(void);", ("kvr_size",)),
        ("kvr_error_get(kvr_error *out)", "kvr_error_get(kvr_error out)", ("kvr_error_get", "by value")),
    ],
)
def test_width_check_can_fail(old, new, words):
    """H1: planted faults."""
    reports(h.check_widths(doctored(old, new)), *words)


def test_every_prototype_is_documented():
    """In, Out, Owner, After failure, Errors, Threads, Since above every one."""
    assert h.check_comments(PARSED) == []


@pytest.mark.parametrize("section", h.SECTIONS)
def test_comment_check_can_fail(section):
    """Planted faults: a section that is missing in one comment, and one without any comment."""
    comment = PARSED.comments["kvr_region_close"]
    assert f"{section}: " in comment
    changed = h.parse(TEXT)
    changed.comments["kvr_region_close"] = comment.replace(f"{section}: ", "")
    reports(h.check_comments(changed), "kvr_region_close", section)
    del changed.comments["kvr_region_map"]
    reports(h.check_comments(changed), "kvr_region_map", *h.SECTIONS)
    changed.comments["kvr_region_map"] = (
        comment.replace("Out: ", "@").replace("Owner: ", "Out: ").replace("@", "Owner: ")
    )
    reports(h.check_comments(changed), "kvr_region_map", "order")


def test_static_asserts_are_right_and_complete():
    """H1: sizes and offsets as any C compiler must see them; no unnamed padding."""
    assert h.check_static_asserts(PARSED) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("sizeof(kvr_record) == 64", "sizeof(kvr_record) == 72", ("kvr_record", "72")),
        ("offsetof(kvr_link, prev) == 4", "offsetof(kvr_link, prev) == 8", ("kvr_link.prev", "8")),
        ("offsetof(kvr_link, prev) == 4", "offsetof(kvr_link, gone) == 4", ("kvr_link.gone", "no such member")),
        ("offsetof(kvr_link, prev) == 4", "offsetof(kvr_link, gone) == 4", ("kvr_link.prev", "not asserted")),
        ("    uint32_t data_crc; ", "    uint8_t data_crc; ", ("kvr_record.record_crc", "hole")),
        (
            "    int32_t use_count;   /* views",
            "    uint8_t use_count;   /* views",
            ("kvr_mapping_info", "padding at its end"),
        ),
    ],
)
def test_static_assert_check_can_fail(old, new, words):
    reports(h.check_static_asserts(doctored(old, new)), *words)


def test_offsets_agree_with_a_compiler(tmp_path):
    """The header compiles alone, as C11 and pedantic, with its own asserts; where there is a compiler."""
    source = tmp_path / "t.c"
    source.write_text('#include "kvreuse.h"\nint main(void) { return 0; }\n')
    command = [
        "cc",
        "-std=c11",
        "-pedantic",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsyntax-only",
        f"-I{h.HEADER.parent}",
        str(source),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("no C compiler (cc)")
    assert done.returncode == 0, done.stderr


# ---- one list of functions ----


def test_functions_are_one_list():
    """H8"""
    assert h.check_functions(PARSED, _api.FUNCTIONS, _api.PYTHON_ONLY, C_ONLY) == []
    assert h.check_signatures(PARSED, _api.Backend, C_ONLY) == []


def test_function_check_can_fail():
    """Planted: a function on one side only, a stale exception, a parameter of another name."""
    check = h.check_functions
    reports(check(PARSED, _api.FUNCTIONS[:-1], _api.PYTHON_ONLY, C_ONLY), _api.FUNCTIONS[-1], "not in _api")
    reports(check(PARSED, [*_api.FUNCTIONS, "extra"], _api.PYTHON_ONLY, C_ONLY), "extra", "not in the header")
    reports(check(PARSED, _api.FUNCTIONS, {"gone": "x", **_api.PYTHON_ONLY}, C_ONLY), "gone", "exception")
    reports(check(PARSED, _api.FUNCTIONS, _api.PYTHON_ONLY, {"kvr_gone": "x", **C_ONLY}), "kvr_gone", "exception")
    reports(
        h.check_signatures(
            doctored("kvr_region_map(int64_t region,", "kvr_region_map(int64_t area,"), _api.Backend, C_ONLY
        ),
        "area",
    )


def test_a_backend_has_every_function(backend):
    """H8, G2: names, parameter names and defaults; no name is ever absent or None."""
    assert h.check_module(backend, _api.Backend, _api.FUNCTIONS) == []
    assert backend.abi_version() == _api.ABI_VERSION == PARSED.constants["KVR_ABI_VERSION"]


def test_module_check_can_fail(backend):
    """Planted: a function that is absent, that is None, that has another parameter, another default."""
    fake = types.SimpleNamespace(__name__="fake", **{name: getattr(backend, name) for name in _api.FUNCTIONS})
    assert h.check_module(fake, _api.Backend, _api.FUNCTIONS) == []
    del fake.echo
    fake.table_close = None
    fake.region_close = lambda handle: None
    fake.crc32c = lambda data, value: 0
    complaints = h.check_module(fake, _api.Backend, _api.FUNCTIONS)
    assert len(complaints) == 4, complaints
    for name in ("echo", "table_close", "region_close", "crc32c"):
        reports(complaints, name)


# ---- numbers ----


def test_statuses():
    assert h.check_statuses(PARSED, _status.STATUS) == []
    leaves = {cls for _, cls in _status.STATUS.values()}
    assert leaves == {
        e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.KVReuseError)
    } - {errors.KVReuseError}
    assert len(leaves) == len(_status.STATUS), "a status and its exception belong to each other alone"


def test_details():
    """Every detail has a text, which uses only values that the header names."""
    assert h.check_details(PARSED, _status.DETAILS, TEXT) == []


def test_every_message_can_be_built():
    """An error record of any detail and any values becomes an exception, never another error."""
    for detail in _status.DETAILS:
        for values in ((), (0, 0, 0, 0), (-1, 2**63 - 1, -(2**63), 10**6)):
            error = _status.make(-6, detail, values, "call")
            assert str(error)
            assert "{" not in str(error)


def test_names_of_sorts_kinds_roles_and_states():
    assert h.check_numbers(PARSED, "KVR_KIND_", _status.KINDS) == []
    assert h.check_numbers(PARSED, "KVR_SLOT_", {**_status.STATES, 1073741824: "COUNT_MAX"}) == []
    assert h.check_numbers(PARSED, "KVR_ROLE_", {n: name.upper() for n, name in _status.ROLES.items()}) == []
    assert set(_status.SORTS) == {v for k, v in PARSED.constants.items() if k.startswith("KVR_SORT_")}
    assert set(_status.SOURCES) == {v for k, v in PARSED.constants.items() if k.startswith("KVR_NATIVE_")}


def test_number_checks_can_fail():
    """Planted: renumbered, renamed, missing and surplus statuses and details; a text with an unnamed value."""
    wrong = dict(_status.STATUS)
    wrong[-6], wrong[-7] = wrong[-7], wrong[-6]
    reports(h.check_statuses(PARSED, wrong), "RANGE")
    reports(h.check_statuses(PARSED, {**_status.STATUS, -27: ("NEW", errors.RangeError)}), "-27")
    reports(h.check_statuses(doctored("KVR_ERROR_FORKED (-26)", "KVR_ERROR_FORKED (-27)"), _status.STATUS), "FORKED")
    reports(
        h.check_details(PARSED, {k: v for k, v in _status.DETAILS.items() if k != 7}, TEXT), "KIND_UNKNOWN", "no text"
    )
    reports(h.check_details(PARSED, {**_status.DETAILS, 999: "x"}, TEXT), "999")
    reports(h.check_details(PARSED, {**_status.DETAILS, 7: "kind {1}"}, TEXT), "KIND_UNKNOWN", "value 1")


def test_constants_of_the_fallback():
    """Every constant of the header, by its own name and value."""
    assert h.check_constants(PARSED, _ctypes_structs) == []
    assert {name for name in vars(_ctypes_structs) if name.startswith("KVR_")} == set(PARSED.constants)


def test_constant_check_can_fail():
    fake = types.ModuleType("fake")
    fake.KVR_KEY_NBYTES = 33
    reports(h.check_constants(PARSED, fake), "KVR_KEY_NBYTES = 33", "32")


def test_flags_and_errno_rule_are_the_fallbacks_own():
    """An errno becomes a status that the header has."""
    assert {*_status.ERRNO_STATUS.values()} <= _status.STATUS.keys()


# ---- layouts ----


@pytest.mark.parametrize("name", PARSED.structs)
def test_ctypes_structures(name):
    """H1: members, widths, signs and offsets of the fallback's structures."""
    assert h.check_structure(PARSED, name, getattr(_ctypes_structs, name)) == []


def _link(**changes):
    fields = {"chain_next": ctypes.c_int32, "prev": ctypes.c_int32, "next": ctypes.c_int32, "key_hash": ctypes.c_uint32}
    return type("kvr_link", (ctypes.Structure,), {"_fields_": list({**fields, **changes}.items())})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key_hash": ctypes.c_int32}, ("kvr_link.key_hash", "True")),
        ({"prev": ctypes.c_int64}, ("kvr_link.prev", "(8, True, 1)")),
        ({"prev": ctypes.c_int64}, ("kvr_link.next", "offset 16")),
        ({"extra": ctypes.c_int32}, ("kvr_link", "extra")),
        ({"next": ctypes.c_int16 * 2}, ("kvr_link.next", "(2, True, 2)")),
    ],
)
def test_structure_check_can_fail(changes, words):
    assert h.check_structure(PARSED, "kvr_link", _link()) == []
    reports(h.check_structure(PARSED, "kvr_link", _link(**changes)), *words)


@pytest.fixture
def core():
    """The extension; what is said about it cannot be asked of the fallback."""
    if os.environ.get("KVREUSE_TEST_PURE") == "1" and importlib.util.find_spec("kvreuse._core") is None:
        pytest.skip("this build has no extension (KVREUSE_TEST_PURE)")
    return importlib.import_module("kvreuse._core")


def test_the_compiler_saw_the_same_layouts(core):
    """H1, G3: _core._abi() is what the extension's C compiler made of the header."""
    assert h.check_abi(PARSED, core._abi()) == []


def test_abi_check_can_fail(core):
    """Planted: a struct of 8 bytes more, a moved member, a missing struct, another constant."""
    for old, new in (
        ("    uint32_t key_hash; ", "    uint32_t key_hash; int64_t more; "),
        ("    int32_t prev; ", "    int64_t prev; "),
        ("} kvr_link;", "} kvr_link;\ntypedef struct kvr_new { int64_t a; } kvr_new;"),
    ):
        assert h.check_abi(doctored(old, new), core._abi()) != []


# ---- the declarations that Cython reads ----


def _capi():
    """capi.py, the generator, imported from this directory."""
    return importlib.import_module("capi")


def _pxd() -> Path:
    return h.HEADER.parents[1] / "kvreuse" / "_capi.pxd"


def test_declarations_are_generated():
    """H1: _capi.pxd is what capi.py makes of the header, byte for byte; Cython itself does not check widths."""
    assert h.check_same_text(_pxd().read_text(), _capi().generate(TEXT), "_capi.pxd") == []


def test_declaration_check_can_fail():
    """Planted: another width in the header, a missing last line."""
    changed = _capi().generate(TEXT.replace("kvr_region_close(int64_t region)", "kvr_region_close(int32_t region)"))
    reports(h.check_same_text(_pxd().read_text(), changed, "_capi.pxd"), "kvr_region_close")
    text = _pxd().read_text()
    reports(h.check_same_text(text, text + "# more\n", "_capi.pxd"), "None")


def test_declarations_have_every_function_and_struct():
    """What the generator forgets would be forgotten in the file too."""
    text = _pxd().read_text()
    for name in [*PARSED.functions, *PARSED.structs]:
        assert re.search(rf"\b{name}\b", text), f"{name} is not declared"
    for line in text.splitlines():
        if match := re.search(r"\bint32_t (kvr_\w+)\(", line):
            assert "noexcept" in line, f"{match.group(1)} would be checked for Python errors"
            assert "nogil" in text


# ---- CRC32C ----

VECTORS = {
    bytes(32): 0x8A9136AA,  # RFC 3720, B.4
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"123456789": 0xE3069283,
    b"": 0,
    b"a": 0xC1D04330,
}


def crc32c_by_bits(data: bytes, value: int = 0) -> int:
    """CRC32C as its definition says, bit by bit."""
    value ^= 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def check_crc32c(crc32c) -> list[str]:
    """Known vectors; every size from 0 to 600; larger ones, unaligned starts, going on from a value."""
    wrong = [
        f"{data!r}: {crc32c(data):#x}, expected {value:#x}" for data, value in VECTORS.items() if crc32c(data) != value
    ]
    rng = random.Random(11)
    data = rng.randbytes(700)
    expected, running = [], 0
    for size in range(601):
        expected.append(running)
        running = crc32c_by_bits(data[size : size + 1], running)
    wrong += [f"size {size}" for size in range(601) if crc32c(data[:size]) != expected[size]]
    large = bytearray(rng.randbytes(70_000))
    for _ in range(24):
        start, size = rng.randrange(64), rng.choice([1023, 1024, 4096, 6144, 24_577, 65_521, rng.randrange(60_000)])
        cut = rng.randrange(size)
        piece = memoryview(large)[start : start + size]
        if crc32c(piece[cut:], crc32c(piece[:cut])) != crc32c(bytes(piece)):
            wrong.append(f"start {start}, size {size}, cut {cut}")
    if crc32c(bytes(large)) != crc32c_by_bits(bytes(large)):
        wrong.append("70000 bytes")
    return wrong


def test_crc32c(backend):
    """RFC 3720's vectors, and the definition at all sizes."""
    assert check_crc32c(backend.crc32c) == []


@pytest.mark.parametrize("value", [-1, 2**32, 2**63])
def test_crc32c_value_has_32_bits(backend, value):
    """H7"""
    with pytest.raises(errors.RangeError, match=str(value)):
        backend.crc32c(b"", value)


def test_crc32c_check_can_fail():
    """Planted: plain CRC32, a sum that forgets an odd tail, one that ignores where it goes on from."""
    import zlib

    assert check_crc32c(crc32c_by_bits) == []
    reports(check_crc32c(zlib.crc32), "0x8a9136aa")
    assert "size 9" in check_crc32c(
        lambda data, value=0: crc32c_by_bits(bytes(data)[: len(data) // 8 * 8 or len(data)], value)
    )
    reports(check_crc32c(lambda data, value=0: crc32c_by_bits(data)), "cut")


# ---- the extension's own symbols ----


def test_the_c_functions_are_there(core):
    """Every prototype has a body, and the raw calls keep 64 bits (with argtypes from the header)."""
    library = ctypes.CDLL(core.__file__)
    for name in PARSED.functions:
        assert hasattr(library, name), f"{name} is not exported"
    out = ctypes.c_int64()
    library.kvr_echo.argtypes = [h.FIXED[PARSED.functions["kvr_echo"][0].type], ctypes.POINTER(ctypes.c_int64)]
    library.kvr_echo.restype = ctypes.c_int32
    for value in (0x1_0000_0005, -(2**63), 2**63 - 1):
        assert library.kvr_echo(value, ctypes.byref(out)) == 0
        assert out.value == value


def test_nothing_links_to_the_driver(core):
    """H10, E10: no library of a driver is needed to load the extension."""
    needed = Path(core.__file__).read_bytes()
    assert b"libcuda.so" not in _needed(needed)


def _needed(elf: bytes) -> bytes:
    """The DT_NEEDED names of a 64-bit little-endian ELF file, joined."""
    section_offset = int.from_bytes(elf[40:48], "little")
    size, count = (int.from_bytes(elf[i : i + 2], "little") for i in (58, 60))
    headers = [elf[section_offset + i * size : section_offset + (i + 1) * size] for i in range(count)]
    field = lambda header, at, n=8: int.from_bytes(header[at : at + n], "little")  # noqa: E731
    names = b""
    for header in headers:
        if field(header, 4, 4) != 6:  # SHT_DYNAMIC
            continue
        strings = headers[field(header, 40, 4)]
        start = field(strings, 24)
        for at in range(field(header, 24), field(header, 24) + field(header, 32), 16):
            if int.from_bytes(elf[at : at + 8], "little") == 1:  # DT_NEEDED
                name = start + int.from_bytes(elf[at + 8 : at + 16], "little")
                names += elf[name : elf.index(b"\0", name)] + b"\n"
    assert b"libc.so" in names, "the names were not found"
    return names


def test_the_generator_runs_alone():
    """capi.py imports nothing of kvreuse, so that it works before the first build."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import capi; print('kvreuse' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
