/* SPDX-License-Identifier: Apache-2.0
 *
 * Phases of rows on GPUs (rows.h). What a rank publishes is copied to its part of a device region, and the kernels of
 * all ranks read it there. One counter a rank orders their streams. Phase n is
 *
 *   a copy to half n % 2 of the part, which then signals written n
 *   the kernel, after written n of all ranks
 *
 * Two halves are enough without another counter. The copy n + 2 stands behind the kernel n + 1 in its stream, and so
 * after written n + 1 of all ranks, each of which stands behind its rank's kernel n.
 *
 * A host posts the descriptor of phase n once it has enqueued the signal, and enqueues the wait once it has the
 * descriptors of all ranks. So each wait is enqueued after the signals that answer it (counters.h), and no host waits
 * for a GPU.
 */
#include "rows_internal.h"

#include <stdlib.h>

#include "counters.h"
#include "device_region.h"

enum rows_counter { WRITTEN, WORDS };
static const char *const doing[WORDS] = {"the rows of an exchange"};

struct zpp_rows_device {
    zpp_device *device; /* borrowed */
    zpp_stream *stream; /* follows the caller's */
    zpp_event *idle;
    zpp_counters *counters;    /* NULL, as is the next: one rank */
    zpp_device_region *region; /* two halves */
    size_t half_bytes;
    uint64_t phases;
};

/* --- open --------------------------------------------------------------------------------------------------------- */

static zpp_status open_own(struct zpp_rows *rows, struct zpp_err *err) {
    struct zpp_rows_device *on = rows->device;
    if (rows->ranks > ZPP_MOE_PEER_CUDA_RANKS)
        return zpp_fail(err, ZPP_NOT_BUILT, "moe: %zu ranks of one host, wanted at most %d whose GPUs read each other",
                        rows->ranks, (int)ZPP_MOE_PEER_CUDA_RANKS);
    zpp_status status = zpp_moe_peer_cuda_find(on->device, err);
    if (status == ZPP_OK) status = zpp_stream_create(on->device, ZPP_STREAM_HOST, "rows", &on->stream, err);
    return status == ZPP_OK ? zpp_event_create(on->device, &on->idle, err) : status;
}

static zpp_status make_region(struct zpp_rows *rows, size_t half_bytes, struct zpp_err *err) {
    struct zpp_rows_device *on = rows->device;
    const zpp_status status = zpp_device_region_create(rows->comm, on->device, 2 * half_bytes, &on->region, err);
    if (status == ZPP_OK) on->half_bytes = zpp_device_region_bytes(on->region) / 2 & ~(size_t)(ZPP_LINE_BYTES - 1);
    return status;
}

/* Learn whether all ranks have what they need. `*own` keeps this rank's reason. */
static zpp_status agree(struct zpp_rows *rows, const struct zpp_wait *wait, struct zpp_err *own, struct zpp_err *err) {
    struct zpp_row_phase phase = {.desc = {.kind = ZPP_ROW_OPEN}};
    const zpp_status status = zpp_rows_tell(rows, &phase, own->status == ZPP_OK, wait, err);
    if (status != ZPP_OK) return status;
    zpp_desc_ring_ack(rows->ring, phase.seq);
    for (size_t r = 0; r < rows->ranks && own->status == ZPP_OK; r++) {
        const int label = zpp_label(rows->comm, (int)r);
        if (!phase.count[r])
            zpp_fail_rank(own, ZPP_NOT_BUILT, label,
                          "moe: rank %d of group \"%s\" cannot let its GPU and those of its peers read each other's "
                          "rows (its own reason says why)",
                          label, rows->comm->name);
    }
    return ZPP_OK;
}

/* Every rank does all of it: one that lacks something of its own, too. */
static zpp_status open_shared(struct zpp_rows *rows, const struct zpp_wait *wait, struct zpp_err *own,
                              struct zpp_err *err) {
    struct zpp_rows_device *on = rows->device;
    struct zpp_err failure = ZPP_ERR_INIT;
    rows->broken = true;
    zpp_status status = make_region(rows, 1, &failure);
    if (status == ZPP_OK)
        status = zpp_counters_create(rows->comm, on->device, doing, WORDS, &on->counters, &failure);
    if (status != ZPP_OK && own->status == ZPP_OK) *own = failure;
    status = zpp_comm_health(rows->comm, err);
    if (status == ZPP_OK) status = agree(rows, wait, own, err);
    rows->broken = status != ZPP_OK;
    return status;
}

zpp_status zpp_rows_open_device(zpp_rows *rows, zpp_device *device, const struct zpp_wait *wait, bool *opened,
                                struct zpp_err *err) {
    struct zpp_err own = ZPP_ERR_INIT;
    *opened = false;
    zpp_status status = zpp_rows_enter_phase(rows, err);
    if (status != ZPP_OK) return status;
    if (rows->device) return zpp_rows_leave(rows, zpp_fail(err, ZPP_STATE, "moe: this exchange has a device already"));
    rows->device = calloc(1, sizeof *rows->device);
    if (!rows->device)
        return zpp_rows_leave(rows, zpp_fail(err, ZPP_NOMEM, "moe: no memory for the record of a device"));
    rows->device->device = device;
    (void)open_own(rows, &own);
    if (rows->comm) status = open_shared(rows, wait, &own, err);
    *opened = status == ZPP_OK && own.status == ZPP_OK;
    if (!*opened) {
        zpp_rows_device_destroy(rows->device);
        rows->device = NULL;
    }
    if (status == ZPP_OK && own.status != ZPP_OK) *err = own;
    return zpp_rows_leave(rows, status);
}

void zpp_rows_device_destroy(struct zpp_rows_device *on) {
    if (!on) return;
    zpp_stream_destroy(on->stream);
    zpp_event_destroy(on->idle);
    zpp_device_region_destroy(on->region);
    zpp_counters_destroy(on->counters);
    free(on);
}

/* --- phases ------------------------------------------------------------------------------------------------------- */

/* Collective: all ranks know how much the fullest one publishes. */
static zpp_status reserve(struct zpp_rows *rows, const struct zpp_row_memory *memory, const struct zpp_wait *wait,
                          struct zpp_err *err) {
    struct zpp_rows_device *on = rows->device;
    const size_t bytes = zpp_rows_whole_lines(memory->most_count * memory->first_item_bytes) +
                         memory->most_count * memory->second_item_bytes;
    if (bytes <= on->half_bytes) return ZPP_OK;
    zpp_status status = zpp_event_record(on->idle, on->stream, err);
    if (status == ZPP_OK) status = zpp_event_sync(on->idle, wait, err);
    if (status != ZPP_OK) return status;
    zpp_device_region_destroy(on->region);
    on->region = NULL;
    on->half_bytes = 0;
    return make_region(rows, zpp_rows_whole_lines(bytes + bytes / 4), err);
}

static uint8_t *half_of(const struct zpp_rows_device *on, int rank, uint64_t number) {
    return (uint8_t *)zpp_device_region_base(on->region, rank) + number % 2 * on->half_bytes;
}

/* Copy what this rank publishes to its part. */
static zpp_status publish(struct zpp_rows *rows, const struct zpp_row_phase *phase,
                          const struct zpp_row_memory *memory, struct zpp_err *err) {
    struct zpp_rows_device *on = rows->device;
    const size_t first_bytes = memory->count * memory->first_item_bytes;
    const size_t second_bytes = memory->second ? memory->count * memory->second_item_bytes : 0;
    uint8_t *to = half_of(on, (int)rows->rank, phase->number);
    zpp_status status = zpp_stream_copy(on->stream, to, memory->first, first_bytes, err);
    if (status == ZPP_OK)
        status = zpp_stream_copy(on->stream, to + zpp_rows_whole_lines(first_bytes), memory->second, second_bytes, err);
    return status == ZPP_OK ? zpp_counters_signal(on->counters, on->stream, WRITTEN, phase->number, err) : status;
}

zpp_status zpp_rows_device_begin(struct zpp_rows *rows, struct zpp_row_phase *phase,
                                 const struct zpp_row_memory *memory, void *native, const struct zpp_wait *wait,
                                 struct zpp_err *err) {
    struct zpp_rows_device *on = rows->device;
    zpp_status status = zpp_stream_follow(on->stream, native, err);
    if (status != ZPP_OK || !rows->comm) return status;
    rows->broken = true; /* until the phase has ended well */
    phase->number = ++on->phases;
    status = reserve(rows, memory, wait, err);
    if (status == ZPP_OK) status = publish(rows, phase, memory, err);
    if (status == ZPP_OK) status = zpp_rows_tell(rows, phase, memory->count, wait, err);
    if (status == ZPP_OK) status = zpp_counters_await(on->counters, on->stream, WRITTEN, phase->number, err);
    for (size_t r = 0; r < rows->ranks && status == ZPP_OK; r++) {
        const uint8_t *from = half_of(on, (int)r, phase->number);
        phase->first[r] = from;
        phase->second[r] = from + zpp_rows_whole_lines(phase->count[r] * memory->first_item_bytes);
    }
    return status;
}

void zpp_rows_device_end(struct zpp_rows *rows, const struct zpp_row_phase *phase) {
    if (!rows->comm) return;
    zpp_desc_ring_ack(rows->ring, phase->seq);
    rows->broken = false;
}

struct zpp_moe_peer_cuda zpp_rows_device_on(const struct zpp_rows *rows, void *native) {
    const struct zpp_rows_device *on = rows->device;
    return (struct zpp_moe_peer_cuda){on->device, native, on->counters ? zpp_counters_halt(on->counters) : NULL};
}
