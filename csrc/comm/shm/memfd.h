/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared memory that has no name: a memfd, sealed so that no peer can shrink it under a reader (which would be
 * SIGBUS), handed over by descriptor. The kernel frees it with its last mapping, however the processes die.
 */
#ifndef ZPP_COMM_MEMFD_H
#define ZPP_COMM_MEMFD_H

#include "../../base/status.h"

/* New descriptor (close it) of `bytes` zero bytes, close-on-exec, size sealed. `label` shows in /proc/PID/maps. */
zpp_status zpp_memfd_create(const char *label, size_t bytes, int *fd, struct zpp_err *err);
/* Map a descriptor of our own or of a peer, read and write; refused unless it is `bytes` long and sealed. Unmap with
 * zpp_memfd_unmap. */
zpp_status zpp_memfd_map(int fd, size_t bytes, void **base, struct zpp_err *err);
void zpp_memfd_unmap(void *base, size_t bytes); /* NULL is allowed */
/* Return pages to the system; they then read as zero in every process. Page-aligned. */
void zpp_memfd_punch(void *base, size_t bytes);

#endif
