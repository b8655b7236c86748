/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated GPU (README.md, docs/design/0036-simulated-gpu.md): what tests and torch_sim.cpp call beside the
 * driver's own functions. csrc/ calls the rows of cuda_api.def and nccl_api.def only.
 *
 * A stream is a queue of operations. One executor thread runs them all, and takes the head of a stream only when it
 * must:
 *
 *   lazy stream    its head runs when the host waits for it, or when a stream that has to go on waits for it
 *   eager stream   its head runs as soon as its own waits allow, inside the call that enqueued it
 *
 * A schedule says which streams are lazy: bit n of `lazy` is stream n, in order of creation, 0 the default stream.
 *
 * Functions return 0, or the CUresult that the driver would. Threads: any.
 */
#ifndef ZPP_TESTS_SIM_H
#define ZPP_TESTS_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *sim_stream;
typedef struct CUevent_st *sim_event;

enum { SIM_MOST_STREAMS = 64, SIM_MOST_DEVICES = 8 };

/* --- schedules ---------------------------------------------------------------------------------------------------- */

/* Wait for all streams, then use this schedule. `seed` != 0: after a call, a random lazy stream may run one operation.
 */
void sim_set_schedule(uint64_t lazy, uint64_t seed);
/* All streams of a device share one queue, in the order of the host's calls (CUDA_DEVICE_MAX_CONNECTIONS=1). */
void sim_set_one_queue(bool one_queue);
/* Run everything. This is the test's own wait, and is not counted as a wait of the host. */
void sim_finish(void);
/* The same for at most `ms` milliseconds. False: `stuck` tells which stream is at which operation. */
bool sim_finish_within(uint64_t ms, char *stuck, size_t stuck_bytes);
/* Stop for good, at the end of the program: what is still enqueued is not run, and no call waits any more. */
void sim_stop(void);

/* --- streams and events ------------------------------------------------------------------------------------------- */

sim_stream sim_default_stream(int device);
int sim_stream_create(int device, sim_stream *out);
int sim_stream_destroy(sim_stream stream); /* what it holds still runs */
int sim_stream_number(sim_stream stream);
int sim_stream_query(sim_stream stream);
int sim_stream_synchronize(sim_stream stream);
int sim_device_synchronize(int device);
int sim_event_create(sim_event *out);
int sim_event_destroy(sim_event event);
int sim_event_record(sim_event event, sim_stream stream);
int sim_event_query(sim_event event);
int sim_event_synchronize(sim_event event);
int sim_stream_wait(sim_stream stream, sim_event event);
/* Streams are captured to a graph from now on, as cuStreamIsCapturing says: 0 none, 1 active, 2 invalidated. What is
 * enqueued runs all the same. */
void sim_capture(int status);

/* --- operations. `name` is a string that outlives the operation; `arg` belongs to the operation ------------------- */

/* A kernel, or a host function. */
int sim_enqueue(sim_stream stream, void (*run)(void *arg), void *arg, const char *name);
/* What other ranks take part in: `attempt` is called again until it returns true. */
int sim_enqueue_attempt(sim_stream stream, bool (*attempt)(void *arg), void *arg, const char *name);
int sim_enqueue_copy(sim_stream stream, void *dst, const void *src, size_t bytes);
/* One call that waits until (int64_t)(*counter - value) >= 0 for each of them: the comparison is cyclic, as the
 * driver's. */
int sim_enqueue_wait_values(sim_stream stream, uint64_t *const *counters, const uint64_t *values, size_t count);
int sim_enqueue_write_value(sim_stream stream, uint64_t *counter, uint64_t value);

/* --- memory ------------------------------------------------------------------------------------------------------- */

enum sim_memory { SIM_PAGEABLE, SIM_PINNED, SIM_DEVICE };
enum sim_memory sim_memory_of(const void *memory);
int sim_alloc(int device, size_t bytes, void **out); /* filled with NaN; 256-byte aligned */
int sim_free(void *memory);                          /* waits for the device's streams */
int sim_host_alloc(size_t bytes, void **out);        /* page-locked */
int sim_host_free(void *memory);
/* Ranks that are threads share their mappings under ThreadSanitizer. With true, each of them may register the same
 * memory; otherwise the second one is an error, as on a GPU. */
void sim_share_registrations(bool shared);

/* --- what happened ------------------------------------------------------------------------------------------------ */

struct sim_counts {
    uint64_t kernels, copies, records, waits, counters, queries, collectives; /* enqueued, or asked */
    uint64_t host_waits;
    uint64_t executor_ns; /* processor time of the executor: what the host would not spend beside a GPU */
    int64_t streams, events, modules, contexts; /* that exist now */
    int64_t blocks, block_bytes;                /* device and page-locked memory that is allocated now */
    int64_t comms, aborts;                      /* communicators that exist now; how many were aborted */
};
void sim_get_counts(struct sim_counts *out);
int sim_contexts_pushed(void); /* by this thread, and not popped */

/* Waits of the host, by reason: the driver's function, or what sim_because says. Returns how many reasons there are. */
struct sim_host_wait {
    char reason[64];
    uint64_t count;
};
size_t sim_host_waits(struct sim_host_wait *out, size_t most);
/* Name the reason of this thread's next waits; NULL: the driver's function. Returns the reason before. */
const char *sim_because(const char *reason);

/* --- faults that a test injects; look the variable up with dlsym -------------------------------------------------- */

struct sim_faults {
    volatile int fail_copy;   /* the next cuMemcpyAsync returns this CUresult */
    volatile int stall;       /* nothing of NCCL is ever done */
    volatile int stall_init;  /* ranks never meet in NCCL */
    volatile int late_launch; /* a group of NCCL calls is in progress first */
    volatile int async_error; /* what ncclCommGetAsyncError finds */
    volatile int refuse_id;   /* ncclGetUniqueId fails */
};
extern struct sim_faults sim_faults;

/* A wait that a stream is about to be given: for an event, recorded last on `after`, or for a counter. Where the
 * function returns true it is left out, as a bug of the product would. NULL: none is. */
struct sim_wait {
    sim_stream stream, after; /* after: NULL with a counter */
    const uint64_t *counter;  /* NULL with an event */
};
extern bool (*sim_leave_out)(const struct sim_wait *wait);
/* From now on, waits of stream number `waiter`, or of SIM_HOST, for events recorded on
 * stream number `source` do nothing, as if the product had left them out. SIM_NOBODY: all wait again. */
enum { SIM_HOST = -1, SIM_NOBODY = -2 };
void sim_leave_out_between(int waiter, int source);
/* The same for waits for the counter at this line of its page (csrc/comm/counters.h). */
void sim_leave_out_word(int word);

/* --- kernels that a test brings, beside those of csrc/ops (kernels.c) ----------------------------------------------
 */

struct sim_kernel {
    const char *name;
    size_t arg_bytes; /* a kernel takes one struct, or one number */
    void (*run_thread)(const void *arg, unsigned int block, unsigned int thread);
    bool barriers; /* it calls __syncthreads */
    struct sim_kernel *next;
};
void sim_kernel_register(struct sim_kernel *kernel); /* borrowed for good */
void sim_barrier(void); /* __syncthreads: the other threads of the block run until they are here, too */

#ifdef __cplusplus
}
#endif
#endif
