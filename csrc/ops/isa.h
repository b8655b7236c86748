/* SPDX-License-Identifier: Apache-2.0
 *
 * One source text for several instruction sets. A file X_isa.c is compiled once for each of scalar, avx2 and avx512, or
 * scalar and neon (setup.py), with ZPP_ISA the name and ZPP_LANES 1 or 16. Its flags are those of base/cpu.h's level of
 * that name. Such a file defines one constant table of functions:
 *
 *     const struct zpp_thing_kernels ZPP_ISA_NAME(zpp_thing) = { ... };
 *
 * The op's header declares the tables with ZPP_ISA_DECLARE, and its driver chooses one with ZPP_ISA_AT.
 */
#ifndef ZPP_OPS_ISA_H
#define ZPP_OPS_ISA_H

#include <stddef.h>
#include "../base/cpu.h"

#ifndef ZPP_ISA /* a file that is compiled once */
#define ZPP_ISA scalar
#define ZPP_LANES 1
#endif

#if ZPP_CPU_ARM && !defined(__AVX512F__) /* a test may emulate AVX-512 on any CPU */
#define ZPP_ISA_NEON 1
#else
#define ZPP_ISA_NEON 0
#endif

#define ZPP_ISA_PASTE_(name, isa) name##_##isa
#define ZPP_ISA_PASTE(name, isa) ZPP_ISA_PASTE_(name, isa)
#define ZPP_ISA_NAME(name) ZPP_ISA_PASTE(name, ZPP_ISA)

/* The table of a level, or NULL where this build has none. Whether the machine has the level is the caller's question
 * to zpp_cpu_detected(). */
#if ZPP_CPU_X86
#define ZPP_ISA_DECLARE(type, name) extern const type name##_scalar, name##_avx2, name##_avx512
#define ZPP_ISA_AT(level, name)                                  \
    ((level) == ZPP_CPU_AVX512   ? &name##_avx512                \
     : (level) == ZPP_CPU_AVX2   ? &name##_avx2                  \
     : (level) == ZPP_CPU_SCALAR ? &name##_scalar                \
                                 : NULL)
#elif ZPP_CPU_ARM
#define ZPP_ISA_DECLARE(type, name) extern const type name##_scalar, name##_neon
#define ZPP_ISA_AT(level, name) \
    ((level) == ZPP_CPU_NEON ? &name##_neon : (level) == ZPP_CPU_SCALAR ? &name##_scalar : NULL)
#else
#define ZPP_ISA_DECLARE(type, name) extern const type name##_scalar
#define ZPP_ISA_AT(level, name) ((level) == ZPP_CPU_SCALAR ? &name##_scalar : NULL)
#endif

#endif
