/* SPDX-License-Identifier: Apache-2.0
 *
 * The order between the streams of several ranks, without a host that waits: 64-bit words in pinned memory that the
 * ranks of a host share. One stream of a rank writes a word, and any stream of any rank waits for it (base/device.h).
 * What each word stands for is the user's: zero/on_device.h and rows_device.c.
 *
 * A rank that dies or stops never writes its words again, so a stream would wait for ever. A thread of this file looks
 * at them every 20 ms. If a rank is gone, or did not reach a word within the communicator's timeout, or the group has
 * ended for another reason, the thread records the comm error that names the rank, sets the halt word of every rank,
 * and then releases all waits. Kernels behind a released wait look at the halt word and write nothing. A live stream
 * may write its words once more after that, so the thread repeats the release until the counters are destroyed.
 *
 * Only awaits whose signals all hosts have enqueued already may be enqueued. So no two queues of two GPUs can wait for
 * each other, also where all streams of a GPU share one queue.
 *
 * Threads: any for different streams.
 */
#ifndef ZPP_COMM_COUNTERS_H
#define ZPP_COMM_COUNTERS_H

#include "../base/device.h"
#include "comm.h"

enum { ZPP_COUNTERS_MOST = 8 }; /* words of a rank */

typedef struct zpp_counters zpp_counters;
/* Collective. `doing` [words] says what a stream waits for at each word, for messages; it is borrowed. New; free with
 * zpp_counters_destroy, after all work that waits for them. */
zpp_status zpp_counters_create(zpp_comm *comm, zpp_device *device, const char *const *doing, int words,
                               zpp_counters **out, struct zpp_err *err);
void zpp_counters_destroy(zpp_counters *counters); /* NULL is fine */

/* Write this rank's word after the operations of the stream so far. Values of one word grow by one at a time. */
zpp_status zpp_counters_signal(zpp_counters *counters, zpp_stream *stream, int word, uint64_t value,
                               struct zpp_err *err);
/* Make later operations of the stream run after every rank's word reached `value`. */
zpp_status zpp_counters_await(zpp_counters *counters, zpp_stream *stream, int word, uint64_t value,
                              struct zpp_err *err);
/* The same for `count` ranks only. */
zpp_status zpp_counters_await_some(zpp_counters *counters, zpp_stream *stream, int word, uint64_t value,
                                   const int *ranks, int count, struct zpp_err *err);
/* True if every rank's word has reached `value` now. */
bool zpp_counters_reached(const zpp_counters *counters, int word, uint64_t value);
/* For kernels: a word of this rank that is not 0 once waits were released. */
const uint64_t *zpp_counters_halt(const zpp_counters *counters);

#endif
