/* SPDX-License-Identifier: Apache-2.0
 *
 * Comm's compressed all-reduce: memory comes as addresses, all of it the caller's (python/zeropp/comm/onebit.py).
 */
#include "../comm/onebit.h"
#include "op_entries.h"
#include "py_comm.h"
#include "pywait.h"
#include "raise.h"

static int layout_of(const zpp_comm *comm, Py_ssize_t elems, Py_ssize_t chunk_elems, struct zpp_onebit_layout *out) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (elems < 0 || chunk_elems < 0)
        return PyErr_Format(PyExc_ValueError, "comm: %zd elements in chunks of %zd", elems, chunk_elems), -1;
    if (zpp_onebit_layout_make(zpp_comm_ranks(comm), (size_t)elems, (size_t)chunk_elems, out, &err) == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

PyObject *zpp_py_onebit_layout(PyObject *object, PyObject *args) {
    Py_ssize_t elems, chunk_elems;
    struct zpp_onebit_layout layout;
    const zpp_comm *comm = zpp_py_comm_get(object);
    if (!comm || !PyArg_ParseTuple(args, "nn", &elems, &chunk_elems) || layout_of(comm, elems, chunk_elems, &layout))
        return NULL;
    return Py_BuildValue("(nnnn)", (Py_ssize_t)layout.shard_elems, (Py_ssize_t)layout.message_bytes,
                         (Py_ssize_t)zpp_onebit_scratch_bytes(&layout), (Py_ssize_t)zpp_onebit_result_bytes(&layout));
}

PyObject *zpp_py_onebit_all_reduce(PyObject *object, PyObject *args) {
    Py_ssize_t elems, chunk_elems;
    unsigned long long src, worker_error, server_error, scratch, result;
    int dtype, gather;
    struct zpp_onebit_job job;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_comm *comm = zpp_py_comm_get(object);
    if (!comm || !PyArg_ParseTuple(args, "nnKiKKKKp", &elems, &chunk_elems, &src, &dtype, &worker_error, &server_error,
                                   &scratch, &result, &gather))
        return NULL;
    if (layout_of(comm, elems, chunk_elems, &job.layout) || !zpp_py_comm_acquire(object)) return NULL;
    job.src = (const void *)(uintptr_t)src;
    job.src_dtype = (zpp_dtype)dtype;
    job.worker_error = (float *)(uintptr_t)worker_error;
    job.server_error = (float *)(uintptr_t)server_error;
    job.scratch = (void *)(uintptr_t)scratch;
    job.result = (void *)(uintptr_t)result;
    job.gather = gather;
    zpp_py_wait_init(&wait, zpp_comm_timeout_ns(comm));
    PyThreadState *state = PyEval_SaveThread();
    zpp_pool *pool = zpp_op_pool_take();
    const zpp_status status = zpp_onebit_all_reduce(comm, &job, pool, &wait, &err);
    zpp_op_pool_give(pool);
    PyEval_RestoreThread(state);
    zpp_py_comm_release(object);
    if (status != ZPP_OK) return zpp_py_raise(&err);
    Py_RETURN_NONE;
}
