/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantised collectives between ranks that are threads, 2 to 9: bit for bit what the quantisation kernels give over the
 * whole tensors in one thread, whatever the cut in rounds, and the bytes that the header of coll_quant.c states. Over
 * several hosts the same, with the order of sums and the bytes on the network of hier_quant.c.
 */
#include <math.h>

#include "../../csrc/ops/quant/quant.h"
#include "mix.h"
#include "ranks.h"

/* Element i of rank r: of different size from block to block. */
static float value_of(int rank, size_t i) {
    const uint32_t bits = mix((uint32_t)i * 31u + (uint32_t)rank * 977u);
    return ((float)(bits % 20001u) / 10000.0f - 1.0f) * (float)(1 + i / 64 % 5);
}

struct what {
    zpp_dtype dtype;
    int bits;
    size_t block_elems, elems;
    int node_ranks;
    const char *hosts; /* of the ranks, see ranks.h; NULL: all on one */
};

static struct zpp_quant_spec spec_of(const struct what *what) {
    return (struct zpp_quant_spec){what->block_elems, what->bits, false};
}

static void *filled(const struct what *what, int rank, size_t elems) {
    float *wide = malloc((elems + 1) * sizeof *wide);
    void *data = malloc((elems + 1) * sizeof *wide);
    for (size_t i = 0; i < elems; i++) wide[i] = value_of(rank, i);
    zpp_convert(data, what->dtype, wide, ZPP_F32, elems);
    free(wide);
    return data;
}

static struct zpp_quant_target room_for(const struct what *what, size_t elems) {
    const struct zpp_quant_spec spec = spec_of(what);
    return (struct zpp_quant_target){malloc(zpp_quant_code_bytes(&spec, elems) + 1),
                                     malloc((zpp_quant_blocks(&spec, elems) + 1) * sizeof(float)), NULL};
}

static struct zpp_quant_source source_of(const struct zpp_quant_target *target) {
    return (struct zpp_quant_source){target->codes, target->scales, NULL};
}

static void drop(struct zpp_quant_target *target) {
    free(target->codes);
    free(target->scales);
}

/* Elements [first, first + elems) of a rank's tensor, quantised. */
static struct zpp_quant_target quantised(const struct what *what, int rank, size_t first, size_t elems) {
    const struct zpp_quant_spec spec = spec_of(what);
    const struct zpp_quant_target target = room_for(what, elems);
    unsigned char *data = filled(what, rank, first + elems);
    zpp_quantise(&spec, data + first * zpp_dtype_bytes(what->dtype), what->dtype, elems, &target, NULL);
    free(data);
    return target;
}

static uint64_t wire(const struct what *what, size_t elems) {
    return (what->bits == 8 ? elems : (elems + 1) / 2) + 4 * ((elems + what->block_elems - 1) / what->block_elems);
}

static struct zpp_call call_of(const struct what *what, enum zpp_coll coll, void *dst, const void *src) {
    return (struct zpp_call){.coll = coll,
                             .dtype = what->dtype,
                             .op = ZPP_AVG,
                             .dst = dst,
                             .src = src,
                             .elems = what->elems,
                             .bits = what->bits,
                             .block_elems = what->block_elems,
                             .node_ranks = what->node_ranks};
}

struct counts {
    uint64_t bytes, far_bytes;
};

/* Run the call and say what it counted. */
static struct counts counted(struct test_rank *me, const struct zpp_call *call, enum zpp_traffic_kind kind) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_traffic before, after;
    zpp_comm_traffic(me->comm, &before);
    CHECK_OK(zpp_comm_call(me->comm, call, NULL, &err));
    zpp_comm_traffic(me->comm, &after);
    for (int other = 0; other < ZPP_TRAFFIC_KINDS; other++)
        CHECK(other == (int)kind || after.bytes[other] == before.bytes[other]);
    return (struct counts){after.bytes[kind] - before.bytes[kind], after.far_bytes[kind] - before.far_bytes[kind]};
}

/* Every rank's slice is there, as it comes back from its codes. */
static void check_gathered(const struct test_rank *me, const struct what *what, const unsigned char *dst) {
    const struct zpp_quant_spec spec = spec_of(what);
    const size_t slice_bytes = what->elems * zpp_dtype_bytes(what->dtype);
    unsigned char *wanted = malloc(slice_bytes + 1);
    for (int r = 0; r < me->ranks; r++) {
        struct zpp_quant_target one = quantised(what, r, 0, what->elems);
        const struct zpp_quant_source source = source_of(&one);
        zpp_dequantise(&spec, &source, wanted, what->dtype, what->elems, false, NULL);
        CHECK(memcmp(dst + (size_t)r * slice_bytes, wanted, slice_bytes) == 0);
        drop(&one);
    }
    free(wanted);
}

static void all_gather(struct test_rank *me, const struct what *what) {
    const size_t slice_bytes = what->elems * zpp_dtype_bytes(what->dtype);
    unsigned char *src = filled(what, me->rank, what->elems), *dst = malloc(slice_bytes * (size_t)me->ranks + 1);
    memcpy(dst + (size_t)me->rank * slice_bytes, src, slice_bytes);
    for (int in_place = 0; in_place < 2; in_place++) {
        const void *from = in_place ? dst + (size_t)me->rank * slice_bytes : src;
        const struct zpp_call call = call_of(what, ZPP_COLL_ALL_GATHER_QUANT, dst, from);
        if (in_place) memcpy(dst + (size_t)me->rank * slice_bytes, src, slice_bytes);
        CHECK(counted(me, &call, ZPP_TRAFFIC_ALL_GATHER).bytes == wire(what, what->elems) * (uint64_t)(me->ranks - 1));
        check_gathered(me, what, dst);
    }
    free(src);
    free(dst);
}

/* Bytes on the network of an image of `elems`. */
static uint64_t image(const struct what *what, size_t elems) { return (wire(what, elems) + 3) / 4 * 4; }

static int hosts_of(const struct what *what) {
    int hosts = 0;
    for (const char *h = what->hosts; h && *h; h++) hosts = *h - 'a' + 1 > hosts ? *h - 'a' + 1 : hosts;
    return hosts;
}

static int ranks_on(const struct what *what, char host) {
    int ranks = 0;
    for (const char *h = what->hosts; *h; h++) ranks += *h == host;
    return ranks;
}

/* Several ranks on each host, equally many: sums go inside first, and are quantised again. */
static bool two_hops(const struct what *what) {
    bool even = what->hosts != NULL && ranks_on(what, 'a') > 1;
    for (int h = 1; even && h < hosts_of(what); h++) even = ranks_on(what, (char)('a' + h)) == ranks_on(what, 'a');
    return even;
}

/* Run the call over hosts: its bytes on the network, at this rank and of all ranks together. */
static void networked(struct test_rank *me, const struct zpp_call *call, enum zpp_traffic_kind kind, uint64_t *mine,
                      uint64_t *all) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_traffic before, after;
    zpp_comm_traffic(me->comm, &before);
    CHECK_OK(zpp_comm_call(me->comm, call, NULL, &err));
    zpp_comm_traffic(me->comm, &after);
    CHECK_EQUAL(after.calls[kind] - before.calls[kind], 1);
    *mine = after.network_bytes[kind] - before.network_bytes[kind];
    int64_t sum = (int64_t)*mine;
    CHECK_OK(zpp_all_reduce(me->comm, &sum, 1, ZPP_I64, ZPP_SUM, NULL, &err));
    *all = (uint64_t)sum;
}

/* Codes of the mean of elements [first, first + elems): over the ranks of each host, quantised again, then over hosts,
 * or over all ranks at once. */
static struct zpp_quant_target mean_over_hosts(const struct test_rank *me, const struct what *what, size_t first,
                                               size_t elems, void *dst) {
    const struct zpp_quant_spec spec = spec_of(what);
    const struct zpp_quant_target mean = room_for(what, elems);
    const float factor = 1.0f / (float)me->ranks;
    struct zpp_quant_target all[2 * TEST_RANKS_MAX];
    struct zpp_quant_source from[TEST_RANKS_MAX], here[TEST_RANKS_MAX];
    size_t made = 0, count = 0;
    for (int r = 0; r < me->ranks; r++) {
        all[made] = quantised(what, r, first, elems);
        from[count++] = source_of(&all[made++]);
    }
    for (int h = 0; two_hops(what) && h < hosts_of(what); h++) {
        size_t ranks = 0;
        for (int r = 0; r < me->ranks; r++)
            if (what->hosts[r] == 'a' + h) here[ranks++] = source_of(&all[r]);
        all[made] = room_for(what, elems);
        zpp_quant_reduce(&spec, here, ranks, 1.0f, elems, &spec, &all[made++], NULL);
    }
    if (two_hops(what)) {
        count = (size_t)hosts_of(what);
        for (size_t h = 0; h < count; h++) from[h] = source_of(&all[(size_t)me->ranks + h]);
    }
    if (dst) zpp_quant_sum(&spec, from, count, factor, dst, what->dtype, elems, NULL);
    zpp_quant_reduce(&spec, from, count, factor, elems, &spec, &mean, NULL);
    while (made) drop(&all[--made]);
    return mean;
}

static void gather_over_hosts(struct test_rank *me, const struct what *what) {
    const size_t slice_bytes = what->elems * zpp_dtype_bytes(what->dtype);
    unsigned char *src = filled(what, me->rank, what->elems), *dst = malloc(slice_bytes * (size_t)me->ranks + 1);
    const struct zpp_call call = call_of(what, ZPP_COLL_ALL_GATHER_QUANT, dst, src);
    const uint64_t others = (uint64_t)hosts_of(what) - 1;
    uint64_t mine, all;
    networked(me, &call, ZPP_TRAFFIC_ALL_GATHER, &mine, &all);
    CHECK_EQUAL(all, (uint64_t)me->ranks * others * image(what, what->elems)); /* each image once to each host */
    if (two_hops(what) || hosts_of(what) == me->ranks) CHECK_EQUAL(mine, others * image(what, what->elems));
    check_gathered(me, what, dst);
    free(src);
    free(dst);
}

/* Images that one rank gets from other hosts when shards are reduced. */
static uint64_t images_for(const struct what *what, int rank) {
    if (two_hops(what)) return (uint64_t)hosts_of(what) - 1;
    return (uint64_t)((int)strlen(what->hosts) - ranks_on(what, what->hosts[rank]));
}

static void scatter_over_hosts(struct test_rank *me, const struct what *what) {
    const size_t bytes = what->elems * zpp_dtype_bytes(what->dtype);
    unsigned char *src = filled(what, me->rank, what->elems * (size_t)me->ranks), *dst = malloc(bytes + 1);
    unsigned char *wanted = malloc(bytes + 1);
    const struct zpp_call call = call_of(what, ZPP_COLL_REDUCE_SCATTER_QUANT, dst, src);
    uint64_t mine, all;
    networked(me, &call, ZPP_TRAFFIC_REDUCE_SCATTER, &mine, &all);
    CHECK_EQUAL(mine, images_for(what, me->rank) * image(what, what->elems));
    struct zpp_quant_target codes =
        mean_over_hosts(me, what, (size_t)me->rank * what->elems, what->elems, wanted);
    CHECK(memcmp(dst, wanted, bytes) == 0);
    drop(&codes);
    free(src);
    free(dst);
    free(wanted);
}

static void reduce_over_hosts(struct test_rank *me, const struct what *what) {
    const struct zpp_quant_spec spec = spec_of(what);
    const size_t bytes = what->elems * zpp_dtype_bytes(what->dtype);
    const size_t blocks = (what->elems + what->block_elems - 1) / what->block_elems;
    const size_t share = (blocks + (size_t)me->ranks - 1) / (size_t)me->ranks * what->block_elems;
    unsigned char *data = filled(what, me->rank, what->elems), *wanted = malloc(bytes + 1);
    const struct zpp_call call = call_of(what, ZPP_COLL_ALL_REDUCE_QUANT, data, NULL);
    uint64_t mine, all, images = (uint64_t)me->ranks * ((uint64_t)hosts_of(what) - 1);
    networked(me, &call, ZPP_TRAFFIC_ALL_REDUCE, &mine, &all);
    for (int r = 0; r < me->ranks; r++) images += images_for(what, r);
    if (what->elems < 1000000) CHECK_EQUAL(all, what->elems ? images * image(what, share) : 0); /* one piece */
    struct zpp_quant_target codes = mean_over_hosts(me, what, 0, what->elems, NULL);
    const struct zpp_quant_source source = source_of(&codes);
    zpp_dequantise(&spec, &source, wanted, what->dtype, what->elems, false, NULL);
    CHECK(memcmp(data, wanted, bytes) == 0);
    drop(&codes);
    free(data);
    free(wanted);
}

/* My slice of the mean: over the ranks of each node, quantised again, then over the nodes. */
static void expected_slice(const struct test_rank *me, const struct what *what, void *wanted) {
    const struct zpp_quant_spec spec = spec_of(what);
    const int node_ranks = what->node_ranks ? what->node_ranks : me->ranks, nodes = me->ranks / node_ranks;
    const float mean = 1.0f / (float)me->ranks;
    struct zpp_quant_target shards[TEST_RANKS_MAX], sums[TEST_RANKS_MAX];
    struct zpp_quant_source from[TEST_RANKS_MAX], nodes_from[TEST_RANKS_MAX];
    for (int r = 0; r < me->ranks; r++) {
        shards[r] = quantised(what, r, (size_t)me->rank * what->elems, what->elems);
        from[r] = source_of(&shards[r]);
    }
    if (nodes == 1 || node_ranks == 1) {
        zpp_quant_sum(&spec, from, (size_t)me->ranks, mean, wanted, what->dtype, what->elems, NULL);
    } else {
        for (int node = 0; node < nodes; node++) {
            sums[node] = room_for(what, what->elems);
            zpp_quant_reduce(&spec, from + node * node_ranks, (size_t)node_ranks, 1.0f, what->elems, &spec,
                             &sums[node], NULL);
            nodes_from[node] = source_of(&sums[node]);
        }
        zpp_quant_sum(&spec, nodes_from, (size_t)nodes, mean, wanted, what->dtype, what->elems, NULL);
        for (int node = 0; node < nodes; node++) drop(&sums[node]);
    }
    for (int r = 0; r < me->ranks; r++) drop(&shards[r]);
}

static void reduce_scatter(struct test_rank *me, const struct what *what) {
    const size_t bytes = what->elems * zpp_dtype_bytes(what->dtype);
    const int node_ranks = what->node_ranks ? what->node_ranks : me->ranks, nodes = me->ranks / node_ranks;
    unsigned char *src = filled(what, me->rank, what->elems * (size_t)me->ranks), *dst = malloc(bytes + 1);
    unsigned char *wanted = malloc(bytes + 1);
    const struct zpp_call call = call_of(what, ZPP_COLL_REDUCE_SCATTER_QUANT, dst, src);
    const struct counts counts = counted(me, &call, ZPP_TRAFFIC_REDUCE_SCATTER);
    CHECK(counts.far_bytes == wire(what, what->elems) * (uint64_t)(nodes - 1));
    CHECK(counts.bytes - counts.far_bytes == wire(what, what->elems) * (uint64_t)((node_ranks - 1) * nodes));
    expected_slice(me, what, wanted);
    CHECK(memcmp(dst, wanted, bytes) == 0);
    free(src);
    free(dst);
    free(wanted);
}

static void all_reduce(struct test_rank *me, const struct what *what) {
    const struct zpp_quant_spec spec = spec_of(what);
    const size_t bytes = what->elems * zpp_dtype_bytes(what->dtype);
    unsigned char *data = filled(what, me->rank, what->elems), *wanted = malloc(bytes + 1);
    struct zpp_quant_target parts[TEST_RANKS_MAX], sum = room_for(what, what->elems);
    struct zpp_quant_source from[TEST_RANKS_MAX];
    const struct zpp_call call = call_of(what, ZPP_COLL_ALL_REDUCE_QUANT, data, NULL);
    const struct counts counts = counted(me, &call, ZPP_TRAFFIC_ALL_REDUCE);
    for (int r = 0; r < me->ranks; r++) {
        parts[r] = quantised(what, r, 0, what->elems);
        from[r] = source_of(&parts[r]);
    }
    zpp_quant_reduce(&spec, from, (size_t)me->ranks, 1.0f / (float)me->ranks, what->elems, &spec, &sum, NULL);
    const struct zpp_quant_source all = source_of(&sum);
    zpp_dequantise(&spec, &all, wanted, what->dtype, what->elems, false, NULL);
    CHECK(memcmp(data, wanted, bytes) == 0);
    /* Each code is read by its owner from N - 1 peers, and its sum by N - 1 peers from its owner. */
    struct zpp_err err = ZPP_ERR_INIT;
    int64_t all_bytes = (int64_t)counts.bytes;
    CHECK_OK(zpp_all_reduce(me->comm, &all_bytes, 1, ZPP_I64, ZPP_SUM, NULL, &err));
    CHECK_EQUAL(all_bytes, 2 * (uint64_t)(me->ranks - 1) * wire(what, what->elems));
    for (int r = 0; r < me->ranks; r++) drop(&parts[r]);
    drop(&sum);
    free(data);
    free(wanted);
}

static void each_length(struct test_rank *me) {
    static const size_t lengths[] = {0, 1, 15, 17, 255, 1000, 4099, 70001};
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
        for (int bits = 4; bits <= 8; bits += 4) {
            struct what what = {l % 3 == 0 ? ZPP_F32 : l % 3 == 1 ? ZPP_BF16 : ZPP_F16, bits, l % 2 ? 256 : 64,
                                lengths[l], 0, NULL};
            all_gather(me, &what);
            all_reduce(me, &what);
            for (what.node_ranks = 0; what.node_ranks <= me->ranks; what.node_ranks++)
                if (!what.node_ranks || me->ranks % what.node_ranks == 0) reduce_scatter(me, &what);
        }
}

static void lengths_ranks_and_nodes(void) {
#ifdef ZPP_UNDER_TSAN
    for (int ranks = 2; ranks <= 6; ranks += 2) run_ranks(ranks, each_length, NULL);
#else
    for (int ranks = 2; ranks <= TEST_RANKS_MAX; ranks++) run_ranks(ranks, each_length, NULL);
#endif
}

static void each_block(struct test_rank *me) {
    static const size_t blocks[] = {16, 48, 2048, 32768};
    for (size_t b = 0; b < sizeof blocks / sizeof blocks[0]; b++) {
        const struct what what = {ZPP_F32, b % 2 ? 4 : 8, blocks[b], 100003, 0, NULL};
        all_gather(me, &what);
        reduce_scatter(me, &what);
        all_reduce(me, &what);
    }
}

static void blocks_of_every_size(void) {
    for (int ranks = 2; ranks <= 3; ranks++) run_ranks(ranks, each_block, NULL);
}

/* More rounds than a track has slots. */
static void long_one(struct test_rank *me) {
    const struct what gathered = {ZPP_F32, 8, 256, 3000017, 0, NULL};
    const struct what scattered = {ZPP_BF16, 8, 256, 1200007, 2, NULL};
    all_gather(me, &gathered);
    all_reduce(me, &gathered);
    reduce_scatter(me, &scattered);
}

static void many_rounds(void) { run_ranks(2, long_one, NULL), run_ranks(4, long_one, NULL); }

/* Against the exact mean: half a scale of each quantisation, and rounding. */
static void bounds(struct test_rank *me) {
    enum { ELEMS = 5000 };
    struct zpp_err err = ZPP_ERR_INIT;
    for (int node_ranks = 0; node_ranks <= 2; node_ranks += 2) {
        const struct what what = {ZPP_F32, 8, 64, ELEMS, node_ranks, NULL};
        float *src = filled(&what, me->rank, (size_t)ELEMS * (size_t)me->ranks), dst[ELEMS];
        const struct zpp_call call = call_of(&what, ZPP_COLL_REDUCE_SCATTER_QUANT, dst, src);
        CHECK_OK(zpp_comm_call(me->comm, &call, NULL, &err));
        for (size_t i = 0; i < ELEMS; i++) {
            const size_t at = (size_t)me->rank * ELEMS + i;
            double mean = 0.0;
            for (int r = 0; r < me->ranks; r++) mean += (double)value_of(r, at) / me->ranks;
            /* |x| <= 5, so scales are at most 5/127, and 10/127 of the sum over the two ranks of a node: the mean of N
             * errors of the first kind, and a mean over N of N/2 errors of the second. */
            const double first = 0.5 * 5.0 / 127.0, second = node_ranks ? 0.5 * 10.2 / 127.0 / 2.0 : 0.0;
            CHECK(fabs((double)dst[i] - mean) <= (first + second) * 1.001);
        }
        free(src);
    }
}

static void errors_within_half_a_scale(void) { run_ranks(4, bounds, NULL); }

static void infinite(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    float data[64];
    for (size_t i = 0; i < 64; i++) data[i] = 1.0f;
    if (me->rank == 1) data[20] = INFINITY;
    const struct what what = {ZPP_F32, 8, 16, 64, 0, NULL};
    const struct zpp_call call = call_of(&what, ZPP_COLL_ALL_REDUCE_QUANT, data, NULL);
    CHECK_OK(zpp_comm_call(me->comm, &call, NULL, &err));
    for (size_t i = 0; i < 64; i++) CHECK(i / 16 == 1 ? isnan(data[i]) : data[i] == 1.0f);
}

static void infinities_are_not_hidden(void) { run_ranks(3, infinite, NULL); }

static void differ(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    float data[64] = {0};
    const struct what what = {ZPP_F32, me->rank ? 4 : 8, 16, 64, 0, NULL};
    const struct zpp_call call = call_of(&what, ZPP_COLL_ALL_REDUCE_QUANT, data, NULL);
    const zpp_status status = zpp_comm_call(me->comm, &call, NULL, &err);
    CHECK(status == ZPP_PEER && strstr(err.text, "int8 in blocks of 16") && strstr(err.text, "int4 in blocks of 16"));
}

static void formats_must_agree(void) { run_ranks(2, differ, NULL); }

static void refused(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    float data[64] = {0};
    const struct what good = {ZPP_F32, 8, 16, 64, 0, NULL};
    struct zpp_call call = call_of(&good, ZPP_COLL_ALL_REDUCE_QUANT, data, NULL);
    call.bits = 5;
    CHECK_FAILS(zpp_comm_call(me->comm, &call, NULL, &err), ZPP_INVALID, "5 bits, wanted 8 or 4");
    call.bits = 8, call.block_elems = 24;
    CHECK_FAILS(zpp_comm_call(me->comm, &call, NULL, &err), ZPP_INVALID, "24 elements, wanted a multiple of 16");
    call.block_elems = 1 << 20;
    CHECK_FAILS(zpp_comm_call(me->comm, &call, NULL, &err), ZPP_INVALID, "more than its buffers hold with 3 ranks");
    call.block_elems = 16, call.op = ZPP_MAX;
    CHECK_FAILS(zpp_comm_call(me->comm, &call, NULL, &err), ZPP_INVALID, "wanted sum or avg");
    call.op = ZPP_SUM, call.dtype = ZPP_I32;
    CHECK_FAILS(zpp_comm_call(me->comm, &call, NULL, &err), ZPP_INVALID, "int32, wanted float32, bfloat16 or float16");
    call.dtype = ZPP_F32, call.coll = ZPP_COLL_REDUCE_SCATTER_QUANT, call.node_ranks = 2;
    CHECK_FAILS(zpp_comm_call(me->comm, &call, NULL, &err), ZPP_INVALID, "2 ranks a node do not divide the 3 ranks");
    CHECK_OK(zpp_barrier(me->comm, NULL, &err)); /* arguments that are wrong do not end the group */
}

static void wrong_arguments(void) { run_ranks(3, refused, NULL); }

/* --- over several hosts ------------------------------------------------------------------------------------------ */

static void each_length_over_hosts(struct test_rank *me) {
    static const size_t lengths[] = {0, 1, 17, 1000, 4099, 70001};
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
        for (int bits = 4; bits <= 8; bits += 4) {
            const struct what what = {l % 3 == 0 ? ZPP_F32 : l % 3 == 1 ? ZPP_BF16 : ZPP_F16, bits, l % 2 ? 256 : 64,
                                      lengths[l], 0, me->arg};
            gather_over_hosts(me, &what);
            scatter_over_hosts(me, &what);
            reduce_over_hosts(me, &what);
        }
}

static void lengths_over_hosts(void) {
#ifdef ZPP_UNDER_TSAN
    static const char *const placements[] = {"ab", "aabb"};
#else
    static const char *const placements[] = {"ab", "aabb", "abab", "aab", "abc"};
#endif
    for (size_t p = 0; p < sizeof placements / sizeof *placements; p++)
        run_hosts(placements[p], each_length_over_hosts, (void *)(uintptr_t)placements[p]);
}

static void long_one_over_hosts(struct test_rank *me) {
    const struct what what = {ZPP_F32, 8, 256, 3000017, 0, me->arg};
    gather_over_hosts(me, &what);
    scatter_over_hosts(me, &what);
    reduce_over_hosts(me, &what);
}

static void many_pieces_over_hosts(void) { run_hosts("aabb", long_one_over_hosts, (void *)(uintptr_t) "aabb"); }

/* Ranks that reduce different units, of equal size, are told so, quantised or not. */
static void other_object(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    float data[64] = {0};
    const struct what what = {ZPP_F32, 8, 16, 64, 0, me->arg};
    struct zpp_call call = call_of(&what, ZPP_COLL_ALL_REDUCE_QUANT, data, NULL);
    call.object = me->rank ? 7 : 5;
    const zpp_status status = zpp_comm_call(me->comm, &call, NULL, &err);
    CHECK(status == ZPP_PEER && strstr(err.text, "64 elements, int8 in blocks of 16, avg, object 5"));
    CHECK(strstr(err.text, "object 7"));
}

static void objects_must_agree(void) {
    run_ranks(2, other_object, NULL);
    run_hosts("ab", other_object, (void *)(uintptr_t) "ab");
}

static void refused_over_hosts(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    float data[64] = {0}, out[16];
    const struct what what = {ZPP_F32, 8, 16, 16, 1, me->arg};
    const struct zpp_call call = call_of(&what, ZPP_COLL_REDUCE_SCATTER_QUANT, out, data);
    CHECK_FAILS(zpp_comm_call(me->comm, &call, NULL, &err), ZPP_INVALID, "1 ranks a node asked of group \"test\"");
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
}

static void nodes_are_hosts(void) { run_hosts("aabb", refused_over_hosts, (void *)(uintptr_t) "aabb"); }

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(lengths_ranks_and_nodes),
                                             TEST(blocks_of_every_size),
                                             TEST(many_rounds),
                                             TEST(errors_within_half_a_scale),
                                             TEST(infinities_are_not_hidden),
                                             TEST(formats_must_agree),
                                             TEST(wrong_arguments),
                                             TEST(lengths_over_hosts),
                                             TEST(many_pieces_over_hosts),
                                             TEST(objects_must_agree),
                                             TEST(nodes_are_hosts),
                                             {0}};
    return test_main(argc, argv, cases);
}
