/* SPDX-License-Identifier: Apache-2.0
 *
 * SwiGLU over rows, forward and backward (moe.h): the range is split over threads, the arithmetic is in moe_isa.c.
 */
#include "moe.h"

#include "kernels.h"

enum { PIECE_BYTES = 64 * 1024 };

struct job {
    const struct zpp_moe_kernels *kernels;
    const char *gate_up, *grad;
    char *grad_gate_up, *out;
    size_t inner_elems, inner_bytes;
    zpp_dtype dtype;
};

static void forward_rows(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    for (size_t r = begin; r < end; ++r) {
        const char *gate = job->gate_up + 2 * r * job->inner_bytes;
        job->kernels->swiglu(job->out + r * job->inner_bytes, gate, gate + job->inner_bytes, job->inner_elems,
                             job->dtype);
    }
}

static void backward_rows(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    for (size_t r = begin; r < end; ++r) {
        const size_t two = 2 * r * job->inner_bytes, one = r * job->inner_bytes;
        const struct zpp_moe_swiglu_row row = {.gate = job->gate_up + two,
                                               .up = job->gate_up + two + job->inner_bytes,
                                               .grad = job->grad + one,
                                               .grad_gate = job->grad_gate_up + two,
                                               .grad_up = job->grad_gate_up + two + job->inner_bytes,
                                               .out = job->out + one};
        job->kernels->swiglu_backward(&row, job->inner_elems, job->dtype);
    }
}

static void run(struct job *job, size_t rows, size_t inner_elems, zpp_dtype dtype, zpp_range_fn body, zpp_pool *pool) {
    job->kernels = zpp_moe_kernels();
    job->inner_elems = inner_elems;
    job->inner_bytes = inner_elems * zpp_dtype_bytes(dtype);
    job->dtype = dtype;
    zpp_pool_run(pool, rows, 1 + PIECE_BYTES / (3 * job->inner_bytes + 1), body, job);
}

void zpp_moe_swiglu(const void *gate_up, void *out, size_t rows, size_t inner_elems, zpp_dtype dtype, zpp_pool *pool) {
    struct job job = {.gate_up = gate_up, .out = out};
    run(&job, rows, inner_elems, dtype, forward_rows, pool);
}

void zpp_moe_swiglu_backward(const void *gate_up, const void *grad, void *grad_gate_up, void *out, size_t rows,
                             size_t inner_elems, zpp_dtype dtype, zpp_pool *pool) {
    struct job job = {.gate_up = gate_up, .grad = grad, .grad_gate_up = grad_gate_up, .out = out};
    run(&job, rows, inner_elems, dtype, backward_rows, pool);
}
