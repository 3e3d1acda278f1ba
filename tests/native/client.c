/* A program that knows only kvreuse.h: it opens the built extension with dlopen and drives the handle API.
 * Links nothing but libc and libdl; the extension's Python symbols come from a file of stand-ins that the test makes. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvreuse.h"

#define CHECK(condition)                                                  \
    do {                                                                  \
        if (!(condition)) {                                               \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

static void *library;

static void *symbol(const char *name)
{
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
}

/* ISO C has no conversion from object to function pointers: by way of memory. The types come from the header. */
#define LOAD(function)                               \
    __typeof__(&function) call_##function;           \
    do {                                             \
        void *found = symbol(#function);             \
        memcpy(&call_##function, &found, sizeof found); \
    } while (0)

int main(int argc, char **argv)
{
    kvr_region_info made, imported;
    kvr_mapping_info first, second;
    kvr_observation seen;
    kvr_handle_counts counts;
    kvr_error error;
    int64_t echoed = 0;
    int32_t fd = -1;
    CHECK(argc == 2);
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    LOAD(kvr_abi_version);
    LOAD(kvr_echo);
    LOAD(kvr_error_get);
    LOAD(kvr_host_allocate);
    LOAD(kvr_region_export);
    LOAD(kvr_region_import);
    LOAD(kvr_region_observe);
    LOAD(kvr_region_map);
    LOAD(kvr_region_close);
    LOAD(kvr_mapping_unmap);
    LOAD(kvr_handle_counts_get);

    CHECK(call_kvr_abi_version() == KVR_ABI_VERSION);
    CHECK(call_kvr_echo(INT64_C(0x100000005), &echoed) == KVR_OK && echoed == INT64_C(0x100000005));

    CHECK(call_kvr_host_allocate(5000, KVR_KIND_POSIX_FD, "kvreuse-client", NULL, &made) == KVR_OK);
    CHECK(made.nbytes == 5000 && made.physical_nbytes == 8192 && made.kind == KVR_KIND_POSIX_FD);
    CHECK(call_kvr_region_map(made.handle, KVR_ACCESS_READ_WRITE, KVR_MAP_DONTFORK, &first) == KVR_OK);
    memcpy((void *)(uintptr_t)first.address, "hello", 5);

    CHECK(call_kvr_region_export(made.handle, &fd) == KVR_OK && fd >= 0);
    CHECK(call_kvr_region_import(fd, made.nbytes, made.physical_nbytes, made.region_id, made.device, made.inode, 0, &imported) ==
          KVR_OK);
    CHECK(close(fd) == 0);
    CHECK(imported.handle != made.handle && !memcmp(imported.region_id, made.region_id, sizeof made.region_id));
    CHECK(call_kvr_region_map(imported.handle, KVR_ACCESS_READ, 0, &second) == KVR_OK && second.address != first.address);
    CHECK(!memcmp((void *)(uintptr_t)second.address, "hello", 5));
    CHECK(call_kvr_region_observe(imported.handle, &seen) == KVR_OK);
    CHECK(seen.file_nbytes == 8192 && seen.inode == made.inode && seen.seals == 7);

    CHECK(call_kvr_region_close(made.handle) == KVR_ERROR_BUSY);
    CHECK(call_kvr_error_get(&error) == KVR_OK && error.status == KVR_ERROR_BUSY && error.detail == KVR_DETAIL_REGION_MAPPED);
    CHECK(error.values[0] == made.handle && error.values[1] == 1 && !strcmp(error.call, "region_close"));
    CHECK(call_kvr_mapping_unmap(first.handle) == KVR_OK && call_kvr_mapping_unmap(second.handle) == KVR_OK);
    CHECK(call_kvr_mapping_unmap(first.handle) == KVR_ERROR_STALE_HANDLE);
    CHECK(call_kvr_region_close(made.handle) == KVR_OK && call_kvr_region_close(imported.handle) == KVR_OK);
    CHECK(call_kvr_host_allocate(1, KVR_KIND_FABRIC, "x", NULL, &made) == KVR_ERROR_NOT_SUPPORTED);
    CHECK(call_kvr_handle_counts_get(&counts) == KVR_OK && !counts.regions && !counts.mappings && !counts.fds);
    puts("ok");
    return 0;
}
