/* SPDX-License-Identifier: Apache-2.0
 *
 * The AVX-512 version of Adam, its very source run lane by lane (avx512_emulated.h) and compared with the scalar one
 * bit for bit: a machine without AVX-512 still tests it.
 */
#include "harness.h"

#include "avx512_emulated.h"

#define zpp_optim_avx512 emulated
#include "../../csrc/ops/optim/optim_isa.c"

enum { ROOM_ELEMS = 1300 };
struct memory {
    float p[ROOM_ELEMS], m[ROOM_ELEMS], v[ROOM_ELEMS], top[ROOM_ELEMS], grad[ROOM_ELEMS], out[ROOM_ELEMS];
};

static void fill(struct memory *memory) {
    static const float odd[] = { 0.0f, -0.0f, 1e-40f, 3e38f, INFINITY, -INFINITY, NAN, 1e-20f, 65504.0f };
    uint32_t state = 5;
    float *values = memory->p;
    for (size_t i = 0; i < sizeof *memory / sizeof(float); ++i) {
        state = state * 1664525u + 1013904223u;
        const uint32_t pick = state >> 26;
        const float usual = ldexpf((float)state / 4294967296.0f, -(int)pick % 9);
        values[i] = pick < sizeof odd / sizeof odd[0] ? odd[pick] : usual;
    }
}

static struct zpp_optim_segment over(struct memory *memory, zpp_dtype grad, zpp_dtype out, int flags, size_t offset) {
    return (struct zpp_optim_segment){
        .param = memory->p + offset, .exp_avg = memory->m + offset, .exp_avg_sq = memory->v + offset,
        .max_exp_avg_sq = flags & 1 ? memory->top + offset : NULL,
        .grad = (char *)memory->grad + offset * zpp_dtype_bytes(grad), .grad_dtype = grad, .out_dtype = out,
        .param_out = out == ZPP_DTYPES ? NULL : (char *)memory->out + offset * zpp_dtype_bytes(out),
        .elems = ROOM_ELEMS - 40, .step = 2, .lr = 1e-2, .beta1 = flags & 2 ? 0.3 : 0.9, .beta2 = 0.99, .eps = 1e-8,
        .weight_decay = 0.1, .decoupled_decay = flags & 4, .maximize = flags & 8 };
}

/* NaNs may differ in their payload only: made one here, in place. */
static void same_nans(struct memory *memory, zpp_dtype out) {
    float *values = memory->p;
    for (size_t i = 0; i < 4 * ROOM_ELEMS; ++i) if (isnan(values[i])) values[i] = NAN;
    uint16_t *halves = (uint16_t *)memory->out;
    const unsigned infinite = out == ZPP_F16 ? 0x7c00 : 0x7f80;
    for (size_t i = 0; out == ZPP_F32 && i < ROOM_ELEMS; ++i) if (isnan(memory->out[i])) memory->out[i] = NAN;
    for (size_t i = 0; out != ZPP_F32 && i < 2 * ROOM_ELEMS; ++i) {
        if ((halves[i] & 0x7fffu) > infinite) halves[i] = (uint16_t)(infinite | 0x40);
    }
}

static void equals_scalar(void) {
    static const zpp_dtype grads[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const zpp_dtype outs[] = { ZPP_DTYPES, ZPP_F32, ZPP_BF16, ZPP_F16 };
    static _Alignas(64) struct memory want, got;
    for (int g = 0; g < 3; ++g) for (int o = 0; o < 4; ++o) for (int flags = 0; flags < 16; ++flags) {
        fill(&want);
        got = want;
        const size_t offset = (size_t)(flags + g) % 3 * 7, elems = ROOM_ELEMS - 40;
        const struct zpp_optim_segment a = over(&want, grads[g], outs[o], flags, offset);
        const struct zpp_optim_segment b = over(&got, grads[g], outs[o], flags, offset);
        const union zpp_optim_consts consts = zpp_optim_consts_of(&a, 0.5f);
        zpp_optim_scalar.step[ZPP_OPTIM_ADAM](&a, &consts, 0, elems);
        emulated.step[ZPP_OPTIM_ADAM](&b, &consts, 0, 100); /* cut where a caller may cut; the long rest is streamed */
        emulated.step[ZPP_OPTIM_ADAM](&b, &consts, 100, elems);
        same_nans(&want, outs[o]);
        same_nans(&got, outs[o]);
        CHECK(memcmp(&want, &got, sizeof got) == 0);
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(equals_scalar), {0} };
    return test_main(argc, argv, cases);
}
