/* What this library uses of the CUDA driver's ABI (cuda.h 12.x and 13.x; a test compares every line with the real headers). */
#ifndef KVR_CUDA_DRIVER_H
#define KVR_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

/* CUresult and every other enum is 4 bytes; CUdeviceptr and CUmemGenericAllocationHandle are unsigned 64-bit numbers, of which all 64 bits
 * count; CUcontext and CUstream are pointers. */
typedef struct kvr_cu_location {
    int32_t type;
    int32_t id;
} kvr_cu_location;

typedef struct kvr_cu_allocation_prop {
    int32_t type;
    int32_t requested_handle_types;
    kvr_cu_location location;
    void *win32_handle_meta_data;
    uint8_t compression_type;
    uint8_t gpu_direct_rdma_capable;
    uint16_t usage;
    uint8_t reserved[4];
} kvr_cu_allocation_prop;

typedef struct kvr_cu_access_desc {
    kvr_cu_location location;
    int32_t flags;
} kvr_cu_access_desc;

typedef struct kvr_cu_memcpy_attributes {
    int32_t src_access_order;
    kvr_cu_location src_loc_hint;
    kvr_cu_location dst_loc_hint;
    uint32_t flags;
} kvr_cu_memcpy_attributes;

_Static_assert(sizeof(kvr_cu_memcpy_attributes) == 24, "CUmemcpyAttributes");
_Static_assert(offsetof(kvr_cu_memcpy_attributes, flags) == 20, "CUmemcpyAttributes");
_Static_assert(sizeof(kvr_cu_location) == 8, "CUmemLocation");
_Static_assert(sizeof(kvr_cu_allocation_prop) == 32, "CUmemAllocationProp");
_Static_assert(offsetof(kvr_cu_allocation_prop, win32_handle_meta_data) == 16, "CUmemAllocationProp");
_Static_assert(offsetof(kvr_cu_allocation_prop, usage) == 26, "CUmemAllocationProp");
_Static_assert(sizeof(kvr_cu_access_desc) == 12, "CUmemAccessDesc");

#define KVR_CU_OK 0
#define KVR_CU_INVALID_VALUE 1
#define KVR_CU_OUT_OF_MEMORY 2
#define KVR_CU_NO_DEVICE 100
#define KVR_CU_NOT_READY 600
#define KVR_CU_NOT_PERMITTED 800
#define KVR_CU_NOT_SUPPORTED 801
#define KVR_CU_ALLOCATION_PINNED 1
#define KVR_CU_LOCATION_DEVICE 1
#define KVR_CU_GRANULARITY_MINIMUM 0
#define KVR_CU_GRANULARITY_RECOMMENDED 1
#define KVR_CU_ATTRIBUTE_VMM 102
#define KVR_CU_ATTRIBUTE_POSIX_FD 103
#define KVR_CU_ATTRIBUTE_FABRIC 128
#define KVR_CU_SRC_ACCESS_ORDER_STREAM 1
#define KVR_CU_STREAM_NON_BLOCKING 1
#define KVR_CU_EVENT_DISABLE_TIMING 2
#define KVR_CU_POINTER_RANGE_SIZE 12
#define KVR_CU_POINTER_ALLOWED_HANDLE_TYPES 14

/* X(name, symbol, version, parameters): `name` is what cuGetProcAddress_v2 is asked for, with that version; `symbol` the exact
 * name otherwise, since a bare one is often an older function with 32-bit sizes. */
#define KVR_DRIVER_REQUIRED(X) \
    X(cuInit, "cuInit", 2000, (uint32_t flags)) \
    X(cuDriverGetVersion, "cuDriverGetVersion", 2020, (int32_t *version)) \
    X(cuDeviceGetCount, "cuDeviceGetCount", 2000, (int32_t *count)) \
    X(cuDeviceGet, "cuDeviceGet", 2000, (int32_t *device, int32_t ordinal)) \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", 2000, (int32_t *value, int32_t attribute, int32_t device)) \
    X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", 11040, (uint8_t *uuid, int32_t device)) \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, (void **context, int32_t device)) \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", 4000, (void **context)) \
    X(cuCtxSetCurrent, "cuCtxSetCurrent", 4000, (void *context)) \
    X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", 10020, \
      (size_t *granularity, const kvr_cu_allocation_prop *prop, int32_t option)) \
    X(cuMemCreate, "cuMemCreate", 10020, (uint64_t *handle, size_t size, const kvr_cu_allocation_prop *prop, uint64_t flags)) \
    X(cuMemRelease, "cuMemRelease", 10020, (uint64_t handle)) \
    X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", 10020, \
      (void *shareable, uint64_t handle, int32_t type, uint64_t flags)) \
    X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020, (uint64_t *handle, void *os_handle, int32_t type)) \
    X(cuMemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle", 10020, \
      (kvr_cu_allocation_prop *prop, uint64_t handle)) \
    X(cuMemAddressReserve, "cuMemAddressReserve", 10020, \
      (uint64_t *address, size_t size, size_t alignment, uint64_t wanted, uint64_t flags)) \
    X(cuMemAddressFree, "cuMemAddressFree", 10020, (uint64_t address, size_t size)) \
    X(cuMemMap, "cuMemMap", 10020, (uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags)) \
    X(cuMemUnmap, "cuMemUnmap", 10020, (uint64_t address, size_t size)) \
    X(cuMemSetAccess, "cuMemSetAccess", 10020, (uint64_t address, size_t size, const kvr_cu_access_desc *descs, size_t count)) \
    X(cuMemGetAccess, "cuMemGetAccess", 10020, (uint64_t *flags, const kvr_cu_location *location, uint64_t address)) \
    X(cuMemGetAddressRange, "cuMemGetAddressRange_v2", 3020, (uint64_t *base, size_t *size, uint64_t address)) \
    X(cuPointerGetAttribute, "cuPointerGetAttribute", 4000, (void *data, int32_t attribute, uint64_t address)) \
    X(cuStreamCreate, "cuStreamCreate", 2000, (void **stream, uint32_t flags)) \
    X(cuStreamDestroy, "cuStreamDestroy_v2", 4000, (void *stream)) \
    X(cuEventCreate, "cuEventCreate", 2000, (void **event, uint32_t flags)) \
    X(cuEventDestroy, "cuEventDestroy_v2", 4000, (void *event)) \
    X(cuEventRecord, "cuEventRecord", 2000, (void *event, void *stream)) \
    X(cuEventQuery, "cuEventQuery", 2000, (void *event)) \
    X(cuMemcpyAsync, "cuMemcpyAsync", 4000, (uint64_t dst, uint64_t src, size_t size, void *stream))

/* Optional, and used where it is there: NULL otherwise. */
#define KVR_DRIVER_USED_IF_THERE(X) \
    X(cuMemcpyBatchAsync, "cuMemcpyBatchAsync_v2", 13000, \
      (const uint64_t *dsts, const uint64_t *srcs, const size_t *sizes, size_t count, const kvr_cu_memcpy_attributes *attributes, \
       const size_t *attribute_indexes, size_t attribute_count, void *stream))

/* X(name, symbol, version, feature): only asked for, to say whether the driver can do it. */
#define KVR_DRIVER_OPTIONAL(X) \
    X("cuStreamQuery", "cuStreamQuery", 2000, KVR_CUDA_HAS_STREAM_QUERY) \
    X("cuMemGetHandleForAddressRange", "cuMemGetHandleForAddressRange", 11070, KVR_CUDA_HAS_ADDRESS_RANGE_HANDLE)

#endif
