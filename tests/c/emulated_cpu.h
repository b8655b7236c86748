/* SPDX-License-Identifier: Apache-2.0
 *
 * A CPU with AVX-512, for programs that run an op's whole test with its AVX-512 version emulated (avx512_emulated.h):
 * all of csrc/base/cpu.h, in place of cpu.c, and as the program also brings zpp_<op>_avx512, the one that was compiled
 * for the instructions is not linked. Everything else of the product must not go beyond what the machine has: where
 * even AVX2 is missing, the level stays scalar.
 */
#ifndef ZPP_TESTS_EMULATED_CPU_H
#define ZPP_TESTS_EMULATED_CPU_H

#include <stdbool.h>

#include "../../csrc/base/cpu.h"

enum zpp_cpu_level zpp_cpu_detected(void) {
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); /* F16C is older than both */
    return avx2 ? ZPP_CPU_AVX512 : ZPP_CPU_SCALAR;
}
enum zpp_cpu_level zpp_cpu_level(void) { return zpp_cpu_detected(); }
zpp_status zpp_cpu_check(struct zpp_err *err) {
    (void)err;
    return ZPP_OK;
}
const char *zpp_cpu_level_name(enum zpp_cpu_level level) {
    return level == ZPP_CPU_SCALAR ? "scalar" : level == ZPP_CPU_AVX2 ? "avx2" : "avx512 (emulated)";
}

#endif
