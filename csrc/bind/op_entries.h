/* SPDX-License-Identifier: Apache-2.0
 *
 * Entries of ops.def, and the threads that they run on.
 */
#ifndef ZPP_BIND_OP_ENTRIES_H
#define ZPP_BIND_OP_ENTRIES_H

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

#endif
