/* SPDX-License-Identifier: Apache-2.0
 *
 * Splits a range over threads of another library (torch's, in the product), so that two sets of threads do not compete
 * for the cores: docs/design/0002. Nested calls from inside a body run in the calling thread.
 */
#ifndef ZPP_BASE_POOL_H
#define ZPP_BASE_POOL_H

#include "status.h"

typedef struct zpp_pool zpp_pool;

/* Calls each(arg) in up to `threads` threads at once, in at least one, and returns when all have returned. */
typedef void (*zpp_spread_fn)(int threads, void (*each)(void *arg), void *arg);

/* `threads` counts the caller. New; free with zpp_pool_destroy (NULL is fine). After fork() everything runs in the
 * child's caller: the threads stayed in the parent. */
zpp_status zpp_pool_create(zpp_spread_fn spread, int threads, zpp_pool **out, struct zpp_err *err);
void zpp_pool_destroy(zpp_pool *pool);
int zpp_pool_threads(const zpp_pool *pool); /* 1 for NULL */

/* Call body(begin, end, arg) over disjoint pieces that cover [0, items), each a multiple of `grain` long but the last.
 * Returns when all are done. pool may be NULL. One caller at a time per pool; a second waits. */
typedef void (*zpp_range_fn)(size_t begin, size_t end, void *arg);
void zpp_pool_run(zpp_pool *pool, size_t items, size_t grain, zpp_range_fn body, void *arg);

#endif
