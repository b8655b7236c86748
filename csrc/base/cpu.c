/* SPDX-License-Identifier: Apache-2.0
 *
 * CPU levels: cpu.h. CPUID lists the instruction sets; XGETBV lists the registers that the operating system saves at a
 * context switch, without which the instructions fault or lose their values. On Arm the kernel says both in one word.
 * This file is built for the baseline.
 */
#include "cpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#if ZPP_CPU_X86
#include <cpuid.h>
static const char *const level_names[ZPP_CPU_LEVELS] = {"scalar", "avx2", "avx512"};
#define LEVEL_NAMES "scalar, avx2 or avx512"
#elif ZPP_CPU_ARM
#include <asm/hwcap.h>
#include <sys/auxv.h>
static const char *const level_names[ZPP_CPU_LEVELS] = {"scalar", "neon"};
#define LEVEL_NAMES "scalar or neon"
#else
static const char *const level_names[ZPP_CPU_LEVELS] = {"scalar"};
#define LEVEL_NAMES "scalar: this architecture has no other"
#endif

static pthread_once_t once = PTHREAD_ONCE_INIT;
static enum zpp_cpu_level detected = ZPP_CPU_SCALAR, chosen = ZPP_CPU_SCALAR;
static struct zpp_cpu_extras extras;
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

static struct zpp_cpu_extras detect_extras(void) {
    uint32_t eax, ebx, ecx, edx;
    return (struct zpp_cpu_extras){.clmul = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_PCLMUL)};
}
#elif ZPP_CPU_ARM
static enum zpp_cpu_level detect(void) { return ZPP_CPU_NEON; }
static struct zpp_cpu_extras detect_extras(void) {
    const unsigned long has = getauxval(AT_HWCAP), crc = HWCAP_PMULL | HWCAP_CRC32;
    enum { BF16 = 1 << 14 }; /* HWCAP2_BF16, which headers of glibc 2.28 lack */
    return (struct zpp_cpu_extras){.clmul = (has & crc) == crc, .bf16 = (getauxval(AT_HWCAP2) & BF16) != 0};
}
#else
static enum zpp_cpu_level detect(void) { return ZPP_CPU_SCALAR; }
static struct zpp_cpu_extras detect_extras(void) { return (struct zpp_cpu_extras){0}; }
#endif

static void read_once(void) {
    chosen = detected = detect();
    const char *wanted = getenv("ZEROPP_CPU");
    if (!wanted || strcmp(wanted, level_names[ZPP_CPU_SCALAR]) != 0) extras = detect_extras();
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
    zpp_fail(&bad_choice, ZPP_INVALID, "ZEROPP_CPU=%.100s: wanted " LEVEL_NAMES, wanted);
}

enum zpp_cpu_level zpp_cpu_level(void) {
    pthread_once(&once, read_once);
    return chosen;
}

enum zpp_cpu_level zpp_cpu_detected(void) {
    pthread_once(&once, read_once);
    return detected;
}

struct zpp_cpu_extras zpp_cpu_extras(void) {
    pthread_once(&once, read_once);
    return extras;
}

zpp_status zpp_cpu_check(struct zpp_err *err) {
    pthread_once(&once, read_once);
    if (err && bad_choice.status != ZPP_OK) *err = bad_choice;
    return bad_choice.status;
}

const char *zpp_cpu_level_name(enum zpp_cpu_level level) {
    return (unsigned)level < ZPP_CPU_LEVELS ? level_names[level] : "unknown";
}
