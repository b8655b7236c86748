/* SPDX-License-Identifier: Apache-2.0
 *
 * Send and receive with tags. Each ordered pair of ranks has a channel (struct zpp_channel_ops), made at the first
 * send; a message is a header and its bytes. A message without a matching receive is moved out of the ring into memory
 * of its own, so one tag never blocks another, and two ranks that both send first never block each other. A receive
 * matches the oldest message of its source (or of any source) with its tag.
 *
 * A thread that waits for a transfer moves all transfers; while none waits, a thread of the group moves those that are
 * pending. Each rank has one doorbell counter: peers raise it after they wrote to a channel or read from one. `lock`
 * guards everything in struct zpp_p2p and all transfers.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../base/timeline.h"
#include "internal.h"
#include "tcp/net.h"

/* A thread that has other work besides (zpp_idle_step) looks at it so often: no doorbell rings for that. */
enum { IDLE_LOOK_NS = 200000 };
enum { GRACE_NS = 300000 }; /* most transfers get a waiting thread at once, which the group's thread leaves them to */

static const uint64_t MESSAGE_BYTES_MAX = (uint64_t)1 << 40; /* a larger size means a damaged header */

struct header {
    uint64_t tag, bytes;
};

struct zpp_transfer {
    struct zpp_transfer *next; /* in its list: sends to one rank, or receives */
    struct zpp_p2p *p2p;
    bool is_send, started, held;
    int peer; /* receive from any source: ZPP_NO_RANK until a message matched */
    struct header header;
    uint8_t *data;
    size_t moved_bytes;
    bool header_written;
    zpp_status status; /* AGAIN until it is finished */
    struct zpp_err err;
};

/* A message that came before its receive. */
struct early {
    struct early *next;
    struct header header;
    size_t got_bytes;
    uint8_t data[];
};

struct peer {
    const struct zpp_channel_ops *by; /* shared memory, or a connection to another host */
    void *out, *in;
    struct zpp_transfer *sends, **sends_end;
    struct early *early, **early_end;
    /* The incoming message. If `coming`, its header is complete; its bytes go to a transfer, to an early message, or
     * (both NULL) are discarded. */
    bool coming;
    struct header header;
    size_t got_bytes;
    struct zpp_transfer *into;
    struct early *into_early;
};

struct zpp_p2p {
    struct zpp_comm *comm; /* NULL once it is destroyed */
    pthread_mutex_t lock;
    pthread_cond_t wanted;
    pthread_t thread;
    bool has_thread, ending;
    int waiters, pending, holders;
    struct zpp_transfer *receives, **receives_end;
    int ranks;
    struct peer peer[ZPP_RANKS_MAX];
};

/* --- finishing --------------------------------------------------------------------------------------------------- */

static void finish(struct zpp_p2p *p2p, struct zpp_transfer *transfer, zpp_status status) {
    transfer->status = status;
    p2p->pending--;
    if (!transfer->held) free(transfer);
}

static void ring(const struct zpp_comm *comm, int rank) { zpp_counter_add(&zpp_control(comm, rank)->doorbell.counter); }

static void remove_receive(struct zpp_p2p *p2p, const struct zpp_transfer *transfer) {
    struct zpp_transfer **at = &p2p->receives;
    while (*at && *at != transfer) at = &(*at)->next;
    if (!*at) return;
    *at = transfer->next;
    if (p2p->receives_end == &transfer->next) p2p->receives_end = at;
}

static zpp_status check_size(struct zpp_p2p *p2p, struct zpp_transfer *transfer, int source, size_t bytes) {
    if (transfer->header.bytes == bytes) return ZPP_OK;
    const struct zpp_comm *comm = p2p->comm;
    return zpp_fail_rank(&transfer->err, ZPP_PEER, zpp_label(comm, source),
                         "comm: rank %d sent %zu bytes with tag %" PRIu64
                         " to rank %d of group \"%s\", whose receive expects %" PRIu64 "; both must be one size",
                         zpp_label(comm, source), bytes, transfer->header.tag, zpp_label(comm, comm->rank), comm->name,
                         transfer->header.bytes);
}

/* --- sending ----------------------------------------------------------------------------------------------------- */

static bool write_some(const struct peer *peer, struct zpp_transfer *transfer) {
    if (!transfer->header_written) {
        if (peer->by->writable(peer->out) < sizeof transfer->header) return false;
        peer->by->write(peer->out, &transfer->header, sizeof transfer->header);
        transfer->header_written = true;
    }
    const size_t left = transfer->header.bytes - transfer->moved_bytes;
    transfer->moved_bytes += peer->by->write(peer->out, transfer->data + transfer->moved_bytes, left);
    return true;
}

static bool push(struct zpp_p2p *p2p, int rank) {
    struct peer *peer = &p2p->peer[rank];
    bool moved = false;
    while (peer->sends) {
        struct zpp_transfer *transfer = peer->sends;
        const size_t before = transfer->moved_bytes;
        const bool wrote =
            write_some(peer, transfer) && (transfer->moved_bytes > before || !transfer->header.bytes);
        const bool whole = transfer->header_written && transfer->moved_bytes == transfer->header.bytes &&
                           peer->by->flushed(peer->out);
        moved = moved || wrote;
        if (!whole) break;
        peer->sends = transfer->next;
        if (!peer->sends) peer->sends_end = &peer->sends;
        finish(p2p, transfer, ZPP_OK);
        moved = true;
    }
    return moved;
}

/* --- receiving --------------------------------------------------------------------------------------------------- */

static struct zpp_transfer *match(struct zpp_p2p *p2p, int source, uint64_t tag) {
    for (struct zpp_transfer *transfer = p2p->receives; transfer; transfer = transfer->next)
        if ((transfer->peer == source || transfer->peer == ZPP_NO_RANK) && transfer->header.tag == tag) return transfer;
    return NULL;
}

/* Choose the destination of the message that begins now. */
static zpp_status begin_message(struct zpp_p2p *p2p, int source, struct zpp_err *err) {
    struct peer *peer = &p2p->peer[source];
    peer->by->read(peer->in, &peer->header, sizeof peer->header);
    peer->got_bytes = 0;
    peer->into_early = NULL;
    peer->into = match(p2p, source, peer->header.tag);
    if (peer->into) {
        struct zpp_transfer *transfer = peer->into;
        remove_receive(p2p, transfer);
        transfer->peer = source;
        if (check_size(p2p, transfer, source, peer->header.bytes) != ZPP_OK) {
            peer->into = NULL; /* its bytes are discarded */
            finish(p2p, transfer, ZPP_PEER);
        }
    } else {
        const bool possible = peer->header.bytes <= MESSAGE_BYTES_MAX;
        struct early *early = possible ? malloc(sizeof *early + peer->header.bytes) : NULL;
        if (!possible)
            return zpp_comm_fail(p2p->comm, ZPP_PEER, source, err,
                                 "comm: rank %d announced a message of %" PRIu64
                                 " bytes to rank %d of group \"%s\", wanted at most %" PRIu64,
                                 zpp_label(p2p->comm, source), peer->header.bytes,
                                 zpp_label(p2p->comm, p2p->comm->rank), p2p->comm->name, MESSAGE_BYTES_MAX);
        if (!early)
            return zpp_comm_fail(p2p->comm, ZPP_NOMEM, p2p->comm->rank, err,
                                 "comm: rank %d of group \"%s\" has no memory for a message of %" PRIu64
                                 " bytes of rank %d",
                                 zpp_label(p2p->comm, p2p->comm->rank), p2p->comm->name, peer->header.bytes,
                                 zpp_label(p2p->comm, source));
        *early = (struct early){.header = peer->header};
        *peer->early_end = early;
        peer->early_end = &early->next;
        peer->into_early = early;
    }
    peer->coming = true;
    return ZPP_OK;
}

static void end_message(struct zpp_p2p *p2p, int source) {
    struct peer *peer = &p2p->peer[source];
    peer->coming = false;
    zpp_count_call(p2p->comm, ZPP_TRAFFIC_P2P, peer->header.bytes);
    if (zpp_net_elsewhere(p2p->comm, source))
        atomic_fetch_add(&p2p->comm->net->network_bytes[ZPP_TRAFFIC_P2P], peer->header.bytes);
    if (peer->into) finish(p2p, peer->into, ZPP_OK);
    peer->into = NULL;
    peer->into_early = NULL;
}

static zpp_status pull(struct zpp_p2p *p2p, int source, bool *moved, struct zpp_err *err) {
    struct peer *peer = &p2p->peer[source];
    while (peer->coming || peer->by->readable(peer->in) >= sizeof(struct header)) {
        zpp_status status = peer->coming ? ZPP_OK : begin_message(p2p, source, err);
        if (status != ZPP_OK) return status;
        uint8_t *to = peer->into ? peer->into->data : peer->into_early ? peer->into_early->data : NULL;
        const size_t got =
            peer->by->read(peer->in, to ? to + peer->got_bytes : NULL, peer->header.bytes - peer->got_bytes);
        peer->got_bytes += got;
        if (peer->into_early) peer->into_early->got_bytes = peer->got_bytes;
        *moved = *moved || got;
        if (peer->got_bytes < peer->header.bytes) return ZPP_OK;
        end_message(p2p, source);
        *moved = true;
    }
    return ZPP_OK;
}

/* Match a new receive with an early message. */
static void match_early(struct zpp_p2p *p2p, struct zpp_transfer *transfer, int source) {
    struct peer *peer = &p2p->peer[source];
    struct early **at = &peer->early;
    while (*at && (*at)->header.tag != transfer->header.tag) at = &(*at)->next;
    struct early *early = *at;
    if (!early) return;
    remove_receive(p2p, transfer);
    transfer->peer = source;
    *at = early->next;
    if (!early->next) peer->early_end = at;
    const bool whole = early->got_bytes == early->header.bytes && peer->into_early != early;
    if (check_size(p2p, transfer, source, early->header.bytes) != ZPP_OK) {
        if (!whole) peer->into_early = NULL;
        finish(p2p, transfer, ZPP_PEER);
    } else {
        memcpy(transfer->data, early->data, early->got_bytes);
        if (whole)
            finish(p2p, transfer, ZPP_OK);
        else { /* the rest goes straight to the receiver */
            peer->into_early = NULL;
            peer->into = transfer;
        }
    }
    free(early);
}

/* --- progress ---------------------------------------------------------------------------------------------------- */

static void fail_all(struct zpp_p2p *p2p, const struct zpp_err *err) {
    for (int r = 0; r < p2p->ranks; r++) {
        struct peer *peer = &p2p->peer[r];
        for (struct zpp_transfer *transfer = peer->sends, *next; transfer; transfer = next) {
            next = transfer->next;
            transfer->err = *err;
            finish(p2p, transfer, err->status);
        }
        peer->sends = NULL;
        peer->sends_end = &peer->sends;
        if (peer->into) {
            peer->into->err = *err;
            finish(p2p, peer->into, err->status);
        }
        peer->into = NULL;
    }
    for (struct zpp_transfer *transfer = p2p->receives, *next; transfer; transfer = next) {
        next = transfer->next;
        transfer->err = *err;
        finish(p2p, transfer, err->status);
    }
    p2p->receives = NULL;
    p2p->receives_end = &p2p->receives;
}

/* Without this check an overwritten counter would look like an endless stream of empty messages. */
static zpp_status check_rings(struct zpp_p2p *p2p, int rank, struct zpp_err *err) {
    const struct peer *peer = &p2p->peer[rank];
    if (!(peer->in && peer->by->damaged(peer->in)) && !(peer->out && peer->by->damaged(peer->out))) return ZPP_OK;
    return zpp_comm_fail(p2p->comm, ZPP_PEER, rank, err,
                         "comm: the channel between ranks %d and %d of group \"%s\" is damaged: its counters are "
                         "further "
                         "apart than it is long",
                         zpp_label(p2p->comm, p2p->comm->rank), zpp_label(p2p->comm, rank), p2p->comm->name);
}

static zpp_status progress_with(struct zpp_p2p *p2p, int rank, bool *moved, struct zpp_err *err) {
    struct peer *peer = &p2p->peer[rank];
    zpp_status status = ZPP_OK;
    if (!peer->in) status = peer->by->accept(p2p->comm, rank, &peer->in, err);
    if (status == ZPP_OK || status == ZPP_AGAIN) status = check_rings(p2p, rank, err);
    if (status == ZPP_OK && peer->in) status = pull(p2p, rank, moved, err);
    if (status == ZPP_OK && peer->out && push(p2p, rank)) *moved = true;
    return status;
}

/* Move all bytes that can move now. Called with the lock held. */
static bool progress(struct zpp_p2p *p2p) {
    struct zpp_comm *comm = p2p->comm;
    struct zpp_err err = ZPP_ERR_INIT;
    bool any = false;
    zpp_status status = ZPP_OK;
    for (int r = 0; status == ZPP_OK && r < p2p->ranks; r++) {
        bool moved = false;
        if (r == comm->rank) continue;
        status = progress_with(p2p, r, &moved, &err);
        if (moved) ring(comm, r);
        any = any || moved;
    }
    if (status != ZPP_OK) fail_all(p2p, &err);
    if (any) ring(comm, comm->rank); /* other threads of this rank may wait for transfers that this one moved */
    return any;
}

static void describe(const void *ctx, char *text, size_t capacity) {
    const struct zpp_transfer *transfer = ctx;
    snprintf(text, capacity, "%s(%" PRIu64 " bytes, tag %" PRIu64 ")", transfer->is_send ? "send" : "recv",
             transfer->header.bytes, transfer->header.tag);
}

/* Return the rank that a transfer waits for, and whether it is gone; for a receive from any source, a rank that is
 * gone, if there is one. */
static int awaited(const struct zpp_comm *comm, const struct zpp_transfer *transfer, bool *gone) {
    int first = transfer->peer;
    for (int r = 0; r < comm->ranks; r++) {
        if (r == comm->rank || (transfer->peer != ZPP_NO_RANK && r != transfer->peer)) continue;
        if (first == ZPP_NO_RANK) first = r;
        *gone = zpp_peer_gone(comm, r);
        if (*gone) return r;
    }
    return first;
}

static zpp_status answer_of(const struct zpp_transfer *transfer, struct zpp_err *err) {
    if (transfer->status != ZPP_OK && err) *err = transfer->err;
    return transfer->status;
}

/* One wait for a transfer. Its checks (a dead peer, a comm error, a signal, the timeout) run after each sleep, and also
 * where the bytes of other transfers keep the thread awake. */
enum { BUSY_ROUNDS = 64, DRAINED_CHECKS = 4 };
struct transfer_wait {
    struct zpp_wait_ctx ctx;
    size_t seen_bytes;    /* of the transfer, at the last check: its timeout limits silence */
    unsigned rounds;      /* since the last check */
    unsigned gone_checks; /* in a row that found the peer gone: by then all that it had sent was read */
    bool slept;
};

static zpp_status check_wait(struct transfer_wait *waiting, size_t moved_bytes, int rank, bool gone, bool moved,
                             struct zpp_err *err) {
    if (moved_bytes != waiting->seen_bytes) waiting->ctx.start_ns = waiting->ctx.check_ns = waiting->ctx.log_ns = 0;
    waiting->seen_bytes = moved_bytes;
    waiting->rounds = 0;
    waiting->gone_checks = gone ? waiting->gone_checks + 1 : 0;
    return zpp_wait_check(&waiting->ctx, rank, gone && (!moved || waiting->gone_checks >= DRAINED_CHECKS), err);
}

/* Move bytes; then check, and sleep where nothing moved. Called with the lock held, which it gives up for both. */
static zpp_status wait_round(zpp_transfer *transfer, struct transfer_wait *waiting, struct zpp_err *err) {
    struct zpp_p2p *p2p = transfer->p2p;
    struct zpp_counter *bell = &zpp_control(p2p->comm, p2p->comm->rank)->doorbell.counter;
    const uint32_t heard = atomic_load(&bell->value);
    const bool checks = waiting->slept || ++waiting->rounds >= BUSY_ROUNDS;
    bool gone = false;
    const int rank = checks ? awaited(p2p->comm, transfer, &gone) : ZPP_NO_RANK; /* before its last bytes are read */
    const bool moved = progress(p2p);
    const size_t moved_bytes = transfer->moved_bytes;
    zpp_status status = ZPP_OK;
    if (transfer->status != ZPP_AGAIN || (moved && !checks)) return ZPP_OK;
    pthread_mutex_unlock(&p2p->lock);
    if (checks) status = check_wait(waiting, moved_bytes, rank, gone, moved, err);
    const uint64_t sleep_ns = status == ZPP_OK && !moved && zpp_idle_step() ? IDLE_LOOK_NS : UINT64_MAX;
    waiting->slept = status == ZPP_OK && !moved && !zpp_counter_sleep(&waiting->ctx, bell, heard + 1, sleep_ns);
    pthread_mutex_lock(&p2p->lock);
    return status;
}

zpp_status zpp_transfer_wait(zpp_transfer *transfer, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_p2p *p2p = transfer->p2p;
    struct transfer_wait waiting = {.ctx = {
        .comm = p2p->comm, .wait = wait, .own_timeout = true, .fatal = true, .describe = describe, .ctx = transfer}};
    zpp_status status = ZPP_OK;
    const uint64_t began_ns = zpp_span_begin();
    pthread_mutex_lock(&p2p->lock);
    p2p->waiters++;
    while (status == ZPP_OK && transfer->status == ZPP_AGAIN) status = wait_round(transfer, &waiting, err);
    p2p->waiters--;
    if (transfer->status != ZPP_AGAIN) status = answer_of(transfer, err);
    if (p2p->pending && !p2p->waiters) pthread_cond_signal(&p2p->wanted);
    pthread_mutex_unlock(&p2p->lock);
    zpp_span_end(began_ns, ZPP_SPAN_WAIT, transfer->is_send ? "for a send" : "for a receive", transfer->header.bytes);
    return status;
}

bool zpp_transfer_finished(zpp_transfer *transfer) {
    struct zpp_p2p *p2p = transfer->p2p;
    pthread_mutex_lock(&p2p->lock);
    if (transfer->status == ZPP_AGAIN && !p2p->ending) (void)progress(p2p);
    const bool finished = transfer->status != ZPP_AGAIN;
    pthread_mutex_unlock(&p2p->lock);
    return finished;
}

int zpp_transfer_peer(zpp_transfer *transfer) {
    pthread_mutex_lock(&transfer->p2p->lock);
    const int peer = transfer->peer;
    pthread_mutex_unlock(&transfer->p2p->lock);
    return peer;
}

/* --- the thread -------------------------------------------------------------------------------------------------- */

static bool needed(const struct zpp_p2p *p2p) { return p2p->pending && !p2p->waiters && !p2p->ending; }

static void *run(void *arg) {
    struct zpp_p2p *p2p = arg;
    struct zpp_comm *comm = p2p->comm;
    struct zpp_counter *bell = &zpp_control(comm, comm->rank)->doorbell.counter;
    struct zpp_wait_ctx wait_ctx = {.comm = comm};
    pthread_mutex_lock(&p2p->lock);
    while (!p2p->ending) {
        while (!needed(p2p) && !p2p->ending) pthread_cond_wait(&p2p->wanted, &p2p->lock);
        const struct timespec until = zpp_moment_in(GRACE_NS);
        (void)pthread_cond_timedwait(&p2p->wanted, &p2p->lock, &until);
        while (needed(p2p)) {
            const uint32_t heard = atomic_load(&bell->value);
            struct zpp_err err = ZPP_ERR_INIT;
            if (progress(p2p)) continue;
            pthread_mutex_unlock(&p2p->lock);
            (void)zpp_counter_sleep(&wait_ctx, bell, heard + 1, UINT64_MAX);
            zpp_linked_spread(comm);
            pthread_mutex_lock(&p2p->lock);
            if (zpp_comm_check(comm, &err) != ZPP_OK) fail_all(p2p, &err);
        }
    }
    pthread_mutex_unlock(&p2p->lock);
    return NULL;
}

/* --- life -------------------------------------------------------------------------------------------------------- */

static void drop(struct zpp_p2p *p2p) { /* called with the lock held; releases it */
    const bool last = --p2p->holders == 0;
    pthread_mutex_unlock(&p2p->lock);
    if (!last) return;
    pthread_cond_destroy(&p2p->wanted);
    pthread_mutex_destroy(&p2p->lock);
    free(p2p);
}

static zpp_status p2p_make(struct zpp_comm *comm, struct zpp_err *err) {
    struct zpp_p2p *p2p = calloc(1, sizeof *p2p);
    if (!p2p) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for sending and receiving");
    p2p->comm = comm;
    p2p->ranks = comm->ranks;
    p2p->holders = 1;
    p2p->receives_end = &p2p->receives;
    for (int r = 0; r < comm->ranks; r++) {
        p2p->peer[r].by = zpp_transport_to(comm, r)->channels;
        p2p->peer[r].sends_end = &p2p->peer[r].sends;
        p2p->peer[r].early_end = &p2p->peer[r].early;
    }
    pthread_mutex_init(&p2p->lock, NULL);
    zpp_cond_init(&p2p->wanted);
    comm->p2p = p2p;
    return ZPP_OK;
}

static zpp_status ready(struct zpp_comm *comm, int peer, struct zpp_err *err) {
    zpp_status status = zpp_comm_check(comm, err);
    if (status != ZPP_OK) return status;
    if (peer < ZPP_NO_RANK || peer >= comm->ranks || peer == comm->rank)
        return zpp_fail(err, ZPP_INVALID,
                        "comm: rank %d of group \"%s\" sends to or receives from rank %d, wanted another rank of 0..%d",
                        comm->rank, comm->name, peer, comm->ranks - 1);
    pthread_mutex_lock(&comm->side_lock);
    if (!comm->p2p) status = p2p_make(comm, err);
    pthread_mutex_unlock(&comm->side_lock);
    return status;
}

/* Start a transfer that was put into its list: move what can move now, and start the group's thread for the rest.
 * Called with the lock held. */
static zpp_status start(struct zpp_p2p *p2p, const struct zpp_transfer *transfer, struct zpp_err *err) {
    (void)progress(p2p);
    if (transfer->status != ZPP_AGAIN) return ZPP_OK;
    if (!p2p->has_thread) {
        const int failed = pthread_create(&p2p->thread, NULL, run, p2p);
        if (failed) return zpp_fail_os(err, failed, "comm: no thread for sending and receiving");
        p2p->has_thread = true;
    }
    if (needed(p2p)) pthread_cond_signal(&p2p->wanted);
    return ZPP_OK;
}

static struct zpp_transfer *transfer_new(struct zpp_p2p *p2p, bool is_send, int peer, uint64_t tag, void *data,
                                         size_t bytes, struct zpp_err *err) {
    struct zpp_transfer *transfer = calloc(1, sizeof *transfer);
    if (!transfer) {
        (void)zpp_fail(err, ZPP_NOMEM, "comm: no memory for a transfer");
        return NULL;
    }
    *transfer = (struct zpp_transfer){.p2p = p2p,
                                      .is_send = is_send,
                                      .held = true,
                                      .peer = peer,
                                      .header = {tag, bytes},
                                      .data = data,
                                      .status = ZPP_AGAIN};
    return transfer;
}

zpp_status zpp_comm_send(zpp_comm *comm, const void *data, size_t bytes, int to, uint64_t tag, zpp_transfer **out,
                         struct zpp_err *err) {
    zpp_status status =
        to == ZPP_NO_RANK ? zpp_fail(err, ZPP_INVALID, "comm: a send to any rank") : ready(comm, to, err);
    if (status != ZPP_OK) return status;
    struct zpp_p2p *p2p = comm->p2p;
    struct zpp_transfer *transfer =
        transfer_new(p2p, true, to, tag, (void *)(uintptr_t)data, bytes, err); /* only read from */
    if (!transfer) return ZPP_NOMEM;
    struct peer *peer = &p2p->peer[to];
    pthread_mutex_lock(&p2p->lock);
    if (!peer->out) status = peer->by->open(comm, to, &peer->out, err);
    if (status == ZPP_OK) {
        *peer->sends_end = transfer;
        peer->sends_end = &transfer->next;
        p2p->pending++;
        p2p->holders++;
        status = start(p2p, transfer, err);
        *out = transfer;
    } else {
        free(transfer);
    }
    pthread_mutex_unlock(&p2p->lock);
    return status;
}

zpp_status zpp_comm_recv(zpp_comm *comm, void *data, size_t bytes, int from, uint64_t tag, zpp_transfer **out,
                         struct zpp_err *err) {
    zpp_status status = ready(comm, from, err);
    if (status != ZPP_OK) return status;
    struct zpp_p2p *p2p = comm->p2p;
    struct zpp_transfer *transfer = transfer_new(p2p, false, from, tag, data, bytes, err);
    if (!transfer) return ZPP_NOMEM;
    pthread_mutex_lock(&p2p->lock);
    *p2p->receives_end = transfer;
    p2p->receives_end = &transfer->next;
    p2p->pending++;
    p2p->holders++;
    for (int r = 0; r < comm->ranks && transfer->status == ZPP_AGAIN && !transfer->moved_bytes; r++)
        if (r == from || (from == ZPP_NO_RANK && transfer->peer == ZPP_NO_RANK)) match_early(p2p, transfer, r);
    status = start(p2p, transfer, err);
    *out = transfer;
    pthread_mutex_unlock(&p2p->lock);
    return status;
}

void zpp_transfer_free(zpp_transfer *transfer) {
    if (!transfer) return;
    struct zpp_p2p *p2p = transfer->p2p;
    pthread_mutex_lock(&p2p->lock);
    transfer->held = false;
    if (transfer->status != ZPP_AGAIN) free(transfer);
    drop(p2p);
}

void zpp_p2p_destroy(struct zpp_comm *comm) {
    struct zpp_p2p *p2p = comm->p2p;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!p2p || zpp_comm_forked(comm)) return;
    pthread_mutex_lock(&p2p->lock);
    p2p->ending = true;
    pthread_cond_signal(&p2p->wanted);
    pthread_mutex_unlock(&p2p->lock);
    ring(comm, comm->rank);
    if (p2p->has_thread) pthread_join(p2p->thread, NULL);
    pthread_mutex_lock(&p2p->lock);
    (void)zpp_fail(&err, ZPP_STATE, "comm: group \"%s\" was closed before a send or receive of rank %d was finished",
                   comm->name, zpp_label(comm, comm->rank));
    fail_all(p2p, &err);
    for (int r = 0; r < p2p->ranks; r++) {
        struct peer *peer = &p2p->peer[r];
        for (struct early *early = peer->early, *next; early; early = next) {
            next = early->next;
            free(early);
        }
        if (peer->out) peer->by->close(peer->out);
        if (peer->in) peer->by->close(peer->in);
    }
    comm->p2p = NULL;
    drop(p2p);
}
