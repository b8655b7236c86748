/* SPDX-License-Identifier: Apache-2.0
 *
 * The size of a page of memory (mem.h): asked once. A file of its own, so that a test program can give another answer.
 */
#include <stdatomic.h>
#include <unistd.h>

#include "mem.h"

size_t zpp_page_bytes(void) {
    static _Atomic size_t known;
    size_t bytes = atomic_load_explicit(&known, memory_order_relaxed); /* every thread stores the same number */
    if (bytes) return bytes;
    const long asked = sysconf(_SC_PAGESIZE);
    bytes = asked > 0 ? (size_t)asked : ZPP_BLOCK_BYTES;
    atomic_store_explicit(&known, bytes, memory_order_relaxed);
    return bytes;
}
