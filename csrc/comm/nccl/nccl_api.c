/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL, found at run time: nccl_api.h.
 */
#include "nccl_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_VERSION = 21400 };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct zpp_nccl_api functions;
static struct zpp_err failure = ZPP_ERR_INIT; /* of loading; OK once everything is there */

enum { NEED_OPTIONAL = 0, NEED_REQUIRED = 1 };
static const struct {
    const char *symbol;
    size_t offset_bytes;
    bool required;
} rows[] = {
#define NCCL(need, type, name, arguments) {#name, offsetof(struct zpp_nccl_api, name), NEED_##need},
#include "nccl_api.def"
#undef NCCL
};

static void *find_library(const char **path) {
    const char *chosen = getenv("ZEROPP_NCCL");
    *path = "libnccl.so.2";
    if (chosen && chosen[0]) {
        *path = chosen;
        return dlopen(chosen, RTLD_NOW | RTLD_LOCAL);
    }
    void *loaded = dlopen(*path, RTLD_NOW | RTLD_NOLOAD);
    return loaded ? loaded : dlopen(*path, RTLD_NOW | RTLD_LOCAL);
}

static void load(void) {
    const char *path;
    void *library = find_library(&path);
    if (!library) {
        const char *why = dlerror();
        zpp_fail(&failure, ZPP_NOT_BUILT,
                 "comm: NCCL was not found (%.300s); collectives on GPUs want libnccl.so.2, which a CUDA build of "
                 "torch brings, or ZEROPP_NCCL=/path/to/it",
                 why ? why : path);
        return;
    }
    for (size_t row = 0; row < sizeof rows / sizeof rows[0]; ++row) {
        void *function = dlsym(library, rows[row].symbol);
        if (!function && rows[row].required) {
            zpp_fail(&failure, ZPP_NOT_BUILT, "comm: %.200s has no %s; wanted NCCL 2.14 or later", path,
                     rows[row].symbol);
            return;
        }
        /* memcpy, since ISO C has no cast from an object pointer to a function pointer. */
        memcpy((char *)&functions + rows[row].offset_bytes, &function, sizeof function);
    }
    if (functions.ncclGetVersion(&functions.version) != ZPP_NCCL_SUCCESS || functions.version < FIRST_VERSION)
        zpp_fail(&failure, ZPP_NOT_BUILT, "comm: %.200s is NCCL %d, wanted 2.14 (%d) or later", path,
                 functions.version, FIRST_VERSION);
}

zpp_status zpp_nccl_api(const struct zpp_nccl_api **out, struct zpp_err *err) {
    pthread_once(&once, load);
    if (failure.status != ZPP_OK) return zpp_fail_again(err, &failure);
    *out = &functions;
    return ZPP_OK;
}
