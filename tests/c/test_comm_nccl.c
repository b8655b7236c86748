/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on CUDA memory over the simulated GPU and its NCCL; ranks are threads. What only GPUs can show is not
 * shown here.
 */
#include <time.h>

#include "../../csrc/comm/nccl/nccl.h"
#include "../../csrc/comm/nccl/nccl_api.h"
#include "ranks.h"
#include "sim_gpu.h"

enum { ELEMS = 1000, RANKS = 3 };
static const struct zpp_wait ten_seconds = {10000000000u, NULL, NULL};
static const uint64_t SHORT_NS = 1000000000u, LONG_NS = 60000000000u;
static struct sim_faults *faults;
static int64_t aborts_before;

struct gpu { /* of one rank */
    zpp_device *device;
    zpp_nccl *nccl;
    zpp_stream *caller;
    void *native; /* of `caller` */
};

static zpp_status see_native(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait, (void)err;
    **(void ***)arg = native;
    return ZPP_OK;
}

static void open_device(struct gpu *gpu) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_device_cuda_create(0, &gpu->device, &err));
    CHECK_OK(zpp_stream_create(gpu->device, ZPP_STREAM_QUEUE, "torch's", &gpu->caller, &err));
    void **where = &gpu->native;
    CHECK_OK(zpp_stream_launch(gpu->caller, see_native, &where, sizeof where, &err));
}

static void open_gpu(struct test_rank *me, struct gpu *gpu) {
    struct zpp_err err = ZPP_ERR_INIT;
    open_device(gpu);
    CHECK_OK(zpp_nccl_create(me->comm, gpu->device, &ten_seconds, &gpu->nccl, &err));
    const struct zpp_nccl_api *api;
    CHECK_OK(zpp_nccl_api(&api, &err));
    CHECK_EQUAL(api->version, 22809);
    CHECK(zpp_nccl_stream(gpu->nccl) != NULL && zpp_nccl_stream(gpu->nccl) != gpu->native);
}

static void close_gpu(struct gpu *gpu) {
    zpp_nccl_destroy(gpu->nccl);
    zpp_stream_destroy(gpu->caller);
    zpp_device_destroy(gpu->device);
}

static void now(struct gpu *gpu, const struct zpp_call *call) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_nccl_work *work;
    CHECK_OK(zpp_nccl_submit(gpu->nccl, call, 1, gpu->native, &ten_seconds, &work, &err));
    CHECK_OK(zpp_nccl_work_wait(work, &ten_seconds, &err));
    zpp_nccl_work_free(work);
}

static double wanted_of(zpp_reduce_op op, int ranks, int i) {
    double value = 1 + i % 3;
    for (int r = 1; r < ranks; r++) {
        const double other = r + 1 + i % 3;
        value = op == ZPP_PRODUCT ? value * other : op == ZPP_MIN ? value : op == ZPP_MAX ? other : value + other;
    }
    return op == ZPP_AVG ? value / ranks : value;
}

/* --- what is right ------------------------------------------------------------------------------------------------ */

static void reductions(struct test_rank *me, struct gpu *gpu) {
    for (zpp_reduce_op op = ZPP_SUM; op <= ZPP_MAX; op++) {
        float x[ELEMS], part[RANKS * 5], mine[5];
        int64_t n[ELEMS];
        for (int i = 0; i < ELEMS; i++) n[i] = x[i] = (float)(me->rank + 1 + i % 3);
        for (int i = 0; i < me->ranks * 5; i++) part[i] = (float)(me->rank + 1 + i % 3);
        now(gpu,
            &(struct zpp_call){.coll = ZPP_COLL_ALL_REDUCE, .dtype = ZPP_F32, .op = op, .dst = x, .elems = ELEMS});
        struct zpp_call call = {.coll = ZPP_COLL_REDUCE_SCATTER, .dtype = ZPP_F32, .op = op, .elems = 5};
        call.dst = mine;
        call.src = part;
        now(gpu, &call);
        for (int i = 0; i < ELEMS; i++) CHECK(x[i] == (float)wanted_of(op, me->ranks, i));
        for (int i = 0; i < 5; i++) CHECK(mine[i] == (float)wanted_of(op, me->ranks, me->rank * 5 + i));
        if (op == ZPP_AVG) continue;
        now(gpu, &(struct zpp_call){
                     .coll = ZPP_COLL_REDUCE, .dtype = ZPP_I64, .op = op, .root = 1, .dst = n, .elems = ELEMS});
        for (int i = 0; i < ELEMS; i++)
            CHECK_EQUAL(n[i], me->rank == 1 ? (int64_t)wanted_of(op, me->ranks, i) : me->rank + 1 + i % 3);
    }
    bool any[4] = {me->rank == 0, me->rank == 2, true, false};
    now(gpu,
        &(struct zpp_call){.coll = ZPP_COLL_ALL_REDUCE, .dtype = ZPP_BOOL, .op = ZPP_SUM, .dst = any, .elems = 4});
    CHECK(any[0] && any[1] && any[2] && !any[3]);
    uint16_t half[3] = {zpp_bf16_from_f32(1), zpp_bf16_from_f32((float)me->rank), zpp_bf16_from_f32(0.5f)};
    now(gpu,
        &(struct zpp_call){.coll = ZPP_COLL_ALL_REDUCE, .dtype = ZPP_BF16, .op = ZPP_SUM, .dst = half, .elems = 3});
    CHECK(zpp_bf16_to_f32(half[0]) == 3 && zpp_bf16_to_f32(half[1]) == 3 && zpp_bf16_to_f32(half[2]) == 1.5f);
}

static void moves(struct test_rank *me, struct gpu *gpu) {
    int16_t all[RANKS][7], mine[7], one[RANKS][7] = {{0}};
    for (int i = 0; i < 7; i++) mine[i] = (int16_t)(me->rank * 100 + i);
    now(gpu, &(struct zpp_call){.coll = ZPP_COLL_ALL_GATHER, .dtype = ZPP_I16, .dst = all, .src = mine, .elems = 7});
    void *dsts[RANKS] = {one[2], one[0], one[1]};
    now(gpu, &(struct zpp_call){.coll = ZPP_COLL_ALL_GATHER, .dtype = ZPP_I16, .dsts = dsts, .src = mine, .elems = 7});
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < 7; i++) {
            CHECK_EQUAL(all[r][i], r * 100 + i);
            CHECK_EQUAL(((int16_t *)dsts[r])[i], r * 100 + i);
        }
    now(gpu, &(struct zpp_call){.coll = ZPP_COLL_BROADCAST, .dtype = ZPP_I16, .root = 2, .dst = mine, .elems = 7});
    for (int i = 0; i < 7; i++) CHECK_EQUAL(mine[i], 200 + i);
    now(gpu, &(struct zpp_call){.coll = ZPP_COLL_BARRIER});
}

/* Rank a sends b 1 + a + b bytes of value a * 10 + b, but no rank sends itself anything. */
static void pieces(struct test_rank *me, struct gpu *gpu) {
    uint8_t out[RANKS][8], in[RANKS][8] = {{0}};
    void *dsts[RANKS];
    const void *srcs[RANKS];
    size_t dst_bytes[RANKS], src_bytes[RANKS];
    for (int r = 0; r < RANKS; r++) {
        memset(out[r], me->rank * 10 + r, sizeof out[r]);
        dsts[r] = in[r];
        srcs[r] = out[r];
        dst_bytes[r] = src_bytes[r] = r == me->rank ? 0 : (size_t)(1 + r + me->rank);
    }
    struct zpp_call call = {.coll = ZPP_COLL_ALL_TO_ALL, .dtype = ZPP_U8, .dsts = dsts, .srcs = srcs,
                            .dst_bytes = dst_bytes, .src_bytes = src_bytes};
    now(gpu, &call);
    for (int r = 0; r < RANKS; r++)
        for (size_t i = 0; i < 8; i++) CHECK_EQUAL(in[r][i], i < dst_bytes[r] ? r * 10 + me->rank : 0);
    for (int r = 0; r < RANKS; r++) {
        src_bytes[r] = r == 1 ? 4 : 0; /* to the root, which sends itself its piece, too */
        dst_bytes[r] = me->rank == 1 ? 4 : 0;
    }
    call.coll = ZPP_COLL_GATHER;
    call.root = 1;
    now(gpu, &call);
    for (int r = 0; me->rank == 1 && r < RANKS; r++) CHECK_EQUAL(in[r][3], r * 10 + 1);
    for (int r = 0; r < RANKS; r++) {
        src_bytes[r] = me->rank == 1 ? 4 : 0;
        dst_bytes[r] = r == 1 ? 4 : 0;
    }
    call.coll = ZPP_COLL_SCATTER;
    now(gpu, &call);
    CHECK_EQUAL(in[1][3], 10 + me->rank);
}

static void every_body(struct test_rank *me) {
    struct gpu gpu;
    open_gpu(me, &gpu);
    reductions(me, &gpu);
    moves(me, &gpu);
    pieces(me, &gpu);
    close_gpu(&gpu);
}

static void nothing_is_left(int aborts) {
    const struct sim_counts counts = sim_gpu_counts();
    CHECK_EQUAL(counts.streams, 0);
    CHECK_EQUAL(counts.events, 0);
    CHECK_EQUAL(counts.comms, 0);
    CHECK_EQUAL(counts.aborts - aborts_before, aborts);
    aborts_before = counts.aborts;
}

static void every_collective(void) {
    for (faults->late_launch = 0; faults->late_launch < 2; faults->late_launch++) run_ranks(RANKS, every_body, NULL);
    faults->late_launch = 0;
    run_hosts("aab", every_body, NULL);
    nothing_is_left(0);
}

/* The caller's stream writes the tensor late, and reads the result: only events order these with ours. */
static void streams_body(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct gpu gpu;
    open_gpu(me, &gpu);
    void *memory;
    CHECK_OK(zpp_device_alloc(gpu.device, 8 * sizeof(float), &memory, &err));
    float *tensor = memory, *more = tensor + 2, *result = tensor + 4, given[2] = {(float)me->rank, 1};
    more[0] = 2, more[1] = 3;
    zpp_nccl_work *work;
    const struct zpp_call calls[] = {
        {.coll = ZPP_COLL_ALL_REDUCE, .dtype = ZPP_F32, .op = ZPP_SUM, .dst = tensor, .elems = 2},
        {.coll = ZPP_COLL_ALL_REDUCE, .dtype = ZPP_F32, .op = ZPP_MAX, .dst = more, .elems = 2},
    };
    CHECK_OK(zpp_stream_copy(gpu.caller, tensor, given, sizeof given, &err));
    CHECK_OK(zpp_nccl_submit(gpu.nccl, calls, 2, gpu.native, &ten_seconds, &work, &err));
    CHECK_OK(zpp_nccl_work_order(work, gpu.native, &err));
    CHECK_OK(zpp_stream_copy(gpu.caller, result, tensor, 2 * sizeof *result, &err));
    zpp_nccl_work_free(work); /* before it is finished */
    zpp_stream_destroy(gpu.caller); /* waits */
    gpu.caller = NULL;
    CHECK(result[0] == 3 && result[1] == 3 && more[1] == 3);
    zpp_device_free(gpu.device, memory, 8 * sizeof(float));
    close_gpu(&gpu);
}

/* With three ranks: the default stream, and the caller's and ours of each. */
static void streams_are_ordered_by_events(void) {
    for (uint64_t lazy = 0; lazy < 1 << (1 + 2 * RANKS); lazy += 9) {
        SIM(sim_set_schedule)(lazy, 0);
        run_ranks(RANKS, streams_body, NULL);
    }
    SIM(sim_set_schedule)(0, 0);
    nothing_is_left(0);
}

/* Round the ring, sends before receives; each size has its own pair. Then one that no rank waits for. */
static void ring_body(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct gpu gpu;
    open_gpu(me, &gpu);
    const int next = (me->rank + 1) % RANKS, last = (me->rank + RANKS - 1) % RANKS;
    int out[2] = {me->rank, me->rank + 10}, in[2] = {-1, -1};
    zpp_nccl_work *work[4];
    for (int i = 0; i < 2; i++) {
        CHECK_OK(zpp_nccl_send(gpu.nccl, &out[i], sizeof out[i], next, gpu.native, &work[2 * i], &err));
        CHECK_OK(zpp_nccl_recv(gpu.nccl, &in[i], sizeof in[i], last, gpu.native, &work[2 * i + 1], &err));
    }
    for (int i = 3; i >= 0; i--) {
        CHECK_OK(zpp_nccl_work_wait(work[i], &ten_seconds, &err));
        zpp_nccl_work_free(work[i]);
    }
    CHECK(in[0] == last && in[1] == last + 10);
    zpp_nccl_work *none = NULL;
    CHECK_FAILS(zpp_nccl_recv(gpu.nccl, in, 4, -1, gpu.native, &none, &err), ZPP_INVALID, "not from any");
    CHECK_FAILS(zpp_nccl_send(gpu.nccl, in, 4, me->rank, gpu.native, &none, &err), ZPP_INVALID, "cannot send to rank");
    test_join(me);
    if (me->rank == 1) {
        CHECK_OK(zpp_nccl_send(gpu.nccl, &out[0], sizeof out[0], 0, gpu.native, &work[0], &err));
        zpp_nccl_work_free(work[0]); /* goes after a tenth of a second by itself */
    }
    if (me->rank == 0) {
        CHECK_OK(zpp_nccl_recv(gpu.nccl, &in[0], sizeof in[0], 1, gpu.native, &work[0], &err));
        CHECK_OK(zpp_nccl_work_wait(work[0], &ten_seconds, &err));
        zpp_nccl_work_free(work[0]);
        CHECK_EQUAL(in[0], 1);
    }
    test_join(me);
    close_gpu(&gpu);
}

static void sends_and_receives_go_in_groups(void) {
    run_ranks(RANKS, ring_body, NULL);
    nothing_is_left(0);
}

static void refusals_body(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct gpu gpu;
    zpp_nccl_work *none = NULL;
    int16_t x[4] = {0};
    open_gpu(me, &gpu);
    struct zpp_call call = {.coll = ZPP_COLL_ALL_REDUCE, .dtype = ZPP_I16, .op = ZPP_SUM, .dst = x, .elems = 4};
    CHECK_FAILS(zpp_nccl_submit(gpu.nccl, &call, 1, gpu.native, NULL, &none, &err), ZPP_INVALID,
                "sum of int16 on CUDA memory, which NCCL does not have");
    call.dtype = ZPP_I32;
    call.op = ZPP_BXOR;
    CHECK_FAILS(zpp_nccl_submit(gpu.nccl, &call, 1, gpu.native, NULL, &none, &err), ZPP_INVALID, "bxor of int32");
    call.coll = ZPP_COLL_BROADCAST;
    call.root = 7;
    CHECK_FAILS(zpp_nccl_submit(gpu.nccl, &call, 1, gpu.native, NULL, &none, &err), ZPP_INVALID,
                "root 7, wanted a rank");
    call.coll = ZPP_COLL_ALL_GATHER_QUANT;
    CHECK_FAILS(zpp_nccl_submit(gpu.nccl, &call, 1, gpu.native, NULL, &none, &err), ZPP_NOT_BUILT,
                "not supported yet");
    CHECK(none == NULL);
    call = (struct zpp_call){.coll = ZPP_COLL_BROADCAST, .dtype = ZPP_I16, .dst = x, .elems = 4};
    now(&gpu, &call); /* the group does not mind */
    close_gpu(&gpu);
}

static void what_nccl_lacks_is_refused(void) {
    run_ranks(2, refusals_body, NULL);
    nothing_is_left(0);
}

/* --- what goes wrong ---------------------------------------------------------------------------------------------- */

struct wrong {
    int elems_of_rank_1, late_rank, leaves, async_error, stall; /* -1 or 0: not so */
    zpp_status status;
    const char *part;
    double most_s;
};

static void wrong_body(struct test_rank *me) {
    const struct wrong *wrong = me->arg;
    struct zpp_err err = ZPP_ERR_INIT;
    struct gpu gpu;
    float x[ELEMS] = {0};
    zpp_nccl_work *work = NULL;
    open_gpu(me, &gpu);
    struct zpp_call call = {.coll = ZPP_COLL_ALL_REDUCE, .dtype = ZPP_F32, .op = ZPP_SUM, .dst = x, .elems = 10};
    now(&gpu, &call);
    test_join(me);
    if (me->rank == 0) {
        faults->stall = wrong->stall;
        faults->async_error = wrong->async_error;
    }
    test_join(me);
    if (me->rank == 1 && wrong->elems_of_rank_1 > 0) call.elems = (size_t)wrong->elems_of_rank_1;
    const uint64_t start_ns = zpp_now_ns();
    if (me->rank != wrong->late_rank && me->rank != wrong->leaves) {
        zpp_status status = zpp_nccl_submit(gpu.nccl, &call, 1, gpu.native, &ten_seconds, &work, &err);
        if (status == ZPP_OK) status = zpp_nccl_work_wait(work, &ten_seconds, &err);
        const double took_s = (double)(zpp_now_ns() - start_ns) / 1e9;
        CHECK(status != ZPP_OK);
        if (!strstr(err.text, wrong->part) || status != wrong->status || took_s > wrong->most_s) {
            fprintf(stderr, "rank %d, %.1f s, %s: %s\n", me->rank, took_s, zpp_status_name(status), err.text);
            abort();
        }
        struct zpp_err again = ZPP_ERR_INIT; /* for ever, at both doors */
        zpp_nccl_work *none = NULL;
        CHECK_FAILS(zpp_nccl_submit(gpu.nccl, &call, 1, gpu.native, NULL, &none, &again), status, wrong->part);
        CHECK_FAILS(zpp_barrier(me->comm, NULL, &again), status, wrong->part);
        zpp_nccl_work_free(work);
    } else if (me->rank == wrong->late_rank) {
        nanosleep(&(struct timespec){1, 800000000}, NULL);
    }
    if (me->rank == wrong->leaves) {
        close_gpu(&gpu);
        zpp_comm_destroy(me->comm);
        me->comm = NULL;
        test_join(me);
        return;
    }
    test_join(me);
    close_gpu(&gpu);
}

static void fails(struct wrong wrong, uint64_t timeout_ns, int aborts) {
    run_ranks_timeout(RANKS, NULL, timeout_ns, wrong_body, &wrong);
    faults->stall = faults->async_error = 0;
    nothing_is_left(aborts);
}

static void another_size_is_an_error_on_all(void) {
    fails((struct wrong){11, -1, -1, 0, 0, ZPP_PEER,
                         "rank 0 is in all_reduce(float32, 10 elements, sum) on GPUs #3 but rank 1 is in "
                         "all_reduce(float32, 11 elements, sum) on GPUs #3",
                         2.0},
          LONG_NS, RANKS);
    struct wrong far = {11, -1, -1, 0, 0, ZPP_PEER, "all_reduce(float32, 11 elements, sum) on GPUs #3", 5.0};
    run_hosts("aba", wrong_body, &far);
    nothing_is_left(RANKS);
}

static void an_absent_rank_is_named(void) {
    fails((struct wrong){0, 2, -1, 0, 0, ZPP_TIMEOUT, "rank 2 of group \"test\"", 4.0}, SHORT_NS, RANKS);
}

static void a_rank_that_leaves_is_named(void) {
    fails((struct wrong){0, -1, 1, 0, 0, ZPP_PEER, "rank 1 left the group", 3.0}, LONG_NS, RANKS - 1);
}

static void what_nccl_finds_is_told_to_all(void) {
    fails((struct wrong){0, -1, -1, 2, 1, ZPP_DEVICE, "NCCL: unhandled system error: the simulated cable is out", 2.0},
          LONG_NS, RANKS);
}

static void a_gpu_that_hangs_is_an_error(void) {
    fails((struct wrong){0, -1, -1, 0, 1, ZPP_TIMEOUT,
                         "has not finished all_reduce(float32, 10 elements, sum) on GPUs after", 7.0},
          SHORT_NS, RANKS);
}

static void cannot_body(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct gpu gpu = {0};
    open_device(&gpu);
    const char *part = me->arg;
    CHECK_FAILS(zpp_nccl_create(me->comm, gpu.device, NULL, &gpu.nccl, &err), *part == 'm' ? ZPP_TIMEOUT : ZPP_DEVICE,
                *part == 'm' ? "has not finished the rendezvous of its GPUs" : part);
    CHECK(gpu.nccl == NULL);
    close_gpu(&gpu);
}

static void a_rank_that_cannot_is_named_by_all(void) {
    faults->refuse_id = 1;
    run_ranks(RANKS, cannot_body, (void *)"rank 0 of group \"test\" gets no id from NCCL: unhandled system error");
    faults->refuse_id = 0;
    nothing_is_left(0);
    faults->stall_init = 1;
    run_ranks_timeout(RANKS, NULL, SHORT_NS, cannot_body, (void *)"meeting");
    faults->stall_init = 0;
    nothing_is_left(RANKS);
}

int main(int argc, char **argv) {
    sim_gpu_load();
    faults = SIM(sim_faults);
    static const struct test_case cases[] = {
        TEST(every_collective),
        TEST(streams_are_ordered_by_events),
        TEST(sends_and_receives_go_in_groups),
        TEST(what_nccl_lacks_is_refused),
        TEST(another_size_is_an_error_on_all),
        TEST(an_absent_rank_is_named),
        TEST(a_rank_that_leaves_is_named),
        TEST(what_nccl_finds_is_told_to_all),
        TEST(a_gpu_that_hangs_is_an_error),
        TEST(a_rank_that_cannot_is_named_by_all),
        {0},
    };
    return test_main(argc, argv, cases);
}
