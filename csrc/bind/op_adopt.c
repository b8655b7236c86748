/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp._adopt: hands a tensor's handle to C (shim.h, adopted tensors).
 */
#include "boxed.h"
#include "op_entries.h"

void zpp_op_adopt(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
    (void)outputs;
    struct zpp_boxed args;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_adopt, stack, inputs);
    zpp_boxed_tensor(&args);
    const int64_t slot = zpp_boxed_int(&args);
    if (zpp_boxed_ok(&args)) {
        if (zpp_torch_fill_slot(slot, args.handles[0])) args.handles[0] = NULL; /* the slot owns it now */
        else zpp_boxed_fail(&args, "slot %lld is none, wanted one of zpp_torch_new_slot", (long long)slot);
    }
    zpp_boxed_end(&args);
}
