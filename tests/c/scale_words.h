/* SPDX-License-Identifier: Apache-2.0
 *
 * The two ways in which a kernel gets grad_scale (csrc/ops/grad_scale.h), and a step that is skipped.
 */
#ifndef ZPP_TESTS_SCALE_WORDS_H
#define ZPP_TESTS_SCALE_WORDS_H

#include "../../csrc/ops/grad_scale.h"

static struct {
    bool by_address, skip; /* what the test wants */
    float value;
    uint32_t skipped;
} scale_words;

static struct zpp_grad_scale scale_as_wanted(float value) {
    if (!scale_words.by_address) return zpp_grad_scale_of(value);
    scale_words.value = value;
    scale_words.skipped = scale_words.skip;
    return (struct zpp_grad_scale){1000.0f, &scale_words.value, &scale_words.skipped};
}

#endif
