/* A CUDA driver for machines without a GPU: libcuda.so.1 over memfd and mmap, compiled against the real cuda.h, so that the
 * compiler checks every prototype. It is stricter than a real one: what a real driver calls undefined is an error here, and is
 * counted in `violations` with its text. A device address is an address of this process, so a test can look at the bytes.
 *
 * Handles have bit 63 set and equal low 32 bits: a narrowed or sign-extended one cannot work. Control: the fake_* functions, and the
 * environment variable FAKE_CUDA="key=value,..." for child processes. */
#define _GNU_SOURCE
#include <cuda.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"

fake_state fake = {.mutex = PTHREAD_MUTEX_INITIALIZER};
static pthread_cond_t fake_released = PTHREAD_COND_INITIALIZER;
static __thread uint64_t current_context;

/* ---- settings ---- */

static const struct {
    const char *key;
    size_t offset;
    int64_t initial;
} settings[] = {
#define SETTING(name, value) {#name, offsetof(fake_settings, name), value},
    FAKE_SETTINGS(SETTING)
#undef SETTING
};

static void set_defaults(void)
{
    size_t i;
    for (i = 0; i < sizeof settings / sizeof *settings; i++)
        memcpy((char *)&fake.set + settings[i].offset, &settings[i].initial, sizeof(int64_t));
}

int32_t fake_set(const char *key, int64_t value)
{
    size_t i;
    for (i = 0; i < sizeof settings / sizeof *settings; i++)
        if (!strcmp(settings[i].key, key)) {
            memcpy((char *)&fake.set + settings[i].offset, &value, sizeof value);
            return 0;
        }
    return -1;
}

static void in_child(void)
{
    pthread_mutex_init(&fake.mutex, NULL);
    fake.forked = 1;
}

__attribute__((constructor)) static void at_load(void)
{
    char text[1024], *save = NULL, *part;
    const char *given = getenv("FAKE_CUDA");
    set_defaults();
    (void)pthread_atfork(NULL, NULL, in_child);
    if (!given)
        return;
    snprintf(text, sizeof text, "%s", given);
    for (part = strtok_r(text, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
        char *equals = strchr(part, '=');
        if (equals)
            *equals = 0;
        if (!equals || fake_set(part, strtoll(equals + 1, NULL, 0))) {
            fprintf(stderr, "FAKE_CUDA: no setting %s\n", part);
            abort();
        }
    }
}

/* ---- calls: counted, logged, made to fail ---- */

int32_t fake_violation(const char *text)
{
    fake.counters.violations++;
    snprintf(fake.violation, sizeof fake.violation, "%s", text);
    return CUDA_ERROR_INVALID_VALUE;
}

static fake_call *find_call(const char *name)
{
    int i;
    for (i = 0; i < fake.call_count; i++)
        if (!strcmp(fake.calls[i].name, name))
            return &fake.calls[i];
    return NULL;
}

static fake_call *call_named(const char *name)
{
    fake_call *found = find_call(name);
    if (found)
        return found;
    if (fake.call_count == FAKE_NAMES_MAX)
        abort();
    found = &fake.calls[fake.call_count++];
    snprintf(found->name, sizeof found->name, "%s", name);
    return found;
}

/* With the mutex taken, which leave() gives back. */
int32_t fake_enter(fake_call **site, const char *name, int flags)
{
    int32_t code = 0;
    pthread_mutex_lock(&fake.mutex);
    if (!*site)
        *site = call_named(name);
    while (!strcmp(fake.held_name, name)) {
        fake.held++;
        pthread_cond_wait(&fake_released, &fake.mutex);
        fake.held--;
    }
    (*site)->count++;
    if (!fake.set.lean && fake.counters.calls < FAKE_LOG_MAX)
        fake.log[fake.counters.calls] = *site;
    fake.counters.calls++;
    if (fake.fail_in > 0 && --fake.fail_in == 0)
        code = fake.fail_code;
    if ((*site)->fail_in > 0 && --(*site)->fail_in == 0)
        code = (*site)->fail_code;
    if (!code)
        code = fake.sticky;
    if (!code && (fake.forked || (!fake.is_initialised && !(flags & FAKE_BEFORE_INIT))))
        code = CUDA_ERROR_NOT_INITIALIZED;
    if (!code && (flags & FAKE_NEEDS_CONTEXT) && !fake_context_is_live(current_context))
        code = CUDA_ERROR_INVALID_CONTEXT;
    return code;
}

CUresult fake_leave(int32_t code)
{
    pthread_mutex_unlock(&fake.mutex);
    return (CUresult)code;
}

void fake_fail_at(int64_t n, int32_t code)
{
    fake.fail_in = n;
    fake.fail_code = code;
}

void fake_fail_call(const char *name, int64_t nth, int32_t code)
{
    fake_call *found;
    pthread_mutex_lock(&fake.mutex);
    found = call_named(name);
    found->fail_in = nth;
    found->fail_code = code;
    pthread_mutex_unlock(&fake.mutex);
}

void fake_hold(const char *name)
{
    pthread_mutex_lock(&fake.mutex);
    snprintf(fake.held_name, sizeof fake.held_name, "%s", name);
    pthread_cond_broadcast(&fake_released);
    pthread_mutex_unlock(&fake.mutex);
}

int32_t fake_held(void)
{
    int32_t held;
    pthread_mutex_lock(&fake.mutex);
    held = fake.held;
    pthread_mutex_unlock(&fake.mutex);
    return held;
}

void fake_sticky(int32_t code) { fake.sticky = code; }
int64_t fake_call_count(const char *name) { return call_named(name)->count; }
void fake_hide(const char *name, int32_t hidden) { call_named(name)->hidden = hidden; }

void fake_call_log(char *out, int64_t capacity)
{
    int64_t i, used = 0, most = fake.counters.calls < FAKE_LOG_MAX ? fake.counters.calls : FAKE_LOG_MAX;
    *out = 0;
    for (i = 0; i < most && used < capacity; i++)
        used += snprintf(out + used, (size_t)(capacity - used), "%s\n", fake.log[i]->name);
}

void fake_last_violation(char *out, int64_t capacity) { snprintf(out, (size_t)capacity, "%s", fake.violation); }

void fake_counters_get(fake_counters *out)
{
    pthread_mutex_lock(&fake.mutex);
    *out = fake.counters;
    pthread_mutex_unlock(&fake.mutex);
}

void fake_reset_calls(void)
{
    int i;
    pthread_mutex_lock(&fake.mutex);
    fake.counters.calls = fake.counters.violations = fake.counters.v1_calls = 0;
    fake.violation[0] = 0;
    for (i = 0; i < fake.call_count; i++)
        fake.calls[i].count = 0;
    pthread_mutex_unlock(&fake.mutex);
}

void fake_reset(void)
{
    int i;
    fake_counters kept = fake.counters;
    pthread_mutex_lock(&fake.mutex);
    memset(&fake.counters, 0, sizeof fake.counters);
    fake.counters.handles = kept.handles;
    fake.counters.allocations = kept.allocations;
    fake.counters.mappings = kept.mappings;
    fake.counters.reservations = kept.reservations;
    fake.counters.fds = kept.fds;
    fake.counters.contexts = kept.contexts;
    fake.counters.streams = kept.streams;
    fake.counters.events = kept.events;
    fake.fail_in = 0;
    fake.sticky = 0;
    fake.violation[0] = 0;
    for (i = 0; i < fake.call_count; i++) {
        fake.calls[i].count = fake.calls[i].fail_in = 0;
        fake.calls[i].hidden = 0;
    }
    set_defaults();
    pthread_mutex_unlock(&fake.mutex);
}

/* ---- devices and contexts ---- */

#define LOW_BITS(kind) (UINT64_C(0x5eed0000) | (kind))
uint64_t fake_make_handle(uint64_t kind) { return UINT64_C(1) << 63 | ++fake.serial << 32 | LOW_BITS(kind); }

int fake_context_is_live(uint64_t context)
{
    int i;
    for (i = 0; i < FAKE_DEVICES_MAX; i++)
        if (context && fake.contexts[i].handle == context && fake.contexts[i].count > 0)
            return 1;
    return 0;
}

CUresult cuInit(unsigned int flags)
{
    ENTER(FAKE_BEFORE_INIT);
    if (!fake.set.device_count)
        RETURN(CUDA_ERROR_NO_DEVICE);
    if (flags)
        REFUSE("cuInit: flags");
    fake.is_initialised = 1;
    RETURN(0);
}

CUresult cuDriverGetVersion(int *version)
{
    *version = (int)fake.set.driver_version;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    ENTER(0);
    *count = (int)fake.set.device_count;
    RETURN(0);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER(0);
    if (ordinal < 0 || ordinal >= fake.set.device_count)
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    RETURN(0);
}

static int is_device(CUdevice device) { return device >= 0 && device < fake.set.device_count; }

CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    ENTER(0);
    if (!is_device(device))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, "Fake device %d", device);
    RETURN(0);
}

static CUresult uuid_of(CUuuid *uuid, CUdevice device)
{
    int i;
    for (i = 0; i < 16; i++)
        uuid->bytes[i] = (char)(0xA0 + device + i);
    return CUDA_SUCCESS;
}

#undef cuDeviceGetUuid
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    ENTER(0);
    fake.counters.v1_calls++;
    RETURN(uuid_of(uuid, device));
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    ENTER(0);
    if (!is_device(device))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    RETURN(uuid_of(uuid, device));
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    ENTER(0);
    if (!is_device(device))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    switch ((int)attribute) {
    case 102:
        *value = (int)fake.set.vmm_attribute;
        break;
    case 103:
        *value = (int)fake.set.posix_fd_attribute;
        break;
    case 128:
        *value = (int)fake.set.fabric_attribute;
        break;
    default:
        *value = 0;
    }
    RETURN(0);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER(0);
    if (!is_device(device) || device >= FAKE_DEVICES_MAX)
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    if (!fake.contexts[device].count++) {
        fake.contexts[device].handle = fake_make_handle(3);
        fake.counters.contexts++;
    }
    *context = (CUcontext)(uintptr_t)fake.contexts[device].handle;
    RETURN(0);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER(0);
    if (!is_device(device) || device >= FAKE_DEVICES_MAX || fake.contexts[device].count < 1)
        REFUSE("cuDevicePrimaryCtxRelease: not retained");
    if (!--fake.contexts[device].count)
        fake.counters.contexts--;
    RETURN(0);
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER(0);
    *context = (CUcontext)(uintptr_t)current_context;
    RETURN(0);
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER(0);
    if (context && !fake_context_is_live((uint64_t)(uintptr_t)context))
        REFUSE("cuCtxSetCurrent: no such context");
    current_context = (uint64_t)(uintptr_t)context;
    RETURN(0);
}

CUresult cuCtxSynchronize(void)
{
    ENTER(FAKE_NEEDS_CONTEXT);
    RETURN(0);
}

/* ---- allocations ---- */

/* The slot is in the handle's upper half, so that finding one takes no search. */
static allocation *allocation_of(CUmemGenericAllocationHandle handle, fake_handle **place)
{
    fake_handle *found = &fake.handles[handle >> 32 & (FAKE_HANDLES_MAX - 1)];
    if (!found->allocation || found->value != handle)
        return NULL;
    if (place)
        *place = found;
    return found->allocation;
}

static void drop(allocation *found)
{
    if (--found->references)
        return;
    if (found->fd >= 0) {
        close(found->fd);
        fake.counters.fds--;
    }
    fake.counters.allocations--;
    free(found);
}

static int32_t give_handle(allocation *found, CUmemGenericAllocationHandle *out)
{
    int64_t slot;
    if (fake.vacant_count)
        slot = fake.vacant[--fake.vacant_count];
    else if (fake.handle_count < FAKE_HANDLES_MAX)
        slot = fake.handle_count++;
    else
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake.handles[slot].value = UINT64_C(1) << 63 | (++fake.serial & 0x7FFFF) << 44 | (uint64_t)slot << 32 | LOW_BITS(1);
    fake.handles[slot].allocation = found;
    found->references++;
    fake.counters.handles++;
    *out = fake.handles[slot].value;
    return 0;
}

static size_t granularity_of(const CUmemAllocationProp *prop)
{
    int fabric = (prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0;
    return (size_t)(fabric ? fake.set.fabric_granularity : fake.set.granularity_min);
}

static const char *bad_prop(const CUmemAllocationProp *prop)
{
    static const unsigned char zeros[sizeof prop->allocFlags.reserved];
    if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return "prop: type";
    if ((int)prop->location.type != 1 || !is_device(prop->location.id))
        return "prop: location";
    if ((int)prop->requestedHandleTypes & ~(1 | 8))
        return "prop: handle types";
    if (prop->win32HandleMetaData || memcmp(prop->allocFlags.reserved, zeros, sizeof zeros) || prop->allocFlags.usage)
        return "prop: reserved bytes are not zero";
    return NULL;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option)
{
    ENTER(0);
    if (bad_prop(prop))
        REFUSE(bad_prop(prop));
    if (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        REFUSE("granularity: option");
    *granularity = option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ? granularity_of(prop) : (size_t)fake.set.granularity_recommended;
    RETURN(0);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags)
{
    allocation *made;
    char name[64];
    ENTER(FAKE_NEEDS_CONTEXT);
    if (bad_prop(prop) || flags)
        REFUSE(flags ? "cuMemCreate: flags" : bad_prop(prop));
    if (!size || size % granularity_of(prop))
        REFUSE("cuMemCreate: size is no multiple of this prop's granularity");
    if ((prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) && fake.set.fabric_create_result)
        RETURN(fake.set.fabric_create_result);
    if ((int64_t)size > fake.set.memory_total)
        RETURN(CUDA_ERROR_OUT_OF_MEMORY);
    made = calloc(1, sizeof *made);
    snprintf(name, sizeof name, FAKE_MEMORY_NAME "%d", prop->location.id);
    made->fd = fake.set.lean ? -1 : memfd_create(name, MFD_CLOEXEC);
    if (!fake.set.lean && (made->fd < 0 || ftruncate(made->fd, (off_t)size))) {
        if (made->fd >= 0)
            close(made->fd);
        free(made);
        RETURN(CUDA_ERROR_OPERATING_SYSTEM);
    }
    made->size = size;
    made->prop = *prop;
    fake.counters.fds += made->fd >= 0;
    fake.counters.allocations++;
    code = give_handle(made, handle);
    if (code) {
        made->references = 1;
        drop(made);
    }
    RETURN(code);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    fake_handle *place;
    allocation *found;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = allocation_of(handle, &place);
    if (!found) {
        fake_violation("cuMemRelease: unknown or released handle");
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    }
    place->allocation = NULL;
    place->value = 0;
    fake.vacant[fake.vacant_count++] = place - fake.handles;
    fake.counters.handles--;
    drop(found);
    RETURN(0);
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    allocation *found;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = allocation_of(handle, NULL);
    if (!found)
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    *prop = found->prop;
    if (fake.set.properties_kinds >= 0)
        prop->requestedHandleTypes = (CUmemAllocationHandleType)fake.set.properties_kinds;
    if (fake.set.properties_location >= 0)
        prop->location.id = (int)fake.set.properties_location;
    RETURN(0);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    int i;
    ENTER(FAKE_NEEDS_CONTEXT);
    for (i = 0; i < FAKE_RANGES_MAX; i++)
        if (fake.mappings[i].allocation && (char *)address >= fake.mappings[i].base &&
            (char *)address < fake.mappings[i].base + fake.mappings[i].size)
            RETURN(give_handle(fake.mappings[i].allocation, handle));
    RETURN(CUDA_ERROR_INVALID_VALUE);
}

/* ---- sharing ---- */

typedef struct token {
    char magic[8];
    int32_t pid;
    int32_t fd;
    uint64_t start;
    uint64_t inode;
    uint64_t size;
    int32_t kinds;
    int32_t location;
    uint64_t check;
    uint8_t rest[8];
} token;
_Static_assert(sizeof(token) == 64 && sizeof(token) == sizeof(CUmemFabricHandle), "a fabric handle has 64 bytes");

static uint64_t start_of(int32_t pid)
{
    char path[64], text[1024], *end;
    FILE *file;
    unsigned long long start = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    file = fopen(path, "re");
    if (!file)
        return 0;
    if (fgets(text, sizeof text, file) && (end = strrchr(text, ')')))
        (void)sscanf(end + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &start);
    fclose(file);
    return start;
}

static uint64_t check_of(const token *made) { return made->inode * 31 + made->size * 17 + (uint64_t)made->pid * 7 + made->start; }

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType kind,
                                      unsigned long long flags)
{
    allocation *found;
    struct stat status;
    token made;
    int fd;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = allocation_of(handle, NULL);
    if (!found)
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    if (flags || ((int)kind != 1 && (int)kind != 8))
        REFUSE("export: flags or kind");
    if (!((int)found->prop.requestedHandleTypes & (int)kind))
        REFUSE("export: a kind that was not requested at create");
    fake.counters.exports++;
    if ((int)kind == 1 && fake.set.lean) {
        fd = (int)fake.set.lean_fd;
        memcpy(out, &fd, sizeof fd);
        RETURN(0);
    }
    if ((int)kind == 1) {
        fd = fcntl(found->fd, fake.set.export_cloexec ? F_DUPFD_CLOEXEC : F_DUPFD, 0);
        if (fd < 0)
            RETURN(CUDA_ERROR_OPERATING_SYSTEM);
        memcpy(out, &fd, sizeof fd);
        RETURN(0);
    }
    memset(&made, 0, sizeof made);
    memcpy(made.magic, "FAKEFAB1", 8);
    fstat(found->fd, &status);
    made.pid = getpid();
    made.fd = found->fd;
    made.start = start_of(made.pid);
    made.inode = status.st_ino;
    made.size = found->size;
    made.kinds = (int32_t)found->prop.requestedHandleTypes;
    made.location = found->prop.location.id;
    made.check = check_of(&made);
    memcpy(out, &made, sizeof made);
    RETURN(0);
}

static int32_t import_memory(int fd, int32_t kinds, int32_t location, CUmemGenericAllocationHandle *handle)
{
    struct stat status;
    allocation *made = calloc(1, sizeof *made);
    int32_t code;
    made->fd = fd;
    made->size = fd >= 0 && !fstat(fd, &status) ? (size_t)status.st_size : (size_t)fake.set.granularity_min;
    made->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    made->prop.requestedHandleTypes = (CUmemAllocationHandleType)kinds;
    made->prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    made->prop.location.id = location;
    fake.counters.fds += fd >= 0;
    fake.counters.allocations++;
    fake.counters.imports++;
    code = give_handle(made, handle);
    if (code) {
        made->references = 1;
        drop(made);
    }
    return code;
}

/* The device that memory of this driver is on, which its name ends in; -1: it is other memory. */
static int device_of_memory(int fd)
{
    char path[64], target[128];
    ssize_t length;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    length = readlink(path, target, sizeof target - 1);
    if (length < 0)
        return -1;
    target[length] = 0;
    if (strncmp(target, "/memfd:" FAKE_MEMORY_NAME, strlen("/memfd:" FAKE_MEMORY_NAME)))
        return -1;
    return atoi(target + strlen("/memfd:" FAKE_MEMORY_NAME));
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, CUmemAllocationHandleType kind)
{
    token given;
    struct stat status;
    char path[64];
    int fd;
    ENTER(FAKE_NEEDS_CONTEXT);
    if ((int)kind == 1 && fake.set.lean)
        RETURN(import_memory(-1, 1, 0, handle));
    if ((int)kind == 1) {
        if ((uintptr_t)shareable > INT32_MAX || device_of_memory((int)(uintptr_t)shareable) < 0) {
            fake_violation("import: the fd's value is expected, of this driver's memory");
            RETURN(fake.set.wrong_kind_result);
        }
        fd = fcntl((int)(uintptr_t)shareable, F_DUPFD_CLOEXEC, 0);
        if (fd < 0)
            RETURN(CUDA_ERROR_OPERATING_SYSTEM);
        RETURN(import_memory(fd, 1, device_of_memory(fd), handle));
    }
    if ((int)kind != 8)
        REFUSE("import: kind");
    if (fake.set.import_fabric_result)
        RETURN(fake.set.import_fabric_result);
    if ((uintptr_t)shareable < 65536) {
        fake_violation("import: a pointer to 64 bytes is expected");
        RETURN(fake.set.wrong_kind_result);
    }
    memcpy(&given, shareable, sizeof given);
    if (memcmp(given.magic, "FAKEFAB1", 8) || given.check != check_of(&given)) {
        fake_violation("import: this is no fabric handle");
        RETURN(fake.set.wrong_kind_result);
    }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", given.pid, given.fd);
    /* The exporter is gone, or has released it: a real driver may give anything. */
    if (start_of(given.pid) != given.start || (fd = open(path, O_RDWR | O_CLOEXEC)) < 0) {
        fake.counters.stale_fabric_imports++;
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    }
    if (fstat(fd, &status) || status.st_ino != given.inode || (uint64_t)status.st_size != given.size) {
        close(fd);
        fake.counters.stale_fabric_imports++;
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    }
    RETURN(import_memory(fd, given.kinds, given.location, handle));
}

/* ---- addresses ---- */

static range *range_at(range *ranges, CUdeviceptr address)
{
    int i;
    for (i = 0; i < FAKE_RANGES_MAX; i++)
        if (ranges[i].base && (uint64_t)(uintptr_t)ranges[i].base <= address &&
            address < (uint64_t)(uintptr_t)ranges[i].base + ranges[i].size)
            return &ranges[i];
    return NULL;
}

static range *vacant(range *ranges)
{
    int i;
    for (i = 0; i < FAKE_RANGES_MAX; i++)
        if (!ranges[i].base)
            return &ranges[i];
    return NULL;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags)
{
    range *place;
    void *base;
    ENTER(FAKE_NEEDS_CONTEXT);
    if (flags || wanted || (alignment & (alignment - 1)) || !size || size % 4096)
        REFUSE("reserve: size, alignment, address or flags");
    place = vacant(fake.reservations);
    base = place ? mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
    if (base == MAP_FAILED)
        RETURN(CUDA_ERROR_OUT_OF_MEMORY);
    place->base = base;
    place->size = size;
    fake.counters.reservations++;
    *address = (CUdeviceptr)(uintptr_t)base;
    RETURN(0);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    range *found;
    int i;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = range_at(fake.reservations, address);
    if (!found || (CUdeviceptr)(uintptr_t)found->base != address || found->size != size)
        REFUSE("address free: not the exact base and size of a reservation");
    for (i = 0; i < FAKE_RANGES_MAX; i++)
        if (fake.mappings[i].base && fake.mappings[i].base >= found->base && fake.mappings[i].base < found->base + found->size)
            REFUSE("address free: something is mapped there");
    munmap(found->base, found->size);
    memset(found, 0, sizeof *found);
    fake.counters.reservations--;
    RETURN(0);
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    allocation *found;
    range *reserved, *place;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = allocation_of(handle, NULL);
    if (!found)
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    reserved = range_at(fake.reservations, address);
    if (flags || offset || !size || size % granularity_of(&found->prop))
        REFUSE("map: flags, offset or size");
    if (!reserved || address + size > (CUdeviceptr)(uintptr_t)reserved->base + reserved->size || range_at(fake.mappings, address))
        REFUSE("map: not inside a reservation, or mapped already");
    if (size > found->size)
        RETURN(CUDA_ERROR_INVALID_VALUE); /* no fault of the order of calls: a declared size that is too large */
    place = vacant(fake.mappings);
    if (!place || mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, found->fd, 0) == MAP_FAILED)
        RETURN(CUDA_ERROR_OUT_OF_MEMORY);
    place->base = (char *)(uintptr_t)address;
    place->size = size;
    place->allocation = found;
    place->access = 0;
    found->references++;
    fake.counters.mappings++;
    RETURN(0);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    range *found;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = range_at(fake.mappings, address);
    if (!found || (CUdeviceptr)(uintptr_t)found->base != address || found->size != size)
        REFUSE("unmap: not exactly one whole mapping");
    fake_copies_lose(found->base, found->size);
    mmap(found->base, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    drop(found->allocation);
    memset(found, 0, sizeof *found);
    fake.counters.mappings--;
    RETURN(0);
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    range *found;
    int flags;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = range_at(fake.mappings, address);
    if (!found || (CUdeviceptr)(uintptr_t)found->base != address || found->size != size)
        REFUSE("set access: not a mapping");
    if (count != 1 || (int)desc->location.type != 1 || !is_device(desc->location.id))
        REFUSE("set access: location");
    flags = (int)desc->flags;
    if (flags != 0 && flags != 1 && flags != 3)
        REFUSE("set access: flags");
    if (mprotect(found->base, size, flags == 3 ? PROT_READ | PROT_WRITE : flags == 1 ? PROT_READ : PROT_NONE))
        RETURN(CUDA_ERROR_OPERATING_SYSTEM);
    found->access = flags;
    RETURN(0);
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address)
{
    range *found;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = range_at(fake.mappings, address);
    if (!found || (int)location->type != 1)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    *flags = (unsigned long long)found->access;
    RETURN(0);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    range *found;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = range_at(fake.mappings, address);
    if (!found)
        RETURN(CUDA_ERROR_NOT_FOUND);
    *base = (CUdeviceptr)(uintptr_t)found->base;
    *size = fake.set.observed_size >= 0 ? (size_t)fake.set.observed_size : found->size;
    RETURN(0);
}

static int32_t pointer_attribute(void *data, int attribute, CUdeviceptr address)
{
    range *mapping = range_at(fake.mappings, address), *reserved = range_at(fake.reservations, address);
    uint64_t wide;
    int32_t narrow = 0;
    if (!mapping || !reserved)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case 2: /* memory type: device */
        narrow = 2;
        break;
    case 9:
        narrow = mapping->allocation->prop.location.id;
        break;
    case 11:
        wide = (uint64_t)(uintptr_t)reserved->base;
        memcpy(data, &wide, 8);
        return 0;
    case 12:
        wide = reserved->size;
        memcpy(data, &wide, 8);
        return 0;
    case 14: /* writes 4 bytes of what callers hold in 8 */
        narrow = (int32_t)mapping->allocation->prop.requestedHandleTypes;
        break;
    case 16:
        narrow = mapping->access;
        break;
    case 18:
        wide = mapping->size;
        memcpy(data, &wide, 8);
        return 0;
    case 19:
        wide = (uint64_t)(uintptr_t)mapping->base;
        memcpy(data, &wide, 8);
        return 0;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    memcpy(data, &narrow, 4);
    return 0;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address)
{
    ENTER(FAKE_NEEDS_CONTEXT);
    RETURN(pointer_attribute(data, (int)attribute, address));
}

static int32_t copy_now(char *dst, const char *src, size_t size, CUdeviceptr device)
{
    range *found = range_at(fake.mappings, device);
    if (!found || device + size > (CUdeviceptr)(uintptr_t)found->base + found->size || !found->access)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(dst, src, size);
    return 0;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t size)
{
    ENTER(FAKE_NEEDS_CONTEXT);
    RETURN(copy_now((char *)(uintptr_t)dst, src, size, dst));
}

CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t size)
{
    ENTER(FAKE_NEEDS_CONTEXT);
    RETURN(copy_now(dst, (const char *)(uintptr_t)src, size, src));
}

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t size, CUmemRangeHandleType kind,
                                       unsigned long long flags)
{
    ENTER(FAKE_NEEDS_CONTEXT);
    (void)handle;
    (void)address;
    (void)size;
    (void)kind;
    (void)flags;
    RETURN(CUDA_ERROR_NOT_SUPPORTED);
}

/* ---- what is there only as a trap: older functions under bare names, with 32-bit sizes and addresses ---- */

#undef cuMemGetAddressRange
CUresult cuMemGetAddressRange(unsigned int *base, unsigned int *size, unsigned int address)
{
    range *found;
    ENTER(FAKE_NEEDS_CONTEXT);
    fake.counters.v1_calls++;
    found = range_at(fake.mappings, address);
    *base = found ? (unsigned int)(uintptr_t)found->base : 0;
    *size = found ? (unsigned int)found->size : 0;
    RETURN(0);
}

#undef cuStreamDestroy
CUresult cuStreamDestroy(CUstream stream)
{
    ENTER(0);
    fake.counters.v1_calls++;
    (void)stream;
    RETURN(CUDA_ERROR_INVALID_VALUE);
}

#undef cuEventDestroy
CUresult cuEventDestroy(CUevent event)
{
    ENTER(0);
    fake.counters.v1_calls++;
    (void)event;
    RETURN(CUDA_ERROR_INVALID_VALUE);
}

#undef cuDevicePrimaryCtxRelease
CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    ENTER(0);
    fake.counters.v1_calls++;
    (void)device;
    RETURN(CUDA_ERROR_INVALID_VALUE);
}

/* ---- names ---- */

static const struct {
    int32_t code;
    const char *name;
    const char *text;
} results[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult cuGetErrorName(CUresult code, const char **out)
{
    size_t i;
    for (i = 0; i < sizeof results / sizeof *results; i++)
        if (results[i].code == (int32_t)code) {
            *out = results[i].name;
            return CUDA_SUCCESS;
        }
    *out = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char **out)
{
    size_t i;
    for (i = 0; i < sizeof results / sizeof *results; i++)
        if (results[i].code == (int32_t)code) {
            *out = results[i].text;
            return CUDA_SUCCESS;
        }
    *out = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

/* Base name and version; the result is success also where there is no such function, and the pointer NULL. */
CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
    static const char *const suffixed[] = {"cuMemGetAddressRange", "cuStreamDestroy", "cuEventDestroy", "cuDevicePrimaryCtxRelease",
                                           "cuDeviceGetUuid", "cuGetProcAddress", "cuMemcpyHtoD", "cuMemcpyDtoH"};
    char symbol[128];
    size_t i;
    const fake_call *known = find_call(name);
    (void)flags;
    *out = NULL;
    /* A driver older than what it is asked for gives its newest function of that name, which takes other arguments. */
    if (!(known && known->hidden) && !strcmp(name, "cuMemcpyBatchAsync") && version > fake.set.driver_version)
        *out = dlsym(fake_self(), "cuMemcpyBatchAsync");
    else if (!(known && known->hidden) && version <= fake.set.driver_version) {
        snprintf(symbol, sizeof symbol, "%s", name);
        for (i = 0; i < sizeof suffixed / sizeof *suffixed; i++)
            if (!strcmp(name, suffixed[i]))
                snprintf(symbol, sizeof symbol, "%s_v2", name);
        if (!strcmp(name, "cuMemcpyBatchAsync") && version >= 13000)
            snprintf(symbol, sizeof symbol, "cuMemcpyBatchAsync_v2");
        *out = dlsym(fake_self(), symbol);
    }
    if (status)
        *status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

void *fake_self(void)
{
    static void *self;
    Dl_info info;
    if (!self && dladdr((void *)(uintptr_t)&fake_reset, &info))
        self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    return self;
}
