/* SPDX-License-Identifier: Apache-2.0
 *
 * Units whole and partitioned. A gather reads every rank's shard from the shared region, by unit, with no partner call:
 * between two steps nobody writes shards (step.c), so there is nothing to wait for and nothing to mistake, even where
 * ranks run different modules.
 *
 *   PARTITIONED --need/prefetch--> FETCHING --the compute stream waits--> FULL --release--> PARTITIONED
 *
 * FILE units are read from their file (unit_file.h) in two operations: one begins the read, the other sees it end, on a
 * stream of its own, so that the reads of several units are under way at once. What fails there is no stream's end: the
 * unit is given back, and whoever needed it hears why.
 *
 * A backward begins with what the forward ends with. Where a forward has nothing left to read ahead, what the backward
 * reads first is *kept*: read, or not given back when it is released, which makes it FETCHING with nothing to fetch.
 * So is what a forward reads first, where a step inside the backward has just left it in memory.
 *
 *   ahead_bytes   units that are FETCHING or kept, each once; at most prefetch_bytes
 *
 * Memory moves in the order of the compute stream: `allocated` says that everything before has let go of it.
 */
#include <string.h>

#include "internode.h"
#include "internal.h"
#include "rank_file.h"
#include "secondary.h"

struct gather_args {
    zpp_zero *zero;
    struct zpp_unit *unit;
    unsigned char *memory;
    bool rounded; /* as of the launch: the unit may be fetched anew before a gather that it gave up has run */
};

static zpp_status gather_shards(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    const struct gather_args *args = arg;
    zpp_zero *zero = args->zero;
    const size_t bytes = zpp_unit_shard_bytes(args->unit);
    const uint64_t began_ns = zpp_span_begin();
    if (args->rounded) {
        zpp_wire_gather(zero, args->unit, args->memory);
        zpp_span_end(began_ns, ZPP_SPAN_GATHER, args->unit->name, bytes * (size_t)zero->ranks);
        return ZPP_OK;
    }
    for (int rank = 0; rank < zero->ranks; rank++) {
        const unsigned char *region = zpp_region_base(zero->params, rank);
        memcpy(args->memory + (size_t)rank * bytes, region + args->unit->region_offset_bytes, bytes);
    }
    zpp_span_end(began_ns, ZPP_SPAN_GATHER, args->unit->name, bytes * (size_t)zero->ranks);
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_GATHER, bytes * (size_t)(zero->ranks - 1));
    return ZPP_OK;
}

struct load_args {
    zpp_unit_file *unit_file;
    int unit;
};

static zpp_status begin_load(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    const struct load_args *args = arg;
    zpp_unit_file_read_begin(args->unit_file, args->unit);
    return ZPP_OK;
}

static zpp_status end_load(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)err;
    const struct load_args *args = arg;
    return zpp_unit_file_read_wait(args->unit_file, args->unit, wait);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

enum { STAY_MAPPED_BYTES = 64 * 1024 }; /* below this, mapping costs more than the memory is worth */

static bool stays_mapped(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zero->range && zpp_unit_bytes(unit) < STAY_MAPPED_BYTES;
}

static size_t mapped_bytes(const struct zpp_unit *unit) {
    return (zpp_unit_bytes(unit) + ZPP_PAGE_BYTES - 1) / ZPP_PAGE_BYTES * ZPP_PAGE_BYTES;
}

static bool in_shared_file(const struct zpp_unit *unit) {
    return unit->place == ZPP_PLACE_FILE && !unit->rank_file;
}

static zpp_status take_memory(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    if (in_shared_file(unit)) {
        status = zpp_unit_file_acquire(zero->unit_file, unit->file_index, err);
    } else if (zero->options.backing.acquire) {
        void *memory = NULL;
        status = zero->options.backing.acquire(zero->options.backing.ctx, unit, &memory, err);
        if (status == ZPP_OK) unit->whole = memory;
    } else if (!unit->mapped) {
        status = zpp_range_map(zero->range, unit->range_offset_bytes, mapped_bytes(unit), err);
    }
    if (status != ZPP_OK) return status;
    unit->mapped = true;
    zero->full_bytes += zpp_unit_bytes(unit);
    if (zero->full_bytes > zero->full_peak_bytes) zero->full_peak_bytes = zero->full_bytes;
    return ZPP_OK;
}

static zpp_status give_memory(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    zero->full_bytes -= zpp_unit_bytes(unit);
    if (in_shared_file(unit)) {
        unit->mapped = false;
        return zpp_unit_file_release(zero->unit_file, unit->file_index, err);
    }
    if (zero->options.backing.release) {
        zero->options.backing.release(zero->options.backing.ctx, unit, unit->whole);
        return ZPP_OK;
    }
    if (stays_mapped(zero, unit)) {
        memset(unit->whole, 0xff, zpp_unit_bytes(unit)); /* NaN: a view that outlives its unit must not look right */
        return ZPP_OK;
    }
    unit->mapped = false;
    return zpp_range_unmap(zero->range, unit->range_offset_bytes, mapped_bytes(unit), err);
}

/* --- fetching ----------------------------------------------------------------------------------------------------- */

static zpp_status launch_load(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const struct load_args args = { zero->unit_file, unit->file_index };
    zpp_status status = zpp_stream_launch(zero->gather, begin_load, &args, sizeof args, err);
    if (status == ZPP_OK) status = zpp_event_record(unit->ready, zero->gather, err);
    if (status == ZPP_OK) status = zpp_stream_wait(zero->arrive, unit->ready, NULL, err);
    if (status == ZPP_OK) status = zpp_stream_launch(zero->arrive, end_load, &args, sizeof args, err);
    if (status == ZPP_OK) status = zpp_event_record(unit->ready, zero->arrive, err);
    return status;
}

static zpp_status launch_gather(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const struct gather_args args = { zero, unit, unit->whole, unit->rounded };
    zpp_status status = zpp_stream_launch(zero->gather, gather_shards, &args, sizeof args, err);
    if (status == ZPP_OK) status = zpp_event_record(unit->ready, zero->gather, err);
    return status;
}

static zpp_status launch_own(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    zpp_status status = zpp_rank_file_begin(zero, unit, err);
    if (status != ZPP_OK) return status;
    status = zpp_internode_gather(zero, unit, &unit->arriving, err);
    if (status == ZPP_OK) return ZPP_OK;
    zpp_rank_file_await(unit);
    (void)zpp_rank_file_end(zero, unit, &ignored);
    return status;
}

static zpp_status launch_fetch(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    if (unit->rank_file) return launch_own(zero, unit, err);
    if (zpp_internode(zero->options.comm) && !in_shared_file(unit)) {
        unit->arriving_near = unit->secondary_kept && unit->rounded == zpp_wire_rounds(zero);
        return unit->arriving_near ? zpp_secondary_gather(zero, unit, &unit->arriving, err)
                                   : zpp_internode_gather(zero, unit, &unit->arriving, err);
    }
    zpp_status status = zpp_event_record(unit->allocated, zero->compute, err);
    if (status == ZPP_OK) status = zpp_stream_wait(zero->gather, unit->allocated, NULL, err);
    if (status != ZPP_OK) return status;
    return unit->place == ZPP_PLACE_FILE ? launch_load(zero, unit, err) : launch_gather(zero, unit, err);
}

static zpp_status start_fetch(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    zpp_status status = take_memory(zero, unit, err);
    if (status != ZPP_OK) return status;
    unit->rounded = unit->place == ZPP_PLACE_SHARD && zpp_wire_rounds(zero) && !unit->wants_exact;
    status = launch_fetch(zero, unit, err);
    if (status != ZPP_OK) {
        struct zpp_err ignored = ZPP_ERR_INIT;
        (void)give_memory(zero, unit, &ignored);
        return status;
    }
    unit->state = ZPP_UNIT_FETCHING;
    zero->ahead_bytes += zpp_unit_bytes(unit);
    return ZPP_OK;
}

static bool is_ahead(const struct zpp_unit *unit) {
    return unit->state == ZPP_UNIT_FETCHING || unit->kept;
}

static bool has_room(const zpp_zero *zero, const struct zpp_unit *unit) {
    return is_ahead(unit) || zero->ahead_bytes + zpp_unit_bytes(unit) <= zero->options.prefetch_bytes;
}

static void set_kept(zpp_zero *zero, struct zpp_unit *unit, bool kept) {
    const bool was = is_ahead(unit);
    zero->kept_units += kept - unit->kept;
    unit->kept = kept;
    unit->kept_over_step = false;
    if (is_ahead(unit) == was) return;
    if (was) zero->ahead_bytes -= zpp_unit_bytes(unit);
    else zero->ahead_bytes += zpp_unit_bytes(unit);
}

/* The computation may use it from here on. */
static zpp_status settle(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    const uint64_t began_ns = zpp_span_begin();
    const zpp_status status = unit->arriving ? zpp_internode_await(&unit->arriving, wait, err)
                                             : zpp_stream_wait(zero->compute, unit->ready, wait, err);
    if (status != ZPP_OK) return status;
    zpp_span_end(began_ns, ZPP_SPAN_WAIT, "for a gather", 0);
    unit->state = ZPP_UNIT_FULL;
    if (!unit->kept) zero->ahead_bytes -= zpp_unit_bytes(unit);
    zpp_secondary_keep(zero, unit);
    if (unit->place != ZPP_PLACE_FILE) return ZPP_OK;
    zpp_status outcome = zpp_unit_file_read_status(zero->unit_file, unit->file_index, &zero->fault, err);
    if (unit->rank_file) {
        struct zpp_err left = ZPP_ERR_INIT;
        const zpp_status status_left = zpp_rank_file_end(zero, unit, outcome == ZPP_OK ? err : &left);
        if (outcome == ZPP_OK) outcome = status_left;
    }
    if (outcome == ZPP_OK) return ZPP_OK;
    struct zpp_err ignored = ZPP_ERR_INIT;
    set_kept(zero, unit, false);
    unit->state = ZPP_UNIT_PARTITIONED;
    (void)give_memory(zero, unit, &ignored);
    return outcome;
}

/* There came no backward, but a forward that needs the room; or (`all`) one that begins with other units. True: there
 * is some. */
static bool drop_kept(zpp_zero *zero, bool all) {
    const size_t before_bytes = zero->ahead_bytes;
    for (int i = 0; i < zero->units_count && zero->kept_units; i++) {
        struct zpp_unit *unit = zero->units[i];
        struct zpp_err ignored = ZPP_ERR_INIT;
        if (!unit->kept || (unit->kept_over_step && !all)) continue;
        set_kept(zero, unit, false);
        if (unit->state == ZPP_UNIT_FETCHING && settle(zero, unit, NULL, &ignored) == ZPP_OK)
            (void)zpp_zero_release(zero, i, &ignored);
    }
    return zero->ahead_bytes < before_bytes;
}

bool zpp_zero_reads_forward(const zpp_zero *zero) {
    return zero->unit_file && zero->options.prefetch_bytes && !(zero->forward_read
                                                                && zpp_unit_file_is_idle(zero->unit_file));
}

/* Of what the backward begins with, as much as there is room for. */
static zpp_status keep_for_backward(zpp_zero *zero, struct zpp_err *err) {
    zero->forward_read = true;
    for (size_t steps = 0;; steps++) {
        const int next = zpp_trace_ahead(&zero->trace, ZPP_PHASE_BACKWARD, steps);
        if (next < 0) return ZPP_OK;
        struct zpp_unit *candidate = zero->units[next];
        if (!in_shared_file(candidate) || candidate->held || candidate->kept) continue;
        if (!has_room(zero, candidate)) return ZPP_OK;
        if (candidate->state == ZPP_UNIT_PARTITIONED) {
            const zpp_status status = start_fetch(zero, candidate, err);
            if (status != ZPP_OK) return status;
        }
        set_kept(zero, candidate, true);
    }
}

void zpp_zero_keep_for_forward(zpp_zero *zero) {
    for (size_t steps = 0;; steps++) {
        const int next = zpp_trace_ahead(&zero->trace, ZPP_PHASE_FORWARD, steps);
        struct zpp_unit *candidate = next < 0 ? NULL : zero->units[next];
        if (candidate && candidate->held) continue;
        if (!candidate || !in_shared_file(candidate) || candidate->state != ZPP_UNIT_FULL) return;
        if (!has_room(zero, candidate)) return;
        set_kept(zero, candidate, true);
        candidate->kept_over_step = true;
    }
}

/* Follow the recorded order while the bound allows. */
static zpp_status prefetch_ahead(zpp_zero *zero, enum zpp_phase phase, struct zpp_err *err) {
    for (size_t steps = 0;; steps++) {
        const int next = zpp_trace_ahead(&zero->trace, phase, steps);
        if (next < 0) return phase == ZPP_PHASE_FORWARD ? keep_for_backward(zero, err) : ZPP_OK;
        struct zpp_unit *candidate = zero->units[next];
        if (candidate->state != ZPP_UNIT_PARTITIONED) continue;
        while (!has_room(zero, candidate))
            if (phase == ZPP_PHASE_BACKWARD || !drop_kept(zero, steps == 0)) return ZPP_OK;
        const zpp_status status = start_fetch(zero, candidate, err);
        if (status != ZPP_OK) return status;
    }
}

zpp_status zpp_zero_need(zpp_zero *zero, int index, enum zpp_phase phase, const struct zpp_wait *wait,
                         struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    if (!zpp_unit_moves(unit)) return ZPP_OK;
    const uint64_t began_ns = unit->state == ZPP_UNIT_FULL ? 0 : zpp_now_ns();
    if (unit->state == ZPP_UNIT_PARTITIONED) {
        const zpp_status status = start_fetch(zero, unit, err);
        if (status != ZPP_OK) return status;
    }
    if (unit->state == ZPP_UNIT_FETCHING) {
        const zpp_status status = settle(zero, unit, wait, err);
        if (status != ZPP_OK) return status;
    }
    if (began_ns) zero->gather_ns += zpp_now_ns() - began_ns;
    if (phase == ZPP_PHASE_BACKWARD || unit->kept_over_step) set_kept(zero, unit, false);
    if (!zero->options.prefetch_bytes) return ZPP_OK;
    zpp_trace_record(&zero->trace, phase, index);
    return prefetch_ahead(zero, phase, err);
}

zpp_status zpp_zero_release(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    if (!zpp_unit_moves(unit) || unit->state != ZPP_UNIT_FULL || unit->pins || unit->sticky) return ZPP_OK;
    unit->state = unit->kept ? ZPP_UNIT_FETCHING : ZPP_UNIT_PARTITIONED;
    return unit->kept ? ZPP_OK : give_memory(zero, unit, err);
}

zpp_status zpp_zero_end_pass(zpp_zero *zero, struct zpp_err *err) {
    zpp_trace_restart(&zero->trace);
    zero->forward_read = false;
    /* Long enough for any memcpy; a prefetch waits for nobody. */
    const struct zpp_wait patience = { .timeout_ns = UINT64_C(600000000000), .tick = NULL, .ctx = NULL };
    for (int i = 0; i < zero->units_count; i++) {
        struct zpp_unit *unit = zero->units[i];
        set_kept(zero, unit, false);
        if (unit->state == ZPP_UNIT_FETCHING) {
            const zpp_status status = settle(zero, unit, &patience, err);
            if (status != ZPP_OK && unit->state == ZPP_UNIT_FETCHING) return status; /* else: nobody needed it */
        }
        const zpp_status status = zpp_zero_release(zero, i, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

zpp_status zpp_zero_release_all(zpp_zero *zero, struct zpp_err *err) {
    for (int i = 0; i < zero->units_count; i++) zero->units[i]->sticky = false;
    return zpp_zero_end_pass(zero, err);
}

zpp_status zpp_zero_keep_shard(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    /* also of one that is held: it rounds */
    if (unit->place == ZPP_PLACE_FILE && zpp_unit_file_keeps_qcopies(zero->unit_file))
        return zpp_unit_file_keep_qcopy(zero->unit_file, unit->file_index, &zero->fault, err);
    if (!zpp_unit_moves(unit)) return ZPP_OK;
    unit->secondary_kept = false;
    const size_t bytes = zpp_unit_shard_bytes(unit), offset = (size_t)zero->rank * bytes;
    if (unit->rank_file) return zpp_rank_file_keep(zero, unit, err);
    if (unit->place == ZPP_PLACE_FILE)
        return zpp_unit_file_write_back(zero->unit_file, unit->file_offset_bytes + offset, bytes, &zero->fault, err);
    memcpy(unit->shard, unit->whole + offset, bytes);
    return ZPP_OK;
}

zpp_status zpp_zero_open_shard(zpp_zero *zero, int index, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    if (unit->place != ZPP_PLACE_FILE || unit->held) return ZPP_OK;
    zpp_status status = ZPP_OK;
    /* No prefetch from here: over several hosts it is a collective, and ranks come here at times of their own. */
    if (in_shared_file(unit) && unit->state == ZPP_UNIT_PARTITIONED) status = start_fetch(zero, unit, err);
    if (status == ZPP_OK && unit->state == ZPP_UNIT_FETCHING) status = settle(zero, unit, wait, err);
    if (status != ZPP_OK || in_shared_file(unit)) return status;
    status = zpp_rank_file_open(zero, unit, unit->state == ZPP_UNIT_FULL, err);
    unit->open_shard = status == ZPP_OK;
    return status;
}

/* Of this rank's shard, in the mapping that it is stepped in. */
static size_t shard_offset(const zpp_zero *zero, const struct zpp_unit *unit) {
    return unit->file_offset_bytes + (unit->rank_file ? 0 : (size_t)zero->rank * zpp_unit_shard_bytes(unit));
}

zpp_status zpp_zero_send_shard(zpp_zero *zero, int index, struct zpp_err *err) {
    const struct zpp_unit *unit = zero->units[index];
    if (unit->place != ZPP_PLACE_FILE) return ZPP_OK;
    return zpp_unit_file_write_begin(zero->unit_file, unit->file_index, shard_offset(zero, unit),
                                     zpp_unit_shard_bytes(unit), &zero->fault, err);
}

zpp_status zpp_zero_shard_sent(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    if (unit->place != ZPP_PLACE_FILE) return ZPP_OK;
    const zpp_status status = zpp_unit_file_write_wait(zero->unit_file, unit->file_index, &zero->fault, err);
    if (!unit->open_shard) return status;
    struct zpp_err left = ZPP_ERR_INIT;
    unit->open_shard = false;
    const zpp_status closed = zpp_rank_file_end(zero, unit, status == ZPP_OK ? err : &left);
    return status == ZPP_OK ? closed : status;
}
