"""The real cuda.h, 12.x and 13.x, judges every size, offset, value and prototype that the project uses of the driver."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import fakedriver
import pytest

from kvreuse import _ctypes_cuda as cu

# In C++, since only there a program can look at the types of a function's parameters.
PROGRAM = """
#include <cstdio>
#include <cstddef>
#include <type_traits>
#include <cuda.h>
#define _Static_assert static_assert
#define KVR_CUDA_HAS_BATCH_COPY 1
#define KVR_CUDA_HAS_STREAM_QUERY 2
#define KVR_CUDA_HAS_ADDRESS_RANGE_HANDLE 4
#include "cuda_driver.h"

template <class T> struct shape_of { static constexpr int value = (int)sizeof(T) + (std::is_pointer<T>::value ? 100 : 0); };
template <class F> struct shapes;
template <class R, class... A> struct shapes<R (*)(A...)> {
    static void print(const char *who, const char *name)
    {
        std::printf("%s %s %d", who, name, (int)sizeof(R));
        int each[] = {0, shape_of<A>::value...};
        for (size_t i = 1; i < sizeof each / sizeof *each; i++) std::printf(" %d", each[i]);
        std::printf("\\n");
    }
};
#define OURS(name, symbol, version, parameters) { typedef int (*type) parameters; shapes<type>::print("ours", #name); }
#define SIZE(type, ours) std::printf("size %s %zu %zu\\n", #type, sizeof(type), sizeof(ours))
#define OFFSET(type, member, ours, own) std::printf("offset %s.%s %zu %zu\\n", #type, #member, offsetof(type, member), offsetof(ours, own))
#define VALUE(theirs, ours) std::printf("value %s %lld %lld\\n", #theirs, (long long)(theirs), (long long)(ours))
int main()
{
    KVR_DRIVER_REQUIRED(OURS)
#if CUDA_VERSION >= 13000
    KVR_DRIVER_USED_IF_THERE(OURS)
#endif
THEIRS
    SIZE(CUmemLocation, kvr_cu_location);
    SIZE(CUmemAllocationProp, kvr_cu_allocation_prop);
    SIZE(CUmemAccessDesc, kvr_cu_access_desc);
#if CUDA_VERSION >= 12080
    SIZE(CUmemcpyAttributes, kvr_cu_memcpy_attributes);
    OFFSET(CUmemcpyAttributes, srcAccessOrder, kvr_cu_memcpy_attributes, src_access_order);
    OFFSET(CUmemcpyAttributes, srcLocHint, kvr_cu_memcpy_attributes, src_loc_hint);
    OFFSET(CUmemcpyAttributes, dstLocHint, kvr_cu_memcpy_attributes, dst_loc_hint);
    OFFSET(CUmemcpyAttributes, flags, kvr_cu_memcpy_attributes, flags);
    VALUE(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, KVR_CU_SRC_ACCESS_ORDER_STREAM);
#endif
    VALUE(CUDA_ERROR_NOT_READY, KVR_CU_NOT_READY);
    VALUE(CU_STREAM_NON_BLOCKING, KVR_CU_STREAM_NON_BLOCKING);
    VALUE(CU_EVENT_DISABLE_TIMING, KVR_CU_EVENT_DISABLE_TIMING);
    OFFSET(CUmemLocation, type, kvr_cu_location, type);
    OFFSET(CUmemLocation, id, kvr_cu_location, id);
    OFFSET(CUmemAllocationProp, type, kvr_cu_allocation_prop, type);
    OFFSET(CUmemAllocationProp, requestedHandleTypes, kvr_cu_allocation_prop, requested_handle_types);
    OFFSET(CUmemAllocationProp, location, kvr_cu_allocation_prop, location);
    OFFSET(CUmemAllocationProp, win32HandleMetaData, kvr_cu_allocation_prop, win32_handle_meta_data);
    OFFSET(CUmemAllocationProp, allocFlags.compressionType, kvr_cu_allocation_prop, compression_type);
    OFFSET(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable, kvr_cu_allocation_prop, gpu_direct_rdma_capable);
    OFFSET(CUmemAllocationProp, allocFlags.usage, kvr_cu_allocation_prop, usage);
    OFFSET(CUmemAllocationProp, allocFlags.reserved, kvr_cu_allocation_prop, reserved);
    OFFSET(CUmemAccessDesc, location, kvr_cu_access_desc, location);
    OFFSET(CUmemAccessDesc, flags, kvr_cu_access_desc, flags);
    VALUE(sizeof(CUresult), 4);
    VALUE(sizeof(CUdeviceptr), 8);
    VALUE(sizeof(CUmemGenericAllocationHandle), 8);
    VALUE(sizeof(CUdevice), 4);
    VALUE(sizeof(CUmemFabricHandle), 64);
    VALUE(alignof(CUmemFabricHandle), 1);
    VALUE(sizeof(CUuuid), 16);
    VALUE(CUDA_SUCCESS, KVR_CU_OK);
    VALUE(CUDA_ERROR_INVALID_VALUE, KVR_CU_INVALID_VALUE);
    VALUE(CUDA_ERROR_OUT_OF_MEMORY, KVR_CU_OUT_OF_MEMORY);
    VALUE(CUDA_ERROR_NO_DEVICE, KVR_CU_NO_DEVICE);
    VALUE(CUDA_ERROR_NOT_PERMITTED, KVR_CU_NOT_PERMITTED);
    VALUE(CUDA_ERROR_NOT_SUPPORTED, KVR_CU_NOT_SUPPORTED);
    VALUE(CU_MEM_ALLOCATION_TYPE_PINNED, KVR_CU_ALLOCATION_PINNED);
    VALUE(CU_MEM_LOCATION_TYPE_DEVICE, KVR_CU_LOCATION_DEVICE);
    VALUE(CU_MEM_ALLOC_GRANULARITY_MINIMUM, KVR_CU_GRANULARITY_MINIMUM);
    VALUE(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, KVR_CU_GRANULARITY_RECOMMENDED);
    VALUE(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, KVR_CU_ATTRIBUTE_VMM);
    VALUE(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, KVR_CU_ATTRIBUTE_POSIX_FD);
    VALUE(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, KVR_CU_ATTRIBUTE_FABRIC);
    VALUE(CU_POINTER_ATTRIBUTE_RANGE_SIZE, KVR_CU_POINTER_RANGE_SIZE);
    VALUE(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, KVR_CU_POINTER_ALLOWED_HANDLE_TYPES);
    VALUE(CU_MEM_HANDLE_TYPE_NONE, 0);
    VALUE(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1);
    VALUE(CU_MEM_HANDLE_TYPE_FABRIC, 8);
    VALUE(CU_MEM_ACCESS_FLAGS_PROT_NONE, 0);
    VALUE(CU_MEM_ACCESS_FLAGS_PROT_READ, 1);
    VALUE(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 3);
}
"""


def entries(major):
    """What is called of a driver of that version."""
    return {**cu.REQUIRED, **(cu.USED_IF_THERE if major == "13" else {})}


def judge(root_dir, folder, major, header_text=None):
    """Compile and run it; return its lines as lists of words."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    headers = fakedriver.cuda_headers()
    if major not in headers:
        pytest.skip(f"no cuda.h of {major}.x is installed")
    native = folder / "native"
    native.mkdir()
    text = header_text or (root_dir / "kvreuse" / "native" / "cuda_driver.h").read_text()
    (native / "cuda_driver.h").write_text(text)
    theirs = "".join(
        f'    shapes<decltype(&{symbol})>::print("theirs", "{name}");\n'
        for name, (symbol, _, _) in entries(major).items()
    )
    source = folder / "judge.cpp"
    source.write_text(PROGRAM.replace("THEIRS\n", theirs))
    program = folder / "judge"
    command = ["c++", "-std=c++17", "-isystem", str(headers[major]), f"-I{native}", str(source), "-o", str(program)]
    # Nothing of the driver is called; only the types of its functions are looked at.
    subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    done = subprocess.run([str(program)], check=True, timeout=60, capture_output=True, text=True)
    return [line.split() for line in done.stdout.splitlines()]


def differences(lines):
    ours = {words[1]: words[2:] for words in lines if words[0] == "ours"}
    theirs = {words[1]: words[2:] for words in lines if words[0] == "theirs"}
    found = [f"prototype of {name}" for name in theirs if ours.get(name) != theirs[name]]
    found += [f"only in one list: {name}" for name in ours.keys() ^ theirs.keys()]
    pairs = [words for words in lines if words[0] in ("size", "offset", "value")]
    assert len(pairs) > 40
    return found + [" ".join(words[:2]) for words in pairs if words[2] != words[3]]


@pytest.mark.parametrize("major", ["12", "13"])
def test_c_is_what_cuda_h_says(major, root_dir, tmp_path):
    assert differences(judge(root_dir, tmp_path, major)) == []


@pytest.mark.parametrize("major", ["12", "13"])
def test_ctypes_is_what_cuda_h_says(major, root_dir, tmp_path):
    lines = judge(root_dir, tmp_path, major)
    theirs = {words[1]: [int(word) for word in words[3:]] for words in lines if words[0] == "theirs"}
    for name, (_, _, argtypes) in entries(major).items():
        shapes = []
        for kind in argtypes:
            is_pointer = kind is ctypes.c_void_p or issubclass(kind, ctypes._Pointer)
            shapes.append(ctypes.sizeof(kind) + (100 if is_pointer else 0))
        assert shapes == theirs[name], name
    numbers = {words[1]: int(words[2]) for words in lines if words[0] in ("size", "offset", "value")}
    assert ctypes.sizeof(cu.Location) == numbers["CUmemLocation"]
    assert ctypes.sizeof(cu.AllocationProp) == numbers["CUmemAllocationProp"]
    assert ctypes.sizeof(cu.AccessDesc) == numbers["CUmemAccessDesc"]
    assert ctypes.sizeof(cu.Uuid) == 16
    for member, own in (
        ("type", "type"),
        ("requestedHandleTypes", "requested_handle_types"),
        ("location", "location"),
        ("win32HandleMetaData", "win32_handle_meta_data"),
        ("allocFlags.compressionType", "compression_type"),
        ("allocFlags.gpuDirectRDMACapable", "gpu_direct_rdma_capable"),
        ("allocFlags.usage", "usage"),
        ("allocFlags.reserved", "reserved"),
    ):
        assert getattr(cu.AllocationProp, own).offset == numbers[f"CUmemAllocationProp.{member}"], own
    assert cu.AccessDesc.flags.offset == numbers["CUmemAccessDesc.flags"]
    if major == "13":
        assert ctypes.sizeof(cu.MemcpyAttributes) == numbers["CUmemcpyAttributes"]
        assert cu.MemcpyAttributes.src_access_order.offset == numbers["CUmemcpyAttributes.srcAccessOrder"]
        assert cu.MemcpyAttributes.flags.offset == numbers["CUmemcpyAttributes.flags"]


def test_both_lists_of_entry_points_are_equal(root_dir):
    """Name, exact symbol, version and feature bit, of C and of ctypes."""
    text = (root_dir / "kvreuse" / "native" / "cuda_driver.h").read_text()
    required = re.findall(r'X\((cu\w+), "(\w+)", (\d+),', text)
    assert [(name, symbol, int(version)) for name, symbol, version in required] == [
        (name, symbol, version) for name, (symbol, version, *_) in {**cu.REQUIRED, **cu.USED_IF_THERE}.items()
    ]
    optional = re.findall(r'X\("(\w+)", "(\w+)", (\d+), KVR_CUDA_HAS_(\w+)\)', text)
    assert [(name, symbol, int(version)) for name, symbol, version, _ in optional] == [
        (name, symbol, version) for name, (symbol, version, _) in cu.OPTIONAL.items()
    ]


@pytest.mark.parametrize(
    ("text", "planted", "found"),
    [
        ("(uint64_t handle))", "(uint32_t handle))", "prototype of cuMemRelease"),
        ("uint16_t usage;", "uint32_t usage;", None),
        ("KVR_CU_ATTRIBUTE_FABRIC 128", "KVR_CU_ATTRIBUTE_FABRIC 119", "HANDLE_TYPE_FABRIC_SUPPORTED"),
        ("(uint64_t address, size_t size))", "(size_t size, uint32_t address))", "prototype of cuMemAddressFree"),
    ],
)
def test_a_planted_fault_is_found(text, planted, found, root_dir, tmp_path):
    source = (root_dir / "kvreuse" / "native" / "cuda_driver.h").read_text()
    assert text in source
    source = source.replace(text, planted)
    if found is None:  # the header's own assertions
        with pytest.raises(subprocess.CalledProcessError):
            judge(root_dir, tmp_path, "13", source)
    else:
        assert any(found in each for each in differences(judge(root_dir, tmp_path, "13", source)))
