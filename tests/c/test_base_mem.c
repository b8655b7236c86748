/* SPDX-License-Identifier: Apache-2.0
 *
 * Buffers, and the reserved range: random maps and unmaps against a model, with page moves and without; closed pages
 * fault; nobody else's mmap lands in a hole.
 */
#include "harness.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "../../csrc/base/range.h"

static void buffers_are_aligned_and_zero(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    static const size_t sizes[] = {0, 1, 63, 4096, 1 << 20, (1 << 20) + 5, (4 << 20) + 1, 9 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
        for (size_t align_bytes = 1; align_bytes <= 8 << 20; align_bytes *= 8) {
            unsigned char *memory = NULL;
            CHECK_OK(zpp_mem_alloc(sizes[i], align_bytes, (void **)&memory, &err));
            CHECK_EQUAL((uintptr_t)memory % align_bytes, 0);
            for (size_t byte = 0; byte < sizes[i]; byte += 511) CHECK_EQUAL(memory[byte], 0);
            if (sizes[i]) memory[0] = memory[sizes[i] - 1] = 7;
            zpp_mem_free(memory, sizes[i]);
        }
    }
    void *none = NULL;
    CHECK_FAILS(zpp_mem_alloc(64, 48, &none, &err), ZPP_INVALID, "align_bytes is 48, wanted a power of two");
    CHECK_FAILS(zpp_mem_alloc(SIZE_MAX, 64, &none, &err), ZPP_NOMEM, "no room for 18446744073709551615 bytes");
    CHECK_FAILS(zpp_mem_alloc(SIZE_MAX / 2, 64, &none, &err), ZPP_NOMEM, "no room for");
    zpp_mem_free(NULL, 5);
}

/* --- does a read fault? ------------------------------------------------------------------------------------------- */
static sigjmp_buf jump;
static void on_fault(int signal) { siglongjmp(jump, signal); }

static bool faults(volatile const char *address) {
    struct sigaction mine = {.sa_handler = on_fault}, old_segv, old_bus;
    sigaction(SIGSEGV, &mine, &old_segv);
    sigaction(SIGBUS, &mine, &old_bus);
    const bool faulted = sigsetjmp(jump, 1) != 0;
    if (!faulted) (void)*address;
    sigaction(SIGSEGV, &old_segv, NULL);
    sigaction(SIGBUS, &old_bus, NULL);
    return faulted;
}

#define PAGE zpp_page_bytes()
enum { PAGES = 96 };

static uint64_t random_state = 1;
static size_t draw(size_t below) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (size_t)(random_state >> 33) % below;
}

static void check_pages(char *base, const bool *mapped, const unsigned char *written) {
    for (size_t page = 0; page < PAGES; ++page) {
        if (mapped[page]) CHECK_EQUAL((unsigned char)base[page * PAGE + page], written[page]);
    }
    const size_t probe = draw(PAGES);
    CHECK_EQUAL(faults(base + probe * PAGE), !mapped[probe]);
}

static bool all_are(const bool *mapped, size_t begin, size_t end, bool wanted) {
    for (size_t page = begin; page < end; ++page) {
        if (mapped[page] != wanted) return false;
    }
    return true;
}

static void follow_a_model(bool moves, size_t warm_pages, unsigned seed) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_range *range;
    bool mapped[PAGES] = {0};
    unsigned char written[PAGES] = {0};
    random_state = seed;
    CHECK_OK(zpp_range_create(PAGES * PAGE, &range, &err));
    if (!moves) zpp_range_forbid_moves(range);
    zpp_range_set_warm(range, warm_pages * PAGE);
    char *base = zpp_range_base(range);
    size_t held_pages = 0;
    for (int step = 0; step < 1500; ++step) {
        const size_t begin = draw(PAGES), end = begin + 1 + draw(PAGES - begin < 12 ? PAGES - begin : 12);
        const bool map = draw(2);
        const size_t offset = begin * PAGE, bytes = (end - begin) * PAGE;
        const zpp_status status =
            map ? zpp_range_map(range, offset, bytes, &err) : zpp_range_unmap(range, offset, bytes, &err);
        CHECK_EQUAL(status, all_are(mapped, begin, end, !map) ? ZPP_OK : ZPP_STATE);
        if (status == ZPP_OK) {
            for (size_t page = begin; page < end; ++page) {
                mapped[page] = map;
                written[page] = (unsigned char)draw(256);
                if (map) memset(base + page * PAGE, written[page], PAGE);
            }
            held_pages += map ? end - begin : 0;
            held_pages -= map ? 0 : end - begin;
        }
        if (step % 50 == 7) zpp_range_set_warm(range, draw(warm_pages + 1) * PAGE);
        if (step % 50 == 9) zpp_range_set_warm(range, warm_pages * PAGE);
        CHECK(zpp_range_held_bytes(range) >= held_pages * PAGE);
        CHECK(zpp_range_held_bytes(range) <= (held_pages + (moves ? warm_pages : 0)) * PAGE);
        check_pages(base, mapped, written);
    }
    zpp_range_destroy(range);
}

static void random_maps_with_page_moves(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_range *range;
    CHECK_OK(zpp_range_create(PAGE, &range, &err));
    const bool moves = zpp_range_moves(range);
    zpp_range_destroy(range);
    if (!moves) {
        printf("skipped, this kernel cannot move pages and keep the hole: ");
        return;
    }
    for (unsigned seed = 1; seed < 6; ++seed) follow_a_model(true, seed * 8, seed);
}

static void random_maps_without_page_moves(void) {
    for (unsigned seed = 1; seed < 4; ++seed) follow_a_model(false, 16, seed);
}

static void warm_pages_come_back(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_range *range;
    CHECK_OK(zpp_range_create(64 * PAGE, &range, &err));
    char *base = zpp_range_base(range);
    CHECK_OK(zpp_range_map(range, 0, 8 * PAGE, &err));
    memset(base, 42, 8 * PAGE);
    CHECK_OK(zpp_range_unmap(range, 0, 8 * PAGE, &err));
    if (zpp_range_moves(range)) {
        CHECK_EQUAL(zpp_range_held_bytes(range), 8 * PAGE);
        CHECK_OK(zpp_range_map(range, 16 * PAGE, 12 * PAGE, &err)); /* 8 warm pages, 4 fresh ones */
        CHECK_EQUAL(base[16 * PAGE], 42); /* the very pages: undefined by contract, 42 in fact */
        CHECK_EQUAL(base[27 * PAGE], 0);
        CHECK_EQUAL(zpp_range_held_bytes(range), 12 * PAGE);
        CHECK_OK(zpp_range_unmap(range, 16 * PAGE, 12 * PAGE, &err));
    }
    zpp_range_set_warm(range, 0);
    CHECK_EQUAL(zpp_range_held_bytes(range), 0);
    zpp_range_destroy(range);
    zpp_range_destroy(NULL);
}

#define HUGE_PAGES (2 * MIB / PAGE)
enum { MIB = 1 << 20 };

static uint16_t *page_at(char *base, size_t page) { return (uint16_t *)(void *)(base + page * PAGE); }

/* A warm page lands where it lay in 2 MiB, so that those pages stay whole; a piece of the same length comes first. */
static void large_pieces_stay_whole(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_range *range;
    CHECK_EQUAL(zpp_range_place(5 * PAGE, PAGE), 5 * PAGE);
    CHECK_EQUAL(zpp_range_place(5 * PAGE, 4 * MIB), 2 * MIB);
    CHECK_OK(zpp_range_create(64 * MIB, &range, &err));
    char *base = zpp_range_base(range);
    CHECK_EQUAL((uintptr_t)base % (2 * MIB), 0);
    const size_t pieces[2][2] = { { 0, 10 * MIB + 3 * PAGE }, { 12 * MIB, 4 * MIB } };
    for (int i = 0; i < 2; i++) {
        CHECK_OK(zpp_range_map(range, pieces[i][0], pieces[i][1], &err));
        for (size_t page = pieces[i][0] / PAGE; page < (pieces[i][0] + pieces[i][1]) / PAGE; page++)
            *page_at(base, page) = (uint16_t)(page % HUGE_PAGES + 1);
    }
    for (int i = 0; i < 2; i++) CHECK_OK(zpp_range_unmap(range, pieces[i][0], pieces[i][1], &err));
    if (zpp_range_moves(range)) {
        CHECK_OK(zpp_range_map(range, 32 * MIB, pieces[0][1], &err));
        CHECK_OK(zpp_range_map(range, 48 * MIB, 6 * MIB, &err)); /* the other piece, then 2 MiB of fresh pages */
        for (size_t i = 0; i < pieces[0][1] / PAGE; i++)
            CHECK_EQUAL(*page_at(base, 32 * MIB / PAGE + i), i % HUGE_PAGES + 1);
        for (size_t i = 0; i < 6 * MIB / PAGE; i++)
            CHECK_EQUAL(*page_at(base, 48 * MIB / PAGE + i), i < 4 * MIB / PAGE ? i % HUGE_PAGES + 1 : 0);
        CHECK_EQUAL(zpp_range_held_bytes(range), pieces[0][1] + 6 * MIB);
    }
    zpp_range_destroy(range);
}

static void refuses_what_cannot_be(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_range *range = NULL;
    CHECK_FAILS(zpp_range_create(0, &range, &err), ZPP_INVALID, "bytes is 0");
    CHECK_OK(zpp_range_create(3 * PAGE - 5, &range, &err)); /* rounded up */
    char sentence[100], ends[100];
    snprintf(sentence, sizeof sentence, "offset 5 and %zu bytes, wanted multiples of %zu", PAGE, PAGE);
    snprintf(ends, sizeof ends, "end after its %zu bytes", 3 * PAGE);
    CHECK_OK(zpp_range_map(range, 0, 3 * PAGE, &err));
    CHECK_FAILS(zpp_range_map(range, PAGE, PAGE, &err), ZPP_STATE, "mapped already");
    CHECK_FAILS(zpp_range_map(range, 5, PAGE, &err), ZPP_INVALID, sentence);
    CHECK_FAILS(zpp_range_map(range, PAGE, 3 * PAGE, &err), ZPP_INVALID, ends);
    CHECK_OK(zpp_range_unmap(range, PAGE, PAGE, &err));
    CHECK_FAILS(zpp_range_unmap(range, 0, 3 * PAGE, &err), ZPP_STATE, "not mapped");
    zpp_range_destroy(range);
}

/* --- no hole is ever free ----------------------------------------------------------------------------------------- */
struct stranger {
    _Atomic bool stop;
    char *begin, *end;
    _Atomic int intruded;
};

static void *map_and_unmap(void *arg) {
    struct stranger *stranger = arg;
    while (!atomic_load(&stranger->stop)) {
        char *mine = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mine == MAP_FAILED) continue;
        if (mine < stranger->end && mine + 4 * PAGE > stranger->begin) atomic_fetch_add(&stranger->intruded, 1);
        else munmap(mine, 4 * PAGE);
    }
    return NULL;
}

static void no_stranger_gets_in(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_range *range;
    CHECK_OK(zpp_range_create(64 * PAGE, &range, &err));
    struct stranger stranger = {.begin = zpp_range_base(range)};
    stranger.end = stranger.begin + 64 * PAGE;
    pthread_t thread;
    pthread_create(&thread, NULL, map_and_unmap, &stranger);
    for (int step = 0; step < 4000; ++step) {
        const size_t offset = (size_t)(step % 8) * 8 * PAGE;
        CHECK_OK(zpp_range_map(range, offset, 8 * PAGE, &err));
        stranger.begin[offset] = 1;
        CHECK_OK(zpp_range_unmap(range, offset, 8 * PAGE, &err));
    }
    atomic_store(&stranger.stop, true);
    pthread_join(thread, NULL);
    CHECK_EQUAL(stranger.intruded, 0);
    zpp_range_destroy(range);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(buffers_are_aligned_and_zero),
        TEST(random_maps_with_page_moves),
        TEST(random_maps_without_page_moves),
        TEST(warm_pages_come_back),
        TEST(large_pieces_stay_whole),
        TEST(refuses_what_cannot_be),
        TEST(no_stranger_gets_in),
        {0},
    };
    return test_main(argc, argv, cases);
}
