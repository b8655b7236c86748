/* SPDX-License-Identifier: Apache-2.0
 *
 * The life of parameters in a file, and how units are acquired, read and released. See unit_file.h for the picture.
 */
#include "unit_file.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "unit_file_internal.h"

enum { EMPTY, LOADING, LOADED };
enum { NAP_NS = 50000 }; /* disks answer in 100 us and more */
/* A rank that began to read and did not end by then is dead or stuck. Reading the same bytes to the same place once
 * more does no harm, and a rank that died is found by the next collective. */
#define PATIENCE_NS UINT64_C(2000000000)
#define GIVE_UP_NS UINT64_C(30000000000)

static void nap(void) {
    const struct timespec time = { .tv_sec = 0, .tv_nsec = NAP_NS };
    nanosleep(&time, NULL);
}

/* --- life --------------------------------------------------------------------------------------------------------- */

zpp_status zpp_unit_file_create(zpp_comm *comm, double fraction, zpp_unit_file **out, struct zpp_err *err) {
    if (!(fraction > 0.0 && fraction <= 1.0))
        return zpp_fail(err, ZPP_INVALID, "params: fraction is %g, wanted above 0 and at most 1", fraction);
    zpp_unit_file *unit_file = calloc(1, sizeof *unit_file);
    if (!unit_file) return zpp_fail(err, ZPP_NOMEM, "params: no memory for their tier");
    unit_file->comm = comm;
    unit_file->rank = comm ? zpp_comm_rank(comm) : 0;
    unit_file->ranks = comm ? zpp_comm_ranks(comm) : 1;
    unit_file->fraction = fraction;
    *out = unit_file;
    return ZPP_OK;
}

void zpp_unit_file_destroy(zpp_unit_file *unit_file) {
    if (!unit_file) return;
    zpp_unit_file_close(unit_file);
    unit_file_qcopy_drop(unit_file);
    unit_file_stray_unwatch(unit_file);
    zpp_range_destroy(unit_file->range);
    zpp_region_destroy(unit_file->region);
    free(unit_file->units);
    free(unit_file);
}

zpp_status zpp_unit_file_add(zpp_unit_file *unit_file, size_t bytes, int *unit, size_t *offset_bytes,
                             struct zpp_err *err) {
    if (unit_file->sealed) return zpp_fail(err, ZPP_STATE, "params: a unit of %zu bytes comes after seal", bytes);
    struct unit_file_unit *units = zpp_array_reserve(unit_file->units, (size_t)unit_file->units_count,
                                                     &unit_file->units_capacity, sizeof *units);
    if (!units) return zpp_fail(err, ZPP_NOMEM, "params: no memory for unit %d", unit_file->units_count);
    unit_file->units = units;
    /* Shared mappings are memfds, whose pages are small ones (docs/design/0031). */
    const size_t at = unit_file->ranks == 1 ? zpp_range_place(unit_file->mapping_bytes,
                                                              bytes) : unit_file->mapping_bytes;
    units[unit_file->units_count] =
        (struct unit_file_unit){ .offset_bytes = at, .bytes = zpp_round_up(bytes, zpp_page_bytes()) };
    *unit = unit_file->units_count++;
    *offset_bytes = at;
    unit_file->mapping_bytes = at + zpp_round_up(bytes, zpp_page_bytes());
    return ZPP_OK;
}

zpp_status zpp_unit_file_hold(zpp_unit_file *unit_file, struct zpp_err *err) {
    if (unit_file->sealed || unit_file->quant.bits)
        return zpp_fail(err, ZPP_STATE, "params: units are to stay in memory %s",
                        unit_file->sealed ? "after seal" : "beside quantised copies, which are all alike");
    unit_file->hold_bytes = unit_file->mapping_bytes;
    return ZPP_OK;
}

zpp_status zpp_unit_file_double_buffer(zpp_unit_file *unit_file, int unit, struct zpp_err *err) {
    if (unit_file->sealed || unit_file->quant.bits)
        return zpp_fail(err, ZPP_STATE, "params: two copies of unit %d %s", unit,
                        unit_file->sealed ? "after seal" : "of quantised copies, which are only read");
    unit_file->units[unit].two = unit_file->keeps_two = true;
    return ZPP_OK;
}

enum { SUMS_ALIGN_BYTES = 64 };

/* Return the bytes of the checksums of one part. */
static size_t sums_bytes(uint64_t part_bytes) {
    return zpp_round_up(zpp_checksums_shared_bytes(part_bytes), SUMS_ALIGN_BYTES);
}

static uint64_t file_bytes(const zpp_unit_file *unit_file) {
    return unit_file->quant.bits ? unit_file->qcopies_bytes - unit_file->qcopies_resident_bytes : unit_file->file_bytes;
}

/* Memory for the checksums of the file's parts, however many there will be. */
static size_t all_sums_bytes(const zpp_unit_file *unit_file) {
    size_t most_bytes = 0;
    for (unsigned parts = 1; parts <= ZPP_AIO_PARTS; parts++) {
        const uint64_t part_bytes = file_bytes(unit_file) / parts + ZPP_AIO_STRIPE_BYTES;
        const size_t bytes = parts * sums_bytes(part_bytes);
        if (bytes > most_bytes) most_bytes = bytes;
    }
    return most_bytes;
}

static zpp_status make_shared_mapping(zpp_unit_file *unit_file, struct zpp_err *err) {
    const size_t board_bytes = zpp_round_up((size_t)unit_file->units_count * sizeof(struct unit_file_board),
                                        zpp_page_bytes());
    /* These are addresses only: pages that are never written take no memory. */
    const size_t checksum_bytes = all_sums_bytes(unit_file);
    const zpp_status status = zpp_region_create(unit_file->comm, ZPP_REGION_ONE,
                                                unit_file->mapping_bytes + board_bytes + checksum_bytes,
                                                &unit_file->region, err);
    if (status != ZPP_OK) return status;
    unit_file->mapping = zpp_region_base(unit_file->region, unit_file->rank);
    unit_file->board = (struct unit_file_board *)(void *)(unit_file->mapping + unit_file->mapping_bytes);
    unit_file->sums_memory = unit_file->mapping + unit_file->mapping_bytes + board_bytes;
    /* A read of what is not there faults, and is not silently zero. */
    if (mprotect(unit_file->mapping + unit_file->resident_bytes, unit_file->mapping_bytes - unit_file->resident_bytes,
                 PROT_NONE) != 0)
        return zpp_fail_os(err, errno, "params: closing %zu bytes of addresses",
                           unit_file->mapping_bytes - unit_file->resident_bytes);
    return unit_file_stray_watch(unit_file, err);
}

static zpp_status make_own_mapping(zpp_unit_file *unit_file, size_t warm_bytes, struct zpp_err *err) {
    zpp_status status = zpp_range_create(unit_file->mapping_bytes, &unit_file->range, err);
    if (status != ZPP_OK) return status;
    zpp_range_set_warm(unit_file->range, warm_bytes);
    unit_file->mapping = zpp_range_base(unit_file->range);
    if (unit_file->resident_bytes) status = zpp_range_map(unit_file->range, 0, unit_file->resident_bytes, err);
    return status;
}

/* Without the gaps that the mapping has between large units: they would take blocks, and of several folders always the
 * same one would have less to do. */
static void place_copies(zpp_unit_file *unit_file) {
    size_t offset_bytes;
    for (int i = 0; i < unit_file->units_count; i++) {
        struct unit_file_unit *unit = &unit_file->units[i];
        unit->first_offset_bytes = unit_file->file_bytes;
        unit_file->file_bytes += unit_file_moving_part(unit_file, unit, &offset_bytes);
    }
    for (int i = 0; i < unit_file->units_count; i++) {
        struct unit_file_unit *unit = &unit_file->units[i];
        if (!unit->two) continue;
        unit->second_offset_bytes = unit_file->file_bytes;
        unit_file->file_bytes += unit_file_moving_part(unit_file, unit, &offset_bytes);
        unit_file->second_bytes += unit_file_moving_part(unit_file, unit, &offset_bytes);
    }
}

zpp_status zpp_unit_file_seal(zpp_unit_file *unit_file, size_t warm_bytes, struct zpp_err *err) {
    if (unit_file->sealed) return zpp_fail(err, ZPP_STATE, "params: sealed twice");
    unit_file->sealed = true;
    if (!unit_file->mapping_bytes) return ZPP_OK;
    const size_t moving_bytes = unit_file->mapping_bytes - unit_file->hold_bytes;
    const size_t held_bytes = unit_file->hold_bytes + (size_t)((1.0 - unit_file->fraction) * (double)moving_bytes);
    if (!unit_file->quant.bits) unit_file->resident_bytes = held_bytes / zpp_page_bytes() * zpp_page_bytes();
    const zpp_status status = unit_file_qcopy_seal(unit_file, err);
    if (status != ZPP_OK) return status;
    place_copies(unit_file);
    return unit_file->ranks > 1 ? make_shared_mapping(unit_file, err) : make_own_mapping(unit_file, warm_bytes, err);
}

unsigned char *zpp_unit_file_mapping(const zpp_unit_file *unit_file) {
    return unit_file->mapping;
}

/* Every rank's engine keeps the checksums of a part in the same table. */
static zpp_status share_sums(const zpp_unit_file *unit_file, const struct zpp_scratch_options *options, bool make,
                             struct zpp_err *err) {
    const unsigned parts = options->folders_count ? options->folders_count : 1;
    const size_t stripe_bytes = options->stripe_bytes ? options->stripe_bytes : (size_t)ZPP_AIO_STRIPE_BYTES;
    unsigned char *memory = unit_file->sums_memory;
    zpp_status status = ZPP_OK;
    for (unsigned part = 0; part < parts && status == ZPP_OK; part++) {
        const uint64_t bytes = zpp_file_part_bytes(parts, stripe_bytes, part, file_bytes(unit_file));
        status = zpp_aio_share_checksums(unit_file->file.aio, unit_file->file.path, part,
                                         zpp_checksums_attach(memory, bytes, make), err);
        memory += sums_bytes(bytes);
    }
    return status;
}

zpp_status zpp_unit_file_open(zpp_unit_file *unit_file, const struct zpp_scratch_options *options, bool make,
                              struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!unit_file->sealed || unit_file->opened)
        return zpp_fail(err, ZPP_STATE, "params: %s", unit_file->opened ? "opened twice" : "opened before seal");
    if (options->stripe_bytes > ZPP_AIO_STRIPE_BYTES)
        return zpp_fail(err, ZPP_INVALID, "params: stripe_bytes is %zu, wanted at most %d", options->stripe_bytes,
                        ZPP_AIO_STRIPE_BYTES);
    unit_file->opened = true;
    zpp_status status = zpp_scratch_file_open(&unit_file->file, options, err);
    if (status == ZPP_OK && make)
        status = zpp_aio_make(unit_file->file.aio, unit_file->file.path, file_bytes(unit_file), fault, err);
    if (status == ZPP_OK && options->checksums && unit_file->sums_memory)
        status = share_sums(unit_file, options, make, err);
    return status;
}

/* A failed load leaves the unit empty, so that another rank may try. */
static void end_load(zpp_unit_file *unit_file, int index, zpp_status status) {
    unit_file->units[index].status = status;
    if (unit_file->board) atomic_store(&unit_file->board[index].contents, status == ZPP_OK ? LOADED : EMPTY);
}

static void finish_load(zpp_unit_file *unit_file, int index) {
    struct unit_file_unit *unit = &unit_file->units[index];
    const zpp_status status = zpp_scratch_finish(&unit->request, &unit->fault, &unit->err);
    if (unit_file->quant.bits) unit_file_qcopy_end(unit_file, unit, status);
    end_load(unit_file, index, status);
}

void zpp_unit_file_close(zpp_unit_file *unit_file) {
    if (!unit_file->file.aio) return;
    struct zpp_unit_file_figures last;
    zpp_unit_file_figures(unit_file, &last);
    unit_file_drop_windows(unit_file);
    zpp_scratch_file_close(&unit_file->file);
    unit_file->closed_read_bytes = last.read_bytes;
    unit_file->closed_written_bytes = last.written_bytes;
    unit_file->closed_checked_bytes = last.checked_bytes;
    for (int i = 0; i < unit_file->units_count; i++)
        if (unit_file->units[i].request) finish_load(unit_file, i);
    for (int i = 0; i < unit_file->units_count; i++) {
        struct zpp_err ignored = ZPP_ERR_INIT;
        (void)zpp_scratch_finish(&unit_file->units[i].write_request, NULL, &ignored);
    }
}

/* --- memory of a unit --------------------------------------------------------------------------------------------- */

static zpp_status join_users(struct unit_file_board *board, struct zpp_err *err) {
    const uint64_t began_ns = zpp_now_ns();
    for (;;) {
        int32_t users = atomic_load(&board->users);
        if (users >= 0) {
            if (atomic_compare_exchange_weak(&board->users, &users, users + 1)) return ZPP_OK;
            continue;
        }
        if (zpp_now_ns() - began_ns > GIVE_UP_NS)
            return zpp_fail(err, ZPP_PEER, "params: a rank that gave a unit's memory back did not end; it has died");
        nap();
    }
}

/* Return true if this was the last user; no rank acquires the unit then until users is 0 again. */
static bool part_from_users(struct unit_file_board *board) {
    for (;;) {
        int32_t users = atomic_load(&board->users);
        if (atomic_compare_exchange_weak(&board->users, &users, users > 1 ? users - 1 : -1)) return users <= 1;
    }
}

zpp_status zpp_unit_file_acquire(zpp_unit_file *unit_file, int index, struct zpp_err *err) {
    size_t offset_bytes;
    const size_t bytes = unit_file_moving_part(unit_file, &unit_file->units[index], &offset_bytes);
    zpp_status status = ZPP_OK;
    if (unit_file->range) status = zpp_range_map(unit_file->range, offset_bytes, bytes, err);
    else status = join_users(&unit_file->board[index], err);
    if (status != ZPP_OK) return status;
    const int failed = unit_file->range ? 0 : unit_file_open_pages(unit_file, &unit_file->units[index], offset_bytes,
                                                                  bytes);
    if (failed) {
        if (part_from_users(&unit_file->board[index])) atomic_store(&unit_file->board[index].users, 0);
        return zpp_fail_os(err, failed, "params: opening %zu bytes of addresses", bytes);
    }
    unit_file->acquired_bytes += bytes;
    if (unit_file->acquired_bytes > unit_file->acquired_peak_bytes)
        unit_file->acquired_peak_bytes = unit_file->acquired_bytes;
    return ZPP_OK;
}

zpp_status zpp_unit_file_release(zpp_unit_file *unit_file, int index, struct zpp_err *err) {
    size_t offset_bytes;
    const size_t bytes = unit_file_moving_part(unit_file, &unit_file->units[index], &offset_bytes);
    unit_file->acquired_bytes -= bytes;
    if (unit_file->range) return zpp_range_unmap(unit_file->range, offset_bytes, bytes, err);
    struct unit_file_board *board = &unit_file->board[index];
    const bool last = part_from_users(board);
    if (last) { /* while the mapping is writable: the kernel requires that */
        zpp_region_trim(unit_file->region, offset_bytes, bytes);
        atomic_store(&board->contents, EMPTY);
    }
    const int failed = unit_file_close_pages(unit_file, &unit_file->units[index], offset_bytes, bytes);
    if (last) atomic_store(&board->users, 0);
    return failed ? zpp_fail_os(err, failed, "params: closing %zu bytes of addresses", bytes) : ZPP_OK;
}

/* --- loads -------------------------------------------------------------------------------------------------------- */

static void submit_part(zpp_unit_file *unit_file, int index, bool write) {
    struct unit_file_unit *unit = &unit_file->units[index];
    size_t offset_bytes;
    const size_t bytes = unit_file_moving_part(unit_file, unit, &offset_bytes);
    const zpp_status status = unit_file_submit(unit_file, offset_bytes, unit_file->mapping + offset_bytes, bytes, write,
                                               false, &unit->request, &unit->fault, &unit->err);
    if (status != ZPP_OK) end_load(unit_file, index, status);
}

static void submit_load(zpp_unit_file *unit_file, int index) {
    struct unit_file_unit *unit = &unit_file->units[index];
    unit_file->loads++;
    if (!unit_file->quant.bits) {
        submit_part(unit_file, index, false);
        return;
    }
    const zpp_status status = unit_file_qcopy_begin(unit_file, unit);
    if (status == ZPP_OK && !unit->request) unit_file_qcopy_end(unit_file, unit, status);
    if (!unit->request) end_load(unit_file, index, status);
}

static bool may_load(zpp_unit_file *unit_file, int index) {
    int32_t empty = EMPTY;
    return !unit_file->board || atomic_compare_exchange_strong(&unit_file->board[index].contents, &empty, LOADING);
}

void zpp_unit_file_read_begin(zpp_unit_file *unit_file, int index) {
    unit_file->units[index].status = ZPP_OK;
    unit_file->units[index].request = NULL;
    if (may_load(unit_file, index)) submit_load(unit_file, index);
}

void zpp_unit_file_write_unit(zpp_unit_file *unit_file, int index) {
    assert(!unit_file->board);
    unit_file->units[index].status = ZPP_OK;
    unit_file->units[index].request = NULL;
    submit_part(unit_file, index, true);
}

static zpp_status arrive(zpp_unit_file *unit_file, int index, const struct zpp_wait *wait) {
    struct unit_file_unit *unit = &unit_file->units[index];
    const uint64_t began_ns = zpp_now_ns();
    for (;;) {
        if (unit->request) {
            if (!wait && !zpp_aio_done(unit->request)) return ZPP_AGAIN;
            finish_load(unit_file, index);
            return ZPP_OK;
        }
        if (!unit_file->board || unit->status != ZPP_OK) return ZPP_OK;
        const int32_t contents = atomic_load(&unit_file->board[index].contents);
        const bool stuck = contents == LOADING && zpp_now_ns() - began_ns > PATIENCE_NS;
        if (contents == LOADED) return ZPP_OK;
        if (stuck || may_load(unit_file, index)) submit_load(unit_file, index);
        else if (!wait) return ZPP_AGAIN;
        else nap();
    }
}

zpp_status zpp_unit_file_read_wait(zpp_unit_file *unit_file, int index, const struct zpp_wait *wait) {
    if (!wait) return arrive(unit_file, index, NULL);
    const uint64_t began_ns = zpp_now_ns();
    const zpp_status status = arrive(unit_file, index, wait);
    unit_file->load_wait_ns += zpp_now_ns() - began_ns;
    return status;
}

size_t zpp_unit_file_value_at(const zpp_unit_file *unit_file, int index, size_t into_bytes) {
    const struct unit_file_unit *unit = &unit_file->units[index];
    if (unit_file->quant.bits) return unit_file_qcopy_value_at(unit_file, unit, into_bytes);
    size_t begin_bytes;
    (void)unit_file_moving_part(unit_file, unit, &begin_bytes);
    return begin_bytes - unit->offset_bytes + into_bytes;
}

zpp_status zpp_unit_file_read_status(const zpp_unit_file *unit_file, int index, struct zpp_aio_fault *fault,
                                     struct zpp_err *err) {
    const struct unit_file_unit *unit = &unit_file->units[index];
    if (unit->status == ZPP_OK) return ZPP_OK;
    *err = unit->err;
    if (unit->status == ZPP_TIER && fault) *fault = unit->fault;
    return unit->status;
}

bool zpp_unit_file_is_idle(const zpp_unit_file *unit_file) {
    struct zpp_aio_figures io = { 0 };
    if (unit_file->file.aio) zpp_aio_figures(unit_file->file.aio, &io);
    return io.outstanding == 0;
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

zpp_status zpp_unit_file_copy(zpp_unit_file *unit_file, size_t offset_bytes, void *memory, size_t bytes, bool write,
                              struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (offset_bytes > unit_file->mapping_bytes || bytes > unit_file->mapping_bytes - offset_bytes)
        return zpp_fail(err, ZPP_INVALID, "params: bytes %zu to %zu are copied, there are %zu", offset_bytes,
                        offset_bytes + bytes, unit_file->mapping_bytes);
    if (unit_file->quant.bits)
        return zpp_fail(err, ZPP_STATE, "params: they are kept in %d bits, and cannot be %s in parts",
                        unit_file->quant.bits, write ? "written" : "read");
    const size_t left = offset_bytes < unit_file->resident_bytes ? unit_file->resident_bytes - offset_bytes : 0;
    const size_t held = bytes < left ? bytes : left;
    if (held) memcpy(write ? unit_file->mapping + offset_bytes : memory, write ? memory
                     : unit_file->mapping + offset_bytes, held);
    if (held == bytes) return ZPP_OK;
    return unit_file_move(unit_file, offset_bytes + held, (unsigned char *)memory + held, bytes - held, write, false,
                          fault, err);
}

zpp_status zpp_unit_file_write_back(zpp_unit_file *unit_file, size_t offset_bytes, size_t bytes,
                                    struct zpp_aio_fault *fault, struct zpp_err *err) {
    const size_t end = offset_bytes + bytes;
    if (offset_bytes < unit_file->resident_bytes) offset_bytes = unit_file->resident_bytes;
    if (offset_bytes >= end) return ZPP_OK;
    return unit_file_move(unit_file, offset_bytes, unit_file->mapping + offset_bytes, end - offset_bytes, true, false,
                          fault, err);
}

zpp_status zpp_unit_file_write_begin(zpp_unit_file *unit_file, int index, size_t offset_bytes, size_t bytes,
                                     struct zpp_aio_fault *fault, struct zpp_err *err) {
    const size_t end = offset_bytes + bytes;
    if (offset_bytes < unit_file->resident_bytes) offset_bytes = unit_file->resident_bytes;
    if (offset_bytes >= end) return ZPP_OK;
    return unit_file_submit(unit_file, offset_bytes, unit_file->mapping + offset_bytes, end - offset_bytes, true, false,
                            &unit_file->units[index].write_request, fault, err);
}

zpp_status zpp_unit_file_write_wait(zpp_unit_file *unit_file, int index, struct zpp_aio_fault *fault,
                                    struct zpp_err *err) {
    zpp_aio_request **request = &unit_file->units[index].write_request;
    const uint64_t began_ns = zpp_now_ns();
    const zpp_status status = zpp_scratch_finish(request, fault, err);
    unit_file->step_wait_ns += zpp_now_ns() - began_ns;
    return status;
}

void zpp_unit_file_figures(const zpp_unit_file *unit_file, struct zpp_unit_file_figures *out) {
    *out = (struct zpp_unit_file_figures){
        .mapping_bytes = unit_file->mapping_bytes,
        .resident_bytes = unit_file->resident_bytes,
        .acquired_bytes = unit_file->acquired_bytes,
        .acquired_peak_bytes = unit_file->acquired_peak_bytes,
        .memory_bytes = unit_file->range ? zpp_range_held_bytes(unit_file->range) - unit_file->resident_bytes
            : unit_file->acquired_bytes,
        .read_bytes = unit_file->closed_read_bytes,
        .written_bytes = unit_file->closed_written_bytes,
        .checked_bytes = unit_file->closed_checked_bytes,
        .loads = unit_file->loads,
        .load_wait_ns = unit_file->load_wait_ns,
        .step_wait_ns = unit_file->step_wait_ns,
        .qcopies_bytes = unit_file->qcopies_bytes,
        .qcopies_held_bytes = unit_file->qcopies_resident_bytes,
        .second_bytes = unit_file->second_bytes,
        .staging_bytes = unit_file->stagings * unit_file->staging_bytes,
    };
    for (int i = 0; i < ZPP_UNIT_FILE_WINDOWS; i++) out->window_bytes += unit_file->windows[i].capacity_bytes;
    if (!unit_file->file.aio) return;
    struct zpp_aio_figures io;
    zpp_aio_figures(unit_file->file.aio, &io);
    out->read_bytes = io.read_bytes;
    out->written_bytes = io.written_bytes;
    out->checked_bytes = io.checked_bytes;
    out->sums_bytes = io.checksums_bytes;
    out->uring = io.uring;
}
