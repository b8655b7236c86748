/* SPDX-License-Identifier: Apache-2.0
 *
 * A deterministic driver for fuzz targets: inputs grown and mutated from one seed, so that every run of every flavor
 * sees the same ones. FUZZ_SECONDS=n lengthens each target's run to n seconds, FUZZ_SEED=n picks other inputs.
 */
#ifndef ZPP_TESTS_FUZZ_DRIVER_H
#define ZPP_TESTS_FUZZ_DRIVER_H

#include "harness.h"

enum { INPUT_BYTES_MAX = 512, KEPT = 64, RUNS = 1500 };

static uint64_t state;

/* xorshift64*: the same numbers on every machine. */
static uint64_t next_random(void) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545F4914F6CDD1Du;
}

struct input {
    size_t bytes;
    uint8_t data[INPUT_BYTES_MAX];
};

static void grow(struct input *input) {
    const uint64_t sparse = next_random() % 3;
    input->bytes = next_random() % (INPUT_BYTES_MAX + 1);
    for (size_t i = 0; i < input->bytes; i++)
        input->data[i] = sparse && next_random() % 4 ? 0 : (uint8_t)(next_random() >> 32);
}

static void mutate(struct input *input) {
    static const uint8_t edges[] = {0, 1, 0x7f, 0x80, 0xff, 0x10, 0x20, 0x40};
    for (uint64_t i = 1 + next_random() % 4; i > 0 && input->bytes; i--) {
        const size_t at = next_random() % input->bytes;
        switch (next_random() % 4) {
        case 0: input->data[at] ^= (uint8_t)(1u << next_random() % 8); break;
        case 1: input->data[at] = edges[next_random() % sizeof edges]; break;
        case 2: memset(input->data + at, 0xff, input->bytes - at < 8 ? input->bytes - at : 8); break;
        default: input->bytes = at; break;
        }
    }
}

static void drive(int (*target)(const uint8_t *data, size_t bytes)) {
    static struct input kept[KEPT];
    const char *seconds = getenv("FUZZ_SECONDS"), *seed = getenv("FUZZ_SEED");
    const uint64_t until_ns = seconds ? zpp_now_ns() + strtoull(seconds, NULL, 10) * 1000000000u : 0;
    state = 0x9E3779B97F4A7C15u ^ (seed ? strtoull(seed, NULL, 10) : 0);
    for (size_t i = 0; i < KEPT; i++) grow(&kept[i]);
    for (uint64_t run = 0; until_ns ? zpp_now_ns() < until_ns : run < RUNS; run++) {
        struct input *input = &kept[next_random() % KEPT];
        if (run % 8 == 0)
            grow(input);
        else
            mutate(input);
        uint8_t *exact = malloc(input->bytes + 1); /* so that AddressSanitizer sees a read past the end */
        CHECK(exact != NULL);
        memcpy(exact, input->data, input->bytes);
        CHECK_EQUAL(target(exact, input->bytes), 0);
        free(exact);
    }
}

#endif
