/* SPDX-License-Identifier: Apache-2.0
 *
 * device_region.h on CUDA: descriptors travel as those of region.c do, and then every rank tells every other whether it
 * has mapped them all. So no rank goes on with a region that another one lacks.
 */
#include "../device_region.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "../../base/peer_cuda.h"
#include "../internal.h"

struct zpp_device_region {
    zpp_device *device; /* borrowed */
    int ranks;
    size_t bytes;
    zpp_region *host; /* on the CPU; NULL on CUDA */
    struct zpp_peer_memory part[ZPP_RANKS_MAX];
};

/* What one rank tells the others in `a` of its messages. */
enum { WITH_MEMORY = 1, WITHOUT_MEMORY, MAPPED, NOT_MAPPED };

struct making {
    uint64_t number;
    size_t bytes;
};

static void describe(const void *ctx, char *text, size_t capacity) {
    const struct making *making = ctx;
    snprintf(text, capacity, "device_region_create(%zu bytes) #%llu", making->bytes,
             (unsigned long long)making->number);
}

static zpp_status send_all(struct zpp_comm *comm, uint64_t kind, const struct making *making, uint64_t state, int fd,
                           struct zpp_err *err) {
    const struct zpp_message content = {kind, making->number, state, making->bytes};
    zpp_status status = ZPP_OK;
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++) {
        if (r != comm->rank) status = zpp_message_send(comm, r, &content, fd, err);
    }
    return status;
}

static zpp_status diverged(struct zpp_comm *comm, const struct making *making, int rank,
                           const struct zpp_message *theirs, struct zpp_err *err) {
    return zpp_comm_fail(comm, ZPP_PEER, rank, err,
                         "comm: rank %d is in device_region_create(%zu bytes) #%llu of group \"%s\" but rank %d is in "
                         "device_region_create(%llu bytes); all ranks must create the same regions in the same order",
                         comm->rank, making->bytes, (unsigned long long)making->number, comm->name, rank,
                         (unsigned long long)theirs->b);
}

/* Map the part of one rank. `*own`: OK so far; an error of mapping goes there, because the group goes on after it. */
static zpp_status take_part(struct zpp_wait_ctx *wait_ctx, struct zpp_device_region *region,
                            const struct making *making, int rank, struct zpp_err *own, struct zpp_err *err) {
    struct zpp_message theirs;
    int fd = -1;
    const zpp_status status =
        zpp_message_wait(wait_ctx, rank, ZPP_MESSAGE_DEVICE_REGION, making->number, &theirs, &fd, err);
    if (status != ZPP_OK) return status;
    const bool same = theirs.b == making->bytes, maps = same && theirs.a == WITH_MEMORY && own->status == ZPP_OK;
    if (maps && fd >= 0) (void)zpp_peer_cuda_import(region->device, fd, region->bytes, &region->part[rank], own);
    if (maps && fd < 0)
        zpp_fail_rank(own, ZPP_OS, rank, "comm: %zu bytes of rank %d came without a descriptor, wanted one; is this "
                      "process at its limit of open files (`ulimit -n`)?", region->bytes, rank);
    if (fd >= 0) close(fd);
    return same ? ZPP_OK : diverged(wait_ctx->comm, making, rank, &theirs, err);
}

/* Learn whether every rank mapped all parts. `*own` keeps this rank's reason. */
static zpp_status agree(struct zpp_wait_ctx *wait_ctx, const struct making *making, struct zpp_err *own,
                        struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    zpp_status status = send_all(comm, ZPP_MESSAGE_DEVICE_MAPPED, making, own->status ? NOT_MAPPED : MAPPED, -1, err);
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++) {
        struct zpp_message theirs;
        int fd = -1;
        if (r == comm->rank) continue;
        status = zpp_message_wait(wait_ctx, r, ZPP_MESSAGE_DEVICE_MAPPED, making->number, &theirs, &fd, err);
        if (status != ZPP_OK || theirs.a == MAPPED || own->status) continue;
        zpp_fail_rank(own, ZPP_NOT_BUILT, r,
                      "comm: rank %d of group \"%s\" has no memory left on its GPU or cannot map its peers' (its own "
                      "error says which), so that ranks cannot share %zu bytes each; wanted all to map all; use "
                      "NCCL's collectives",
                      r, comm->name, making->bytes);
    }
    return status;
}

static zpp_status exchange(struct zpp_comm *comm, struct zpp_device_region *region, const struct making *making,
                           struct zpp_err *own, struct zpp_err *err) {
    const struct zpp_wait wait = {comm->timeout_ns, NULL, NULL};
    struct zpp_wait_ctx wait_ctx = {.comm = comm, .wait = &wait, .fatal = true, .describe = describe, .ctx = making};
    int fd = -1;
    const zpp_status made =
        own->status ? own->status
                    : zpp_peer_cuda_create(region->device, region->bytes, &region->part[comm->rank], &fd, own);
    zpp_status status =
        send_all(comm, ZPP_MESSAGE_DEVICE_REGION, making, made == ZPP_OK ? WITH_MEMORY : WITHOUT_MEMORY, fd, err);
    if (fd >= 0) close(fd);
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++) {
        if (r != comm->rank) status = take_part(&wait_ctx, region, making, r, own, err);
    }
    return status == ZPP_OK ? agree(&wait_ctx, making, own, err) : status;
}

/* Fill the parts on CUDA. A rank whose device cannot export memory takes part too, so that the others get an error. */
static zpp_status make_parts(struct zpp_comm *comm, struct zpp_device_region *region, size_t bytes,
                             struct zpp_err *err) {
    const struct making making = {++comm->regions, bytes};
    struct zpp_err own = ZPP_ERR_INIT;
    size_t grain = 1;
    (void)zpp_peer_cuda_grain(region->device, &grain, &own);
    region->bytes = (bytes + grain - 1) / grain * grain;
    const zpp_status status = exchange(comm, region, &making, &own, err);
    if (status != ZPP_OK) return status;
    if (own.status && err) *err = own;
    return own.status;
}

static zpp_status check(const struct zpp_comm *comm, size_t bytes, struct zpp_err *err) {
    const zpp_status status = zpp_comm_check(comm, err);
    if (status != ZPP_OK) return status;
    if (bytes == 0 || bytes > SIZE_MAX / 4)
        return zpp_fail(err, ZPP_INVALID, "comm: a device region of %zu bytes, wanted at least 1", bytes);
    if (!comm->net) return ZPP_OK;
    return zpp_fail(err, ZPP_NOT_BUILT,
                    "comm: memory of GPUs for all ranks of group \"%s\", which are on %d hosts; memory is shared "
                    "within one host only; use NCCL's collectives",
                    comm->name, zpp_comm_hosts(comm));
}

zpp_status zpp_device_region_create(zpp_comm *comm, zpp_device *device, size_t bytes, zpp_device_region **out,
                                    struct zpp_err *err) {
    zpp_status status = check(comm, bytes, err);
    if (status != ZPP_OK) return status;
    struct zpp_device_region *region = calloc(1, sizeof *region);
    if (!region) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for a device region of %zu bytes", bytes);
    region->device = device;
    region->ranks = comm->ranks;
    if (zpp_device_kind(device) == ZPP_DEVICE_CUDA) {
        status = make_parts(comm, region, bytes, err);
    } else {
        status = zpp_region_create(comm, ZPP_REGION_PER_RANK, bytes, &region->host, err);
        if (status == ZPP_OK) region->bytes = zpp_region_bytes(region->host);
    }
    if (status != ZPP_OK) {
        zpp_device_region_destroy(region);
        return status;
    }
    *out = region;
    return ZPP_OK;
}

void zpp_device_region_destroy(zpp_device_region *region) {
    if (!region) return;
    for (int r = 0; r < region->ranks; r++) zpp_peer_cuda_unmap(region->device, &region->part[r]);
    zpp_region_destroy(region->host);
    free(region);
}

void *zpp_device_region_base(const zpp_device_region *region, int rank) {
    return region->host ? zpp_region_base(region->host, rank) : region->part[rank].base;
}

size_t zpp_device_region_bytes(const zpp_device_region *region) { return region->bytes; }
