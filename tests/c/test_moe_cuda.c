/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of the mixture of experts, run on a CPU (cuda_threads.h), against the CPU's versions, bit for bit:
 * gate and its backward, plan with and without capacity and order, dispatch, combine and its backward; numbers out of
 * range are left out; the moves over the memory of several ranks.
 */
#include "harness.h"

#include <math.h>

#include "../../csrc/ops/element.h"
#include "../../csrc/ops/moe/kernels.h"
#include "../../csrc/ops/moe/peers.h"

#include "cuda_threads.h"

#include "../../csrc/ops/moe/gate_cuda.cu"
#include "../../csrc/ops/moe/peers_cuda.cu"
#include "../../csrc/ops/moe/rows_cuda.cu"
CUDA_THUNK(zpp_moe_cuda_zero, struct zpp_gate_cuda_args)
CUDA_THUNK(zpp_moe_cuda_token, struct zpp_gate_cuda_args)
CUDA_THUNK(zpp_moe_cuda_shares, struct zpp_gate_cuda_args)
CUDA_THUNK(zpp_moe_cuda_losses, struct zpp_gate_cuda_args)
CUDA_THUNK(zpp_moe_cuda_gate_backward, struct zpp_gate_cuda_args)
CUDA_THUNK(zpp_moe_cuda_shuffle, struct zpp_rows_cuda_args)
CUDA_THUNK(zpp_moe_cuda_drop, struct zpp_rows_cuda_args)
CUDA_THUNK(zpp_moe_cuda_keep, struct zpp_rows_cuda_args)
CUDA_THUNK(zpp_moe_cuda_place, struct zpp_rows_cuda_args)
CUDA_THUNK(zpp_moe_cuda_dispatch, struct zpp_rows_cuda_args)
CUDA_THUNK(zpp_moe_cuda_blank, struct zpp_rows_cuda_args)
CUDA_THUNK(zpp_moe_cuda_combine, struct zpp_rows_cuda_args)
CUDA_THUNK(zpp_moe_cuda_combine_backward, struct zpp_rows_cuda_args)
CUDA_THUNK(zpp_moe_peer_cuda_gather, struct zpp_peers_cuda_args)
CUDA_THUNK(zpp_moe_peer_cuda_scale, struct zpp_peers_cuda_args)
CUDA_THUNK(zpp_moe_peer_cuda_sum, struct zpp_peers_cuda_args)
CUDA_THUNK(zpp_moe_peer_cuda_pick, struct zpp_peers_cuda_args)

enum { TOKENS = 70, EXPERTS = 40, MOST_K = 5, WIDTH = 50, ROWS = TOKENS * MOST_K };

static float logits[TOKENS * EXPERTS], bias[TOKENS * EXPERTS];
struct gated {
    float weights[ROWS], losses[ZPP_MOE_LOSSES], grad_logits[TOKENS * EXPERTS];
    int32_t chosen[ROWS];
    int64_t counts[EXPERTS];
};
static struct gated want, got;

static float random_value(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(state >> 40) / 8388608.0f - 1.0f;
}

static bool same(const void *a, const void *b, size_t elems) {
    for (size_t i = 0; i < elems; ++i) {
        const float x = ((const float *)a)[i], y = ((const float *)b)[i];
        if (!(isnan(x) && isnan(y)) && memcmp(&x, &y, sizeof x) != 0) return false;
    }
    return true;
}

static void check_gate(struct zpp_moe_gate gate) {
    struct zpp_err err = ZPP_ERR_INIT;
    float grad_weights[ROWS], grad_losses[] = { 0.3f, -0.2f };
    memset(&want, 0xa5, sizeof want);
    got = want;
    CHECK_OK(zpp_moe_gate(&gate, want.weights, want.chosen, want.counts, want.losses, NULL, &err));
    double *work = malloc(zpp_moe_gate_cuda_work_bytes(&gate));
    CHECK(work);
    const uint64_t blocks = (gate.tokens + ZPP_GATE_CUDA_BLOCK_TOKENS - 1) / ZPP_GATE_CUDA_BLOCK_TOKENS;
    const uint64_t sums = blocks * (gate.experts + 1), threads = ZPP_GATE_CUDA_SUM_THREADS;
    struct zpp_gate_cuda_args args = {
        .logits = gate.logits, .bias = gate.bias, .weights = got.weights, .losses = got.losses, .chosen = got.chosen,
        .counts = (unsigned long long *)(void *)got.counts, .sums = work, .scores = (float *)(void *)(work + sums),
        .tokens = gate.tokens, .experts = gate.experts, .k = gate.k, .bias_per_token = gate.bias_per_token,
        .sigmoid = gate.sigmoid, .normalise = gate.normalise };
    cuda_loop(zpp_moe_cuda_zero_thunk, &args, 1, ZPP_GATE_CUDA_SUM_THREADS);
    cuda_run(zpp_moe_cuda_token_thunk, &args, gate.tokens, ZPP_GATE_CUDA_THREADS);
    cuda_loop(zpp_moe_cuda_shares_thunk, &args, (sums + threads - 1) / threads, ZPP_GATE_CUDA_SUM_THREADS);
    cuda_run(zpp_moe_cuda_losses_thunk, &args, 1, ZPP_GATE_CUDA_SUM_THREADS);
    CHECK(memcmp(want.chosen, got.chosen, sizeof got.chosen) == 0);
    CHECK(memcmp(want.counts, got.counts, sizeof got.counts) == 0);
    CHECK(same(want.weights, got.weights, ROWS) && same(want.losses, got.losses, ZPP_MOE_LOSSES));
    for (int i = 0; i < ROWS; ++i) grad_weights[i] = random_value();
    zpp_moe_gate_backward(&gate, want.chosen, want.counts, grad_weights, grad_losses, want.grad_logits, NULL);
    args.grad_weights = grad_weights, args.grad_losses = grad_losses, args.grad_logits = got.grad_logits;
    cuda_run(zpp_moe_cuda_gate_backward_thunk, &args, gate.tokens, ZPP_GATE_CUDA_THREADS);
    CHECK(same(want.grad_logits, got.grad_logits, TOKENS * EXPERTS));
    free(work);
}

static void gates(void) {
    for (size_t i = 0; i < TOKENS * EXPERTS; ++i) {
        logits[i] = i % 7 ? 4.0f * random_value() : 0.5f; /* ties */
        bias[i] = random_value();
    }
    logits[3] = NAN, logits[100] = -INFINITY, logits[101] = INFINITY;
    for (int flags = 0; flags < 8; ++flags) {
        const struct zpp_moe_gate gate = { logits, flags & 4 ? bias : NULL, flags ? 9 : TOKENS, EXPERTS,
                                           flags & 1 ? 2 : MOST_K, flags & 2, flags & 2, flags & 1 };
        check_gate(gate);
    }
    check_gate((struct zpp_moe_gate){ logits, NULL, 5, 1, 1, false, true, true });
    check_gate((struct zpp_moe_gate){ logits, bias, 5, 17, 1, false, false, false });
    check_gate((struct zpp_moe_gate){ logits, NULL, 0, 8, 2, false, false, false });
}

/* --- plan and rows ------------------------------------------------------------------------------------------------ */
static int32_t chosen[ROWS], want_slots[ROWS], got_slots[ROWS];
static int64_t want_kept[EXPERTS], got_kept[EXPERTS];
static uint32_t order[TOKENS];

static void check_plan(const struct zpp_moe_plan *plan) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_moe_plan(plan, want_slots, want_kept, &err));
    const bool shuffled = plan->seed >= 0 && plan->capacity > 0;
    const struct zpp_rows_cuda_args args = {
        .chosen = chosen, .slots = got_slots, .kept = got_kept, .order = shuffled ? order : NULL,
        .tokens = plan->tokens, .k = plan->k, .experts = plan->experts, .capacity = plan->capacity,
        .seed = (uint64_t)plan->seed };
    const size_t all = plan->tokens * plan->k;
    cuda_loop(zpp_moe_cuda_drop_thunk, &args, (all + ZPP_ROWS_CUDA_THREADS - 1) / ZPP_ROWS_CUDA_THREADS,
              ZPP_ROWS_CUDA_THREADS);
    if (shuffled) cuda_loop(zpp_moe_cuda_shuffle_thunk, &args, 1, ZPP_ROWS_CUDA_THREADS);
    cuda_run(zpp_moe_cuda_keep_thunk, &args, plan->experts, ZPP_ROWS_CUDA_THREADS);
    cuda_run(zpp_moe_cuda_place_thunk, &args, plan->experts, ZPP_ROWS_CUDA_THREADS);
    CHECK(memcmp(want_slots, got_slots, all * sizeof *got_slots) == 0);
    CHECK(memcmp(want_kept, got_kept, plan->experts * sizeof *got_kept) == 0);
}

static float x[TOKENS * WIDTH], grad_y[TOKENS * WIDTH], buffer[ROWS * WIDTH], weights[ROWS];
struct moved {
    float buffer[ROWS * WIDTH], y[TOKENS * WIDTH], grad_buffer[ROWS * WIDTH], grad_weights[ROWS];
};
static struct moved want_moved, got_moved;

static void check_rows(const struct zpp_moe_plan *plan, zpp_dtype dtype) {
    const struct zpp_moe_rows rows = { want_slots, want_kept, plan->tokens, plan->k, plan->experts, plan->capacity,
                                       WIDTH, dtype };
    const size_t all = plan->tokens * plan->k, buffer_rows = zpp_moe_buffer_rows(&rows);
    CHECK(buffer_rows <= ROWS);
    struct zpp_rows_cuda_args args = {
        .slots = want_slots, .kept = want_kept, .tokens_in = x, .buffer_in = buffer, .out = got_moved.buffer,
        .tokens = rows.tokens, .k = rows.k, .experts = rows.experts, .capacity = rows.capacity,
        .buffer_rows = buffer_rows, .width_elems = WIDTH, .word_bytes = 4,
        .row_words = WIDTH * zpp_dtype_bytes(dtype) / 4,
        .dtype = dtype == ZPP_BF16 ? ZPP_CUDA_BF16 : dtype == ZPP_F16 ? ZPP_CUDA_F16 : ZPP_CUDA_F32 };
    memset(&want_moved, 1, sizeof want_moved);
    got_moved = want_moved;
    zpp_moe_dispatch(&rows, x, want_moved.buffer, NULL);
    cuda_loop(zpp_moe_cuda_dispatch_thunk, &args, all, ZPP_ROWS_CUDA_THREADS);
    if (plan->capacity) cuda_loop(zpp_moe_cuda_blank_thunk, &args, buffer_rows, ZPP_ROWS_CUDA_THREADS);
    args.out = got_moved.y;
    for (int weighted = 0; weighted < 2; ++weighted) {
        args.weights = weighted ? weights : NULL;
        zpp_moe_combine(&rows, buffer, args.weights, want_moved.y, NULL);
        cuda_loop(zpp_moe_cuda_combine_thunk, &args, rows.tokens, ZPP_ROWS_CUDA_THREADS);
        CHECK(memcmp(want_moved.y, got_moved.y, sizeof got_moved.y) == 0);
    }
    zpp_moe_combine_backward(&rows, buffer, weights, grad_y, want_moved.grad_buffer, want_moved.grad_weights, NULL);
    args.tokens_in = grad_y, args.out = got_moved.grad_buffer, args.grad_weights = got_moved.grad_weights;
    cuda_run(zpp_moe_cuda_combine_backward_thunk, &args, all, ZPP_ROWS_CUDA_THREADS);
    if (plan->capacity) cuda_loop(zpp_moe_cuda_blank_thunk, &args, buffer_rows, ZPP_ROWS_CUDA_THREADS);
    CHECK(memcmp(&want_moved, &got_moved, sizeof got_moved) == 0);
}

static void fill_halves(float *to, size_t elems) { /* finite as two numbers of 16 bits, too */
    for (size_t i = 0; i < elems; ++i) {
        to[i] = __uint_as_float(0x3c003c00u + (uint32_t)(i * 2654435761u % 0x200u) * 0x10001u);
    }
}

static void plans(void) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    fill_halves(x, TOKENS * WIDTH), fill_halves(grad_y, TOKENS * WIDTH), fill_halves(buffer, ROWS * WIDTH);
    for (int i = 0; i < ROWS; ++i) weights[i] = random_value();
    for (int turn = 0; turn < 6; ++turn) {
        const size_t experts = turn < 3 ? 8 : 3, k = turn % 3 ? 2 : 1;
        const struct zpp_moe_plan plan = { chosen, turn == 5 ? 3 : 37, experts, k, turn % 3 ? 4 + (size_t)turn : 0,
                                           turn % 2 ? 11 : -1 };
        for (size_t a = 0; a < plan.tokens * k; ++a) chosen[a] = (int32_t)((a * a + a / 3) % experts);
        check_plan(&plan);
        check_rows(&plan, kinds[turn % 3]);
    }
}

static void out_of_range(void) {
    const struct zpp_moe_plan plan = { chosen, 4, 2, 1, 0, -1 };
    const int32_t wrong[] = { 0, 9, -3, 1 };
    memcpy(chosen, wrong, sizeof wrong);
    struct zpp_rows_cuda_args args = { .chosen = chosen, .slots = got_slots, .kept = got_kept, .tokens = 4, .k = 1,
                                       .experts = plan.experts };
    cuda_loop(zpp_moe_cuda_drop_thunk, &args, 1, ZPP_ROWS_CUDA_THREADS);
    cuda_run(zpp_moe_cuda_keep_thunk, &args, 2, ZPP_ROWS_CUDA_THREADS);
    cuda_run(zpp_moe_cuda_place_thunk, &args, 2, ZPP_ROWS_CUDA_THREADS);
    CHECK(got_slots[0] == 0 && got_slots[1] == -1 && got_slots[2] == -1 && got_slots[3] == 1);
}

/* --- rows of several ranks ---------------------------------------------------------------------------------------- */
enum { PEERS = 3, PEER_TOKENS = 12, PEER_K = 2, PEER_EXPERTS = 6, PEER_ROWS = PEERS * PEER_TOKENS * PEER_K };

/* What rank 1 of three takes, and where the results of its own tokens lie. */
struct peer_case {
    int32_t chosen[PEERS][PEER_TOKENS * PEER_K], ends[PEER_EXPERTS];
    size_t tokens[PEERS], here;
    struct zpp_moe_taken taken[PEER_ROWS];
    int64_t starts[PEERS + 1], slots[PEER_TOKENS * PEER_K], counts[PEERS * PEER_EXPERTS], rows[PEERS];
};

static void plan_peers(struct peer_case *of) {
    const int32_t *chosen_of[PEERS];
    for (int r = 0; r < PEERS; ++r) {
        of->tokens[r] = r == 2 ? 0 : PEER_TOKENS - 5 * (size_t)r;
        chosen_of[r] = of->chosen[r];
        for (int a = 0; a < PEER_TOKENS * PEER_K; ++a) of->chosen[r][a] = (a * 5 + a / 3 + r) % (PEER_EXPERTS + 1) - 1;
    }
    const struct zpp_moe_choices choices = { chosen_of, of->tokens, PEERS, 1, PEER_EXPERTS, PEER_K };
    const struct zpp_moe_peer_plan plan = { of->ends, of->taken, of->starts, of->slots };
    zpp_moe_choices_count(&choices, of->counts, of->rows);
    of->here = (size_t)of->rows[1];
    zpp_moe_peer_plan(&choices, of->counts, &plan);
}

enum { PEER_WIDTH = 1048 }; /* more than a block has at once */
_Alignas(16) static float peer_x[PEERS][PEER_TOKENS * PEER_WIDTH], peer_made[PEER_ROWS * PEER_WIDTH];
struct peer_moved {
    _Alignas(16) float buffer[PEER_ROWS * PEER_WIDTH], grad_buffer[PEER_ROWS * PEER_WIDTH];
    _Alignas(16) float y[PEER_TOKENS * PEER_WIDTH], dots[PEER_ROWS], picked[PEER_TOKENS * PEER_K];
};
static struct peer_moved want_peer, got_peer;

static void move_on_cuda(struct zpp_peers_cuda_args *args, const struct peer_case *of) {
    args->out = got_peer.buffer;
    cuda_loop(zpp_moe_peer_cuda_gather_thunk, args, of->here, ZPP_PEERS_CUDA_THREADS);
    args->out = got_peer.grad_buffer, args->values = got_peer.dots;
    cuda_run(zpp_moe_peer_cuda_scale_thunk, args, of->here, ZPP_PEERS_CUDA_THREADS);
    args->out = got_peer.y;
    cuda_loop(zpp_moe_peer_cuda_sum_thunk, args, of->tokens[1], ZPP_PEERS_CUDA_THREADS);
    args->values = got_peer.picked;
    cuda_loop(zpp_moe_peer_cuda_pick_thunk, args, 1, ZPP_PEERS_CUDA_THREADS);
}

static void check_peers(const struct peer_case *of, zpp_dtype dtype, size_t width, bool weighted) {
    const size_t row_bytes = width * zpp_dtype_bytes(dtype), own = of->tokens[1] * PEER_K;
    const void *const bases[PEERS] = { peer_x[0], peer_x[1], peer_x[2] };
    const float *const weights_of[PEERS] = { weights, weights + 30, weights };
    const struct zpp_moe_peer_rows rows = { bases, PEERS, PEER_K, width, dtype };
    const struct zpp_moe_peer_scale scale = { weights_of, peer_made, want_peer.dots };
    struct zpp_peers_cuda_args args = {
        .taken = (const struct zpp_peers_cuda_taken *)(const void *)of->taken, .slots = of->slots, .made = peer_made,
        .weights = weighted ? weights : NULL, .k = PEER_K, .width_elems = width, .word_bytes = 4, .count = own,
        .row_words = row_bytes / 4, .wide = width % ZPP_PEERS_CUDA_WIDE == 0,
        .dtype = dtype == ZPP_BF16 ? ZPP_CUDA_BF16 : dtype == ZPP_F16 ? ZPP_CUDA_F16 : ZPP_CUDA_F32 };
    for (int r = 0; r < PEERS; ++r) args.bases[r] = bases[r], args.weights_of[r] = weights_of[r];
    memcpy(args.starts, of->starts, sizeof of->starts);
    memset(&want_peer, 1, sizeof want_peer);
    got_peer = want_peer;
    zpp_moe_peer_gather(&rows, of->taken, of->starts, want_peer.buffer, NULL);
    zpp_moe_peer_gather_scaled(&rows, of->taken, of->starts, &scale, want_peer.grad_buffer, NULL);
    zpp_moe_peer_sum(&rows, of->slots, of->tokens[1], args.weights, want_peer.y, NULL);
    zpp_moe_peer_pick((const float *const *)bases, of->slots, own, want_peer.picked);
    move_on_cuda(&args, of);
    CHECK(memcmp(&want_peer, &got_peer, sizeof got_peer) == 0);
    const uint64_t halt = 1;
    args.halt = &halt;
    memset(&got_peer, 2, sizeof got_peer);
    want_peer = got_peer;
    move_on_cuda(&args, of);
    CHECK(memcmp(&want_peer, &got_peer, sizeof got_peer) == 0); /* nothing was written */
}

static void rows_of_peers(void) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const size_t widths[] = { 50, 48, PEER_WIDTH - 2, PEER_WIDTH };
    static struct peer_case of;
    for (int r = 0; r < PEERS; ++r) fill_halves(peer_x[r], PEER_TOKENS * PEER_WIDTH);
    fill_halves(peer_made, PEER_ROWS * PEER_WIDTH);
    for (int i = 0; i < ROWS; ++i) weights[i] = random_value();
    plan_peers(&of);
    CHECK(of.here > 5 && of.here < PEER_ROWS);
    for (int i = 0; i < 12; ++i) check_peers(&of, kinds[i % 3], widths[i / 3], i % 2);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(gates), TEST(plans), TEST(out_of_range), TEST(rows_of_peers), {0} };
    return test_main(argc, argv, cases);
}
