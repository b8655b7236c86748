/* SPDX-License-Identifier: Apache-2.0
 *
 * Entries of ops.def, and the threads that they run on.
 */
#ifndef ZPP_BIND_OP_ENTRIES_H
#define ZPP_BIND_OP_ENTRIES_H

#include <stdbool.h>

#include "../base/device.h"
#include "../base/pool.h"
#include "shim.h"

/* Boxed functions: read `inputs` arguments from the stack, leave `outputs` results there. Any thread, no GIL. */
#define ZPP_ENTRY(function) void function(StableIValue *stack, uint64_t inputs, uint64_t outputs);
#define ZPP_OP(name, schema, cpu, cuda) ZPP_ENTRY(cpu) ZPP_ENTRY(cuda)
#define ZPP_OP_CPU(name, schema, cpu) ZPP_ENTRY(cpu)
#include "../ops/ops.def"
#undef ZPP_OP
#undef ZPP_ENTRY

/* An entry for the CPU and one for CUDA of a static body(stack, inputs, cuda). */
#define ZPP_OP_BOTH(op, body)                                                               \
    void zpp_op_##op(StableIValue *stack, uint64_t inputs, uint64_t outputs) {              \
        (void)outputs;                                                                      \
        body(stack, inputs, false);                                                         \
    }                                                                                       \
    void zpp_op_##op##_cuda(StableIValue *stack, uint64_t inputs, uint64_t outputs) {       \
        (void)outputs;                                                                      \
        body(stack, inputs, true);                                                          \
    }

/* A pool over torch's threads. New; free with zpp_pool_destroy. */
zpp_status zpp_op_pool_create(int threads, zpp_pool **out, struct zpp_err *err);

/* The threads of ops: as many as torch.get_num_threads() says, kept between calls and made anew when that number
 * changes. NULL (this thread alone) for one thread, where none can be started, or while another thread runs an op. Give
 * it back. */
zpp_pool *zpp_op_pool_take(void);
void zpp_op_pool_give(zpp_pool *pool);

/* --- the accelerators of torch that zeropp has a device for (accelerator.c) ------------------------------------------
 * One row each of dispatch key, torch's device type and the function that makes the device; note 37 says what another
 * row has to bring. Any thread, once torch's functions are loaded.
 *
 *   cuda   CUDA
 *   sim    PrivateUse1, over the driver that ZEROPP_CUDA_DRIVER names; there only while that is set: tests/sim */

/* The dispatch key of row 0, 1, ... of this process; NULL behind the last. */
const char *zpp_accelerator_key(size_t row);
bool zpp_accelerator_has(int32_t torch_device_type);
/* Torch's device type of the accelerator with that name, as in torch.device("cuda"). NOT_BUILT: there is none here. */
zpp_status zpp_accelerator_type(const char *name, int32_t *torch_device_type, struct zpp_err *err);
/* Our device for torch's device `index`, made once and kept for the life of the process, and the driver's stream that
 * is current there in this thread. Other threads and `with torch.cuda.stream(...)` have other ones, so call it at every
 * entry. NOT_BUILT without a driver, or in a torch without that accelerator. */
zpp_status zpp_accelerator_current(int32_t torch_device_type, int32_t index, zpp_device **device, void **native,
                                   struct zpp_err *err);

#endif
