/* SPDX-License-Identifier: Apache-2.0
 *
 * The end of streamed stores. On Arm they are plain stores, which a release orders.
 */
#ifndef ZPP_OPS_STREAMED_H
#define ZPP_OPS_STREAMED_H

#include "../base/cpu.h"

#if ZPP_CPU_X86
#include <immintrin.h>
#endif

/* Streamed stores are weakly ordered: this comes after the last of a piece, so that no flag overtakes them. It waits
 * until memory has taken all of them, so it does not belong after each row. */
static inline void zpp_streamed(void) {
#if ZPP_CPU_X86
    _mm_sfence();
#endif
}

#endif
