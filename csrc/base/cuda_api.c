/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA driver, found at run time: cuda_api.h.
 */
#include "cuda_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct zpp_cuda_api functions;
static struct zpp_err failure = ZPP_ERR_INIT; /* of loading; OK once everything is there */

static const struct {
    const char *symbol;
    size_t offset_bytes;
} rows[] = {
#define CU(name, symbol, arguments) {symbol, offsetof(struct zpp_cuda_api, name)},
#include "cuda_api.def"
#undef CU
};

static void load(void) {
    const char *chosen = getenv("ZEROPP_CUDA_DRIVER");
    const char *path = chosen && chosen[0] ? chosen : "libcuda.so.1";
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *why = dlerror();
        zpp_fail(&failure, ZPP_NOT_BUILT,
                 "device cuda: the NVIDIA driver was not found (%.300s); install it, or use the CPU", why ? why : path);
        return;
    }
    for (size_t row = 0; row < sizeof rows / sizeof rows[0]; ++row) {
        void *function = dlsym(library, rows[row].symbol);
        if (!function) {
            zpp_fail(&failure, ZPP_NOT_BUILT,
                     "device cuda: %.200s has no %s; wanted a driver for CUDA 11.7 or later (R515)", path,
                     rows[row].symbol);
            dlclose(library);
            return;
        }
        /* memcpy, since ISO C has no cast from an object pointer to a function pointer. */
        memcpy((char *)&functions + rows[row].offset_bytes, &function, sizeof function);
    }
}

zpp_status zpp_cuda_api(const struct zpp_cuda_api **out, struct zpp_err *err) {
    pthread_once(&once, load);
    if (failure.status != ZPP_OK) return zpp_fail_again(err, &failure);
    *out = &functions;
    return ZPP_OK;
}

zpp_status zpp_cuda_fail(const struct zpp_cuda_api *api, CUresult result, struct zpp_err *err, const char *what) {
    const char *name = NULL, *text = NULL;
    api->cuGetErrorName(result, &name);
    api->cuGetErrorString(result, &text);
    const zpp_status status = result == ZPP_CU_OUT_OF_MEMORY ? ZPP_NOMEM : ZPP_DEVICE;
    return zpp_fail(err, status, "%s: %s: %s (%d)", what, name ? name : "CUDA error", text ? text : "unknown", result);
}
