/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups of one process that end together. The ranks of a job meet in several groups: a pipeline's stages in one, the
 * ranks that partition a stage in another, all of them in a third. A rank that dies is a member of some of them only,
 * and whoever waits in another one would wait for a rank that has stopped, or name one that left because of the death.
 * So the first comm error of a group becomes the comm error of all groups that are linked with it: when this process
 * finds a rank lost, at each check of a wait in any of them (about every 100 ms), and before this rank leaves one.
 *
 * A rank that leaves also looks for dead peers first. Its reason to leave may be an error that another library raised
 * because of the death, and peers that wait for this rank have to hear of the cause.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tcp/net.h"

struct zpp_linked {
    pthread_mutex_t lock; /* the list; comm_error_lock and control_link_lock are taken inside */
    struct zpp_comm *first;
    int holders; /* groups that were added and are not destroyed */
};

static struct zpp_linked *linked_of(const struct zpp_comm *comm) { return atomic_load(&comm->linked); }

/* Return what `to` calls the rank that `from` calls `rank`. */
static int renumber(const struct zpp_comm *from, int rank, const struct zpp_comm *to) {
    const int label = zpp_label(from, rank);
    for (int r = 0; r < to->ranks; r++)
        if (rank >= 0 && to->job_rank[r] == label) return r;
    return label < 0 ? ZPP_NO_RANK : ZPP_OUTSIDE + label;
}

/* Make the error of the first member that has one the error of all. The caller holds the lock. */
static bool spread(struct zpp_linked *linked) {
    struct zpp_comm_error error;
    struct zpp_comm *from = linked->first;
    while (from && !zpp_comm_error_read(from, &error)) from = from->next_linked;
    if (!from) return false;
    for (struct zpp_comm *to = linked->first; to; to = to->next_linked)
        if (to != from) zpp_comm_pass_on(to, error.status, renumber(from, error.failed_rank, to), error.text);
    return true;
}

void zpp_linked_spread(struct zpp_comm *part) {
    struct zpp_comm *comm = part->outer ? part->outer : part;
    struct zpp_linked *linked = linked_of(comm);
    if (!linked || zpp_comm_forked(comm)) return;
    pthread_mutex_lock(&linked->lock);
    (void)spread(linked);
    pthread_mutex_unlock(&linked->lock);
}

void zpp_comm_abort(zpp_comm *comm, const char *message) {
    struct zpp_err standing = ZPP_ERR_INIT;
    if (zpp_comm_forked(comm)) return;
    (void)zpp_comm_fail(comm, ZPP_ABORTED, comm->rank, &standing, "comm: rank %d aborted group \"%s\": %s",
                        zpp_label(comm, comm->rank), comm->name, message ? message : "no reason given");
    zpp_linked_spread(comm);
}

static bool died(const struct zpp_comm *comm, int rank) {
    return !zpp_peer_left(comm, rank) && zpp_peer_gone(comm, rank) && !zpp_peer_left(comm, rank);
}

/* Record the first dead rank of a group. The text is that of the group in which it is found. */
static bool record_dead(struct zpp_comm *comm) {
    char text[ZPP_ERR_TEXT_BYTES];
    for (int r = 0; r < comm->ranks; r++) {
        if (r == comm->rank || !died(comm, r)) continue;
        snprintf(text, sizeof text, "comm: rank %d (process %d) of group \"%s\" died; rank %d found it dead",
                 zpp_label(comm, r), (int)comm->peer[r].pid, comm->name, zpp_label(comm, comm->rank));
        zpp_comm_pass_on(comm, ZPP_PEER, r, text);
        return true;
    }
    return false;
}

void zpp_comm_look_for_dead(zpp_comm *comm) {
    struct zpp_linked *linked = linked_of(comm);
    struct zpp_comm_error error;
    if (zpp_comm_forked(comm)) return;
    if (!linked) {
        if (!zpp_comm_error_read(comm, &error)) (void)record_dead(comm);
        return;
    }
    pthread_mutex_lock(&linked->lock);
    if (!spread(linked)) {
        struct zpp_comm *at = linked->first;
        while (at && !record_dead(at)) at = at->next_linked;
        (void)spread(linked);
    }
    pthread_mutex_unlock(&linked->lock);
}

/* The caller holds the lock. */
static void add(struct zpp_linked *linked, struct zpp_comm *comm) {
    comm->next_linked = linked->first;
    linked->first = comm;
    linked->holders++;
    atomic_store(&comm->linked, linked);
}

static zpp_status make(struct zpp_comm *comm, struct zpp_err *err) {
    struct zpp_linked *linked = calloc(1, sizeof *linked);
    if (!linked) return zpp_fail(err, ZPP_NOMEM, "comm: no memory to link group \"%s\" with others", comm->name);
    pthread_mutex_init(&linked->lock, NULL);
    add(linked, comm);
    return ZPP_OK;
}

zpp_status zpp_comm_link(zpp_comm *comm, zpp_comm *with, struct zpp_err *err) {
    if (linked_of(comm) || comm == with) return ZPP_OK;
    const zpp_status status = linked_of(with) ? ZPP_OK : make(with, err);
    if (status != ZPP_OK) return status;
    struct zpp_linked *linked = linked_of(with);
    pthread_mutex_lock(&linked->lock);
    add(linked, comm);
    pthread_mutex_unlock(&linked->lock);
    return ZPP_OK;
}

void zpp_linked_remove(struct zpp_comm *comm) {
    struct zpp_linked *linked = linked_of(comm);
    if (!linked) return;
    pthread_mutex_lock(&linked->lock);
    struct zpp_comm **at = &linked->first;
    while (*at != comm) at = &(*at)->next_linked;
    *at = comm->next_linked;
    pthread_mutex_unlock(&linked->lock);
}

void zpp_linked_drop(struct zpp_comm *comm) {
    struct zpp_linked *linked = linked_of(comm);
    if (!linked) return;
    pthread_mutex_lock(&linked->lock);
    const bool last = --linked->holders == 0;
    pthread_mutex_unlock(&linked->lock);
    if (!last) return;
    pthread_mutex_destroy(&linked->lock);
    free(linked);
}
