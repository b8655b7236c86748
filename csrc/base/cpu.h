/* SPDX-License-Identifier: Apache-2.0
 *
 * Instruction sets of this CPU and operating system, read once per process. ZEROPP_CPU=scalar|avx2|avx512 (x86-64) or
 * scalar|neon (aarch64) lowers the level, so that every variant of a kernel can be tested on one machine.
 *
 *   scalar   the architecture's baseline
 *   avx2     AVX2, FMA and F16C, and the system saves the 256-bit registers
 *   avx512   AVX-512 F, BW, VL and DQ on top, and the system saves the 512-bit and mask registers
 *   neon     NEON, which every aarch64 CPU has
 *
 * These are the flags that setup.py gives to *_avx2.c, *_avx512.c and *_neon.c. Files of another architecture are not
 * built. Guard calls into them with ZPP_CPU_X86 or ZPP_CPU_ARM.
 *
 * Threads: any.
 */
#ifndef ZPP_BASE_CPU_H
#define ZPP_BASE_CPU_H

#include <stdbool.h>
#include "status.h"

#if defined(__x86_64__)
#define ZPP_CPU_X86 1
#else
#define ZPP_CPU_X86 0
#endif
#if defined(__aarch64__)
#define ZPP_CPU_ARM 1
#else
#define ZPP_CPU_ARM 0
#endif

/* The levels of this architecture; each includes those before it. */
#if ZPP_CPU_ARM
enum zpp_cpu_level { ZPP_CPU_SCALAR, ZPP_CPU_NEON, ZPP_CPU_LEVELS };
#elif ZPP_CPU_X86
enum zpp_cpu_level { ZPP_CPU_SCALAR, ZPP_CPU_AVX2, ZPP_CPU_AVX512, ZPP_CPU_LEVELS };
#else
enum zpp_cpu_level { ZPP_CPU_SCALAR, ZPP_CPU_LEVELS };
#endif

/* Return the level to use: that of the machine, lowered by ZEROPP_CPU. */
enum zpp_cpu_level zpp_cpu_level(void);
/* Return the level of the machine. */
enum zpp_cpu_level zpp_cpu_detected(void);
/* Instructions that no level implies. They count as missing where ZEROPP_CPU=scalar. */
struct zpp_cpu_extras {
    bool clmul; /* carry-less multiplication: PCLMULQDQ, or PMULL with the CRC32 instructions; for *_clmul.c */
    bool bf16;  /* BFCVTN: fp32 to bf16, with the bits of zpp_bf16_from_f32 */
};
struct zpp_cpu_extras zpp_cpu_extras(void);
/* Return INVALID if ZEROPP_CPU names no level, or one that this machine lacks (zpp_cpu_level is then the detected one).
 * The binding calls it at import, so that a wrong value is an error and not a silent choice. */
zpp_status zpp_cpu_check(struct zpp_err *err);
/* Return "scalar", "avx2", "avx512" or "neon", and "unknown" for any other value. */
const char *zpp_cpu_level_name(enum zpp_cpu_level level);

#endif
