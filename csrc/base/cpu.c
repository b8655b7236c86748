/* SPDX-License-Identifier: Apache-2.0
 *
 * CPU levels: cpu.h. CPUID lists the instruction sets; XGETBV lists the registers that the operating system saves at a
 * context switch, without which the instructions fault or lose their values. This file is built for the baseline.
 */
#include "cpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#if ZPP_CPU_X86
#include <cpuid.h>
#endif

static const char *const level_names[ZPP_CPU_LEVELS] = {"scalar", "avx2", "avx512"};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static enum zpp_cpu_level detected = ZPP_CPU_SCALAR, chosen = ZPP_CPU_SCALAR;
static bool pclmul;
static struct zpp_err bad_choice = ZPP_ERR_INIT;

#if ZPP_CPU_X86
static uint64_t saved_registers(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static enum zpp_cpu_level detect(void) {
    enum { OSXSAVE = 1 << 27, FMA = 1 << 12, F16C = 1 << 29, AVX2 = 1 << 5 };
    enum { XMM_YMM = 0x06, OPMASK_ZMM = 0xe0 };
    const uint32_t avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
    uint32_t eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return ZPP_CPU_SCALAR;
    const uint32_t needed = OSXSAVE | FMA | F16C;
    if ((ecx & needed) != needed) return ZPP_CPU_SCALAR;
    const uint64_t saved = saved_registers();
    if ((saved & XMM_YMM) != XMM_YMM) return ZPP_CPU_SCALAR;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & AVX2)) return ZPP_CPU_SCALAR;
    const bool has_avx512 = (ebx & avx512) == avx512 && (saved & OPMASK_ZMM) == OPMASK_ZMM;
    return has_avx512 ? ZPP_CPU_AVX512 : ZPP_CPU_AVX2;
}

static bool detect_pclmul(void) {
    uint32_t eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_PCLMUL);
}
#else
static enum zpp_cpu_level detect(void) { return ZPP_CPU_SCALAR; }
static bool detect_pclmul(void) { return false; }
#endif

static void read_once(void) {
    chosen = detected = detect();
    const char *wanted = getenv("ZEROPP_CPU");
    pclmul = detect_pclmul() && !(wanted && strcmp(wanted, level_names[ZPP_CPU_SCALAR]) == 0);
    if (!wanted || !wanted[0]) return;
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) {
        if (strcmp(wanted, level_names[level]) != 0) continue;
        if (level <= (int)detected) {
            chosen = (enum zpp_cpu_level)level;
        } else {
            zpp_fail(&bad_choice, ZPP_INVALID,
                     "ZEROPP_CPU=%s: this machine has only %s; unset it, or set it to a level up to that", wanted,
                     level_names[detected]);
        }
        return;
    }
    zpp_fail(&bad_choice, ZPP_INVALID, "ZEROPP_CPU=%.100s: wanted scalar, avx2 or avx512", wanted);
}

enum zpp_cpu_level zpp_cpu_level(void) {
    pthread_once(&once, read_once);
    return chosen;
}

enum zpp_cpu_level zpp_cpu_detected(void) {
    pthread_once(&once, read_once);
    return detected;
}

bool zpp_cpu_has_pclmul(void) {
    pthread_once(&once, read_once);
    return pclmul;
}

zpp_status zpp_cpu_check(struct zpp_err *err) {
    pthread_once(&once, read_once);
    if (err && bad_choice.status != ZPP_OK) *err = bad_choice;
    return bad_choice.status;
}

const char *zpp_cpu_level_name(enum zpp_cpu_level level) {
    return (unsigned)level < ZPP_CPU_LEVELS ? level_names[level] : "unknown";
}
