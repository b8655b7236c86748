/* SPDX-License-Identifier: Apache-2.0
 *
 * Stray reads of a reserved range return NaN and are recorded; every other fault reaches the handler that was installed
 * before. Cases that end the process or replace handlers run in a child.
 */
#include "harness.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../csrc/base/range.h"
#include "../../csrc/base/stray.h"

#define PAGE zpp_page_bytes()
enum { MIB = 1 << 20 };

static zpp_range *make_range(size_t bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_range *range = NULL;
    CHECK_OK(zpp_range_create(bytes, &range, &err));
    return range;
}

static void map(zpp_range *range, size_t offset_bytes, size_t bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_range_map(range, offset_bytes, bytes, &err));
}

static void unmap(zpp_range *range, size_t offset_bytes, size_t bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_range_unmap(range, offset_bytes, bytes, &err));
}

/* The number of recorded addresses, and the first one. */
static size_t take(uintptr_t *first) {
    uintptr_t addresses[ZPP_STRAY_ADDRESSES] = { 0 };
    const size_t count = zpp_stray_take(addresses);
    *first = addresses[0];
    return count;
}

static bool is_nan_everywhere(const volatile unsigned char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != 0xff) return false;
    return true;
}

static void reads_are_nan_and_noted(void) {
    zpp_range *range = make_range(64 * PAGE);
    unsigned char *base = zpp_range_base(range);
    uintptr_t first;
    map(range, 0, 32 * PAGE);
    memset(base, 1, 32 * PAGE);
    unmap(range, 8 * PAGE, 8 * PAGE);
    CHECK(!zpp_stray_is_seen());
    const size_t held_bytes = zpp_range_held_bytes(range);
    CHECK(is_nan_everywhere(base + 8 * PAGE, 8 * PAGE));
    CHECK_EQUAL(base[8 * PAGE - 1], 1); /* neighbours that have memory are as they were */
    CHECK_EQUAL(base[16 * PAGE], 1);
    CHECK_EQUAL(zpp_range_held_bytes(range), held_bytes);
    CHECK(zpp_stray_is_seen());
    CHECK_EQUAL(take(&first), 1);
    CHECK_EQUAL(first, (uintptr_t)base + 8 * PAGE);
    CHECK(!zpp_stray_is_seen());
    CHECK(is_nan_everywhere(base + 9 * PAGE + 5, 100)); /* and once more */
    CHECK_EQUAL(take(&first), 1);
    CHECK_EQUAL(first, (uintptr_t)base + 9 * PAGE + 5);
    zpp_range_destroy(range);
}

/* A hole that was read and written is mapped, with warm pages or fresh ones: no page of NaN is left in it. */
static void mapping_takes_their_place(bool moves) {
    zpp_range *range = make_range(8 * MIB);
    unsigned char *base = zpp_range_base(range);
    uintptr_t first;
    if (!moves) zpp_range_forbid_moves(range);
    for (int round = 0; round < 3; round++) {
        base[3 * PAGE] = 5;
        base[4 * MIB + 7] = 5;
        CHECK_EQUAL(base[3 * PAGE], 5);
        map(range, PAGE, 6 * MIB); /* a part of the first pages of NaN stays */
        memset(base + PAGE, round + 1, 6 * MIB);
        CHECK_EQUAL(base[0], 0xff);
        unmap(range, PAGE, 3 * MIB);
        CHECK(is_nan_everywhere(base + 2 * PAGE, 2 * MIB));
        CHECK_EQUAL(base[PAGE + 3 * MIB], round + 1);
        map(range, PAGE, 3 * MIB);
        memset(base + PAGE, 9, 3 * MIB);
        CHECK_EQUAL(base[PAGE + 3 * MIB], round + 1);
        if (round == 1) CHECK(take(&first) >= 2);
        CHECK_EQUAL(base[PAGE], 9);
        CHECK_EQUAL(base[PAGE + 6 * MIB - 1], round + 1);
        unmap(range, PAGE, 6 * MIB);
    }
    (void)take(&first);
    zpp_range_destroy(range);
}

static void warm_pages_take_their_place(void) { mapping_takes_their_place(true); }
static void fresh_pages_take_their_place(void) { mapping_takes_their_place(false); }

static void a_destroyed_range_is_forgotten(void) {
    zpp_range *gone = make_range(PAGE), *other = make_range(PAGE);
    uintptr_t first;
    CHECK(is_nan_everywhere(zpp_range_base(gone), PAGE));
    zpp_range_destroy(gone);
    CHECK(zpp_stray_is_seen()); /* but no address is left */
    CHECK_EQUAL(take(&first), 0);
    gone = make_range(PAGE); /* the same record is used again */
    CHECK(is_nan_everywhere(zpp_range_base(gone), PAGE));
    CHECK(is_nan_everywhere(zpp_range_base(other), PAGE));
    CHECK_EQUAL(take(&first), 2);
    zpp_range_destroy(gone);
    zpp_range_destroy(other);
}

static void many_reads(void) {
    enum { PIECES = ZPP_STRAY_ADDRESSES + 8 };
    zpp_range *range = make_range((size_t)PIECES * MIB);
    unsigned char *base = zpp_range_base(range);
    uintptr_t first;
    for (size_t i = 0; i < PIECES; i++) CHECK_EQUAL(base[i * MIB + i], 0xff);
    CHECK_EQUAL(take(&first), ZPP_STRAY_ADDRESSES);
    CHECK_EQUAL(first, (uintptr_t)base);
    zpp_range_destroy(range);
}

/* The kernel raises no signal where it reads for a system call: the call fails. */
static void system_calls_fail(void) {
    zpp_range *range = make_range(PAGE);
    int ends[2];
    CHECK_EQUAL(pipe(ends), 0);
    CHECK_EQUAL(write(ends[1], zpp_range_base(range), 16), -1);
    CHECK_EQUAL(errno, EFAULT);
    CHECK(!zpp_stray_is_seen());
    close(ends[0]);
    close(ends[1]);
    zpp_range_destroy(range);
}

/* --- threads ------------------------------------------------------------------------------------------------------ */
struct readers {
    unsigned char *base;
    _Atomic bool stop;
    _Atomic int wrong;
};

enum { CHURN_PAGES = 64, READ_PAGES = 2 * CHURN_PAGES };

/* The second half is never mapped: every byte is 0xff, and a zero would be a page half filled. In the first half a read
 * during a release may find zeros too: mremap leaves an empty mapping there for a moment. ThreadSanitizer takes a mmap
 * for a write and the read for a race, which is the subject here. */
__attribute__((no_sanitize("thread"))) static void *read_all(void *arg) {
    struct readers *readers = arg;
    while (!atomic_load(&readers->stop))
        for (int page = 0; page < READ_PAGES; page++) {
            const unsigned char byte = ((volatile unsigned char *)readers->base)[page * PAGE + 9];
            const bool owned = page < CHURN_PAGES && (byte == 7 || byte == 0);
            if (byte != 0xff && !owned) atomic_fetch_add(&readers->wrong, 1);
        }
    return NULL;
}

static void *take_often(void *arg) {
    struct readers *readers = arg;
    uintptr_t first;
    while (!atomic_load(&readers->stop)) {
        (void)take(&first);
        usleep(100);
    }
    return NULL;
}

/* Maps show pages with their old contents, which were 7 once; fresh ones would be zeros until they are written. */
static void reads_beside_maps(void) {
    zpp_range *range = make_range(READ_PAGES * PAGE);
    if (!zpp_range_moves(range)) {
        printf("skipped, this kernel cannot move pages and keep the hole: ");
        zpp_range_destroy(range);
        return;
    }
    struct readers readers = { .base = zpp_range_base(range) };
    map(range, 0, CHURN_PAGES * PAGE);
    memset(readers.base, 7, CHURN_PAGES * PAGE);
    unmap(range, 0, CHURN_PAGES * PAGE);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, i < 3 ? read_all : take_often, &readers);
    for (int step = 0; step < 1500; step++) {
        const size_t offset = (size_t)(step % 8) * 8 * PAGE;
        map(range, offset, 8 * PAGE);
        for (int page = 0; page < 8; page++)
            CHECK_EQUAL(readers.base[offset + (size_t)page * PAGE + 9], 7);
        unmap(range, offset, 8 * PAGE);
    }
    atomic_store(&readers.stop, true);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    CHECK_EQUAL(readers.wrong, 0);
    uintptr_t first;
    (void)take(&first);
    zpp_range_destroy(range);
}

/* --- other handlers, each in a child ------------------------------------------------------------------------------ */
static int run_child(void (*body)(void)) {
    const pid_t child = fork();
    if (child == 0) {
        const struct rlimit none = { 0, 0 };
        setrlimit(RLIMIT_CORE, &none);
        alarm(30); /* a fault that runs for ever */
        body();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status;
}

static volatile sig_atomic_t passed;
static sigjmp_buf jump;
static zpp_range *watched;

static void note_and_jump(int signal) {
    passed = signal;
    siglongjmp(jump, 1);
}

/* As faulthandler does: install the handler that it replaced, and raise the signal again. */
static struct sigaction replaced;
static void give_way(int signal, siginfo_t *info, void *context) {
    (void)info, (void)context;
    passed++;
    sigaction(signal, &replaced, NULL);
    raise(signal);
}

static void set_default(void) {
    const struct sigaction fallback = { .sa_handler = SIG_DFL };
    sigaction(SIGSEGV, &fallback, NULL);
    sigaction(SIGBUS, &fallback, NULL);
}

/* Of memory that is not ours. */
static void fault(void) {
    volatile unsigned char *nowhere = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    (void)*nowhere;
}

static void read_stray(void) {
    if (!is_nan_everywhere(zpp_range_base(watched), PAGE)) _exit(3);
}

static void default_before(void) {
    set_default();
    watched = make_range(PAGE);
    read_stray();
    fault();
}

static void sent_signal(void) {
    set_default();
    watched = make_range(PAGE);
    raise(SIGSEGV);
}

static void handler_before(void) {
    const struct sigaction theirs = { .sa_handler = note_and_jump };
    sigaction(SIGSEGV, &theirs, NULL);
    sigaction(SIGBUS, &theirs, NULL);
    watched = make_range(PAGE);
    read_stray();
    if (sigsetjmp(jump, 1) == 0) fault();
    if (passed != SIGSEGV) _exit(4);
    if (sigsetjmp(jump, 1) == 0) raise(SIGBUS);
    if (passed != SIGBUS) _exit(5);
    read_stray();
}

/* A handler is installed over ours. After the next release ours is first again, and theirs second. */
static void handler_put_over(void) {
    set_default();
    watched = make_range(2 * PAGE);
    const struct sigaction theirs = { .sa_sigaction = give_way, .sa_flags = SA_SIGINFO | SA_NODEFER };
    for (int round = 0; round < 10; round++) { /* more often than there are entries */
        uintptr_t first;
        sigaction(SIGSEGV, &theirs, &replaced);
        map(watched, PAGE, PAGE);
        unmap(watched, PAGE, PAGE);
        read_stray();
        if (passed != 0) _exit(6);
        if (take(&first) != 1) _exit(8);
        if (round < 9) sigaction(SIGSEGV, &replaced, NULL);
    }
    fault();
}

static void theirs_was_called(void) {
    handler_put_over();
    _exit(7); /* the fault must have ended it */
}

static void ends_by_its_signal(void) {
    int status = run_child(default_before);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    status = run_child(sent_signal);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    status = run_child(theirs_was_called);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

static void last_fault(int signal) {
    (void)signal;
    _exit(42);
}

static void passes_on(void) {
    const struct sigaction last = { .sa_handler = last_fault };
    const struct sigaction theirs = { .sa_handler = note_and_jump };
    sigaction(SIGSEGV, &theirs, NULL);
    watched = make_range(PAGE);
    if (sigsetjmp(jump, 1) == 0) fault();
    if (passed != SIGSEGV) _exit(4);
    sigaction(SIGSEGV, &last, NULL);
    fault();
}

static void other_faults_reach_other_handlers(void) {
    int status = run_child(passes_on);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 42);
    status = run_child(handler_before);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void limited_files(void) {
    const struct rlimit none = { 0, 0 };
    setrlimit(RLIMIT_NOFILE, &none);
    read_stray();
    unsigned char *base = zpp_range_base(watched);
    base[5] = 1;
    map(watched, 0, PAGE);
    base[5] = 2;
    if (base[5] != 2) _exit(8);
}

/* A child inherits the range. Its stray reads are not recorded in the parent. It cannot open a file. */
static void children_read_too(void) {
    watched = make_range(PAGE);
    const int status = run_child(limited_files);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(!zpp_stray_is_seen());
    zpp_range_destroy(watched);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(children_read_too), /* before there is a file of NaN */
        TEST(reads_are_nan_and_noted),
        TEST(warm_pages_take_their_place),
        TEST(fresh_pages_take_their_place),
        TEST(a_destroyed_range_is_forgotten),
        TEST(many_reads),
        TEST(system_calls_fail),
        TEST(reads_beside_maps),
        TEST(ends_by_its_signal),
        TEST(other_faults_reach_other_handlers),
        {0},
    };
    return test_main(argc, argv, cases);
}
