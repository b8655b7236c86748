/* SPDX-License-Identifier: Apache-2.0
 *
 * Lists of arrays split over threads: lists.h. All items together are one line of bytes, cut in equal pieces.
 */
#include "lists.h"

#include <stdlib.h>

enum {
    PIECE_BYTES = 64 * 1024, /* no piece is smaller: below, a hand-over costs more than the work */
    ITEMS_ON_STACK = 256,
};

struct place {
    size_t start_bytes; /* on the line */
    struct zpp_list_item item;
};

struct job {
    const struct place *places; /* [count + 1]: the last is the line's end */
    size_t first_index, count;
    zpp_list_body_fn body;
    const void *arg;
};

/* The first item that ends after `at`. */
static size_t item_at(const struct job *job, size_t at) {
    size_t low = 0, high = job->count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (job->places[middle + 1].start_bytes > at) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* The element of item k at which a cut at byte `at` of the line falls. */
static size_t cut_elems(const struct job *job, size_t k, size_t at) {
    const struct place *place = &job->places[k];
    if (at <= place->start_bytes) return 0;
    if (at >= place[1].start_bytes) return place->item.elems;
    return zpp_moments_cut(&place->item.how, (at - place->start_bytes) / place->item.elem_bytes);
}

static void run_piece(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    for (size_t k = item_at(job, begin); k < job->count && job->places[k].start_bytes < end; ++k) {
        const size_t first = cut_elems(job, k, begin), last = cut_elems(job, k, end);
        if (first < last) job->body(job->first_index + k, first, last, job->arg);
    }
}

void zpp_list_run(size_t items_count, zpp_list_item_fn item_of, zpp_list_body_fn body, const void *arg,
                  zpp_pool *pool) {
    struct place on_stack[ITEMS_ON_STACK + 1];
    struct place *allocated = NULL;
    if (items_count > ITEMS_ON_STACK) allocated = malloc((items_count + 1) * sizeof *allocated);
    struct place *const places = allocated ? allocated : on_stack;
    /* Without memory for the table the items go in groups that fit the stack: only more calls. */
    const size_t room = allocated ? items_count : ITEMS_ON_STACK;
    for (size_t done = 0; done < items_count; done += room) {
        const size_t count = items_count - done < room ? items_count - done : room;
        size_t at = 0;
        for (size_t k = 0; k < count; ++k) {
            places[k] = (struct place){ at, item_of(done + k, arg) };
            at += places[k].item.elems * places[k].item.elem_bytes;
        }
        places[count].start_bytes = at;
        struct job job = { places, done, count, body, arg };
        zpp_pool_run(pool, at, PIECE_BYTES, run_piece, &job);
    }
    free(allocated);
}
