/* SPDX-License-Identifier: Apache-2.0
 *
 * The life of parameters in a file, and how units come and go. See filed.h for the picture.
 */
#include "filed.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "filed_internal.h"

enum { EMPTY, LOADING, LOADED };
enum { DEPTH = 32, BLOCK_BYTES = 1 << 20, FLIGHT_BYTES = 8 << 20 };
enum { NAP_NS = 50000 }; /* disks answer in 100 us and more */
/* A rank that began to read and did not end by then is dead or stuck. Reading the same bytes to the same place once
 * more does no harm, and whoever really died is found by the next collective. */
#define PATIENCE_NS UINT64_C(2000000000)
#define GIVE_UP_NS UINT64_C(30000000000)

static size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

static void nap(void) {
    const struct timespec time = { .tv_sec = 0, .tv_nsec = NAP_NS };
    nanosleep(&time, NULL);
}

/* --- life --------------------------------------------------------------------------------------------------------- */

zpp_status zpp_filed_create(zpp_comm *comm, double fraction, zpp_filed **out, struct zpp_err *err) {
    if (!(fraction > 0.0 && fraction <= 1.0))
        return zpp_fail(err, ZPP_INVALID, "params: fraction is %g, wanted above 0 and at most 1", fraction);
    zpp_filed *filed = calloc(1, sizeof *filed);
    if (!filed) return zpp_fail(err, ZPP_NOMEM, "params: no memory for their tier");
    filed->comm = comm;
    filed->rank = comm ? zpp_comm_rank(comm) : 0;
    filed->ranks = comm ? zpp_comm_ranks(comm) : 1;
    filed->fraction = fraction;
    *out = filed;
    return ZPP_OK;
}

void zpp_filed_destroy(zpp_filed *filed) {
    if (!filed) return;
    zpp_filed_close(filed);
    filed_image_drop(filed);
    filed_stray_unwatch(filed);
    zpp_range_destroy(filed->range);
    zpp_region_destroy(filed->region);
    free(filed->units);
    free(filed->path);
    free(filed);
}

zpp_status zpp_filed_add(zpp_filed *filed, size_t bytes, int *unit, size_t *offset_bytes, struct zpp_err *err) {
    if (filed->sealed) return zpp_fail(err, ZPP_STATE, "params: a unit of %zu bytes comes after seal", bytes);
    if (filed->units_count == filed->units_room) {
        const int room = filed->units_room ? 2 * filed->units_room : 64;
        struct filed_unit *units = realloc(filed->units, (size_t)room * sizeof *units);
        if (!units) return zpp_fail(err, ZPP_NOMEM, "params: no memory for %d units", room);
        filed->units = units;
        filed->units_room = room;
    }
    /* Shared homes are memfds, whose pages are of 4 KiB (docs/design/0031). */
    const size_t at = filed->ranks == 1 ? zpp_range_place(filed->home_bytes, bytes) : filed->home_bytes;
    filed->units[filed->units_count] =
        (struct filed_unit){ .offset_bytes = at, .bytes = round_up(bytes, ZPP_PAGE_BYTES) };
    *unit = filed->units_count++;
    *offset_bytes = at;
    filed->home_bytes = at + round_up(bytes, ZPP_PAGE_BYTES);
    return ZPP_OK;
}

zpp_status zpp_filed_keep_two(zpp_filed *filed, int unit, struct zpp_err *err) {
    if (filed->sealed || filed->images.bits)
        return zpp_fail(err, ZPP_STATE, "params: two copies of unit %d %s", unit,
                        filed->sealed ? "after seal" : "of images, which are only read");
    filed->units[unit].two = filed->keeps_two = true;
    return ZPP_OK;
}

enum { SUMS_ALIGN_BYTES = 64 };

/* Of one part. */
static size_t sums_bytes(uint64_t part_bytes) {
    return round_up(zpp_sums_shared_bytes(part_bytes), SUMS_ALIGN_BYTES);
}

static uint64_t file_bytes(const zpp_filed *filed) {
    return filed->images.bits ? filed->images_bytes - filed->images_cut_bytes : filed->file_bytes;
}

/* Memory for the checksums of the file's parts, however many there will be. */
static size_t sums_room_bytes(const zpp_filed *filed) {
    size_t most_bytes = 0;
    for (unsigned parts = 1; parts <= ZPP_AIO_PARTS; parts++) {
        const uint64_t part_bytes = file_bytes(filed) / parts + ZPP_AIO_STRIPE_BYTES;
        const size_t bytes = parts * sums_bytes(part_bytes);
        if (bytes > most_bytes) most_bytes = bytes;
    }
    return most_bytes;
}

static zpp_status make_shared_home(zpp_filed *filed, struct zpp_err *err) {
    const size_t board_bytes = round_up((size_t)filed->units_count * sizeof(struct filed_board), ZPP_PAGE_BYTES);
    /* Addresses only: what nobody writes to takes no memory. */
    const size_t room_bytes = sums_room_bytes(filed);
    const zpp_status status = zpp_region_create(filed->comm, ZPP_REGION_ONE,
                                                filed->home_bytes + board_bytes + room_bytes, &filed->region, err);
    if (status != ZPP_OK) return status;
    filed->home = zpp_region_base(filed->region, filed->rank);
    filed->board = (struct filed_board *)(void *)(filed->home + filed->home_bytes);
    filed->sums_room = filed->home + filed->home_bytes + board_bytes;
    /* A read of what is not there faults, and is not silently zero. */
    if (mprotect(filed->home + filed->cut_bytes, filed->home_bytes - filed->cut_bytes, PROT_NONE) != 0)
        return zpp_fail_os(err, errno, "params: closing %zu bytes of addresses", filed->home_bytes - filed->cut_bytes);
    return filed_stray_watch(filed, err);
}

static zpp_status make_own_home(zpp_filed *filed, size_t warm_bytes, struct zpp_err *err) {
    zpp_status status = zpp_range_create(filed->home_bytes, &filed->range, err);
    if (status != ZPP_OK) return status;
    zpp_range_set_warm(filed->range, warm_bytes);
    filed->home = zpp_range_base(filed->range);
    if (filed->cut_bytes) status = zpp_range_map(filed->range, 0, filed->cut_bytes, err);
    return status;
}

/* The part of a unit that comes and goes. */
static size_t moving_part(const zpp_filed *filed, const struct filed_unit *unit, size_t *offset_bytes) {
    const size_t end = unit->offset_bytes + unit->bytes;
    *offset_bytes = unit->offset_bytes < filed->cut_bytes ? filed->cut_bytes : unit->offset_bytes;
    return *offset_bytes < end ? end - *offset_bytes : 0;
}

/* Without the gaps that the home has between large units: they would take blocks, and of several folders always the
 * same one would have less to do. */
static void place_copies(zpp_filed *filed) {
    size_t offset_bytes;
    for (int i = 0; i < filed->units_count; i++) {
        struct filed_unit *unit = &filed->units[i];
        unit->first_offset_bytes = filed->file_bytes;
        filed->file_bytes += moving_part(filed, unit, &offset_bytes);
    }
    for (int i = 0; i < filed->units_count; i++) {
        struct filed_unit *unit = &filed->units[i];
        if (!unit->two) continue;
        unit->second_offset_bytes = filed->file_bytes;
        filed->file_bytes += moving_part(filed, unit, &offset_bytes);
        filed->second_bytes += moving_part(filed, unit, &offset_bytes);
    }
}

zpp_status zpp_filed_seal(zpp_filed *filed, size_t warm_bytes, struct zpp_err *err) {
    if (filed->sealed) return zpp_fail(err, ZPP_STATE, "params: sealed twice");
    filed->sealed = true;
    if (!filed->home_bytes) return ZPP_OK;
    const size_t held_bytes = (size_t)((1.0 - filed->fraction) * (double)filed->home_bytes);
    if (!filed->images.bits) filed->cut_bytes = held_bytes / ZPP_PAGE_BYTES * ZPP_PAGE_BYTES;
    const zpp_status status = filed_image_seal(filed, err);
    if (status != ZPP_OK) return status;
    place_copies(filed);
    return filed->ranks > 1 ? make_shared_home(filed, err) : make_own_home(filed, warm_bytes, err);
}

unsigned char *zpp_filed_home(const zpp_filed *filed) {
    return filed->home;
}

bool zpp_filed_is_held(const zpp_filed *filed, int unit) {
    return filed->units[unit].offset_bytes + filed->units[unit].bytes <= filed->cut_bytes;
}

/* Every rank's engine keeps the checksums of a part in the same table. */
static zpp_status share_sums(const zpp_filed *filed, const struct zpp_aio_config *config, bool make,
                             struct zpp_err *err) {
    const unsigned parts = config->stripes_count ? config->stripes_count : 1;
    unsigned char *room = filed->sums_room;
    zpp_status status = ZPP_OK;
    for (unsigned part = 0; part < parts && status == ZPP_OK; part++) {
        const uint64_t bytes = zpp_file_part_bytes(parts, config->stripe_bytes, part, file_bytes(filed));
        status = zpp_aio_share_sums(filed->aio, filed->path, part, zpp_sums_attach(room, bytes, make), err);
        room += sums_bytes(bytes);
    }
    return status;
}

zpp_status zpp_filed_open(zpp_filed *filed, const struct zpp_filed_file *file, struct zpp_aio_fault *fault,
                          struct zpp_err *err) {
    if (!filed->sealed || filed->path)
        return zpp_fail(err, ZPP_STATE, "params: %s", filed->path ? "opened twice" : "opened before seal");
    if (file->stripe_bytes > ZPP_AIO_STRIPE_BYTES)
        return zpp_fail(err, ZPP_INVALID, "params: stripe_bytes is %zu, wanted at most %d", file->stripe_bytes,
                        ZPP_AIO_STRIPE_BYTES);
    const unsigned disks = file->folders_count ? file->folders_count : 1;
    const struct zpp_aio_config config = {
        .depth = file->depth ? file->depth : DEPTH * disks,
        .block_bytes = file->block_bytes ? file->block_bytes : (size_t)BLOCK_BYTES,
        .flight_bytes = (size_t)FLIGHT_BYTES * disks,
        .direct = true,
        .checksums = file->checksums,
        .backend = ZPP_AIO_AUTO,
        .stripes = file->folders,
        .stripes_count = file->folders_count,
        .stripe_bytes = file->stripe_bytes ? file->stripe_bytes : (size_t)ZPP_AIO_STRIPE_BYTES,
        .log = file->log,
        .log_ctx = file->log_ctx,
        .sys = file->sys,
    };
    filed->path = strdup(file->path);
    if (!filed->path) return zpp_fail(err, ZPP_NOMEM, "params: no memory for the path");
    zpp_status status = zpp_aio_create(&config, &filed->aio, err);
    if (status == ZPP_OK && file->make) status = zpp_aio_make(filed->aio, filed->path, file_bytes(filed), fault, err);
    if (status == ZPP_OK && file->checksums && filed->sums_room) status = share_sums(filed, &config, file->make, err);
    return status;
}

/* A failed load leaves the unit empty, so that another rank may try. */
static void end_load(zpp_filed *filed, int index, zpp_status status) {
    filed->units[index].status = status;
    if (filed->board) atomic_store(&filed->board[index].contents, status == ZPP_OK ? LOADED : EMPTY);
}

static void finish_load(zpp_filed *filed, int index) {
    struct filed_unit *unit = &filed->units[index];
    const zpp_status status = filed_finish(&unit->request, &unit->fault, &unit->err);
    if (filed->images.bits) filed_image_end(filed, unit, status);
    end_load(filed, index, status);
}

void zpp_filed_close(zpp_filed *filed) {
    if (!filed->aio) return;
    struct zpp_filed_figures last;
    zpp_filed_figures(filed, &last);
    filed_drop_windows(filed);
    zpp_aio_destroy(filed->aio);
    filed->aio = NULL;
    filed->closed_read_bytes = last.read_bytes;
    filed->closed_written_bytes = last.written_bytes;
    filed->closed_checked_bytes = last.checked_bytes;
    for (int i = 0; i < filed->units_count; i++)
        if (filed->units[i].request) finish_load(filed, i);
    for (int i = 0; i < filed->units_count; i++) {
        struct zpp_err ignored = ZPP_ERR_INIT;
        (void)filed_finish(&filed->units[i].sending, NULL, &ignored);
    }
}

/* --- requests ----------------------------------------------------------------------------------------------------- */

const struct filed_unit *filed_unit_at(const zpp_filed *filed, size_t offset_bytes) {
    int low = 0, high = filed->units_count - 1;
    while (low < high) { /* the last one that begins there or before */
        const int middle = (low + high + 1) / 2;
        if (filed->units[middle].offset_bytes <= offset_bytes) low = middle;
        else high = middle - 1;
    }
    return &filed->units[low];
}

static uint64_t place_in_file(const zpp_filed *filed, size_t offset_bytes, bool next) {
    const struct filed_unit *unit = filed_unit_at(filed, offset_bytes);
    size_t begin_bytes;
    (void)moving_part(filed, unit, &begin_bytes);
    assert(unit->two || !next);
    const bool second = unit->two && unit->turned != next;
    return (second ? unit->second_offset_bytes : unit->first_offset_bytes) + (offset_bytes - begin_bytes);
}

zpp_status filed_submit(zpp_filed *filed, size_t offset_bytes, void *memory, size_t bytes, bool write, bool next,
                        zpp_aio_request **out, struct zpp_aio_fault *fault, struct zpp_err *err) {
    assert(offset_bytes >= filed->cut_bytes && offset_bytes + bytes <= filed->home_bytes);
    if (!filed->aio) return zpp_fail(err, ZPP_STATE, "params: their file is closed with the model; prepare a new one");
    const uint64_t place = place_in_file(filed, offset_bytes, next);
    assert(!bytes || place_in_file(filed, offset_bytes + bytes - 1, next) == place + bytes - 1); /* no gap between */
    const struct zpp_aio_job job = { .path = filed->path, .memory = memory, .bytes = bytes, .offset_bytes = place,
                                     .write = write };
    return zpp_aio_submit(filed->aio, &job, out, fault, err);
}

zpp_status filed_finish(zpp_aio_request **request, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!*request) return ZPP_OK;
    /* No time-out and no tick: the kernel ends every request on a file. */
    const struct zpp_wait patience = { 0, NULL, NULL };
    const zpp_status status = zpp_aio_wait(*request, &patience, err);
    const struct zpp_aio_fault *seen = zpp_aio_request_fault(*request);
    if (status == ZPP_TIER && seen && fault) *fault = *seen;
    zpp_aio_release(*request);
    *request = NULL;
    return status;
}

/* --- memory of a unit --------------------------------------------------------------------------------------------- */

static zpp_status join_users(struct filed_board *board, struct zpp_err *err) {
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

/* Whether this was the last user; then nobody enters until users is 0 again. */
static bool part_from_users(struct filed_board *board) {
    for (;;) {
        int32_t users = atomic_load(&board->users);
        if (atomic_compare_exchange_weak(&board->users, &users, users > 1 ? users - 1 : -1)) return users <= 1;
    }
}

zpp_status zpp_filed_enter(zpp_filed *filed, int index, struct zpp_err *err) {
    size_t offset_bytes;
    const size_t bytes = moving_part(filed, &filed->units[index], &offset_bytes);
    zpp_status status = ZPP_OK;
    if (filed->range) status = zpp_range_map(filed->range, offset_bytes, bytes, err);
    else status = join_users(&filed->board[index], err);
    if (status != ZPP_OK) return status;
    const int failed = filed->range ? 0 : filed_home_open(filed, &filed->units[index], offset_bytes, bytes);
    if (failed) {
        if (part_from_users(&filed->board[index])) atomic_store(&filed->board[index].users, 0);
        return zpp_fail_os(err, failed, "params: opening %zu bytes of addresses", bytes);
    }
    filed->entered_bytes += bytes;
    if (filed->entered_bytes > filed->entered_peak_bytes) filed->entered_peak_bytes = filed->entered_bytes;
    return ZPP_OK;
}

zpp_status zpp_filed_leave(zpp_filed *filed, int index, struct zpp_err *err) {
    size_t offset_bytes;
    const size_t bytes = moving_part(filed, &filed->units[index], &offset_bytes);
    filed->entered_bytes -= bytes;
    if (filed->range) return zpp_range_unmap(filed->range, offset_bytes, bytes, err);
    struct filed_board *board = &filed->board[index];
    const bool last = part_from_users(board);
    if (last) { /* while the mapping is writable: the kernel wants that */
        zpp_region_trim(filed->region, offset_bytes, bytes);
        atomic_store(&board->contents, EMPTY);
    }
    const int failed = filed_home_close(filed, &filed->units[index], offset_bytes, bytes);
    if (last) atomic_store(&board->users, 0);
    return failed ? zpp_fail_os(err, failed, "params: closing %zu bytes of addresses", bytes) : ZPP_OK;
}

/* --- loads -------------------------------------------------------------------------------------------------------- */

static void submit_part(zpp_filed *filed, int index, bool write) {
    struct filed_unit *unit = &filed->units[index];
    size_t offset_bytes;
    const size_t bytes = moving_part(filed, unit, &offset_bytes);
    const zpp_status status = filed_submit(filed, offset_bytes, filed->home + offset_bytes, bytes, write, false,
                                           &unit->request, &unit->fault, &unit->err);
    if (status != ZPP_OK) end_load(filed, index, status);
}

static void submit_load(zpp_filed *filed, int index) {
    struct filed_unit *unit = &filed->units[index];
    filed->loads++;
    if (!filed->images.bits) {
        submit_part(filed, index, false);
        return;
    }
    const zpp_status status = filed_image_begin(filed, unit);
    if (status == ZPP_OK && !unit->request) filed_image_end(filed, unit, status);
    if (!unit->request) end_load(filed, index, status);
}

static bool may_load(zpp_filed *filed, int index) {
    int32_t empty = EMPTY;
    return !filed->board || atomic_compare_exchange_strong(&filed->board[index].contents, &empty, LOADING);
}

void zpp_filed_begin(zpp_filed *filed, int index) {
    filed->units[index].status = ZPP_OK;
    filed->units[index].request = NULL;
    if (may_load(filed, index)) submit_load(filed, index);
}

void zpp_filed_begin_write(zpp_filed *filed, int index) {
    assert(!filed->board);
    filed->units[index].status = ZPP_OK;
    filed->units[index].request = NULL;
    submit_part(filed, index, true);
}

static zpp_status arrive(zpp_filed *filed, int index, const struct zpp_wait *wait) {
    struct filed_unit *unit = &filed->units[index];
    const uint64_t began_ns = zpp_now_ns();
    for (;;) {
        if (unit->request) {
            if (!wait && !zpp_aio_done(unit->request)) return ZPP_AGAIN;
            finish_load(filed, index);
            return ZPP_OK;
        }
        if (!filed->board || unit->status != ZPP_OK) return ZPP_OK;
        const int32_t contents = atomic_load(&filed->board[index].contents);
        const bool stuck = contents == LOADING && zpp_now_ns() - began_ns > PATIENCE_NS;
        if (contents == LOADED) return ZPP_OK;
        if (stuck || may_load(filed, index)) submit_load(filed, index);
        else if (!wait) return ZPP_AGAIN;
        else nap();
    }
}

zpp_status zpp_filed_arrive(zpp_filed *filed, int index, const struct zpp_wait *wait) {
    if (!wait) return arrive(filed, index, NULL);
    const uint64_t began_ns = zpp_now_ns();
    const zpp_status status = arrive(filed, index, wait);
    filed->load_wait_ns += zpp_now_ns() - began_ns;
    return status;
}

zpp_status zpp_filed_outcome(const zpp_filed *filed, int index, struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct filed_unit *unit = &filed->units[index];
    if (unit->status == ZPP_OK) return ZPP_OK;
    *err = unit->err;
    if (unit->status == ZPP_TIER && fault) *fault = unit->fault;
    return unit->status;
}

bool zpp_filed_is_idle(const zpp_filed *filed) {
    struct zpp_aio_figures io = { 0 };
    if (filed->aio) zpp_aio_figures(filed->aio, &io);
    return io.outstanding == 0;
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

static zpp_status move_filed(zpp_filed *filed, size_t offset_bytes, void *memory, size_t bytes, bool write,
                             struct zpp_aio_fault *fault, struct zpp_err *err) {
    zpp_aio_request *request = NULL;
    const zpp_status status = filed_submit(filed, offset_bytes, memory, bytes, write, false, &request, fault, err);
    return status == ZPP_OK ? filed_finish(&request, fault, err) : status;
}

zpp_status zpp_filed_copy(zpp_filed *filed, size_t offset_bytes, void *memory, size_t bytes, bool write,
                          struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (offset_bytes > filed->home_bytes || bytes > filed->home_bytes - offset_bytes)
        return zpp_fail(err, ZPP_INVALID, "params: bytes %zu to %zu are copied, there are %zu", offset_bytes,
                        offset_bytes + bytes, filed->home_bytes);
    if (filed->images.bits)
        return zpp_fail(err, ZPP_STATE, "params: they are kept in %d bits, and cannot be %s in parts",
                        filed->images.bits, write ? "written" : "read");
    const size_t left = offset_bytes < filed->cut_bytes ? filed->cut_bytes - offset_bytes : 0;
    const size_t held = bytes < left ? bytes : left;
    if (held) memcpy(write ? filed->home + offset_bytes : memory, write ? memory : filed->home + offset_bytes, held);
    if (held == bytes) return ZPP_OK;
    return move_filed(filed, offset_bytes + held, (unsigned char *)memory + held, bytes - held, write, fault, err);
}

zpp_status zpp_filed_write_back(zpp_filed *filed, size_t offset_bytes, size_t bytes, struct zpp_aio_fault *fault,
                                struct zpp_err *err) {
    const size_t end = offset_bytes + bytes;
    if (offset_bytes < filed->cut_bytes) offset_bytes = filed->cut_bytes;
    if (offset_bytes >= end) return ZPP_OK;
    return move_filed(filed, offset_bytes, filed->home + offset_bytes, end - offset_bytes, true, fault, err);
}

zpp_status zpp_filed_send(zpp_filed *filed, int index, size_t offset_bytes, size_t bytes, struct zpp_aio_fault *fault,
                          struct zpp_err *err) {
    const size_t end = offset_bytes + bytes;
    if (offset_bytes < filed->cut_bytes) offset_bytes = filed->cut_bytes;
    if (offset_bytes >= end) return ZPP_OK;
    return filed_submit(filed, offset_bytes, filed->home + offset_bytes, end - offset_bytes, true, false,
                        &filed->units[index].sending, fault, err);
}

zpp_status zpp_filed_sent(zpp_filed *filed, int index, struct zpp_aio_fault *fault, struct zpp_err *err) {
    zpp_aio_request **request = &filed->units[index].sending;
    const uint64_t began_ns = zpp_now_ns();
    const zpp_status status = filed_finish(request, fault, err);
    filed->step_wait_ns += zpp_now_ns() - began_ns;
    return status;
}

void zpp_filed_figures(const zpp_filed *filed, struct zpp_filed_figures *out) {
    *out = (struct zpp_filed_figures){
        .home_bytes = filed->home_bytes,
        .cut_bytes = filed->cut_bytes,
        .entered_bytes = filed->entered_bytes,
        .entered_peak_bytes = filed->entered_peak_bytes,
        .memory_bytes = filed->range ? zpp_range_held_bytes(filed->range) - filed->cut_bytes : filed->entered_bytes,
        .read_bytes = filed->closed_read_bytes,
        .written_bytes = filed->closed_written_bytes,
        .checked_bytes = filed->closed_checked_bytes,
        .loads = filed->loads,
        .load_wait_ns = filed->load_wait_ns,
        .step_wait_ns = filed->step_wait_ns,
        .images_bytes = filed->images_bytes,
        .images_held_bytes = filed->images_cut_bytes,
        .second_bytes = filed->second_bytes,
        .staging_bytes = filed->stagings * filed->staging_bytes,
    };
    for (int i = 0; i < ZPP_FILED_WINDOWS; i++) out->window_bytes += filed->windows[i].room_bytes;
    if (!filed->aio) return;
    struct zpp_aio_figures io;
    zpp_aio_figures(filed->aio, &io);
    out->read_bytes = io.read_bytes;
    out->written_bytes = io.written_bytes;
    out->checked_bytes = io.checked_bytes;
    out->sums_bytes = io.sums_bytes;
    out->uring = io.uring;
}
