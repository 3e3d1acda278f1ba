"""Cases E1, F4, F9 and F10: fd limits, and a machine without memfd_create."""

from __future__ import annotations

import errno
import json
import shutil
import struct
import subprocess

import pytest

# ---- E1 ----

E1 = """
import json, os, resource, tempfile
import kvreuse
from kvreuse import errors
from kvreuse._select import backend

PAGE = os.sysconf("SC_PAGESIZE")
provider = kvreuse.open_provider("host")
fds = lambda: len(os.listdir("/proc/self/fd"))
provider.allocate(PAGE).close()
folder = tempfile.gettempdir()  # opens a file when it is asked first
before = fds() - 1  # the listing's own
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
assert max(map(int, os.listdir("/proc/self/fd"))) == before, "fds have gaps"
soft = before + 8
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

def all_or_nothing(count):
    regions = []
    try:
        for _ in range(count):
            regions.append(provider.allocate(PAGE))
    except errors.TooManyFdsError as error:
        return len(regions), error
    finally:
        for region in regions:
            region.close()

made, error = all_or_nothing(16)
assert made == 8
assert (error.needed, error.soft, error.hard) == (1, soft, hard)
assert (error.call, error.native_source, error.native_code) == ("memfd_create", "errno", 24)
assert str(soft) in str(error) and str(hard) in str(error)
assert fds() - 1 == before
assert backend.handle_counts() == (0, 0, 0, 0, 0)
with provider.allocate(16 * PAGE) as region, region.map() as mapping, mapping.buffer as view:
    view[16 * PAGE - 1] = 1
# With no slot at all, each call that needs one says so, and needs one.
with provider.allocate(PAGE) as region, region.export() as shared:
    rest = []
    try:
        while True:
            rest.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for call in (lambda: provider.allocate(1), region.export, lambda: provider.import_region(shared),
                 lambda: backend.host_allocate(1, 1, "kvreuse", folder)):
        try:
            call()
        except errors.TooManyFdsError as error:
            assert (error.needed, error.soft, error.hard) == (1, soft, hard)
        else:
            raise AssertionError("no TooManyFdsError")
    os.close(rest.pop())
    provider.import_region(shared).close()
    region.export().close()
    for fd in rest:
        os.close(fd)
assert fds() - 1 == before
assert backend.handle_counts() == (0, 0, 0, 0, 0)
"""


def test_e1_too_many_fds(run_python, backend_name):
    """E1, H6: soft limit = open fds + 8, 16 regions: TooManyFdsError with needed, soft, hard; nothing is left; the same
    bytes in one region work. `needed` is what the refused call needs: each takes one fd.
    """
    done = run_python(E1, backend=backend_name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- F4 ----

F4 = """
import contextlib, os, resource, socket, struct
import kvreuse
from kvreuse import errors

provider = kvreuse.open_provider("host")
left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
fds = lambda: len(os.listdir("/proc/self/fd"))
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
with provider.allocate(4096) as region, region.export() as shared:
    before = fds()
    for free in (2, 0):
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=4i", *[shared.fileno()] * 4))]
        left.sendmsg([shared.to_bytes()], ancillary)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert max(map(int, os.listdir("/proc/self/fd"))) == before - 1, "fds have gaps"
        resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + free, hard))
        try:
            kvreuse.SharedHandle.recv(right)
        except errors.ProtocolError as error:
            assert (error.expected, error.got) == (1, free)
            assert f"expected 1 fd(s) with the record, got {free}" in str(error)
        else:
            raise AssertionError("no ProtocolError")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert fds() == before
        # The same connection works.
        shared.send(left)
        with kvreuse.SharedHandle.recv(right) as got, provider.import_region(got) as imported:
            assert imported.region_id == region.region_id
        assert fds() == before
left.close()
right.close()
"""


def test_f4_fd_limit_at_the_receiver(run_python, backend_name):
    """F4, H6: 4 fds sent with 2 and with 0 free slots: ProtocolError with what was expected (a record carries one) and
    got; the fd count is as before; with the limit raised the same connection works.
    """
    done = run_python(F4, backend=backend_name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- F9 ----

F9 = """
import fcntl, os
if hasattr(os, "memfd_create"):
    del os.memfd_create
for module in (os, fcntl):
    for name in [n for n in vars(module) if n.startswith(("MFD_", "F_SEAL_", "F_ADD_SEALS", "F_GET_SEALS"))]:
        delattr(module, name)
assert not hasattr(os, "memfd_create") and not hasattr(fcntl, "F_ADD_SEALS")
import kvreuse
provider = kvreuse.open_provider("host")
capability = provider.capabilities()[kvreuse.HandleKind.POSIX_FD]
assert capability.ok, capability
with provider.allocate(5000) as region, region.export() as shared, provider.import_region(shared) as imported:
    assert imported.observe().seals == 1 | 2 | 4
"""


def test_f9_python_without_memfd_and_seal_names(run_python, backend_name):
    """F9: os.memfd_create and all seal constants are missing: the memory is a sealed memfd all the same."""
    done = run_python(F9, backend=backend_name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def undefined_symbols(elf: bytes) -> set[str]:
    """Names that a 64-bit little-endian ELF file leaves to others."""
    offset, size, count = (
        struct.unpack_from("<Q", elf, 0x28)[0],
        *struct.unpack_from("<HH", elf, 0x3A),
    )
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    names = set()
    for _, kind, _, _, start, nbytes, link, _, _, entry in sections:
        if kind != 11:  # SHT_DYNSYM
            continue
        strings = sections[link][4]
        for at in range(start, start + nbytes, entry):
            name, _, _, section = struct.unpack_from("<IBBH", elf, at)
            if section == 0 and name:
                names.add(elf[strings + name : elf.index(b"\0", strings + name)].decode())
    return names


def test_f9_extension_needs_no_memfd_create(backend_name, backend):
    """F9: the extension calls it by number: no undefined memfd_create (glibc before 2.27 has none), nor getrandom."""
    if backend_name == "fallback":
        assert not hasattr(backend, "_abi"), "the fallback is Python: no symbols"
        return
    with open(backend.__file__, "rb") as file:
        names = undefined_symbols(file.read())
    assert {"syscall", "fcntl"} & {name.removesuffix("64") for name in names}, names
    assert not names & {"memfd_create", "getrandom", "move_pages"}


# ---- F10 ----

F10 = """
import ctypes, errno, json, os, sys
import kvreuse
from kvreuse import errors
from kvreuse._select import backend

shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
shim.call_name.restype = ctypes.c_char_p

def failing(code, call, *arguments):
    shim.arm(1, code)
    try:
        return call(*arguments)
    finally:
        seen = shim.disarm()
        assert seen and shim.call_name(1) == b"memfd_create"

code = int(sys.argv[1])
plain = kvreuse.open_provider("host")
fallback = kvreuse.open_provider("host", kvreuse.Profile.from_toml(
    "[reuse]\\nenabled = true\\n[handles]\\nfile_fallback = true\\n"))
off = kvreuse.open_provider("host", kvreuse.Profile.from_toml("[reuse]\\nenabled = true\\n"))
for provider in (plain, off):
    try:
        failing(code, provider.allocate, 5000)
    except errors.KVReuseError as error:
        assert (error.call, error.native_code) == ("memfd_create", code)
        said = [type(error).__name__, str(error)]
    else:
        raise AssertionError("no error")
assert plain.allocate(1).close() is None
with failing(code, fallback.allocate, 5000) as region:
    seen = region.observe()
    note = seen.reasons["memory"]
    assert "file" in note and errno.errorcode[code] in note, note
    assert (seen.observed_nbytes, seen.file_type) == (8192, "memory file")
    assert not seen.seals or not seen.seals & 2
    with region.map() as mapping, mapping.buffer as view:
        view[:4] = b"abcd"
    with region.export() as shared:
        try:
            plain.import_region(shared)
        except errors.PermissionDeniedError as error:
            assert "sealed" in str(error)
        else:
            raise AssertionError("an unsealed fd was taken")
        with fallback.import_region(shared) as again, again.map(kvreuse.Access.READ) as m, m.buffer as view:
            assert bytes(view[:5]) == b"abcd\\0"
with fallback.allocate(5000) as region:
    assert "memory" not in region.observe().reasons, "the fallback is for where memfd is refused"
# What is no refusal of memfd itself is not papered over by a file.
for other in (errno.EMFILE, errno.ENOMEM):
    try:
        failing(other, fallback.allocate, 5000)
    except errors.KVReuseError as error:
        assert error.native_code == other
    else:
        raise AssertionError("no error")
# No folder for the file either: the refusal of memfd_create is the error, with the cause.
import tempfile
def no_folder():
    raise FileNotFoundError("no usable temporary directory")
real, tempfile.gettempdir = tempfile.gettempdir, no_folder
try:
    failing(code, fallback.allocate, 5000)
except errors.KVReuseError as error:
    assert error.native_code == code and isinstance(error.__cause__, FileNotFoundError)
else:
    raise AssertionError("no error")
tempfile.gettempdir = real
shim.arm(1, code)
capability = plain._trial(kvreuse.HandleKind.POSIX_FD)
shim.disarm()
assert not capability.ok and errno.errorcode[code] in capability.reason
assert backend.handle_counts() == (0, 0, 0, 0, 0)
print(json.dumps([*said, note]))
"""


def test_f10_memfd_create_is_refused(run_python, backend_name, fault_shim):
    """F10, H5: EPERM, ENOSYS, EINVAL are three reasons; with a declared file fallback it works, observe() says so, and
    only who declares it imports such memory.
    """
    said = {}
    for code in (errno.EPERM, errno.ENOSYS, errno.EINVAL):
        done = run_python(F10, code, backend=backend_name, env={"LD_PRELOAD": str(fault_shim)})
        assert (done.returncode, done.stderr) == (0, "")
        said[code] = json.loads(done.stdout)
    assert [said[code][0] for code in said] == ["PermissionDeniedError", "NotSupportedError", "SystemCallError"]
    for i in (1, 2):
        assert len({words[i] for words in said.values()}) == 3
        assert all(errno.errorcode[code] in words[i] for code, words in said.items())


@pytest.mark.parametrize("names", [{"memfd_create"}, set()])
def test_f9_symbol_check_can_fail(tmp_path, names):
    """Planted: a library that calls memfd_create has it as an undefined symbol."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "a.c"
    source.write_text(
        "int memfd_create(const char *, unsigned);\n"
        + ("int f(void) { return memfd_create(0, 0); }\n" if names else "")
    )
    library = tmp_path / "a.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    assert undefined_symbols(library.read_bytes()) & {"memfd_create"} == names
