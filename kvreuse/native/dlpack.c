/* A mapping as a DLPack tensor (dlpack.h 0.x and 1.0): 1-D uint8. The tensor is a use of the mapping until its deleter runs, which any
 * thread may do, with or without Python. */
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>

#include "internal.h"

#define DLPACK_READ_ONLY 1U

typedef struct tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    uint8_t type_code; /* unsigned integer: 1 */
    uint8_t type_bits;
    uint16_t type_lanes;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} tensor;

/* DLManagedTensor, and what is ours behind it. */
typedef struct managed {
    tensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct managed *);
    int64_t shape;
    int64_t mapping;
} managed;

/* DLManagedTensorVersioned, and what is ours behind it. */
typedef struct versioned {
    uint32_t major;
    uint32_t minor;
    void *manager_ctx;
    void (*deleter)(struct versioned *);
    uint64_t flags;
    tensor dl_tensor;
    int64_t shape;
    int64_t mapping;
} versioned;

_Static_assert(sizeof(tensor) == 48 && offsetof(tensor, shape) == 24, "DLTensor");
_Static_assert(offsetof(managed, manager_ctx) == 48, "DLManagedTensor");
_Static_assert(offsetof(versioned, flags) == 24 && offsetof(versioned, dl_tensor) == 32, "DLManagedTensorVersioned");

static void delete_managed(managed *self)
{
    kvr_mapping_hold(self->mapping, -1);
    free(self);
}

static void delete_versioned(versioned *self)
{
    kvr_mapping_hold(self->mapping, -1);
    free(self);
}

static tensor describe(const kvr_mapping_info *info, int32_t device_type, int32_t device_id, int64_t *shape)
{
    *shape = info->nbytes;
    return (tensor){.data = (void *)(uintptr_t)info->address,
                    .device_type = device_type,
                    .device_id = device_id,
                    .ndim = 1,
                    .type_code = 1,
                    .type_bits = 8,
                    .type_lanes = 1,
                    .shape = shape};
}

int32_t kvr_mapping_dlpack(int64_t mapping, int32_t device_type, int32_t device_id, int32_t is_versioned, void **out)
{
    kvr_mapping_info info;
    int32_t status = kvr_mapping_take(mapping, "mapping_dlpack", &info);
    void *made;
    if (status)
        return status;
    made = calloc(1, is_versioned ? sizeof(versioned) : sizeof(managed));
    if (!made) {
        kvr_mapping_hold(mapping, -1);
        return kvr_fail_errno("malloc", ENOMEM);
    }
    if (is_versioned) {
        versioned *self = made;
        self->major = 1;
        self->deleter = delete_versioned;
        self->flags = info.access == KVR_ACCESS_READ_WRITE ? 0 : DLPACK_READ_ONLY;
        self->mapping = mapping;
        self->dl_tensor = describe(&info, device_type, device_id, &self->shape);
    } else {
        managed *self = made;
        self->deleter = delete_managed;
        self->mapping = mapping;
        self->dl_tensor = describe(&info, device_type, device_id, &self->shape);
    }
    *out = made;
    return KVR_OK;
}

void kvr_dlpack_delete(void *tensor_of_ours, int32_t is_versioned)
{
    if (is_versioned)
        delete_versioned(tensor_of_ours);
    else
        delete_managed(tensor_of_ours);
}
