/* SPDX-License-Identifier: Apache-2.0
 *
 * Mean over ranks at one bit an element, with error feedback on both sides: the compressed all-reduce of 1-bit Adam
 * (Tang et al. 2021, section 4.1 and figure 3), 1-bit LAMB and 0/1 Adam. Compression, formula and format of the bits:
 * ops/onebit/onebit.h.
 *
 * The array is cut in one shard a rank; rank r is the server of shard r:
 *
 *   1 worker   compress the rank's array + its worker error, shard by shard
 *   2          all-to-all: shard r of every rank goes to rank r
 *   3 server   mean of the messages, in rank order, + its server error, compressed again
 *   4          all-gather of the servers' results: the same bits on every rank
 *
 * A shard travels as a message, | scales, fp32, one a chunk | bits |, padded to 4 bytes. Bytes that a rank reads from
 * its peers, with M = zpp_onebit_message_bytes of a shard: (N - 1) M in step 2 and (N - 1) M in step 4. That is n/8 of
 * bits and 4 n / chunk_elems of scales, times (N - 1) / N, each way; an exact all-reduce of fp32 reads 4 n (N - 1) / N
 * each way. Step 4 may be left out where each rank needs its own shard only. The bytes are counted as all_to_all and
 * all_gather, of which this consists, so it runs over the same transports.
 *
 * Deterministic: the same inputs and errors, the same bits, whatever the timing.
 */
#ifndef ZPP_COMM_ONEBIT_H
#define ZPP_COMM_ONEBIT_H

#include "../base/pool.h"
#include "comm.h"

struct zpp_onebit_layout {
    size_t elems, chunk_elems;
    size_t shard_elems;   /* of every shard but the last ones: elems / ranks rounded up, a multiple of 16 */
    size_t message_bytes; /* of a shard of shard_elems; a multiple of 4 */
    int ranks;
};

/* chunk_elems: a multiple of 16, at least 16; else INVALID. Any number of elements. */
zpp_status zpp_onebit_layout_make(int ranks, size_t elems, size_t chunk_elems, struct zpp_onebit_layout *out,
                                  struct zpp_err *err);
/* Shard `rank`: where it begins, and its length, which is shorter at the end and may be 0. */
size_t zpp_onebit_shard_begin(const struct zpp_onebit_layout *layout, int rank);
size_t zpp_onebit_shard_elems(const struct zpp_onebit_layout *layout, int rank);
size_t zpp_onebit_message_bytes(size_t chunk_elems, size_t shard_elems);
/* Sizes of the two work areas below. */
size_t zpp_onebit_scratch_bytes(const struct zpp_onebit_layout *layout);
size_t zpp_onebit_result_bytes(const struct zpp_onebit_layout *layout);

struct zpp_onebit_job {
    struct zpp_onebit_layout layout; /* of this communicator's ranks */
    const void *src;                 /* [elems] of src_dtype; read */
    zpp_dtype src_dtype;             /* F32, BF16 or F16 */
    float *worker_error;             /* [elems]; zeros before the first call, updated in place */
    float *server_error;             /* [elems of this rank's shard]; the same */
    void *scratch;                   /* aligned to 4; contents are lost */
    void *result;                    /* aligned to 4: the message of shard r at r * message_bytes */
    bool gather;                     /* false: only the message of this rank's shard is written */
};

/* Collective: same layout, dtype and gather on every rank, anything else is PEER or INVALID on all. A value that is
 * not finite makes its chunk NaN in the result of every rank, and leaves the errors of that chunk as they were. After
 * any other failure the group has ended, and the errors must not be used again. A single rank compresses too, so that
 * the arithmetic does not depend on the number of ranks. */
zpp_status zpp_onebit_all_reduce(zpp_comm *comm, const struct zpp_onebit_job *job, zpp_pool *pool,
                                 const struct zpp_wait *wait, struct zpp_err *err);

/* Decode shard `rank` of a result into shard_elems(rank) elements: dst = value, or dst + value. */
void zpp_onebit_take(const struct zpp_onebit_layout *layout, const void *result, int rank, void *dst,
                     zpp_dtype dst_dtype, bool accumulate, zpp_pool *pool);

#endif
