/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels of the device cuda: the embedded images are loaded into its context when the first kernel is looked up.
 */
#include <stdlib.h>
#include <string.h>

#include "cuda_images.h"
#include "device_cuda_internal.h"

struct zpp_cuda_kernel {
    struct zpp_cuda_kernel *next;
    CUfunction function;
    char name[];
};

/* A driver that ZEROPP_CUDA_DRIVER names may have the kernels itself, as the simulated one has: a build without images
 * asks it with an empty one. */
static size_t images_count(void) {
    return zpp_cuda_images_count ? zpp_cuda_images_count : getenv("ZEROPP_CUDA_DRIVER") != NULL;
}

static const void *image_data(size_t image) {
    return zpp_cuda_images_count ? zpp_cuda_images[image].data : "\0\0\0";
}

/* Say which kind the GPU is, and for which kinds there is code. */
static zpp_status no_image(const struct zpp_cuda_device *cuda, struct zpp_err *err) {
    int major = 0, minor = 0;
    (void)cuda->api->cuDeviceGetAttribute(&major, ZPP_CU_ATTRIBUTE_CAPABILITY_MAJOR, cuda->device);
    (void)cuda->api->cuDeviceGetAttribute(&minor, ZPP_CU_ATTRIBUTE_CAPABILITY_MINOR, cuda->device);
    return zpp_fail(err, ZPP_NOT_BUILT,
                    "device cuda:%d: this build has no kernels for its architecture sm_%d%d, only for %s; build zeropp "
                    "from source on this machine, or use a newer GPU", cuda->ordinal, major, minor,
                    zpp_cuda_images_kinds[0] ? zpp_cuda_images_kinds : "none");
}

static zpp_status load_images(struct zpp_cuda_device *cuda, struct zpp_err *err) {
    if (cuda->modules) return ZPP_OK;
    CUmodule *modules = calloc(images_count() + 1, sizeof *modules);
    if (!modules) return zpp_fail(err, ZPP_NOMEM, "device cuda: no memory for its table of kernels");
    for (size_t image = 0; image < images_count(); ++image) {
        const CUresult result = cuda->api->cuModuleLoadData(&modules[image], image_data(image));
        if (!result) continue;
        while (image--) cuda->api->cuModuleUnload(modules[image]);
        free(modules);
        if (result == ZPP_CU_NO_BINARY_FOR_GPU) return no_image(cuda, err);
        return zpp_cuda_fail(cuda->api, result, err,
                             "device cuda: loading the kernels (is the driver older than `python -m zeropp env` asks "
                             "for?)");
    }
    cuda->modules = modules;
    return ZPP_OK;
}

static zpp_status find_kernel(struct zpp_cuda_device *cuda, const char *name, CUfunction *out, struct zpp_err *err) {
    for (const struct zpp_cuda_kernel *kernel = cuda->kernels; kernel; kernel = kernel->next) {
        if (strcmp(kernel->name, name) == 0) {
            *out = kernel->function;
            return ZPP_OK;
        }
    }
    const zpp_status status = load_images(cuda, err);
    if (status) return status;
    CUfunction function = NULL;
    CUresult result = ZPP_CU_NOT_FOUND;
    for (size_t image = 0; result && image < images_count(); ++image) {
        result = cuda->api->cuModuleGetFunction(&function, cuda->modules[image], name);
    }
    if (result) {
        return zpp_fail(err, ZPP_NOT_BUILT, "device cuda: no kernel \"%s\" among %zu images", name,
                        images_count());
    }
    struct zpp_cuda_kernel *kernel = malloc(sizeof *kernel + strlen(name) + 1);
    if (!kernel) return zpp_fail(err, ZPP_NOMEM, "device cuda: no memory for a kernel's record");
    kernel->function = function;
    strcpy(kernel->name, name);
    kernel->next = cuda->kernels;
    cuda->kernels = kernel;
    *out = function;
    return ZPP_OK;
}

zpp_status zpp_cuda_kernel(zpp_device *device, const char *name, CUfunction *out, struct zpp_err *err) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    if (!images_count()) {
        return zpp_fail(err, ZPP_NOT_BUILT,
                        "device cuda: kernel \"%s\": this build has no CUDA kernels; build it where nvcc is installed",
                        name);
    }
    bool pushed;
    zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    pthread_mutex_lock(&cuda->kernels_lock); /* to load an image takes long, and may wait for streams */
    status = find_kernel(cuda, name, out, err);
    pthread_mutex_unlock(&cuda->kernels_lock);
    zpp_cuda_leave(cuda, pushed);
    return status;
}

zpp_status zpp_cuda_launch(zpp_device *device, CUfunction function, const struct zpp_cuda_grid *grid, void *native,
                           void **args, struct zpp_err *err) {
    struct zpp_cuda_device *cuda = zpp_cuda_of(device);
    bool pushed;
    zpp_status status = zpp_cuda_enter(cuda, &pushed, err);
    if (status) return status;
    const CUresult result = cuda->api->cuLaunchKernel(function, grid->blocks[0], grid->blocks[1], grid->blocks[2],
                                                      grid->threads[0], grid->threads[1], grid->threads[2],
                                                      grid->shared_bytes, native, args, NULL);
    if (result) status = zpp_cuda_fail(cuda->api, result, err, "device cuda: launching a kernel");
    zpp_cuda_leave(cuda, pushed);
    return status;
}

void zpp_cuda_forget_kernels(struct zpp_cuda_device *cuda) {
    for (size_t image = 0; cuda->modules && image < images_count(); ++image) {
        cuda->api->cuModuleUnload(cuda->modules[image]);
    }
    while (cuda->kernels) {
        struct zpp_cuda_kernel *kernel = cuda->kernels;
        cuda->kernels = kernel->next;
        free(kernel);
    }
    free(cuda->modules);
}
