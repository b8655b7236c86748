/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams, events and counters of the simulated GPU, and the one thread that runs their operations (sim.h).
 *
 * The executor looks for a stream whose head may run, runs it without the lock, and looks again. Which heads of lazy
 * streams may run is worked out anew each time from what the host waits for: a wait for an event wants its stream up to
 * the event, and a head that is itself a wait wants what it waits for.
 *
 * A GPU goes on without its host. So everything runs once the host has been silent for SIM_IDLE_MS, and an operation
 * that is older than a hundred times that runs in any case: nothing hangs that would not hang on a GPU.
 *
 * Locks: `lock` guards everything here. It is given up while an operation runs, which only the executor does.
 */
#include "internal.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    AGAIN_NS = 200000, /* between two attempts of an operation that waits for other ranks */
    PATIENCE = 20,     /* queries in a row that say no; each further one waits for PATIENCE_NS */
    PATIENCE_NS = 1000000,
    LATEST_IDLE_TIMES = 100,
    MOST_REASONS = 64,
    SIM_PAGE_BYTES = 4096,
};

enum kind { RUN, ATTEMPT, RECORD, WAIT, WAIT_VALUE, WRITE_VALUE };

/* One recording of an event. It outlives the event, and stays what it is when the event is recorded again. */
struct mark {
    int references;
    bool done;
    struct CUstream_st *stream;
    uint64_t order; /* of the RECORD */
};

struct work {
    struct work *next;
    enum kind kind;
    uint64_t order, since_ns; /* `order`: of all operations that the process has enqueued, from 1 */
    void (*run)(void *arg);
    bool (*attempt)(void *arg);
    bool attempted; /* once at least */
    void *arg;
    const char *name;
    struct mark *mark;
    uint64_t *counter, value;
};

struct CUstream_st {
    struct work *first, **last;
    int device, number, asked;       /* `asked`: queries in a row that said no */
    bool dead, lazy, running, tried; /* `tried`: its head was attempted in this round, and others are not there yet */
    uint64_t wanted_to;              /* the host waits for operations up to this order */
    struct CUstream_st *next_dead;
};

/* Records of dead events stay, so that the use of a dead handle is found. */
struct CUevent_st {
    struct mark *mark;
    int asked;
    bool dead;
    struct CUevent_st *next;
};

struct waiter { /* a thread of the host */
    struct waiter *next;
    struct mark *mark;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_came, work_done;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_t executor;
static bool begun, stopping, asleep; /* `asleep`: the executor waits for a call, without a time limit */
static struct CUstream_st *streams[SIM_MOST_STREAMS], *defaults[SIM_MOST_DEVICES];
static struct CUstream_st *dead_streams; /* records stay, as those of events do */
static struct CUevent_st *events;
static struct waiter *waiters;
static uint64_t lazy_streams, seed, orders, last_call_ns, idle_ns;
static bool one_queue;
static int left_out_waiter = SIM_NOBODY, left_out_source, left_out_word = SIM_NOBODY;
static struct sim_counts counts;
static struct sim_host_wait reasons[MOST_REASONS];
static __thread const char *because;

uint64_t sim_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint32_t draw(uint32_t below) { /* xorshift64* */
    seed ^= seed >> 12;
    seed ^= seed << 25;
    seed ^= seed >> 27;
    return (uint32_t)((seed * 0x2545f4914f6cdd1dull) >> 33) % below;
}

static void wait_until(pthread_cond_t *condition, uint64_t ns) {
    const struct timespec at = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    pthread_cond_timedwait(condition, &lock, &at);
}

/* --- what may run now --------------------------------------------------------------------------------------------- */

static bool reached(const struct work *wait) {
    return (int64_t)(__atomic_load_n(wait->counter, __ATOMIC_ACQUIRE) - wait->value) >= 0;
}

static bool behind_in_the_queue(const struct CUstream_st *stream, const struct CUstream_st *other) {
    return one_queue && other && other->device == stream->device && other->first &&
           other->first->order < stream->first->order;
}

static bool blocked(const struct CUstream_st *stream) {
    if (stream->first->kind == WAIT && !stream->first->mark->done) return true;
    if (stream->first->kind == WAIT_VALUE && !reached(stream->first)) return true;
    for (int i = 0; i < SIM_MOST_STREAMS; i++)
        if (behind_in_the_queue(stream, streams[i])) return true;
    return false;
}

static void want(struct CUstream_st *stream, uint64_t order);

/* Ranks that are threads of this process map a counter at several addresses, all at the same place of a page. */
static bool same_counter(const uint64_t *a, const uint64_t *b) {
    return (uintptr_t)a % SIM_PAGE_BYTES == (uintptr_t)b % SIM_PAGE_BYTES;
}

/* Want the first write in each stream that ends this wait for a counter. */
static void want_writers(const struct work *wait) {
    for (int i = 0; i < SIM_MOST_STREAMS; i++)
        for (const struct work *work = streams[i] ? streams[i]->first : NULL; work; work = work->next)
            if (work->kind == WRITE_VALUE && same_counter(work->counter, wait->counter) &&
                (int64_t)(work->value - wait->value) >= 0) {
                want(streams[i], work->order);
                break;
            }
}

/* What waits for other ranks waits for their streams, too, where ranks are threads of this process. */
static void want_attempts(void) {
    for (int i = 0; i < SIM_MOST_STREAMS; i++)
        for (const struct work *work = streams[i] ? streams[i]->first : NULL; work; work = work->next)
            if (work->kind == ATTEMPT) {
                want(streams[i], work->order);
                break;
            }
}

/* Want operations of `stream` up to `order`, and so whatever its head waits for. */
static void want(struct CUstream_st *stream, uint64_t order) {
    const struct work *head = stream->first;
    if (!head || head->order > order || stream->wanted_to >= order) return;
    stream->wanted_to = order;
    for (int i = 0; i < SIM_MOST_STREAMS; i++)
        if (behind_in_the_queue(stream, streams[i])) want(streams[i], head->order);
    if (head->kind == WAIT && !head->mark->done) want(head->mark->stream, head->mark->order);
    if (head->kind == WAIT_VALUE && !reached(head)) want_writers(head);
    if (head->kind == ATTEMPT && stream->tried) want_attempts();
}

static bool due(const struct CUstream_st *stream, uint64_t now_ns) {
    return !stream->lazy || stream->first->order <= stream->wanted_to || now_ns - last_call_ns > idle_ns ||
           now_ns - stream->first->since_ns > LATEST_IDLE_TIMES * idle_ns;
}

static struct CUstream_st *runnable(void) {
    const uint64_t now_ns = sim_now_ns();
    for (int i = 0; i < SIM_MOST_STREAMS; i++)
        if (streams[i]) streams[i]->wanted_to = 0;
    for (const struct waiter *waiter = waiters; waiter; waiter = waiter->next)
        if (!waiter->mark->done) want(waiter->mark->stream, waiter->mark->order);
    for (int i = 0; i < SIM_MOST_STREAMS; i++) {
        struct CUstream_st *stream = streams[i];
        if (stream && stream->first && !stream->tried && due(stream, now_ns) && !blocked(stream)) return stream;
    }
    return NULL;
}

/* --- the executor ------------------------------------------------------------------------------------------------- */

static void drop_mark(struct mark *mark) {
    if (mark && --mark->references == 0) free(mark);
}

static void bury(struct CUstream_st *stream) {
    streams[stream->number] = NULL;
    stream->next_dead = dead_streams;
    dead_streams = stream;
}

static bool run_unlocked(struct CUstream_st *stream, const struct work *work) {
    bool done = true;
    stream->running = true;
    pthread_mutex_unlock(&lock);
    if (work->kind == RUN) work->run(work->arg);
    if (work->kind == ATTEMPT) done = work->attempt(work->arg);
    pthread_mutex_lock(&lock);
    stream->running = false;
    return done;
}

static void run_head(struct CUstream_st *stream) {
    struct work *work = stream->first;
    if ((work->kind == RUN || work->kind == ATTEMPT) && !run_unlocked(stream, work)) {
        stream->tried = work->attempted = true;
        pthread_cond_broadcast(&work_done);
        return;
    }
    if (work->kind == RECORD) work->mark->done = true;
    if (work->kind == WRITE_VALUE) __atomic_store_n(work->counter, work->value, __ATOMIC_RELEASE);
    stream->first = work->next;
    if (!stream->first) stream->last = &stream->first;
    drop_mark(work->mark);
    free(work);
    if (stream->dead && !stream->first) bury(stream);
    pthread_cond_broadcast(&work_done);
}

/* Nothing may run: wait for a call, for the host to be silent for long enough, or for other ranks. */
static void rest(void) {
    bool again = false, pending = false;
    for (int i = 0; i < SIM_MOST_STREAMS; i++) {
        if (!streams[i] || !streams[i]->first) continue;
        pending = true;
        again = again || streams[i]->tried || streams[i]->first->kind == WAIT_VALUE;
        streams[i]->tried = false;
    }
    pthread_cond_broadcast(&work_done);
    asleep = !pending;
    if (asleep) pthread_cond_wait(&work_came, &lock);
    else wait_until(&work_came, sim_now_ns() + (again ? AGAIN_NS : idle_ns));
}

static void *executor_main(void *unused) {
    pthread_mutex_lock(&lock);
    while (!stopping) {
        struct CUstream_st *stream = runnable();
        if (stream) run_head(stream);
        else rest();
    }
    pthread_mutex_unlock(&lock);
    return unused;
}

static void begin(void) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&work_came, &monotonic);
    pthread_cond_init(&work_done, &monotonic);
    lazy_streams = sim_setting("SIM_LAZY", 0);
    seed = sim_setting("SIM_SEED", 0);
    one_queue = sim_setting("SIM_ONE_QUEUE", 0) != 0;
    idle_ns = sim_setting("SIM_IDLE_MS", 20) * 1000000u;
    if (pthread_create(&executor, NULL, executor_main, NULL)) sim_fatal("no thread for the executor");
    begun = true;
}

/* Operations of torch need its static objects, and some need Python. So the executor stops before those are gone:
 * torch's device asks for it when Python exits, and other programs get it here. */
void sim_stop(void) {
    pthread_mutex_lock(&lock);
    const bool running = begun && !stopping;
    stopping = true;
    if (running) pthread_cond_signal(&work_came);
    if (running) pthread_cond_broadcast(&work_done);
    pthread_mutex_unlock(&lock);
    if (running) pthread_join(executor, NULL);
}

__attribute__((destructor)) static void end(void) { sim_stop(); }

/* --- calls of the host -------------------------------------------------------------------------------------------- */

static void enter(void) {
    pthread_once(&once, begin);
    pthread_mutex_lock(&lock);
    last_call_ns = sim_now_ns();
}

static bool eager_work(void) {
    for (int i = 0; i < SIM_MOST_STREAMS; i++) {
        const struct CUstream_st *stream = streams[i];
        if (stream && !stream->lazy && stream->first && !stream->first->attempted && !blocked(stream)) return true;
    }
    return false;
}

static void await_mark(struct mark *mark, uint64_t until_ns) {
    struct waiter me = {waiters, mark}, **link = &waiters;
    if (pthread_equal(pthread_self(), executor)) sim_fatal("an operation of a stream waits for a stream");
    waiters = &me;
    while (!mark->done && !stopping && (!until_ns || sim_now_ns() < until_ns)) {
        pthread_cond_signal(&work_came);
        if (until_ns) wait_until(&work_done, until_ns);
        else pthread_cond_wait(&work_done, &lock);
    }
    while (*link != &me) link = &(*link)->next;
    *link = me.next;
}

/* A random lazy stream runs one operation. */
static void progress_at_random(void) {
    struct CUstream_st *stream = streams[draw(SIM_MOST_STREAMS)];
    if (!stream || !stream->lazy || !stream->first || stream->first->kind == ATTEMPT || blocked(stream)) return;
    struct mark until = {1, false, stream, stream->first->order};
    struct waiter me = {waiters, &until}, **link = &waiters;
    waiters = &me;
    while (!stopping && stream->first && stream->first->order == until.order) {
        pthread_cond_signal(&work_came);
        pthread_cond_wait(&work_done, &lock);
    }
    while (*link != &me) link = &(*link)->next;
    *link = me.next;
}

/* Eager work runs inside the call. What waits for other ranks is attempted there once. */
static int leave(int result) {
    if (!pthread_equal(pthread_self(), executor)) {
        if (seed) progress_at_random();
        while (!stopping && eager_work()) {
            pthread_cond_signal(&work_came);
            pthread_cond_wait(&work_done, &lock);
        }
        if (asleep) pthread_cond_signal(&work_came);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

void sim_count(size_t offset, int64_t change) {
    int64_t *count = (void *)((char *)&counts + offset);
    __atomic_fetch_add(count, change, __ATOMIC_RELAXED);
}

static void note_host_wait(const char *function) {
    const char *reason = because ? because : function;
    size_t i = 0;
    while (i < MOST_REASONS - 1 && reasons[i].count && strcmp(reasons[i].reason, reason) != 0) i++;
    snprintf(reasons[i].reason, sizeof reasons[i].reason, "%s", reason);
    reasons[i].count++;
    counts.host_waits++;
}

static struct mark *push(struct CUstream_st *stream, struct work like) {
    struct work *work = malloc(sizeof *work);
    if (!work) sim_fatal("no memory for an operation");
    *work = like;
    work->next = NULL;
    work->order = ++orders;
    work->since_ns = sim_now_ns();
    if (work->kind == RECORD) work->mark->order = work->order;
    *stream->last = work;
    stream->last = &work->next;
    return work->mark;
}

static bool alive(const struct CUstream_st *stream) {
    for (int i = 0; i < SIM_MOST_STREAMS; i++)
        if (streams[i] == stream) return stream && !stream->dead;
    return false;
}

static int enqueue(struct CUstream_st *stream, struct work like, size_t counted) {
    enter();
    const bool usable = alive(stream);
    if (usable) {
        push(stream, like);
        sim_count(counted, 1);
    }
    return leave(usable ? ZPP_CU_SUCCESS : INVALID_HANDLE);
}

/* A mark behind everything that `stream` holds. */
static struct mark *mark_end(struct CUstream_st *stream) {
    struct mark *mark = calloc(1, sizeof *mark);
    if (!mark) sim_fatal("no memory for an event");
    *mark = (struct mark){2, false, stream, 0};
    return push(stream, (struct work){.kind = RECORD, .mark = mark});
}

static void finish_stream(struct CUstream_st *stream) {
    if (!stream || !stream->first) return;
    struct mark *mark = mark_end(stream);
    await_mark(mark, 0);
    drop_mark(mark);
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

static struct CUstream_st *add_stream(int device) {
    int number = 0;
    while (number < SIM_MOST_STREAMS && streams[number]) number++;
    if (number == SIM_MOST_STREAMS) sim_fatal("%d streams are alive, and there is room for no more", number);
    struct CUstream_st *stream = calloc(1, sizeof *stream);
    if (!stream) sim_fatal("no memory for a stream");
    stream->device = device;
    stream->number = number;
    stream->last = &stream->first;
    stream->lazy = lazy_streams >> number & 1;
    return streams[number] = stream;
}

static struct CUstream_st *default_of(int device) {
    if (!defaults[device]) defaults[device] = add_stream(device);
    return defaults[device];
}

sim_stream sim_default_stream(int device) {
    enter();
    struct CUstream_st *stream = default_of(device);
    leave(ZPP_CU_SUCCESS);
    return stream;
}

int sim_stream_create(int device, sim_stream *out) {
    enter();
    default_of(device); /* so that it has the device's lowest number */
    *out = add_stream(device);
    counts.streams++;
    return leave(ZPP_CU_SUCCESS);
}

int sim_stream_destroy(sim_stream stream) {
    enter();
    if (!alive(stream) || stream == defaults[stream->device]) return leave(INVALID_HANDLE);
    stream->dead = true;
    counts.streams--;
    if (!stream->first) bury(stream);
    return leave(ZPP_CU_SUCCESS);
}

int sim_stream_number(sim_stream stream) { return stream->number; }

int sim_stream_query(sim_stream stream) {
    enter();
    counts.queries++;
    if (!alive(stream)) return leave(INVALID_HANDLE);
    if (stopping) return leave(ZPP_CU_SUCCESS);
    if (stream->first && ++stream->asked > PATIENCE) {
        if (stream->asked == PATIENCE + 1) note_host_wait("cuStreamQuery, again and again");
        struct mark *mark = mark_end(stream);
        await_mark(mark, sim_now_ns() + PATIENCE_NS);
        drop_mark(mark);
    }
    if (stream->first) return leave(ZPP_CU_NOT_READY);
    stream->asked = 0;
    return leave(ZPP_CU_SUCCESS);
}

int sim_stream_synchronize(sim_stream stream) {
    enter();
    if (!alive(stream)) return leave(INVALID_HANDLE);
    note_host_wait("cuStreamSynchronize");
    finish_stream(stream);
    return leave(ZPP_CU_SUCCESS);
}

int sim_device_synchronize(int device) {
    enter();
    note_host_wait("cuCtxSynchronize");
    for (int i = 0; i < SIM_MOST_STREAMS; i++)
        if (streams[i] && streams[i]->device == device) finish_stream(streams[i]);
    return leave(ZPP_CU_SUCCESS);
}

bool (*sim_leave_out)(const struct sim_wait *wait);

void sim_leave_out_between(int waiter, int source) {
    enter();
    left_out_waiter = waiter;
    left_out_source = source;
    leave(ZPP_CU_SUCCESS);
}

void sim_leave_out_word(int word) {
    enter();
    left_out_word = word;
    leave(ZPP_CU_SUCCESS);
}

static bool is_left_out(int waiter, const struct CUstream_st *source) {
    return left_out_waiter == waiter && source->number == left_out_source;
}

static bool left_out(struct sim_wait wait) {
    enum { LINE_BYTES = 64, PAGE_BYTES = 4096 };
    if (wait.after && is_left_out(wait.stream->number, wait.after)) return true;
    if (wait.counter && (int)((uintptr_t)wait.counter % PAGE_BYTES / LINE_BYTES) == left_out_word) return true;
    return sim_leave_out && sim_leave_out(&wait);
}

int sim_stream_wait(sim_stream stream, sim_event event) {
    enter();
    if (!alive(stream) || event->dead) return leave(INVALID_HANDLE);
    counts.waits++;
    if (event->mark && !left_out((struct sim_wait){stream, event->mark->stream, NULL})) {
        event->mark->references++;
        push(stream, (struct work){.kind = WAIT, .mark = event->mark});
    }
    return leave(ZPP_CU_SUCCESS);
}

int sim_enqueue_counted(sim_stream stream, void (*run)(void *arg), void *arg, const char *name, size_t counted) {
    return enqueue(stream, (struct work){.kind = RUN, .run = run, .arg = arg, .name = name}, counted);
}

int sim_enqueue_attempt(sim_stream stream, bool (*attempt)(void *arg), void *arg, const char *name) {
    return enqueue(stream, (struct work){.kind = ATTEMPT, .attempt = attempt, .arg = arg, .name = name},
                   offsetof(struct sim_counts, collectives));
}

int sim_enqueue_wait_values(sim_stream stream, uint64_t *const *counters, const uint64_t *values, size_t count) {
    enter();
    if (!alive(stream)) return leave(INVALID_HANDLE);
    for (size_t i = 0; i < count; i++) {
        const struct work wait = {
            .kind = WAIT_VALUE, .counter = counters[i], .value = values[i], .name = "a wait for a counter"};
        if (!left_out((struct sim_wait){stream, NULL, counters[i]})) push(stream, wait);
    }
    counts.counters++;
    return leave(ZPP_CU_SUCCESS);
}

int sim_enqueue_write_value(sim_stream stream, uint64_t *counter, uint64_t value) {
    return enqueue(
        stream, (struct work){.kind = WRITE_VALUE, .counter = counter, .value = value, .name = "a write of a counter"},
        offsetof(struct sim_counts, counters));
}

/* --- events ------------------------------------------------------------------------------------------------------- */

int sim_event_create(sim_event *out) {
    struct CUevent_st *event = calloc(1, sizeof *event);
    if (!event) sim_fatal("no memory for an event");
    enter();
    event->next = events;
    events = event;
    counts.events++;
    *out = event;
    return leave(ZPP_CU_SUCCESS);
}

int sim_event_destroy(sim_event event) {
    enter();
    if (event->dead) return leave(INVALID_HANDLE);
    event->dead = true;
    drop_mark(event->mark);
    event->mark = NULL;
    counts.events--;
    return leave(ZPP_CU_SUCCESS);
}

int sim_event_record(sim_event event, sim_stream stream) {
    enter();
    if (!alive(stream) || event->dead) return leave(INVALID_HANDLE);
    counts.records++;
    drop_mark(event->mark);
    event->mark = mark_end(stream);
    return leave(ZPP_CU_SUCCESS);
}

/* What the host waits for; NULL: nothing. */
static struct mark *awaited(const struct CUevent_st *event) {
    return event->mark && !stopping && !is_left_out(SIM_HOST, event->mark->stream) ? event->mark : NULL;
}

int sim_event_query(sim_event event) {
    enter();
    counts.queries++;
    if (event->dead) return leave(INVALID_HANDLE);
    struct mark *mark = awaited(event);
    if (mark && !mark->done && ++event->asked > PATIENCE) {
        if (event->asked == PATIENCE + 1) note_host_wait("cuEventQuery, again and again");
        mark->references++;
        await_mark(mark, sim_now_ns() + PATIENCE_NS);
        const bool done = mark->done || stopping;
        drop_mark(mark);
        if (!done) return leave(ZPP_CU_NOT_READY);
    } else if (mark && !mark->done) {
        return leave(ZPP_CU_NOT_READY);
    }
    event->asked = 0;
    return leave(ZPP_CU_SUCCESS);
}

int sim_event_synchronize(sim_event event) {
    enter();
    if (event->dead) return leave(INVALID_HANDLE);
    note_host_wait("cuEventSynchronize");
    struct mark *mark = awaited(event);
    if (mark) {
        mark->references++;
        await_mark(mark, 0);
        drop_mark(mark);
    }
    return leave(ZPP_CU_SUCCESS);
}

/* --- for tests ---------------------------------------------------------------------------------------------------- */

void sim_finish(void) {
    enter();
    for (int i = 0; i < SIM_MOST_STREAMS; i++) finish_stream(streams[i]);
    leave(ZPP_CU_SUCCESS);
}

static void tell_stuck(char *stuck, size_t bytes) {
    size_t used = 0;
    for (int i = 0; i < SIM_MOST_STREAMS && used < bytes; i++) {
        const struct work *head = streams[i] ? streams[i]->first : NULL;
        if (head)
            used += (size_t)snprintf(stuck + used, bytes - used, "stream %d of device %d is at %s; ", i,
                                     streams[i]->device, head->name ? head->name : "an event");
    }
}

bool sim_finish_within(uint64_t ms, char *stuck, size_t stuck_bytes) {
    const uint64_t until_ns = sim_now_ns() + ms * 1000000u;
    bool done = true;
    enter();
    for (int i = 0; i < SIM_MOST_STREAMS; i++) {
        if (!streams[i] || !streams[i]->first) continue;
        struct mark *mark = mark_end(streams[i]);
        await_mark(mark, until_ns);
        done = done && mark->done;
        drop_mark(mark);
    }
    if (!done) tell_stuck(stuck, stuck_bytes);
    leave(ZPP_CU_SUCCESS);
    return done;
}

void sim_set_schedule(uint64_t lazy, uint64_t random) {
    sim_finish();
    enter();
    lazy_streams = lazy;
    seed = random;
    for (int i = 0; i < SIM_MOST_STREAMS; i++)
        if (streams[i]) streams[i]->lazy = lazy >> i & 1;
    leave(ZPP_CU_SUCCESS);
}

/* This counts for what is enqueued already, too. */
void sim_set_one_queue(bool shared) {
    enter();
    one_queue = shared;
    leave(ZPP_CU_SUCCESS);
}

void sim_get_counts(struct sim_counts *out) {
    struct timespec t = {0, 0};
    clockid_t clock;
    enter();
    *out = counts;
    if (pthread_getcpuclockid(executor, &clock) == 0) clock_gettime(clock, &t);
    out->executor_ns = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    leave(ZPP_CU_SUCCESS);
}

size_t sim_host_waits(struct sim_host_wait *out, size_t most) {
    size_t found = 0;
    enter();
    for (; found < MOST_REASONS && reasons[found].count; found++)
        if (found < most) out[found] = reasons[found];
    leave(ZPP_CU_SUCCESS);
    return found;
}

const char *sim_because(const char *reason) {
    const char *before = because;
    because = reason;
    return before;
}
