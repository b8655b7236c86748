/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL, loaded at run time: the build needs neither its header nor its library. Declarations as nccl.h spells them, so
 * that the rows of nccl_api.def can be compared with it.
 *
 * Threads: any.
 */
#ifndef ZPP_COMM_NCCL_API_H
#define ZPP_COMM_NCCL_API_H

#include <limits.h>

#include "../../base/status.h"

typedef int ncclResult_t; /* enumerations of nccl.h are passed as ints */
typedef int ncclDataType_t;
typedef int ncclRedOp_t;
typedef struct ncclComm *ncclComm_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct { char internal[128]; } ncclUniqueId;
/* The first part of nccl.h's, as of 2.14: NCCL reads `size_bytes` of it, and takes its defaults for the rest. */
typedef struct {
    size_t size_bytes;
    unsigned int magic, version;
    int blocking, cga_cluster; /* the second is of 2.17: where the record's padding would be */
} ncclConfig_t;
#define ZPP_NCCL_CONFIG_NOT_BLOCKING {sizeof(ncclConfig_t), 0xcafebeef, 21400, 0, INT_MIN}

enum {
    ZPP_NCCL_SUCCESS = 0,
    ZPP_NCCL_IN_PROGRESS = 7,
    ZPP_NCCL_INT8 = 0,
    ZPP_NCCL_UINT8 = 1,
    ZPP_NCCL_INT32 = 2,
    ZPP_NCCL_INT64 = 4,
    ZPP_NCCL_FLOAT16 = 6,
    ZPP_NCCL_FLOAT32 = 7,
    ZPP_NCCL_FLOAT64 = 8,
    ZPP_NCCL_BFLOAT16 = 9,
    ZPP_NCCL_SUM = 0,
    ZPP_NCCL_PROD = 1,
    ZPP_NCCL_MAX = 2,
    ZPP_NCCL_MIN = 3,
    ZPP_NCCL_AVG = 4,
};

struct zpp_nccl_api {
#define NCCL(need, type, name, arguments) type(*name) arguments;
#include "nccl_api.def"
#undef NCCL
    int version; /* 22803 for 2.28.3 */
};

/* NCCL's functions, loaded once: what ZEROPP_NCCL names, else the libnccl.so.2 that the process has already (torch's),
 * else the one that the dynamic linker finds. NOT_BUILT, saying what was tried, where there is none. `*out` is
 * static. */
zpp_status zpp_nccl_api(const struct zpp_nccl_api **out, struct zpp_err *err);

#endif
