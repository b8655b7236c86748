/* SPDX-License-Identifier: Apache-2.0
 *
 * What grows with the ranks of a group: scale RANKS HOSTS LATENCY_US BYTES_PER_US FULL_RANKS. The ranks are threads of
 * a few processes over the product's own rendezvous, sockets and control memory; the store is a table that counts.
 * Hosts talk over the loopback. Every send and receive of the product is wrapped here: it is counted, and carries
 * simulated time. A message arrives LATENCY_US + bytes / BYTES_PER_US after the simulated time of its sender, and
 * takes the clock of the receiver there, if that is earlier. Ranks of a host that exchange signatures leave with the
 * latest of their clocks; else what happens inside a host takes no simulated time.
 *
 * Prints one line. Counts are of the whole group, unless they say otherwise: of the store, of descriptors, kB of
 * memory; messages, bytes and counters of a barrier, of an all-reduce of 8 bytes and, up to LONG_RANKS ranks, of one
 * of LONG_ELEMS elements, the most messages that one rank sends; microseconds of the start, and of all three in
 * simulated and in real time; milliseconds until all have heard of a rank that died.
 */
#include <dirent.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../csrc/comm/tcp/net.h"
#include "../tests/c/ranks.h"

enum { RANKS_MOST = ZPP_RANKS_MAX, STEPS = 5, STACK_BYTES = 1 << 20, PROCESS_RANKS = 64 };
enum { LONG_RANKS = 256, LONG_ELEMS = 1 << 18 }; /* 2 MiB: above what short collectives share */

/* --- the store, counted: a table in memory that all processes share ----------------------------------------------- */

enum { KEYS = 8192, KEY_BYTES = 48, VALUES_BYTES = 64 << 20 };

struct value {
    char key[KEY_BYTES]; /* "": free */
    size_t bytes, at_bytes;
    struct zpp_counter set; /* 1: it has bytes */
};
struct store {
    pthread_mutex_t lock; /* guards keys and used_bytes */
    struct value values[KEYS];
    size_t used_bytes;
    atomic_ulong sets, gets, bytes_read;
    unsigned char bytes[VALUES_BYTES];
};

static struct value *value_of(struct store *store, const char *key) {
    unsigned at = 2166136261u;
    for (const char *letter = key; *letter; letter++) at = (at ^ (unsigned char)*letter) * 16777619u;
    pthread_mutex_lock(&store->lock);
    while (store->values[at % KEYS].key[0] && strcmp(store->values[at % KEYS].key, key) != 0) at++;
    struct value *value = &store->values[at % KEYS];
    snprintf(value->key, sizeof value->key, "%s", key);
    pthread_mutex_unlock(&store->lock);
    return value;
}

static zpp_status counted_set(void *ctx, const char *key, const void *bytes, size_t count, struct zpp_err *err) {
    struct store *store = ctx;
    struct value *value = value_of(store, key);
    atomic_fetch_add(&store->sets, 1);
    pthread_mutex_lock(&store->lock);
    value->at_bytes = store->used_bytes;
    store->used_bytes += count;
    pthread_mutex_unlock(&store->lock);
    if (value->at_bytes + count > VALUES_BYTES) return zpp_fail(err, ZPP_NOMEM, "scale: the store is full");
    memcpy(store->bytes + value->at_bytes, bytes, count);
    value->bytes = count;
    zpp_counter_raise(&value->set, 1);
    return ZPP_OK;
}

static zpp_status counted_get(void *ctx, const char *key, void *bytes, size_t *count, uint64_t timeout_ns,
                              struct zpp_err *err) {
    struct store *store = ctx;
    struct value *value = value_of(store, key);
    struct zpp_comm none = {0};
    struct zpp_wait_ctx wait_ctx = {.comm = &none};
    const uint64_t start_ns = zpp_now_ns();
    atomic_fetch_add(&store->gets, 1);
    while (!zpp_counter_sleep(&wait_ctx, &value->set, 1, 100000000u))
        if (zpp_now_ns() - start_ns > timeout_ns) return zpp_fail(err, ZPP_TIMEOUT, "scale: nobody set \"%s\"", key);
    if (value->bytes > *count) return zpp_fail(err, ZPP_INVALID, "scale: \"%s\" does not fit", key);
    memcpy(bytes, store->bytes + value->at_bytes, value->bytes);
    *count = value->bytes;
    atomic_fetch_add(&store->bytes_read, *count);
    return ZPP_OK;
}

/* --- the network, counted and timed ------------------------------------------------------------------------------- */

/* One direction of a connection: which of its bytes arrive when. */
struct direction {
    uint32_t ports; /* sender's, receiver's; 0: free */
    uint64_t sent_bytes, received_bytes;
    unsigned first, end; /* of `arrivals`, as numbers that are never reset */
    struct {
        uint64_t end_bytes, at_ns;
    } arrivals[64];
};
enum { DIRECTIONS = 1 << 16, ARRIVALS = 64, EXCHANGES = 8 };

struct network {
    pthread_mutex_t lock; /* guards everything below */
    struct direction directions[DIRECTIONS];
    uint64_t latency_ns, bytes_per_us;
    int rank_at_port[1 << 16];
    uint64_t clock_ns[RANKS_MOST], entered_ns[RANKS_MOST][EXCHANGES]; /* of each rank: now, and when it exchanged */
    uint64_t messages, bytes, sent_by[RANKS_MOST];
    int locals;
    atomic_ulong raised;
};

static struct network *net;
static _Thread_local int this_rank;

static uint16_t port_of(int (*ask)(int, struct sockaddr *, socklen_t *), int fd) {
    struct sockaddr_in address = {0};
    socklen_t bytes = sizeof address;
    if (ask(fd, (struct sockaddr *)&address, &bytes) != 0 || address.sin_family != AF_INET) return 0;
    return ntohs(address.sin_port);
}

static int own_name(int fd, struct sockaddr *address, socklen_t *bytes) { return getsockname(fd, address, bytes); }
static int peer_name(int fd, struct sockaddr *address, socklen_t *bytes) { return getpeername(fd, address, bytes); }

static struct direction *direction_of(uint16_t from, uint16_t to) {
    const uint32_t ports = (uint32_t)from << 16 | to;
    for (uint32_t at = ports * 2654435761u >> 16;; at++) {
        struct direction *direction = &net->directions[at % DIRECTIONS];
        if (direction->ports == ports) return direction;
        if (direction->ports) continue;
        direction->ports = ports;
        return direction;
    }
}

static void count_sent(int fd, uint16_t own, size_t bytes) {
    const uint16_t peer = port_of(peer_name, fd);
    struct direction *direction = direction_of(own, peer);
    const int rank = net->rank_at_port[own];
    const uint64_t at_ns =
        net->clock_ns[rank] + net->latency_ns + (uint64_t)bytes * 1000 / net->bytes_per_us;
    direction->sent_bytes += bytes;
    if (direction->end - direction->first == ARRIVALS) direction->first++; /* the oldest: a later one is later, too */
    direction->arrivals[direction->end % ARRIVALS].end_bytes = direction->sent_bytes;
    direction->arrivals[direction->end++ % ARRIVALS].at_ns = at_ns;
    net->messages++;
    net->bytes += bytes;
    net->sent_by[rank]++;
}

static void count_received(int fd, uint16_t own, size_t bytes) {
    struct direction *direction = direction_of(port_of(peer_name, fd), own);
    uint64_t *clock_ns = &net->clock_ns[net->rank_at_port[own]];
    direction->received_bytes += bytes;
    while (direction->first != direction->end) {
        const uint64_t end_bytes = direction->arrivals[direction->first % ARRIVALS].end_bytes;
        const uint64_t at_ns = direction->arrivals[direction->first % ARRIVALS].at_ns;
        if (end_bytes > direction->received_bytes) break;
        if (at_ns > *clock_ns) *clock_ns = at_ns;
        direction->first++;
    }
}

ssize_t __real_send(int fd, const void *data, size_t bytes, int flags);
ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __real_recv(int fd, void *data, size_t bytes, int flags);
int __real_connect(int fd, const struct sockaddr *address, socklen_t bytes);
int __real_listen(int fd, int most);
zpp_status __real_zpp_exchange(struct zpp_wait_ctx *wait_ctx, struct zpp_err *err);
zpp_status __wrap_zpp_exchange(struct zpp_wait_ctx *wait_ctx, struct zpp_err *err);
void __real_zpp_counter_raise(struct zpp_counter *counter, uint32_t value);
ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_recv(int fd, void *data, size_t bytes, int flags);
int __wrap_connect(int fd, const struct sockaddr *address, socklen_t bytes);
int __wrap_listen(int fd, int most);
void __wrap_zpp_counter_raise(struct zpp_counter *counter, uint32_t value);

void __wrap_zpp_counter_raise(struct zpp_counter *counter, uint32_t value) {
    atomic_fetch_add(&net->raised, 1);
    __real_zpp_counter_raise(counter, value);
}

zpp_status __wrap_zpp_exchange(struct zpp_wait_ctx *wait_ctx, struct zpp_err *err) {
    const uint32_t slot = wait_ctx->comm->seq % EXCHANGES;
    const int first = this_rank / net->locals * net->locals;
    pthread_mutex_lock(&net->lock);
    net->entered_ns[this_rank][slot] = net->clock_ns[this_rank];
    pthread_mutex_unlock(&net->lock);
    const zpp_status status = __real_zpp_exchange(wait_ctx, err);
    pthread_mutex_lock(&net->lock);
    for (int r = first; r < first + net->locals; r++)
        if (net->entered_ns[r][slot] > net->clock_ns[this_rank]) net->clock_ns[this_rank] = net->entered_ns[r][slot];
    pthread_mutex_unlock(&net->lock);
    return status;
}

/* The lock is held while bytes leave, so that their receiver finds when they arrive. */
ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags) {
    const uint16_t own = port_of(own_name, fd);
    if (!own) return __real_send(fd, data, bytes, flags);
    pthread_mutex_lock(&net->lock);
    const ssize_t sent = __real_send(fd, data, bytes, flags);
    if (sent > 0) count_sent(fd, own, (size_t)sent);
    pthread_mutex_unlock(&net->lock);
    return sent;
}

ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags) {
    const uint16_t own = port_of(own_name, fd);
    if (!own) return __real_sendmsg(fd, message, flags);
    pthread_mutex_lock(&net->lock);
    const ssize_t sent = __real_sendmsg(fd, message, flags);
    if (sent > 0) count_sent(fd, own, (size_t)sent);
    pthread_mutex_unlock(&net->lock);
    return sent;
}

ssize_t __wrap_recv(int fd, void *data, size_t bytes, int flags) {
    const ssize_t got = __real_recv(fd, data, bytes, flags);
    const uint16_t own = got > 0 && !(flags & MSG_PEEK) ? port_of(own_name, fd) : 0;
    if (!own) return got;
    pthread_mutex_lock(&net->lock);
    count_received(fd, own, (size_t)got);
    pthread_mutex_unlock(&net->lock);
    return got;
}

static void own_port(int fd) {
    pthread_mutex_lock(&net->lock);
    net->rank_at_port[port_of(own_name, fd)] = this_rank;
    pthread_mutex_unlock(&net->lock);
}

int __wrap_connect(int fd, const struct sockaddr *address, socklen_t bytes) {
    const int result = __real_connect(fd, address, bytes);
    own_port(fd);
    return result;
}

int __wrap_listen(int fd, int most) {
    own_port(fd);
    return __real_listen(fd, most);
}

/* --- figures ------------------------------------------------------------------------------------------------------ */

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int descriptors(void) {
    DIR *const folder = opendir("/proc/self/fd");
    int found = 0;
    while (folder && readdir(folder)) found++;
    if (folder) closedir(folder);
    return found;
}

/* Resident memory of this process, without the tables of the simulation at `tables`, which all processes share. */
static long memory_kb(const void *tables) {
    FILE *const file = fopen("/proc/self/smaps", "r");
    char line[512];
    long resident = 0, kb = 0;
    bool counts = true;
    while (file && fgets(line, sizeof line, file)) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2) counts = begin != (uintptr_t)tables;
        else if (counts && sscanf(line, "Rss: %ld kB", &kb) == 1) resident += kb;
    }
    if (file) fclose(file);
    return resident;
}

struct step {
    double us, simulated_us;
    uint64_t messages, bytes, counters, most_messages;
};
/* What all processes share. */
struct measured {
    double start_us, ready_us;
    _Atomic int descriptors, descriptors_later, descriptors_long;
    _Atomic long memory_kb;
    struct step barrier, all_reduce, long_all_reduce;
    _Atomic uint64_t heard_us; /* of the last rank to hear */
    double died_us;
    pthread_barrier_t all;
    struct store store;
    struct network network;
};

/* Of this process before its ranks began. */
static int files_before, first_rank, full_ranks;
static long memory_before;

static double latest_us(int ranks) {
    uint64_t latest_ns = 0;
    for (int r = 0; r < ranks; r++)
        if (net->clock_ns[r] > latest_ns) latest_ns = net->clock_ns[r];
    return (double)latest_ns / 1e3;
}

/* Begin or end the figures of one kind of step, on rank 0, while the others wait. `sign`: -1 begins. */
static void take(struct step *step, int ranks, int sign) {
    uint64_t most = 0;
    pthread_mutex_lock(&net->lock);
    if (sign < 0) memset(net->clock_ns, 0, sizeof net->clock_ns);
    if (sign < 0) memset(net->entered_ns, 0, sizeof net->entered_ns);
    for (int r = 0; r < ranks; r++) {
        if (net->sent_by[r] > most) most = net->sent_by[r];
        if (sign < 0) net->sent_by[r] = 0;
    }
    step->us += sign * now_us() / STEPS;
    step->simulated_us = latest_us(ranks) / STEPS;
    step->messages += (uint64_t)sign * net->messages;
    step->bytes += (uint64_t)sign * net->bytes;
    step->counters += (uint64_t)sign * atomic_load(&net->raised);
    step->most_messages = (most + STEPS - 1) / STEPS;
    pthread_mutex_unlock(&net->lock);
}

/* `elems` of an all-reduce; 0: a barrier. */
static void run_steps(struct test_rank *me, struct step *step, size_t elems) {
    struct zpp_err err = ZPP_ERR_INIT;
    double *values = calloc(elems ? elems : 1, sizeof *values);
    for (int i = -1; i < STEPS; i++) { /* the first one makes connections, and does not count */
        if (i == 0) {
            test_join(me);
            if (me->rank == 0) take(step, me->ranks, -1);
            test_join(me);
        }
        if (!elems) CHECK_OK(zpp_barrier(me->comm, NULL, &err));
        else CHECK_OK(zpp_all_reduce(me->comm, values, elems, ZPP_F64, ZPP_SUM, NULL, &err));
    }
    test_join(me);
    if (me->rank == 0) take(step, me->ranks, 1);
    test_join(me);
    free(values);
}

/* What peers see of a process that is killed: its memory says so on its host, as its pidfd would, and its connections
 * close without a farewell. */
static void die(struct test_rank *me) {
    atomic_store(&zpp_control(me->comm, me->rank)->left, 1);
    for (int r = 0; me->comm->net && r < me->ranks; r++)
        for (int slot = 0; slot < ZPP_NET_SLOTS_MAX; slot++)
            if (me->comm->net->peer[r].link[slot] >= 0) shutdown(me->comm->net->peer[r].link[slot], SHUT_RDWR);
}

static void measure(struct test_rank *me) {
    struct measured *found = me->arg;
    struct zpp_err err = ZPP_ERR_INIT;
    test_join(me);
    if (me->rank == 0) found->ready_us = now_us() - found->start_us;
    if (me->rank == first_rank) found->descriptors += descriptors() - files_before;
    run_steps(me, &found->barrier, 0);
    run_steps(me, &found->all_reduce, 1);
    if (me->rank == first_rank) {
        found->descriptors_later += descriptors() - files_before;
        found->memory_kb += memory_kb(found) - memory_before;
    }
    test_join(me); /* before others allocate more */
    if (me->ranks <= LONG_RANKS) run_steps(me, &found->long_all_reduce, LONG_ELEMS);
    if (me->rank == first_rank) found->descriptors_long += descriptors() - files_before;
    test_join(me);
    if (me->rank == me->ranks - 1) {
        found->died_us = now_us();
        die(me);
    }
    while (me->rank < me->ranks - 1 && zpp_barrier(me->comm, NULL, &err) == ZPP_OK) continue;
    const uint64_t heard = (uint64_t)now_us();
    uint64_t last = atomic_load(&found->heard_us);
    while (me->rank < me->ranks - 1 && heard > last &&
           !atomic_compare_exchange_weak(&found->heard_us, &last, heard))
        continue;
    if (me->rank < me->ranks - 1) CHECK_EQUAL(err.rank, me->ranks - 1);
    test_join(me);
}

static void *rank_main(void *arg) {
    this_rank = ((struct test_rank *)arg)->rank;
    return test_rank_main(arg);
}

static void print_step(const char *name, const struct step *step, int steps) {
    printf(", \"%s_messages\": %.1f, \"%s_most_messages\": %lu, \"%s_bytes\": %.1f, \"%s_counters\": %.1f, "
           "\"%s_us\": %.1f, \"%s_simulated_us\": %.1f",
           name, (double)step->messages / steps, name, (unsigned long)step->most_messages, name,
           (double)step->bytes / steps, name, (double)step->counters / steps, name, step->us, name,
           step->simulated_us);
}

/* The ranks [first, end) as threads of this process. */
static void run_some(struct measured *found, int first, int end, int ranks) {
    static struct test_rank rank[RANKS_MOST];
    static pthread_t thread[RANKS_MOST];
    const struct zpp_store store = {&found->store, counted_set, counted_get};
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, STACK_BYTES);
    files_before = descriptors();
    memory_before = memory_kb(found);
    first_rank = first;
    for (int r = first; r < end; r++) {
        rank[r] = (struct test_rank){.rank = r,
                                     .ranks = ranks,
                                     .arg = found,
                                     .timeout_ns = 300 * TEST_SECOND_NS,
                                     .store = &store,
                                     .body = measure,
                                     .all = &found->all,
                                     .full_ranks = full_ranks};
        if (ranks > net->locals) snprintf(rank[r].host, sizeof rank[r].host, "h%d", r / net->locals);
        CHECK(pthread_create(&thread[r], &small, rank_main, &rank[r]) == 0);
    }
    for (int r = first; r < end; r++) pthread_join(thread[r], NULL);
}

static void make_shared(struct measured *found, int ranks) {
    pthread_mutexattr_t lock;
    pthread_barrierattr_t barrier;
    pthread_mutexattr_init(&lock);
    pthread_mutexattr_setpshared(&lock, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&found->store.lock, &lock);
    pthread_mutex_init(&found->network.lock, &lock);
    pthread_barrierattr_init(&barrier);
    pthread_barrierattr_setpshared(&barrier, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&found->all, &barrier, (unsigned)ranks);
}

static void print(const struct measured *found, int ranks, int hosts) {
    printf("{\"ranks\": %d, \"hosts\": %d, \"store_sets\": %lu, \"store_gets\": %lu, \"store_bytes\": %lu, "
           "\"descriptors\": %d, \"descriptors_later\": %d, \"descriptors_long\": %d, \"memory_kb\": %ld, "
           "\"start_us\": %.0f",
           ranks, hosts, atomic_load(&found->store.sets), atomic_load(&found->store.gets),
           atomic_load(&found->store.bytes_read), found->descriptors, found->descriptors_later,
           found->descriptors_long, found->memory_kb,
           found->ready_us);
    print_step("barrier", &found->barrier, STEPS);
    print_step("all_reduce", &found->all_reduce, STEPS);
    if (ranks <= LONG_RANKS) print_step("long_all_reduce", &found->long_all_reduce, STEPS);
    printf(", \"heard_ms\": %.2f}\n", ((double)atomic_load(&found->heard_us) - found->died_us) / 1e3);
}

int main(int argc, char **argv) {
    const int ranks = argc > 1 ? atoi(argv[1]) : 4, hosts = argc > 2 ? atoi(argv[2]) : 1;
    if (ranks < 2 || ranks > RANKS_MOST || hosts < 1 || ranks % hosts) {
        fprintf(stderr, "scale: %d ranks on %d hosts; wanted 2 to %d, as many on each\n", ranks, hosts, RANKS_MOST);
        return 2;
    }
    struct measured *found =
        mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(found != MAP_FAILED);
    make_shared(found, ranks);
    net = &found->network;
    net->latency_ns = (uint64_t)((argc > 3 ? atof(argv[3]) : 20) * 1e3);
    net->bytes_per_us = argc > 4 ? (uint64_t)atol(argv[4]) : 1250;
    net->locals = ranks / hosts;
    full_ranks = argc > 5 ? atoi(argv[5]) : 0;
    const int some = (PROCESS_RANKS > net->locals ? PROCESS_RANKS / net->locals : 1) * net->locals;
    int failed = 0, processes = 0;
    found->start_us = now_us();
    for (int first = 0; first < ranks; first += some, processes++) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child > 0) continue;
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        run_some(found, first, first + some < ranks ? first + some : ranks, ranks);
        _exit(0);
    }
    for (int status; processes > 0; processes--) {
        if (wait(&status) > 0 && status == 0) continue;
        failed = 1;
        break; /* the others end with this process */
    }
    if (!failed) print(found, ranks, hosts);
    return failed;
}
