/* SPDX-License-Identifier: Apache-2.0
 *
 * Norm, clipping, skipped steps and loss scale on the device, on the simulated GPU: the bits of the CPU, whatever the
 * schedule, and no wait of the host between the gradients and the step.
 */
#include <math.h>

#include "../../csrc/base/device_cuda.h"
#include "../../csrc/ops/norm/clip.h"
#include "../../csrc/ops/optim/optim.h"
#include "sim_gpu.h"
#include "sim_stream.h"

enum { RANKS = 3, GROUPS = 1300, SEGMENTS = 2000, MOST = 9000, ELEMS = SEGMENTS + MOST };

struct memory { /* of the device, or of the host */
    float grads[ELEMS];
    double sums[RANKS][GROUPS];
    struct zpp_clip_record record;
    uint64_t halt;
    float param[MOST], exp_avg[MOST];
};
static struct memory given, wanted, found;
static struct zpp_norm_segment segments[RANKS][SEGMENTS];
static size_t firsts[GROUPS + 1];

static struct memory *to_device(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    void *memory;
    CHECK_OK(zpp_device_alloc(gpu.device, sizeof given, &memory, &err));
    CHECK_OK(zpp_stream_copy(gpu.stream, memory, &given, sizeof given, &err));
    return memory;
}

static void to_host(struct memory *memory) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_stream_copy(gpu.stream, &found, memory, sizeof found, &err));
    finish();
    zpp_device_free(gpu.device, memory, sizeof found);
}

/* Groups without segments, with one and with several; one group of all that is left. */
static void describe(struct memory *memory) {
    static const zpp_dtype kinds[] = {ZPP_F32, ZPP_BF16, ZPP_F16};
    for (size_t g = 0; g < GROUPS; g++) firsts[g + 1] = firsts[g] + (g + 1 == GROUPS ? SEGMENTS - firsts[g] : g % 3);
    for (size_t r = 0; r < RANKS; r++) {
        for (size_t s = 0; s < SEGMENTS; s++) {
            const size_t elems = s % 97 == 5 ? MOST - s : (s + r) % 7;
            segments[r][s] = (struct zpp_norm_segment){memory->grads + s, kinds[s % 3], elems};
        }
    }
}

static void fill(void) {
    memset(&given, 0, sizeof given);
    for (size_t i = 0; i < ELEMS; i++) { /* finite as every kind: two of 16 bits in the place of one */
        const uint32_t bits = 0x3c003c00u + (uint32_t)(i * 2654435761u % 0x1ffu) * 0x10001u;
        memcpy(&given.grads[i], &bits, sizeof bits);
    }
    for (size_t i = 0; i < MOST; i++) given.param[i] = 0.01f * (float)(i % 101);
    given.record = zpp_clip_record_of(1024.0);
}

static struct zpp_clip clip_of(struct memory *memory, const double **sums, uint32_t parts) {
    for (size_t r = 0; r < RANKS; r++) sums[r] = memory->sums[r];
    const struct zpp_clip_rule rule = {parts, 0.25, 0.01, 2.0, 0.5, 256.0, 3, 1.0, 0};
    return (struct zpp_clip){&memory->record, sums, RANKS, GROUPS, &memory->halt, rule};
}

static struct zpp_optim_segment step_of(struct memory *memory) {
    return (struct zpp_optim_segment){.param = memory->param,
                                      .grad = memory->grads,
                                      .exp_avg = memory->exp_avg,
                                      .elems = MOST,
                                      .optimizer = ZPP_OPTIM_LION,
                                      .lr = 1e-3,
                                      .beta1 = 0.9,
                                      .beta2 = 0.99};
}

static void on_cpu(void) {
    static double sums[SEGMENTS];
    const double *of_ranks[RANKS];
    wanted = given;
    describe(&wanted);
    for (size_t r = 0; r < RANKS; r++) {
        zpp_norm_squares(segments[r], SEGMENTS, sums, NULL, NULL);
        for (size_t g = 0; g < GROUPS; g++)
            for (size_t s = firsts[g]; s < firsts[g + 1]; s++) wanted.sums[r][g] += sums[s];
    }
    const struct zpp_clip clip = clip_of(&wanted, of_ranks, ZPP_CLIP_MEASURE | ZPP_CLIP_LIMIT | ZPP_CLIP_SETTLE);
    zpp_clip(&clip);
    const struct zpp_grad_scale scale = zpp_clip_scale(&wanted.record, 0);
    const struct zpp_optim_segment segment = step_of(&wanted);
    float value;
    if (zpp_grad_scale_read(&scale, &value)) zpp_optim_step(&segment, 1, value, NULL);
}

static void on_device(struct memory *memory) {
    struct zpp_err err = ZPP_ERR_INIT;
    const double *of_ranks[RANKS];
    void *work;
    describe(memory);
    const size_t work_bytes = zpp_norm_groups_work_elems(segments[0], SEGMENTS) * sizeof(double);
    CHECK_OK(zpp_device_alloc(gpu.device, work_bytes, &work, &err));
    const struct sim_counts before = sim_gpu_counts();
    for (size_t r = 0; r < RANKS; r++)
        CHECK_OK(
            zpp_norm_groups_cuda(gpu.device, gpu.native, segments[r], firsts, GROUPS, work, memory->sums[r], &err));
    static const uint32_t parts[] = {ZPP_CLIP_MEASURE, ZPP_CLIP_LIMIT, ZPP_CLIP_SETTLE}; /* one after the other */
    for (int k = 0; k < 3; k++) {
        const struct zpp_clip clip = clip_of(memory, of_ranks, parts[k]);
        CHECK_OK(zpp_clip_cuda(gpu.device, gpu.native, &clip, &err));
    }
    const struct zpp_optim_segment segment = step_of(memory);
    CHECK_OK(zpp_optim_step_cuda(gpu.device, gpu.native, &segment, 1, zpp_clip_scale(&memory->record, 0), &err));
    CHECK_EQUAL(sim_gpu_counts().host_waits, before.host_waits);
    to_host(memory);
    zpp_device_free(gpu.device, work, work_bytes);
}

static bool same_number(double a, double b) { return a == b || (isnan(a) && isnan(b)); }

static void check_same(void) {
    for (size_t r = 0; r < RANKS; r++)
        for (size_t g = 0; g < GROUPS; g++) CHECK(same_number(found.sums[r][g], wanted.sums[r][g]));
    const struct zpp_clip_record *a = &found.record, *b = &wanted.record;
    CHECK(same_number(a->norm, b->norm) && same_number((double)a->norm_f32, (double)b->norm_f32));
    CHECK(same_number((double)a->grad_scale, (double)b->grad_scale) && a->loss_scale == b->loss_scale);
    CHECK(a->loss_scale_f32 == b->loss_scale_f32);
    CHECK_EQUAL(a->skip, b->skip);
    CHECK_EQUAL(a->good_steps, b->good_steps);
    CHECK_EQUAL(a->skipped, b->skipped);
    CHECK(memcmp(found.param, wanted.param, sizeof found.param) == 0);
    CHECK(memcmp(found.exp_avg, wanted.exp_avg, sizeof found.exp_avg) == 0);
}

static void finite_gradients(void) {
    fill();
    on_cpu();
    CHECK(wanted.record.norm > 0.02 && wanted.record.skip == 0 && wanted.record.grad_scale < 0.25f / 1024);
    for (uint64_t lazy = 0; lazy < 4; lazy++) {
        SIM(sim_set_schedule)(lazy, 0);
        on_device(to_device());
        check_same();
        CHECK(memcmp(found.param, given.param, sizeof given.param) != 0);
    }
}

static void not_finite(void) {
    fill();
    given.grads[77] = INFINITY;
    on_cpu();
    CHECK(wanted.record.skip == 1 && wanted.record.loss_scale == 512.0 && wanted.record.skipped == 1);
    for (uint64_t lazy = 0; lazy < 4; lazy++) {
        SIM(sim_set_schedule)(lazy, 0);
        on_device(to_device());
        check_same();
        CHECK(memcmp(found.param, given.param, sizeof given.param) == 0);
    }
}

static void a_failed_group_steps_nothing(void) {
    fill();
    given.halt = 1;
    on_device(to_device());
    CHECK(found.record.skip == 1 && isnan(found.record.norm));
    CHECK(memcmp(found.param, given.param, sizeof given.param) == 0);
}

/* torch.amp.GradScaler's rule, written out. */
static void the_loss_scale_follows_the_rule(void) {
    static const bool bad[] = {0, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0};
    static const double after[] = {1024, 1024, 2048, 1024, 1024, 1024, 512, 256, 256, 256, 256, 512, 512, 512, 1024};
    double sums[GROUPS] = {0};
    const double *of_ranks[RANKS];
    struct zpp_clip clip = clip_of(&wanted, of_ranks, ZPP_CLIP_MEASURE | ZPP_CLIP_SETTLE);
    wanted.record = zpp_clip_record_of(1024.0);
    wanted.halt = 0;
    for (size_t r = 0; r < RANKS; r++) of_ranks[r] = sums;
    for (size_t step = 0; step < sizeof bad; step++) {
        const double unscale = 0.25 / wanted.record.loss_scale;
        sums[1] = bad[step] ? NAN : 3.0;
        zpp_clip(&clip);
        CHECK(wanted.record.loss_scale == after[step] && wanted.record.grad_scale == (float)unscale);
        CHECK(bad[step] || wanted.record.norm == sqrt(9.0) * unscale);
    }
    CHECK_EQUAL(wanted.record.skipped, 4);
    wanted.record.loss_scale = 0x1p126;
    for (int step = 0; step < 9; step++) zpp_clip(&clip);
    CHECK(wanted.record.loss_scale == 0x1p126); /* 2^127 would overflow fp32's losses */
}

static void refusals(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_clip clip = {.ranks = 257, .units = 1, .rule = {.parts = ZPP_CLIP_MEASURE}};
    CHECK_EQUAL(zpp_clip_cuda(gpu.device, gpu.native, &clip, &err), ZPP_INVALID);
    CHECK(strstr(err.text, "sums of 257 ranks"));
}

int main(int argc, char **argv) {
    sim_gpu_load();
    open_gpu();
    static const struct test_case cases[] = {TEST(finite_gradients),
                                             TEST(not_finite),
                                             TEST(a_failed_group_steps_nothing),
                                             TEST(the_loss_scale_follows_the_rule),
                                             TEST(refusals),
                                             {0}};
    const int result = test_main(argc, argv, cases);
    close_gpu();
    return result;
}
