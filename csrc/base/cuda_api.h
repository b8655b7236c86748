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
typedef uint64_t cuuint64_t;
typedef int CUdevice_attribute, CUmemAllocationHandleType, CUmemAllocationGranularity_flags, CUstreamCaptureStatus;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUmemLocation {
    int type, id;
} CUmemLocation;
typedef struct CUmemAllocationProp {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;
typedef struct CUmemAccessDesc {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;
/* One operation of a batch. The driver's own type is a union, of which waits and writes are the members in use. */
typedef union CUstreamBatchMemOpParams_union {
    struct {
        int operation;
        CUdeviceptr address;
        cuuint64_t value64;
        unsigned int flags;
        CUdeviceptr alias;
    } waitValue;
    cuuint64_t pad[6];
} CUstreamBatchMemOpParams;

enum {
    ZPP_CU_SUCCESS = 0,
    ZPP_CU_INVALID_VALUE = 1,
    ZPP_CU_OUT_OF_MEMORY = 2,
    ZPP_CU_NO_BINARY_FOR_GPU = 209,
    ZPP_CU_NOT_FOUND = 500,
    ZPP_CU_NOT_READY = 600,
    ZPP_CU_NOT_SUPPORTED = 801,
    ZPP_CU_STREAM_CAPTURE_IMPLICIT = 906, /* the default stream, while another stream is captured */
    ZPP_CU_CAPTURE_NONE = 0,
    ZPP_CU_STREAM_NON_BLOCKING = 1,
    ZPP_CU_STREAM_WAIT_VALUE_GEQ = 0,
    ZPP_CU_STREAM_WRITE_VALUE_DEFAULT = 0,
    ZPP_CU_STREAM_MEM_OP_WAIT_VALUE_64 = 4,
    ZPP_CU_EVENT_DISABLE_TIMING = 2,
    ZPP_CU_HOST_ALLOC_PORTABLE = 1,
    ZPP_CU_HOST_REGISTER_PORTABLE = 1,
    ZPP_CU_HOST_REGISTER_DEVICEMAP = 2,
    ZPP_CU_HOST_REGISTER_ALREADY = 712,
    ZPP_CU_ATTRIBUTE_CAPABILITY_MAJOR = 75,
    ZPP_CU_ATTRIBUTE_CAPABILITY_MINOR = 76,
    ZPP_CU_ATTRIBUTE_VIRTUAL_MEMORY = 102,
    ZPP_CU_ATTRIBUTE_POSIX_HANDLES = 103,
    ZPP_CU_MEM_PINNED = 1,
    ZPP_CU_MEM_ON_DEVICE = 1,
    ZPP_CU_MEM_POSIX_HANDLE = 1,
    ZPP_CU_MEM_READ_WRITE = 3,
    ZPP_CU_MEM_GRANULARITY_MINIMUM = 0,
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
