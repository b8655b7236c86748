/* SPDX-License-Identifier: Apache-2.0
 *
 * The communicator: the C door of csrc/comm, which csrc/zero and the torch.distributed backend both use.
 *
 * Three levels, each usable alone:
 *   regions      memory that every rank of the host maps (memfd, so a small /dev/shm is no limit, and nothing is left
 *                behind by any kind of death); read in place, one memcpy a byte
 *   rings        one-sided publication: a rank posts numbered descriptors, peers read them and acknowledge; each
 *                descriptor carries its identity, because equal order does not prove an equal object
 *   collectives  all-reduce, all-gather, reduce-scatter, broadcast, barrier, ... on the caller's memory
 *
 * Reductions add in rank order, ((r0 + r1) + r2) + ..., in fp32 for 16-bit elements with one rounding at the end: same
 * inputs, same bits, whatever the timing. A dead or diverging peer is an error on every survivor, with its number,
 * within seconds. A wait for a late peer lasts until the timeout; after 10 s its rank is passed to `log`.
 *
 * Threads: a communicator, and each of its descriptor rings, is used by one thread at a time; different descriptor
 * rings of one communicator may be used by different threads. Creation calls are collective: same order on every rank.
 */
#ifndef ZPP_COMM_COMM_H
#define ZPP_COMM_COMM_H

#include <stdbool.h>
#include "../base/dtype.h"
#include "../base/status.h"
#include "../base/wait.h"

/* --- rendezvous: how ranks find each other. Filled in by bind (torch's store) or by a C test (a table) ----------- */
struct zpp_store {
    void *ctx; /* borrowed until zpp_comm_create returns */
    zpp_status (*set)(void *ctx, const char *key, const void *value, size_t bytes, struct zpp_err *err);
    /* Wait for the key. `*bytes` in: capacity; out: length. */
    zpp_status (*get)(void *ctx, const char *key, void *value, size_t *bytes, uint64_t timeout_ns, struct zpp_err *err);
};

typedef struct zpp_comm zpp_comm;
enum { ZPP_RANKS_MAX = 1024 }; /* of one group, on all its hosts: zpp_comm_create refuses more */
enum { ZPP_FULL_RANKS = 64 };  /* a larger group is sparse (docs/design/0046-what-grows-with-ranks.md) */
/* Between hosts; unused where all ranks are on one. Strings may be NULL or empty; borrowed for the call. */
struct zpp_network_options {
    const char *host_id;   /* ranks with the same one share memory; default: boot id and network namespace */
    const char *interface; /* listen and connect on this interface only; default: the one that leads to `toward` */
    const char *toward;    /* a host all ranks can reach, such as the store's; default: any interface, loopback last */
    int family;            /* 4 or 6; 0: IPv4 where there is one */
    int connections;       /* for collectives, a pair of ranks, 1 to 8; 0: 2 */
    int full_ranks;        /* a group of more ranks is sparse, equal on all ranks; 0: ZPP_FULL_RANKS */
};
struct zpp_comm_options {
    int rank, ranks;
    uint64_t timeout_ns;                          /* of every wait for a peer; 0 = for ever */
    const char *name;                             /* of the group, for messages; copied */
    void (*log)(void *ctx, const char *message); /* may be NULL */
    void *log_ctx;
    const struct zpp_wait *wait; /* its ticks are called during the rendezvous; may be NULL; borrowed for the call */
    struct zpp_network_options network;
};
/* Collective. Ranks may be on several hosts (docs/design/0016-groups-over-hosts.md). New; free with
 * zpp_comm_destroy. */
zpp_status zpp_comm_create(const struct zpp_comm_options *options, const struct zpp_store *store, zpp_comm **out,
                           struct zpp_err *err);
/* Several owners of collectives may share a communicator, such as prepared models. Each takes a number, all ranks in
 * the same order; its calls carry that number, so a call of one owner never matches the call of another owner on a
 * peer. Numbers wrap after ZPP_OWNERS. */
enum { ZPP_OWNERS = 64, ZPP_OBJECTS = 1 << 18 };
uint32_t zpp_comm_new_owner(zpp_comm *comm);
/* Return the value for zpp_call.object. `number` identifies the unit: 1 to ZPP_OBJECTS - 1, chosen by the owner. */
static inline uint32_t zpp_comm_object(uint32_t owner, uint32_t number) {
    return owner * ZPP_OBJECTS + number % ZPP_OBJECTS;
}
/* Local; never waits. Peers that still use the group get the error "rank r left". NULL is allowed. */
void zpp_comm_destroy(zpp_comm *comm);
/* The part of zpp_comm_destroy that peers and callers notice: peers are told, and every later call of this rank gets
 * STATE. The memory stays for those who hold it. No call is in progress. */
void zpp_comm_leave(zpp_comm *comm);
/* Let two groups of this process end together: the first comm error of one is that of the other, and of all groups that
 * are linked with it. Its rank is named by its number in the job (zpp_comm_set_job_ranks comes first). Nothing where
 * `comm` is linked already. Local; one thread links at a time. */
zpp_status zpp_comm_link(zpp_comm *comm, zpp_comm *with, struct zpp_err *err);
/* For an error that another library raised, perhaps because a peer died: record a comm error that names the first dead
 * rank of this group and those linked with it, if none stands. Any thread; a system call a rank. */
void zpp_comm_look_for_dead(zpp_comm *comm);
/* End every pending and later wait, here and on the peers, with ABORTED and this message, which names this rank. Any
 * thread. */
void zpp_comm_abort(zpp_comm *comm, const char *message);
/* Return OK, or the error that ended the group. A few ns; any thread. */
zpp_status zpp_comm_health(const zpp_comm *comm, struct zpp_err *err);
/* For waits that this library does not make itself, such as a stream's for a peer. Any thread; each is a system call.
 * Return true if the rank died or left. Look again at what is waited for after that, then: */
bool zpp_comm_peer_gone(const zpp_comm *comm, int rank);
/* Return the comm error, which names the rank, if it is gone or was waited for since `start_ns` for longer than the
 * group's timeout; `doing`: what this rank waits for, in words. */
zpp_status zpp_comm_check_peer(zpp_comm *comm, int rank, bool gone, uint64_t start_ns, const char *doing,
                               struct zpp_err *err);
int zpp_comm_rank(const zpp_comm *comm);
int zpp_comm_ranks(const zpp_comm *comm);
int zpp_comm_hosts(const zpp_comm *comm);             /* on how many hosts its ranks are */
int zpp_comm_host(const zpp_comm *comm, int rank);    /* 0..hosts-1, numbered by their lowest rank */
/* Return the ranks of this host as a group, for regions, rings and blocks: `comm` itself where all ranks are on one
 * host. Owned by comm. */
zpp_comm *zpp_comm_here(zpp_comm *comm);
uint64_t zpp_comm_timeout_ns(const zpp_comm *comm);
/* Of this rank only; not while a call is in progress. */
void zpp_comm_set_timeout(zpp_comm *comm, uint64_t timeout_ns);
void zpp_comm_set_name(zpp_comm *comm, const char *name);
/* Let messages and errors give the ranks these numbers, which they have in the job: [ranks], copied. */
void zpp_comm_set_job_ranks(zpp_comm *comm, const int *job_ranks);
int zpp_comm_job_rank(const zpp_comm *comm, int rank); /* the group's own number where none was set */

/* Bytes moved; the figures never fall. A byte counts once, at the rank that reads it from a peer's memory or from the
 * network. */
enum zpp_traffic_kind {
    ZPP_TRAFFIC_ALL_GATHER,
    ZPP_TRAFFIC_REDUCE_SCATTER,
    ZPP_TRAFFIC_ALL_REDUCE,
    ZPP_TRAFFIC_BROADCAST,
    ZPP_TRAFFIC_ALL_TO_ALL,
    ZPP_TRAFFIC_P2P,
    ZPP_TRAFFIC_OTHER,
    ZPP_TRAFFIC_KINDS
};
struct zpp_traffic {
    uint64_t bytes[ZPP_TRAFFIC_KINDS], calls[ZPP_TRAFFIC_KINDS];
    uint64_t far_bytes[ZPP_TRAFFIC_KINDS]; /* of `bytes`, what calls with node_ranks read from other nodes */
    uint64_t network_bytes[ZPP_TRAFFIC_KINDS]; /* of `bytes`, what came from other hosts */
};
void zpp_comm_traffic(const zpp_comm *comm, struct zpp_traffic *out);
/* for users of regions and descriptor rings */
void zpp_comm_count(zpp_comm *comm, enum zpp_traffic_kind kind, uint64_t bytes);

/* --- regions ----------------------------------------------------------------------------------------------------- */
typedef struct zpp_region zpp_region;
enum zpp_region_kind {
    ZPP_REGION_PER_RANK, /* each rank owns `bytes`; zpp_region_base(region, r) is rank r's part, mapped here */
    ZPP_REGION_ONE,      /* one block of `bytes` for all; the same for every r */
};
/* Collective. Zeroed, page aligned, sparse: memory is used only where touched. New; free with zpp_region_destroy,
 * which is local: the memory lives until the last rank unmaps it, and survives the communicator. Over several hosts
 * PER_RANK maps the caller's own part only (the base of every other rank is NULL), and ONE is NOT_BUILT. */
zpp_status zpp_region_create(zpp_comm *comm, enum zpp_region_kind kind, size_t bytes, zpp_region **out,
                             struct zpp_err *err);
void zpp_region_destroy(zpp_region *region);
void *zpp_region_base(const zpp_region *region, int rank);
size_t zpp_region_bytes(const zpp_region *region); /* of one part, rounded up to pages */
/* Return pages of the caller's own part (ONE: of the block) to the system; they read as zero again. Page-aligned. */
void zpp_region_trim(zpp_region *region, size_t offset_bytes, size_t bytes);

/* --- arenas: memory of this rank that its peers map, in blocks. A large collective whose tensor lies in such a block
 * on every rank is read in place, without staging. Local, any thread. */
typedef struct zpp_block zpp_block;
/* Zeroed at first, old contents when memory is used again; 256-byte aligned, pages from 64 KB on. New; free with
 * zpp_block_free, which may come after the end of the communicator. */
zpp_status zpp_comm_alloc(zpp_comm *comm, size_t bytes, zpp_block **out, struct zpp_err *err);
void zpp_block_free(zpp_block *block); /* NULL is fine */
void *zpp_block_data(const zpp_block *block);
size_t zpp_block_bytes(const zpp_block *block); /* as asked for */

/* --- descriptor rings -------------------------------------------------------------------------------------------- */
enum { ZPP_DESC_RING_ENTRIES = 64, ZPP_LANE_MASK_BYTES = 64 };
struct zpp_desc {
    uint64_t kind;                     /* what this is: compared between ranks by zpp_desc_ring_read */
    uint64_t object;                   /* which unit */
    uint64_t step;                     /* which pass */
    uint64_t elems;                    /* how many elements */
    uint64_t offset_bytes;             /* where in the sender's region; not compared */
    uint8_t mask[ZPP_LANE_MASK_BYTES]; /* flags of the sender's choice; not compared */
};
typedef struct zpp_desc_ring zpp_desc_ring;
/* Collective, within one host (NOT_BUILT over several). `name` is used in messages. New; free with
 * zpp_desc_ring_destroy before the communicator. */
zpp_status zpp_desc_ring_create(zpp_comm *comm, const char *name, zpp_desc_ring **out, struct zpp_err *err);
void zpp_desc_ring_destroy(zpp_desc_ring *ring);
/* Publish the next descriptor of this rank (release order: writes before the call are visible to its readers). `*seq`
 * is its number, 1, 2, 3... Waits, or returns AGAIN, only while a peer has not acknowledged the descriptor
 * ZPP_DESC_RING_ENTRIES before it. */
zpp_status zpp_desc_ring_post(zpp_desc_ring *ring, const struct zpp_desc *desc, const struct zpp_wait *wait,
                              uint64_t *seq, struct zpp_err *err);
/* Read descriptor `seq` of `rank`. `expect` (may be NULL): kind, object, step and elems must be equal; otherwise the
 * status is PEER, here and in the peer's next wait, and the message shows both descriptors
 * (zpp_desc_ring_set_describe). */
zpp_status zpp_desc_ring_read(zpp_desc_ring *ring, int rank, uint64_t seq, const struct zpp_desc *expect,
                              const struct zpp_wait *wait, struct zpp_desc *out, struct zpp_err *err);
/* Acknowledge the peers' descriptors up to `seq`: this rank no longer reads what they point at. */
void zpp_desc_ring_ack(zpp_desc_ring *ring, uint64_t seq);
/* Return the newest descriptor of this rank that every peer has acknowledged. Never waits. */
uint64_t zpp_desc_ring_acked(const zpp_desc_ring *ring);
/* Wait until every peer has acknowledged this rank's descriptor `seq`. */
zpp_status zpp_desc_ring_wait_acked(zpp_desc_ring *ring, uint64_t seq, const struct zpp_wait *wait,
                                    struct zpp_err *err);
/* Set the function that describes a descriptor in messages, such as `reduce unit 3 (layers.2) step 7`; the default
 * prints the numbers. */
void zpp_desc_ring_set_describe(zpp_desc_ring *ring,
                                void (*describe)(void *ctx, const struct zpp_desc *, char *text, size_t capacity),
                                void *ctx);
/* From now on a time-out or an interruption of a wait is a comm error of the group, as in a collective: for rings whose
 * descriptors cannot be told apart any more after one was left out. */
void zpp_desc_ring_set_fatal(zpp_desc_ring *ring);

/* --- collectives on the caller's memory (staged through regions; in place where the memory lies in a region) ----- */
typedef enum zpp_reduce_op {
    ZPP_SUM,
    ZPP_AVG,
    ZPP_PRODUCT,
    ZPP_MIN,
    ZPP_MAX,
    ZPP_BAND,
    ZPP_BOR,
    ZPP_BXOR,
    ZPP_REDUCE_OPS
} zpp_reduce_op;
/* These calls block. `wait` NULL: the communicator's own timeout, no ticks. All ranks must call the same one with the
 * same elems, dtype, op and root; otherwise all of them get PEER, with a message that shows both sides. */
zpp_status zpp_all_reduce(zpp_comm *, void *data, size_t elems, zpp_dtype, zpp_reduce_op, const struct zpp_wait *,
                          struct zpp_err *);
zpp_status zpp_all_gather(zpp_comm *, void *dst, const void *src, size_t src_bytes, const struct zpp_wait *,
                          struct zpp_err *);
zpp_status zpp_reduce_scatter(zpp_comm *, void *dst, const void *src, size_t dst_elems, zpp_dtype, zpp_reduce_op,
                              const struct zpp_wait *, struct zpp_err *);
zpp_status zpp_broadcast(zpp_comm *, void *data, size_t bytes, int root, const struct zpp_wait *, struct zpp_err *);
zpp_status zpp_barrier(zpp_comm *, const struct zpp_wait *, struct zpp_err *);

/* Phases of an exchange of rows between hosts (python/zeropp/moe/hosts.py), for zpp_call.rows. */
enum zpp_rows_phase {
    ZPP_ROWS_ROUTE = 1,
    ZPP_ROWS_DISPATCH,
    ZPP_ROWS_WEIGHTS,
    ZPP_ROWS_COMBINE,
    ZPP_ROWS_DISPATCH_BACK,
    ZPP_ROWS_WEIGHTS_BACK,
    ZPP_ROWS_COMBINE_BACK,
    ZPP_ROWS_PHASES
};
static inline uint64_t zpp_comm_rows(enum zpp_rows_phase phase, uint32_t layer, uint64_t call) {
    return (uint64_t)phase | (uint64_t)(layer & 0xffff) << 8 | call << 24;
}

/* All collectives as one table: those above, with the dtype compared too, and those without a function of their
 * own. */
enum zpp_coll {
    ZPP_COLL_BARRIER = 1,
    ZPP_COLL_ALL_REDUCE,
    ZPP_COLL_ALL_GATHER,
    ZPP_COLL_REDUCE_SCATTER,
    ZPP_COLL_BROADCAST,
    ZPP_COLL_REDUCE,
    ZPP_COLL_ALL_TO_ALL,
    ZPP_COLL_GATHER,
    ZPP_COLL_SCATTER,
    ZPP_COLL_ALL_GATHER_QUANT, /* coll_quant.c: bytes and order of each */
    ZPP_COLL_REDUCE_SCATTER_QUANT,
    ZPP_COLL_ALL_REDUCE_QUANT,
    ZPP_COLLS
};
struct zpp_call {
    enum zpp_coll coll;
    zpp_dtype dtype;
    zpp_reduce_op op; /* of all_reduce, reduce, reduce_scatter */
    int root;         /* of broadcast, reduce, gather, scatter */
    uint32_t object;  /* compared between ranks, below 2^24: zpp_comm_object, or 0 = none */
    uint64_t rows;    /* all_to_all: compared between ranks, zpp_comm_rows, or 0 = none */
    void *dst;        /* all_reduce, broadcast, reduce: the tensor; borrowed until the call is finished */
    const void *src;  /* all_gather, reduce_scatter */
    size_t elems;     /* of the tensor; all_gather: of src; reduce_scatter: of dst */
    /* all_to_all, gather, scatter: one tensor a rank each way, borrowed as arrays and as memory; bytes 0 = none.
     * all_gather: `dsts`, if not NULL, has one destination a rank instead of `dst` */
    void *const *dsts;
    const void *const *srcs;
    const size_t *dst_bytes, *src_bytes;
    /* all_to_all, may be NULL: read what the peers sent where it lies, pieces[r] from rank r, instead of having it
     * copied to `dsts`. It is called only where the pieces of all peers are mapped here; else `dsts` are filled. */
    void (*take)(void *ctx, const void *const *pieces);
    /* all_to_all, may be NULL: work that needs nothing from a peer, done once while the peers arrive, if at all. */
    void (*meanwhile)(void *ctx);
    void *take_ctx; /* of both */
    /* all_to_all, with `take`, the same on all ranks: `srcs` stay as they are until a later collective of this group
     * has ended here, so no rank waits at the end until the others have read them. */
    bool stays;
    /* The quantised ones, of F32, BF16 or F16, otherwise as their exact forms (`dst` only, which may hold `src` at
     * this rank's place; op SUM or AVG). Blocks begin at each shard; a block with an element that is not finite, or of
     * 2^127 and more, comes out as NaN. */
    int bits;           /* 8 or 4 */
    size_t block_elems; /* a multiple of 16, of a few hundred */
    /* reduce_scatter: consecutive ranks on one node, whose links are the cheaper ones; 0: all. Over several hosts: 0,
     * the hosts are the nodes (hier_quant.c) */
    int node_ranks;
    /* zpp_comm_submit only, may be NULL: called on the progress thread before the call begins, to wait for data that
     * `src` needs, or until `dst` is free; the call keeps its place in the order of submission meanwhile. And after the
     * call, which is finished only then. An error is the call's; one of `before` ends the group, because peers wait for
     * the call. `wait` has no timeout, and ends with the group. */
    zpp_status (*before)(void *ctx, const struct zpp_wait *wait, struct zpp_err *err);
    zpp_status (*after)(void *ctx, struct zpp_err *err);
    void *ctx;
    /* Compare the call with the peers' and move nothing: another transport moves its bytes (nccl.h). No memory is
     * touched. */
    bool beside;
};
zpp_status zpp_comm_call(zpp_comm *comm, const struct zpp_call *call, const struct zpp_wait *wait, struct zpp_err *err);

/* Run a call later, on the communicator's progress thread, in the order of submission; a blocking call waits for what
 * is queued before it. `done` (may be NULL) is called on that thread. Arrays and memory that the call points at are
 * borrowed until it is finished. `*out`: new; free with zpp_work_free, finished or not, even after zpp_comm_destroy,
 * which ends what is pending. */
typedef struct zpp_work zpp_work;
zpp_status zpp_comm_submit(zpp_comm *comm, const struct zpp_call *call,
                           void (*done)(void *ctx, zpp_status, const struct zpp_err *), void *done_ctx, zpp_work **out,
                           struct zpp_err *err);
/* Wait for the call and return its status, or TIMEOUT or a tick's error if the wait ends first. `wait` NULL: no limit,
 * no ticks. Any thread. */
zpp_status zpp_work_wait(zpp_work *work, const struct zpp_wait *wait, struct zpp_err *err);
bool zpp_work_finished(zpp_work *work);
void zpp_work_free(zpp_work *work);

/* --- send and receive, any thread. A transfer begins at once and goes on by itself; `data` is borrowed until it is
 * finished. A send is finished when the transport holds its bytes, not when they are received. A message goes to the
 * oldest receive with its tag and source; `from` ZPP_NO_RANK: any. Sizes must agree. `*out`: new; free with
 * zpp_transfer_free, finished or not, even after zpp_comm_destroy. */
typedef struct zpp_transfer zpp_transfer;
zpp_status zpp_comm_send(zpp_comm *comm, const void *data, size_t bytes, int to, uint64_t tag, zpp_transfer **out,
                         struct zpp_err *err);
zpp_status zpp_comm_recv(zpp_comm *comm, void *data, size_t bytes, int from, uint64_t tag, zpp_transfer **out,
                         struct zpp_err *err);
/* Before zpp_comm_destroy only. NULL: the communicator's own timeout, no ticks. */
zpp_status zpp_transfer_wait(zpp_transfer *transfer, const struct zpp_wait *wait, struct zpp_err *err);
bool zpp_transfer_finished(zpp_transfer *transfer);
int zpp_transfer_peer(zpp_transfer *transfer); /* the sender; ZPP_NO_RANK until a message has matched */
void zpp_transfer_free(zpp_transfer *transfer);

/* --- the reduction itself, for users of regions: dst[i] = (sum over r in rank order of src[r][i]) * scale -------- */
/* What a sum of floating point elements saw; integers are always finite. */
struct zpp_sum_seen {
    bool nonfinite;          /* an element of the result was infinite or NaN in the dtype of the additions */
    bool replaced_nonfinite; /* where dst is one of the sources: an element of that source was */
};
/* src[r]: `ranks` arrays, at most ZPP_RANKS_MAX, of `elems` elements of `dtype`. dst of dst_dtype (F32 or `dtype`);
 * accumulate: dst[i] += that. dst may be one of the sources, where it has their dtype and does not accumulate. `scale`
 * is rounded to float32 first, unless the elements are float64. One pass, with AVX where the CPU has it. */
struct zpp_sum_seen zpp_reduce_sources(void *dst, zpp_dtype dst_dtype, bool accumulate, const void *const *src,
                                       int ranks, zpp_dtype dtype, size_t elems, double scale);

#endif
