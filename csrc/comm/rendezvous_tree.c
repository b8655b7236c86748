/* SPDX-License-Identifier: Apache-2.0
 *
 * How the ranks of a sparse group learn of each other with a number of reads from the store that does not grow:
 *
 *   1. The ranks are a tree of FAN children a rank. Each rank reads what its children gathered, adds its own endpoint,
 *      and puts all of that into the store ("below").
 *   2. Rank 0 numbers the hosts by their lowest rank. It puts the directory of the group into the store, for each host
 *      the endpoints of that host's ranks ("host"), and for each rank the number of its host ("place").
 *   3. Every rank reads its place, and the endpoints of its own host. When the ranks of a host are connected, the
 *      lowest one reads the directory and hands it to the others in its control memory.
 *
 * A rank that cannot gather reports its error upwards in place of endpoints, and rank 0 hands the error to each rank in
 * place of its place. Each level of the tree waits a second longer than the one below, so that the rank nearest to
 * the one that is missing names it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "rendezvous.h"

enum { FAN = 16, REPORT_MAGIC = 0x5a505242, DIRECTORY_MAGIC = 0x5a505244 };
static const uint64_t LEVEL_NS = 1000000000u;

/* Before the endpoints; or before the text of an error, if `status` is not OK. */
struct report {
    uint32_t magic;
    int32_t status, rank;
    uint32_t count;
};

struct gathering {
    const struct zpp_comm *comm;
    const struct zpp_store *store;
    struct zpp_endpoint *found; /* [ranks]: this rank's, then those of its children's parts of the tree */
    int count;
};

zpp_status zpp_endpoint_check(const struct zpp_comm *comm, const struct zpp_endpoint *own,
                              const struct zpp_endpoint *endpoint, size_t bytes, int rank, struct zpp_err *err) {
    if (bytes != sizeof *endpoint || endpoint->magic != ZPP_ENDPOINT_MAGIC || endpoint->rank != (uint32_t)rank ||
        endpoint->base_bytes != own->base_bytes || endpoint->full_ranks != own->full_ranks)
        return zpp_fail_rank(err, ZPP_PEER, rank,
                             "comm: the store holds an endpoint of %zu bytes for rank %d that this version of zeropp "
                             "does not know (wanted %zu); run the same zeropp on all ranks",
                             bytes, rank, sizeof *endpoint);
    if (endpoint->ranks != own->ranks)
        return zpp_fail_rank(err, ZPP_PEER, rank,
                             "comm: rank %d says that group \"%s\" has %u ranks, but rank %d says %d", rank, comm->name,
                             endpoint->ranks, comm->rank, comm->ranks);
    return ZPP_OK;
}

static int part_ranks(int rank, int ranks) { /* of the tree, from this rank down */
    int count = 0;
    for (long first = rank, last = rank; first < ranks; first = first * FAN + 1, last = last * FAN + FAN)
        count += (int)((last < ranks ? last : ranks - 1) - first + 1);
    return count;
}

static int levels_below(int rank, int ranks) {
    int levels = 0;
    for (long first = (long)rank * FAN + 1; first < ranks; first = first * FAN + 1) levels++;
    return levels;
}

static zpp_status put(const struct gathering *gathering, const char *name, int number, const void *value, size_t bytes,
                      struct zpp_err *err) {
    char key[48];
    snprintf(key, sizeof key, "zpp/%s/%d", name, number);
    return gathering->store->set(gathering->store->ctx, key, value, bytes, err);
}

static zpp_status take(const struct gathering *gathering, const char *name, int number, int levels, void *value,
                       size_t *bytes, struct zpp_err *err) {
    const uint64_t timeout_ns = gathering->comm->timeout_ns;
    char key[48];
    snprintf(key, sizeof key, "zpp/%s/%d", name, number);
    return gathering->store->get(gathering->store->ctx, key, value, bytes,
                                 timeout_ns ? timeout_ns + (uint64_t)levels * LEVEL_NS : 0, err);
}

static zpp_status unknown(const struct gathering *gathering, int rank, size_t bytes, struct zpp_err *err) {
    return zpp_fail_rank(err, ZPP_PEER, rank,
                         "comm: the store holds %zu bytes of rank %d of group \"%s\" that this version of zeropp does "
                         "not know; run the same zeropp on all ranks",
                         bytes, rank, gathering->comm->name);
}

/* Return the error that a value holds in place of its contents. */
static zpp_status told(const struct report *report, size_t bytes, struct zpp_err *err) {
    char text[ZPP_ERR_TEXT_BYTES] = {0};
    const size_t length = bytes - sizeof *report;
    memcpy(text, report + 1, length < sizeof text ? length : sizeof text - 1);
    return zpp_fail_rank(err, (zpp_status)report->status, report->rank, "%s", text);
}

static zpp_status put_error(const struct gathering *gathering, const char *name, int number, zpp_status status,
                            const struct zpp_err *reason) {
    struct {
        struct report report;
        char text[ZPP_ERR_TEXT_BYTES];
    } value = {.report = {REPORT_MAGIC, (int32_t)status, reason->rank, 0}};
    struct zpp_err ignored = ZPP_ERR_INIT;
    snprintf(value.text, sizeof value.text, "%s", reason->text);
    (void)put(gathering, name, number, &value, sizeof value, &ignored);
    return status;
}

/* --- up the tree -------------------------------------------------------------------------------------------------- */

static zpp_status take_child(struct gathering *gathering, int child, struct zpp_err *err) {
    const struct zpp_comm *comm = gathering->comm;
    const int most = part_ranks(child, comm->ranks);
    const size_t error_bytes = sizeof(struct report) + ZPP_ERR_TEXT_BYTES;
    size_t bytes = sizeof(struct report) + (size_t)most * sizeof(struct zpp_endpoint) + error_bytes;
    struct report *report = malloc(bytes);
    if (!report) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for the endpoints of %d ranks", most);
    zpp_status status = take(gathering, "below", child, levels_below(child, comm->ranks), report, &bytes, err);
    if (status != ZPP_OK && err) err->rank = child;
    if (status == ZPP_OK && (bytes < sizeof *report || report->magic != REPORT_MAGIC))
        status = unknown(gathering, child, bytes, err);
    if (status == ZPP_OK && report->status != ZPP_OK) status = told(report, bytes, err);
    if (status == ZPP_OK && bytes != sizeof *report + (size_t)most * sizeof(struct zpp_endpoint))
        status = unknown(gathering, child, bytes, err);
    if (status == ZPP_OK) {
        memcpy(gathering->found + gathering->count, report + 1, (size_t)most * sizeof(struct zpp_endpoint));
        gathering->count += most;
    }
    free(report);
    return status;
}

static zpp_status gather(struct gathering *gathering, struct zpp_err *err) {
    const struct zpp_comm *comm = gathering->comm;
    const long first = (long)comm->rank * FAN + 1;
    zpp_status status = ZPP_OK;
    for (long child = first; status == ZPP_OK && child < first + FAN && child < comm->ranks; child++)
        status = take_child(gathering, (int)child, err);
    return status;
}

static zpp_status report_up(const struct gathering *gathering, struct zpp_err *err) {
    const size_t endpoints_bytes = (size_t)gathering->count * sizeof(struct zpp_endpoint);
    struct report *report = malloc(sizeof *report + endpoints_bytes);
    if (!report) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for the endpoints of %d ranks", gathering->count);
    *report = (struct report){REPORT_MAGIC, ZPP_OK, ZPP_NO_RANK, (uint32_t)gathering->count};
    memcpy(report + 1, gathering->found, endpoints_bytes);
    const zpp_status status =
        put(gathering, "below", gathering->comm->rank, report, sizeof *report + endpoints_bytes, err);
    free(report);
    return status;
}

/* --- rank 0 ------------------------------------------------------------------------------------------------------- */

static int by_rank(const void *a, const void *b) {
    const uint32_t left = ((const struct zpp_endpoint *)a)->rank, right = ((const struct zpp_endpoint *)b)->rank;
    return (left > right) - (left < right);
}

static int by_host(const void *a, const void *b) {
    const int order = strncmp(((const struct zpp_endpoint *)a)->identity, ((const struct zpp_endpoint *)b)->identity,
                              sizeof((const struct zpp_endpoint *)a)->identity);
    return order ? order : by_rank(a, b);
}

static zpp_status check_all(const struct gathering *gathering, struct zpp_err *err) {
    const struct zpp_endpoint *own = &gathering->found[0];
    zpp_status status = ZPP_OK;
    for (int r = 0; status == ZPP_OK && r < gathering->comm->ranks; r++) {
        const struct zpp_endpoint *endpoint = &gathering->found[r];
        status = zpp_endpoint_check(gathering->comm, own, endpoint, sizeof *endpoint, r, err);
        if (status == ZPP_OK && endpoint->door.family != own->door.family)
            status = zpp_fail_rank(err, ZPP_PEER, r,
                                   "comm: rank %d has an IPv%u address and rank 0 an IPv%u one; set ZEROPP_IFNAME or "
                                   "ZEROPP_IP_FAMILY so that they agree",
                                   r, endpoint->door.family, own->door.family);
    }
    return status;
}

/* Return the place of an address among the addresses, the last of which it becomes if it is new. Ranks of one host come
 * one after the other, and usually have one address. */
static size_t address_place(uint8_t *addresses, size_t *count, const uint8_t *address) {
    if (*count && memcmp(addresses + 16 * (*count - 1), address, 16) == 0) return *count - 1;
    memcpy(addresses + 16 * *count, address, 16);
    return (*count)++;
}

/* Number the hosts by their lowest rank: host_at[i] of the i-th endpoint in the order of hosts. */
static int number_hosts(const struct zpp_endpoint *sorted, int ranks, int *host_at, int *first_of) {
    int hosts = 0;
    for (int r = 0; r < ranks; r++) first_of[r] = -1;
    for (int i = 0, begin = 0; i < ranks; i++) {
        if (i && strncmp(sorted[i].identity, sorted[i - 1].identity, sizeof sorted->identity) != 0) begin = i;
        first_of[sorted[begin].rank] = begin;
        host_at[i] = begin;
    }
    for (int r = 0; r < ranks; r++) { /* hosts in the order of their lowest ranks; -1 - number marks them */
        const int begin = first_of[r];
        if (begin < 0) continue;
        for (int i = begin; i < ranks && host_at[i] == begin; i++) host_at[i] = -1 - hosts;
        hosts++;
    }
    for (int i = 0; i < ranks; i++) host_at[i] = -1 - host_at[i];
    return hosts;
}

static void fill_directory(struct zpp_directory *directory, const struct zpp_endpoint *sorted, int ranks,
                           const int *host_at) {
    uint8_t *addresses = (uint8_t *)&directory->entry[ranks];
    size_t count = 0;
    directory->magic = DIRECTORY_MAGIC;
    directory->family = sorted[0].door.family;
    directory->links = sorted[0].door.links;
    for (int i = 0; i < ranks; i++) {
        const struct zpp_endpoint *endpoint = &sorted[i];
        if (endpoint->door.links < directory->links) directory->links = endpoint->door.links;
        directory->entry[endpoint->rank] =
            (struct zpp_directory_entry){.host = (uint16_t)host_at[i],
                                         .address = (uint16_t)address_place(addresses, &count, endpoint->door.address),
                                         .port = endpoint->door.port,
                                         .pid = (int32_t)endpoint->pid};
    }
    directory->addresses = (uint32_t)count;
}

/* `sorted` in the order of hosts. */
static zpp_status hand_out(const struct gathering *gathering, const struct zpp_endpoint *sorted, int *host_at,
                           struct zpp_directory *directory, struct zpp_err *err) {
    const int ranks = gathering->comm->ranks;
    zpp_status status = ZPP_OK;
    for (int i = 0; status == ZPP_OK && i < ranks; i++) {
        const struct report place = {REPORT_MAGIC, ZPP_OK, host_at[i], 0};
        status = put(gathering, "place", (int)sorted[i].rank, &place, sizeof place, err);
    }
    for (int begin = 0, end; status == ZPP_OK && begin < ranks; begin = end) {
        for (end = begin; end < ranks && host_at[end] == host_at[begin];) end++;
        status = put(gathering, "host", host_at[begin], sorted + begin,
                     (size_t)(end - begin) * sizeof *sorted, err);
    }
    if (status != ZPP_OK) return status;
    return put(gathering, "directory", 0, directory, zpp_directory_bytes(ranks, directory->addresses), err);
}

static zpp_status direct(struct gathering *gathering, struct zpp_err *err) {
    const int ranks = gathering->comm->ranks;
    struct zpp_directory *directory = calloc(1, zpp_directory_bytes(ranks, (size_t)ranks));
    int *numbers = calloc((size_t)ranks * 2, sizeof *numbers);
    zpp_status status = ZPP_OK;
    qsort(gathering->found, (size_t)ranks, sizeof *gathering->found, by_rank);
    if (!directory || !numbers) status = zpp_fail(err, ZPP_NOMEM, "comm: no memory for %d addresses", ranks);
    if (status == ZPP_OK) status = check_all(gathering, err);
    if (status == ZPP_OK && getrandom(directory->secret, sizeof directory->secret, 0) !=
                                (ssize_t)sizeof directory->secret)
        status = zpp_fail(err, ZPP_OS, "comm: no random bytes for the secret of the group");
    if (status == ZPP_OK) {
        qsort(gathering->found, (size_t)ranks, sizeof *gathering->found, by_host);
        directory->hosts = (uint32_t)number_hosts(gathering->found, ranks, numbers, numbers + ranks);
        fill_directory(directory, gathering->found, ranks, numbers);
        status = hand_out(gathering, gathering->found, numbers, directory, err);
    }
    free(directory);
    free(numbers);
    return status;
}

/* --- every rank --------------------------------------------------------------------------------------------------- */

static zpp_status read_place(const struct gathering *gathering, int *host, struct zpp_err *err) {
    const struct zpp_comm *comm = gathering->comm;
    _Alignas(struct report) uint8_t value[sizeof(struct report) + ZPP_ERR_TEXT_BYTES];
    const struct report *report = (const struct report *)value;
    size_t bytes = sizeof value;
    const zpp_status status =
        take(gathering, "place", comm->rank, levels_below(0, comm->ranks) + 1, value, &bytes, err);
    if (status != ZPP_OK) return status;
    if (bytes < sizeof *report || report->magic != REPORT_MAGIC) return unknown(gathering, 0, bytes, err);
    if (report->status != ZPP_OK) return told(report, bytes, err);
    *host = report->rank;
    return ZPP_OK;
}

/* The endpoints of this host's ranks, each to its place in `endpoint`. */
static zpp_status read_host(const struct gathering *gathering, struct zpp_endpoint *endpoint, bool *here,
                            struct zpp_err *err) {
    const struct zpp_comm *comm = gathering->comm;
    const struct zpp_endpoint own = endpoint[comm->rank];
    struct zpp_endpoint *found = gathering->found; /* nobody needs its old contents */
    size_t bytes = (size_t)comm->ranks * sizeof *found;
    int host = 0;
    zpp_status status = read_place(gathering, &host, err);
    if (status == ZPP_OK)
        status = take(gathering, "host", host, levels_below(0, comm->ranks) + 1, found, &bytes, err);
    for (size_t i = 0; status == ZPP_OK && i < bytes / sizeof *found; i++) {
        const uint32_t rank = found[i].rank;
        if (rank >= (uint32_t)comm->ranks) return unknown(gathering, 0, bytes, err);
        status = zpp_endpoint_check(comm, &own, &found[i], sizeof *found, (int)rank, err);
        endpoint[rank] = found[i];
        here[rank] = true;
    }
    return status;
}

zpp_status zpp_gather_endpoints(const struct zpp_comm *comm, const struct zpp_store *store,
                                struct zpp_endpoint *endpoint, bool *here, struct zpp_err *err) {
    struct gathering gathering = {.comm = comm, .store = store, .count = 1};
    struct zpp_err reason = ZPP_ERR_INIT;
    gathering.found = malloc((size_t)comm->ranks * sizeof *gathering.found);
    if (!gathering.found) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for the endpoints of %d ranks", comm->ranks);
    gathering.found[0] = endpoint[comm->rank];
    zpp_status status = gather(&gathering, &reason);
    if (status == ZPP_OK) status = comm->rank ? report_up(&gathering, &reason) : direct(&gathering, &reason);
    if (status != ZPP_OK) {
        if (comm->rank) (void)put_error(&gathering, "below", comm->rank, status, &reason);
        for (int r = 1; comm->rank == 0 && r < comm->ranks; r++)
            (void)put_error(&gathering, "place", r, status, &reason);
        if (err) *err = reason;
    } else {
        status = read_host(&gathering, endpoint, here, err);
    }
    free(gathering.found);
    return status;
}

/* --- the directory ------------------------------------------------------------------------------------------------ */

_Static_assert(sizeof(struct zpp_directory) + ZPP_RANKS_MAX * (sizeof(struct zpp_directory_entry) + 16) <=
                   2 * ZPP_SMALL_BYTES,
               "a directory fits into `small`");

enum { HANDED = 1, NOT_READ };

static zpp_status await_handed(struct zpp_wait_ctx *wait_ctx, struct zpp_counter *counter, uint32_t target, int rank,
                               struct zpp_err *err) {
    while (!zpp_counter_sleep(wait_ctx, counter, target, 100000000u)) {
        const bool gone = zpp_peer_gone(wait_ctx->comm, rank);
        if (zpp_counter_reached(counter, target)) break;
        const zpp_status status = zpp_wait_check(wait_ctx, rank, gone, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

/* Fill this rank's `small`, and tell the others of this host, also of a failure. */
static zpp_status read_directory(struct zpp_wait_ctx *wait_ctx, const struct zpp_store *store, int locals,
                                 struct zpp_err *err) {
    const struct zpp_comm *comm = wait_ctx->comm;
    const struct gathering gathering = {.comm = comm, .store = store};
    struct zpp_control *control = zpp_control(comm, comm->rank);
    struct zpp_directory *directory = (struct zpp_directory *)(void *)control->small;
    size_t bytes = sizeof control->small;
    zpp_status status = take(&gathering, "directory", 0, levels_below(0, comm->ranks) + 1, directory, &bytes, err);
    if (status == ZPP_OK && (bytes < sizeof *directory || directory->magic != DIRECTORY_MAGIC ||
                             bytes != zpp_directory_bytes(comm->ranks, directory->addresses)))
        status = unknown(&gathering, 0, bytes, err);
    zpp_counter_raise(&control->handed[0].counter, status == ZPP_OK ? HANDED : NOT_READ);
    if (status != ZPP_OK) return status;
    /* `small` is used by collectives from here on. */
    int other = comm->rank + 1; /* whom a timeout names: one of those that have to copy it */
    while (other + 1 < comm->ranks && !comm->base[other]) other++;
    if (locals == 1) return ZPP_OK;
    return await_handed(wait_ctx, &control->handed[1].counter, (uint32_t)locals - 1, other, err);
}

static zpp_status copy_directory(struct zpp_comm *comm, const struct zpp_directory *from, struct zpp_hosts *hosts,
                                 struct zpp_err *err) {
    const size_t bytes = zpp_directory_bytes(comm->ranks, from->addresses);
    struct zpp_directory *directory = malloc(bytes);
    if (!directory) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for %d addresses", comm->ranks);
    memcpy(directory, from, bytes);
    zpp_door_direct(comm, directory);
    hosts->hosts = (int)directory->hosts;
    for (int r = 0; r < comm->ranks; r++) {
        const struct zpp_directory_entry *entry = &directory->entry[r];
        hosts->host_of[r] = entry->host;
        comm->peer[r].pid = entry->pid;
        if (entry->host >= directory->hosts || entry->address >= directory->addresses)
            return zpp_fail_rank(err, ZPP_PEER, 0, "comm: rank %d of group \"%s\" has host %u of %u in the directory",
                                 r, comm->name, entry->host, directory->hosts);
    }
    return ZPP_OK;
}

zpp_status zpp_share_directory(struct zpp_wait_ctx *wait_ctx, const struct zpp_store *store, int first, int locals,
                               struct zpp_hosts *hosts, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    struct zpp_control *lowest = zpp_control(comm, first);
    const struct zpp_directory *directory = (const struct zpp_directory *)(const void *)lowest->small;
    zpp_status status = ZPP_OK;
    if (comm->rank == first) {
        status = read_directory(wait_ctx, store, locals, err);
        return status == ZPP_OK ? copy_directory(comm, directory, hosts, err) : status;
    }
    status = await_handed(wait_ctx, &lowest->handed[0].counter, HANDED, first, err);
    if (status != ZPP_OK) return status;
    if (zpp_counter_reached(&lowest->handed[0].counter, NOT_READ))
        return zpp_fail_rank(err, ZPP_PEER, first, "comm: rank %d of group \"%s\" could not read where the ranks are",
                             first, comm->name);
    status = copy_directory(comm, directory, hosts, err);
    zpp_counter_add(&lowest->handed[1].counter);
    return status;
}
