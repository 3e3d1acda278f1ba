/* CUDA memory by the driver's virtual memory management. The driver is loaded on demand; `driver` is filled once, under its
 * mutex, and only read afterwards. No handle mutex is held during a driver call: what a call works on is pinned instead. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_driver.h"
#include "copies.h"

typedef struct device {
    _Atomic int32_t is_ready;
    int32_t device; /* CUdevice */
    void *context;  /* the primary one, retained */
    kvr_cuda_info info;
} device;

#define POINTER(name, symbol, version, parameters) int32_t(*name) parameters;
static struct {
    pthread_mutex_t mutex;
    void *library;
    int32_t is_ready; /* the entry points are there and cuInit has succeeded */
    int32_t device_count;
    int32_t version;
    uint32_t features;
    _Atomic int32_t gives_cloexec; /* its exported fds are CLOEXEC by themselves: 1, -1 they are not, 0 not seen yet */
    device devices[KVR_ORDINAL_COUNT_MAX];
    KVR_DRIVER_REQUIRED(POINTER)
    KVR_DRIVER_USED_IF_THERE(POINTER)
} driver = {.mutex = PTHREAD_MUTEX_INITIALIZER};
#undef POINTER

/* ---- errors ---- */

/* _status.CURESULT_STATUS holds the same rule. */
static int32_t fail_driver(const char *call, int32_t code)
{
    int32_t status = code == KVR_CU_OUT_OF_MEMORY                               ? KVR_ERROR_OUT_OF_MEMORY
                     : code == KVR_CU_NO_DEVICE || code == KVR_CU_NOT_SUPPORTED ? KVR_ERROR_NOT_SUPPORTED
                     : code == KVR_CU_NOT_PERMITTED                             ? KVR_ERROR_PERMISSION_DENIED
                                                                                : KVR_ERROR_DRIVER;
    return kvr_fail_native(status, KVR_DETAIL_DRIVER_CALL, call, KVR_NATIVE_CUDA, code, 0);
}

/* Call an entry point; the status of its CUresult. */
#define CALL(name, ...) call_status(#name, driver.name(__VA_ARGS__))

static int32_t call_status(const char *name, int32_t code) { return code ? fail_driver(name, code) : KVR_OK; }

/* ---- the driver's entry points ---- */

typedef int32_t (*get_proc_address)(const char *name, void **out, int32_t version, uint64_t flags, int32_t *symbol_status);

static void *entry(get_proc_address get, const char *name, const char *symbol, int32_t version)
{
    void *found = NULL;
    /* The result can be 0 with a NULL pointer: only the pointer counts. */
    if (get && get(name, &found, version, 0, NULL) == KVR_CU_OK && found)
        return found;
    return dlsym(driver.library, symbol);
}

static int32_t load(const char *call)
{
    void *found;
    get_proc_address get = NULL;
    uint32_t features = 0;
    int32_t has = 0;
    if (driver.library)
        return KVR_OK;
    driver.library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver.library)
        return kvr_fail(KVR_ERROR_NOT_SUPPORTED, KVR_DETAIL_DRIVER_MISSING, call, 0, 0, 0, 0);
    found = dlsym(driver.library, "cuGetProcAddress_v2");
    memcpy(&get, &found, sizeof get);
#define RESOLVE(name, symbol, version, parameters)                                       \
    found = entry(get, #name, symbol, version);                                          \
    if (!found) {                                                                        \
        driver.library = NULL; /* stays loaded: unloading a driver is not safe */        \
        return kvr_fail(KVR_ERROR_NOT_SUPPORTED, KVR_DETAIL_DRIVER_ENTRY, symbol, 0, 0, 0, 0); \
    }                                                                                    \
    memcpy(&driver.name, &found, sizeof driver.name);
    KVR_DRIVER_REQUIRED(RESOLVE)
#undef RESOLVE
    /* An older driver may answer with the function of its own version, which takes other arguments. */
    (void)driver.cuDriverGetVersion(&has);
#define RESOLVE_IF_THERE(name, symbol, version, parameters)     \
    found = has >= (version) ? entry(get, #name, symbol, version) : NULL; \
    memcpy(&driver.name, &found, sizeof driver.name);
    KVR_DRIVER_USED_IF_THERE(RESOLVE_IF_THERE)
#undef RESOLVE_IF_THERE
    if (driver.cuMemcpyBatchAsync)
        features |= KVR_CUDA_HAS_BATCH_COPY;
#define ASK(name, symbol, version, feature)  \
    if (entry(get, name, symbol, version))   \
        features |= (uint32_t)(feature);
    KVR_DRIVER_OPTIONAL(ASK)
#undef ASK
    driver.features = features;
    return KVR_OK;
}

static int32_t start(const char *call)
{
    int32_t count = 0, version = 0;
    int32_t status = load(call);
    if (!status && !driver.is_ready) {
        status = CALL(cuInit, 0);
        if (!status)
            status = CALL(cuDriverGetVersion, &version);
        if (!status)
            status = CALL(cuDeviceGetCount, &count);
        if (!status) {
            driver.device_count = count < KVR_ORDINAL_COUNT_MAX ? count : KVR_ORDINAL_COUNT_MAX;
            driver.version = version;
            driver.is_ready = 1;
        }
    }
    return status;
}

static int32_t attribute(int32_t number, int32_t device_number, int32_t *out)
{
    return CALL(cuDeviceGetAttribute, out, number, device_number);
}

/* What the driver says of a device now. */
static int32_t ask_device(int32_t ordinal, int32_t device_number, kvr_cuda_info *out)
{
    int32_t status;
    memset(out, 0, sizeof *out);
    out->ordinal = ordinal;
    out->driver_version = driver.version;
    out->features = driver.features;
    status = attribute(KVR_CU_ATTRIBUTE_VMM, device_number, &out->vmm);
    if (!status)
        status = attribute(KVR_CU_ATTRIBUTE_POSIX_FD, device_number, &out->posix_fd);
    if (!status)
        status = attribute(KVR_CU_ATTRIBUTE_FABRIC, device_number, &out->fabric);
    if (!status)
        status = CALL(cuDeviceGetUuid, out->uuid, device_number);
    return status;
}

/* Give the device of an ordinal, made ready at its first use. */
static int32_t take_device(int32_t ordinal, const char *call, const device **out)
{
    device *found;
    int32_t status = kvr_forked(call);
    if (status)
        return status;
    /* One writer under the mutex, which publishes by is_ready. */
    if (ordinal >= 0 && ordinal < KVR_ORDINAL_COUNT_MAX &&
        atomic_load_explicit(&driver.devices[ordinal].is_ready, memory_order_acquire)) {
        *out = &driver.devices[ordinal];
        return KVR_OK;
    }
    pthread_mutex_lock(&driver.mutex);
    status = start(call);
    if (!status && (ordinal < 0 || ordinal >= driver.device_count))
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_ORDINAL_RANGE, call, ordinal, driver.device_count, 0, 0);
    if (!status) {
        found = &driver.devices[ordinal];
        if (!found->is_ready) {
            status = CALL(cuDeviceGet, &found->device, ordinal);
            if (!status)
                status = ask_device(ordinal, found->device, &found->info);
            if (!status)
                status = CALL(cuDevicePrimaryCtxRetain, &found->context, found->device);
            if (!status)
                atomic_store_explicit(&found->is_ready, 1, memory_order_release);
        }
        *out = found;
    }
    pthread_mutex_unlock(&driver.mutex);
    return status;
}

/* Make the device's primary context this thread's; *previous is for leave(). */
static int32_t enter(const device *target, void **previous)
{
    int32_t status = CALL(cuCtxGetCurrent, previous);
    if (!status && *previous != target->context)
        status = CALL(cuCtxSetCurrent, target->context);
    return status;
}

/* Fails only if the caller destroyed its own context meanwhile; what was done stands. */
static void leave(const device *target, void *previous)
{
    if (previous != target->context)
        (void)driver.cuCtxSetCurrent(previous);
}

int32_t kvr_cuda_info_get(int32_t ordinal, kvr_cuda_info *out)
{
    const device *target = NULL;
    kvr_cuda_info seen;
    int32_t status = take_device(ordinal, "cuda_info", &target);
    if (!status)
        status = ask_device(ordinal, target->device, &seen);
    if (!status)
        *out = seen;
    return status;
}

/* ---- regions ---- */

static kvr_cu_allocation_prop properties(int32_t ordinal, int32_t kind)
{
    kvr_cu_allocation_prop prop;
    memset(&prop, 0, sizeof prop); /* its padding and reserved bytes too */
    prop.type = KVR_CU_ALLOCATION_PINNED;
    prop.requested_handle_types = kind;
    prop.location.type = KVR_CU_LOCATION_DEVICE;
    prop.location.id = ordinal;
    return prop;
}

static int32_t add_region(uint64_t native, int32_t ordinal, int64_t nbytes, int64_t physical_nbytes, int32_t kind, int32_t origin,
                          const uint8_t *region_id, const char *call, kvr_region_info *out)
{
    kvr_region made = {.fd = -1,
                       .provider = ordinal,
                       .native = native,
                       .nbytes = nbytes,
                       .physical_nbytes = physical_nbytes,
                       .kind = kind,
                       .access = KVR_ACCESS_READ_WRITE,
                       .origin = origin};
    return kvr_add_region(&made, region_id, call, out);
}

static int32_t allocate(const device *target, int64_t nbytes, int32_t kind, const char *call, kvr_region_info *out)
{
    kvr_cu_allocation_prop prop = properties(target->info.ordinal, kind);
    size_t granularity = 0;
    uint64_t native = 0;
    int64_t physical;
    int32_t status = CALL(cuMemGetAllocationGranularity, &granularity, &prop, KVR_CU_GRANULARITY_MINIMUM);
    if (!status && (!granularity || granularity > KVR_NBYTES_MAX))
        status = kvr_fail(KVR_ERROR_DRIVER, KVR_DETAIL_CUDA_GRANULARITY, call, nbytes, (int64_t)granularity, 0, 0);
    if (status)
        return status;
    physical = (nbytes + (int64_t)granularity - 1) / (int64_t)granularity * (int64_t)granularity;
    status = CALL(cuMemCreate, &native, (size_t)physical, &prop, 0);
    if (!status) {
        status = add_region(native, target->info.ordinal, nbytes, physical, kind, KVR_ORIGIN_ALLOCATED, NULL, call, out);
        if (status)
            (void)driver.cuMemRelease(native);
    }
    return status;
}

int32_t kvr_cuda_allocate(int32_t ordinal, int64_t nbytes, int32_t kind, uint32_t flags, kvr_region_info *out)
{
    static const char call[] = "cuda_allocate";
    const device *target = NULL;
    void *previous;
    int32_t status;
    if (nbytes < 1 || nbytes > KVR_NBYTES_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_NBYTES_RANGE, call, nbytes, KVR_NBYTES_MAX, 0, 0);
    if (kind != KVR_KIND_NONE && kind != KVR_KIND_POSIX_FD && kind != KVR_KIND_FABRIC)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_KIND_UNKNOWN, call, kind, 0, 0, 0);
    if (flags & ~(uint32_t)KVR_CUDA_ALLOW_FABRIC)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_FLAGS_UNKNOWN, call, flags, KVR_CUDA_ALLOW_FABRIC, 0, 0);
    if (kind == KVR_KIND_FABRIC && !(flags & KVR_CUDA_ALLOW_FABRIC))
        return kvr_fail(KVR_ERROR_PROFILE, KVR_DETAIL_FABRIC_NOT_ALLOWED, call, 0, 0, 0, 0);
    status = take_device(ordinal, call, &target);
    if (!status && !target->info.vmm)
        status = kvr_fail(KVR_ERROR_NOT_SUPPORTED, KVR_DETAIL_DEVICE_LACKS_VMM, call, ordinal, 0, 0, 0);
    if (!status)
        status = enter(target, &previous);
    if (!status) {
        status = allocate(target, nbytes, kind, call, out);
        leave(target, previous);
    }
    return status;
}

/* An imported allocation has to be what its record says, as far as the driver tells. */
static int32_t check_import(const device *target, uint64_t native, int32_t kind, int64_t physical_nbytes, const char *call)
{
    kvr_cu_allocation_prop prop;
    size_t granularity = 0;
    int32_t status;
    memset(&prop, 0, sizeof prop);
    status = CALL(cuMemGetAllocationPropertiesFromHandle, &prop, native);
    if (status)
        return status;
    if (!(prop.requested_handle_types & kind))
        return kvr_fail(KVR_ERROR_KIND_MISMATCH, KVR_DETAIL_CUDA_HANDLE_TYPES, call, kind, prop.requested_handle_types, 0, 0);
    if (prop.location.type != KVR_CU_LOCATION_DEVICE || prop.location.id != target->info.ordinal)
        return kvr_fail(KVR_ERROR_INCOMPATIBLE, KVR_DETAIL_CUDA_LOCATION, call, target->info.ordinal, prop.location.type,
                        prop.location.id, 0);
    status = CALL(cuMemGetAllocationGranularity, &granularity, &prop, KVR_CU_GRANULARITY_MINIMUM);
    if (!status && (!granularity || granularity > KVR_NBYTES_MAX || physical_nbytes % (int64_t)granularity))
        status = kvr_fail(KVR_ERROR_SIZE_MISMATCH, KVR_DETAIL_CUDA_GRANULARITY, call, physical_nbytes, (int64_t)granularity, 0, 0);
    return status;
}

static int32_t import(const device *target, int32_t kind, int32_t fd, const uint8_t *fabric, int64_t nbytes,
                      int64_t physical_nbytes, const uint8_t *region_id, const char *call, kvr_region_info *out)
{
    uint8_t token[KVR_FABRIC_NBYTES];
    void *shareable;
    uint64_t native = 0;
    int32_t code, status;
    if (kind == KVR_KIND_FABRIC) {
        memcpy(token, fabric, sizeof token);
        shareable = token; /* a pointer to 64 bytes */
    } else {
        shareable = (void *)(uintptr_t)(uint32_t)fd; /* the fd's value */
    }
    code = driver.cuMemImportFromShareableHandle(&native, shareable, kind);
    if (code && kind == KVR_KIND_POSIX_FD && fcntl(fd, F_GETFD) < 0)
        return kvr_fail_errno("fcntl", errno); /* not open: that is the reason, whatever the code */
    if (code)
        return fail_driver("cuMemImportFromShareableHandle", code);
    status = check_import(target, native, kind, physical_nbytes, call);
    if (!status)
        status = add_region(native, target->info.ordinal, nbytes, physical_nbytes, kind, KVR_ORIGIN_IMPORTED, region_id, call, out);
    if (status)
        (void)driver.cuMemRelease(native);
    return status;
}

int32_t kvr_cuda_import(int32_t ordinal, int32_t kind, int32_t fd, const uint8_t *fabric, int64_t nbytes, int64_t physical_nbytes,
                        const uint8_t *region_id, kvr_region_info *out)
{
    static const char call[] = "cuda_import";
    const device *target = NULL;
    void *previous;
    int32_t status;
    if (kind != KVR_KIND_POSIX_FD && kind != KVR_KIND_FABRIC)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_KIND_UNKNOWN, call, kind, 0, 0, 0);
    if (kind == KVR_KIND_POSIX_FD && fd < 0)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_FD_NEGATIVE, call, fd, 0, 0, 0);
    if (nbytes < 1 || nbytes > KVR_NBYTES_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_NBYTES_RANGE, call, nbytes, KVR_NBYTES_MAX, 0, 0);
    if (physical_nbytes < nbytes)
        return kvr_fail(KVR_ERROR_SIZE_MISMATCH, KVR_DETAIL_IMPORT_PHYSICAL, call, nbytes, physical_nbytes, 0, 0);
    status = take_device(ordinal, call, &target);
    if (!status)
        status = enter(target, &previous);
    if (!status) {
        status = import(target, kind, fd, fabric, nbytes, physical_nbytes, region_id, call, out);
        leave(target, previous);
    }
    return status;
}

/* ---- what works on a region: it is pinned, so that nobody closes it meanwhile ---- */

static int32_t pin(int64_t handle, const char *call, kvr_region **out, const device **target)
{
    kvr_object *object;
    int32_t status;
    kvr_handles_lock();
    status = kvr_find(handle, KVR_SORT_REGION, call, &object);
    if (!status) {
        *out = (kvr_region *)object;
        if ((*out)->provider == KVR_PROVIDER_HOST)
            status = kvr_fail(KVR_ERROR_NOT_SUPPORTED, KVR_DETAIL_PROVIDER, call, handle, KVR_PROVIDER_HOST, 0, 0);
    }
    if (!status)
        status = kvr_forked(call);
    if (!status) {
        *target = &driver.devices[(*out)->provider];
        kvr_call_begin(object);
    }
    kvr_handles_unlock();
    return status;
}

static void unpin(kvr_object *object)
{
    kvr_handles_lock();
    kvr_call_end(object);
    kvr_handles_unlock();
}

/* The driver may write more than it was asked for: the slot takes the largest payload. */
static int32_t export(const device *target, uint64_t native, int32_t kind, uint8_t *payload)
{
    void *previous;
    int32_t status = enter(target, &previous);
    if (status)
        return status;
    memset(payload, 0, KVR_FABRIC_NBYTES);
    status = CALL(cuMemExportToShareableHandle, payload, native, kind, 0);
    leave(target, previous);
    return status;
}

int32_t kvr_cuda_export_fd(kvr_region *region, int32_t *out_fd)
{
    _Alignas(8) uint8_t payload[KVR_FABRIC_NBYTES];
    int32_t fd, status = export(&driver.devices[region->provider], region->native, KVR_KIND_POSIX_FD, payload);
    if (status)
        return status;
    memcpy(&fd, payload, sizeof fd);
    if (!driver.gives_cloexec) {
        int flags = fcntl(fd, F_GETFD);
        driver.gives_cloexec = flags >= 0 && flags & FD_CLOEXEC ? 1 : -1;
    }
    if (driver.gives_cloexec < 0 && fcntl(fd, F_SETFD, FD_CLOEXEC)) {
        status = kvr_fail_errno("fcntl", errno);
        (void)close(fd);
        return status;
    }
    *out_fd = fd;
    return KVR_OK;
}

int32_t kvr_cuda_export_fabric(int64_t handle, uint8_t *out_fabric)
{
    static const char call[] = "cuda_export_fabric";
    _Alignas(8) uint8_t payload[KVR_FABRIC_NBYTES];
    kvr_region *region;
    const device *target = NULL;
    int32_t status = pin(handle, call, &region, &target);
    if (status)
        return status;
    status = region->kind == KVR_KIND_FABRIC
                 ? export(target, region->native, KVR_KIND_FABRIC, payload)
                 : kvr_fail(KVR_ERROR_NOT_SUPPORTED, KVR_DETAIL_KIND_NOT_EXPORTABLE, call, region->kind, 0, 0, 0);
    kvr_handles_lock();
    kvr_call_end(&region->object);
    if (!status) {
        region->fabric_count++;
        memcpy(out_fabric, payload, sizeof payload);
    }
    kvr_handles_unlock();
    return status;
}

int32_t kvr_cuda_fabric_done(int64_t handle)
{
    static const char call[] = "cuda_fabric_done";
    kvr_object *object;
    int32_t status;
    kvr_handles_lock();
    status = kvr_find(handle, KVR_SORT_REGION, call, &object);
    if (!status && ((kvr_region *)object)->fabric_count < 1)
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, -1, 0, 0, 0);
    if (!status)
        ((kvr_region *)object)->fabric_count--;
    kvr_handles_unlock();
    return status;
}

/* ---- mappings: reserve, map, set access, look; undone in reverse ---- */

/* The mapping has to have the declared size: nothing else tells how large imported memory is. */
static int32_t check_mapped(uint64_t address, int64_t nbytes, const char *call)
{
    uint64_t base = 0;
    size_t size = 0;
    int32_t status = CALL(cuMemGetAddressRange, &base, &size, address);
    if (!status && (base != address || size != (size_t)nbytes))
        status = kvr_fail(KVR_ERROR_SIZE_MISMATCH, KVR_DETAIL_CUDA_MAPPED_NBYTES, call, nbytes, (int64_t)size, 0, 0);
    return status;
}

static int32_t map_reserved(const kvr_region *region, uint64_t address, int32_t access, const char *call)
{
    kvr_cu_access_desc desc = {{KVR_CU_LOCATION_DEVICE, region->provider}, access};
    size_t size = (size_t)region->physical_nbytes;
    int32_t code = driver.cuMemMap(address, size, 0, region->native, 0);
    int32_t status = KVR_OK;
    if (code == KVR_CU_INVALID_VALUE && region->origin == KVR_ORIGIN_IMPORTED)
        return kvr_fail_native(KVR_ERROR_SIZE_MISMATCH, KVR_DETAIL_CUDA_MAP_REFUSED, "cuMemMap", KVR_NATIVE_CUDA, code,
                               region->physical_nbytes);
    if (code)
        return fail_driver("cuMemMap", code);
    status = CALL(cuMemSetAccess, address, size, &desc, 1);
    if (!status)
        status = check_mapped(address, region->physical_nbytes, call);
    if (status)
        (void)driver.cuMemUnmap(address, size);
    return status;
}

int32_t kvr_cuda_map(const kvr_region *region, int32_t access, const char *call, uint64_t *out)
{
    const device *target = &driver.devices[region->provider];
    size_t size = (size_t)region->physical_nbytes;
    void *previous;
    uint64_t address = 0;
    int32_t status = enter(target, &previous);
    if (status)
        return status;
    status = CALL(cuMemAddressReserve, &address, size, 0, 0, 0);
    if (!status) {
        status = map_reserved(region, address, access, call);
        if (status)
            (void)driver.cuMemAddressFree(address, size);
        else
            *out = address;
    }
    leave(target, previous);
    return status;
}

int32_t kvr_cuda_unmap(kvr_mapping *mapping)
{
    const device *target = &driver.devices[mapping->region->provider];
    size_t size = (size_t)mapping->region->physical_nbytes;
    uint64_t address = (uint64_t)(uintptr_t)mapping->address;
    void *previous;
    int32_t status = enter(target, &previous);
    if (status)
        return status;
    if (!mapping->is_unmapped)
        status = CALL(cuMemUnmap, address, size);
    if (!status) {
        mapping->is_unmapped = 1;
        status = CALL(cuMemAddressFree, address, size);
    }
    leave(target, previous);
    return status;
}

int32_t kvr_cuda_release(const kvr_region *region)
{
    const device *target = &driver.devices[region->provider];
    void *previous;
    int32_t status = enter(target, &previous);
    if (status)
        return status;
    status = CALL(cuMemRelease, region->native);
    leave(target, previous);
    return status;
}

/* ---- copies: a stream and an event for each thread of a queue ---- */

int32_t kvr_cuda_ready(int32_t ordinal, const char *call)
{
    const device *target = NULL;
    return take_device(ordinal, call, &target);
}

static int32_t open_stream(kvr_copy_stream *stream, int32_t ordinal)
{
    int32_t status;
    if (stream->is_open)
        return KVR_OK;
    status = CALL(cuStreamCreate, &stream->stream, KVR_CU_STREAM_NON_BLOCKING);
    if (status)
        return status;
    status = CALL(cuEventCreate, &stream->event, KVR_CU_EVENT_DISABLE_TIMING);
    if (status) {
        (void)driver.cuStreamDestroy(stream->stream);
        return status;
    }
    stream->device = ordinal;
    stream->is_open = 1;
    return KVR_OK;
}

/* One call for all entries; KVR_PENDING: it cannot be had, take one call an entry. */
static int32_t issue_batch(const kvr_copy_stream *stream, const kvr_entry *entries, int64_t count)
{
    kvr_cu_memcpy_attributes attributes = {.src_access_order = KVR_CU_SRC_ACCESS_ORDER_STREAM};
    size_t first = 0, *sizes;
    uint64_t *dsts, *srcs;
    int64_t i;
    int32_t code;
    if (!driver.cuMemcpyBatchAsync || count < 2)
        return KVR_PENDING;
    dsts = malloc((size_t)count * 3 * sizeof *dsts);
    if (!dsts)
        return KVR_PENDING;
    srcs = dsts + count;
    sizes = (size_t *)(void *)(srcs + count);
    for (i = 0; i < count; i++) {
        dsts[i] = entries[i].dst;
        srcs[i] = entries[i].src;
        sizes[i] = (size_t)entries[i].nbytes;
    }
    code = driver.cuMemcpyBatchAsync(dsts, srcs, sizes, (size_t)count, &attributes, &first, 1, stream->stream);
    free(dsts);
    /* A driver may have the entry point and not the device for it: nothing was issued then. */
    if (code == KVR_CU_NOT_SUPPORTED)
        return KVR_PENDING;
    return code ? fail_driver("cuMemcpyBatchAsync", code) : KVR_OK;
}

static int32_t issue(const kvr_copy_stream *stream, const kvr_entry *entries, int64_t count, int64_t *out_issued)
{
    int64_t i;
    int32_t status = issue_batch(stream, entries, count);
    if (status != KVR_PENDING) {
        /* A batch that failed may have been begun: it says not how far. */
        *out_issued = count;
        return status;
    }
    for (i = 0; i < count; i++) {
        status = CALL(cuMemcpyAsync, entries[i].dst, entries[i].src, (size_t)entries[i].nbytes, stream->stream);
        if (status)
            return status;
        *out_issued = i + 1;
    }
    return KVR_OK;
}

int32_t kvr_cuda_copy_issue(int32_t ordinal, kvr_copy_stream *stream, const kvr_entry *entries, int64_t count, int64_t *out_issued)
{
    const device *target = NULL;
    kvr_error why;
    void *previous;
    int32_t recorded, status = take_device(ordinal, "copy", &target);
    *out_issued = 0;
    if (!status)
        status = enter(target, &previous);
    if (status)
        return status;
    status = open_stream(stream, ordinal);
    if (!status) {
        status = issue(stream, entries, count, out_issued);
        (void)kvr_error_get(&why);
        /* The event is what proves the end: without it nothing is known of what was issued. */
        recorded = *out_issued ? driver.cuEventRecord(stream->event, stream->stream) : KVR_CU_OK;
        if (recorded)
            stream->is_open = 0;
        if (recorded && !status)
            status = fail_driver("cuEventRecord", recorded);
        else if (status)
            (void)kvr_fail_again(&why);
    }
    leave(target, previous);
    return status;
}

int32_t kvr_cuda_copy_poll(int32_t ordinal, const kvr_copy_stream *stream)
{
    if (!stream->is_open)
        return KVR_ERROR_DRIVER; /* its event could not be recorded */
    return kvr_cuda_event_poll(ordinal, (uint64_t)(uintptr_t)stream->event);
}

int32_t kvr_cuda_event_poll(int32_t ordinal, uint64_t event)
{
    const device *target = NULL;
    void *previous;
    int32_t code, status = take_device(ordinal, "copy", &target);
    if (!status)
        status = enter(target, &previous);
    if (status)
        return status;
    code = driver.cuEventQuery((void *)(uintptr_t)event);
    leave(target, previous);
    if (code == KVR_CU_NOT_READY)
        return KVR_PENDING;
    return code ? fail_driver("cuEventQuery", code) : KVR_OK;
}

void kvr_cuda_stream_close(kvr_copy_stream *stream)
{
    const device *target = NULL;
    void *previous;
    if (take_device(stream->device, "copy", &target) || enter(target, &previous))
        return;
    (void)driver.cuEventDestroy(stream->event);
    (void)driver.cuStreamDestroy(stream->stream);
    leave(target, previous);
    stream->is_open = 0;
}

/* ---- observation ---- */

static void observe_mapping(const device *target, uint64_t address, kvr_cuda_observation *out)
{
    kvr_cu_location here = {KVR_CU_LOCATION_DEVICE, target->info.ordinal};
    uint64_t base = 0, flags = 0, kinds = 0, range = 0; /* whole, since the driver writes only 4 bytes of some */
    size_t size = 0;
    out->range_result = driver.cuMemGetAddressRange(&base, &size, address);
    if (!out->range_result) {
        out->mapped_base = base;
        out->mapped_nbytes = (int64_t)size;
    }
    out->reservation_result = driver.cuPointerGetAttribute(&range, KVR_CU_POINTER_RANGE_SIZE, address);
    if (!out->reservation_result)
        out->reserved_nbytes = (int64_t)range;
    out->allowed_result = driver.cuPointerGetAttribute(&kinds, KVR_CU_POINTER_ALLOWED_HANDLE_TYPES, address);
    if (!out->allowed_result)
        out->allowed_handle_types = (int64_t)kinds;
    out->access_result = driver.cuMemGetAccess(&flags, &here, address);
    if (!out->access_result)
        out->access = (int64_t)flags;
}

static void observe_allocation(uint64_t native, kvr_cuda_observation *out)
{
    kvr_cu_allocation_prop prop;
    size_t minimum = 0, recommended = 0;
    memset(&prop, 0, sizeof prop);
    out->properties_result = driver.cuMemGetAllocationPropertiesFromHandle(&prop, native);
    if (out->properties_result)
        return;
    out->handle_types = prop.requested_handle_types;
    out->allocation_type = prop.type;
    out->location_type = prop.location.type;
    out->location_id = prop.location.id;
    out->granularity_result = driver.cuMemGetAllocationGranularity(&minimum, &prop, KVR_CU_GRANULARITY_MINIMUM);
    if (!out->granularity_result)
        out->granularity_result = driver.cuMemGetAllocationGranularity(&recommended, &prop, KVR_CU_GRANULARITY_RECOMMENDED);
    if (!out->granularity_result) {
        out->granularity_min = (int64_t)minimum;
        out->granularity_recommended = (int64_t)recommended;
    }
}

int32_t kvr_cuda_observe(int64_t handle, kvr_cuda_observation *out)
{
    kvr_cuda_observation seen;
    kvr_region *region;
    kvr_mapping *mapping;
    const device *target = NULL;
    void *previous;
    int32_t status = pin(handle, "cuda_observe", &region, &target);
    if (status)
        return status;
    memset(&seen, 0xFF, sizeof seen); /* -1 in every field */
    seen.mapped_base = 0;
    status = enter(target, &previous);
    if (!status) {
        observe_allocation(region->native, &seen);
        kvr_handles_lock();
        mapping = kvr_mapping_of(region);
        if (mapping)
            kvr_call_begin(&mapping->object);
        kvr_handles_unlock();
        if (mapping) {
            observe_mapping(target, (uint64_t)(uintptr_t)mapping->address, &seen);
            unpin(&mapping->object);
        }
        leave(target, previous);
        *out = seen;
    }
    unpin(&region->object);
    return status;
}
