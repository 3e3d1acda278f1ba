"""The patterns of bugs that others had: each planted in the code of this library is found by scenario.py.

In C the fault is planted in a copy of kvreuse/native, which is compiled and called by ctypes (raw.py); in Python in a copy of the
package. The scenario passes on the code as it is: `test_scenario`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import raw

import kvreuse

# pattern: (file, text, planted text)
C_FAULTS = {
    "handle narrowed": (
        "cuda.c",
        "CALL(cuMemRelease, region->native)",
        "CALL(cuMemRelease, (uint32_t)region->native)",
    ),
    "handle sign-extended": (
        "cuda.c",
        ".native = native,",
        ".native = (uint64_t)(int64_t)(int32_t)native,",
    ),
    "bare v1 symbol": ("cuda_driver.h", 'X(cuMemGetAddressRange, "cuMemGetAddressRange_v2", 3020,', None),
    "fabric handle written into a 4-byte slot": (
        "cuda.c",
        "    memset(payload, 0, KVR_FABRIC_NBYTES);\n"
        "    status = CALL(cuMemExportToShareableHandle, payload, native, kind, 0);",
        "    uint32_t slot = 0;\n    status = CALL(cuMemExportToShareableHandle, &slot, native, kind, 0);\n"
        "    memcpy(payload, &slot, 4);",
    ),
    "fabric handle closed as if it were an fd": (
        "cuda.c",
        "        memcpy(token, fabric, sizeof token);",
        "        memcpy(token, fabric, sizeof token);\n        for (int i = 3; i < 64; i++) close(i);",
    ),
    "pointer to the fd instead of its value": (
        "cuda.c",
        "shareable = (void *)(uintptr_t)(uint32_t)fd;",
        "shareable = (void *)&fd;",
    ),
    "value of the fabric handle instead of a pointer": (
        "cuda.c",
        "shareable = token;",
        "memcpy(&shareable, token + 12, 4);",
    ),
    "fd leaks on success": ("cuda.c", "    *out_fd = fd;\n", "    *out_fd = fd;\n    (void)dup(fd);\n"),
    "fd is inherited": ("cuda.c", "fcntl(fd, F_SETFD, FD_CLOEXEC)", "fcntl(fd, F_SETFD, 0)"),
    "no release where the import does not fit": (
        "cuda.c",
        "physical_nbytes, kind, KVR_ORIGIN_IMPORTED, region_id, call, out);\n    if (status)",
        "physical_nbytes, kind, KVR_ORIGIN_IMPORTED, region_id, call, out);\n    if (0)",
    ),
    "no unmap where set access fails": (
        "cuda.c",
        "    if (status)\n        (void)driver.cuMemUnmap(address, size);",
        "    if (0)\n        (void)driver.cuMemUnmap(address, size);",
    ),
    "no address free where map fails": ("cuda.c", "(void)driver.cuMemAddressFree(address, size);", ";"),
    "no set access": ("cuda.c", "    status = CALL(cuMemSetAccess, address, size, &desc, 1);", "    status = KVR_OK;"),
    "addresses freed before unmap": (
        "cuda.c",
        "        status = CALL(cuMemUnmap, address, size);",
        "        status = CALL(cuMemAddressFree, address, size);",
    ),
    "double release": (
        "cuda.c",
        "    status = CALL(cuMemRelease, region->native);",
        "    status = CALL(cuMemRelease, region->native);\n    driver.cuMemRelease(region->native);",
    ),
    "handle stays valid after close": ("handles.c", "    place->object = NULL;\n", ""),
    "requested kinds lack the exported one": (
        "cuda.c",
        "prop.requested_handle_types = kind;",
        "prop.requested_handle_types = 0;",
    ),
    "requested kinds of the import are not looked at": (
        "cuda.c",
        "if (!(prop.requested_handle_types & kind))",
        "if (0)",
    ),
    "granularity of another prop": (
        "cuda.c",
        "    int32_t status = CALL(cuMemGetAllocationGranularity, &granularity, &prop, KVR_CU_GRANULARITY_MINIMUM);",
        "    kvr_cu_allocation_prop other = properties(target->info.ordinal, KVR_KIND_POSIX_FD);\n"
        "    int32_t status = CALL(cuMemGetAllocationGranularity, &granularity, &other, KVR_CU_GRANULARITY_MINIMUM);",
    ),
    "logical size mapped": (
        "cuda.c",
        "    size_t size = (size_t)region->physical_nbytes;\n    void *previous;\n    uint64_t address = 0;",
        "    size_t size = (size_t)region->nbytes;\n    void *previous;\n    uint64_t address = 0;",
    ),
    "physical size told as the logical one": (
        "cuda.c",
        ".nbytes = nbytes,",
        ".nbytes = physical_nbytes,",
    ),
    "mapped size is not compared": ("cuda.c", "base != address || size != (size_t)nbytes", "0"),
    "fabric without the profile's leave": (
        "cuda.c",
        "kind == KVR_KIND_FABRIC && !(flags & KVR_CUDA_ALLOW_FABRIC)",
        "0",
    ),
    "padding is not zeroed": (
        "cuda.c",
        "    memset(&prop, 0, sizeof prop); /*",
        "    memset(&prop, 0xA5, sizeof prop); /*",
    ),
    "exporter releases fabric memory before its importers are done": (
        "host.c",
        "    if (!status && region->fabric_count)",
        "    if (0)",
    ),
    "an old driver code is told by a later error": (
        "handles.c",
        "    memset(&last_error, 0, sizeof last_error);\n    last_error.status = status;\n    last_error.detail = detail;\n"
        "    last_error.native_source = source;\n    last_error.native_code = code;\n",
        "    last_error.status = status;\n    last_error.detail = detail;\n"
        "    if (source) {\n        last_error.native_source = source;\n        last_error.native_code = code;\n    }\n",
    ),
    "64-byte blob whose kind is guessed": (
        "cuda.c",
        "    if (kind == KVR_KIND_FABRIC) {\n        memcpy(token",
        "    kind = fabric[0] ? KVR_KIND_FABRIC : KVR_KIND_POSIX_FD;\n"
        "    if (kind == KVR_KIND_FABRIC) {\n        memcpy(token",
    ),
    "import cache keyed by the fd's number": (
        "cuda.c",
        "    code = driver.cuMemImportFromShareableHandle(&native, shareable, kind);",
        "    static uint64_t cache[64];\n    if (kind == 1 && cache[fd & 63])\n        native = cache[fd & 63], code = 0;\n"
        "    else\n        code = driver.cuMemImportFromShareableHandle(&native, shareable, kind);\n"
        "    if (kind == 1)\n        cache[fd & 63] = native;",
    ),
    "the caller's context is not set back": (
        "cuda.c",
        "    if (previous != target->context)\n        (void)",
        "    if (0)\n        (void)",
    ),
}
PYTHON_FAULTS = {
    "handle narrowed": (
        "_ctypes_cuda.py",
        '"cuMemRelease": ("cuMemRelease", 10020, (c_uint64,))',
        '"cuMemRelease": ("cuMemRelease", 10020, (c_uint32,))',
    ),
    "handle sign-extended": (
        "_fallback_cuda.py",
        "region.native = ordinal, native",
        "region.native = ordinal, ((native & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000",
    ),
    "bare v1 symbol": (
        "_ctypes_cuda.py",
        "        address = self._entry(name, version)\n",
        "        address, symbol = 0, name\n",
    ),
    "fabric handle written into a 4-byte slot": (
        "_fallback_cuda.py",
        "    out = cu.payload()\n",
        "    out = (cu.c_int32 * 1)()\n",
    ),
    "pointer to the fd instead of its value": (
        "_fallback_cuda.py",
        "kind == c.KVR_KIND_FABRIC else fd\n",
        "kind == c.KVR_KIND_FABRIC else cu.address_of(c_int32(fd))\n",
    ),
    "value of the fabric handle instead of a pointer": (
        "_fallback_cuda.py",
        "cu.address_of(token) if kind",
        "int.from_bytes(fabric[12:16], 'little') if kind",
    ),
    "fd leaks on success": ("_fallback_cuda.py", "    return fd\n", "    os.dup(fd)\n    return fd\n"),
    "fd is inherited": ("_fallback_cuda.py", "fcntl.F_SETFD, fcntl.FD_CLOEXEC", "fcntl.F_SETFD, 0"),
    "no address free where map fails": (
        "_fallback_cuda.py",
        "            _driver.cuMemAddressFree(address, region.physical_nbytes)\n",
        "",
    ),
    "no unmap where set access fails": ("_fallback_cuda.py", "        _driver.cuMemUnmap(address, size)\n", ""),
    "double release": (
        "_fallback_cuda.py",
        '        call("cuMemRelease", region.native)\n',
        '        call("cuMemRelease", region.native)\n        _driver.cuMemRelease(region.native)\n',
    ),
    "granularity of another prop": (
        "_fallback_cuda.py",
        "        granularity = _granularity(prop, cu.GRANULARITY_MINIMUM)\n        if not 0 <",
        "        granularity = 2 << 20\n        if not 0 <",
    ),
    "mapped size is not compared": (
        "_fallback_cuda.py",
        "if (base.value, found.value) != (address, size):",
        "if False:",
    ),
    "exporter releases fabric memory before its importers are done": (
        "_fallback_host.py",
        "if thing.fabric_count:",
        "if False:",
    ),
    "requested kinds of the import are not looked at": (
        "_fallback_cuda.py",
        "if not prop.requested_handle_types & kind:",
        "if False:",
    ),
    "import cache keyed by the fd's number": (
        "_fallback_cuda.py",
        "        code = _driver.cuMemImportFromShareableHandle(cu.byref(native), shareable, kind)\n",
        "        code = 0\n        if kind != 1 or fd not in _cache:\n"
        "            code = _driver.cuMemImportFromShareableHandle(cu.byref(native), shareable, kind)\n"
        "        native = _cache.setdefault(fd, native) if kind == 1 else native\n",
    ),
}


# pattern: (file, text, planted text, the test that finds it)
CLASS_FAULTS = {
    "kind is not looked at": (
        "handles.py",
        "if shared.kind is HandleKind.POSIX_FD:\n            none =",
        "if True:\n            none =",
        "test_cuda_provider.py::test_capabilities_by_trial",
    ),
    "attribute says fabric, create says 800": (
        "handles.py",
        "        try:\n            with self.allocate(mmap.PAGESIZE, kind=kind) as region:",
        "        if kind is HandleKind.FABRIC and self._ordinal >= 0 and _backend.cuda_info(self._ordinal).fabric:\n"
        '            return Capability(True, "attribute 128")\n'
        "        try:\n            with self.allocate(mmap.PAGESIZE, kind=kind) as region:",
        "test_2b_cases.py::test_e9_the_attribute_says_fabric_and_create_does_not",
    ),
    "uninitialised bytes in the record": (
        "handles.py",
        "            self.inode,\n            self._payload,\n        )",
        "            self.inode,\n            self._payload or os.urandom(64),\n        )",
        "test_cuda_provider.py::test_records_have_no_uninitialised_bytes",
    ),
    "fabric memory is not kept for its importers": (
        "handles.py",
        "exporter=self if is_fabric else None",
        "exporter=None",
        "test_cuda_provider.py::test_a_fabric_export_keeps_the_region",
    ),
    "pid reuse": (
        "keeper/processes.py",
        "if not start or start_time(pid) != start:",
        "if not start:",
        "../keeper/test_attach.py::test_a_pid_that_was_reused_is_no_proof",
    ),
}


@pytest.mark.parametrize("fault", CLASS_FAULTS)
def test_a_fault_planted_in_the_classes_is_found(fault, driver_dir, tmp_path):
    file, text, planted, test = CLASS_FAULTS[fault]
    package = tmp_path / "kvreuse"
    shutil.copytree(Path(kvreuse.__file__).parent, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    source = (package / file).read_text()
    assert source.count(text) == 1, f"{fault}: the text to plant it in is not there once"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "KVREUSE_TEST_PURE": "1", "KVREUSE_BACKEND": "auto"}
    environ.pop("KVREUSE_CENSUS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / test)]
    outcomes = []
    for now in (source, source.replace(text, planted)):
        (package / file).write_text(now)
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
        )
        outcomes.append(done.returncode)
    assert outcomes == [0, 1], f"{fault}: {done.stdout[-2000:]}"


@pytest.fixture(scope="session")
def objects(tmp_path_factory):
    return tmp_path_factory.mktemp("objects")


def test_scenario_of_the_c_functions(run_scenario, objects, tmp_path):
    """As `test_scenario`: what the faults below are planted in passes."""
    library = raw.compile_library(Path(raw.ROOT, "kvreuse", "native"), tmp_path / "raw.so", objects)
    done = run_scenario(library)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_scenario(backend_name, run_scenario):
    """H1 to H7, H9: the whole life of both kinds, an error at every driver call, mistakes; counters, fds and addresses at zero."""
    done = run_scenario(backend_name)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("fault", C_FAULTS)
def test_a_fault_planted_in_c_is_found(fault, run_scenario, objects, tmp_path):
    file, text, planted = C_FAULTS[fault]
    native = tmp_path / "native"
    shutil.copytree(Path(raw.ROOT, "kvreuse", "native"), native)
    source = (native / file).read_text()
    assert source.count(text) == 1, f"{fault}: the text to plant it in is not there once"
    if planted is None:  # the bare name, as dlsym would find it
        source = source.replace(
            text, text.replace("_v2", "").replace("cuMemGetAddressRange,", "cuMemGetAddressRange_v1,")
        )
        cuda = (native / "cuda.c").read_text().replace("cuMemGetAddressRange", "cuMemGetAddressRange_v1")
        (native / "cuda.c").write_text(cuda)
    (native / file).write_text(source if planted is None else source.replace(text, planted))
    done = run_scenario(raw.compile_library(native, tmp_path / "raw.so", objects))
    assert done.returncode != 0, f"{fault}: not found"
    assert "ok" not in done.stdout


@pytest.mark.parametrize("fault", PYTHON_FAULTS)
def test_a_fault_planted_in_python_is_found(fault, run_scenario, tmp_path):
    file, text, planted = PYTHON_FAULTS[fault]
    package = tmp_path / "kvreuse"
    shutil.copytree(Path(kvreuse.__file__).parent, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    source = (package / file).read_text()
    assert source.count(text) == 1, f"{fault}: the text to plant it in is not there once"
    source = source.replace(text, planted)
    if "_cache" in planted:
        source = source.replace("_devices: dict", "_cache: dict = {}\n_devices: dict")
    (package / file).write_text(source)
    done = run_scenario("fallback", package_root=tmp_path)
    assert done.returncode != 0, f"{fault}: not found"
    assert "ok" not in done.stdout
    assert str(package) in done.stderr, "it was another package that ran"
