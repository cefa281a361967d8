/* A driver of batched copies alone, on memory of the host: what cuda-bindings finds instead of libcuda.so.1. It checks
   what a real one receives: one set of attributes from copy 0 on, sources read in the stream's order, no default
   stream. Compiled with -DCUDA_VERSION=12080 and the like. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500, STREAM_ORDER = 1 };

static int batch(uintptr_t *targets, uintptr_t *sources, size_t *sizes, size_t count, int *order, size_t *first,
                 size_t num_attributes, void *stream) {
    if (stream == NULL || num_attributes != 1 || first[0] != 0 || order[0] != STREAM_ORDER || count == 0)
        return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (targets[i] == 0 || sources[i] == 0 || sizes[i] == 0)
            return INVALID_VALUE;
        memcpy((void *)targets[i], (void *)sources[i], sizes[i]);
    }
    return SUCCESS;
}

static int batch_of_cuda_12(uintptr_t *targets, uintptr_t *sources, size_t *sizes, size_t count, int *order,
                            size_t *first, size_t num_attributes, size_t *failed, void *stream) {
    *failed = SIZE_MAX;
    return batch(targets, sources, sizes, count, order, first, num_attributes, stream);
}

static int driver_version(int *version) {
    *version = CUDA_VERSION;
    return SUCCESS;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)flags;
    *function = NULL;
    if (strcmp(name, "cuGetProcAddress") == 0)
        *function = (void *)cuGetProcAddress_v2;
    if (strcmp(name, "cuDriverGetVersion") == 0)
        *function = (void *)driver_version;
    if (strcmp(name, "cuMemcpyBatchAsync") == 0 && version <= CUDA_VERSION)
        *function = version >= 13000 ? (void *)batch : (void *)batch_of_cuda_12;
    if (status != NULL)
        *status = *function == NULL;
    return *function == NULL ? NOT_FOUND : SUCCESS;
}
