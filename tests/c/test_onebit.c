/* SPDX-License-Identifier: Apache-2.0
 *
 * One-bit compression: every CPU version against the scalar one, bit for bit, over kinds, chunk sizes, lengths and
 * alignments; the server against decode, add and compress; nothing beyond an array's end is touched; chunks that are
 * not finite; error feedback. (Formula and feedback against a reference of its own: tests/ops/test_onebit.py.)
 */
#include "harness.h"
#include "threads.h"

#include <math.h>

#include "../../csrc/ops/element.h"
#include "../../csrc/ops/onebit/onebit.h"

enum { ROOM_ELEMS = 9000, SOURCES = 3, GUARD = 0xa5 };

static uint64_t random_state = 1;
static uint32_t random_bits(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_value(bool wild) {
    static const float special[] = { 0.0f, -0.0f, 1e-40f, -1e-45f, 1e30f, INFINITY, -INFINITY, NAN, 3e38f };
    const uint32_t kind = random_bits() % 1024;
    if (kind < (wild ? 9u : 4u)) return special[kind];
    return ldexpf((float)random_bits() / 4294967296.0f - 0.4f, (int)(random_bits() % 6) - 3);
}

struct arrays {
    uint8_t floats[4 * ROOM_ELEMS], bits[ROOM_ELEMS / 8 + 8];
    float error[ROOM_ELEMS], scales[ROOM_ELEMS / 16 + 1];
};

struct format {
    size_t chunk_elems, elems, offset;
    zpp_dtype dtype;
};

static const size_t lengths[] = { 0, 1, 7, 15, 16, 17, 33, 100, 255, 1000, 4096, 8193 };
static const size_t chunk_sizes[] = { 16, 48, 256, 4096, 4112, 1 << 20 };
static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
enum { LENGTHS = sizeof lengths / sizeof lengths[0], CHUNK_SIZES = sizeof chunk_sizes / sizeof chunk_sizes[0] };

static bool same_floats(const void *a, const void *b, zpp_dtype dtype, size_t elems) {
    for (size_t i = 0; i < elems; ++i) {
        const float x = zpp_element_load(a, dtype, i), y = zpp_element_load(b, dtype, i);
        if (!(isnan(x) && isnan(y)) && memcmp(&x, &y, sizeof x) != 0) return false;
    }
    return true;
}

static bool guarded(const void *from, const void *end) {
    for (const uint8_t *at = from; at < (const uint8_t *)end; ++at) {
        if (*at != GUARD) return false;
    }
    return true;
}

static void *floats_at(struct arrays *a, const struct format *f) {
    return a->floats + f->offset * zpp_dtype_bytes(f->dtype);
}

static void fill(struct arrays *a, const struct format *f, bool wild) {
    memset(a, GUARD, sizeof *a);
    for (size_t i = 0; i < f->elems; ++i) {
        zpp_element_store(floats_at(a, f), f->dtype, i, random_value(wild));
        a->error[i] = random_value(false);
    }
}

static int failures;
static void expect(bool ok, const char *what, const struct format *f, int level) {
    if (ok) return;
    failures++;
    fprintf(stderr, "onebit %s: %s: chunks of %zu, %s, %zu elements at %zu\n",
            zpp_cpu_level_name((enum zpp_cpu_level)level), what, f->chunk_elems, zpp_dtype_name(f->dtype), f->elems,
            f->offset);
}

static bool same_compressed(const struct format *f, const struct arrays *a, const struct arrays *b) {
    return memcmp(a->bits, b->bits, zpp_onebit_bytes(f->elems)) == 0 &&
           same_floats(a->scales, b->scales, ZPP_F32, zpp_onebit_chunks(f->chunk_elems, f->elems)) &&
           same_floats(a->error, b->error, ZPP_F32, f->elems);
}

static bool ends_guarded(const struct format *f, const struct arrays *a) {
    return guarded(a->bits + zpp_onebit_bytes(f->elems), a->error) && guarded(a->error + f->elems, a->scales) &&
           guarded(a->scales + zpp_onebit_chunks(f->chunk_elems, f->elems), a + 1);
}

static struct zpp_onebit_source source(const struct arrays *a) {
    return (struct zpp_onebit_source){ a->bits, a->scales };
}

/* The definition, in double where it is not exact, chunk by chunk. */
static void check_meaning(const struct format *f, struct arrays *before, const struct arrays *after, int level) {
    for (size_t begin = 0; begin < f->elems; begin += f->chunk_elems) {
        const size_t left = f->elems - begin, end = begin + (left < f->chunk_elems ? left : f->chunk_elems);
        double sum = 0.0;
        for (size_t i = begin; i < end; ++i) {
            sum += fabs((double)(zpp_element_load(floats_at(before, f), f->dtype, i) + before->error[i]));
        }
        const float scale = after->scales[begin / f->chunk_elems];
        if (!(sum < 3.3e38)) {
            expect(isnan(scale), "overflow hidden", f, level);
            expect(memcmp(before->error + begin, after->error + begin, (end - begin) * sizeof(float)) == 0,
                   "overflow spoilt the error", f, level);
            continue;
        }
        const double mean = sum / (double)(end - begin);
        /* 256 additions a lane and 4 in the tree, each within 2^-24, and one rounding of the quotient */
        expect(fabs(scale - mean) <= mean * 262 * 0x1p-24 + 0x1p-149, "scale is not the mean", f, level);
        for (size_t i = begin; i < end; ++i) {
            const float owed = zpp_element_load(floats_at(before, f), f->dtype, i) + before->error[i];
            const bool bit = after->bits[i / 8] >> i % 8 & 1;
            expect(bit == (owed >= 0.0f), "wrong bit", f, level);
            expect(after->error[i] == owed - (bit ? scale : -scale), "wrong error", f, level);
        }
    }
    const size_t spare = f->elems % 8;
    if (spare) expect(after->bits[f->elems / 8] >> spare == 0, "spare bits are not 0", f, level);
}

static void check_decode(const struct format *f, struct arrays *compressed, zpp_pool *pool, int level) {
    static struct arrays base, out, kept[2];
    if (!level) fill(&base, f, false);
    for (int accumulate = 0; accumulate < 2; ++accumulate) {
        out = base;
        const struct zpp_onebit_source from = source(compressed);
        zpp_onebit_decode(f->chunk_elems, &from, floats_at(&out, f), f->dtype, f->elems, accumulate, pool);
        const void *end = (char *)floats_at(&out, f) + f->elems * zpp_dtype_bytes(f->dtype);
        expect(guarded(end, out.bits) && guarded(out.floats, floats_at(&out, f)), "wrote around", f, level);
        if (!level) kept[accumulate] = out;
        else expect(same_floats(floats_at(&kept[accumulate], f), floats_at(&out, f), f->dtype, f->elems),
                    "decoding differs from scalar", f, level);
        for (size_t i = 0; !level && i < f->elems; ++i) {
            const float scale = compressed->scales[i / f->chunk_elems];
            float value = compressed->bits[i / 8] >> i % 8 & 1 ? scale : -scale;
            if (accumulate) value += zpp_element_load(floats_at(&base, f), f->dtype, i);
            uint8_t rounded[4];
            zpp_element_store(rounded, f->dtype, 0, value);
            expect(same_floats(rounded, (char *)floats_at(&out, f) + i * zpp_dtype_bytes(f->dtype), f->dtype, 1),
                   "wrong value", f, level);
        }
    }
}

static zpp_pool *threads(void) {
    zpp_pool *pool = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    return pool;
}

static void check_worker(const struct format *f, bool wild, zpp_pool *pool) {
    static struct arrays before, want, got;
    fill(&before, f, wild);
    for (int level = ZPP_CPU_SCALAR; level < ZPP_CPU_LEVELS; ++level) {
        if (!zpp_onebit_use_level((enum zpp_cpu_level)level)) continue;
        struct arrays *after = level ? &got : &want;
        *after = before;
        zpp_onebit_compress(f->chunk_elems, floats_at(after, f), f->dtype, after->error, f->elems, after->bits,
                            after->scales, level ? pool : NULL);
        expect(ends_guarded(f, after), "wrote beyond the end", f, level);
        expect(memcmp(before.floats, after->floats, sizeof before.floats) == 0, "wrote to the input", f, level);
        if (level) expect(same_compressed(f, &want, &got), "differs from scalar", f, level);
        else check_meaning(f, &before, after, level);
        check_decode(f, after, level ? pool : NULL, level);
    }
    zpp_onebit_use_level(ZPP_CPU_LEVELS);
}

static void workers(void) {
    zpp_pool *pool = threads();
    for (size_t c = 0; c < CHUNK_SIZES; ++c) for (size_t d = 0; d < 3; ++d) for (size_t l = 0; l < LENGTHS; ++l) {
        const struct format f = { chunk_sizes[c], lengths[l], (l + c) % 3, kinds[d] };
        check_worker(&f, false, pool);
        check_worker(&f, true, pool);
    }
    zpp_pool_destroy(pool);
    CHECK_EQUAL(failures, 0);
}

/* The server: equal to decoding one after the other, multiplying, and compressing that. */
static void check_server(const struct format *f, zpp_pool *pool) {
    static struct arrays parts[SOURCES], before, want, got;
    struct zpp_onebit_source sources[SOURCES];
    fill(&before, f, false);
    for (int s = 0; s < SOURCES; ++s) {
        fill(&parts[s], f, s == 1 && f->elems > 4096);
        zpp_onebit_compress(f->chunk_elems, floats_at(&parts[s], f), f->dtype, parts[s].error, f->elems, parts[s].bits,
                            parts[s].scales, NULL);
        sources[s] = source(&parts[s]);
        zpp_onebit_decode(f->chunk_elems, &sources[s], floats_at(&before, f), ZPP_F32, f->elems, s != 0, NULL);
    }
    float *mean = (float *)(void *)before.floats;
    for (size_t i = 0; i < f->elems; ++i) mean[i] *= 1.0f / SOURCES;
    want = before;
    zpp_onebit_compress(f->chunk_elems, want.floats, ZPP_F32, want.error, f->elems, want.bits, want.scales, NULL);
    for (int level = ZPP_CPU_SCALAR; level < ZPP_CPU_LEVELS; ++level) {
        if (!zpp_onebit_use_level((enum zpp_cpu_level)level)) continue;
        got = before;
        zpp_onebit_reduce(f->chunk_elems, sources, SOURCES, 1.0f / SOURCES, got.error, f->elems, got.bits, got.scales,
                          pool);
        expect(same_compressed(f, &want, &got), "server differs from its parts", f, level);
        expect(ends_guarded(f, &got), "server wrote beyond the end", f, level);
    }
    zpp_onebit_use_level(ZPP_CPU_LEVELS);
}

static void servers(void) {
    zpp_pool *pool = threads();
    for (size_t c = 0; c < CHUNK_SIZES; ++c) for (size_t l = 0; l < LENGTHS; ++l) {
        const struct format f = { chunk_sizes[c], lengths[l], 0, ZPP_F32 };
        check_server(&f, pool);
    }
    zpp_pool_destroy(pool);
    CHECK_EQUAL(failures, 0);
}

/* Large enough that values are streamed past the cache, from an aligned and from an unaligned place. */
static void large(void) {
    enum { ELEMS = (9 << 18) + 7, CHUNK = 4096 };
    zpp_pool *pool = threads();
    float *values = malloc(ELEMS * sizeof *values), *error = calloc(ELEMS, sizeof *error);
    float *back = aligned_alloc(64, (ELEMS + 57) / 16 * 64), *scales = malloc((ELEMS / CHUNK + 1) * sizeof *scales);
    uint8_t *bits = malloc(ELEMS / 8 + 1);
    for (size_t i = 0; i < ELEMS; ++i) values[i] = random_value(false);
    zpp_onebit_compress(CHUNK, values, ZPP_F32, error, ELEMS, bits, scales, pool);
    const struct zpp_onebit_source from = { bits, scales };
    for (size_t offset = 0; offset < 2; ++offset) {
        zpp_onebit_decode(CHUNK, &from, back + offset, ZPP_F32, ELEMS, false, pool);
        for (size_t i = 0; i < ELEMS; ++i) {
            CHECK(back[offset + i] == (bits[i / 8] >> i % 8 & 1 ? scales[i / CHUNK] : -scales[i / CHUNK]));
        }
    }
    free(values), free(error), free(back), free(bits), free(scales);
    zpp_pool_destroy(pool);
}

/* Says which versions the other cases cover. */
static void levels(void) {
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) {
        const bool here = zpp_onebit_use_level((enum zpp_cpu_level)level);
        printf("%s %s, ", zpp_cpu_level_name((enum zpp_cpu_level)level), here ? "here" : "not on this machine");
        CHECK(here == (level <= (int)zpp_cpu_detected()));
    }
    CHECK(zpp_onebit_use_level(ZPP_CPU_LEVELS));
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(levels), TEST(workers), TEST(servers), TEST(large), {0} };
    return test_main(argc, argv, cases);
}
