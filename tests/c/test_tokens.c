/* SPDX-License-Identifier: Apache-2.0
 *
 * Token moves: every CPU version of copy and zero over lengths and alignments, nothing beyond their end touched, the
 * AVX-512 one lane by lane (avx512_emulated.h) where the machine lacks it; gather and scatter cut over threads. (That
 * they are the paper's is shown in tests/ops/test_tokens.py.)
 */
#include "harness.h"
#include "threads.h"

#include "avx512_emulated.h"

#define zpp_tokens_avx512 emulated_tokens
#include "../../csrc/ops/tokens/tokens_isa.c"
#undef zpp_tokens_avx512

#include "../../csrc/base/pool.h"

enum { ROOM_BYTES = 1024, GUARD = 0xa5 };

static void check_moves(const struct zpp_tokens_kernels *kernels) {
    static const size_t lengths[] = { 0, 1, 7, 63, 64, 65, 128, 200, 500 };
    static _Alignas(64) uint8_t from[ROOM_BYTES], to[ROOM_BYTES], want[ROOM_BYTES];
    for (size_t i = 0; i < ROOM_BYTES; ++i) from[i] = (uint8_t)(i * 7 + 3);
    for (int l = 0; l < 9; ++l) for (size_t at = 0; at < 130; at += 13) for (int stream = 0; stream < 2; ++stream) {
        memset(to, GUARD, sizeof to);
        memset(want, GUARD, sizeof want);
        memcpy(want + at, from + 64 - at % 5, lengths[l]);
        kernels->copy(to + at, from + 64 - at % 5, lengths[l], stream);
        CHECK(memcmp(to, want, sizeof to) == 0);
        memset(want + at, 0, lengths[l]);
        kernels->zero(to + at, lengths[l], stream);
        CHECK(memcmp(to, want, sizeof to) == 0);
    }
}

static void moves(void) {
    check_moves(&emulated_tokens);
    for (int level = ZPP_CPU_SCALAR; level < ZPP_CPU_LEVELS; ++level) {
        const struct zpp_tokens_kernels *kernels = zpp_tokens_kernels_at((enum zpp_cpu_level)level);
        const bool here = kernels && level <= (int)zpp_cpu_detected();
        printf("%s %s, ", zpp_cpu_level_name((enum zpp_cpu_level)level), here ? "here" : "not on this machine");
        if (here) check_moves(kernels);
    }
}

enum { BATCH = 3, SEQ = 1000, KEEP = 300, ROW_BYTES = 3000 }; /* 9 MB: past the cache, in several pieces */

static void threads_do_not_show(void) {
    const size_t full_bytes = (size_t)BATCH * SEQ * ROW_BYTES, part_bytes = (size_t)BATCH * KEEP * ROW_BYTES;
    static int32_t kept[BATCH * KEEP], again[BATCH * KEEP];
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_pool *pool = NULL;
    uint8_t *full = malloc(full_bytes), *part = calloc(part_bytes, 2), *out = calloc(full_bytes, 2);
    CHECK(full && part && out);
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    for (size_t i = 0; i < full_bytes; ++i) full[i] = (uint8_t)(i * 2654435761u >> 24);
    zpp_tokens_sample(kept, BATCH, SEQ, KEEP, (struct zpp_tokens_key){ 5, 6, 0 }, NULL);
    zpp_tokens_sample(again, BATCH, SEQ, KEEP, (struct zpp_tokens_key){ 5, 6, 0 }, pool);
    CHECK(memcmp(kept, again, sizeof kept) == 0);
    const struct zpp_tokens tokens = { kept, BATCH, SEQ, KEEP, ROW_BYTES };
    CHECK_OK(zpp_tokens_check(&tokens, &err));
    zpp_tokens_gather(&tokens, full, part, NULL);
    zpp_tokens_gather(&tokens, full, part + part_bytes, pool);
    CHECK(memcmp(part, part + part_bytes, part_bytes) == 0);
    for (int which = 1; which < 4; ++which) {
        zpp_tokens_scatter(&tokens, which & 1 ? full : NULL, which & 2 ? part : NULL, out, NULL);
        zpp_tokens_scatter(&tokens, which & 1 ? full : NULL, which & 2 ? part : NULL, out + full_bytes, pool);
        CHECK(memcmp(out, out + full_bytes, full_bytes) == 0);
    }
    CHECK(memcmp(out, full, full_bytes) == 0); /* both: what was gathered came back to its place */
    kept[1] = kept[0];
    CHECK(zpp_tokens_check(&tokens, &err) == ZPP_INVALID && strstr(err.text, "kept[0][1]"));
    zpp_pool_destroy(pool);
    free(full), free(part), free(out);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(moves), TEST(threads_do_not_show), {0} };
    return test_main(argc, argv, cases);
}
