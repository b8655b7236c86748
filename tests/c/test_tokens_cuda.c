/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of token moves, run on a CPU (cuda_on_cpu.h), against the CPU's, byte for byte: draws, rows in words
 * of every width, and positions out of range, which give zeros.
 */
#include "harness.h"

#include "../../csrc/ops/tokens/tokens.h"

#include "cuda_threads.h"

#include "../../csrc/ops/tokens/tokens_cuda.cu"
CUDA_THUNK(zpp_tokens_cuda_sample, struct zpp_tokens_cuda_args)
CUDA_THUNK(zpp_tokens_cuda_gather, struct zpp_tokens_cuda_args)
CUDA_THUNK(zpp_tokens_cuda_scatter, struct zpp_tokens_cuda_args)

enum { DRAWS = 150, BATCH = 7, SEQ = 37, MOST_BYTES = 48 };
static _Alignas(16) char full[BATCH * SEQ * MOST_BYTES], part[BATCH * SEQ * MOST_BYTES];
static _Alignas(16) char want[BATCH * SEQ * MOST_BYTES], got[BATCH * SEQ * MOST_BYTES];
static int32_t kept[DRAWS * SEQ], drawn[DRAWS * SEQ];

static void draws(void) {
    for (size_t keep = 1; keep <= SEQ; keep += 4) {
        struct zpp_tokens_cuda_args args = { .kept = drawn, .batch = DRAWS, .seq = SEQ, .keep = keep, .seed = 7,
                                             .layer = 3, .first = 11 };
        memset(drawn, 0, sizeof drawn);
        zpp_tokens_sample(kept, DRAWS, SEQ, keep, (struct zpp_tokens_key){ 7, 3, 11 }, NULL);
        cuda_loop(zpp_tokens_cuda_sample_thunk, &args, 2, ZPP_TOKENS_CUDA_THREADS);
        CHECK(memcmp(kept, drawn, DRAWS * keep * sizeof *kept) == 0);
    }
}

static void check_moves(size_t keep, size_t row_bytes, uint32_t word_bytes) {
    const struct zpp_tokens tokens = { kept, BATCH, SEQ, keep, row_bytes };
    struct zpp_tokens_cuda_args args = { .kept = kept, .full = full, .out = got, .batch = BATCH, .seq = SEQ,
                                         .keep = keep, .row_words = row_bytes / word_bytes, .word_bytes = word_bytes };
    zpp_tokens_sample(kept, BATCH, SEQ, keep, (struct zpp_tokens_key){ keep, row_bytes, 0 }, NULL);
    memset(want, 1, sizeof want), memset(got, 1, sizeof got);
    zpp_tokens_gather(&tokens, full, want, NULL);
    cuda_loop(zpp_tokens_cuda_gather_thunk, &args, BATCH * keep, ZPP_TOKENS_CUDA_THREADS);
    CHECK(memcmp(want, got, sizeof got) == 0);
    for (int zeros = 0; zeros < 3; ++zeros) {
        args.full = zeros == 1 ? NULL : full, args.part = zeros == 2 ? NULL : part;
        zpp_tokens_scatter(&tokens, args.full, args.part, want, NULL);
        cuda_loop(zpp_tokens_cuda_scatter_thunk, &args, BATCH * SEQ, ZPP_TOKENS_CUDA_THREADS);
        CHECK(memcmp(want, got, sizeof got) == 0);
    }
}

static void moves(void) {
    for (size_t i = 0; i < sizeof full; ++i) full[i] = (char)(i % 251), part[i] = (char)(i % 241 + 3);
    static const uint32_t words[] = { 16, 8, 4, 2, 1 };
    for (int w = 0; w < 5; ++w) {
        for (size_t keep = 1; keep <= SEQ; keep += 9) check_moves(keep, 48 - 48 / 16 * (words[w] == 1), words[w]);
    }
}

static void out_of_range(void) {
    static int32_t wrong[] = { -1, 2, 99 };
    static float from[4] = { 1, 2, 3, 4 }, to[4], zero[4];
    struct zpp_tokens_cuda_args args = { .kept = wrong, .full = from, .part = zero, .out = to, .batch = 1, .seq = 4,
                                         .keep = 3, .row_words = 1, .word_bytes = 4 };
    cuda_loop(zpp_tokens_cuda_gather_thunk, &args, 3, ZPP_TOKENS_CUDA_THREADS);
    CHECK(to[0] == 0.0f && to[1] == 3.0f && to[2] == 0.0f);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(draws), TEST(moves), TEST(out_of_range), {0} };
    return test_main(argc, argv, cases);
}
