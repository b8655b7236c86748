/* SPDX-License-Identifier: Apache-2.0
 *
 * A step on the device (csrc/zero/step_device.h), on the simulated GPU: gradients, master weights and moments of a rank
 * are in its memory. Five steps, one of which overflows, have the bits of the same steps on the CPU in every schedule,
 * and the host waits for nothing.
 */
#include <math.h>

#include "../../csrc/zero/step_device.h"
#include "sim_gpu.h"

enum { UNITS = 3, PARAMS = 4, MOST = 5000, STEPS = 5, BAD_STEP = 2, STATES = 3 };
static const struct zpp_wait ten_seconds = {10000000000u, NULL, NULL};
static const size_t param_elems[PARAMS] = {MOST, 1, 300, 4097};
enum { ELEMS = MOST + 1 + 300 + 4097, CAPACITY = ELEMS + 1024 }; /* a unit aligns its parameters */

struct side {
    zpp_device *device, *host; /* where the states are, and the CPU */
    zpp_stream *stream;
    zpp_zero *zero;
    struct zpp_stepper stepper;
    uint16_t *grads[UNITS];
    float *states[UNITS][STATES]; /* master, first and second moment */
    int64_t counts[UNITS][PARAMS];
};

static const struct zpp_clip_rule rule = {
    ZPP_CLIP_MEASURE | ZPP_CLIP_LIMIT | ZPP_CLIP_SETTLE, 1.0, 2.0, 2.0, 0.5, 1.0, 3, 1.0, 0};

static uint16_t grad_at(int step, int unit, size_t i) {
    const float value = (float)((i * 7919 + (size_t)(unit + step) * 31) % 997) / 9.97f - 50.0f;
    return zpp_bf16_from_f32(step == BAD_STEP && unit == 1 && i == 40 ? INFINITY : value);
}

/* Memory of the side's device with `bytes` of `from` on its way there; on the CPU it is there. */
static void *memory_of(struct side *side, const void *from, size_t bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    void *memory;
    CHECK_OK(zpp_device_alloc(side->device, bytes, &memory, &err));
    CHECK_OK(zpp_stream_copy(side->stream, memory, from, bytes, &err));
    return memory;
}

static void add_unit(struct side *side, int unit) {
    struct zpp_err err = ZPP_ERR_INIT;
    int index;
    char name[32];
    snprintf(name, sizeof name, "layer %d", unit);
    const struct zpp_unit_spec spec = {.name = name,
                                       .dtype = ZPP_BF16,
                                       .params = PARAMS,
                                       .param_elems = param_elems,
                                       .trainable = true,
                                       .grad_dtype = ZPP_BF16,
                                       .wire_dtype = ZPP_BF16};
    CHECK_OK(zpp_zero_add_unit(side->zero, &spec, &index, &err));
}

static void make_states(struct side *side, int unit) {
    static float values[CAPACITY];
    struct zpp_step_unit *to = &side->stepper.units[unit];
    for (int k = 0; k < STATES; k++) {
        for (size_t i = 0; i < CAPACITY; i++) values[i] = k ? 0.0f : (float)(i % 101) / 50.0f - 1.0f;
        side->states[unit][k] = memory_of(side, values, sizeof values);
    }
    memset(side->counts[unit], 0, sizeof side->counts[unit]);
    to->states.master = side->states[unit][0];
    to->states.moments[0].codes = side->states[unit][1];
    to->states.moments[1].codes = side->states[unit][2];
    to->states.steps = side->counts[unit];
    to->states.groups = calloc(PARAMS, sizeof *to->states.groups);
    CHECK(to->states.groups);
    side->grads[unit] = memory_of(side, values, ELEMS * sizeof(uint16_t));
}

static void open_side(struct side *side) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_device_cpu_create(&side->host, &err));
    const struct zpp_zero_options options = {.stage = 3, .device = side->host};
    CHECK_OK(zpp_zero_create(&options, &side->zero, &err));
    for (int unit = 0; unit < UNITS; unit++) add_unit(side, unit);
    CHECK_OK(zpp_zero_seal(side->zero, &err));
    CHECK_OK(zpp_stepper_init(side->zero, NULL, &side->stepper, &err));
    for (int unit = 0; unit < UNITS; unit++) make_states(side, unit);
}

static void close_side(struct side *side) {
    for (int unit = 0; unit < UNITS; unit++) {
        for (int k = 0; k < STATES; k++) zpp_device_free(side->device, side->states[unit][k], CAPACITY * sizeof(float));
        zpp_device_free(side->device, side->grads[unit], ELEMS * sizeof(uint16_t));
    }
    zpp_stepper_fini(&side->stepper);
    zpp_zero_destroy(side->zero);
    zpp_device_destroy(side->host);
}

/* Gradients of a backward; unit 2 has none for its second parameter. */
static void backward(struct side *side, int step) {
    static uint16_t values[UNITS][ELEMS];
    struct zpp_err err = ZPP_ERR_INIT;
    for (int unit = 0; unit < UNITS; unit++) {
        size_t at = 0;
        for (size_t i = 0; i < ELEMS; i++) values[unit][i] = grad_at(step, unit, i);
        CHECK_OK(zpp_stream_copy(side->stream, side->grads[unit], values[unit], sizeof values[unit], &err));
        for (size_t p = 0; p < PARAMS; at += param_elems[p++])
            side->stepper.units[unit].local_grads[p] = unit == 2 && p == 1 ? NULL : side->grads[unit] + at;
    }
}

static void plan_step(const struct side *side, struct zpp_step_plan *plan) {
    static float mark;
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_optim_segment group = {.optimizer = ZPP_OPTIM_ADAM,
                                            .exp_avg = &mark,
                                            .exp_avg_sq = &mark,
                                            .lr = 1e-2,
                                            .beta1 = 0.9,
                                            .beta2 = 0.99,
                                            .eps = 1e-8,
                                            .weight_decay = 0.1,
                                            .decoupled_decay = true};
    CHECK_OK(zpp_step_plan_make(&side->stepper, &group, 1.0, false, plan, &err));
}

/* What the facade does on the CPU: the norm, its limit, and the step unless it is skipped. */
static void step_on_cpu(struct side *side, struct zpp_clip_record *record) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_shard_norm norms[UNITS];
    double squares[UNITS];
    const double *all = squares;
    CHECK_OK(zpp_norm_of_all(&side->stepper, norms, &ten_seconds, &err));
    for (int unit = 0; unit < UNITS; unit++) squares[unit] = norms[unit].squares;
    const struct zpp_clip clip = {record, &all, 1, UNITS, NULL, rule};
    zpp_clip(&clip);
    struct zpp_step_plan plan;
    plan_step(side, &plan);
    if (!record->skip) zpp_optim_step(plan.segments, plan.segments_count, record->grad_scale, NULL);
    zpp_step_plan_drop(&plan);
}

static void step_on_device(struct side *side, zpp_step_device *step, int t) {
    static const uint32_t parts[] = {ZPP_CLIP_LIMIT, ZPP_CLIP_SETTLE};
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_clip_rule one = rule;
    struct zpp_step_plan plan;
    one.parts = ZPP_CLIP_MEASURE;
    CHECK_OK(zpp_step_device_measure(step, &side->stepper, &one, &err));
    one.parts = parts[0];
    CHECK_OK(zpp_step_device_clip(step, &one, &err));
    one.parts = parts[1];
    one.settled = t > BAD_STEP;
    CHECK_OK(zpp_step_device_clip(step, &one, &err));
    plan_step(side, &plan);
    CHECK_OK(zpp_step_device_launch(step, &plan, 0, &err));
    zpp_step_plan_drop(&plan);
    CHECK_OK(zpp_step_device_send(step, 0, &err));
}

static void check_same(struct side *wanted, struct side *found) {
    static float values[CAPACITY];
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_event *event;
    CHECK_OK(zpp_event_create(found->device, &event, &err));
    for (int unit = 0; unit < UNITS; unit++) {
        for (int k = 0; k < STATES; k++) {
            CHECK_OK(zpp_stream_copy(found->stream, values, found->states[unit][k], sizeof values, &err));
            CHECK_OK(zpp_event_record(event, found->stream, &err));
            CHECK_OK(zpp_event_sync(event, &ten_seconds, &err));
            CHECK(memcmp(values, wanted->states[unit][k], sizeof values) == 0);
        }
        const size_t unit_bytes = zpp_zero_unit(found->zero, unit)->elems * sizeof(uint16_t);
        CHECK(unit_bytes <= CAPACITY * sizeof(uint16_t));
        const unsigned char *whole = zpp_zero_unit(found->zero, unit)->whole;
        CHECK(memcmp(whole, zpp_zero_unit(wanted->zero, unit)->whole, unit_bytes) == 0);
    }
    zpp_event_destroy(event);
}

static struct side on_cpu, on_gpu;

static void run_on_device(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_clip_record seen;
    zpp_step_device *step;
    open_side(&on_gpu);
    const struct zpp_step_device_options options = {.stream = on_gpu.stream, .loss_scale = 64.0};
    CHECK_OK(zpp_step_device_create(&options, &step, &err));
    backward(&on_gpu, 0);
    step_on_device(&on_gpu, step, 0); /* the first allocates, which may wait */
    const uint64_t waits = sim_gpu_counts().host_waits;
    for (int t = 1; t < STEPS; t++) {
        backward(&on_gpu, t);
        step_on_device(&on_gpu, step, t);
        CHECK_EQUAL(sim_gpu_counts().host_waits, waits);
    }
    CHECK_OK(zpp_step_device_look(step, 0, &ten_seconds, &seen, &err));
    CHECK_EQUAL(seen.skipped, 1);
    CHECK(seen.loss_scale == 32.0 && seen.skip == 0 && seen.norm > 2.0);
    check_same(&on_cpu, &on_gpu);
    zpp_step_device_destroy(step);
    close_side(&on_gpu);
}

static void equals_the_cpu(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_clip_record record = zpp_clip_record_of(64.0);
    CHECK_OK(zpp_device_cpu_create(&on_cpu.device, &err));
    CHECK_OK(zpp_stream_create(on_cpu.device, ZPP_STREAM_HOST, "cpu", &on_cpu.stream, &err));
    CHECK_OK(zpp_device_cuda_create(0, &on_gpu.device, &err));
    CHECK_OK(zpp_stream_create(on_gpu.device, ZPP_STREAM_THREAD, "compute", &on_gpu.stream, &err));
    open_side(&on_cpu);
    for (int t = 0; t < STEPS; t++) {
        backward(&on_cpu, t);
        step_on_cpu(&on_cpu, &record);
        CHECK_EQUAL(record.skip, t == BAD_STEP);
    }
    for (uint64_t lazy = 0; lazy < 4; lazy++) {
        SIM(sim_set_schedule)(lazy, 0);
        run_on_device();
    }
    close_side(&on_cpu);
    zpp_stream_destroy(on_cpu.stream);
    zpp_device_destroy(on_cpu.device);
}

static zpp_status note_number(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait, (void)err;
    **(int **)arg = SIM(sim_stream_number)(native);
    return ZPP_OK;
}

/* The host that looks at an outcome waits until it is copied; else it sees what was there before. */
static void an_outcome_is_waited_for(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_clip_record seen = {0}, early = {0};
    zpp_step_device *step;
    int number, *const where = &number;
    open_side(&on_gpu);
    const struct zpp_step_device_options options = {.stream = on_gpu.stream, .loss_scale = 64.0};
    CHECK_OK(zpp_step_device_create(&options, &step, &err));
    CHECK_OK(zpp_stream_launch(on_gpu.stream, note_number, &where, sizeof where, &err));
    SIM(sim_set_schedule)(UINT64_MAX >> 1, 0);
    for (int t = 0; t <= BAD_STEP; t++) {
        backward(&on_gpu, t);
        step_on_device(&on_gpu, step, t);
    }
    SIM(sim_leave_out_between)(SIM_HOST, number);
    CHECK_OK(zpp_step_device_look(step, 0, &ten_seconds, &early, &err));
    SIM(sim_leave_out_between)(SIM_NOBODY, 0);
    CHECK_OK(zpp_step_device_look(step, 0, &ten_seconds, &seen, &err));
    CHECK(early.skipped == 0 && seen.skipped == 1);
    zpp_step_device_destroy(step);
    close_side(&on_gpu);
}

static void what_is_missing_is_refused(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_step_device *step;
    const struct zpp_step_device_options options = {.stream = on_gpu.stream, .loss_scale = 1.0};
    CHECK_OK(zpp_step_device_create(&options, &step, &err));
    const struct zpp_step_plan plans[] = {{.file_pieces_count = 1}, {.delayed = true}};
    static const char *const words[] = {"in files", "delayed_update"};
    for (int k = 0; k < 2; k++) {
        CHECK_EQUAL(zpp_step_device_launch(step, &plans[k], 0, &err), ZPP_NOT_BUILT);
        CHECK(strstr(err.text, words[k]) && strstr(err.text, "not supported yet"));
        err = (struct zpp_err)ZPP_ERR_INIT;
    }
    zpp_step_device_destroy(step);
}

int main(int argc, char **argv) {
    setenv("SIM_IDLE_MS", "200", 1);
    sim_gpu_load();
    static const struct test_case cases[] = {
        TEST(equals_the_cpu), TEST(an_outcome_is_waited_for), TEST(what_is_missing_is_refused), {0}};
    const int result = test_main(argc, argv, cases);
    zpp_stream_destroy(on_gpu.stream);
    zpp_device_destroy(on_gpu.device);
    return result;
}
