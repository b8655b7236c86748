/* SPDX-License-Identifier: Apache-2.0
 *
 * The order of requests that touch the same bytes of one file, one of them a write: the later waits for the earlier,
 * whatever their priorities, so that a prefetch never overtakes the write-back it reads. Outstanding requests are
 * listed by where they start, so that thousands of small ones cost a look at a few.
 *
 * A file is what the disk calls one: a link to it, another spelling of its path, and a second opening (for reading
 * first, for writing then) share one list.
 *
 * Where a file has checksums, requests collide when they touch the same page: a read checks all of a page, and so must
 * not meet a neighbour's write in the middle of it.
 */
#include <stdlib.h>

#include "../base/mem.h"
#include "internal.h"

enum { NARROW_SHIFT = 20 /* requests up to 1 MiB are listed by the mebibyte that they start in */ };

bool zpp_aio_join_order(zpp_aio *aio, struct zpp_file *file) {
    const struct zpp_file_part *part = &file->parts[0];
    struct zpp_aio_order *order = aio->orders;
    if (file->order) return true;
    while (order && (order->device != part->device || order->inode != part->inode ||
                     order->parts_count != file->parts_count))
        order = order->next;
    if (!order) {
        order = calloc(1, sizeof *order);
        if (!order) return false;
        order->next = aio->orders;
        order->device = part->device;
        order->inode = part->inode;
        order->parts_count = file->parts_count;
        aio->orders = order;
    }
    ++order->refs;
    file->order = order;
    return true;
}

void zpp_aio_leave_order(zpp_aio *aio, struct zpp_file *file) {
    struct zpp_aio_order *order = file->order, **link = &aio->orders;
    file->order = NULL;
    if (!order || --order->refs) return;
    while (*link != order) link = &(*link)->next;
    *link = order->next;
    free(order);
}

static zpp_aio_request **hazard_list(struct zpp_aio_order *order, const zpp_aio_request *request) {
    if (request->bytes > (size_t)1 << NARROW_SHIFT) return &order->wide;
    return &order->narrow[(request->offset_bytes >> NARROW_SHIFT) % ZPP_AIO_HAZARD_LISTS];
}

/* `unit`: a power of two. */
static bool collide(const zpp_aio_request *a, const zpp_aio_request *b, uint64_t unit) {
    const uint64_t a_end = (a->offset_bytes + a->bytes + unit - 1) & ~(unit - 1);
    const uint64_t b_end = (b->offset_bytes + b->bytes + unit - 1) & ~(unit - 1);
    return (a->write || b->write) && a->offset_bytes < b_end && b->offset_bytes < a_end;
}

/* Adds to `later` an edge from each request of the list that it collides with; false: no memory. */
static bool hold_for(zpp_aio_request *list, zpp_aio_request *later, uint64_t unit) {
    for (zpp_aio_request *earlier = list; earlier; earlier = earlier->hazard_next) {
        if (!collide(earlier, later, unit)) continue;
        struct zpp_aio_edge *edge = malloc(sizeof *edge);
        if (!edge) return false;
        *edge = (struct zpp_aio_edge){earlier->edges, later};
        earlier->edges = edge;
        ++later->held;
        ++later->refs;
    }
    return true;
}

bool zpp_aio_hold(struct zpp_file *file, zpp_aio_request *later) {
    const uint64_t unit = file->summed ? ZPP_PAGE_BYTES : 1;
    if (!hold_for(file->order->wide, later, unit)) return false;
    const uint64_t first = later->offset_bytes >> NARROW_SHIFT;
    const uint64_t last = (later->offset_bytes + later->bytes - 1) >> NARROW_SHIFT;
    /* A narrow request that reaches into the first mebibyte may start in the one before. */
    const uint64_t from = first ? first - 1 : 0, lists = last - from + 1;
    for (uint64_t index = 0; index < lists && index < ZPP_AIO_HAZARD_LISTS; ++index) {
        if (!hold_for(file->order->narrow[(from + index) % ZPP_AIO_HAZARD_LISTS], later, unit)) return false;
    }
    return true;
}

void zpp_aio_list(struct zpp_file *file, zpp_aio_request *request) {
    zpp_aio_request **list = hazard_list(file->order, request);
    request->hazard_next = *list;
    request->hazard_link = list;
    if (*list) (*list)->hazard_link = &request->hazard_next;
    *list = request;
}

void zpp_aio_unlist(zpp_aio_request *request) {
    *request->hazard_link = request->hazard_next;
    if (request->hazard_next) request->hazard_next->hazard_link = request->hazard_link;
}

void zpp_aio_let_later_go(zpp_aio *aio, zpp_aio_request *request) {
    while (request->edges) {
        struct zpp_aio_edge *edge = request->edges;
        request->edges = edge->next;
        zpp_aio_request *later = edge->later;
        if (--later->held == 0 && !atomic_load(&later->done)) zpp_aio_enqueue(aio, later);
        zpp_aio_unref(later);
        free(edge);
    }
}

/* Edges made for a request that could not begin: take them off again. */
void zpp_aio_unhold(zpp_aio *aio, const zpp_aio_request *request) {
    for (zpp_aio_request *earlier = aio->first; earlier; earlier = earlier->next) {
        for (struct zpp_aio_edge **link = &earlier->edges; *link;) {
            struct zpp_aio_edge *edge = *link;
            if (edge->later == request) {
                *link = edge->next;
                free(edge);
            } else {
                link = &edge->next;
            }
        }
    }
}
