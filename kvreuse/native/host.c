/* Regions and mappings: those of host memory here, those of CUDA by cuda.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"

/* By number, since old C libraries lack the names (linux/memfd.h, linux/fcntl.h). */
#define KVR_MFD_CLOEXEC 1U
#define KVR_MFD_ALLOW_SEALING 2U
#define KVR_F_ADD_SEALS 1033
#define KVR_F_GET_SEALS 1034
#define KVR_SEAL_SEAL 1
#define KVR_SEAL_SHRINK 2
#define KVR_SEAL_GROW 4

int64_t kvr_page_nbytes(void) { return sysconf(_SC_PAGESIZE); }

static int64_t round_up(int64_t nbytes)
{
    int64_t page = kvr_page_nbytes();
    return (nbytes + page - 1) & -page; /* a power of two */
}

static int32_t access_of(int32_t fd, int32_t *out)
{
    int mode = fcntl(fd, F_GETFL);
    if (mode < 0)
        return kvr_fail_errno("fcntl", errno);
    mode &= O_ACCMODE;
    *out = mode == O_RDWR ? KVR_ACCESS_READ_WRITE : mode == O_RDONLY ? KVR_ACCESS_READ : KVR_ACCESS_NONE;
    return KVR_OK;
}

static int64_t seals_of(int32_t fd)
{
    int seals = fcntl(fd, KVR_F_GET_SEALS);
    return seals < 0 ? -1 : seals;
}

/* An fd of a file without a name in a directory. */
static int32_t open_unnamed(const char *directory, int32_t *out)
{
    char path[4096];
    uint8_t random[KVR_REGION_ID_NBYTES];
    int written;
    int32_t status, fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 && errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)
        return kvr_fail_errno("open", errno);
    if (fd < 0) {
        /* A file system without O_TMPFILE: the name exists for a moment. */
        kvr_handles_lock();
        status = kvr_random_id(random);
        kvr_handles_unlock();
        if (status)
            return status;
        written = snprintf(path, sizeof path, "%s/.kvreuse-%02x%02x%02x%02x%02x%02x%02x%02x", directory, random[0], random[1],
                           random[2], random[3], random[4], random[5], random[6], random[7]);
        if (written < 0 || written >= (int)sizeof path)
            return kvr_fail_errno("open", ENAMETOOLONG);
        fd = open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
        if (fd < 0)
            return kvr_fail_errno("open", errno);
        if (unlink(path)) {
            status = kvr_fail_errno("unlink", errno);
            (void)close(fd);
            return status;
        }
    }
    *out = fd;
    return KVR_OK;
}

static void describe_region(const kvr_region *region, kvr_region_info *out)
{
    memset(out, 0, sizeof *out);
    out->handle = region->object.handle;
    out->nbytes = region->nbytes;
    out->physical_nbytes = region->physical_nbytes;
    out->kind = region->kind;
    out->access = region->access;
    out->origin = region->origin;
    out->mapping_count = region->mapping_count;
    out->device = region->device;
    out->inode = region->inode;
    memcpy(out->region_id, region->region_id, sizeof out->region_id);
    out->provider = region->provider;
    out->fabric_count = region->fabric_count;
}

int32_t kvr_is_host(const kvr_region *region, const char *call)
{
    return region->provider == KVR_PROVIDER_HOST
               ? KVR_OK
               : kvr_fail(KVR_ERROR_NOT_SUPPORTED, KVR_DETAIL_PROVIDER, call, region->object.handle, region->provider, 0, 0);
}

int32_t kvr_add_region(const kvr_region *made, const uint8_t *region_id, const char *call, kvr_region_info *out)
{
    uint8_t fresh_id[KVR_REGION_ID_NBYTES];
    kvr_object *object;
    int32_t status = KVR_OK;
    kvr_handles_lock();
    if (!region_id)
        status = kvr_random_id(fresh_id);
    if (!status)
        status = kvr_register(NULL, KVR_SORT_REGION, call, &object);
    if (!status) {
        kvr_region *region = (kvr_region *)object;
        kvr_object head = *object;
        *region = *made;
        region->object = head;
        memcpy(region->region_id, region_id ? region_id : fresh_id, sizeof region->region_id);
        if (region->fd >= 0)
            kvr_count_fds(1);
        describe_region(region, out);
    }
    kvr_handles_unlock();
    return status;
}

/* Make a region of fd, which it owns on success. region_id NULL: a new one. */
static int32_t make_region(int32_t fd, int64_t nbytes, int64_t physical_nbytes, int32_t kind, int32_t origin,
                           const uint8_t *region_id, const char *call, kvr_region_info *out)
{
    struct stat found;
    kvr_region made = {.fd = fd,
                       .provider = KVR_PROVIDER_HOST,
                       .nbytes = nbytes,
                       .physical_nbytes = physical_nbytes,
                       .kind = kind,
                       .origin = origin};
    int32_t status = fstat(fd, &found) ? kvr_fail_errno("fstat", errno) : KVR_OK;
    if (!status)
        status = access_of(fd, &made.access);
    if (status)
        return status;
    made.device = (uint64_t)found.st_dev;
    made.inode = (uint64_t)found.st_ino;
    return kvr_add_region(&made, region_id, call, out);
}

/* Give fresh memory its size, and the seals or the blocks that keep it. */
static int32_t size_memory(int32_t fd, int64_t physical_nbytes, int32_t is_file)
{
    int code;
    if (ftruncate(fd, physical_nbytes))
        return kvr_fail_errno("ftruncate", errno);
    if (!is_file)
        return fcntl(fd, KVR_F_ADD_SEALS, KVR_SEAL_SHRINK | KVR_SEAL_GROW | KVR_SEAL_SEAL) ? kvr_fail_errno("fcntl", errno)
                                                                                           : KVR_OK;
    /* A full file system is an error now, not a SIGBUS at the first touch. */
    do {
        code = posix_fallocate(fd, 0, physical_nbytes);
    } while (code == EINTR);
    return code ? kvr_fail_errno("posix_fallocate", code) : KVR_OK;
}

int32_t kvr_host_allocate(int64_t nbytes, int32_t kind, const char *name, const char *directory, kvr_region_info *out)
{
    static const char call[] = "host_allocate";
    int64_t physical, name_nbytes = (int64_t)strlen(name);
    int32_t fd, status;
    if (nbytes < 1 || nbytes > KVR_NBYTES_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_NBYTES_RANGE, call, nbytes, KVR_NBYTES_MAX, 0, 0);
    if (name_nbytes > KVR_REGION_NAME_NBYTES)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_NAME_TOO_LONG, call, name_nbytes, KVR_REGION_NAME_NBYTES, 0, 0);
    if (kind == KVR_KIND_FABRIC)
        return kvr_fail(KVR_ERROR_NOT_SUPPORTED, KVR_DETAIL_KIND_NOT_ALLOCATABLE, call, kind, 0, 0, 0);
    if (kind != KVR_KIND_NONE && kind != KVR_KIND_POSIX_FD)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_KIND_UNKNOWN, call, kind, 0, 0, 0);
    status = kvr_forked(call);
    if (status)
        return status;
    physical = round_up(nbytes);
    if (directory) {
        status = open_unnamed(directory, &fd);
        if (status)
            return status;
    } else {
        fd = (int32_t)syscall(SYS_memfd_create, name, KVR_MFD_CLOEXEC | KVR_MFD_ALLOW_SEALING);
        if (fd < 0)
            return kvr_fail_errno("memfd_create", errno);
    }
    status = size_memory(fd, physical, directory != NULL);
    if (!status)
        status = make_region(fd, nbytes, physical, kind, KVR_ORIGIN_ALLOCATED, NULL, call, out);
    if (status)
        (void)close(fd);
    return status;
}

static int32_t find_region(int64_t handle, const char *call, kvr_region **out)
{
    kvr_object *object;
    int32_t status = kvr_find(handle, KVR_SORT_REGION, call, &object);
    if (!status)
        *out = (kvr_region *)object;
    return status;
}

static int32_t find_mapping(int64_t handle, const char *call, kvr_mapping **out)
{
    kvr_object *object;
    int32_t status = kvr_find(handle, KVR_SORT_MAPPING, call, &object);
    if (!status)
        *out = (kvr_mapping *)object;
    return status;
}

int32_t kvr_region_info_get(int64_t handle, kvr_region_info *out)
{
    kvr_region *region;
    int32_t status;
    kvr_handles_lock();
    status = find_region(handle, "region_info", &region);
    if (!status)
        describe_region(region, out);
    kvr_handles_unlock();
    return status;
}

int32_t kvr_region_export(int64_t handle, int32_t *out_fd)
{
    static const char call[] = "region_export";
    kvr_region *region;
    int32_t status;
    int fd;
    kvr_handles_lock();
    status = find_region(handle, call, &region);
    if (!status)
        status = kvr_forked(call);
    if (!status && region->kind != KVR_KIND_POSIX_FD)
        status = kvr_fail(KVR_ERROR_NOT_SUPPORTED, KVR_DETAIL_KIND_NOT_EXPORTABLE, call, region->kind, 0, 0, 0);
    if (!status && region->provider != KVR_PROVIDER_HOST) {
        kvr_call_begin(&region->object);
        kvr_handles_unlock();
        status = kvr_cuda_export_fd(region, out_fd);
        kvr_handles_lock();
        kvr_call_end(&region->object);
    } else if (!status) {
        fd = fcntl(region->fd, F_DUPFD_CLOEXEC, 0);
        if (fd < 0)
            status = kvr_fail_errno("fcntl", errno);
        else
            *out_fd = fd;
    }
    kvr_handles_unlock();
    return status;
}

int32_t kvr_region_import(int32_t fd, int64_t nbytes, int64_t physical_nbytes, const uint8_t *region_id, uint64_t device,
                          uint64_t inode, uint32_t flags, kvr_region_info *out)
{
    static const char call[] = "region_import";
    struct stat found;
    int32_t status, own;
    if (flags & ~(uint32_t)KVR_IMPORT_ALLOW_UNSEALED)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_FLAGS_UNKNOWN, call, flags, KVR_IMPORT_ALLOW_UNSEALED, 0, 0);
    if (fd < 0)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_FD_NEGATIVE, call, fd, 0, 0, 0);
    if (nbytes < 1 || nbytes > KVR_NBYTES_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_NBYTES_RANGE, call, nbytes, KVR_NBYTES_MAX, 0, 0);
    if (physical_nbytes != round_up(nbytes))
        return kvr_fail(KVR_ERROR_SIZE_MISMATCH, KVR_DETAIL_IMPORT_NBYTES, call, nbytes, physical_nbytes, kvr_page_nbytes(), 0);
    if (fstat(fd, &found))
        return kvr_fail_errno("fstat", errno);
    if (!S_ISREG(found.st_mode))
        return kvr_fail(KVR_ERROR_KIND_MISMATCH, KVR_DETAIL_FD_NOT_MEMORY, call, fd, found.st_mode, 0, 0);
    if ((device || inode) && (device != (uint64_t)found.st_dev || inode != (uint64_t)found.st_ino))
        return kvr_fail(KVR_ERROR_STALE_HANDLE, KVR_DETAIL_IMPORT_INODE, call, (int64_t)device, (int64_t)inode,
                        (int64_t)found.st_dev, (int64_t)found.st_ino);
    if (found.st_size != physical_nbytes)
        return kvr_fail(KVR_ERROR_SIZE_MISMATCH, KVR_DETAIL_IMPORT_SIZE, call, physical_nbytes, found.st_size, 0, 0);
    if (!(flags & KVR_IMPORT_ALLOW_UNSEALED)) {
        int64_t seals = seals_of(fd);
        if (seals < 0 || !(seals & KVR_SEAL_SHRINK))
            return kvr_fail(KVR_ERROR_PERMISSION_DENIED, KVR_DETAIL_IMPORT_SEALS, call, seals, KVR_SEAL_SHRINK, 0, 0);
    }
    status = kvr_forked(call);
    if (status)
        return status;
    own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return kvr_fail_errno("fcntl", errno);
    status = make_region(own, nbytes, physical_nbytes, KVR_KIND_POSIX_FD, KVR_ORIGIN_IMPORTED, region_id, call, out);
    if (status)
        (void)close(own);
    return status;
}

int32_t kvr_region_observe(int64_t handle, kvr_observation *out)
{
    kvr_region *region;
    struct stat found;
    int32_t status, access = KVR_ACCESS_NONE;
    kvr_handles_lock();
    status = find_region(handle, "region_observe", &region);
    if (!status)
        status = kvr_is_host(region, "region_observe");
    if (!status && fstat(region->fd, &found))
        status = kvr_fail_errno("fstat", errno);
    if (!status)
        status = access_of(region->fd, &access);
    if (!status) {
        memset(out, 0, sizeof *out);
        out->file_nbytes = found.st_size;
        out->allocated_nbytes = found.st_blocks * 512;
        out->device = (uint64_t)found.st_dev;
        out->inode = (uint64_t)found.st_ino;
        out->file_mode = found.st_mode;
        out->seals = seals_of(region->fd);
        out->access = access;
        out->page_nbytes = kvr_page_nbytes();
        out->block_nbytes = found.st_blksize;
    }
    kvr_handles_unlock();
    return status;
}

int32_t kvr_region_placement(int64_t handle, int64_t capacity, int64_t *nodes, int64_t *out_count)
{
    static const char call[] = "region_placement";
    void *pages[KVR_PLACEMENT_COUNT_MAX];
    int found[KVR_PLACEMENT_COUNT_MAX];
    kvr_region *region;
    const kvr_mapping *mapping = NULL;
    int64_t i, count = 0, page = kvr_page_nbytes();
    int32_t status;
    kvr_handles_lock();
    status = find_region(handle, call, &region);
    if (!status)
        status = kvr_is_host(region, call);
    if (!status && (capacity < 1 || capacity > KVR_PLACEMENT_COUNT_MAX))
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, capacity, KVR_PLACEMENT_COUNT_MAX, 0, 0);
    if (!status)
        status = kvr_forked(call);
    if (!status)
        mapping = kvr_mapping_of(region);
    if (mapping) {
        int64_t last = (mapping->nbytes - 1) / page;
        count = last + 1 < capacity ? last + 1 : capacity;
        for (i = 0; i < count; i++)
            pages[i] = mapping->address + (count > 1 ? last / (count - 1) * i + last % (count - 1) * i / (count - 1) : 0) * page;
        /* Without target nodes, move_pages moves nothing and tells where each page is. */
        if (syscall(SYS_move_pages, 0, (unsigned long)count, pages, NULL, found, 0) < 0)
            status = kvr_fail_errno("move_pages", errno);
    }
    kvr_handles_unlock();
    if (!status) {
        for (i = 0; i < count; i++)
            nodes[i] = found[i];
        *out_count = count;
    }
    return status;
}

int32_t kvr_map_memory(int32_t fd, int64_t nbytes, int64_t offset_bytes, int32_t access, int32_t dontfork, const char *call,
                       uint8_t **out)
{
    struct stat found;
    void *address;
    int protection = access == KVR_ACCESS_READ_WRITE ? PROT_READ | PROT_WRITE : PROT_READ;
    /* Touching pages that a file was cut by is a SIGBUS. */
    if (fstat(fd, &found))
        return kvr_fail_errno("fstat", errno);
    if (found.st_size < offset_bytes + nbytes)
        return kvr_fail(KVR_ERROR_SIZE_MISMATCH, KVR_DETAIL_IMPORT_SIZE, call, offset_bytes + nbytes, found.st_size, 0, 0);
    address = mmap(NULL, (size_t)nbytes, protection, MAP_SHARED, fd, offset_bytes);
    if (address == MAP_FAILED)
        return kvr_fail_errno("mmap", errno);
    if (dontfork && madvise(address, (size_t)nbytes, MADV_DONTFORK)) {
        int32_t status = kvr_fail_errno("madvise", errno);
        (void)munmap(address, (size_t)nbytes);
        return status;
    }
    *out = address;
    return KVR_OK;
}

static void describe_mapping(const kvr_mapping *mapping, kvr_mapping_info *out)
{
    memset(out, 0, sizeof *out);
    out->handle = mapping->object.handle;
    out->region = mapping->region->object.handle;
    out->address = mapping->is_unmapped ? 0 : (uint64_t)(uintptr_t)mapping->address;
    out->nbytes = mapping->nbytes;
    out->access = mapping->access;
    out->use_count = mapping->use_count + mapping->hold_count;
}

static int32_t check_map(const kvr_region *region, int32_t access, uint32_t flags, const char *call)
{
    if (access != KVR_ACCESS_READ && access != KVR_ACCESS_READ_WRITE)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_ACCESS_UNKNOWN, call, access, 0, 0, 0);
    if (flags & ~(uint32_t)KVR_MAP_DONTFORK)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_FLAGS_UNKNOWN, call, flags, KVR_MAP_DONTFORK, 0, 0);
    if (access == KVR_ACCESS_READ_WRITE && region->access != KVR_ACCESS_READ_WRITE)
        return kvr_fail(KVR_ERROR_PERMISSION_DENIED, KVR_DETAIL_ACCESS_READ_ONLY, call, region->object.handle, 0, 0, 0);
    return kvr_forked(call);
}

int32_t kvr_region_map(int64_t handle, int32_t access, uint32_t flags, kvr_mapping_info *out)
{
    static const char call[] = "region_map";
    kvr_region *region;
    kvr_mapping unnamed;
    kvr_object *object;
    uint8_t *address = NULL;
    int32_t status;
    kvr_handles_lock();
    status = find_region(handle, call, &region);
    if (!status)
        status = check_map(region, access, flags, call);
    if (!status && region->provider != KVR_PROVIDER_HOST) {
        uint64_t device_address = 0;
        kvr_call_begin(&region->object);
        kvr_handles_unlock();
        status = kvr_cuda_map(region, access, call, &device_address);
        address = (uint8_t *)(uintptr_t)device_address;
        kvr_handles_lock();
        kvr_call_end(&region->object);
    } else if (!status) {
        status = kvr_map_memory(region->fd, region->nbytes, 0, access, (int32_t)(flags & KVR_MAP_DONTFORK), call, &address);
    }
    if (!status) {
        status = kvr_register(NULL, KVR_SORT_MAPPING, call, &object);
        if (status && region->provider != KVR_PROVIDER_HOST) {
            unnamed = (kvr_mapping){.region = region, .address = address};
            (void)kvr_cuda_unmap(&unnamed);
        } else if (status) {
            (void)munmap(address, (size_t)region->nbytes);
        } else {
            kvr_mapping *mapping = (kvr_mapping *)object;
            mapping->region = region;
            mapping->address = address;
            mapping->nbytes = region->nbytes;
            mapping->access = access;
            region->mapping_count++;
            describe_mapping(mapping, out);
        }
    }
    kvr_handles_unlock();
    return status;
}

int32_t kvr_region_close(int64_t handle)
{
    static const char call[] = "region_close";
    kvr_object *object;
    kvr_region *region = NULL;
    int32_t fd = -1, status;
    kvr_handles_lock();
    status = kvr_find_idle(handle, KVR_SORT_REGION, call, &object);
    if (!status)
        region = (kvr_region *)object;
    if (!status && region->mapping_count)
        status = kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_REGION_MAPPED, call, handle, region->mapping_count, 0, 0);
    if (!status && region->fabric_count)
        status = kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_FABRIC_GIVEN_OUT, call, handle, region->fabric_count, 0, 0);
    if (!status && region->provider != KVR_PROVIDER_HOST) {
        region->object.closing = 1;
        kvr_handles_unlock();
        status = kvr_cuda_release(region);
        kvr_handles_lock();
        region->object.closing = 0;
    }
    if (!status) {
        fd = region->fd;
        if (region->provider == KVR_PROVIDER_HOST)
            kvr_count_fds(-1);
        kvr_unregister(&region->object);
    }
    kvr_handles_unlock();
    /* After close() the number is free whatever it says. */
    if (fd >= 0)
        (void)close(fd);
    return status;
}

int32_t kvr_mapping_info_get(int64_t handle, kvr_mapping_info *out)
{
    kvr_mapping *mapping;
    int32_t status;
    kvr_handles_lock();
    status = find_mapping(handle, "mapping_info", &mapping);
    if (!status)
        describe_mapping(mapping, out);
    kvr_handles_unlock();
    return status;
}

int32_t kvr_mapping_use(int64_t handle, int32_t delta)
{
    static const char call[] = "mapping_use";
    kvr_mapping *mapping;
    int32_t status;
    kvr_handles_lock();
    status = find_mapping(handle, call, &mapping);
    if (!status && ((delta != 1 && delta != -1) || mapping->use_count + (int64_t)delta < 0 ||
                    mapping->use_count + (int64_t)delta > INT32_MAX))
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, delta, 1, 0, 0);
    if (!status)
        mapping->use_count += delta;
    kvr_handles_unlock();
    return status;
}

int32_t kvr_mapping_view(int64_t handle, int32_t delta, kvr_mapping_info *out)
{
    kvr_mapping *mapping;
    int32_t status;
    kvr_handles_lock();
    status = find_mapping(handle, "mapping_buffer", &mapping);
    if (!status && mapping->region->provider != KVR_PROVIDER_HOST)
        status = kvr_fail(KVR_ERROR_NOT_SUPPORTED, KVR_DETAIL_NO_HOST_ADDRESS, "mapping_buffer", handle, 0, 0, 0);
    if (!status) {
        mapping->hold_count += delta;
        describe_mapping(mapping, out);
    }
    kvr_handles_unlock();
    return status;
}

int32_t kvr_mapping_take(int64_t handle, const char *call, kvr_mapping_info *out)
{
    kvr_mapping *mapping;
    int32_t status;
    kvr_handles_lock();
    status = find_mapping(handle, call, &mapping);
    if (!status)
        status = kvr_forked(call);
    if (!status && mapping->is_unmapped)
        status = kvr_fail(KVR_ERROR_STALE_HANDLE, KVR_DETAIL_HANDLE_STALE, call, handle, 0, 0, 0);
    if (!status) {
        mapping->hold_count++;
        describe_mapping(mapping, out);
    }
    kvr_handles_unlock();
    return status;
}

void kvr_mapping_hold(int64_t handle, int32_t delta)
{
    kvr_mapping *mapping;
    kvr_handles_lock();
    if (!find_mapping(handle, "mapping_hold", &mapping))
        mapping->hold_count += delta;
    kvr_handles_unlock();
}

int32_t kvr_mapping_unmap(int64_t handle)
{
    static const char call[] = "mapping_unmap";
    kvr_object *object;
    kvr_mapping *mapping = NULL;
    int32_t status;
    kvr_handles_lock();
    status = kvr_find_idle(handle, KVR_SORT_MAPPING, call, &object);
    if (!status)
        mapping = (kvr_mapping *)object;
    if (!status && (mapping->use_count || mapping->hold_count))
        status = kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_MAPPING_IN_USE, call, handle, 0, 0, 0);
    if (!status && mapping->flight_count)
        status = kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_MAPPING_IN_FLIGHT, call, handle, mapping->flight_count, 0, 0);
    if (!status) {
        /* Giving back much memory takes long: not with the mutex held. Until it is done the handle is stale to all others. */
        mapping->object.closing = 1;
        kvr_handles_unlock();
        if (mapping->region->provider != KVR_PROVIDER_HOST)
            status = kvr_cuda_unmap(mapping);
        else if (munmap(mapping->address, (size_t)mapping->nbytes))
            status = kvr_fail_errno("munmap", errno);
        kvr_handles_lock();
        mapping->object.closing = 0;
        if (!status) {
            mapping->region->mapping_count--;
            kvr_unregister(&mapping->object);
        }
    }
    kvr_handles_unlock();
    return status;
}
