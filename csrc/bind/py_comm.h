/* SPDX-License-Identifier: Apache-2.0
 *
 * What other files of bind need of the Python objects around the communicator:
 *
 *   Comm     py_comm.c         one group; the communicator inside of it: py_comm_handle.c
 *   Work     py_comm_work.c    one asynchronous collective
 *   Transfer py_comm_work.c    one send or receive
 *   Region   py_comm_memory.c  shared memory of all ranks
 *   Block    py_comm_memory.c  a block of this rank's arena
 *   Rows     py_rows.c         the exchange of rows of a mixture of experts
 *
 * Calls whose arguments are more than a tensor are read in py_comm_calls.c.
 *
 * Threads: the caller holds the GIL, except where noted.
 */
#ifndef ZPP_BIND_PY_COMM_H
#define ZPP_BIND_PY_COMM_H

#include <Python.h>
#include <stdbool.h>

#include "../comm/comm.h"

/* The communicator of a _C.Comm: borrowed, alive as long as the object is alive and not closed. NULL with TypeError or
 * zeropp.Error set. */
zpp_comm *zpp_py_comm_get(PyObject *comm);

/* --- between the files of py_comm -------------------------------------------------------------------------------- */

/* A torch store as rendezvous (py_comm_handle.c): takes the GIL itself; `store` is borrowed. */
struct zpp_store zpp_py_store_of(PyObject *store);
/* The log callback: ctx is a Python callable that takes one string. Takes the GIL itself. */
void zpp_py_log(void *callable, const char *message);

/* --- py_comm_handle.c --------------------------------------------------------------------------------------------- */

typedef struct Comm {
    PyObject_HEAD zpp_comm *comm; /* NULL after close */
    PyObject *log;
    int users; /* calls in progress, with the GIL released; guarded by the GIL */
    int holders; /* who use the communicator outside of calls here; guarded by the GIL */
    bool closing;
    struct zpp_traffic last; /* at close */
} Comm;
extern PyTypeObject *zpp_py_comm_type; /* written once, when the module is made */

/* Around every call that may wait: enter (NULL: closed, an error is set), release the GIL, call, take it, leave. A
 * group closed meanwhile by another thread is destroyed by the last one who leaves. */
zpp_comm *zpp_py_comm_acquire(PyObject *comm);
void zpp_py_comm_release(PyObject *comm);
void zpp_py_comm_destroy(Comm *self); /* no call is in progress */
/* For an owner of threads or objects that use the communicator beside all calls: a group that is closed meanwhile gives
 * them errors, and is destroyed once the last of them has dropped it. `comm` is not closed at hold. */
void zpp_py_comm_hold(PyObject *comm);
void zpp_py_comm_drop(PyObject *comm);

/* Work that needs the GIL, deferred by a thread that has none. */
struct zpp_py_deferred {
    struct zpp_py_deferred *next;
    void (*run)(struct zpp_py_deferred *item);
};
void zpp_py_defer(struct zpp_py_deferred *item); /* any thread, with or without the GIL */
void zpp_py_run_deferred(void);                  /* run what has come so far; with the GIL */

/* A call of this thread, within the timeout of the group (`timeout_ns` 0) or this one: None, or NULL with its error
 * set. */
PyObject *zpp_py_comm_run(PyObject *comm, const struct zpp_call *call);
PyObject *zpp_py_comm_run_within(PyObject *comm, const struct zpp_call *call, uint64_t timeout_ns);

/* --- the others --------------------------------------------------------------------------------------------------- */

/* New _C.Work for a submitted call. `keep` and `memory_owner` (both stolen, may be NULL) hold what the call points at,
 * until it is finished. */
PyObject *zpp_py_work_submit(PyObject *comm, const struct zpp_call *call, PyObject *keep, PyObject *memory_owner);

PyObject *zpp_py_comm_quant(PyObject *comm, PyObject *args); /* py_comm_calls.c */
PyObject *zpp_py_comm_submit_quant(PyObject *comm, PyObject *args);
/* A call of pieces: args (coll, dtype, root, dsts, srcs), lists of (ptr, bytes), one a rank; or of a gather into a
 * list: args (dst_ptrs, src_ptr, src_elems, dtype). New: what owns the arrays that `call` points at.
 * py_comm_calls.c */
PyObject *zpp_py_exchange_call(int ranks, PyObject *args, struct zpp_call *call);
PyObject *zpp_py_gather_call(int ranks, PyObject *args, struct zpp_call *call);
PyObject *zpp_py_region_new(PyObject *comm, int kind, size_t bytes);
PyObject *zpp_py_block_new(PyObject *comm, size_t bytes, bool here);
/* New _C.Transfer; args (ptr, bytes, rank, tag, keep). */
PyObject *zpp_py_transfer(PyObject *comm, PyObject *args, bool is_send);
/* Methods of Comm in py_comm_calls.c. */
PyObject *zpp_py_onebit_layout(PyObject *comm, PyObject *args);
PyObject *zpp_py_onebit_all_reduce(PyObject *comm, PyObject *args);
PyObject *zpp_py_heads(PyObject *comm, PyObject *words);
PyObject *zpp_py_heads_on_device(PyObject *module, PyObject *args); /* of the module */
int zpp_py_add_nccl(PyObject *module); /* py_nccl.c */
int zpp_py_add_comm_work(PyObject *module);
int zpp_py_add_comm_memory(PyObject *module);
int zpp_py_add_rows(PyObject *module); /* py_rows.c */

#endif
