/* SPDX-License-Identifier: Apache-2.0
 *
 * Block quantisation: every CPU version against the scalar one, bit for bit, over bits, kinds, block sizes, lengths and
 * alignments; cuts over threads; sums against their parts; nothing beyond an array's end is touched; blocks that are
 * not finite. (That the scalar version keeps its error bound is shown in tests/ops/test_quant.py.)
 */
#include "harness.h"
#include "threads.h"

#include <math.h>

#include "../../csrc/ops/element.h"
#include "../../csrc/ops/quant/quant.h"

enum { ROOM_ELEMS = 4096 + 64, SOURCES = 3, GUARD = 0xa5 };

static uint64_t random_state = 1;
static uint32_t random_bits(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

/* Plain values, with zeros of both signs, subnormals and great ones; `wild` adds what is not finite. */
static float random_value(bool wild) {
    static const float special[] = { 0.0f, -0.0f, 1e-40f, -1e-45f, 1e38f, -1e38f, 1e-20f, INFINITY, -INFINITY,
                                      NAN, 3e38f };
    const uint32_t kind = random_bits() % 512;
    if (kind < (wild ? 11u : 7u)) return special[kind];
    return ldexpf((float)random_bits() / 4294967296.0f - 0.4f, (int)(random_bits() % 6) - 3);
}

struct arrays {
    uint8_t floats[4 * ROOM_ELEMS], codes[ROOM_ELEMS];
    float scales[ROOM_ELEMS / 16 + 1], mids[ROOM_ELEMS / 16 + 1];
};

static void guard(struct arrays *a) { memset(a, GUARD, sizeof *a); }

/* Values like gradients in most cases, all alike in some, with overflows in some. */
static void fill(void *floats, zpp_dtype dtype, size_t elems) {
    const uint32_t mood = random_bits() % 4;
    const float same = random_value(false), unit = mood == 3 ? 0x1p-140f : 1.0f;
    for (size_t i = 0; i < elems; ++i) {
        zpp_element_store(floats, dtype, i, mood == 1 ? same : unit * random_value(mood == 2));
    }
}

static const size_t lengths[] = { 0, 1, 15, 16, 17, 33, 64, 100, 255, 1000, 4096 };
static const size_t block_sizes[] = { 16, 48, 64, 256, 4096, 1 << 20 };
static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
enum { LENGTHS = sizeof lengths / sizeof lengths[0], BLOCK_SIZES = sizeof block_sizes / sizeof block_sizes[0] };

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

static const void *end_of(const struct arrays *a) { return a + 1; }

struct format {
    struct zpp_quant_spec spec;
    zpp_dtype dtype;
    size_t elems, offset;
};

static int failures;
static void expect(bool ok, const char *what, const struct format *f, int level) {
    if (ok) return;
    failures++;
    fprintf(stderr, "quant %s: %s: %d bits, %s, blocks of %zu, %s, %zu elements at %zu\n",
            zpp_cpu_level_name((enum zpp_cpu_level)level), what, f->spec.bits,
            f->spec.asymmetric ? "asymmetric" : "symmetric",
            f->spec.block_elems, zpp_dtype_name(f->dtype), f->elems, f->offset);
}

static bool same_quantised(const struct format *f, const struct arrays *a, const struct arrays *b) {
    const size_t blocks = zpp_quant_blocks(&f->spec, f->elems), bytes = zpp_quant_code_bytes(&f->spec, f->elems);
    return memcmp(a->codes, b->codes, bytes) == 0 && same_floats(a->scales, b->scales, ZPP_F32, blocks) &&
           (!f->spec.asymmetric || same_floats(a->mids, b->mids, ZPP_F32, blocks));
}

static bool ends_guarded(const struct format *f, const struct arrays *a) {
    const size_t blocks = zpp_quant_blocks(&f->spec, f->elems);
    return guarded(a->codes + zpp_quant_code_bytes(&f->spec, f->elems), a->scales) &&
           guarded(a->scales + blocks, a->mids) && guarded(a->mids + (f->spec.asymmetric ? blocks : 0), end_of(a));
}

static struct zpp_quant_target target(struct arrays *a) {
    return (struct zpp_quant_target){ a->codes, a->scales, a->mids };
}
static struct zpp_quant_source source(const struct arrays *a) {
    return (struct zpp_quant_source){ a->codes, a->scales, a->mids };
}

static void *floats_at(struct arrays *a, const struct format *f) {
    return a->floats + f->offset * zpp_dtype_bytes(f->dtype);
}

static bool all_zero_or_nan(const void *values, zpp_dtype dtype, size_t elems) {
    for (size_t i = 0; i < elems; ++i) {
        if (!isnan(zpp_element_load(values, dtype, i))) return false;
    }
    return true;
}

/* A block that is not finite comes back as NaN as a whole; a finite one holds no NaN. */
static void check_overflow(const struct format *f, struct arrays *in, struct arrays *out, int level) {
    for (size_t begin = 0; begin < f->elems; begin += f->spec.block_elems) {
        const size_t left = f->elems - begin, length = left < f->spec.block_elems ? left : f->spec.block_elems;
        bool finite = true;
        for (size_t i = begin; i < begin + length; ++i) {
            finite = finite && fabsf(zpp_element_load(floats_at(in, f), f->dtype, i)) < 0x1p127f;
        }
        const char *block = (char *)floats_at(out, f) + begin * zpp_dtype_bytes(f->dtype);
        if (finite) {
            for (size_t i = 0; i < length; ++i) {
                expect(!isnan(zpp_element_load(block, f->dtype, i)), "NaN made", f, level);
            }
        } else {
            expect(all_zero_or_nan(block, f->dtype, length), "overflow hidden", f, level);
        }
    }
}

static void check_format(const struct format *f, zpp_pool *pool) {
    static struct arrays in, want, got, want_out, got_out, base;
    guard(&in), guard(&base);
    fill(floats_at(&in, f), f->dtype, f->elems);
    fill(floats_at(&base, f), f->dtype, f->elems);
    for (int level = ZPP_CPU_SCALAR; level < ZPP_CPU_LEVELS; ++level) {
        if (!zpp_quant_use_level((enum zpp_cpu_level)level)) continue;
        struct arrays *quantised = level ? &got : &want, *out = level ? &got_out : &want_out;
        guard(quantised);
        struct zpp_quant_target to = target(quantised);
        if (!f->spec.asymmetric) to.mids = NULL;
        zpp_quantise(&f->spec, floats_at(&in, f), f->dtype, f->elems, &to, level ? pool : NULL);
        expect(ends_guarded(f, quantised), "wrote beyond the end", f, level);
        if (f->spec.bits == 4 && f->elems % 2) {
            expect(quantised->codes[f->elems / 2] < 16, "unused nibble is not 0", f, level);
        }
        if (level) expect(same_quantised(f, &want, &got), "codes differ from scalar", f, level);
        for (int accumulate = 0; accumulate < 2; ++accumulate) {
            struct zpp_quant_source from = source(quantised);
            if (!f->spec.asymmetric) from.mids = NULL;
            if (accumulate) *out = base;
            else guard(out);
            zpp_dequantise(&f->spec, &from, floats_at(out, f), f->dtype, f->elems, accumulate, level ? pool : NULL);
            const void *end = (char *)floats_at(out, f) + f->elems * zpp_dtype_bytes(f->dtype);
            expect(guarded(end, out->codes) && guarded(out->floats, floats_at(out, f)), "wrote around", f, level);
            if (!accumulate) check_overflow(f, &in, out, level);
            static struct arrays kept[2];
            if (!level) kept[accumulate] = *out;
            else expect(same_floats(floats_at(&kept[accumulate], f), floats_at(out, f), f->dtype, f->elems),
                        accumulate ? "accumulation differs from scalar" : "values differ from scalar", f, level);
        }
    }
    zpp_quant_use_level(ZPP_CPU_LEVELS);
}

static zpp_pool *threads(void) {
    zpp_pool *pool = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    return pool;
}

static void formats(void) {
    zpp_pool *pool = threads();
    for (int bits = 4; bits <= 8; bits += 4) for (int asymmetric = 0; asymmetric < 2; ++asymmetric)
    for (size_t b = 0; b < BLOCK_SIZES; ++b) for (size_t d = 0; d < 3; ++d) for (size_t l = 0; l < LENGTHS; ++l) {
        const struct format f = { { block_sizes[b], bits, asymmetric }, kinds[d], lengths[l], (l + b) % 3 };
        for (int mood = 0; mood < 4; ++mood) check_format(&f, pool);
    }
    zpp_pool_destroy(pool);
    CHECK_EQUAL(failures, 0);
}

/* Sums: equal to dequantising one after the other, then multiplying; reduced: equal to quantising that. */
static void check_sum(const struct format *f, const struct zpp_quant_spec *to_spec, zpp_pool *pool) {
    static struct arrays in, parts[SOURCES], sum, want, got;
    static float plain[ROOM_ELEMS];
    struct zpp_quant_source sources[SOURCES];
    for (int s = 0; s < SOURCES; ++s) {
        fill(in.floats, ZPP_F32, f->elems);
        const struct zpp_quant_target to = target(&parts[s]);
        sources[s] = source(&parts[s]);
        zpp_quantise(&f->spec, in.floats, ZPP_F32, f->elems, &to, NULL);
        zpp_dequantise(&f->spec, &sources[s], plain, ZPP_F32, f->elems, s != 0, NULL);
    }
    for (size_t i = 0; i < f->elems; ++i) plain[i] *= 0.5f;
    static uint8_t rounded[4 * ROOM_ELEMS];
    zpp_convert(rounded, f->dtype, plain, ZPP_F32, f->elems);
    const struct format to_format = { *to_spec, ZPP_F32, f->elems, 0 };
    guard(&want);
    const struct zpp_quant_target want_to = target(&want), got_to = target(&got);
    zpp_quantise(to_spec, plain, ZPP_F32, f->elems, &want_to, NULL);
    for (int level = ZPP_CPU_SCALAR; level < ZPP_CPU_LEVELS; ++level) {
        if (!zpp_quant_use_level((enum zpp_cpu_level)level)) continue;
        guard(&sum), guard(&got);
        zpp_quant_sum(&f->spec, sources, SOURCES, 0.5f, floats_at(&sum, f), f->dtype, f->elems, pool);
        expect(same_floats(rounded, floats_at(&sum, f), f->dtype, f->elems), "sum differs from its parts", f, level);
        zpp_quant_reduce(&f->spec, sources, SOURCES, 0.5f, f->elems, to_spec, &got_to, pool);
        expect(same_quantised(&to_format, &want, &got), "reduction differs from the quantised sum", f, level);
        expect(ends_guarded(&to_format, &got), "reduction wrote beyond the end", f, level);
    }
    zpp_quant_use_level(ZPP_CPU_LEVELS);
}

static void sums(void) {
    zpp_pool *pool = threads();
    for (int flags = 0; flags < 16; ++flags) for (size_t b = 0; b < BLOCK_SIZES; ++b)
    for (size_t l = 0; l < LENGTHS; ++l) {
        const struct format f = { { block_sizes[b], flags & 1 ? 8 : 4, flags & 2 }, kinds[l % 3], lengths[l], l % 2 };
        const struct zpp_quant_spec to = { block_sizes[(b + l) % BLOCK_SIZES], flags & 4 ? 8 : 4, flags & 8 };
        check_sum(&f, &to, pool);
    }
    zpp_pool_destroy(pool);
    CHECK_EQUAL(failures, 0);
}

/* Large enough that values are streamed past the cache, from an aligned and from an unaligned place. */
static void large(void) {
    enum { ELEMS = (9 << 18) + 7 };
    zpp_pool *pool = threads();
    float *values = malloc((ELEMS + 32) * sizeof *values), *back = aligned_alloc(64, (ELEMS + 57) / 16 * 64);
    int8_t *codes = malloc(ELEMS);
    float *scales = malloc((ELEMS / 512 + 1) * sizeof *scales);
    for (size_t i = 0; i < ELEMS; ++i) values[i] = random_value(false);
    const struct zpp_quant_spec spec = { 512, 8, false };
    const struct zpp_quant_target to = { codes, scales, NULL };
    const struct zpp_quant_source from = { codes, scales, NULL };
    zpp_quantise(&spec, values, ZPP_F32, ELEMS, &to, pool);
    for (size_t offset = 0; offset < 2; ++offset) {
        zpp_dequantise(&spec, &from, back + offset, ZPP_F32, ELEMS, false, pool);
        for (size_t i = 0; i < ELEMS; ++i) CHECK(back[offset + i] == (float)codes[i] * scales[i / 512]);
    }
    free(values), free(back), free(codes), free(scales);
    zpp_pool_destroy(pool);
}

/* Says which versions the other cases cover. */
static void levels(void) {
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) {
        const bool here = zpp_quant_use_level((enum zpp_cpu_level)level);
        printf("%s %s, ", zpp_cpu_level_name((enum zpp_cpu_level)level), here ? "here" : "not on this machine");
        CHECK(here == (level <= (int)zpp_cpu_detected()));
    }
    CHECK(zpp_quant_use_level(ZPP_CPU_LEVELS));
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(levels), TEST(formats), TEST(sums), TEST(large), {0} };
    return test_main(argc, argv, cases);
}
