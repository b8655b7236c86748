// SPDX-License-Identifier: Apache-2.0
//
// torch.autocast of the torch device "sim": the same lists of operators as CUDA's.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define SIM_LOW_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FP32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    AT_FORALL_LOWER_PRECISION_FP(SIM_LOW_PRECISION)
    AT_FORALL_FP32(SIM_FP32)
    AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_RESULT)
    AT_FORALL_PROMOTE(SIM_PROMOTE)
}

} // namespace at::autocast
