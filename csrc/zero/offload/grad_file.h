/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients in a tier: the reduced shards of stages 2 and 3 live in a scratch file, come to memory to be added to, and
 * go again (ZeRO-Infinity, arXiv:2104.07857, section 5). One rank, whose gradients are not reduced, adds them to its
 * shards parameter by parameter.
 *
 *   ON_DISK --load--> READING --load_wait--> LOADED --add, complete--> WRITING --> ON_DISK
 *            \--- no gradient yet ----------/
 *
 * All shards lie in one mapping of this rank's own (unit_file.h), at pages; a fraction of them, the resident bytes,
 * stays in memory. Units are reduced in one order that is known beforehand, so the next shards are read while this one
 * is added to. What is open or being written is bounded; where the disk is slower than the backward, reductions wait,
 * and buckets with them. Bytes a backward: all written; from the second one of a step on all read, too. The step reads
 * them beside the states (struct zpp_step_files).
 *
 * A read or write that fails does not end a backward, on which the other ranks wait: it is kept, nothing goes to the
 * file any more, and zpp_zero_grads_settle tells, before a norm or a step. Clearing all gradients forgets it.
 *
 * A backward whose units are stepped inside it keeps what is reduced LOADED, until the step has read it and drops it:
 * the last sum of a step is never written. That is the one call that may come while other units are reduced.
 *
 * With delayed steps (step_delayed.h) each shard has two places, one after the other: the step reads the one that it
 * took, while backward fills the other.
 *
 * Threads: the reduce stream's while reductions are under way, else the coordinator's; drop from the latter always.
 */
#ifndef ZPP_ZERO_GRAD_FILE_H
#define ZPP_ZERO_GRAD_FILE_H

#include <pthread.h>

#include "unit_file.h"
#include "../zero.h"

struct zpp_unit_grad;

/* Part of the coordinator, for the store nvme (grad_store.h); `unit_file` NULL: shards are in memory. */
struct zpp_grad_file {
    zpp_unit_file *unit_file;
    pthread_mutex_t lock; /* guards open_bytes, and what comes to memory or goes: reductions open, steps drop */
    size_t open_bytes, bound_bytes;
    bool keeps; /* this backward: what is reduced stays until it is dropped */
    struct zpp_unit_grad *oldest, **newest; /* being written */
    zpp_status status;                      /* the first failure */
    struct zpp_err err;
    struct zpp_aio_fault fault;
};

enum zpp_grad_file_state { ZPP_GRAD_FILE_ON_DISK, ZPP_GRAD_FILE_READING, ZPP_GRAD_FILE_LOADED, ZPP_GRAD_FILE_WRITING };

#endif
