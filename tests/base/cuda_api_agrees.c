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
SAME(ZPP_CU_INVALID_VALUE_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(ZPP_CU_NOT_FOUND_VALUE, CUDA_ERROR_NOT_FOUND);
SAME(ZPP_CU_NOT_READY_VALUE, CUDA_ERROR_NOT_READY);
SAME(ZPP_CU_NO_BINARY_FOR_GPU_VALUE, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(ZPP_CU_STREAM_NON_BLOCKING_VALUE, CU_STREAM_NON_BLOCKING);
SAME(ZPP_CU_EVENT_DISABLE_TIMING_VALUE, CU_EVENT_DISABLE_TIMING);
SAME(ZPP_CU_NOT_SUPPORTED_VALUE, CUDA_ERROR_NOT_SUPPORTED);
SAME(ZPP_CU_STREAM_WAIT_VALUE_GEQ_VALUE, CU_STREAM_WAIT_VALUE_GEQ);
SAME(ZPP_CU_STREAM_WRITE_VALUE_DEFAULT_VALUE, CU_STREAM_WRITE_VALUE_DEFAULT);
SAME(ZPP_CU_HOST_ALLOC_PORTABLE_VALUE, CU_MEMHOSTALLOC_PORTABLE);
SAME(ZPP_CU_HOST_REGISTER_PORTABLE_VALUE, CU_MEMHOSTREGISTER_PORTABLE);
SAME(ZPP_CU_HOST_REGISTER_DEVICEMAP_VALUE, CU_MEMHOSTREGISTER_DEVICEMAP);
SAME(ZPP_CU_HOST_REGISTER_ALREADY_VALUE, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(ZPP_CU_ATTRIBUTE_CAPABILITY_MAJOR_VALUE, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(ZPP_CU_ATTRIBUTE_CAPABILITY_MINOR_VALUE, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(ZPP_CU_ATTRIBUTE_VIRTUAL_MEMORY_VALUE, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(ZPP_CU_ATTRIBUTE_POSIX_HANDLES_VALUE, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(ZPP_CU_MEM_PINNED_VALUE, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(ZPP_CU_MEM_ON_DEVICE_VALUE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(ZPP_CU_MEM_POSIX_HANDLE_VALUE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(ZPP_CU_MEM_READ_WRITE_VALUE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(ZPP_CU_MEM_GRANULARITY_MINIMUM_VALUE, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
_Static_assert(sizeof(CUmemAllocationProp) == 32 && sizeof(CUmemAccessDesc) == 12, "records of cuda_api.h");
_Static_assert(sizeof(CUdeviceptr) == sizeof(unsigned long long) && sizeof(CUdevice) == sizeof(int), "handles");
