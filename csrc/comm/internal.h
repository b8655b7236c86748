/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of csrc/comm share: the layout of a rank's control memory and the communicator object.
 *
 * Each rank has one memfd, mapped by all: [struct zpp_control][staging of stage 0][staging of stage 1].
 *   post      two entries, used alternately: a collective's signature and its small payload; `counter` is its sequence
 *             number. Two are enough because a rank posts s + 2 only after it saw every peer's s + 1, which a peer
 *             posts after it has read s. So every collective must wait for every peer's post.
 *   staged    rounds of staging this rank has filled, per stage; slot = round % ZPP_STAGE_SLOTS
 *   taken     rounds of the peers' staging this rank has finished reading, per stage
 *   step      phases passed by collectives that read the peers' tensors in place
 * Counters are never reset; all ranks raise them equally, because signatures are compared first.
 */
#ifndef ZPP_COMM_INTERNAL_H
#define ZPP_COMM_INTERNAL_H

#include <pthread.h>
#include "comm.h"
#include "reduce.h"
#include "futex_counter.h"

enum {
    ZPP_LINE_BYTES = 64,
    ZPP_INLINE_BYTES = 40,   /* payload that travels on the line of its sequence number */
    ZPP_SMALL_BYTES = 16384, /* payload of collectives that need no staging */
    ZPP_PIPELINE_STAGES = 2,
    ZPP_STAGE_SLOTS = 8,
    ZPP_STAGE_BYTES = 256 * 1024, /* one slot */
};

struct zpp_sig {
    uint64_t what; /* op, dtype, reduce op, root: see sig.c */
    uint64_t elems;
};

/* Where the tensor of a large collective lies (arena 0: in none), and rank 0's store policy for its bytes, staged [0]
 * or in place [1] (store_policy.c). */
struct zpp_place {
    uint64_t arena, offset_bytes;
    uint8_t policy[2];
};

/* A store policy: stores are nontemporal (around the cache) unless a bit says cached. SHARED covers what peers read
 * next (a slot, or the shard that they copy), OWN what only this rank reads later (its output). */
enum { ZPP_SHARED_CACHED = 1, ZPP_OWN_CACHED = 2, ZPP_STORE_POLICIES = 4 };
/* What each store policy costs; 0: not tried yet. */
struct zpp_store_costs {
    double ns_per_byte[ZPP_STORE_POLICIES];
    uint32_t calls;
};
enum { ZPP_STORE_POLICY_SIZES = 4 };

struct zpp_post {
    _Alignas(ZPP_LINE_BYTES) struct zpp_counter counter;
    struct zpp_sig sig;
    union {
        uint8_t bytes[ZPP_INLINE_BYTES];
        struct zpp_place place;
    };
};
_Static_assert(sizeof(struct zpp_post) == ZPP_LINE_BYTES, "a post is one cache line");

struct zpp_line_counter {
    _Alignas(ZPP_LINE_BYTES) struct zpp_counter counter;
};

struct zpp_control {
    uint64_t magic;
    uint32_t rank, ranks;
    int32_t pid;
    _Alignas(ZPP_LINE_BYTES) _Atomic uint32_t left;    /* 1: destroyed its communicator */
    _Alignas(ZPP_LINE_BYTES) _Atomic uint64_t comm_error; /* of the group, in rank 0's block only; see comm_error.c */
    char comm_error_text[ZPP_ERR_TEXT_BYTES];             /* the message of the comm error that this rank recorded */
    struct zpp_post post[2];
    struct zpp_line_counter staged[ZPP_PIPELINE_STAGES], taken[ZPP_PIPELINE_STAGES], step;
    struct zpp_line_counter handed[2];    /* of a sparse group's directory: it lies in `small`; ranks that copied it */
    struct zpp_line_counter doorbell;     /* rung by peers that sent or received something (p2p.c) */
    uint64_t counts[2][ZPP_RANKS_MAX];    /* bytes for each peer, alternating like `post` (coll_all_to_all.c) */
    _Alignas(ZPP_LINE_BYTES) uint8_t small[2][ZPP_SMALL_BYTES];
};

/* A message with an optional descriptor, over the socket of a pair; see control_message.c. */
struct zpp_message {
    uint64_t kind, number, a, b;
};
enum {
    ZPP_MESSAGE_REGION = 1,
    ZPP_MESSAGE_ARENA,
    ZPP_MESSAGE_CHANNEL,
    ZPP_MESSAGE_DEVICE_REGION, /* a: what the rank can offer; b: bytes */
    ZPP_MESSAGE_DEVICE_MAPPED, /* a: whether it mapped all */
};
struct zpp_queued_message;

struct zpp_arena; /* arena.c */
struct zpp_async; /* async.c */
struct zpp_p2p;   /* p2p.c */
struct zpp_net;   /* net.h */
struct zpp_door;  /* net_join.c */
struct zpp_linked; /* linked.c */

struct zpp_peer {
    int socket; /* -1 at our own place */
    int pidfd;  /* -1 where the kernel has none: then a closed socket means death */
    int32_t pid;
    struct zpp_queued_message *inbox; /* arrived before their zpp_message_try; guarded by message_lock */
};

struct zpp_comm {
    int rank, ranks;
    /* Over several hosts: the connections, and the lowest rank here, whose memory holds this host's comm error. base[r]
     * of a rank elsewhere is private memory without a meaning, one for all of them. */
    struct zpp_net *net;
    struct zpp_door *door; /* of a sparse group: its listener, and where its ranks are; else NULL */
    const struct zpp_transport *transport; /* by which this group's collectives on host memory go */
    int first_here;
    /* The ranks of this host as a group of their own (net_local.c): the whole group, and what it calls the ranks. */
    struct zpp_comm *outer;
    int outer_rank[ZPP_RANKS_MAX];
    int job_rank[ZPP_RANKS_MAX]; /* what messages and errors call the ranks; of the whole group */
    _Atomic(struct zpp_linked *) linked; /* the groups that end together with this one; NULL: none */
    struct zpp_comm *next_linked;        /* the next of them; guarded by their lock */
    bool joined; /* all peers are mapped */
    _Atomic bool closed; /* by zpp_comm_leave */
    uint64_t timeout_ns;
    bool crowded; /* more ranks than cores */
    int spin_rounds;
    char name[64];
    void (*log)(void *ctx, const char *message);
    void *log_ctx;

    _Atomic uint32_t *fork_guard; /* a page that a forked child finds zeroed (MADV_WIPEONFORK) */
    void *base[ZPP_RANKS_MAX];    /* control memory of every rank, mapped here */
    size_t base_bytes;
    struct zpp_peer peer[ZPP_RANKS_MAX];

    _Atomic bool busy; /* a collective runs; a second thread gets an error instead of corrupting the counters */
    /* The caller's side of the counters. Used by the one thread that runs collectives. */
    uint32_t seq, staged[ZPP_PIPELINE_STAGES], taken[ZPP_PIPELINE_STAGES], step;
    struct zpp_sig now; /* the collective in progress, for messages */
    unsigned policy;    /* store policy of its bytes; 0 unless the ranks agreed on one */
    /* store_policy.c: staged, in place; rank 0's count */
    struct zpp_store_costs costs[ZPP_COLLS][2][ZPP_STORE_POLICY_SIZES], *costs_now;
    size_t policy_bytes;
    uint64_t regions;   /* region creations so far */
    uint32_t owners;    /* zpp_comm_new_owner so far */

    pthread_mutex_t message_lock;    /* the sockets and inboxes; innermost */
    pthread_mutex_t comm_error_lock; /* this rank's comm_error_text; innermost */
    pthread_mutex_t arena_lock;   /* list of arenas; message_lock may be taken inside */
    struct zpp_arena *arenas;
    zpp_block *kept; /* of the last exchange of heads, which peers may still read (coll_heads.c); else NULL */
    pthread_mutex_t side_lock; /* lazy creation of `async` and `p2p` */
    struct zpp_async *async;
    struct zpp_p2p *p2p;

    _Atomic uint64_t traffic_bytes[ZPP_TRAFFIC_KINDS], traffic_calls[ZPP_TRAFFIC_KINDS];
    _Atomic uint64_t traffic_far_bytes[ZPP_TRAFFIC_KINDS];
};

static inline struct zpp_control *zpp_control(const struct zpp_comm *comm, int rank) {
    return (struct zpp_control *)comm->base[rank];
}

static inline uint8_t *zpp_stage(const struct zpp_comm *comm, int rank, int stage, uint32_t round) {
    return (uint8_t *)comm->base[rank] + sizeof(struct zpp_control) +
           ((size_t)stage * ZPP_STAGE_SLOTS + round % ZPP_STAGE_SLOTS) * ZPP_STAGE_BYTES;
}

static inline struct zpp_wait_target zpp_target_at(const struct zpp_comm *comm, size_t offset_bytes, uint32_t target) {
    const struct zpp_wait_target wait_target = {comm->base, offset_bytes, target};
    return wait_target;
}

/* Return the number of a rank in the whole group. */
static inline int zpp_outer_rank(const struct zpp_comm *comm, int rank) {
    return comm->outer && rank >= 0 ? comm->outer_rank[rank] : rank;
}

/* A failed rank from here on is no rank of the group, but rank (number - ZPP_OUTSIDE) of the job; see linked.c. */
enum { ZPP_OUTSIDE = 1 << 14, ZPP_OUTSIDE_END = 1 << 15 };

/* Return the number that messages give a rank. */
static inline int zpp_label(const struct zpp_comm *comm, int rank) {
    const struct zpp_comm *whole = comm->outer ? comm->outer : comm;
    if (rank >= ZPP_OUTSIDE) return rank - ZPP_OUTSIDE;
    return rank >= 0 && rank < comm->ranks ? whole->job_rank[zpp_outer_rank(comm, rank)] : rank;
}

/* --- transports: shared memory (shm/), several hosts (tcp/), NCCL (nccl/) ----------------------------------------- */
/* A one-way channel of bytes between two ranks. One thread writes and one reads at a time; none of it waits. */
struct zpp_channel_ops {
    /* The sender's end: make the channel, and tell `rank`. */
    zpp_status (*open)(struct zpp_comm *comm, int rank, void **out, struct zpp_err *err);
    /* The receiver's end: AGAIN while `rank` has not opened its own. */
    zpp_status (*accept)(struct zpp_comm *comm, int rank, void **out, struct zpp_err *err);
    void (*close)(void *channel); /* NULL is fine */
    /* Write or read as much as there is space or data for; return the number of bytes. dst NULL: discard. */
    size_t (*write)(void *channel, const void *src, size_t bytes);
    size_t (*read)(void *channel, void *dst, size_t bytes);
    size_t (*readable)(void *channel);
    size_t (*writable)(void *channel);
    bool (*damaged)(void *channel); /* the other side wrote where it must not */
    bool (*flushed)(void *channel); /* all that was written is on its way */
};
extern const struct zpp_channel_ops zpp_channels_memory; /* shm/channel.c */
/* A row of the table in call.c. */
struct zpp_transport {
    const char *name;
    /* Return true if this transport carries such calls of this group. */
    bool (*carries)(const struct zpp_comm *comm, const struct zpp_call *call);
    /* A collective, entered and not yet compared; arguments checked. */
    zpp_status (*run)(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err);
    /* Run a call whose bytes another transport moves: compare the ranks' signatures, and move nothing. */
    zpp_status (*identify)(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err);
    /* Return true if `channels` lead to the host memory of `rank`; NULL: the transport has no channels. */
    bool (*reaches)(const struct zpp_comm *comm, int rank);
    const struct zpp_channel_ops *channels;
    /* For ranks on other hosts; NULL where the transport has none. `gone`: true if the rank left or died, as
     * zpp_peer_gone. `tell`: send those ranks the reason why the group ended; any thread, never waits. */
    bool (*gone)(const struct zpp_comm *comm, int rank);
    void (*tell)(struct zpp_comm *comm, zpp_status status, int failed_rank, const char *text);
};
extern const struct zpp_transport zpp_transport_memory, zpp_transport_tcp, zpp_transport_nccl;
/* The first row of the table that carries the call; the first that reaches the rank. */
const struct zpp_transport *zpp_transport_of(const struct zpp_comm *comm, const struct zpp_call *call);
const struct zpp_transport *zpp_transport_to(const struct zpp_comm *comm, int rank);

/* --- rendezvous.c: fill base[], peer[] --------------------------------------------------------------------------- */
struct zpp_hosts;
/* `hosts` receives the host of every rank. Ranks on other hosts get no base and no peer. */
zpp_status zpp_rendezvous(struct zpp_comm *comm, const struct zpp_network_options *network,
                          const struct zpp_store *store, const struct zpp_wait *wait, struct zpp_hosts *hosts,
                          struct zpp_err *err);
/* store.c: put this rank's entry of such a name into the store; read that of `rank`. `*bytes` in: capacity; out:
 * length. */
zpp_status zpp_store_publish(const struct zpp_comm *comm, const struct zpp_store *store, const char *name,
                             const void *entry, size_t bytes, struct zpp_err *err);
zpp_status zpp_store_read(const struct zpp_comm *comm, const struct zpp_store *store, const char *name, int rank,
                          void *entry, size_t *bytes, struct zpp_err *err);

/* --- comm_error.c: why the group ended, and which rank failed ----------------------------------------------------- */
/* Return OK, the error that every rank reports from now on, or STATE in a forked child. A few ns. */
zpp_status zpp_comm_check(const struct zpp_comm *comm, struct zpp_err *err);
/* Record a comm error (the first one counts) and return the one that stands. */
zpp_status zpp_comm_fail(struct zpp_comm *comm, zpp_status status, int failed_rank, struct zpp_err *err,
                         const char *format, ...) __attribute__((format(printf, 5, 6)));
/* Record a comm error that another host reported. Return true if it is the first one that this host hears of. */
bool zpp_comm_fail_heard(struct zpp_comm *comm, zpp_status status, int failed_rank, const char *text);
/* The comm error of a whole group, unchanged by the caller's state: false if there is none. */
struct zpp_comm_error {
    zpp_status status;
    int failed_rank; /* as this group numbers it, or ZPP_OUTSIDE and more */
    char text[ZPP_ERR_TEXT_BYTES];
};
bool zpp_comm_error_read(const struct zpp_comm *comm, struct zpp_comm_error *out);
/* Record a comm error that was recorded elsewhere, and tell other hosts; nothing where one stands. */
void zpp_comm_pass_on(struct zpp_comm *comm, zpp_status status, int failed_rank, const char *text);
bool zpp_peer_left(const struct zpp_comm *comm, int rank); /* it destroyed its communicator */
bool zpp_peer_gone(const struct zpp_comm *comm, int rank); /* left, or dead; a system call */
bool zpp_comm_forked(const struct zpp_comm *comm);

/* --- linked.c: groups that end together --------------------------------------------------------------------------- */
void zpp_linked_spread(struct zpp_comm *comm); /* give all the first comm error of any; any thread, never waits */
/* The end of a group in two parts, around that of its watcher; both accept one that is not linked. */
void zpp_linked_remove(struct zpp_comm *comm);
void zpp_linked_drop(struct zpp_comm *comm);

/* --- control_message.c -------------------------------------------------------------------------------------------- */
zpp_status zpp_message_send(struct zpp_comm *comm, int rank, const struct zpp_message *content, int fd,
                            struct zpp_err *err);
/* Wait for the control message of `kind` and `number` from `rank`; others are kept for later. The caller owns `fd`. */
zpp_status zpp_message_wait(struct zpp_wait_ctx *wait_ctx, int rank, uint64_t kind, uint64_t number,
                            struct zpp_message *content, int *fd, struct zpp_err *err);
/* Return that message, or AGAIN if it has not come. */
zpp_status zpp_message_try(struct zpp_comm *comm, int rank, uint64_t kind, uint64_t number, struct zpp_message *content,
                           int *fd, struct zpp_err *err);
void zpp_message_clear(struct zpp_comm *comm);

/* The slow part of a wait that is not on a counter, about every 100 ms: comm error, tick, log, timeout. `rank` is
 * waited for. `gone`: zpp_peer_gone was true *before* the caller last checked its condition, in vain; that becomes the
 * comm error. */
zpp_status zpp_wait_check(struct zpp_wait_ctx *wait_ctx, int rank, bool gone, struct zpp_err *err);

/* --- sig.c: every collective begins here ------------------------------------------------------------------------- */
enum { ZPP_NO_OP = 0xff, ZPP_NO_ROOT = 0xffff };
#define ZPP_SIG_BESIDE UINT64_C(0x80) /* of `what`: another transport moves the bytes */
/* For messages: "all_reduce(float32, 16 elements, sum)". The first is in call.c. */
void zpp_call_describe(const struct zpp_comm *comm, const struct zpp_call *call, char *text, size_t capacity);
void zpp_sig_describe(const struct zpp_sig *sig, char *text, size_t capacity);
struct zpp_sig zpp_sig_make(enum zpp_coll coll, zpp_dtype dtype, unsigned reduce_op, unsigned root, uint64_t elems);
static inline bool zpp_coll_has_root(enum zpp_coll coll) {
    return coll == ZPP_COLL_BROADCAST || coll == ZPP_COLL_REDUCE || coll == ZPP_COLL_GATHER || coll == ZPP_COLL_SCATTER;
}
static inline bool zpp_coll_reduces(enum zpp_coll coll) { /* quantised ones are checked by zpp_quant_check */
    return coll == ZPP_COLL_ALL_REDUCE || coll == ZPP_COLL_REDUCE || coll == ZPP_COLL_REDUCE_SCATTER;
}
/* Return INVALID if the collective has a root that is no rank of the group. */
zpp_status zpp_root_check(const struct zpp_comm *comm, const struct zpp_call *call, struct zpp_err *err);
/* Begin a collective: check the group, take its sequence number, set up `wait_ctx`. */
zpp_status zpp_enter(struct zpp_comm *comm, struct zpp_sig sig, const struct zpp_wait *wait,
                     struct zpp_wait_ctx *wait_ctx, struct zpp_err *err);
/* This rank's post of this collective, to be filled before zpp_exchange. */
static inline struct zpp_post *zpp_my_post(struct zpp_comm *comm) {
    return &zpp_control(comm, comm->rank)->post[comm->seq % 2];
}
static inline const struct zpp_post *zpp_post_of(const struct zpp_comm *comm, int rank) {
    return &zpp_control(comm, rank)->post[comm->seq % 2];
}
static inline const uint8_t *zpp_payload(const struct zpp_comm *comm, int rank, size_t bytes) {
    return bytes <= ZPP_INLINE_BYTES ? zpp_post_of(comm, rank)->bytes : zpp_control(comm, rank)->small[comm->seq % 2];
}
/* Publish this rank's post; wait for all posts and compare the signatures. zpp_exchange does both. */
void zpp_post(struct zpp_comm *comm);
zpp_status zpp_await_posts(struct zpp_wait_ctx *wait_ctx, struct zpp_err *err);
zpp_status zpp_exchange(struct zpp_wait_ctx *wait_ctx, struct zpp_err *err);
/* Exchange with a payload of at most ZPP_SMALL_BYTES, which peers then read at zpp_payload(). */
zpp_status zpp_exchange_small(struct zpp_wait_ctx *wait_ctx, const void *payload, size_t bytes, struct zpp_err *err);
/* Exchange and publish where a large tensor lies. `*in_place` is true if every rank's tensor lies in an arena; then
 * tensor[r] is rank r's, mapped here. */
zpp_status zpp_exchange_place(struct zpp_wait_ctx *wait_ctx, const void *tensor_here, size_t bytes, bool *in_place,
                              const uint8_t **tensor, struct zpp_err *err);
/* Exchange where only the tensor of `owner` matters. */
zpp_status zpp_exchange_place_of(struct zpp_wait_ctx *wait_ctx, int owner, const void *tensor_here, size_t bytes,
                                 bool *in_arena, const uint8_t **tensor, struct zpp_err *err);

/* --- store_policy.c: nontemporal or cached stores ----------------------------------------------------------------- */
/* Before the exchange: write the policy that rank 0 posts for the collective in progress, on a tensor of `bytes`. */
void zpp_store_policy_post(struct zpp_comm *comm, size_t bytes, struct zpp_place *place);
/* After the exchange: use the store policy that rank 0 posted. */
void zpp_store_policy_adopt(struct zpp_comm *comm, bool in_place);
void zpp_store_policy_learn(struct zpp_comm *comm, uint64_t took_ns); /* of the collective in progress */
static inline bool zpp_own_nontemporal(const struct zpp_comm *comm) { return !(comm->policy & ZPP_OWN_CACHED); }
static inline bool zpp_shared_nontemporal(const struct zpp_comm *comm) { return !(comm->policy & ZPP_SHARED_CACHED); }

/* --- coll_*.c: one algorithm a file; elements already checked ---------------------------------------------------- */
struct zpp_tensor {
    zpp_dtype dtype;
    zpp_reduce_op op;
    size_t elems, bytes;
};
zpp_status zpp_coll_all_reduce(struct zpp_wait_ctx *wait_ctx, void *data, const struct zpp_tensor *tensor,
                               struct zpp_err *err);
zpp_status zpp_coll_reduce(struct zpp_wait_ctx *wait_ctx, void *data, const struct zpp_tensor *tensor, int root,
                           struct zpp_err *err);
zpp_status zpp_coll_all_gather(struct zpp_wait_ctx *wait_ctx, void *const *dst, const void *src, size_t bytes,
                               struct zpp_err *err);
zpp_status zpp_coll_reduce_scatter(struct zpp_wait_ctx *wait_ctx, void *dst, const void *src,
                                   const struct zpp_tensor *tensor, struct zpp_err *err);
zpp_status zpp_coll_broadcast(struct zpp_wait_ctx *wait_ctx, void *data, size_t bytes, int root, struct zpp_err *err);
zpp_status zpp_coll_all_to_all(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err);
/* Quantised: what a call may ask for, and its signature. */
zpp_status zpp_quant_check(const struct zpp_comm *comm, const struct zpp_call *call, struct zpp_err *err);
struct zpp_sig zpp_quant_sig(const struct zpp_comm *comm, const struct zpp_call *call);
#define ZPP_QUANT_ELEMS_END (UINT64_C(1) << 40) /* fewer, so that the object fits beside them */
zpp_status zpp_coll_quant(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err);
enum { ZPP_STREAM_BYTES = 4 * 1024 * 1024 }; /* outputs from this size on may be written around the cache */

/* --- rounds.c: staging in rounds --------------------------------------------------------------------------------- */
/* Wait until this rank's slot of the next round is free (every peer has taken what it held). */
zpp_status zpp_stage_begin(struct zpp_wait_ctx *wait_ctx, int stage, uint8_t **slot, struct zpp_err *err);
void zpp_stage_publish(struct zpp_comm *comm, int stage);
/* Wait until every peer has staged the next round, which then lies at zpp_stage(comm, r, stage,
 * comm->taken[stage]). */
zpp_status zpp_take_begin(struct zpp_wait_ctx *wait_ctx, int stage, struct zpp_err *err);
void zpp_take_end(struct zpp_comm *comm, int stage);
/* A whole collective in rounds: every rank fills and takes every round. A slot is filled again only after its own
 * rank, too, has taken or passed it, so a rank may read its own slot like a peer's. */
struct zpp_pipeline {
    size_t rounds;
    const void *ctx;
    void (*fill)(const void *ctx, size_t round, uint8_t *slot);
    /* The peers' slots of this round are at zpp_stage(comm, r, stage, staged); stage 0, after `pass` stage 1. */
    void (*take)(const void *ctx, size_t round, uint32_t staged);
    /* May be NULL. From the peers' slots in stage 0 into this rank's slot in stage 1. */
    void (*pass)(const void *ctx, size_t round, uint32_t staged, uint8_t *slot);
};
zpp_status zpp_pipeline_run(struct zpp_wait_ctx *wait_ctx, const struct zpp_pipeline *pipeline, struct zpp_err *err);
/* memcpy into a slot, by the store policy of this collective. */
static inline void zpp_stage_copy(const struct zpp_comm *comm, uint8_t *slot, const void *src, size_t bytes) {
    zpp_copy(slot, src, bytes, zpp_shared_nontemporal(comm));
}
/* In place: pass to the next phase; wait until every rank has passed phase `step`. */
uint32_t zpp_step_pass(struct zpp_comm *comm);
zpp_status zpp_step_wait(struct zpp_wait_ctx *wait_ctx, uint32_t step, struct zpp_err *err);
/* Pass the last phase of a collective that began at `start_ns`, and wait for all ranks: peers read this rank's tensor
 * until then. */
zpp_status zpp_step_last(struct zpp_wait_ctx *wait_ctx, uint64_t start_ns, struct zpp_err *err);

/* --- arena.c ----------------------------------------------------------------------------------------------------- */
bool zpp_arena_find(struct zpp_comm *comm, const void *data, size_t bytes, struct zpp_place *place);
zpp_status zpp_arena_at(struct zpp_wait_ctx *wait_ctx, int rank, const struct zpp_place *place, size_t bytes,
                        const uint8_t **data, struct zpp_err *err);
void zpp_arena_clear(struct zpp_comm *comm);
/* Give up a block before zpp_arena_clear. Its pages are not touched, because peers may still read them. */
void zpp_block_forget(zpp_block *block);

/* --- async.c, p2p.c: ended by zpp_comm_destroy ------------------------------------------------------------------- */
zpp_status zpp_call_now(zpp_comm *comm, const struct zpp_call *call, const struct zpp_wait *wait,
                        struct zpp_err *err); /* call.c */
zpp_status zpp_async_drain(struct zpp_comm *comm, const struct zpp_wait *wait, struct zpp_err *err);
void zpp_async_destroy(struct zpp_comm *comm);
void zpp_p2p_destroy(struct zpp_comm *comm);

static inline void zpp_count_call(struct zpp_comm *comm, enum zpp_traffic_kind kind, uint64_t bytes) {
    atomic_fetch_add_explicit(&comm->traffic_bytes[kind], bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&comm->traffic_calls[kind], 1, memory_order_relaxed);
}

/* Count bytes that came from another node, a part of those of zpp_count_call. */
static inline void zpp_count_far(struct zpp_comm *comm, enum zpp_traffic_kind kind, uint64_t bytes) {
    atomic_fetch_add_explicit(&comm->traffic_far_bytes[kind], bytes, memory_order_relaxed);
}

#endif
