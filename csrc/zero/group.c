/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups are made of one list: which part each data rank holds.
 */
#include "group.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

void zpp_group_init_all(struct zpp_group *group, int rank, int ranks) {
    *group = (struct zpp_group){.name = "all data ranks", .rank = rank, .ranks = ranks, .parts = 1, .divisor = ranks};
    for (int r = 0; r < ranks; r++) group->members[r] = r;
}

/* The members of this rank's part, in order of ranks. */
static void choose_members(struct zpp_group *group, const int *part_of, int rank, int ranks) {
    group->part = part_of[rank];
    for (int r = 0; r < ranks; r++) {
        if (part_of[r] >= group->parts) group->parts = part_of[r] + 1;
        if (part_of[r] != group->part) continue;
        if (r == rank) group->rank = group->ranks;
        group->members[group->ranks++] = r;
    }
}

/* Every part has as many ranks as this one: memory is laid out alike on all of them. */
static zpp_status check_parts(const struct zpp_group *group, const int *part_of, int ranks, struct zpp_err *err) {
    for (int part = 0; part < group->parts; part++) {
        int holders = 0;
        for (int r = 0; r < ranks; r++) holders += part_of[r] == part;
        if (holders != group->ranks)
            return zpp_fail(err, ZPP_INVALID,
                            "zero: part %d of group \"%s\" is held by %d of %d data ranks, part %d by %d; wanted equal "
                            "numbers",
                            part, group->name, holders, ranks, group->part, group->ranks);
    }
    return ZPP_OK;
}

/* What the ranks compare of a group. */
struct parts {
    char name[64];
    double divisor;
    int part_of[ZPP_RANKS_MAX];
};

static void describe(const zpp_zero *zero, const struct parts *parts, char *text, size_t capacity) {
    size_t used = (size_t)snprintf(text, capacity, "group \"%s\" with parts", parts->name);
    for (int r = 0; r < zero->ranks && used < capacity; r++)
        used += (size_t)snprintf(text + used, capacity - used, " %d", parts->part_of[r]);
    if (used < capacity) snprintf(text + used, capacity - used, ", divisor %g", parts->divisor);
}

/* Ranks that divided the parameters in other ways would add gradients of different ones without a word. */
static zpp_status check_same(const zpp_zero *zero, const struct zpp_group_spec *spec, struct zpp_err *err) {
    struct parts mine = { .divisor = spec->divisor }, *all = NULL;
    char here[320], there[320];
    if (zero->ranks == 1) return ZPP_OK;
    snprintf(mine.name, sizeof mine.name, "%s", spec->name);
    memcpy(mine.part_of, spec->part_of, (size_t)zero->ranks * sizeof *mine.part_of);
    all = malloc((size_t)zero->ranks * sizeof *all);
    if (!all) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the parts of %d ranks", zero->ranks);
    zpp_status status = zpp_all_gather(zero->options.comm, all, &mine, sizeof mine, NULL, err);
    for (int r = 1; status == ZPP_OK && r < zero->ranks; r++) {
        if (memcmp(&all[r], &all[0], sizeof mine) == 0) continue;
        describe(zero, &all[0], here, sizeof here);
        describe(zero, &all[r], there, sizeof there);
        status = zpp_fail(err, ZPP_INVALID,
                          "zero: rank %d has %s, but rank %d has %s; give every rank the same mesh and the same groups",
                          zpp_comm_job_rank(zero->options.comm, 0), here, zpp_comm_job_rank(zero->options.comm, r),
                          there);
    }
    free(all);
    return status;
}

static zpp_status check_coordinator(const zpp_zero *zero, const char *name, struct zpp_err *err) {
    const char *what = NULL, *instead = "keep parameters in memory";
    if (zpp_internode(zero->options.comm)) {
        if (zero->unit_file) what = "parameters in files over several hosts";
        if (zpp_zero_shards_device(zero) != zero->options.device) {
            what = "shards on the hosts of accelerators, over several hosts";
            instead = "use one host, or keep shards on the accelerators";
        }
    }
    if (zero->sealed || zero->units_count)
        return zpp_fail(err, ZPP_STATE, "zero: group \"%s\" comes after the first unit", name);
    if (!what) return ZPP_OK;
    return zpp_fail(err, ZPP_NOT_BUILT,
                    "zero: group \"%s\", whose ranks hold different parameters, with %s is not supported yet; %s", name,
                    what, instead);
}

static zpp_status check_spec(const zpp_zero *zero, const struct zpp_group_spec *spec, struct zpp_err *err) {
    if (!(spec->divisor >= 0.0 && isfinite(spec->divisor)))
        return zpp_fail(err, ZPP_INVALID, "zero: divisor %g of group \"%s\", wanted above 0, or 0 for %d data ranks",
                        spec->divisor, spec->name, zero->ranks);
    for (int r = 0; r < zero->ranks; r++)
        if (spec->part_of[r] < 0 || spec->part_of[r] >= zero->ranks)
            return zpp_fail(err, ZPP_INVALID, "zero: data rank %d holds part %d of group \"%s\", wanted 0 to %d", r,
                            spec->part_of[r], spec->name, zero->ranks - 1);
    return ZPP_OK;
}

zpp_status zpp_zero_add_group(zpp_zero *zero, const struct zpp_group_spec *spec, int *index, struct zpp_err *err) {
    zpp_status status = check_coordinator(zero, spec->name, err);
    if (status == ZPP_OK) status = check_same(zero, spec, err);
    if (status == ZPP_OK) status = check_spec(zero, spec, err);
    if (status != ZPP_OK) return status;
    struct zpp_group **groups = zpp_array_reserve(zero->groups, (size_t)zero->groups_count, &zero->groups_capacity,
                                                  sizeof(struct zpp_group *));
    struct zpp_group *group = groups ? calloc(1, sizeof *group) : NULL;
    if (groups) zero->groups = groups;
    if (!group) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for group \"%s\"", spec->name);
    snprintf(group->name, sizeof group->name, "%s", spec->name);
    group->divisor = spec->divisor > 0.0 ? spec->divisor : zero->ranks;
    choose_members(group, spec->part_of, zero->rank, zero->ranks);
    status = check_parts(group, spec->part_of, zero->ranks, err);
    if (status != ZPP_OK) {
        free(group);
        return status;
    }
    *index = zero->groups_count;
    zero->groups[zero->groups_count++] = group;
    return ZPP_OK;
}
