/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange of heads for tokens between ranks that are threads, 1 to 5 of them, on one host and over two: every
 * element against the place that it came from, heads that several ranks share, ranks that disagree.
 */
#include "ranks.h"

#include <time.h>

#include "../../csrc/comm/heads.h"
#include "../../csrc/comm/internal.h"

enum { BATCH = 2, WIDTH = 3, QUERIES = 7, KEYS = 3 };

struct run {
    size_t longest; /* of a rank's part */
};

static size_t length_of(const struct run *run, int rank) { return rank % 3 == 1 ? 1 : run->longest + (size_t)rank; }

/* (batch, tokens, heads, width) of floats, contiguous. */
static struct zpp_heads_place make(size_t tokens, size_t heads) {
    const size_t token = heads * WIDTH * sizeof(float);
    float *data = calloc(BATCH * tokens * heads * WIDTH + 1, sizeof(float));
    CHECK(data);
    return (struct zpp_heads_place){data, tokens * token, WIDTH * sizeof(float), token};
}

static float *at(const struct zpp_heads_place *place, size_t batch, size_t token, size_t head) {
    return (float *)(void *)((char *)place->data + batch * place->batch_stride + token * place->token_stride +
                             head * place->head_stride);
}

/* A whole number, so that sums are exact. */
static float value(size_t batch, size_t token, size_t head, size_t width) {
    return (float)(1 + batch + 2 * token + 700 * head + 5 * width);
}

static void make_tensor(const struct zpp_heads_job *job, int me, int ranks, size_t heads, size_t tokens,
                        struct zpp_heads_tensor *tensor) {
    tensor->heads = heads;
    tensor->width_bytes = WIDTH * sizeof(float);
    for (int r = 0; r < ranks; r++) {
        const size_t begin = QUERIES * (size_t)r / (size_t)ranks, end = QUERIES * (size_t)(r + 1) / (size_t)ranks;
        tensor->begin[r] = heads == QUERIES ? begin : begin * KEYS / QUERIES;
        tensor->end[r] = heads == QUERIES ? end : (end * KEYS + QUERIES - 1) / QUERIES;
    }
    tensor->cut = make(job->lengths[me], heads);
    tensor->whole = make(tokens, tensor->end[me] - tensor->begin[me]);
}

static void fill_cut(const struct zpp_heads_job *job, const struct zpp_heads_tensor *tensor, int me, size_t first) {
    for (size_t b = 0; b < BATCH; b++)
        for (size_t t = 0; t < job->lengths[me]; t++)
            for (size_t h = 0; h < tensor->heads; h++)
                for (size_t w = 0; w < WIDTH; w++) at(&tensor->cut, b, t, h)[w] = value(b, first + t, h, w);
}

static void check_whole(const struct zpp_heads_tensor *tensor, int me, size_t tokens) {
    for (size_t b = 0; b < BATCH; b++)
        for (size_t t = 0; t < tokens; t++)
            for (size_t h = tensor->begin[me]; h < tensor->end[me]; h++)
                for (size_t w = 0; w < WIDTH; w++)
                    CHECK(at(&tensor->whole, b, t, h - tensor->begin[me])[w] == value(b, t, h, w));
}

static void check_cut(const struct zpp_heads_job *job, const struct zpp_heads_tensor *tensor, int me, int ranks,
                      size_t first) {
    for (size_t h = 0; h < tensor->heads; h++) {
        int owners = 0;
        for (int r = 0; r < ranks; r++) owners += tensor->begin[r] <= h && h < tensor->end[r];
        for (size_t b = 0; b < BATCH; b++)
            for (size_t t = 0; t < job->lengths[me]; t++)
                for (size_t w = 0; w < WIDTH; w++)
                    CHECK(at(&tensor->cut, b, t, h)[w] == (float)owners * value(b, first + t, h, w));
    }
}

static void there_and_back(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_heads_job job = {.dtype = ZPP_F32, .batch = BATCH, .tensors = 2};
    size_t tokens = 0, first = 0;
    for (int r = 0; r < me->ranks; r++) {
        job.lengths[r] = length_of(me->arg, r);
        first += r < me->rank ? job.lengths[r] : 0;
        tokens += job.lengths[r];
    }
    make_tensor(&job, me->rank, me->ranks, QUERIES, tokens, &job.tensor[0]);
    make_tensor(&job, me->rank, me->ranks, KEYS, tokens, &job.tensor[1]);
    for (int i = 0; i < 2; i++) fill_cut(&job, &job.tensor[i], me->rank, first);
    CHECK_OK(zpp_heads_exchange(me->comm, &job, NULL, NULL, &err));
    for (int i = 0; i < 2; i++) check_whole(&job.tensor[i], me->rank, tokens);
    job.to_tokens = true;
    CHECK_OK(zpp_heads_exchange(me->comm, &job, NULL, NULL, &err));
    for (int i = 0; i < 2; i++) check_cut(&job, &job.tensor[i], me->rank, me->ranks, first);
    for (int i = 0; i < 2; i++) {
        free(job.tensor[i].cut.data);
        free(job.tensor[i].whole.data);
    }
}

static void every_element_arrives(void) {
    static const size_t lengths[] = {0, 5, 400}; /* beside the signatures, or in place */
    for (int ranks = 1; ranks <= 5; ranks++)
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
            run_ranks(ranks, there_and_back, &(struct run){lengths[i]});
}

static void every_element_arrives_over_hosts(void) {
    run_ranks_timeout(3, "aab", 60 * TEST_SECOND_NS, there_and_back, &(struct run){400});
}

/* --- what peers still read ---------------------------------------------------------------------------------------- */

enum { PIECE_BYTES = 64 * 1024 };

struct reader {
    _Atomic int *ended; /* ranks whose exchange ended */
    zpp_block *block;
    bool waits;
};

/* Read only after the peer's exchange has ended. */
static void read_late(void *ctx, const void *const *pieces) {
    const struct reader *reader = ctx;
    const struct timespec moment = {0, 1000000};
    for (int i = 0; reader->waits && i < 20000 && !atomic_load(reader->ended); i++) nanosleep(&moment, NULL);
    CHECK(!reader->waits || atomic_load(reader->ended) == 1);
    if (reader->waits) CHECK(((const uint8_t *)pieces[0])[PIECE_BYTES - 1] == 100);
}

static void send_and_go(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct reader reader = {me->arg, NULL, me->rank == 1};
    CHECK_OK(zpp_comm_alloc(me->comm, PIECE_BYTES, &reader.block, &err));
    memset(zpp_block_data(reader.block), 100 + me->rank, PIECE_BYTES);
    const void *srcs[] = {zpp_block_data(reader.block), zpp_block_data(reader.block)};
    void *dsts[] = {NULL, NULL};
    size_t bytes[] = {PIECE_BYTES, PIECE_BYTES};
    bytes[me->rank] = 0;
    const struct zpp_call call = {.coll = ZPP_COLL_ALL_TO_ALL, .dtype = ZPP_U8, .dsts = dsts, .srcs = srcs,
                                  .dst_bytes = bytes, .src_bytes = bytes, .take = read_late, .take_ctx = &reader,
                                  .stays = true};
    CHECK_OK(zpp_comm_call(me->comm, &call, NULL, &err));
    atomic_fetch_add(reader.ended, 1);
    test_join(me);
    zpp_block_free(reader.block);
}

static void a_rank_goes_on_while_peers_read(void) {
    _Atomic int ended = 0;
    run_ranks(2, send_and_go, &ended);
}

static bool overlap(const zpp_block *one, const zpp_block *other) {
    const uint8_t *a = zpp_block_data(one), *b = zpp_block_data(other);
    return a < b + zpp_block_bytes(other) && b < a + zpp_block_bytes(one);
}

static void exchange_again(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_heads_job job = {.dtype = ZPP_F32, .batch = BATCH, .tensors = 1, .lengths = {800, 800}};
    zpp_block *next = NULL;
    make_tensor(&job, me->rank, me->ranks, QUERIES, 1600, &job.tensor[0]);
    for (int i = 0; i < 3; i++) {
        const zpp_block *before = me->comm->kept;
        CHECK_OK(zpp_heads_exchange(me->comm, &job, NULL, NULL, &err));
        CHECK(me->comm->kept && me->comm->kept != before);
        CHECK_OK(zpp_comm_alloc(me->comm, zpp_block_bytes(me->comm->kept), &next, &err));
        CHECK(!overlap(next, me->comm->kept));
        zpp_block_free(next);
    }
    free(job.tensor[0].cut.data);
    free(job.tensor[0].whole.data);
    test_join(me);
}

/* Memory that a peer may still read is handed out again after the next exchange only. */
static void a_block_is_kept_until_the_next_exchange(void) { run_ranks(2, exchange_again, NULL); }

/* --- failures ---------------------------------------------------------------------------------------------------- */

static void differ(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_heads_job job = {.dtype = ZPP_F32, .batch = BATCH, .tensors = 1};
    for (int r = 0; r < me->ranks; r++) job.lengths[r] = me->rank == 1 ? 9 : 8;
    make_tensor(&job, me->rank, me->ranks, QUERIES, job.lengths[0] * (size_t)me->ranks, &job.tensor[0]);
    CHECK_FAILS(zpp_heads_exchange(me->comm, &job, NULL, NULL, &err), ZPP_PEER, "rank 1");
    free(job.tensor[0].cut.data);
    free(job.tensor[0].whole.data);
}

static void ranks_that_disagree_hear_it(void) { run_ranks(3, differ, NULL); }

static void refuses(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_heads_job job = {.dtype = ZPP_I32, .batch = BATCH, .tensors = 1, .lengths = {4, 4}};
    make_tensor(&job, me->rank, me->ranks, QUERIES, 8, &job.tensor[0]);
    CHECK_FAILS(zpp_heads_exchange(me->comm, &job, NULL, NULL, &err), ZPP_INVALID, "floating point");
    job.dtype = ZPP_F32;
    job.tensor[0].end[1]--;
    CHECK_FAILS(zpp_heads_exchange(me->comm, &job, NULL, NULL, &err), ZPP_INVALID, "no rank computes head 6 of 7");
    job.tensor[0].begin[1]++;
    CHECK_FAILS(zpp_heads_exchange(me->comm, &job, NULL, NULL, &err), ZPP_INVALID, "every head with some rank");
    job.tensors = ZPP_HEADS_TENSORS + 1;
    CHECK_FAILS(zpp_heads_exchange(me->comm, &job, NULL, NULL, &err), ZPP_INVALID, "an exchange of 5 tensors");
    free(job.tensor[0].cut.data);
    free(job.tensor[0].whole.data);
}

static void bad_arguments_are_refused(void) { run_ranks(2, refuses, NULL); }

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(every_element_arrives), TEST(every_element_arrives_over_hosts),
                                             TEST(a_rank_goes_on_while_peers_read),
                                             TEST(a_block_is_kept_until_the_next_exchange),
                                             TEST(ranks_that_disagree_hear_it), TEST(bad_arguments_are_refused), {0}};
    return test_main(argc, argv, cases);
}
