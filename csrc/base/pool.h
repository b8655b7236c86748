/* SPDX-License-Identifier: Apache-2.0
 *
 * A thread pool as an object: splits a range over the caller and its helper threads. Idle helpers spin for a bounded
 * time (about 50 us), then sleep. Nested calls from inside a body run in the calling thread.
 */
#ifndef ZPP_BASE_POOL_H
#define ZPP_BASE_POOL_H

#include "status.h"

typedef struct zpp_pool zpp_pool;

/* `threads` counts the caller: 1 makes no thread at all. New; free with zpp_pool_destroy (joins; NULL is fine).
 * After fork() the child's pool has no helpers and runs everything in the caller. */
zpp_status zpp_pool_create(int threads, zpp_pool **out, struct zpp_err *err);

/* The same over somebody else's threads, so that two sets of them do not fight for the cores: spread calls each(arg) in
 * up to `threads` threads at once, in one at least, and returns when all have returned. */
typedef void (*zpp_spread_fn)(int threads, void (*each)(void *arg), void *arg);
zpp_status zpp_pool_create_over(zpp_spread_fn spread, int threads, zpp_pool **out, struct zpp_err *err);
void zpp_pool_destroy(zpp_pool *pool);
int zpp_pool_threads(const zpp_pool *pool); /* 1 for NULL */

/* Call body(begin, end, arg) over disjoint pieces that cover [0, items), each a multiple of `grain` long but the last.
 * Returns when all are done. pool may be NULL. One caller at a time per pool; a second waits. */
typedef void (*zpp_range_fn)(size_t begin, size_t end, void *arg);
void zpp_pool_run(zpp_pool *pool, size_t items, size_t grain, zpp_range_fn body, void *arg);

#endif
