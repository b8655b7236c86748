/* SPDX-License-Identifier: Apache-2.0
 *
 * Regions: shared memory made by a collective call. Each owner makes a sealed memfd and sends its descriptor to every
 * peer (one control message a pair); every rank maps it and closes the descriptors: only the mappings keep the memory
 * alive.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "../internal.h"
#include "../../base/mem.h"
#include "memfd.h"

struct zpp_region {
    enum zpp_region_kind kind;
    int rank, ranks;
    size_t bytes;              /* as mapped: whole pages */
    void *base[ZPP_RANKS_MAX]; /* ONE: every entry is the same mapping */
};

static const char *kind_name(uint64_t kind) { return kind == ZPP_REGION_ONE ? "one block" : "one part a rank"; }

struct making {
    uint64_t number, bytes;
    enum zpp_region_kind kind;
};

static void describe(const void *ctx, char *text, size_t capacity) {
    const struct making *making = ctx;
    snprintf(text, capacity, "region_create(%s, %llu bytes) #%llu", kind_name(making->kind),
             (unsigned long long)making->bytes, (unsigned long long)making->number);
}

static zpp_status take_from(struct zpp_wait_ctx *wait_ctx, struct zpp_region *region, const struct making *making,
                            int rank, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    struct zpp_message theirs;
    int fd = -1;
    zpp_status status = zpp_message_wait(wait_ctx, rank, ZPP_MESSAGE_REGION, making->number, &theirs, &fd, err);
    if (status != ZPP_OK) return status;
    if (theirs.a != (uint64_t)making->kind || theirs.b != making->bytes)
        status = zpp_comm_fail(comm, ZPP_PEER, rank, err,
                               "comm: rank %d is in region_create(%s, %llu bytes) #%llu of group \"%s\" but rank %d is "
                               "in region_create(%s, %llu bytes); all ranks must create the same regions in the same "
                               "order",
                               zpp_label(comm, comm->rank), kind_name(making->kind), (unsigned long long)making->bytes,
                               (unsigned long long)making->number, comm->name, zpp_label(comm, rank),
                               kind_name(theirs.a), (unsigned long long)theirs.b);
    else if (making->kind == ZPP_REGION_PER_RANK || rank == 0) /* sent by its owner; zpp_memfd_map refuses -1 */
        status = zpp_memfd_map(fd, region->bytes, &region->base[rank], err);
    if (fd >= 0) close(fd);
    return status;
}

static zpp_status exchange(struct zpp_wait_ctx *wait_ctx, struct zpp_region *region, const struct making *making,
                           int own_fd, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    const struct zpp_message content = {ZPP_MESSAGE_REGION, making->number, making->kind, making->bytes};
    zpp_status status = ZPP_OK;
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++)
        if (r != comm->rank) status = zpp_message_send(comm, r, &content, own_fd, err);
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++)
        if (r != comm->rank) status = take_from(wait_ctx, region, making, r, err);
    return status;
}

static void spread_one(struct zpp_region *region) {
    for (int r = 1; r < region->ranks; r++) region->base[r] = region->base[0];
}

static zpp_status check_region(const struct zpp_comm *comm, enum zpp_region_kind kind, size_t bytes,
                               struct zpp_err *err) {
    const zpp_status status = zpp_comm_check(comm, err);
    if (status != ZPP_OK) return status;
    if (bytes == 0 || bytes > SIZE_MAX / 4)
        return zpp_fail(err, ZPP_INVALID, "comm: a region of %zu bytes, wanted at least 1", bytes);
    if (comm->net && kind == ZPP_REGION_ONE)
        return zpp_fail(err, ZPP_NOT_BUILT,
                        "comm: one block of memory for all ranks of group \"%s\", which are on %d hosts; memory is "
                        "shared within one host only",
                        comm->name, zpp_comm_hosts(comm));
    return ZPP_OK;
}

/* Fill `region->base`: make this rank's memory, if it owns any, and map the memory that peers send. */
static zpp_status make_region(struct zpp_comm *comm, struct zpp_region *region, const struct making *making,
                              struct zpp_err *err) {
    const struct zpp_wait wait = {comm->timeout_ns, NULL, NULL};
    struct zpp_wait_ctx wait_ctx = {.comm = comm, .wait = &wait, .fatal = true, .describe = describe, .ctx = making};
    const bool owner = making->kind == ZPP_REGION_PER_RANK || comm->rank == 0;
    zpp_status status = ZPP_OK;
    int own_fd = -1;
    if (owner) status = zpp_memfd_create("zeropp-region", region->bytes, &own_fd, err);
    if (owner && status == ZPP_OK) status = zpp_memfd_map(own_fd, region->bytes, &region->base[comm->rank], err);
    if (status == ZPP_OK && !comm->net) status = exchange(&wait_ctx, region, making, own_fd, err);
    if (own_fd >= 0) close(own_fd);
    return status;
}

zpp_status zpp_region_create(zpp_comm *comm, enum zpp_region_kind kind, size_t bytes, zpp_region **out,
                             struct zpp_err *err) {
    zpp_status status = check_region(comm, kind, bytes, err);
    if (status != ZPP_OK) return status;
    struct zpp_region *region = calloc(1, sizeof *region);
    if (!region) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for a region of %zu bytes", bytes);
    region->kind = kind;
    region->rank = comm->rank;
    region->ranks = comm->ranks;
    region->bytes = (bytes + zpp_page_bytes() - 1) / zpp_page_bytes() * zpp_page_bytes();
    const struct making making = {++comm->regions, bytes, kind};
    status = make_region(comm, region, &making, err);
    if (status == ZPP_OK && kind == ZPP_REGION_ONE) spread_one(region);
    if (status != ZPP_OK) {
        zpp_region_destroy(region);
        return status;
    }
    *out = region;
    return ZPP_OK;
}

void zpp_region_destroy(zpp_region *region) {
    if (!region) return;
    if (region->kind == ZPP_REGION_ONE)
        zpp_memfd_unmap(region->base[0], region->bytes);
    else
        for (int r = 0; r < region->ranks; r++) zpp_memfd_unmap(region->base[r], region->bytes);
    free(region);
}

void *zpp_region_base(const zpp_region *region, int rank) {
    assert(rank >= 0 && rank < region->ranks);
    return region->base[rank];
}

size_t zpp_region_bytes(const zpp_region *region) { return region->bytes; }

void zpp_region_trim(zpp_region *region, size_t offset_bytes, size_t bytes) {
    assert(offset_bytes % zpp_page_bytes() == 0 && bytes % zpp_page_bytes() == 0);
    assert(offset_bytes + bytes <= region->bytes);
    zpp_memfd_punch((uint8_t *)region->base[region->rank] + offset_bytes, bytes);
}
