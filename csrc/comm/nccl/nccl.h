/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on CUDA memory: NCCL moves the bytes, the group's communicator (comm.h) watches over it.
 *
 * NCCL compares nothing: ranks that call different collectives hang or mix their tensors, and a peer that died is found
 * late or never. So each collective is entered into the communicator, too, by its identity alone (zpp_call.beside):
 * that goes on its progress thread while the GPU works, and a rank that died, is late, or calls something else is named
 * there as it is for CPU tensors. Whatever ends the communicator ends NCCL's within 0.1 s (ncclCommAbort), and with it
 * the kernels that wait; what NCCL finds itself ends the communicator, so every rank hears of it.
 *
 * Work goes on a stream of its own, after what the caller's stream holds; the caller's stream waits for it by an event.
 * Sends and receives are gathered, and started as one NCCL group when one of them is waited for, when the next
 * collective comes, or after 0.1 s: unpaired ones would wait for each other in the order of their stream.
 *
 * Threads: one thread at a time submits; works may be asked and waited for by any. A lock guards the rest against the
 * watching thread.
 */
#ifndef ZPP_COMM_NCCL_H
#define ZPP_COMM_NCCL_H

#include "../../base/device.h"
#include "../comm.h"

typedef struct zpp_nccl zpp_nccl;
typedef struct zpp_nccl_work zpp_nccl_work;

/* Collective over `control`, by which rank 0's id goes to all, and what keeps a rank from taking part. `control` and
 * `device` (a cuda device) are borrowed until zpp_nccl_destroy. Timeouts are those of `control`. New. NOT_BUILT
 * without NCCL, on every rank. */
zpp_status zpp_nccl_create(zpp_comm *control, zpp_device *device, const struct zpp_wait *wait, zpp_nccl **out,
                           struct zpp_err *err);
/* Waits for what was submitted, as long as the group stands and its timeout is not over. NULL is fine. Before
 * zpp_comm_destroy of `control`. */
void zpp_nccl_destroy(zpp_nccl *nccl);

/* Enqueue collectives as one NCCL group: exact ones, all of `calls` on device memory, after what `native` (the caller's
 * current stream) holds. `calls` is read before the return, what it points at on the device is borrowed until the work
 * is finished. `*out`: new; free with zpp_nccl_work_free, finished or not, before zpp_nccl_destroy. INVALID for what
 * NCCL does not have: reductions of int16, bitwise operations. */
zpp_status zpp_nccl_submit(zpp_nccl *nccl, const struct zpp_call *calls, size_t count, void *native,
                           const struct zpp_wait *wait, zpp_nccl_work **out, struct zpp_err *err);
/* The same for one send or receive; order is what pairs them, there are no tags. */
zpp_status zpp_nccl_send(zpp_nccl *nccl, const void *data, size_t bytes, int to, void *native, zpp_nccl_work **out,
                         struct zpp_err *err);
zpp_status zpp_nccl_recv(zpp_nccl *nccl, void *data, size_t bytes, int from, void *native, zpp_nccl_work **out,
                         struct zpp_err *err);
/* What `native` gets from now on runs after the work. The host does not wait. */
zpp_status zpp_nccl_work_order(zpp_nccl_work *work, void *native, struct zpp_err *err);
/* The host waits; NULL: only asks, AGAIN if it is not finished. */
zpp_status zpp_nccl_work_wait(zpp_nccl_work *work, const struct zpp_wait *wait, struct zpp_err *err);
void zpp_nccl_work_free(zpp_nccl_work *work);
/* The stream that NCCL's kernels run on: the driver's handle. */
void *zpp_nccl_stream(const zpp_nccl *nccl);

#endif
