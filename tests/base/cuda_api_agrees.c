/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled, never run: every row of csrc/base/cuda_api.def has the type that the toolkit's own header gives, and every
 * number of cuda_api.h is the header's. The header's macros map a name to its current symbol (cuMemAlloc to
 * cuMemAlloc_v2), which must be the symbol of the row.
 */
#include <cuda.h>

#define SAME_TYPE(name, arguments) \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&name), CUresult(*) arguments), #name ": other arguments")
#define CU(name, symbol, arguments) SAME_TYPE(name, arguments);
#include "../../csrc/base/cuda_api.def"
#undef CU

#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)
#define CU(name, symbol, arguments) \
    _Static_assert(__builtin_strcmp(TEXT(name), symbol) == 0, TEXT(name) " is not the symbol " symbol);
#include "../../csrc/base/cuda_api.def"
#undef CU

#define SAME(ours, theirs) _Static_assert((int)ours == (int)theirs, #ours)
/* cuda_api.h cannot be included beside cuda.h: test_cuda_api.py passes its numbers as -DZPP_CU_..._VALUE. */
SAME(ZPP_CU_SUCCESS_VALUE, CUDA_SUCCESS);
SAME(ZPP_CU_OUT_OF_MEMORY_VALUE, CUDA_ERROR_OUT_OF_MEMORY);
SAME(ZPP_CU_NOT_FOUND_VALUE, CUDA_ERROR_NOT_FOUND);
SAME(ZPP_CU_NOT_READY_VALUE, CUDA_ERROR_NOT_READY);
SAME(ZPP_CU_STREAM_NON_BLOCKING_VALUE, CU_STREAM_NON_BLOCKING);
SAME(ZPP_CU_EVENT_DISABLE_TIMING_VALUE, CU_EVENT_DISABLE_TIMING);
SAME(ZPP_CU_HOST_ALLOC_PORTABLE_VALUE, CU_MEMHOSTALLOC_PORTABLE);
_Static_assert(sizeof(CUdeviceptr) == sizeof(unsigned long long) && sizeof(CUdevice) == sizeof(int), "handles");
