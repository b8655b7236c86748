/* SPDX-License-Identifier: Apache-2.0
 *
 * The limit of CPU Adam: loops over the same streams of memory without its arithmetic. cpu_adam.py builds it with the
 * machine's compiler; it is no part of the product.
 *
 *   rmw4   p, m, v read and written, fp32 gradient read                    (28 bytes a parameter)
 *   rmw5   p, m, v read and written, bf16 gradient read, bf16 copy written (28 bytes a parameter)
 *
 * `mask` is 0, which the compiler does not know: what is written is what was read.
 */
#include <emmintrin.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

struct streams {
    uint32_t *p, *m, *v;
    const void *gradient;
    void *copy; /* NULL: rmw4 */
    size_t begin, end; /* multiples of 32 */
    uint32_t mask;
};

static void rmw4(const struct streams *s) {
    uint32_t *restrict p = s->p, *restrict m = s->m, *restrict v = s->v;
    const uint32_t *restrict g = s->gradient;
    const uint32_t mask = s->mask;
    for (size_t i = s->begin; i < s->end; ++i) {
        const uint32_t x = g[i] & mask;
        p[i] ^= x, m[i] ^= x, v[i] ^= x;
    }
}

/* Registers of 16 bytes, as every x86-64 has: the loop waits for memory, not for them. */
static void rmw5(const struct streams *s) {
    const __m128i mask = _mm_set1_epi32((int)s->mask);
    for (size_t i = s->begin; i < s->end; i += 8) {
        const __m128i g = _mm_loadu_si128((const __m128i *)((const uint16_t *)s->gradient + i));
        const __m128i x[2] = { _mm_and_si128(_mm_unpacklo_epi16(g, g), mask), _mm_and_si128(_mm_unpackhi_epi16(g, g), mask) };
        __m128i last = g;
        for (size_t k = 0; k < 2; ++k) {
            __m128i *p = (__m128i *)(s->p + i) + k, *m = (__m128i *)(s->m + i) + k, *v = (__m128i *)(s->v + i) + k;
            last = _mm_xor_si128(_mm_loadu_si128(p), x[k]);
            _mm_storeu_si128(p, last);
            _mm_storeu_si128(m, _mm_xor_si128(_mm_loadu_si128(m), x[k]));
            _mm_storeu_si128(v, _mm_xor_si128(_mm_loadu_si128(v), x[k]));
        }
        _mm_stream_si128((__m128i *)((uint16_t *)s->copy + i), last);
    }
    _mm_sfence();
}

static void *run(void *streams) {
    const struct streams *s = streams;
    if (s->copy) rmw5(s);
    else rmw4(s);
    return NULL;
}

/* 0, or the errno of a thread that could not be started. */
int limit_pass(void *p, void *m, void *v, const void *gradient, void *copy, size_t elems, int threads, uint32_t mask) {
    enum { MOST = 64 };
    struct streams parts[MOST];
    pthread_t ids[MOST];
    int started = 1, failed = 0;
    if (threads > MOST) threads = MOST;
    for (int t = 0; t < threads; ++t) {
        const size_t begin = elems * (size_t)t / (size_t)threads / 32 * 32;
        const size_t end = elems * (size_t)(t + 1) / (size_t)threads / 32 * 32;
        parts[t] = (struct streams){ p, m, v, gradient, copy, begin, end, mask };
    }
    for (; started < threads && !failed; ++started) failed = pthread_create(&ids[started], NULL, run, &parts[started]);
    run(&parts[0]);
    for (int t = 1; t < started - (failed != 0); ++t) pthread_join(ids[t], NULL);
    return failed;
}
