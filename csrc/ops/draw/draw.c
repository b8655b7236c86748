/* SPDX-License-Identifier: Apache-2.0 */
#include "draw.h"

#include "../random.h"

static void swap(int32_t *pool, uint64_t a, uint64_t b) {
    const int32_t sample = pool[a];
    pool[a] = pool[b];
    pool[b] = sample;
}

static zpp_status check(const struct zpp_draw *draw, size_t samples, const int64_t *wanted, size_t steps,
                        struct zpp_err *err) {
    if (samples > INT32_MAX || draw->admitted > samples || draw->left > draw->admitted)
        return zpp_fail(err, ZPP_INVALID, "a pool of %zu samples with %llu admitted and %llu left is not possible",
                        samples, (unsigned long long)draw->admitted, (unsigned long long)draw->left);
    uint64_t before = draw->admitted ? draw->admitted : 1;
    for (size_t t = 0; t < steps; before = (uint64_t)wanted[t++]) {
        if (wanted[t] >= 0 && (uint64_t)wanted[t] >= before && (uint64_t)wanted[t] <= samples) continue;
        return zpp_fail(err, ZPP_INVALID, "step %zu of the call admits %lld samples, wanted %llu to %zu", t,
                        (long long)wanted[t], (unsigned long long)before, samples);
    }
    return ZPP_OK;
}

zpp_status zpp_draw_order(int32_t *pool, size_t samples, struct zpp_draw *draw, const int64_t *wanted, size_t steps,
                          size_t batch, int32_t *order, struct zpp_err *err) {
    const zpp_status status = check(draw, samples, wanted, steps, err);
    if (status != ZPP_OK) return status;
    for (size_t t = 0; t < steps; ++t) {
        while (draw->admitted < (uint64_t)wanted[t]) swap(pool, draw->admitted++, draw->left++);
        for (size_t i = 0; i < batch; ++i) {
            if (draw->left == 0) draw->left = draw->admitted;
            const uint32_t at = zpp_random_below(&draw->random, (uint32_t)draw->left);
            swap(pool, at, --draw->left);
            *order++ = pool[draw->left];
        }
    }
    return ZPP_OK;
}
