/* SPDX-License-Identifier: Apache-2.0
 *
 * The compressed all-reduce between ranks that are threads, 1 to 9 of them: against the same arithmetic done by one
 * thread for all ranks, bit for bit, over several calls (so the errors count), odd lengths and kinds of floats; bytes
 * as the paper counts them; ranks that disagree; values that are not finite.
 */
#include "mix.h"
#include "ranks.h"

#include <math.h>

#include "../../csrc/comm/onebit.h"
#include "../../csrc/ops/element.h"
#include "../../csrc/ops/onebit/onebit.h"

enum { CALLS = 3, ELEMS_MAX = 5000, CHUNK = 48 };

static float value_of(int rank, int call, size_t i) {
    return (float)mix((uint32_t)i * 31u + (uint32_t)rank * 977u + (uint32_t)call * 7919u) / 4294967296.0f - 0.4f;
}

struct shape {
    size_t elems, chunk_elems;
    zpp_dtype dtype;
    bool gather;
};

static void fill(void *values, zpp_dtype dtype, int rank, int call, size_t elems) {
    for (size_t i = 0; i < elems; i++) zpp_element_store(values, dtype, i, value_of(rank, call, i));
}

/* --- one thread for all ranks ------------------------------------------------------------------------------------ */

/* mean[CALLS][elems], worker[ranks][elems] and server[elems] after the last call. */
struct expected {
    float mean[CALLS][ELEMS_MAX], worker[TEST_RANKS_MAX][ELEMS_MAX], server[ELEMS_MAX];
};

static void expect_slice(const struct shape *shape, int ranks, int call, size_t begin, size_t elems,
                         struct expected *out) {
    static uint8_t bits[TEST_RANKS_MAX + 1][ELEMS_MAX / 8 + 1];
    static float scales[TEST_RANKS_MAX + 1][ELEMS_MAX / 16 + 1], values[ELEMS_MAX];
    struct zpp_onebit_source from[TEST_RANKS_MAX];
    for (int r = 0; r < ranks; r++) {
        fill(values, shape->dtype, r, call, shape->elems);
        zpp_onebit_compress(shape->chunk_elems, (const uint8_t *)values + begin * zpp_dtype_bytes(shape->dtype),
                            shape->dtype, out->worker[r] + begin, elems, bits[r], scales[r], NULL);
        from[r] = (struct zpp_onebit_source){bits[r], scales[r]};
    }
    zpp_onebit_reduce(shape->chunk_elems, from, (size_t)ranks, 1.0f / (float)ranks, out->server + begin, elems,
                      bits[ranks], scales[ranks], NULL);
    const struct zpp_onebit_source to = {bits[ranks], scales[ranks]};
    zpp_onebit_decode(shape->chunk_elems, &to, out->mean[call] + begin, ZPP_F32, elems, false, NULL);
}

static void expect(const struct shape *shape, int ranks, struct expected *out) {
    const size_t share = (shape->elems + (size_t)ranks - 1) / (size_t)ranks, slice = (share + 15) / 16 * 16;
    memset(out, 0, sizeof *out);
    for (int call = 0; call < CALLS; call++)
        for (size_t begin = 0; begin < shape->elems; begin += slice)
            expect_slice(shape, ranks, call, begin, shape->elems - begin < slice ? shape->elems - begin : slice, out);
}

/* --- the collective ---------------------------------------------------------------------------------------------- */

static struct zpp_onebit_job job_of(const struct test_rank *me, const struct shape *shape) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_onebit_job job = {.src_dtype = shape->dtype, .gather = shape->gather};
    CHECK_OK(zpp_onebit_layout_make(me->ranks, shape->elems, shape->chunk_elems, &job.layout, &err));
    job.src = calloc(shape->elems + 1, sizeof(float));
    job.worker_error = calloc(shape->elems + 1, sizeof(float));
    job.server_error = calloc(zpp_onebit_shard_elems(&job.layout, me->rank) + 1, sizeof(float));
    job.scratch = malloc(zpp_onebit_scratch_bytes(&job.layout) + 1);
    job.result = malloc(zpp_onebit_result_bytes(&job.layout) + 1);
    CHECK(job.src && job.worker_error && job.server_error && job.scratch && job.result);
    return job;
}

static void free_job(struct zpp_onebit_job *job) {
    free((void *)(uintptr_t)job->src);
    free(job->worker_error);
    free(job->server_error);
    free(job->scratch);
    free(job->result);
}

struct run {
    struct shape shape;
    const struct expected *expected;
};

static void check_result(const struct test_rank *me, const struct zpp_onebit_job *job, const float *mean) {
    float *values = malloc((job->layout.shard_elems + 1) * sizeof *values);
    CHECK(values);
    for (int r = 0; r < me->ranks; r++) {
        const size_t begin = zpp_onebit_shard_begin(&job->layout, r), elems = zpp_onebit_shard_elems(&job->layout, r);
        if (!job->gather && r != me->rank) continue;
        zpp_onebit_take(&job->layout, job->result, r, values, ZPP_F32, false, NULL);
        CHECK(memcmp(values, mean + begin, elems * sizeof *values) == 0);
    }
    free(values);
}

static uint64_t total_bytes(const zpp_comm *comm) {
    struct zpp_traffic traffic;
    zpp_comm_traffic(comm, &traffic);
    return traffic.bytes[ZPP_TRAFFIC_ALL_TO_ALL] + traffic.bytes[ZPP_TRAFFIC_ALL_GATHER];
}

static void reduce_and_check(struct test_rank *me) {
    const struct run *run = me->arg;
    const size_t elems = run->shape.elems;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_onebit_job job = job_of(me, &run->shape);
    for (int call = 0; call < CALLS; call++) {
        const uint64_t before = total_bytes(me->comm);
        fill((void *)(uintptr_t)job.src, run->shape.dtype, me->rank, call, elems);
        CHECK_OK(zpp_onebit_all_reduce(me->comm, &job, NULL, NULL, &err));
        check_result(me, &job, run->expected->mean[call]);
        const size_t mine =
            zpp_onebit_message_bytes(run->shape.chunk_elems, zpp_onebit_shard_elems(&job.layout, me->rank));
        const size_t peers = (size_t)me->ranks - 1;
        CHECK_EQUAL(total_bytes(me->comm) - before,
                    peers * mine + (run->shape.gather ? peers * job.layout.message_bytes : 0));
    }
    CHECK(memcmp(job.worker_error, run->expected->worker[me->rank], elems * sizeof(float)) == 0);
    CHECK(memcmp(job.server_error, run->expected->server + zpp_onebit_shard_begin(&job.layout, me->rank),
                 zpp_onebit_shard_elems(&job.layout, me->rank) * sizeof(float)) == 0);
    free_job(&job);
}

static void equals_one_thread_at_every_length_and_world(void) {
    static const size_t lengths[] = {0, 1, 15, 16, 17, 100, 1023, 4999};
    static struct expected expected;
    for (int ranks = 1; ranks <= TEST_RANKS_MAX; ranks++) {
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            static const zpp_dtype kinds[] = {ZPP_F32, ZPP_BF16, ZPP_F16};
            struct run run = {{lengths[i], i % 2 ? CHUNK : 4096, kinds[(i + (size_t)ranks) % 3], i % 4 != 3},
                              &expected};
            expect(&run.shape, ranks, &expected);
            run_ranks(ranks, reduce_and_check, &run);
        }
    }
}

/* n/8 bytes of bits and the scales each way, as the paper counts: 1/32 of an exact all-reduce of fp32 and 1/1024. */
static void moves_one_bit_an_element_each_way(void) {
    struct zpp_onebit_layout layout;
    struct zpp_err err = ZPP_ERR_INIT;
    const size_t elems = 8 * 4096 * 4;
    CHECK_OK(zpp_onebit_layout_make(8, elems, 4096, &layout, &err));
    CHECK_EQUAL(8 * layout.message_bytes, elems / 8 + 4 * elems / 4096);
}

/* --- failures ---------------------------------------------------------------------------------------------------- */

static void differ(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct shape shape = {(size_t)(me->rank == 1 ? 2000 : 1000), CHUNK, ZPP_F32, true};
    struct zpp_onebit_job job = job_of(me, &shape);
    CHECK_EQUAL(zpp_onebit_all_reduce(me->comm, &job, NULL, NULL, &err), ZPP_PEER);
    CHECK(strstr(err.text, "rank 1") != NULL);
    free_job(&job);
}

static void ranks_that_disagree_hear_it(void) { run_ranks(3, differ, NULL); }

static void refuses(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_onebit_layout layout;
    CHECK_EQUAL(zpp_onebit_layout_make(2, 100, 24, &layout, &err), ZPP_INVALID);
    CHECK_EQUAL(zpp_onebit_layout_make(2, 100, 0, &layout, &err), ZPP_INVALID);
    const struct shape shape = {100, 16, ZPP_F32, true};
    struct zpp_onebit_job job = job_of(me, &shape);
    job.layout.ranks++;
    CHECK_EQUAL(zpp_onebit_all_reduce(me->comm, &job, NULL, NULL, &err), ZPP_INVALID);
    job.layout.ranks--;
    job.src_dtype = ZPP_F64;
    CHECK_EQUAL(zpp_onebit_all_reduce(me->comm, &job, NULL, NULL, &err), ZPP_INVALID);
    free_job(&job);
}

static void bad_arguments_are_refused(void) { run_ranks(2, refuses, NULL); }

static void overflow(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct shape shape = {256, 16, ZPP_F32, true};
    struct zpp_onebit_job job = job_of(me, &shape);
    float values[128];
    float *src = (float *)(uintptr_t)job.src;
    for (size_t i = 0; i < 256; i++) src[i] = value_of(me->rank, 0, i);
    if (me->rank == 1) src[20] = INFINITY;
    CHECK_OK(zpp_onebit_all_reduce(me->comm, &job, NULL, NULL, &err));
    zpp_onebit_take(&job.layout, job.result, 0, values, ZPP_F32, false, NULL);
    for (size_t i = 0; i < 128; i++) CHECK(isnan(values[i]) == (i / 16 == 1));
    for (size_t i = 16; i < 32 && me->rank == 1; i++) CHECK(job.worker_error[i] == 0.0f);
    free_job(&job);
}

static void overflow_shows_on_every_rank_in_its_chunk(void) { run_ranks(2, overflow, NULL); }

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(equals_one_thread_at_every_length_and_world),
                                             TEST(moves_one_bit_an_element_each_way),
                                             TEST(ranks_that_disagree_hear_it),
                                             TEST(bad_arguments_are_refused),
                                             TEST(overflow_shows_on_every_rank_in_its_chunk),
                                             {0}};
    return test_main(argc, argv, cases);
}
