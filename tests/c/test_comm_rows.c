/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange of rows between ranks that are threads: under ThreadSanitizer a row that is read before it is published,
 * or written again before all have read it, is a report. All values are small whole numbers, so every sum is exact.
 */
#include "mix.h"
#include "ranks.h"
#include "../../csrc/comm/rows.h"

enum { WIDTH = 19, K = 3, EXPERTS_A_RANK = 2, TOKENS_MAX = 12, ROWS_MAX = TEST_RANKS_MAX * TOKENS_MAX * K, ROUNDS = 6 };

static const struct zpp_wait patient = {UINT64_C(30000000000), NULL, NULL};

struct tokens {
    size_t count;
    float x[TOKENS_MAX][WIDTH], grad[TOKENS_MAX][WIDTH], weights[TOKENS_MAX * K];
    int32_t chosen[TOKENS_MAX * K];
};

/* The tokens of one rank in one round; every rank can make those of all. */
static void make_tokens(struct tokens *tokens, uint32_t seed, int rank, int experts) {
    const uint32_t base = mix(seed * 31u + (uint32_t)rank);
    tokens->count = base % 4 == 0 ? 0 : base % (TOKENS_MAX + 1);
    for (uint32_t t = 0; t < TOKENS_MAX; t++)
        for (uint32_t c = 0; c < WIDTH; c++) {
            tokens->x[t][c] = (float)(mix(base + t * WIDTH + c) % 16);
            tokens->grad[t][c] = (float)(mix(base + 7777 + t * WIDTH + c) % 8);
        }
    for (uint32_t a = 0; a < TOKENS_MAX * K; a++) {
        tokens->chosen[a] = (int32_t)(mix(base + 555 + a) % (uint32_t)(experts + 1)) - 1;
        tokens->weights[a] = (float)(mix(base + 999 + a) % 4);
    }
}

static float factor(int32_t expert) { return (float)(expert + 1); }

struct layer {
    zpp_rows *rows;
    int rank, ranks;
    int32_t ends[EXPERTS_A_RANK];
    int64_t numbers[ZPP_ROWS_NUMBERS + 3 * TEST_RANKS_MAX + 1], slots[TOKENS_MAX * K];
    struct zpp_moe_taken taken[ROWS_MAX];
    struct zpp_rows_plan plan;
    size_t rows_here;
};

static void open_layer(struct layer *layer, struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    uint32_t number = 9;
    memset(layer, 0, sizeof *layer);
    layer->rank = me->rank;
    layer->ranks = me->ranks;
    layer->plan = (struct zpp_rows_plan){layer->numbers, layer->ends, layer->taken, layer->slots};
    CHECK_OK(zpp_rows_create(me->comm, &layer->rows, &err));
    CHECK_OK(zpp_rows_add_layer(layer->rows, "blocks.0", &number, &err));
    CHECK_EQUAL(number, 0);
}

static zpp_status dispatch(struct layer *layer, const struct tokens *tokens, float (*buffer)[WIDTH],
                           struct zpp_err *err) {
    const struct zpp_rows_dispatch call = {.tokens = tokens->count,
                                           .width_elems = WIDTH,
                                           .k = K,
                                           .experts = (size_t)layer->ranks * EXPERTS_A_RANK,
                                           .dtype = ZPP_F32,
                                           .x = tokens->x,
                                           .chosen = tokens->chosen};
    const zpp_status status = zpp_rows_dispatch_begin(layer->rows, &call, NULL, &patient, &layer->rows_here, err);
    if (status != ZPP_OK) return status;
    CHECK(layer->rows_here <= ROWS_MAX);
    return zpp_rows_dispatch_end(layer->rows, &layer->plan, buffer, NULL, err);
}

/* What the experts of this rank do to each row: they multiply it. */
static void run_experts(const struct layer *layer, const float (*from)[WIDTH], float (*to)[WIDTH]) {
    size_t row = 0;
    for (int32_t e = 0; e < EXPERTS_A_RANK; e++)
        for (; row < (size_t)layer->ends[e]; row++)
            for (int c = 0; c < WIDTH; c++) to[row][c] = from[row][c] * factor(layer->rank * EXPERTS_A_RANK + e);
    CHECK_EQUAL(row, layer->rows_here);
}

static void check_rows(const struct layer *layer, const float (*buffer)[WIDTH], uint32_t seed) {
    size_t row = 0;
    for (int32_t e = layer->rank * EXPERTS_A_RANK; e < (layer->rank + 1) * EXPERTS_A_RANK; e++)
        for (int r = 0; r < layer->ranks; r++) {
            struct tokens theirs;
            make_tokens(&theirs, seed, r, layer->ranks * EXPERTS_A_RANK);
            for (size_t a = 0; a < theirs.count * K; a++)
                if (theirs.chosen[a] == e) CHECK(memcmp(buffer[row++], theirs.x[a / K], sizeof theirs.x[0]) == 0);
        }
    CHECK_EQUAL(row, layer->rows_here);
}

/* y and the gradient by x have one formula; only the values that go through it differ. */
static void check_sums(const struct tokens *tokens, const float (*values)[WIDTH], const float (*sums)[WIDTH]) {
    for (size_t t = 0; t < tokens->count; t++)
        for (int c = 0; c < WIDTH; c++) {
            float want = 0;
            for (size_t a = t * K; a < (t + 1) * K; a++)
                if (tokens->chosen[a] >= 0) want += tokens->weights[a] * factor(tokens->chosen[a]) * values[t][c];
            CHECK(sums[t][c] == want);
        }
}

static void check_weights(const struct tokens *tokens, const float *grads) {
    for (size_t a = 0; a < tokens->count * K; a++) {
        float want = 0;
        for (int c = 0; c < WIDTH && tokens->chosen[a] >= 0; c++)
            want += factor(tokens->chosen[a]) * tokens->x[a / K][c] * tokens->grad[a / K][c];
        CHECK(grads[a] == want);
    }
}

/* A layer forward and backward; between phases each rank is late by a time of its own. */
static void one_round(struct layer *layer, struct test_rank *me, uint32_t seed) {
    static _Thread_local float buffer[ROWS_MAX][WIDTH], grad_made[ROWS_MAX][WIDTH], grad_buffer[ROWS_MAX][WIDTH];
    struct zpp_err err = ZPP_ERR_INIT;
    struct tokens tokens;
    float y[TOKENS_MAX][WIDTH], grad_x[TOKENS_MAX][WIDTH], grad_weights[TOKENS_MAX * K];
    zpp_block *block = NULL;
    make_tokens(&tokens, seed, me->rank, me->ranks * EXPERTS_A_RANK);
#define LATE() (mix(seed + (uint32_t)me->rank * 77 + __LINE__) % 4 == 0 ? pause_ms(1) : (void)0)
    LATE();
    CHECK_OK(dispatch(layer, &tokens, buffer, &err));
    check_rows(layer, (const float (*)[WIDTH])buffer, seed);
    float (*made)[WIDTH] = malloc(sizeof buffer);
    CHECK(made != NULL);
    float (*at)[WIDTH] = made;
    if (me->ranks > 1 && (seed + (uint32_t)me->rank) % 2) { /* read in place, on some ranks */
        CHECK_OK(zpp_comm_alloc(me->comm, sizeof buffer, &block, &err));
        at = zpp_block_data(block);
    }
    run_experts(layer, (const float (*)[WIDTH])buffer, at);
    LATE();
    CHECK_OK(zpp_rows_combine(layer->rows, &layer->plan, at, tokens.weights, y, NULL, &patient, &err));
    if (block) {
        memcpy(made, at, layer->rows_here * sizeof made[0]);
        memset(at, 0xff, sizeof buffer); /* all peers have read it */
    }
    check_sums(&tokens, (const float (*)[WIDTH])tokens.x, (const float (*)[WIDTH])y);
    LATE();
    const struct zpp_rows_grads grads = {tokens.grad, tokens.weights, true, made, grad_made, grad_weights, NULL};
    CHECK_OK(zpp_rows_combine_backward(layer->rows, &layer->plan, &grads, NULL, &patient, &err));
    check_weights(&tokens, grad_weights);
    run_experts(layer, (const float (*)[WIDTH])grad_made, grad_buffer);
    LATE();
    CHECK_OK(zpp_rows_dispatch_backward(layer->rows, &layer->plan, grad_buffer, grad_x, NULL, &patient, &err));
    memset(grad_buffer, 0xff, sizeof grad_buffer);
    check_sums(&tokens, (const float (*)[WIDTH])tokens.grad, (const float (*)[WIDTH])grad_x);
#undef LATE
    zpp_block_free(block);
    free(made);
}

static void layers(struct test_rank *me) {
    struct layer layer;
    open_layer(&layer, me);
    for (uint32_t round = 0; round < ROUNDS; round++) one_round(&layer, me, *(uint32_t *)me->arg * ROUNDS + round);
    zpp_rows_destroy(layer.rows);
}

static void rows_go_to_their_experts_and_back(void) {
    for (uint32_t seed = 0; seed < 8; seed++)
        for (int ranks = 1; ranks <= 4; ranks++) run_ranks(ranks, layers, &seed);
}

static void of_one_rank(struct test_rank *me) {
    struct layer layer;
    zpp_comm *comm = me->comm;
    me->comm = NULL;
    layers(me);
    me->comm = comm;
    open_layer(&layer, me);
    zpp_rows_destroy(layer.rows);
}

static void one_rank_needs_no_group(void) {
    uint32_t seed = 3;
    run_ranks(1, of_one_rank, &seed);
}

/* Run phases until `last`, then return: the communicator of this rank is destroyed. */
static zpp_status phases(struct layer *layer, struct test_rank *me, int last, struct zpp_err *err) {
    static _Thread_local float buffer[ROWS_MAX][WIDTH], grad_made[ROWS_MAX][WIDTH];
    float y[TOKENS_MAX][WIDTH], grad_weights[TOKENS_MAX * K];
    struct tokens tokens;
    make_tokens(&tokens, 5, me->rank, me->ranks * EXPERTS_A_RANK);
    tokens.count = 4;
    zpp_status status = last >= 1 ? dispatch(layer, &tokens, buffer, err) : ZPP_OK;
    if (status == ZPP_OK && last >= 2)
        status = zpp_rows_combine(layer->rows, &layer->plan, buffer, tokens.weights, y, NULL, &patient, err);
    const struct zpp_rows_grads grads = {tokens.grad, tokens.weights, true, buffer, grad_made, grad_weights, NULL};
    if (status == ZPP_OK && last >= 3)
        status = zpp_rows_combine_backward(layer->rows, &layer->plan, &grads, NULL, &patient, err);
    if (status == ZPP_OK && last >= 4)
        status = zpp_rows_dispatch_backward(layer->rows, &layer->plan, grad_made, y, NULL, &patient, err);
    return status;
}

static void departed(struct test_rank *me) {
    static const char *const doing[] = {"dispatch #1", "combine #1", "backward of combine #1",
                                        "backward of dispatch #1"};
    struct zpp_err err = ZPP_ERR_INIT;
    struct layer layer;
    const int last = *(int *)me->arg;
    open_layer(&layer, me);
    test_join(me); /* rank 1 leaves when all have the layer */
    const zpp_status status = phases(&layer, me, me->rank == 1 ? last : last + 1, &err);
    if (me->rank == 1) {
        CHECK_EQUAL(status, ZPP_OK);
    } else {
        CHECK_EQUAL(status, ZPP_PEER);
        CHECK_EQUAL(err.rank, 1);
        /* Whoever sends rank 1 the descriptor of its arena may notice first, by the closed socket. */
        CHECK(strstr(err.text, "rank 1") && strstr(err.text, "left the group"));
        CHECK(strstr(err.text, "socket closed") || (strstr(err.text, doing[last]) && strstr(err.text, "(blocks.0)")));
    }
    zpp_rows_destroy(layer.rows);
}

static void a_rank_that_leaves_is_named_in_every_phase(void) {
    for (int last = 0; last < 4; last++) run_ranks(3, departed, &last);
}

static void diverged(struct test_rank *me) {
    static _Thread_local float buffer[ROWS_MAX][WIDTH];
    struct zpp_err err = ZPP_ERR_INIT;
    struct layer layer;
    struct tokens tokens;
    make_tokens(&tokens, 1, me->rank, me->ranks * EXPERTS_A_RANK);
    open_layer(&layer, me);
    CHECK_OK(dispatch(&layer, &tokens, buffer, &err));
    if (me->rank == 0)
        CHECK_FAILS(dispatch(&layer, &tokens, buffer, &err), ZPP_PEER, "dispatch #2 of layer 0 (blocks.0)");
    else
        CHECK_FAILS(zpp_rows_combine(layer.rows, &layer.plan, buffer, NULL, buffer, NULL, &patient, &err), ZPP_PEER,
                    "combine #1 of layer 0 (blocks.0)");
    CHECK(strstr(err.text, "took different paths"));
    CHECK_FAILS(dispatch(&layer, &tokens, buffer, &err), ZPP_PEER, "took different paths");
    test_join(me);
    zpp_rows_destroy(layer.rows);
}

static void ranks_that_diverge_get_both_sides(void) { run_ranks(2, diverged, NULL); }

/* Over several hosts an exchange is that of a host's ranks. */
static void on_one_of_two_hosts(struct test_rank *me) {
    struct test_rank here = *me;
    struct layer layer;
    here.comm = zpp_comm_here(me->comm);
    here.rank = zpp_comm_rank(here.comm);
    here.ranks = zpp_comm_ranks(here.comm);
    CHECK_EQUAL(here.ranks, 2);
    open_layer(&layer, &here);
    for (uint32_t seed = 1; seed < 20; seed++) one_round(&layer, &here, seed);
    test_join(me);
    zpp_rows_destroy(layer.rows);
}

static void each_of_several_hosts_has_its_own(void) { run_hosts("aabb", on_one_of_two_hosts, NULL); }

/* Rank 1 publishes one row more than its dispatch found; messages call it 11. */
static void too_many_rows(struct test_rank *me) {
    static _Thread_local float buffer[ROWS_MAX][WIDTH];
    static const int job_ranks[] = {10, 11};
    struct zpp_err err = ZPP_ERR_INIT;
    struct layer layer;
    struct tokens tokens;
    float y[TOKENS_MAX][WIDTH];
    make_tokens(&tokens, 1, me->rank, me->ranks * EXPERTS_A_RANK);
    zpp_comm_set_job_ranks(me->comm, job_ranks);
    open_layer(&layer, me);
    CHECK_OK(dispatch(&layer, &tokens, buffer, &err));
    if (me->rank == 1) layer.numbers[zpp_rows_numbers((size_t)me->ranks) - 1]++;
    const zpp_status status = zpp_rows_combine(layer.rows, &layer.plan, buffer, NULL, y, NULL, &patient, &err);
    CHECK_EQUAL(status, me->rank == 1 ? ZPP_OK : ZPP_PEER);
    if (me->rank == 0) {
        CHECK_EQUAL(err.rank, 11);
        CHECK(strstr(err.text, "rank 11 has"));
    }
    test_join(me);
    zpp_rows_destroy(layer.rows);
}

static void a_rank_with_other_rows_is_named_as_in_the_job(void) { run_ranks(2, too_many_rows, NULL); }

static void other_dtype(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct layer layer;
    struct tokens tokens;
    size_t here;
    make_tokens(&tokens, 1, me->rank, EXPERTS_A_RANK);
    open_layer(&layer, me);
    const struct zpp_rows_dispatch call = {.tokens = 1,
                                           .width_elems = WIDTH,
                                           .k = K,
                                           .experts = EXPERTS_A_RANK,
                                           .dtype = ZPP_F64,
                                           .x = tokens.x,
                                           .chosen = tokens.chosen};
    CHECK_FAILS(zpp_rows_dispatch_begin(layer.rows, &call, NULL, &patient, &here, &err), ZPP_INVALID, "rows of dtype");
    zpp_rows_destroy(layer.rows);
}

static void rows_of_other_dtypes_are_refused(void) { run_ranks(1, other_dtype, NULL); }

static void late_rank(struct test_rank *me) {
    const struct zpp_wait impatient = {50 * UINT64_C(1000000), NULL, NULL};
    struct zpp_err err = ZPP_ERR_INIT;
    struct layer layer;
    struct tokens tokens;
    size_t here;
    make_tokens(&tokens, 1, me->rank, me->ranks * EXPERTS_A_RANK);
    open_layer(&layer, me);
    const struct zpp_rows_dispatch call = {
        .tokens = 1, .width_elems = WIDTH, .k = K, .experts = 4, .x = tokens.x, .chosen = tokens.chosen};
    if (me->rank == 0) {
        CHECK_FAILS(zpp_rows_dispatch_begin(layer.rows, &call, NULL, &impatient, &here, &err), ZPP_TIMEOUT,
                    "rank 1 of group \"test\" did not come to dispatch #1");
        CHECK_FAILS(zpp_rows_dispatch_begin(layer.rows, &call, NULL, &impatient, &here, &err), ZPP_TIMEOUT,
                    "did not come to dispatch #1");
    }
    test_join(me);
    CHECK_FAILS(zpp_comm_health(me->comm, &err), ZPP_TIMEOUT, "rank 1 of group \"test\" did not come to dispatch #1");
    zpp_rows_destroy(layer.rows);
}

static void a_late_rank_ends_the_wait(void) { run_ranks(2, late_rank, NULL); }

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(rows_go_to_their_experts_and_back),
                                             TEST(one_rank_needs_no_group),
                                             TEST(a_rank_that_leaves_is_named_in_every_phase),
                                             TEST(ranks_that_diverge_get_both_sides),
                                             TEST(each_of_several_hosts_has_its_own),
                                             TEST(a_rank_with_other_rows_is_named_as_in_the_job),
                                             TEST(rows_of_other_dtypes_are_refused),
                                             TEST(a_late_rank_ends_the_wait),
                                             {0}};
    return test_main(argc, argv, cases);
}
