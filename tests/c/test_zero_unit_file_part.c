/* SPDX-License-Identifier: Apache-2.0
 *
 * Parts of units: what comes is what the whole unit has, exact and in fewer bits, in the file and in memory; units that
 * are held beside those in the file; the bytes that are read; every read failing once; and misuse.
 */
#include "../../csrc/ops/quant/quant.h"
#include "unit_file_common.h"

enum { UNITS = 4, ELEMS = 9000, BLOCK = 64, SPAN = 128 * BLOCK, SHORT = 100 };

static const struct zpp_wait patience = { 0, NULL, NULL };

struct kept {
    zpp_unit_file *unit_file;
    int unit[UNITS];
    size_t offset[UNITS];
    float values[UNITS][ELEMS], wanted[UNITS][ELEMS]; /* as they were put, and as they come back */
};

/* A matrix from the start on, and one with a last block that is short; the rest stays exact. */
static const struct {
    size_t first, elems;
} spans[2] = { { 0, SPAN }, { SPAN + 64, SHORT } };

static void round_unit(struct kept *kept, int i, int bits) {
    const struct zpp_quant_spec spec = { BLOCK, bits, false };
    static unsigned char codes[SPAN];
    static float scales[SPAN / BLOCK];
    for (int span = 0; span < 2; span++) {
        const struct zpp_quant_target target = { codes, scales, NULL };
        const struct zpp_quant_source source = { codes, scales, NULL };
        zpp_quantise(&spec, kept->values[i] + spans[span].first, ZPP_F32, spans[span].elems, &target, NULL);
        zpp_dequantise(&spec, &source, kept->wanted[i] + spans[span].first, ZPP_F32, spans[span].elems, false, NULL);
    }
}

static void fill_unit(struct kept *kept, int i, int bits) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    const size_t bytes = ELEMS * sizeof(float);
    for (size_t e = 0; e < ELEMS; e++) kept->values[i][e] = (float)((int)pattern(e, (unsigned)i) - 128) / 100.0f;
    memcpy(kept->wanted[i], kept->values[i], bytes);
    if (!bits) {
        CHECK_OK(zpp_unit_file_copy(kept->unit_file, kept->offset[i], kept->values[i], bytes, true, &fault, &err));
        return;
    }
    round_unit(kept, i, bits);
    const bool held = zpp_unit_file_is_held(kept->unit_file, kept->unit[i]);
    if (!held) CHECK_OK(zpp_unit_file_acquire(kept->unit_file, kept->unit[i], &err));
    memcpy(zpp_unit_file_mapping(kept->unit_file) + kept->offset[i], kept->values[i], bytes);
    CHECK_OK(zpp_unit_file_keep_qcopy(kept->unit_file, kept->unit[i], false, &fault, &err));
    if (!held) CHECK_OK(zpp_unit_file_release(kept->unit_file, kept->unit[i], &err));
}

struct setup {
    int bits; /* 0: exact */
    bool in_memory;
    double fraction;
    int held; /* of the units, the first ones */
};

static struct kept *new_kept(const struct setup *setup) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct kept *kept = calloc(1, sizeof *kept);
    CHECK(kept);
    reset_plan();
    CHECK_OK(zpp_unit_file_create(NULL, setup->fraction, &kept->unit_file, &err));
    if (setup->bits)
        CHECK_OK(zpp_unit_file_set_qcopies(kept->unit_file, setup->bits, BLOCK, setup->in_memory, &err));
    for (int i = 0; i < UNITS; i++) {
        if (setup->held && i == setup->held) CHECK_OK(zpp_unit_file_hold(kept->unit_file, &err));
        CHECK_OK(zpp_unit_file_add(kept->unit_file, ELEMS * sizeof(float), &kept->unit[i], &kept->offset[i], &err));
        for (int span = 0; setup->bits && span < 2; span++)
            CHECK_OK(zpp_unit_file_add_span(kept->unit_file, kept->unit[i], spans[span].first * sizeof(float),
                                            spans[span].elems, ZPP_F32, &err));
    }
    CHECK_OK(zpp_unit_file_seal(kept->unit_file, 0, &err));
    if (!setup->in_memory) CHECK_OK(open_blocks(kept->unit_file, true, 4 * PAGE, &fault, &err));
    for (int i = 0; i < UNITS; i++) fill_unit(kept, i, setup->bits);
    return kept;
}

static void end_kept(struct kept *kept, const struct setup *setup) {
    zpp_unit_file_destroy(kept->unit_file);
    free(kept);
    if (!setup->in_memory) CHECK_EQUAL(unlink(in_folder("params")), 0);
}

static zpp_status begin_part(struct kept *kept, int i, size_t first, size_t elems, float *memory,
                             zpp_unit_file_part **part, struct zpp_aio_fault *fault, struct zpp_err *err) {
    return zpp_unit_file_part_begin(kept->unit_file, kept->unit[i], first * sizeof *memory, memory,
                                    elems * sizeof *memory, part, fault, err);
}

/* Whole blocks in the middle of a matrix, one with its short last block, elements that are exact, and none. */
static const struct {
    size_t first, elems;
} parts[] = { { 3 * BLOCK, 40 * BLOCK }, { SPAN + 64, SHORT }, { SPAN, 64 }, { SPAN + 64 + SHORT, 500 }, { 0, 0 } };
enum { PARTS = sizeof parts / sizeof *parts };

/* All parts of all units at once under way. */
static void read_parts(struct kept *kept) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    zpp_unit_file_part *under_way[UNITS][PARTS];
    static float memory[UNITS][PARTS][40 * BLOCK];
    for (int i = 0; i < UNITS; i++)
        for (int p = 0; p < PARTS; p++)
            CHECK_OK(begin_part(kept, i, parts[p].first, parts[p].elems, memory[i][p], &under_way[i][p], &fault, &err));
    for (int i = 0; i < UNITS; i++)
        for (int p = 0; p < PARTS; p++) {
            CHECK_OK(zpp_unit_file_part_end(under_way[i][p], &fault, &err));
            CHECK_EQUAL(memcmp(memory[i][p], kept->wanted[i] + parts[p].first, parts[p].elems * sizeof(float)), 0);
        }
}

static const struct setup setups[] = {
    { .fraction = 1.0 }, { .fraction = 0.4 }, { .fraction = 1.0, .held = 2 }, { .fraction = 0.5, .held = 1 },
    { .bits = 8, .fraction = 1.0 }, { .bits = 4, .fraction = 1.0 }, { .bits = 8, .fraction = 0.4 },
    { .bits = 8, .fraction = 1.0, .in_memory = true }, { .bits = 4, .fraction = 0.5, .in_memory = true },
};
enum { SETUPS = sizeof setups / sizeof *setups };

static void parts_are_those_of_the_unit(void) {
    make_folder();
    for (int s = 0; s < SETUPS; s++) {
        struct kept *kept = new_kept(&setups[s]);
        read_parts(kept);
        /* Also while the whole unit is there. */
        struct zpp_err err = ZPP_ERR_INIT;
        const int last = UNITS - 1;
        CHECK_OK(zpp_unit_file_acquire(kept->unit_file, kept->unit[last], &err));
        zpp_unit_file_read_begin(kept->unit_file, kept->unit[last]);
        read_parts(kept);
        CHECK_OK(zpp_unit_file_read_wait(kept->unit_file, kept->unit[last], &patience));
        CHECK_EQUAL(memcmp(zpp_unit_file_mapping(kept->unit_file) + kept->offset[last], kept->wanted[last],
                           ELEMS * sizeof(float)), 0);
        CHECK_OK(zpp_unit_file_release(kept->unit_file, kept->unit[last], &err));
        end_kept(kept, &setups[s]);
    }
    remove_folder();
}

/* The fraction is of the units that are not held, all of which are in memory; the file has no bytes of them. */
static void held_units_are_in_memory(void) {
    make_folder();
    const struct setup setup = { .fraction = 0.5, .held = 2 };
    struct kept *kept = new_kept(&setup);
    struct zpp_unit_file_figures seen;
    zpp_unit_file_figures(kept->unit_file, &seen);
    const size_t moving = seen.mapping_bytes - kept->offset[2];
    CHECK_EQUAL(seen.resident_bytes, kept->offset[2] + moving / 2 / PAGE * PAGE);
    CHECK_EQUAL(file_bytes(in_folder("params")), seen.mapping_bytes - seen.resident_bytes);
    for (int i = 0; i < UNITS; i++) CHECK_EQUAL(zpp_unit_file_is_held(kept->unit_file, kept->unit[i]), i < 3);
    CHECK_EQUAL(memcmp(zpp_unit_file_mapping(kept->unit_file) + kept->offset[1], kept->values[1],
                       ELEMS * sizeof(float)), 0);
    end_kept(kept, &setup);
    remove_folder();
}

/* Of a matrix the pages around the scales and codes of its blocks, and no more. */
static void bytes_are_counted(void) {
    make_folder();
    for (int bits = 0; bits <= 8; bits += 4) {
        const struct setup setup = { .bits = bits, .fraction = 1.0 };
        struct kept *kept = new_kept(&setup);
        struct zpp_unit_file_figures before, after;
        struct zpp_err err = ZPP_ERR_INIT;
        struct zpp_aio_fault fault;
        static float memory[64 * BLOCK];
        zpp_unit_file_part *part = NULL;
        zpp_unit_file_figures(kept->unit_file, &before);
        CHECK_OK(begin_part(kept, 1, 0, 64 * BLOCK, memory, &part, &fault, &err));
        CHECK_OK(zpp_unit_file_part_end(part, &fault, &err));
        zpp_unit_file_figures(kept->unit_file, &after);
        const size_t elem_bits = bits ? (size_t)bits : 32, scales_bytes = bits ? 64 * sizeof(float) : 0;
        const size_t read_bytes = (size_t)(after.read_bytes - before.read_bytes);
        CHECK(read_bytes >= 64 * BLOCK * elem_bits / 8 + scales_bytes);
        CHECK(read_bytes <= 64 * BLOCK * elem_bits / 8 + scales_bytes + 4 * PAGE);
        end_kept(kept, &setup);
    }
    remove_folder();
}

static void every_read_fails_once(void) {
    make_folder();
    for (int bits = 0; bits <= 8; bits += 8) {
        const struct setup setup = { .bits = bits, .fraction = 1.0 };
        struct kept *kept = new_kept(&setup);
        for (int n = 0, failed = 1; failed; n++) {
            struct zpp_err err = ZPP_ERR_INIT;
            struct zpp_aio_fault fault = { .wanted_bytes = 0 };
            static float memory[40 * BLOCK];
            zpp_unit_file_part *part = NULL;
            atomic_store(&plan.reads_left, n);
            zpp_status status = begin_part(kept, 0, 3 * BLOCK, 40 * BLOCK, memory, &part, &fault, &err);
            if (status == ZPP_OK) status = zpp_unit_file_part_end(part, &fault, &err);
            atomic_store(&plan.reads_left, -1);
            failed = status != ZPP_OK;
            CHECK(failed || n > 0);
            if (failed) CHECK(status == ZPP_TIER && strstr(fault.path, "/params") && strstr(err.text, "at offset"));
            read_parts(kept);
        }
        end_kept(kept, &setup);
    }
    remove_folder();
}

static void refuses_misuse(void) {
    make_folder();
    const struct setup setup = { .bits = 8, .fraction = 1.0 };
    struct kept *kept = new_kept(&setup);
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    static float memory[ELEMS];
    zpp_unit_file_part *part = NULL;
    CHECK_FAILS(begin_part(kept, 0, 1, BLOCK, memory, &part, &fault, &err), ZPP_INVALID, "are no whole blocks of 64");
    CHECK_FAILS(begin_part(kept, 0, 0, BLOCK + 1, memory, &part, &fault, &err), ZPP_INVALID,
                "are no whole blocks of 64");
    CHECK_FAILS(begin_part(kept, 0, BLOCK, SPAN, memory, &part, &fault, &err), ZPP_INVALID, "of a matrix of");
    CHECK_FAILS(begin_part(kept, 0, 9 * PAGE, ELEMS, memory, &part, &fault, &err), ZPP_INVALID, "of a unit of");
    CHECK_OK(zpp_unit_file_part_end(NULL, &fault, &err));
    CHECK_FAILS(zpp_unit_file_hold(kept->unit_file, &err), ZPP_STATE, "are to stay in memory after seal");
    zpp_unit_file_close(kept->unit_file);
    zpp_status status = begin_part(kept, 0, 0, BLOCK, memory, &part, &fault, &err);
    CHECK(status != ZPP_OK);
    end_kept(kept, &setup);
    remove_folder();
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(parts_are_those_of_the_unit), TEST(held_units_are_in_memory),
                                              TEST(bytes_are_counted), TEST(every_read_fails_once),
                                              TEST(refuses_misuse), { 0 } };
    return test_main(argc, argv, cases);
}
