/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on CUDA memory: NCCL moves the bytes, the group's communicator (comm.h) watches over it.
 *
 * NCCL compares nothing: with ranks that call different collectives it hangs or mixes their tensors, and it detects a
 * dead peer late or never. So each collective is submitted to the communicator, too, without its bytes
 * (zpp_call.beside): the progress thread compares it while the GPU works, and reports a rank that died, is late, or
 * made another call, as for CPU tensors. Whatever ends the communicator ends NCCL's within 0.1 s (ncclCommAbort), and
 * with it the kernels that wait; an error that NCCL detects ends the communicator, so every rank gets it.
 *
 * Work runs on the group's own stream, after what the caller's stream holds; the caller's stream waits for it by an
 * event. Sends and receives are gathered, and started as one NCCL group when one of them is waited for, when the next
 * collective comes, or after 0.1 s: unpaired ones would wait for each other in the order of their stream.
 *
 * Threads: one thread at a time submits; any thread may query works and wait for them. A lock guards the rest against
 * the watching thread.
 */
#ifndef ZPP_COMM_NCCL_H
#define ZPP_COMM_NCCL_H

#include "../../base/device.h"
#include "../comm.h"

typedef struct zpp_nccl zpp_nccl;
typedef struct zpp_nccl_work zpp_nccl_work;

/* Collective over `control`, which distributes rank 0's id, and the error of a rank that cannot take part. `control`
 * and `device` (a cuda device) are borrowed until zpp_nccl_destroy. Timeouts are those of `control`. New. NOT_BUILT
 * without NCCL, on every rank. */
zpp_status zpp_nccl_create(zpp_comm *control, zpp_device *device, const struct zpp_wait *wait, zpp_nccl **out,
                           struct zpp_err *err);
/* The same, of some of the ranks of `first`, on the stream of `first`: calls of both run in the order in which they are
 * enqueued. So where all ranks enqueue in one order, no call waits for one of the other communicator that waits for it.
 * One thread submits to both. `first` is destroyed after `*out`. */
zpp_status zpp_nccl_create_behind(zpp_nccl *first, zpp_comm *control, const struct zpp_wait *wait, zpp_nccl **out,
                                  struct zpp_err *err);
/* Wait for submitted work until the group fails or its timeout expires. NULL is allowed. Before zpp_comm_destroy of
 * `control`. */
void zpp_nccl_destroy(zpp_nccl *nccl);

/* Enqueue collectives as one NCCL group: exact ones, all of `calls` on device memory, after what `native` (the
 * caller's current stream) holds. `calls` is read before the return, what it points at on the device is borrowed until
 * the work is finished. `*out`: new; free with zpp_nccl_work_free, finished or not, before zpp_nccl_destroy. Return
 * INVALID for operations that NCCL lacks: reductions of int16, bitwise operations. */
zpp_status zpp_nccl_submit(zpp_nccl *nccl, const struct zpp_call *calls, size_t count, void *native,
                           const struct zpp_wait *wait, zpp_nccl_work **out, struct zpp_err *err);
/* Enqueue collectives in the same way after what `stream` holds, and order later operations of `stream` after them: a
 * stream of the group's device without a queue. The host keeps no work. */
zpp_status zpp_nccl_order(zpp_nccl *nccl, const struct zpp_call *calls, size_t count, zpp_stream *stream,
                          struct zpp_err *err);
/* Once the group fails, what waits for its works runs with wrong values. `halt`, a word that is 0, is set to 1 before
 * that, so that kernels which look at it write nothing. Borrowed until zpp_nccl_destroy; pinned on the device. */
void zpp_nccl_set_halt(zpp_nccl *nccl, uint64_t *halt);
/* Enqueue one send or receive; they match by order, there are no tags. */
zpp_status zpp_nccl_send(zpp_nccl *nccl, const void *data, size_t bytes, int to, void *native, zpp_nccl_work **out,
                         struct zpp_err *err);
zpp_status zpp_nccl_recv(zpp_nccl *nccl, void *data, size_t bytes, int from, void *native, zpp_nccl_work **out,
                         struct zpp_err *err);
/* Make `native` run what it gets from now on after the work. The host does not wait. */
zpp_status zpp_nccl_work_order(zpp_nccl_work *work, void *native, struct zpp_err *err);
/* Wait on the host. `wait` NULL: only query; AGAIN if it is not finished. */
zpp_status zpp_nccl_work_wait(zpp_nccl_work *work, const struct zpp_wait *wait, struct zpp_err *err);
void zpp_nccl_work_free(zpp_nccl_work *work);
/* The stream that NCCL's kernels run on: the driver's handle. */
void *zpp_nccl_stream(const zpp_nccl *nccl);

#endif
