/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled, never run: every row of csrc/comm/nccl/nccl_api.def has the type that NCCL's own header gives, every number
 * of nccl_api.h is the header's, and the configuration begins as ours does.
 */
#include <nccl.h>
#include <stddef.h>

#define NCCL(need, type, name, arguments) \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&name), type(*) arguments), #name ": other arguments");
#include "../../csrc/comm/nccl/nccl_api.def"
#undef NCCL

#define SAME(ours, theirs) _Static_assert((int)ours == (int)theirs, #ours)
/* nccl_api.h cannot be included beside nccl.h: test_cuda_api.py passes its numbers as -DZPP_NCCL_..._VALUE. */
SAME(ZPP_NCCL_SUCCESS_VALUE, ncclSuccess);
SAME(ZPP_NCCL_IN_PROGRESS_VALUE, ncclInProgress);
SAME(ZPP_NCCL_INT8_VALUE, ncclInt8);
SAME(ZPP_NCCL_UINT8_VALUE, ncclUint8);
SAME(ZPP_NCCL_INT32_VALUE, ncclInt32);
SAME(ZPP_NCCL_INT64_VALUE, ncclInt64);
SAME(ZPP_NCCL_FLOAT16_VALUE, ncclFloat16);
SAME(ZPP_NCCL_FLOAT32_VALUE, ncclFloat32);
SAME(ZPP_NCCL_FLOAT64_VALUE, ncclFloat64);
SAME(ZPP_NCCL_BFLOAT16_VALUE, ncclBfloat16);
SAME(ZPP_NCCL_SUM_VALUE, ncclSum);
SAME(ZPP_NCCL_PROD_VALUE, ncclProd);
SAME(ZPP_NCCL_MAX_VALUE, ncclMax);
SAME(ZPP_NCCL_MIN_VALUE, ncclMin);
SAME(ZPP_NCCL_AVG_VALUE, ncclAvg);
_Static_assert(sizeof(ncclUniqueId) == 128 && sizeof(ncclResult_t) == sizeof(int), "what is passed by value");
_Static_assert(sizeof(ncclDataType_t) == sizeof(int) && sizeof(ncclRedOp_t) == sizeof(int), "enumerations");
_Static_assert(offsetof(ncclConfig_t, magic) == 8 && offsetof(ncclConfig_t, version) == 12 &&
               offsetof(ncclConfig_t, blocking) == 16 && offsetof(ncclConfig_t, cgaClusterSize) == 20, "ncclConfig_t");
