/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups over several hosts (docs/design/0016-groups-over-hosts.md): the host of every rank, the connections to ranks
 * on other hosts, and the collectives over them. A group on one host has none of this.
 *
 * Links of a pair of ranks on different hosts, in the order of their slots:
 *   control   comm errors and the farewell; read by the watcher thread only, written by any thread under
 *             `control_link_lock`
 *   p2p       the byte channel of send and receive (p2p.c); used under p2p.c's lock
 *   data      collectives, by the thread that runs collectives
 *
 * A full group makes all of them when it is created. In a sparse group each rank has control links to the ranks at its
 * place on the hosts 1, 2, 4, ... before and after its own, which pass comm errors on; the other links are made when
 * they are first needed, and the p2p link goes one way, from the rank that made it.
 */
#ifndef ZPP_COMM_NET_H
#define ZPP_COMM_NET_H

#include <sys/socket.h>
#include "frame.h"
#include "../internal.h"

enum {
    ZPP_NET_DATA_MAX = 8,
    ZPP_NET_DATA_DEFAULT = 2,
    ZPP_NET_CONTROL = 0,
    ZPP_NET_P2P = 1,
    ZPP_NET_DATA = 2,
    ZPP_NET_SLOTS_MAX = ZPP_NET_DATA + ZPP_NET_DATA_MAX,
    ZPP_NET_SECRET_BYTES = 16,
    ZPP_NET_P2P_BYTES = 64 * 1024,
};

/* The hosts of the ranks. Hosts are numbered by their lowest rank; the ranks of a host are in order. */
struct zpp_hosts {
    int hosts, mine;
    int host_of[ZPP_RANKS_MAX], index_of[ZPP_RANKS_MAX]; /* of each rank: its host, its place there */
    int count[ZPP_RANKS_MAX];                            /* of each host: its number of ranks */
    int first[ZPP_RANKS_MAX], order[ZPP_RANKS_MAX];      /* of each host: where its ranks begin in `order` */
    bool even;                                           /* all hosts have equally many */
};
static inline int zpp_rank_at(const struct zpp_hosts *hosts, int host, int place) {
    return hosts->order[hosts->first[host] + place];
}
/* Complete `hosts` of its number of hosts, host_of[] of `ranks` ranks, and the rank that asks. */
void zpp_hosts_count(struct zpp_hosts *hosts, int ranks, int rank);

/* The bytes of send and receive with one peer, made at the first send or receive. */
struct zpp_net_stream {
    uint8_t stash[64]; /* bytes of a header that the socket did not take */
    size_t stash_bytes, inbox_at, inbox_end;
    uint8_t inbox[ZPP_NET_P2P_BYTES];
};

struct zpp_net_peer {
    _Atomic int link[ZPP_NET_SLOTS_MAX];  /* -1: not made (yet) */
    _Atomic int p2p_in;                   /* what the peer sends comes over; in a full group link[ZPP_NET_P2P] */
    int data_links, rank;
    _Atomic uint32_t left;                /* it said farewell */
    _Atomic uint64_t gone_ns, heard_ns;   /* when it left or died (0: neither), when bytes last came from it */
    struct zpp_control_link *control;     /* the part of a frame that has come; watcher only; NULL: no control link */
    struct zpp_net_stream *stream;        /* p2p */
    struct zpp_comm *comm;
};

struct zpp_net {
    struct zpp_hosts hosts;
    struct zpp_comm *local; /* the ranks of this host as a group: a view, see net_local.c */
    struct zpp_net_peer peer[ZPP_RANKS_MAX];
    pthread_mutex_t control_link_lock; /* writing to control links; innermost */
    pthread_t watcher;
    bool watching;
    int epoll, stop;    /* stop: an eventfd */
    int made;           /* sparse: an eventfd, raised when a peer made a link */
    char interface[32]; /* of the connections; watcher only, as the next three */
    bool asked;         /* `interface` is known */
    int farther;        /* the lowest rank reached through it */
    uint64_t no_link_ns; /* when its link was lost; 0: it has one */
    void *mirror;        /* base[] of ranks elsewhere */
    uint8_t *scratch;
    size_t scratch_bytes;
    struct zpp_flow *flows; /* of the collective in progress */
    size_t flows_most;
    uint64_t received_bytes;                              /* by collectives, so far */
    _Atomic uint64_t network_bytes[ZPP_TRAFFIC_KINDS];    /* part of traffic_bytes that came over the network */
};

static inline bool zpp_net_elsewhere(const struct zpp_comm *comm, int rank) {
    return comm->net && comm->net->hosts.host_of[rank] != comm->net->hosts.mine;
}

/* --- net_address.c ----------------------------------------------------------------------------------------------- */
struct zpp_net_address {
    struct sockaddr_storage address;
    socklen_t length;
    char interface[32];
};
/* Choose the address to bind, with port 0, by zpp_network_options. */
zpp_status zpp_net_choose(const struct zpp_network_options *options, struct zpp_net_address *out, struct zpp_err *err);
void zpp_net_describe(const struct sockaddr_storage *address, char *text, size_t capacity);
/* Return the interface that has this connected socket's own address ("": unknown), and whether it has a link: it
 * exists, it is up, and it detects a carrier. */
void zpp_net_interface_of(int socket, char *name, size_t capacity);
bool zpp_net_has_link(int socket, const char *interface);
/* Write the identity of this host: boot id and network namespace, or the override. */
void zpp_net_identity(const struct zpp_network_options *options, char *out, size_t capacity);

/* --- net_auth.c -------------------------------------------------------------------------------------------------- */
/* SipHash-2-4 (Aumasson, Bernstein 2012). */
uint64_t zpp_net_mac(const uint8_t key[ZPP_NET_SECRET_BYTES], const void *data, size_t bytes);
bool zpp_net_same_mac(uint64_t a, uint64_t b); /* in constant time */

/* --- net_join.c: make the connections; net.c, net_links.c: what holds them -------------------------------------- */
zpp_status zpp_net_connect(struct zpp_comm *comm, const struct zpp_network_options *options,
                           const struct zpp_store *store, const struct zpp_wait *wait, struct zpp_err *err);
/* Make the listener of a sparse group, comm->door, which the watcher serves later; comm owns it. `out` is what other
 * ranks have to know of it. */
struct zpp_door_address {
    uint32_t family, links;
    uint8_t address[16];
    uint16_t port, zero[3];
};
zpp_status zpp_door_open(struct zpp_comm *comm, const struct zpp_network_options *options, struct zpp_door_address *out,
                         struct zpp_err *err);
void zpp_door_close(struct zpp_comm *comm);
/* Where every rank of a sparse group is. The addresses follow the entries. */
struct zpp_directory {
    uint32_t magic, family, links, addresses, hosts, zero;
    uint8_t secret[ZPP_NET_SECRET_BYTES]; /* of the group */
    struct zpp_directory_entry {
        uint16_t host, address, port, zero;
        int32_t pid;
    } entry[]; /* [ranks] */
};
static inline size_t zpp_directory_bytes(int ranks, size_t addresses) {
    return sizeof(struct zpp_directory) + (size_t)ranks * sizeof(struct zpp_directory_entry) + 16 * addresses;
}
void zpp_door_direct(struct zpp_comm *comm, struct zpp_directory *directory); /* new; the door owns it */
int zpp_door_epoll(const struct zpp_comm *comm);                              /* readable: serve */
int zpp_door_links(const struct zpp_comm *comm);                              /* data links of each pair */
void zpp_door_serve(struct zpp_comm *comm); /* the watcher's: answer those that call, close those that took too long */
/* Sparse: make these links to `rank`, where they are missing and this rank is the one to call. */
zpp_status zpp_net_reach(struct zpp_wait_ctx *wait_ctx, int rank, int first_slot, int end_slot, struct zpp_err *err);
/* Let the watcher wait for events of `fd`: a link in this slot of a rank, or what stands in place of a rank. */
enum { ZPP_WATCH_STOP = ZPP_RANKS_MAX, ZPP_WATCH_DOOR };
zpp_status zpp_net_watch(struct zpp_net *net, int fd, uint64_t rank, int slot, struct zpp_err *err);
/* A link was made. `incoming`: by the peer. The group owns `fd`, whatever is returned. */
zpp_status zpp_net_attach(struct zpp_comm *comm, int rank, int slot, bool incoming, int fd, struct zpp_err *err);
/* Make comm->net, with the caller's `hosts`, connections and a watcher. comm owns it; zpp_net_destroy also accepts a
 * half-built one. */
zpp_status zpp_net_create(struct zpp_comm *comm, const struct zpp_hosts *hosts,
                          const struct zpp_network_options *options, const struct zpp_store *store,
                          const struct zpp_wait *wait, struct zpp_err *err);
void zpp_net_destroy(struct zpp_comm *comm, bool forked);
void zpp_net_farewell(struct zpp_comm *comm); /* tell the ranks of other hosts that this one leaves; once */
/* Send the ranks of other hosts the reason why the group ended. Any thread; never waits. */
void zpp_net_tell(struct zpp_comm *comm, zpp_status status, int failed_rank, const char *text);
/* Return true if the rank left or died, and nothing has come from it for a while. */
bool zpp_net_gone(const struct zpp_comm *comm, int rank);
bool zpp_net_died(const struct zpp_comm *comm, int rank); /* gone without a farewell */
void zpp_net_lost(struct zpp_comm *comm, int rank);       /* one of its connections is closed */
extern const struct zpp_channel_ops zpp_channels_tcp;

/* --- net_local.c: the ranks of this host as a group -------------------------------------------------------------- */
zpp_status zpp_local_create(struct zpp_comm *comm, struct zpp_comm **out, struct zpp_err *err);
void zpp_local_destroy(struct zpp_comm *local, bool forked);
/* Begin a part inside the host: the next sequence number of the local group. */
zpp_status zpp_hier_intranode(struct zpp_wait_ctx *inside, struct zpp_err *err);

/* --- net_flow.c: bytes of collectives ---------------------------------------------------------------------------- */
/* The connections of a pair that a flow may use. FIRST and REST divide them, so that two flows of one direction run in
 * parallel; a single connection carries them one after the other. */
enum zpp_flow_links { ZPP_LINKS_ALL, ZPP_LINKS_FIRST, ZPP_LINKS_REST };
struct zpp_flow {
    int peer;
    bool out;
    uint32_t part; /* number of the transfer within the collective; compared */
    enum zpp_flow_links links;
    uint8_t *data;
    size_t bytes;
    size_t ready; /* out: so many bytes may be sent; the step function raises it */
    size_t done;  /* so many bytes from the beginning have been received or sent */
    /* in, if not 0: `data` is a ring of so many bytes (zpp_flow_ring_bytes); the step function raises `taken`, how many
     * bytes from the beginning it has read */
    size_t ring_bytes, taken;
    /* private to net_flow.c */
    struct {
        size_t header_bytes, at_bytes;
    } link[ZPP_NET_DATA_MAX];
};
static inline struct zpp_flow zpp_flow_out(int peer, uint32_t part, const void *data, size_t bytes) {
    return (struct zpp_flow){
        .peer = peer, .out = true, .part = part, .data = (uint8_t *)(uintptr_t)data, .bytes = bytes, .ready = bytes};
}
static inline struct zpp_flow zpp_flow_in(int peer, uint32_t part, void *data, size_t bytes) {
    return (struct zpp_flow){.peer = peer, .part = part, .data = data, .bytes = bytes};
}
/* Return the size of a ring in which no connection waits for another one. */
size_t zpp_flow_ring_bytes(const struct zpp_comm *comm);
/* Run all flows to their end, in parallel; flows of one peer and direction run one after the other, in the order of
 * the array. `step` (may be NULL) is called whenever bytes have come. wait_ctx->comm is the whole group. */
zpp_status zpp_flows_run(struct zpp_wait_ctx *wait_ctx, struct zpp_flow *flows, size_t count, void (*step)(void *ctx),
                         void *ctx, struct zpp_err *err);
/* Return `count` flows, kept for the next call. */
zpp_status zpp_net_flows(struct zpp_comm *comm, size_t count, struct zpp_flow **out, struct zpp_err *err);
/* Return scratch of at least `bytes`, page aligned, kept for the next call. */
zpp_status zpp_net_scratch(struct zpp_comm *comm, size_t bytes, uint8_t **out, struct zpp_err *err);

/* --- hier_*.c: collectives over hosts ---------------------------------------------------------------------------- */
/* State that the parts of one collective share, with a timeout for each kind of wait. */
struct zpp_hier {
    struct zpp_comm *comm;
    struct zpp_net *net;
    const struct zpp_hosts *hosts;
    const struct zpp_call *call;
    struct zpp_wait before_wait, internode_wait, after_wait;
    struct zpp_wait_ctx before, internode, after; /* inside the host, over the network, inside the host again */
    int me, place, locals;                        /* this rank, its place on its host, the ranks of this host */
};
/* Sparse: bytes of one rank a host that travel in log2(hosts) messages, if they all fit. */
enum { ZPP_SHARED_BYTES = 1 << 20 };
/* `blocks` has one block of `bytes` for each host, the first of which is this rank's. Fill block k with that of the
 * rank at this place, k hosts further, in log2(hosts) messages. `part` and the 16 after it number the transfers. */
zpp_status zpp_hier_share(struct zpp_hier *hier, uint8_t *blocks, size_t bytes, uint32_t part, struct zpp_err *err);
zpp_status zpp_hier_all_reduce(struct zpp_hier *hier, struct zpp_err *err);
zpp_status zpp_hier_reduce(struct zpp_hier *hier, struct zpp_err *err);
zpp_status zpp_hier_reduce_scatter(struct zpp_hier *hier, struct zpp_err *err);
zpp_status zpp_hier_all_gather(struct zpp_hier *hier, struct zpp_err *err);
zpp_status zpp_hier_broadcast(struct zpp_hier *hier, struct zpp_err *err);
zpp_status zpp_hier_all_to_all(struct zpp_hier *hier, struct zpp_err *err);
zpp_status zpp_hier_barrier(struct zpp_hier *hier, struct zpp_err *err);
zpp_status zpp_hier_quant(struct zpp_hier *hier, struct zpp_err *err); /* all three */

#endif
