/* SPDX-License-Identifier: Apache-2.0
 *
 * libtorch's stable C ABI as zeropp uses it: our own C99 declarations (torch's headers are C++), and a table of
 * pointers that is filled from the libtorch that Python has loaded. Nothing here needs torch to build, and one binary
 * serves every torch from ZPP_TORCH_OLDEST on.
 *
 * Names and types are torch's, so that tests/bind/shim_agrees.cpp can include this file after torch's headers and
 * compare. Handles: a `AtenTensorHandle` that a function returns, or that arrives on the stack of an op, is owned by
 * who receives it; delete it with aoti_torch_delete_tensor_object.
 *
 * Threads: zpp_torch is written once, by zpp_torch_load under the GIL, before any op exists; read by all.
 */
#ifndef ZPP_BIND_SHIM_H
#define ZPP_BIND_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/dtype.h"
#include "../base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
typedef struct StableListOpaque *StableListHandle;
typedef struct StreamOpaque *StreamHandle;
typedef int32_t AOTITorchError; /* 0: done */
typedef uint64_t StableIValue;  /* an argument of an op: a handle, or the bits of a number in its low bytes */

#define ZPP_TORCH_OLDEST "2.11"
/* The conversions of arguments that our entries expect: those of torch 2.10, which every later one keeps. */
#define ZPP_TORCH_BUILT_FOR (((uint64_t)2 << 56) | ((uint64_t)10 << 48))

struct zpp_torch_functions {
#define ZPP_TORCH(since, type, name, arguments) type(*name) arguments;
#define ZPP_TORCH_OPTIONAL(since, type, name, arguments) type(*name) arguments;
#define ZPP_TORCH_CUDA(since, type, name, arguments) type(*name) arguments;
#include "shim.def"
#undef ZPP_TORCH
#undef ZPP_TORCH_OPTIONAL
#undef ZPP_TORCH_CUDA
};
extern struct zpp_torch_functions zpp_torch;

/* Fill the table from the libtorch of this process. NOT_BUILT, with the sentence of an ImportError, where torch was not
 * imported, is older than ZPP_TORCH_OLDEST, or lacks a function. Again is free. */
zpp_status zpp_torch_load(struct zpp_err *err);

/* --- dtypes ------------------------------------------------------------------------------------------------------ */
int32_t zpp_torch_dtype_of(zpp_dtype dtype); /* torch's number; -1 for a dtype without one */

/* --- what C needs to know of a tensor ---------------------------------------------------------------------------- */
struct zpp_tensor {
    void *data;    /* borrowed from the tensor; NULL where it has no elements */
    size_t elems;
    zpp_dtype dtype; /* ZPP_DTYPES for a dtype that we do not have: torch_dtype has its number */
    int32_t torch_dtype, device_type, device_index;
    bool contiguous;
};
/* `write`: the memory is going to be written (a copy-on-write tensor is copied now). */
zpp_status zpp_torch_look(AtenTensorHandle tensor, bool write, struct zpp_tensor *out, struct zpp_err *err);

/* --- adopted tensors: handles that outlive a call ----------------------------------------------------------------
 * Only an op sees a tensor's handle, so Python hands a tensor over with torch.ops.zeropp._adopt(tensor, slot), where
 * slot came from zpp_torch_new_slot. The slot owns a reference until it is dropped. Threads: any. */
int64_t zpp_torch_new_slot(void);                     /* -1: no memory */
AtenTensorHandle zpp_torch_adopted(int64_t slot);     /* borrowed; NULL for an empty slot, or one that is none */
void zpp_torch_drop_slot(int64_t slot);
bool zpp_torch_fill_slot(int64_t slot, AtenTensorHandle tensor); /* takes the reference if true; false: no such slot */

#ifdef __cplusplus
}
#endif

#endif
