/* SPDX-License-Identifier: Apache-2.0
 *
 * Stray reads: see stray.h. The handler uses atomics and direct system calls only.
 *
 * A thread must not map or unmap while a handler is inside, and the handler must not wait for a lock:
 *
 *   owner     changing = 1; wait until inside == 0; map or unmap; changing = 0
 *   handler   inside++; if changing: inside--, return, and the instruction faults again; else map NaN; inside--
 *
 * The accesses are sequentially consistent, so at least one side sees the other.
 *
 * Pages of NaN are private mappings of one memfd that is full of NaN. It is made at the first stray read. Such a
 * mapping appears in one step, so that no thread sees a page half filled, and reading it allocates no memory.
 */
#include "stray.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { NAN_BYTES = 1 << 20 }; /* of the file. A larger file takes more memory, a smaller one needs more mappings. */
/* A fault at an address that has memory is normal when another thread mapped it meanwhile. A page without permission to
 * execute would fault for ever, so the number of such faults between two changes of the area is limited. */
enum { MENDED_LIMIT = 10000 };

struct zpp_stray_area {
    struct zpp_stray_area *next; /* areas are reused and never freed: a handler may read the list at any time */
    _Atomic uintptr_t base;
    _Atomic size_t bytes;
    _Atomic int taken, changing, inside, has_pages, mended;
    struct zpp_stray_spec spec;
};

static struct zpp_stray_area *_Atomic areas;
static _Atomic int nan_file = -1;
static _Atomic uintptr_t seen_at[ZPP_STRAY_ADDRESSES];
_Atomic int zpp_stray_seen;

/* --- pages of NaN, in the handler --------------------------------------------------------------------------------- */

static int make_nan_file(void) {
    const int file = memfd_create("zeropp-nan", MFD_CLOEXEC);
    if (file < 0) return -1;
    void *memory = ftruncate(file, NAN_BYTES) == 0 ? mmap(NULL, NAN_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                                                   : MAP_FAILED;
    if (memory == MAP_FAILED) {
        close(file);
        return -1;
    }
    memset(memory, 0xff, NAN_BYTES);
    munmap(memory, NAN_BYTES);
    int none = -1;
    if (atomic_compare_exchange_strong(&nan_file, &none, file)) return file;
    close(file); /* another thread made one first */
    return none;
}

/* Map NaN without a file, for a process that has reached its limit of open files: fill memory elsewhere and move it. */
static bool move_nans(char *to, size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    memset(memory, 0xff, bytes);
    if (mremap(memory, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to) return true;
    munmap(memory, bytes);
    return false;
}

static bool map_nans(char *to, size_t bytes) {
    int file = atomic_load(&nan_file);
    if (file < 0) file = make_nan_file();
    if (file < 0) return move_nans(to, bytes);
    return mmap(to, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file, 0) == to;
}

static void note(uintptr_t address) {
    for (int i = 0; i < ZPP_STRAY_ADDRESSES; i++) {
        uintptr_t none = 0;
        if (atomic_compare_exchange_strong(&seen_at[i], &none, address)) break;
    }
    atomic_store(&zpp_stray_seen, 1);
}

/* Map at most NAN_BYTES of NaN around `offset_bytes` in the hole [begin, end). */
static bool fill(struct zpp_stray_area *area, size_t offset_bytes, size_t begin_bytes, size_t end_bytes) {
    const size_t first = offset_bytes / NAN_BYTES * NAN_BYTES;
    const size_t begin = first > begin_bytes ? first : begin_bytes;
    const size_t end = first + NAN_BYTES < end_bytes ? first + NAN_BYTES : end_bytes;
    char *base = area->spec.base;
    if (!map_nans(base + begin, end - begin)) return false;
    atomic_store(&area->has_pages, 1);
    note((uintptr_t)base + offset_bytes);
    return true;
}

/* Return true if the instruction is to run again. */
static bool look(struct zpp_stray_area *area, int signal, uintptr_t address) {
    if (atomic_load(&area->changing)) return true;
    const size_t offset_bytes = address - atomic_load(&area->base);
    if (offset_bytes >= atomic_load(&area->bytes)) return true; /* the area was freed meanwhile: search again */
    size_t begin_bytes, end_bytes;
    if (area->spec.is_hole(area->spec.ctx, offset_bytes, &begin_bytes, &end_bytes))
        return fill(area, offset_bytes, begin_bytes, end_bytes);
    return signal == SIGSEGV && atomic_fetch_add(&area->mended, 1) < MENDED_LIMIT;
}

static bool is_stray(int signal, const siginfo_t *info) {
    if (info->si_code <= 0) return false; /* sent by a process, not a fault */
    const uintptr_t address = (uintptr_t)info->si_addr;
    for (struct zpp_stray_area *area = atomic_load(&areas); area; area = area->next) {
        if (address - atomic_load(&area->base) >= atomic_load(&area->bytes)) continue;
        if (atomic_load(&area->changing)) { /* tested before inside++, or many readers could keep `inside` above 0 */
            sched_yield();
            return true;
        }
        atomic_fetch_add(&area->inside, 1);
        const bool again = look(area, signal, address);
        atomic_fetch_sub(&area->inside, 1);
        return again;
    }
    return false;
}

/* --- handlers ----------------------------------------------------------------------------------------------------- */
/* Each installation uses an entry of its own, which keeps the handler that it replaced. A handler that replaced entry 0
 * and calls it later thus continues with the handler before entry 0; with one entry the two would call each other for
 * ever. */
enum { ENTRIES = 4 };

struct caught {
    const int signal;
    int used; /* entries; under install_lock */
    struct sigaction before[ENTRIES];
};

static struct caught caught[] = { { .signal = SIGSEGV }, { .signal = SIGBUS } };
static pthread_mutex_t install_lock = PTHREAD_MUTEX_INITIALIZER;

static void pass_on(const struct sigaction *before, int signal, siginfo_t *info, void *context) {
    const bool sent = info->si_code <= 0;
    if (before->sa_flags & SA_SIGINFO) {
        before->sa_sigaction(signal, info, context);
    } else if (before->sa_handler == SIG_DFL || (before->sa_handler == SIG_IGN && !sent)) {
        /* The instruction faults again and ends the process by the default action. The kernel does not let a process
         * ignore a fault either. */
        const struct sigaction fallback = { .sa_handler = SIG_DFL };
        sigaction(signal, &fallback, NULL);
        if (sent) raise(signal);
    } else if (before->sa_handler != SIG_IGN) {
        before->sa_handler(signal);
    }
}

static void enter(int entry, int signal, siginfo_t *info, void *context) {
    const int error = errno;
    if (!is_stray(signal, info)) pass_on(&caught[signal == SIGBUS].before[entry], signal, info, context);
    errno = error;
}

static void enter_0(int signal, siginfo_t *info, void *context) { enter(0, signal, info, context); }
static void enter_1(int signal, siginfo_t *info, void *context) { enter(1, signal, info, context); }
static void enter_2(int signal, siginfo_t *info, void *context) { enter(2, signal, info, context); }
static void enter_3(int signal, siginfo_t *info, void *context) { enter(3, signal, info, context); }

static void (*const entries[ENTRIES])(int, siginfo_t *, void *) = { enter_0, enter_1, enter_2, enter_3 };

static bool is_ours(int signal, struct sigaction *now) {
    if (sigaction(signal, NULL, now) != 0 || !(now->sa_flags & SA_SIGINFO)) return false;
    for (int i = 0; i < ENTRIES; i++)
        if (now->sa_sigaction == entries[i]) return true;
    return false;
}

/* An entry to install over `now`: a new one, or with all used the one that was installed over the same handler before.
 * ENTRIES: none. Most handlers call the one that they replaced, so ours may still be called then. */
static int entry_over(struct caught *one, const struct sigaction *now) {
    if (one->used < ENTRIES) return one->used++;
    for (int i = ENTRIES - 1; i > 0; i--)
        if (one->before[i].sa_sigaction == now->sa_sigaction) return i;
    return ENTRIES;
}

static void install(struct caught *one) {
    struct sigaction ours = { .sa_flags = SA_SIGINFO | SA_ONSTACK }, now;
    pthread_mutex_lock(&install_lock);
    const int entry = is_ours(one->signal, &now) ? ENTRIES : entry_over(one, &now);
    if (entry < ENTRIES) {
        sigemptyset(&ours.sa_mask);
        one->before[entry] = now;
        ours.sa_sigaction = entries[entry];
        sigaction(one->signal, &ours, NULL);
    }
    pthread_mutex_unlock(&install_lock);
}

void zpp_stray_keep_handler(void) {
    struct sigaction now;
    if (!is_ours(SIGSEGV, &now)) install(&caught[0]);
}

/* --- areas -------------------------------------------------------------------------------------------------------- */

/* A forked child has one thread. An area that another thread was changing stays half changed: stop watching it. */
static void after_fork(void) {
    for (struct zpp_stray_area *area = atomic_load(&areas); area; area = area->next) {
        atomic_store(&area->inside, 0);
        if (atomic_load(&area->changing)) atomic_store(&area->bytes, 0);
        atomic_store(&area->changing, 0);
    }
}

static void first_watch(void) { pthread_atfork(NULL, NULL, after_fork); }

static struct zpp_stray_area *unused_area(void) {
    for (struct zpp_stray_area *area = atomic_load(&areas); area; area = area->next) {
        int none = 0;
        if (atomic_compare_exchange_strong(&area->taken, &none, 1)) return area;
    }
    struct zpp_stray_area *area = calloc(1, sizeof *area);
    if (!area) return NULL;
    atomic_store(&area->taken, 1);
    area->next = atomic_load(&areas);
    while (!atomic_compare_exchange_weak(&areas, &area->next, area)) {}
    return area;
}

zpp_status zpp_stray_watch(const struct zpp_stray_spec *spec, zpp_stray_area **out, struct zpp_err *err) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct zpp_stray_area *area = unused_area();
    if (!area) return zpp_fail(err, ZPP_NOMEM, "stray reads: no memory to watch %zu bytes", spec->bytes);
    pthread_once(&once, first_watch);
    for (size_t i = 0; i < sizeof caught / sizeof caught[0]; i++) install(&caught[i]);
    zpp_stray_lock(area);
    area->spec = *spec;
    atomic_store(&area->base, (uintptr_t)spec->base);
    atomic_store(&area->bytes, spec->bytes);
    zpp_stray_unlock(area);
    *out = area;
    return ZPP_OK;
}

/* Drop recorded addresses of an area that is no longer watched. */
static void forget(uintptr_t base, size_t bytes) {
    for (int i = 0; i < ZPP_STRAY_ADDRESSES; i++) {
        uintptr_t address = atomic_load(&seen_at[i]);
        if (address - base < bytes) atomic_compare_exchange_strong(&seen_at[i], &address, 0);
    }
}

void zpp_stray_unwatch(zpp_stray_area *area) {
    if (!area) return;
    zpp_stray_lock(area);
    forget(atomic_load(&area->base), atomic_load(&area->bytes));
    atomic_store(&area->bytes, 0);
    atomic_store(&area->base, 0);
    atomic_store(&area->has_pages, 0);
    zpp_stray_unlock(area);
    atomic_store(&area->taken, 0);
}

void zpp_stray_lock(zpp_stray_area *area) {
    int none = 0;
    while (!atomic_compare_exchange_weak(&area->changing, &none, 1)) {
        none = 0;
        sched_yield();
    }
    while (atomic_load(&area->inside)) sched_yield();
}

void zpp_stray_unlock(zpp_stray_area *area) {
    atomic_store(&area->mended, 0);
    atomic_store(&area->changing, 0);
}

bool zpp_stray_has_pages(const zpp_stray_area *area) { return atomic_load(&area->has_pages) != 0; }

static void close_holes(struct zpp_stray_area *area) {
    const size_t bytes = atomic_load(&area->bytes);
    for (size_t at = 0; at < bytes;) {
        size_t begin, end;
        const bool hole = area->spec.is_hole(area->spec.ctx, at, &begin, &end);
        if (hole) area->spec.close_hole(area->spec.ctx, begin, end);
        at = end;
    }
}

size_t zpp_stray_take(uintptr_t *addresses) {
    size_t count = 0;
    atomic_store(&zpp_stray_seen, 0); /* first, so that a read from now on sets it for the next take */
    for (int i = 0; i < ZPP_STRAY_ADDRESSES; i++) {
        const uintptr_t address = atomic_exchange(&seen_at[i], 0);
        if (address) addresses[count++] = address;
    }
    for (struct zpp_stray_area *area = atomic_load(&areas); area; area = area->next) {
        zpp_stray_lock(area);
        if (atomic_exchange(&area->has_pages, 0)) close_holes(area);
        zpp_stray_unlock(area);
    }
    return count;
}
