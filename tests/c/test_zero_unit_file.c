/* SPDX-License-Identifier: Apache-2.0
 *
 * Parameters in a file: random schedules of loads, copies and releases against a plain array; ranks that share the
 * mapping; and every call into the operating system failing once. The step: test_zero_unit_file_step.c.
 *
 * Run: test_zero_unit_file [case]; UNIT_FILE_SCHEDULES and UNIT_FILE_SEED choose how many schedules, and the first, and
 * have each seed printed, which repeats its schedule.
 */
#include "unit_file_common.h"
#include "ranks.h"

enum { UNITS = 6, SCHEDULES = 40, MOVES = 60 };
/* Smaller than a page, whole pages, a few bytes over. */
static const size_t unit_bytes[UNITS] = { 5000 * 4, 64, 3 * PAGE, 40000, PAGE + 4, 2 * PAGE };

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static size_t below(uint64_t *random, size_t end) {
    return (size_t)(next_random(random) % end);
}

/* --- one rank ----------------------------------------------------------------------------------------------------- */

struct mapping {
    zpp_unit_file *unit_file;
    unsigned char *memory; /* the mapping */
    size_t bytes;
    int unit[UNITS];
    size_t offset[UNITS];
};

static zpp_status open_file(zpp_unit_file *unit_file, bool make, struct zpp_aio_fault *fault, struct zpp_err *err) {
    return open_blocks(unit_file, make, 4 * PAGE, fault, err);
}

/* Units added and sealed, no file yet. */
static struct mapping sealed_mapping(zpp_comm *comm, double fraction, size_t warm_bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct mapping mapping = { .bytes = 0 };
    CHECK_OK(zpp_unit_file_create(comm, fraction, &mapping.unit_file, &err));
    for (int i = 0; i < UNITS; i++) {
        CHECK_OK(zpp_unit_file_add(mapping.unit_file, unit_bytes[i], &mapping.unit[i], &mapping.offset[i], &err));
        CHECK_EQUAL(mapping.offset[i], mapping.bytes);
        mapping.bytes += (unit_bytes[i] + PAGE - 1) / PAGE * PAGE;
    }
    CHECK_OK(zpp_unit_file_seal(mapping.unit_file, warm_bytes, &err));
    mapping.memory = zpp_unit_file_mapping(mapping.unit_file);
    return mapping;
}

static struct mapping new_mapping(double fraction, size_t warm_bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct mapping mapping = sealed_mapping(NULL, fraction, warm_bytes);
    CHECK_OK(open_file(mapping.unit_file, true, &fault, &err));
    return mapping;
}

static void end_mapping(struct mapping *mapping) {
    zpp_unit_file_destroy(mapping->unit_file);
    remove_file();
}

static void put(struct mapping *mapping, size_t offset, const void *values, size_t bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    CHECK_OK(zpp_unit_file_copy(mapping->unit_file, offset, (void *)(uintptr_t)values, bytes, true, &fault, &err));
}

static void check_copy(struct mapping *mapping, size_t offset, const unsigned char *wanted, size_t bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    unsigned char *seen = malloc(bytes + 1);
    CHECK(seen);
    CHECK_OK(zpp_unit_file_copy(mapping->unit_file, offset, seen, bytes, false, &fault, &err));
    CHECK_EQUAL(memcmp(seen, wanted, bytes), 0);
    free(seen);
}

static void check_outcome(struct mapping *mapping, int i) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    CHECK_OK(zpp_unit_file_read_status(mapping->unit_file, mapping->unit[i], &fault, &err));
}

static void load(struct mapping *mapping, int i) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_unit_file_acquire(mapping->unit_file, mapping->unit[i], &err));
    zpp_unit_file_read_begin(mapping->unit_file, mapping->unit[i]);
    CHECK_OK(zpp_unit_file_read_wait(mapping->unit_file, mapping->unit[i], &patient));
}

static void leave(struct mapping *mapping, int i) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_unit_file_release(mapping->unit_file, mapping->unit[i], &err));
}

/* --- random schedules --------------------------------------------------------------------------------------------- */

enum { OUT, COMING, IN }; /* a unit, as the schedule sees it */

struct schedule {
    struct mapping mapping;
    unsigned char *model; /* what every byte of the mapping should be */
    int state[UNITS];
    uint64_t random;
};

static bool is_in(const struct schedule *at, int i) {
    return at->state[i] == IN || zpp_unit_file_is_held(at->mapping.unit_file, at->mapping.unit[i]);
}

static void check_unit(const struct schedule *at, int i) {
    const size_t offset = at->mapping.offset[i];
    CHECK_EQUAL(memcmp(at->mapping.memory + offset, at->model + offset, unit_bytes[i]), 0);
}

/* Write bytes of one unit that is not acquired: the memory of an acquired one would be stale. */
static void write_some(struct schedule *at, int i) {
    if (at->state[i] != OUT) return;
    const size_t from = below(&at->random, unit_bytes[i]), bytes = 1 + below(&at->random, unit_bytes[i] - from);
    unsigned char *values = at->model + at->mapping.offset[i] + from;
    fill(values, bytes, from, (unsigned)next_random(&at->random));
    put(&at->mapping, at->mapping.offset[i] + from, values, bytes);
}

static void read_some(struct schedule *at) {
    const size_t from = below(&at->random, at->mapping.bytes), bytes = below(&at->random, at->mapping.bytes - from + 1);
    check_copy(&at->mapping, from, at->model + from, bytes);
}

static void write_back_some(struct schedule *at, int i) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    if (!is_in(at, i)) return;
    const size_t from = at->mapping.offset[i] + below(&at->random, unit_bytes[i]);
    const size_t bytes = 1 + below(&at->random, at->mapping.offset[i] + unit_bytes[i] - from);
    fill(at->model + from, bytes, from, (unsigned)next_random(&at->random));
    memcpy(at->mapping.memory + from, at->model + from, bytes);
    CHECK_OK(zpp_unit_file_write_back(at->mapping.unit_file, from, bytes, &fault, &err));
}

/* One step in a unit's life. */
static void go_on(struct schedule *at, int i) {
    struct zpp_err err = ZPP_ERR_INIT;
    const int unit = at->mapping.unit[i];
    if (zpp_unit_file_is_held(at->mapping.unit_file, unit)) {
        check_unit(at, i);
    } else if (at->state[i] == OUT) {
        CHECK_OK(zpp_unit_file_acquire(at->mapping.unit_file, unit, &err));
        zpp_unit_file_read_begin(at->mapping.unit_file, unit);
        at->state[i] = COMING;
    } else if (at->state[i] == COMING) {
        const bool patiently = next_random(&at->random) & 1;
        const zpp_status status = zpp_unit_file_read_wait(at->mapping.unit_file, unit, patiently ? &patient : NULL);
        CHECK(status == ZPP_OK || (status == ZPP_AGAIN && !patiently));
        if (status == ZPP_AGAIN) return;
        check_outcome(&at->mapping, i);
        check_unit(at, i);
        at->state[i] = IN;
    } else {
        check_unit(at, i);
        leave(&at->mapping, i);
        at->state[i] = OUT;
    }
}

static void run_schedule(uint64_t seed) {
    static const double fractions[] = { 1.0, 0.5, 0.2, 0.9 };
    struct schedule at = { .random = seed };
    reset_plan();
    plan.no_ring = next_random(&at.random) % 4 == 0;
    plan.most_bytes = next_random(&at.random) % 3 == 0 ? 1 + below(&at.random, 9000) : 0;
    spread.disks = (unsigned)below(&at.random, 4);
    spread.stripe_bytes = PAGE << below(&at.random, 3);
    spread.checksums = next_random(&at.random) & 1;
    at.mapping = new_mapping(fractions[below(&at.random, 4)], below(&at.random, 3) * 8 * PAGE);
    at.model = calloc(at.mapping.bytes, 1);
    CHECK(at.model);
    for (int i = 0; i < UNITS; i++) write_some(&at, i);
    for (int move = 0; move < MOVES; move++) {
        const int i = (int)below(&at.random, UNITS);
        switch (below(&at.random, 6)) {
        case 0: write_some(&at, i); break;
        case 1: read_some(&at); break;
        case 2: write_back_some(&at, i); break;
        default: go_on(&at, i); break;
        }
    }
    struct zpp_unit_file_figures figures;
    zpp_unit_file_figures(at.mapping.unit_file, &figures);
    CHECK_EQUAL(figures.mapping_bytes, at.mapping.bytes);
    CHECK(figures.acquired_bytes <= figures.acquired_peak_bytes && figures.acquired_peak_bytes <= at.mapping.bytes);
    end_mapping(&at.mapping); /* loads may be under way */
    free(at.model);
}

static void random_schedules(void) {
    const char *count = getenv("UNIT_FILE_SCHEDULES"), *first = getenv("UNIT_FILE_SEED");
    const uint64_t from = first ? strtoull(first, NULL, 10) : 1;
    make_folder();
    for (uint64_t seed = from; seed < from + (count ? strtoull(count, NULL, 10) : SCHEDULES); seed++) {
        if (first || count) fprintf(stderr, "seed %llu ", (unsigned long long)seed);
        run_schedule(seed);
    }
    memset(&spread, 0, sizeof spread);
    remove_folder();
}

/* --- loads that fail ---------------------------------------------------------------------------------------------- */

static void check_fault(const struct zpp_err *err, const struct zpp_aio_fault *fault, int error) {
    CHECK(strstr(err->text, "/params\"") && strstr(err->text, strerror(error)) && strstr(err->text, "at offset"));
    CHECK(strstr(fault->path, "/params") && fault->os_errno == error && fault->wanted_bytes > 0);
}

/* The n-th read of a load fails, for every n: file and offset are named, and the next load of the unit is whole. */
static void every_read_of_a_load_fails_once(void) {
    make_folder();
    for (int no_ring = 0; no_ring < 2; no_ring++) {
        reset_plan();
        plan.no_ring = no_ring;
        struct mapping mapping = new_mapping(1.0, 0);
        static unsigned char values[40000];
        fill(values, sizeof values, 0, 3);
        put(&mapping, mapping.offset[3], values, sizeof values);
        for (int n = 0;; n++) {
            struct zpp_err err = ZPP_ERR_INIT;
            struct zpp_aio_fault fault = { .wanted_bytes = 0 };
            atomic_store(&plan.reads_left, n);
            load(&mapping, 3);
            atomic_store(&plan.reads_left, -1);
            const zpp_status status = zpp_unit_file_read_status(mapping.unit_file, mapping.unit[3], &fault, &err);
            if (status != ZPP_OK) {
                CHECK_EQUAL(status, ZPP_TIER);
                check_fault(&err, &fault, EIO);
                CHECK(fault.offset_bytes >= mapping.offset[3] && fault.offset_bytes < mapping.offset[3] + PAGE * 10);
                leave(&mapping, 3);
                load(&mapping, 3);
                check_outcome(&mapping, 3);
            }
            CHECK_EQUAL(memcmp(mapping.memory + mapping.offset[3], values, sizeof values), 0);
            leave(&mapping, 3);
            if (status == ZPP_OK) {
                CHECK_EQUAL(n, 3); /* ten pages in blocks of four */
                break;
            }
        }
        end_mapping(&mapping);
    }
    remove_folder();
}

/* A file that lost its end; and one that is gone before it was ever opened. */
static void files_that_shrink_or_vanish(void) {
    make_folder();
    reset_plan();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = { .wanted_bytes = 0 };
    struct mapping mapping = new_mapping(1.0, 0);
    CHECK_EQUAL(truncate(in_folder("params"), (off_t)(mapping.offset[3] + PAGE)), 0);
    load(&mapping, 0);
    check_outcome(&mapping, 0);
    leave(&mapping, 0);
    load(&mapping, 3);
    CHECK_FAILS(zpp_unit_file_read_status(mapping.unit_file, mapping.unit[3], &fault, &err), ZPP_TIER, "/params\"");
    CHECK(fault.offset_bytes >= mapping.offset[3] && strstr(fault.path, "/params"));
    leave(&mapping, 3);
    end_mapping(&mapping);

    mapping = new_mapping(1.0, 0);
    plan.open_error = EMFILE;
    load(&mapping, 0); /* the first use opens it */
    CHECK_FAILS(zpp_unit_file_read_status(mapping.unit_file, mapping.unit[0], &fault, &err), ZPP_TIER,
                strerror(EMFILE));
    plan.open_error = 0;
    leave(&mapping, 0);
    load(&mapping, 0);
    check_outcome(&mapping, 0);
    leave(&mapping, 0);
    end_mapping(&mapping);
    remove_folder();
}

/* Shards that are copied, in and out, and written back: each operation fails once. */
static void every_operation_of_a_copy_fails_once(void) {
    make_folder();
    static unsigned char values[40000];
    for (int kind = 0; kind < 3; kind++) { /* out, in, write back */
        for (int n = 0, ended = 0; !ended; n++) {
            struct zpp_err err = ZPP_ERR_INIT;
            struct zpp_aio_fault fault = { .wanted_bytes = 0 };
            reset_plan();
            struct mapping mapping = new_mapping(1.0, 0);
            if (kind == 2) load(&mapping, 3);
            atomic_store(kind ? &plan.writes_left : &plan.reads_left, n);
            const zpp_status status =
                kind == 2 ? zpp_unit_file_write_back(mapping.unit_file, mapping.offset[3], 40000, &fault, &err)
                          : zpp_unit_file_copy(mapping.unit_file, mapping.offset[3], values, 40000, kind, &fault, &err);
            ended = status == ZPP_OK;
            if (!ended) check_fault(&err, &fault, EIO);
            CHECK(n < 8);
            end_mapping(&mapping);
        }
    }
    remove_folder();
}

/* A full disk is found when the file is made, with its path, what was wanted and what is free. */
static void making_the_file(void) {
    make_folder();
    reset_plan();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = { .wanted_bytes = 0 };
    struct mapping mapping = sealed_mapping(NULL, 0.5, 0);
    plan.reserve_error = ENOSPC;
    CHECK_FAILS(open_file(mapping.unit_file, true, &fault, &err), ZPP_TIER, "free some, or choose another folder");
    CHECK(strstr(fault.path, "/params") && fault.has_free && fault.os_errno == ENOSPC);
    struct zpp_unit_file_figures figures;
    zpp_unit_file_figures(mapping.unit_file, &figures);
    CHECK_EQUAL(fault.wanted_bytes, mapping.bytes - figures.resident_bytes);
    end_mapping(&mapping);

    mapping = sealed_mapping(NULL, 0.5, 0);
    plan.reserve_error = EOPNOTSUPP; /* a file with holes */
    CHECK_OK(open_file(mapping.unit_file, true, &fault, &err));
    CHECK_EQUAL(file_bytes(in_folder("params")), mapping.bytes - figures.resident_bytes);
    plan.reserve_error = 0;
    struct mapping second = sealed_mapping(NULL, 0.5, 0); /* a file that is there already is not overwritten */
    CHECK_FAILS(open_file(second.unit_file, true, &fault, &err), ZPP_TIER, strerror(EEXIST));
    zpp_unit_file_destroy(second.unit_file);
    end_mapping(&mapping);

    mapping = sealed_mapping(NULL, 1.0, 0);
    plan.open_error = EACCES;
    CHECK_FAILS(open_file(mapping.unit_file, true, &fault, &err), ZPP_TIER, strerror(EACCES));
    zpp_unit_file_destroy(mapping.unit_file);
    remove_folder();
}

/* The second of three disks is full: its part is named, with what was wanted of that disk. */
static void making_a_striped_file(void) {
    make_folder();
    reset_plan();
    spread.disks = 3;
    spread.stripe_bytes = PAGE;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = { .wanted_bytes = 0 };
    struct mapping mapping = sealed_mapping(NULL, 1.0, 0);
    const size_t pages = mapping.bytes / PAGE;
    plan.reserve_error = ENOSPC;
    atomic_store(&plan.reserves_left, 1);
    CHECK_FAILS(open_file(mapping.unit_file, true, &fault, &err), ZPP_TIER, "/disk1/params");
    CHECK(strstr(fault.path, "/disk1/params") && fault.has_free && fault.os_errno == ENOSPC);
    CHECK_EQUAL(fault.wanted_bytes, (pages + 1) / 3 * PAGE);
    zpp_unit_file_destroy(mapping.unit_file);
    for (unsigned disk = 0; disk < 2; disk++) CHECK_EQUAL(unlink(on_disk(disk, "params")), 0);

    reset_plan();
    mapping = new_mapping(1.0, 0);
    for (unsigned disk = 0; disk < 3; disk++)
        CHECK_EQUAL(file_bytes(on_disk(disk, "params")), (pages + 2 - disk) / 3 * PAGE);
    end_mapping(&mapping);

    struct zpp_scratch_options file = { .path = "params", .folders = disk_folders(2), .folders_count = 2,
                                   .stripe_bytes = ZPP_AIO_STRIPE_BYTES + PAGE, .sys = &sys };
    mapping = sealed_mapping(NULL, 1.0, 0);
    CHECK_FAILS(zpp_unit_file_open(mapping.unit_file, &file, false, &fault, &err), ZPP_INVALID,
                "stripe_bytes is 2101248");
    zpp_unit_file_destroy(mapping.unit_file);
    memset(&spread, 0, sizeof spread);
    remove_folder();
}

/* Large units begin at 2 MiB in the mapping. In the file nothing is between them, so that disks have equal shares. */
static void large_units_lie_together(void) {
    enum { LARGE = 5 };
    static const size_t bytes[LARGE] = { (6 << 20) + 100, 3 * PAGE, (5 << 20) + PAGE, 4 << 20, (7 << 20) - 1 };
    make_folder();
    reset_plan();
    spread.disks = 2;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct mapping mapping = { .bytes = 0 };
    CHECK_OK(zpp_unit_file_create(NULL, 1.0, &mapping.unit_file, &err));
    for (int i = 0; i < LARGE; i++) {
        CHECK_OK(zpp_unit_file_add(mapping.unit_file, bytes[i], &mapping.unit[i], &mapping.offset[i], &err));
        mapping.bytes += (bytes[i] + PAGE - 1) / PAGE * PAGE;
    }
    CHECK_EQUAL(mapping.offset[2] % (2 << 20), 0);
    CHECK(mapping.offset[2] > mapping.offset[1] + 3 * PAGE); /* a gap */
    CHECK_OK(zpp_unit_file_double_buffer(mapping.unit_file, mapping.unit[2], &err));
    CHECK_OK(zpp_unit_file_seal(mapping.unit_file, 0, &err));
    mapping.memory = zpp_unit_file_mapping(mapping.unit_file);
    CHECK_OK(open_blocks(mapping.unit_file, true, 1 << 20, &fault, &err));
    const uint64_t shares[2] = { file_bytes(on_disk(0, "params")), file_bytes(on_disk(1, "params")) };
    CHECK_EQUAL(shares[0] + shares[1], mapping.bytes + (5 << 20) + PAGE);
    CHECK(shares[0] >= shares[1] && shares[0] - shares[1] <= ZPP_AIO_STRIPE_BYTES);
    unsigned char *values = malloc(8 << 20);
    CHECK(values);
    for (int i = 0; i < LARGE; i++) {
        fill(values, bytes[i], 0, (unsigned)i);
        put(&mapping, mapping.offset[i], values, bytes[i]);
    }
    for (int i = LARGE - 1; i >= 0; i--) {
        load(&mapping, i);
        check_outcome(&mapping, i);
        fill(values, bytes[i], 0, (unsigned)i);
        CHECK_EQUAL(memcmp(mapping.memory + mapping.offset[i], values, bytes[i]), 0);
        leave(&mapping, i);
    }
    free(values);
    end_mapping(&mapping);
    memset(&spread, 0, sizeof spread);
    remove_folder();
}

static void refuses_misuse(void) {
    make_folder();
    reset_plan();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    zpp_unit_file *unit_file = NULL;
    int unit;
    size_t offset;
    CHECK_FAILS(zpp_unit_file_create(NULL, 0.0, &unit_file, &err), ZPP_INVALID, "fraction is 0");
    CHECK_FAILS(zpp_unit_file_create(NULL, 1.5, &unit_file, &err), ZPP_INVALID, "fraction is 1.5");
    CHECK_OK(zpp_unit_file_create(NULL, 1.0, &unit_file, &err));
    CHECK_FAILS(open_file(unit_file, true, &fault, &err), ZPP_STATE, "opened before seal");
    CHECK_OK(zpp_unit_file_seal(unit_file, 0, &err)); /* no units at all */
    CHECK_FAILS(zpp_unit_file_seal(unit_file, 0, &err), ZPP_STATE, "sealed twice");
    zpp_unit_file_destroy(unit_file);
    struct mapping mapping = new_mapping(1.0, 0);
    CHECK_FAILS(zpp_unit_file_add(mapping.unit_file, 1, &unit, &offset, &err), ZPP_STATE, "after seal");
    CHECK_FAILS(open_file(mapping.unit_file, false, &fault, &err), ZPP_STATE, "opened twice");
    unsigned char byte = 0;
    CHECK_FAILS(zpp_unit_file_copy(mapping.unit_file, mapping.bytes, &byte, 1, false, &fault, &err), ZPP_INVALID,
                "are copied");
    load(&mapping, 1);
    leave(&mapping, 1);
    zpp_unit_file_close(mapping.unit_file);
    CHECK_FAILS(zpp_unit_file_copy(mapping.unit_file, 0, &byte, 1, false, &fault, &err), ZPP_STATE,
                "their file is closed");
    load(&mapping, 1);
    CHECK_FAILS(zpp_unit_file_read_status(mapping.unit_file, mapping.unit[1], &fault, &err), ZPP_STATE,
                "their file is closed");
    struct zpp_unit_file_figures figures;
    zpp_unit_file_figures(mapping.unit_file, &figures);
    CHECK_EQUAL(figures.read_bytes, PAGE); /* what was read before the end stays counted */
    end_mapping(&mapping);
    zpp_unit_file_destroy(NULL);
    remove_folder();
}

/* --- ranks that share the mapping --------------------------------------------------------------------------------- */

enum { PASSES = 6 };

struct shared {
    double fraction;
    bool with_failures;
    atomic_uint_least64_t read_bytes;
    atomic_int failures;
};

static void join_ranks(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_barrier(me->comm, &patient, &err));
}

/* Under ThreadSanitizer the ranks share one mapping, and closing addresses of one closes those of all. */
static void meet_under_tsan(struct test_rank *me) {
#ifdef ZPP_UNDER_TSAN
    join_ranks(me);
#else
    (void)me;
#endif
}

static void fill_shard(struct mapping *mapping, struct test_rank *me, int i, unsigned seed) {
    const size_t share = unit_bytes[i] / (size_t)me->ranks, begin = share * (size_t)me->rank;
    const size_t bytes = me->rank == me->ranks - 1 ? unit_bytes[i] - begin : share;
    unsigned char *values = malloc(bytes + 1);
    CHECK(values);
    fill(values, bytes, begin, seed + (unsigned)i);
    put(mapping, mapping->offset[i] + begin, values, bytes);
    free(values);
}

/* Every unit in one order, a few ahead, at this rank's own pace. */
static void pass_over_units(struct mapping *mapping, struct test_rank *me, unsigned seed, uint64_t *random) {
    struct shared *shared = me->arg;
    for (int i = 0; i < UNITS; i++) {
        if (zpp_unit_file_is_held(mapping->unit_file, mapping->unit[i])) continue;
        if (below(random, 3) == 0) {
            const struct timespec late = { .tv_nsec = (long)below(random, 300000) };
            nanosleep(&late, NULL);
        }
        meet_under_tsan(me);
        load(mapping, i);
        struct zpp_err err = ZPP_ERR_INIT;
        struct zpp_aio_fault fault;
        const zpp_status status = zpp_unit_file_read_status(mapping->unit_file, mapping->unit[i], &fault, &err);
        if (status == ZPP_OK) check_filled(mapping->memory + mapping->offset[i], unit_bytes[i], 0, seed + (unsigned)i);
        else CHECK(shared->with_failures && atomic_fetch_add(&shared->failures, 1) >= 0);
        meet_under_tsan(me);
        leave(mapping, i);
    }
}

static void shared_body(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct shared *shared = me->arg;
    uint64_t random = 77u * (unsigned)me->rank + 5;
    struct mapping mapping = sealed_mapping(me->comm, shared->fraction, 0);
    if (me->rank == 0) CHECK_OK(open_file(mapping.unit_file, true, &fault, &err));
    join_ranks(me);
    if (me->rank) CHECK_OK(open_file(mapping.unit_file, false, &fault, &err));
    for (unsigned pass = 0; pass < PASSES; pass++) {
        for (int i = 0; i < UNITS; i++) fill_shard(&mapping, me, i, 10 * pass);
        join_ranks(me); /* as zpp_zero_step_begin and _end do */
        if (me->rank == 0 && shared->with_failures) atomic_store(&plan.reads_left, (int)pass);
        pass_over_units(&mapping, me, 10 * pass, &random);
        join_ranks(me);
        if (me->rank == 0) atomic_store(&plan.reads_left, -1);
        join_ranks(me);
    }
    struct zpp_unit_file_figures figures;
    zpp_unit_file_figures(mapping.unit_file, &figures);
    CHECK_EQUAL(figures.acquired_bytes, 0);
    atomic_fetch_add(&shared->read_bytes, figures.read_bytes);
    join_ranks(me);
    zpp_unit_file_destroy(mapping.unit_file);
}

/* What one rank wrote and a disk changed, another one finds, and names the part. */
static void sums_body(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = { .wanted_bytes = 0 };
    struct mapping mapping = sealed_mapping(me->comm, 1.0, 0);
    if (me->rank == 0) CHECK_OK(open_file(mapping.unit_file, true, &fault, &err));
    join_ranks(me);
    if (me->rank) CHECK_OK(open_file(mapping.unit_file, false, &fault, &err));
    for (int i = 0; i < UNITS; i++) fill_shard(&mapping, me, i, 3);
    join_ranks(me);
    if (me->rank == 1) {
        unsigned char values[40000];
        CHECK_OK(zpp_unit_file_copy(mapping.unit_file, mapping.offset[3], values, sizeof values, false, &fault, &err));
        check_filled(values, sizeof values, 0, 3 + 3);
        /* The unit's third page is the twelfth of the file, and so the sixth of the second disk. */
        const int fd = open(on_disk(1, "params"), O_RDWR);
        unsigned char byte;
        CHECK_EQUAL(mapping.offset[3] / PAGE, 9);
        CHECK_EQUAL(pread(fd, &byte, 1, 5 * PAGE + 17), 1);
        CHECK_EQUAL(byte, values[2 * PAGE + 17]);
        byte ^= 4;
        CHECK_EQUAL(pwrite(fd, &byte, 1, 5 * PAGE + 17), 1);
        close(fd);
        CHECK_FAILS(zpp_unit_file_copy(mapping.unit_file, mapping.offset[3], values, sizeof values, false, &fault,
                                       &err), ZPP_TIER,
                    "/disk1/params\" does not hold what was written");
        CHECK_EQUAL(fault.offset_bytes, 5 * PAGE);
        CHECK(strstr(fault.path, "/disk1/params"));
    }
    join_ranks(me);
    zpp_unit_file_destroy(mapping.unit_file);
}

static void ranks_share_sums_of_parts(void) {
    make_folder();
    reset_plan();
    spread.disks = 2;
    spread.stripe_bytes = PAGE;
    spread.checksums = true;
    run_ranks(2, sums_body, NULL);
    memset(&spread, 0, sizeof spread);
    remove_folder();
}

/* Ranks at different paces, each with its own shards to write: a pass reads every byte at least once, and at most once
 * a rank. A read that fails is heard by the rank that made it, and another rank reads the unit for itself. */
static void ranks_share_what_is_read(void) {
    for (int turn = 0; turn < 6; turn++) {
        const int ranks = 2 + turn % 2;
        struct shared shared = { .fraction = turn % 4 == 1 ? 0.6 : 1.0, .with_failures = turn == 2 || turn == 3 };
        spread.disks = turn >= 4 ? 3 : 0;
        spread.stripe_bytes = 2 * PAGE;
        make_folder();
        reset_plan();
        struct mapping like = sealed_mapping(NULL, shared.fraction, 0);
        struct zpp_unit_file_figures figures;
        zpp_unit_file_figures(like.unit_file, &figures);
        zpp_unit_file_destroy(like.unit_file);
        run_ranks(ranks, shared_body, &shared);
        const uint64_t unit_file = figures.mapping_bytes - figures.resident_bytes;
        const uint64_t seen = atomic_load(&shared.read_bytes);
        /* Writing shards that begin inside a page reads that page. */
        const uint64_t edges = (uint64_t)PASSES * UNITS * (unsigned)ranks * 2 * PAGE;
        CHECK(seen + unit_file >= PASSES * unit_file);
        CHECK(seen <= (uint64_t)PASSES * unit_file * (unsigned)ranks + edges);
        CHECK((atomic_load(&shared.failures) > 0) == shared.with_failures);
        remove_folder();
    }
    memset(&spread, 0, sizeof spread);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(random_schedules),
                                              TEST(every_read_of_a_load_fails_once),
                                              TEST(files_that_shrink_or_vanish),
                                              TEST(every_operation_of_a_copy_fails_once),
                                              TEST(making_the_file),
                                              TEST(making_a_striped_file),
                                              TEST(large_units_lie_together),
                                              TEST(refuses_misuse),
                                              TEST(ranks_share_what_is_read),
                                              TEST(ranks_share_sums_of_parts),
                                              { 0 } };
    return test_main(argc, argv, cases);
}
