/* SPDX-License-Identifier: Apache-2.0
 *
 * Block quantisation in plain C: the meaning of the op on CPU. quant_body.h has the arithmetic.
 */
#include "kernels.h"

#include "tail.h"

static void span_tail(const void *src, zpp_dtype dtype, bool asymmetric, size_t elems, struct zpp_quant_span *span) {
    (void)asymmetric; /* low and high cost nothing here */
    zpp_quant_span_tail(src, dtype, 0, elems, span);
}

static void encode_tail(int bits, const struct zpp_quant_consts *consts, const void *src, zpp_dtype dtype,
                        bool asymmetric, size_t elems, uint8_t *codes) {
    (void)asymmetric; /* mid is 0 where it is not */
    zpp_quant_encode_tail(bits, consts, src, dtype, 0, elems, codes);
}

static void encode(int bits, const struct zpp_quant_consts *consts, const void *src, zpp_dtype dtype, size_t elems,
                   uint8_t *codes) {
    encode_tail(bits, consts, src, dtype, true, elems, codes);
}

static void blocks(const struct zpp_quant_spec *spec, const void *src, zpp_dtype dtype, size_t elems, uint8_t *codes,
                   float *scales, float *mids) {
    zpp_quant_each_block(spec, src, dtype, elems, codes, scales, mids, span_tail, encode_tail);
}

static void span_of(const void *src, zpp_dtype dtype, size_t elems, struct zpp_quant_span *span) {
    zpp_quant_span_tail(src, dtype, 0, elems, span);
}

static void decode(int bits, float scale, float mid, const uint8_t *codes, size_t elems, void *dst, zpp_dtype dtype,
                   enum zpp_quant_how how) {
    zpp_quant_decode_tail(bits, scale, mid, codes, 0, elems, dst, dtype, how == ZPP_QUANT_ADD);
}

const struct zpp_quant_kernels zpp_quant_scalar = { blocks, span_of, encode, decode };
