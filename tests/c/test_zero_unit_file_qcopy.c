/* SPDX-License-Identifier: Apache-2.0
 *
 * Units kept in 8 and 4 bits, in a file and in memory: what comes back is what quantising says, and exact between; the
 * bytes that are read; which value a byte of the file has; and every read failing once.
 */
#include "../../csrc/ops/quant/quant.h"
#include "../../csrc/zero/offload/unit_file_internal.h"
#include "unit_file_common.h"

enum { UNITS = 3, ELEMS = 9000, BLOCK = 64 };
/* Matrices: one from the start on, two with bytes between and a last block that is short, none. */
static const struct {
    size_t first, elems;
} spans[UNITS][2] = { { { 0, 5000 }, { 0, 0 } }, { { 128, 4097 }, { 4256, 333 } }, { { 0, 0 }, { 0, 0 } } };

struct kept {
    zpp_unit_file *unit_file;
    int unit[UNITS];
    size_t offset[UNITS];
    unsigned char *values[UNITS], *wanted[UNITS]; /* exact; as they come back */
};

static size_t elem_bytes(zpp_dtype dtype) {
    return zpp_dtype_bytes(dtype);
}

static void round_span(struct kept *kept, int i, int span, int bits, zpp_dtype dtype) {
    const struct zpp_quant_spec spec = { BLOCK, bits, false };
    const size_t at = spans[i][span].first * elem_bytes(dtype), elems = spans[i][span].elems;
    if (!elems) return;
    void *codes = malloc(elems + 1);
    float *scales = malloc(zpp_quant_blocks(&spec, elems) * sizeof *scales);
    CHECK(codes && scales);
    const struct zpp_quant_target target = { codes, scales, NULL };
    const struct zpp_quant_source source = { codes, scales, NULL };
    zpp_quantise(&spec, kept->values[i] + at, dtype, elems, &target, NULL);
    zpp_dequantise(&spec, &source, kept->wanted[i] + at, dtype, elems, false, NULL);
    free(codes);
    free(scales);
}

static struct kept new_kept(int bits, zpp_dtype dtype, bool in_memory, double fraction) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct kept kept = { .unit_file = NULL };
    const size_t bytes = ELEMS * elem_bytes(dtype);
    reset_plan();
    CHECK_OK(zpp_unit_file_create(NULL, fraction, &kept.unit_file, &err));
    CHECK(!zpp_unit_file_keeps_qcopies(kept.unit_file));
    CHECK_OK(zpp_unit_file_set_qcopies(kept.unit_file, bits, BLOCK, in_memory, &err));
    for (int i = 0; i < UNITS; i++) {
        CHECK_OK(zpp_unit_file_add(kept.unit_file, bytes, &kept.unit[i], &kept.offset[i], &err));
        for (int span = 0; span < 2; span++)
            if (spans[i][span].elems)
                CHECK_OK(zpp_unit_file_add_span(kept.unit_file, kept.unit[i], spans[i][span].first * elem_bytes(dtype),
                                                spans[i][span].elems, dtype, &err));
    }
    CHECK_OK(zpp_unit_file_seal(kept.unit_file, 0, &err));
    if (!in_memory) CHECK_OK(open_blocks(kept.unit_file, true, 4 * PAGE, &fault, &err));
    for (int i = 0; i < UNITS; i++) {
        float *floats = malloc(ELEMS * sizeof *floats);
        kept.values[i] = malloc(bytes);
        kept.wanted[i] = malloc(bytes);
        CHECK(floats && kept.values[i] && kept.wanted[i]);
        for (size_t e = 0; e < ELEMS; e++) floats[e] = (float)((int)pattern(e, (unsigned)i) - 128) / 100.0f;
        zpp_convert(kept.values[i], dtype, floats, ZPP_F32, ELEMS);
        memcpy(kept.wanted[i], kept.values[i], bytes);
        for (int span = 0; span < 2; span++) round_span(&kept, i, span, bits, dtype);
        const bool held = zpp_unit_file_is_held(kept.unit_file, kept.unit[i]);
        if (!held) CHECK_OK(zpp_unit_file_acquire(kept.unit_file, kept.unit[i], &err));
        memcpy(zpp_unit_file_mapping(kept.unit_file) + kept.offset[i], kept.values[i], bytes);
        CHECK_OK(zpp_unit_file_keep_qcopy(kept.unit_file, kept.unit[i], false, &fault, &err));
        if (!held) CHECK_OK(zpp_unit_file_release(kept.unit_file, kept.unit[i], &err));
        free(floats);
    }
    return kept;
}

static void end_kept(struct kept *kept, bool in_memory) {
    zpp_unit_file_destroy(kept->unit_file);
    for (int i = 0; i < UNITS; i++) {
        free(kept->values[i]);
        free(kept->wanted[i]);
    }
    if (!in_memory) CHECK_EQUAL(unlink(in_folder("params")), 0);
}

static const struct zpp_wait patience = { 0, NULL, NULL };

/* All at once under way, `turns` times. */
static void load_all(struct kept *kept, zpp_dtype dtype, int turns) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (int turn = 0; turn < turns; turn++) {
        for (int i = 0; i < UNITS; i++) {
            CHECK_OK(zpp_unit_file_acquire(kept->unit_file, kept->unit[i], &err));
            zpp_unit_file_read_begin(kept->unit_file, kept->unit[i]);
        }
        for (int i = 0; i < UNITS; i++) {
            CHECK_OK(zpp_unit_file_read_wait(kept->unit_file, kept->unit[i], &patience));
            CHECK_OK(zpp_unit_file_read_status(kept->unit_file, kept->unit[i], NULL, &err));
            const unsigned char *mapping = zpp_unit_file_mapping(kept->unit_file) + kept->offset[i];
            CHECK_EQUAL(memcmp(mapping, kept->wanted[i], ELEMS * elem_bytes(dtype)), 0);
        }
        for (int i = 0; i < UNITS; i++) CHECK_OK(zpp_unit_file_release(kept->unit_file, kept->unit[i], &err));
    }
}

static void come_back_rounded(void) {
    make_folder();
    const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    for (int way = 0; way < 12; way++) {
        const zpp_dtype dtype = kinds[way / 4];
        const int bits = way & 1 ? 4 : 8;
        const bool in_memory = way & 2;
        struct kept kept = new_kept(bits, dtype, in_memory, 1.0);
        CHECK(memcmp(kept.values[1], kept.wanted[1], ELEMS * elem_bytes(dtype)) != 0);
        struct zpp_unit_file_figures before, after;
        zpp_unit_file_figures(kept.unit_file, &before);
        load_all(&kept, dtype, 2);
        zpp_unit_file_figures(kept.unit_file, &after);
        CHECK_EQUAL(after.read_bytes - before.read_bytes, in_memory ? 0 : 2 * after.qcopies_bytes);
        const size_t rounded = 5000 + 4097 + 333, kept_bytes = rounded * (unsigned)bits / 8 + rounded / BLOCK * 4;
        CHECK(after.qcopies_bytes < (3 * ELEMS - rounded) * elem_bytes(dtype) + kept_bytes + 4 * PAGE);
        if (!in_memory) CHECK_EQUAL(file_bytes(in_folder("params")), after.qcopies_bytes);
        end_kept(&kept, in_memory);
    }
    remove_folder();
}

/* On disk a cut at a page of the quantised copies, through that of a unit; in memory whole units that are held as
 * values, rounded as the others are. */
static void a_fraction_is_away(void) {
    make_folder();
    for (int way = 0; way < 4; way++) {
        const bool in_memory = way & 1;
        const double fraction = way & 2 ? 0.5 : 1e-9;
        struct kept kept = new_kept(8, ZPP_F32, in_memory, fraction);
        struct zpp_unit_file_figures before, after;
        zpp_unit_file_figures(kept.unit_file, &before);
        const size_t in_file = before.qcopies_bytes - before.qcopies_held_bytes;
        if (in_memory) {
            const int held = way & 2 ? 1 : UNITS - 1;
            CHECK_EQUAL(in_file, 0);
            CHECK_EQUAL(before.resident_bytes, kept.offset[held]);
            for (int i = 0; i < UNITS; i++) CHECK_EQUAL(zpp_unit_file_is_held(kept.unit_file, kept.unit[i]), i < held);
            for (int i = 0; i < held; i++)
                CHECK_EQUAL(memcmp(zpp_unit_file_mapping(kept.unit_file) + kept.offset[i], kept.wanted[i], ELEMS * 4),
                            0);
            struct zpp_err err = ZPP_ERR_INIT;
            const int last = UNITS - 1;
            CHECK_OK(zpp_unit_file_acquire(kept.unit_file, kept.unit[last], &err));
            zpp_unit_file_read_begin(kept.unit_file, kept.unit[last]);
            CHECK_OK(zpp_unit_file_read_wait(kept.unit_file, kept.unit[last], &patience));
            CHECK_EQUAL(memcmp(zpp_unit_file_mapping(kept.unit_file) + kept.offset[last], kept.wanted[last], ELEMS * 4),
                        0);
            CHECK_OK(zpp_unit_file_release(kept.unit_file, kept.unit[last], &err));
        } else {
            CHECK_EQUAL(before.resident_bytes, 0);
            CHECK_EQUAL(file_bytes(in_folder("params")), in_file);
            CHECK((double)in_file <= fraction * (double)before.qcopies_bytes + PAGE && in_file > 0);
            load_all(&kept, ZPP_F32, 2);
            zpp_unit_file_figures(kept.unit_file, &after);
            CHECK_EQUAL(after.read_bytes - before.read_bytes, 2 * in_file);
        }
        end_kept(&kept, in_memory);
    }
    remove_folder();
}

/* Load a unit, and count the values that are not those wanted; *first is the first of them. */
static size_t changed_values(struct kept *kept, int i, size_t *first) {
    struct zpp_err err = ZPP_ERR_INIT;
    size_t changed = 0;
    CHECK_OK(zpp_unit_file_acquire(kept->unit_file, kept->unit[i], &err));
    zpp_unit_file_read_begin(kept->unit_file, kept->unit[i]);
    CHECK_OK(zpp_unit_file_read_wait(kept->unit_file, kept->unit[i], &patience));
    CHECK_OK(zpp_unit_file_read_status(kept->unit_file, kept->unit[i], NULL, &err));
    const unsigned char *values = zpp_unit_file_mapping(kept->unit_file) + kept->offset[i];
    for (size_t elem = 0; elem < ELEMS; elem++) {
        if (!memcmp(values + elem * sizeof(float), kept->wanted[i] + elem * sizeof(float), sizeof(float))) continue;
        if (!changed++) *first = elem;
    }
    CHECK_OK(zpp_unit_file_release(kept->unit_file, kept->unit[i], &err));
    return changed;
}

static void flip_in_file(size_t at_bytes) {
    const int fd = open(in_folder("params"), O_RDWR);
    unsigned char byte;
    CHECK_EQUAL(pread(fd, &byte, 1, (off_t)at_bytes), 1);
    byte ^= 0x88;
    CHECK_EQUAL(pwrite(fd, &byte, 1, (off_t)at_bytes), 1);
    close(fd);
}

/* One byte of the file is another: the values that change are those that zpp_unit_file_value_at says. A scale changes
 * up to a block of them, a code of 8 bits or a byte of two codes its own. */
static void a_byte_of_the_file_has_a_value(void) {
    make_folder();
    for (int way = 0; way < 4; way++) {
        const int bits = way & 1 ? 4 : 8;
        struct kept kept = new_kept(bits, ZPP_F32, false, way & 2 ? 0.6 : 1.0);
        const size_t resident = kept.unit_file->qcopies_resident_bytes;
        for (int i = 0, seen = 0; i < UNITS; i++, seen = 0) {
            const struct unit_file_unit *unit = &kept.unit_file->units[i];
            const size_t begin = unit->qcopy_offset_bytes, end = begin + unit->qcopy_bytes;
            const size_t moving = begin > resident ? begin : resident;
            for (size_t at = moving; at < end; at += 37) {
                size_t first = 0;
                flip_in_file(at - resident);
                const size_t changed = changed_values(&kept, i, &first);
                flip_in_file(at - resident);
                const size_t value = zpp_unit_file_value_at(kept.unit_file, kept.unit[i], at - moving);
                CHECK(value < unit->bytes);
                if (!changed) continue; /* the byte fills up a part */
                CHECK(changed <= BLOCK && first >= value / sizeof(float));
                CHECK(first - value / sizeof(float) < (changed > 2 ? BLOCK : 2));
                seen++;
            }
            CHECK(moving >= end || seen > 10);
        }
        end_kept(&kept, false);
    }
    remove_folder();
}

static void every_read_fails_once(void) {
    make_folder();
    struct kept kept = new_kept(8, ZPP_BF16, false, 1.0);
    for (int n = 0, failed = 1; failed; n++) {
        struct zpp_err err = ZPP_ERR_INIT;
        struct zpp_aio_fault fault = { .wanted_bytes = 0 };
        CHECK_OK(zpp_unit_file_acquire(kept.unit_file, kept.unit[1], &err));
        atomic_store(&plan.reads_left, n);
        zpp_unit_file_read_begin(kept.unit_file, kept.unit[1]);
        CHECK_OK(zpp_unit_file_read_wait(kept.unit_file, kept.unit[1], &patience));
        atomic_store(&plan.reads_left, -1);
        const zpp_status status = zpp_unit_file_read_status(kept.unit_file, kept.unit[1], &fault, &err);
        failed = status != ZPP_OK;
        CHECK(failed || n > 0);
        if (failed) CHECK(status == ZPP_TIER && strstr(fault.path, "/params") && strstr(err.text, "at offset"));
        CHECK_OK(zpp_unit_file_release(kept.unit_file, kept.unit[1], &err));
        load_all(&kept, ZPP_BF16, 1);
    }
    /* A load under way, which no call has waited for when the file is closed. */
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_unit_file_acquire(kept.unit_file, kept.unit[0], &err));
    zpp_unit_file_read_begin(kept.unit_file, kept.unit[0]);
    zpp_unit_file_close(kept.unit_file);
    end_kept(&kept, false);
    remove_folder();
}

static void refuses_misuse(void) {
    make_folder();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    zpp_unit_file *unit_file = NULL;
    int unit;
    size_t offset;
    CHECK_OK(zpp_unit_file_create(NULL, 1.0, &unit_file, &err));
    CHECK_FAILS(zpp_unit_file_set_qcopies(unit_file, 3, BLOCK, false, &err), ZPP_INVALID, "kept in 3 bits");
    CHECK_OK(zpp_unit_file_set_qcopies(unit_file, 8, BLOCK, true, &err));
    CHECK_OK(zpp_unit_file_add(unit_file, 4 * 1000, &unit, &offset, &err));
    CHECK_OK(zpp_unit_file_add_span(unit_file, unit, 0, 500, ZPP_F32, &err));
    CHECK_FAILS(zpp_unit_file_add_span(unit_file, unit, 1996, 10, ZPP_F32, &err), ZPP_INVALID, "cannot be kept");
    CHECK_FAILS(zpp_unit_file_add_span(unit_file, unit, 2000, 5000, ZPP_F32, &err), ZPP_INVALID, "cannot be kept");
    CHECK_FAILS(zpp_unit_file_set_qcopies(unit_file, 8, BLOCK, true, &err), ZPP_STATE, "before units are added");
    CHECK_OK(zpp_unit_file_seal(unit_file, 0, &err));
    float value = 0.0f;
    CHECK_FAILS(zpp_unit_file_copy(unit_file, 0, &value, 4, true, &fault, &err), ZPP_STATE,
                "cannot be written in parts");
    CHECK_FAILS(zpp_unit_file_copy(unit_file, 0, &value, 4, false, &fault, &err), ZPP_STATE, "cannot be read in parts");
    zpp_unit_file_destroy(unit_file);
    remove_folder();
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(come_back_rounded), TEST(a_fraction_is_away),
                                              TEST(a_byte_of_the_file_has_a_value), TEST(every_read_fails_once),
                                              TEST(refuses_misuse), { 0 } };
    return test_main(argc, argv, cases);
}
