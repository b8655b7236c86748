// SPDX-License-Identifier: Apache-2.0
//
// Proof that csrc/bind/shim.h declares libtorch's functions as torch does: each row's pointer type is the type of the
// address of torch's own function. Compiled by test_shim.py, never part of the product.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <type_traits>

#include "../../csrc/bind/shim.h"

#define AGREES(since, type, name, arguments)                                                       \
    static_assert(std::is_same_v<decltype(&::name), decltype(zpp_torch_functions::name)>,          \
                  "csrc/bind/shim.def declares " #name " otherwise than torch does");
#define ZPP_TORCH AGREES
#define ZPP_TORCH_CUDA AGREES
#ifdef TORCH_TARGET_VERSION // headers as an older torch has them: optional functions may be absent
#define ZPP_TORCH_OPTIONAL(since, type, name, arguments)
#else
#define ZPP_TORCH_OPTIONAL AGREES
#endif
#include "../../csrc/bind/shim.def"

static_assert(std::is_same_v<StableIValue, uint64_t>, "an argument is 64 bits");
