/* SPDX-License-Identifier: Apache-2.0
 *
 * wrap.h: which units meet, and the order of their uses. Each unit has one event, which is recorded at its release. A
 * unit that is taken comes after its own release and those of all units that it meets. Releases are numbered. While all
 * of them are on one stream, the newest one of these is after the others, so one wait is enough; and none is needed if
 * the stream that takes has waited for a newer one already.
 */
#include "wrap.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "device_fill.h"
#include "mem.h"

enum { ALIGN_BYTES = 512, POISON = 0xff }; /* NaN as fp64, fp32, fp16, bf16 and fp8 */

struct last_use {
    zpp_event *event;
    uint64_t number; /* of the release; 0: never released */
};

struct unit {
    const char *name;
    size_t bytes, offset_bytes;
    struct last_use released;
    struct last_use left; /* its last use of memory that wraps, once it has memory of its own; its event may be NULL */
    void *own;       /* NULL: its memory wraps */
    int *meets;      /* the units that meet it */
    int meets_count;
    bool whole;
};

struct zpp_wrap {
    zpp_device *device;
    struct unit *units;
    int units_count;
    struct zpp_mapping mapping; /* memory_bytes 0: nothing is mapped */
    size_t own_bytes;
    bool poison;
    uint64_t releases;
    const zpp_stream *releases_on, *takes_on; /* NULL: none yet */
    bool mixed;             /* releases were on several streams: a newer one is not after an older one */
    uint64_t ordered_after; /* takes_on comes after the releases up to this number */
};

/* --- which units meet --------------------------------------------------------------------------------------------- */
bool zpp_wrap_meet(const zpp_wrap *wrap, int a, int b) {
    const struct unit *x = &wrap->units[a], *y = &wrap->units[b];
    const size_t r = wrap->mapping.memory_bytes;
    if (a == b || x->own || y->own || !x->bytes || !y->bytes) return false;
    const size_t apart = (y->offset_bytes % r + r - x->offset_bytes % r) % r; /* from the begin of x, around */
    return apart < x->bytes || apart + y->bytes > r;
}

static zpp_status list_meets(zpp_wrap *wrap, int index, struct zpp_err *err) {
    struct unit *unit = &wrap->units[index];
    for (int other = 0; other < wrap->units_count; other++) unit->meets_count += zpp_wrap_meet(wrap, index, other);
    unit->meets = calloc((size_t)unit->meets_count + 1, sizeof *unit->meets);
    if (!unit->meets) return zpp_fail(err, ZPP_NOMEM, "wrapped memory: no memory for a list of %d units",
                                      unit->meets_count);
    for (int other = 0, at = 0; other < wrap->units_count; other++) {
        if (zpp_wrap_meet(wrap, index, other)) unit->meets[at++] = other;
    }
    return ZPP_OK;
}

/* --- create and destroy ------------------------------------------------------------------------------------------- */
static zpp_status place_units(zpp_wrap *wrap, const struct zpp_wrap_options *options, size_t *address_bytes,
                              struct zpp_err *err) {
    for (int i = 0; i < options->units_count; i++) {
        struct unit *unit = &wrap->units[i];
        unit->name = options->units[i].name;
        unit->bytes = options->units[i].bytes;
        unit->offset_bytes = *address_bytes;
        const bool own = options->units[i].own || wrap->poison;
        if (!own) *address_bytes += zpp_round_up(unit->bytes, ALIGN_BYTES);
        if (unit->bytes > options->memory_bytes && !own) {
            return zpp_fail(err, ZPP_INVALID,
                            "wrapped memory: unit %s has %zu bytes, wanted at most the %zu bytes of memory for all "
                            "units; raise prefetch_bytes, or split the unit",
                            unit->name, unit->bytes, options->memory_bytes);
        }
        const zpp_status status = zpp_event_create(wrap->device, &unit->released.event, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

static zpp_status map_units(zpp_wrap *wrap, size_t address_bytes, size_t memory_bytes, struct zpp_err *err) {
    const struct zpp_device_fill *fill = wrap->device->fill;
    size_t grain;
    zpp_status status = fill->map_grain(wrap->device, &grain, err);
    if (status != ZPP_OK || !address_bytes) return status;
    const size_t addresses = zpp_round_up(address_bytes, grain), wanted = zpp_round_up(memory_bytes, grain);
    const size_t memory = wanted < addresses ? wanted : addresses;
    status = fill->map_wrapped(wrap->device, addresses, memory, &wrap->mapping, err);
    for (int i = 0; status == ZPP_OK && i < wrap->units_count; i++) status = list_meets(wrap, i, err);
    return status;
}

static bool wants_poison(void) {
    const char *set = getenv("ZEROPP_POISON");
    return set && strcmp(set, "1") == 0;
}

zpp_status zpp_wrap_create(const struct zpp_wrap_options *options, zpp_wrap **out, struct zpp_err *err) {
    zpp_wrap *wrap = calloc(1, sizeof *wrap);
    if (wrap) wrap->units = calloc((size_t)options->units_count + 1, sizeof *wrap->units);
    if (!wrap || !wrap->units) {
        free(wrap);
        return zpp_fail(err, ZPP_NOMEM, "wrapped memory: no memory for the records of %d units", options->units_count);
    }
    size_t address_bytes = 0;
    wrap->device = options->device;
    wrap->units_count = options->units_count;
    wrap->poison = wants_poison();
    zpp_status status = place_units(wrap, options, &address_bytes, err);
    for (int i = 0; status == ZPP_OK && i < wrap->units_count; i++)
        if (wrap->poison || options->units[i].own) status = zpp_wrap_own(wrap, i, err);
    if (status == ZPP_OK && !wrap->poison) status = map_units(wrap, address_bytes, options->memory_bytes, err);
    if (status != ZPP_OK) {
        zpp_wrap_destroy(wrap);
        return status;
    }
    *out = wrap;
    return ZPP_OK;
}

void zpp_wrap_destroy(zpp_wrap *wrap) {
    if (!wrap) return;
    for (int i = 0; i < wrap->units_count; i++) {
        struct unit *unit = &wrap->units[i];
        if (unit->own) zpp_device_free(wrap->device, unit->own, unit->bytes);
        zpp_event_destroy(unit->released.event);
        zpp_event_destroy(unit->left.event);
        free(unit->meets);
    }
    if (wrap->mapping.base) wrap->device->fill->unmap_wrapped(wrap->device, &wrap->mapping);
    free(wrap->units);
    free(wrap);
}

/* --- units -------------------------------------------------------------------------------------------------------- */
void *zpp_wrap_address(const zpp_wrap *wrap, int unit) {
    const struct unit *found = &wrap->units[unit];
    return found->own ? found->own : (unsigned char *)wrap->mapping.base + found->offset_bytes;
}

size_t zpp_wrap_memory_bytes(const zpp_wrap *wrap) { return wrap->mapping.memory_bytes; }

size_t zpp_wrap_own_bytes(const zpp_wrap *wrap) { return wrap->own_bytes; }

static const struct last_use *last_use_of(const zpp_wrap *wrap, int unit) {
    const struct unit *found = &wrap->units[unit];
    return found->own ? &found->left : &found->released;
}

/* Order the stream after one release. AGAIN: it is not enqueued yet. */
static zpp_status wait_for_use(zpp_wrap *wrap, const struct last_use *use, zpp_stream *stream, struct zpp_err *err) {
    if (!wrap->mixed && (stream == wrap->releases_on || use->number <= wrap->ordered_after)) return ZPP_OK;
    const zpp_status status = zpp_stream_wait(stream, use->event, NULL, err);
    if (status == ZPP_OK && !wrap->mixed) wrap->ordered_after = use->number;
    return status;
}

static zpp_status wait_for_uses(zpp_wrap *wrap, const struct unit *taken, int meets, zpp_stream *stream,
                                struct zpp_err *err) {
    const struct last_use *newest = &taken->released;
    for (int i = 0; i < meets && !wrap->mixed; i++) {
        const struct last_use *use = last_use_of(wrap, taken->meets[i]);
        if (use->number > newest->number) newest = use;
    }
    zpp_status status = wait_for_use(wrap, newest, stream, err);
    for (int i = 0; i < meets && wrap->mixed && status == ZPP_OK; i++)
        status = wait_for_use(wrap, last_use_of(wrap, taken->meets[i]), stream, err);
    return status;
}

zpp_status zpp_wrap_take(zpp_wrap *wrap, int unit, zpp_stream *stream, int *blocker, struct zpp_err *err) {
    struct unit *taken = &wrap->units[unit];
    const int meets = taken->own ? 0 : taken->meets_count;
    *blocker = -1;
    if (taken->whole) return ZPP_OK;
    for (int i = 0; i < meets; i++) {
        const struct unit *other = &wrap->units[taken->meets[i]];
        if (!other->whole || other->own) continue;
        *blocker = taken->meets[i];
        return ZPP_AGAIN;
    }
    if (wrap->takes_on != stream) wrap->ordered_after = 0;
    wrap->takes_on = stream;
    const zpp_status status = wait_for_uses(wrap, taken, meets, stream, err);
    taken->whole = status == ZPP_OK;
    return status;
}

zpp_status zpp_wrap_release(zpp_wrap *wrap, int unit, zpp_stream *stream, struct zpp_err *err) {
    struct unit *released = &wrap->units[unit];
    assert(released->whole);
    zpp_status status = ZPP_OK;
    if (wrap->poison) status = zpp_stream_fill(stream, released->own, POISON, released->bytes, err);
    if (status == ZPP_OK) status = zpp_event_record(released->released.event, stream, err);
    if (status != ZPP_OK) return status;
    wrap->mixed |= wrap->releases_on && wrap->releases_on != stream;
    wrap->releases_on = stream;
    released->released.number = ++wrap->releases;
    released->whole = false;
    return ZPP_OK;
}

zpp_status zpp_wrap_own(zpp_wrap *wrap, int unit, struct zpp_err *err) {
    struct unit *owner = &wrap->units[unit];
    assert(!owner->whole);
    if (owner->own) return ZPP_OK;
    zpp_event *released = NULL;
    zpp_status status = zpp_event_create(wrap->device, &released, err);
    if (status == ZPP_OK) status = zpp_device_alloc(wrap->device, owner->bytes, &owner->own, err);
    if (status != ZPP_OK) {
        zpp_event_destroy(released);
        return status;
    }
    owner->left = owner->released;
    owner->released = (struct last_use){released, 0};
    wrap->own_bytes += owner->bytes;
    return ZPP_OK;
}
