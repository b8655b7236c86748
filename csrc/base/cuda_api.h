/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA driver, found at run time: no toolkit is needed to build, no CUDA library to import. The library is
 * libcuda.so.1, or what ZEROPP_CUDA_DRIVER names.
 *
 * Threads: any.
 */
#ifndef ZPP_BASE_CUDA_API_H
#define ZPP_BASE_CUDA_API_H

#include "status.h"

/* Types are spelled as in the driver's own header, so that the rows of cuda_api.def can be compared with it. */
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;

enum {
    ZPP_CU_SUCCESS = 0,
    ZPP_CU_OUT_OF_MEMORY = 2,
    ZPP_CU_NOT_FOUND = 500,
    ZPP_CU_NOT_READY = 600,
    ZPP_CU_STREAM_NON_BLOCKING = 1,
    ZPP_CU_EVENT_DISABLE_TIMING = 2,
    ZPP_CU_HOST_ALLOC_PORTABLE = 1,
};

struct zpp_cuda_api {
#define CU(name, symbol, arguments) CUresult (*name) arguments;
#include "cuda_api.def"
#undef CU
};

/* Load the driver's functions, once. Return NOT_BUILT with the names that were tried where there is no driver. The call
 * does not initialise CUDA: call cuInit before all but cuDriverGetVersion. `*out` is static. */
zpp_status zpp_cuda_api(const struct zpp_cuda_api **out, struct zpp_err *err);

/* Return DEVICE (NOMEM when out of memory) with "`what`: CUDA_ERROR_...: text". `result` is not success. */
zpp_status zpp_cuda_fail(const struct zpp_cuda_api *api, CUresult result, struct zpp_err *err, const char *what);

#endif
