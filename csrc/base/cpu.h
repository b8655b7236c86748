/* SPDX-License-Identifier: Apache-2.0
 *
 * Instruction sets of this CPU and operating system, read once per process. ZEROPP_CPU=scalar|avx2|avx512 lowers the
 * level, so that every variant of a kernel can be tested on one machine.
 *
 *   scalar   the architecture's baseline
 *   avx2     AVX2, FMA and F16C, and the system saves the 256-bit registers
 *   avx512   AVX-512 F, BW, VL and DQ on top, and the system saves the 512-bit and mask registers
 *
 * These are the flags that setup.py gives to *_avx2.c and *_avx512.c; on other architectures than x86-64 those files
 * are not built, and the level is scalar. Guard calls into them with ZPP_CPU_X86.
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

enum zpp_cpu_level { ZPP_CPU_SCALAR, ZPP_CPU_AVX2, ZPP_CPU_AVX512, ZPP_CPU_LEVELS };

/* Return the level to use: that of the machine, lowered by ZEROPP_CPU. */
enum zpp_cpu_level zpp_cpu_level(void);
/* Return the level of the machine. */
enum zpp_cpu_level zpp_cpu_detected(void);
/* True if the CPU has carry-less multiplication (PCLMULQDQ), for *_pclmul.c; no level implies it. False where
 * ZEROPP_CPU=scalar. */
bool zpp_cpu_has_pclmul(void);
/* Return INVALID if ZEROPP_CPU names no level, or one that this machine lacks (zpp_cpu_level is then the detected one).
 * The binding calls it at import, so that a wrong value is an error and not a silent choice. */
zpp_status zpp_cpu_check(struct zpp_err *err);
/* Return "scalar", "avx2" or "avx512", and "unknown" for any other value. */
const char *zpp_cpu_level_name(enum zpp_cpu_level level);

#endif
