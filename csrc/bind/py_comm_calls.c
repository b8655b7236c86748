/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls of the type Comm whose arguments are more than a tensor: a tensor a rank, quantised collectives
 * (csrc/comm/shm/coll_quant.c), the all-reduce of one bit an element (python/zeropp/comm/onebit.py), and the exchange
 * of heads for tokens (python/zeropp/comm/heads.py). Memory comes as addresses, all of it the caller's.
 */
#include "../comm/heads_cuda.h"
#include "../comm/onebit.h"
#include "op_entries.h"
#include "py_comm.h"
#include "raise.h"

/* --- a tensor a rank ---------------------------------------------------------------------------------------------- */

/* The arrays that such a call points at lie in a bytes object, which lives as long as the call. */
struct pieces {
    void *dsts[ZPP_RANKS_MAX];
    const void *srcs[ZPP_RANKS_MAX];
    size_t dst_bytes[ZPP_RANKS_MAX], src_bytes[ZPP_RANKS_MAX];
};

static int read_pieces(PyObject *list, int ranks, void **pointers, size_t *bytes) {
    const Py_ssize_t length = PySequence_Size(list);
    if (length < 0) return -1;
    if (length != ranks)
        return PyErr_Format(PyExc_ValueError, "comm: %zd pieces, wanted one a rank, %d", length, ranks), -1;
    for (Py_ssize_t r = 0; r < length; r++) {
        PyObject *pair = PySequence_GetItem(list, r);
        PyObject *at = pair ? PySequence_GetItem(pair, 0) : NULL, *size = at ? PySequence_GetItem(pair, 1) : NULL;
        const Py_ssize_t piece_bytes = size ? PyLong_AsSsize_t(size) : -1;
        pointers[r] = size ? PyLong_AsVoidPtr(at) : NULL;
        bytes[r] = (size_t)piece_bytes;
        Py_XDECREF(pair);
        Py_XDECREF(at);
        Py_XDECREF(size);
        if (PyErr_Occurred()) return -1;
        if (piece_bytes < 0) return PyErr_Format(PyExc_ValueError, "comm: a piece of %zd bytes", piece_bytes), -1;
    }
    return 0;
}

PyObject *zpp_py_exchange_call(int ranks, PyObject *args, struct zpp_call *call) {
    PyObject *dsts, *srcs;
    unsigned long long rows = 0;
    int coll, dtype, root;
    if (!PyArg_ParseTuple(args, "iiiOO|K", &coll, &dtype, &root, &dsts, &srcs, &rows)) return NULL;
    PyObject *owner = PyBytes_FromStringAndSize(NULL, sizeof(struct pieces));
    if (!owner) return NULL;
    struct pieces *pieces = (struct pieces *)(void *)PyBytes_AsString(owner);
    if (read_pieces(dsts, ranks, pieces->dsts, pieces->dst_bytes) != 0 ||
        read_pieces(srcs, ranks, (void **)pieces->srcs, pieces->src_bytes) != 0) {
        Py_DECREF(owner);
        return NULL;
    }
    *call = (struct zpp_call){.coll = (enum zpp_coll)coll,
                              .dtype = (zpp_dtype)dtype,
                              .root = root,
                              .rows = rows,
                              .dsts = pieces->dsts,
                              .srcs = pieces->srcs,
                              .dst_bytes = pieces->dst_bytes,
                              .src_bytes = pieces->src_bytes};
    return owner;
}

/* Gather into one tensor a rank: dsts is a list of addresses. */
PyObject *zpp_py_gather_call(int ranks, PyObject *args, struct zpp_call *call) {
    PyObject *dsts;
    long long src;
    Py_ssize_t elems;
    int dtype;
    if (!PyArg_ParseTuple(args, "OLni", &dsts, &src, &elems, &dtype)) return NULL;
    const Py_ssize_t length = PySequence_Size(dsts);
    if (length < 0) return NULL;
    if (length != ranks || elems < 0)
        return PyErr_Format(PyExc_ValueError, "comm: %zd destinations of %zd elements, wanted one a rank, %d", length,
                            elems, ranks);
    PyObject *owner = PyBytes_FromStringAndSize(NULL, sizeof(struct pieces));
    if (!owner) return NULL;
    struct pieces *pieces = (struct pieces *)(void *)PyBytes_AsString(owner);
    for (Py_ssize_t r = 0; r < length; r++) {
        PyObject *at = PySequence_GetItem(dsts, r);
        pieces->dsts[r] = at ? PyLong_AsVoidPtr(at) : NULL;
        Py_XDECREF(at);
        if (PyErr_Occurred()) {
            Py_DECREF(owner);
            return NULL;
        }
    }
    *call = (struct zpp_call){.coll = ZPP_COLL_ALL_GATHER,
                              .dtype = (zpp_dtype)dtype,
                              .dsts = pieces->dsts,
                              .src = (void *)(uintptr_t)src,
                              .elems = (size_t)elems};
    return owner;
}

/* --- quantised ---------------------------------------------------------------------------------------------------- */

static int read_call(PyObject *args, const char *format, struct zpp_call *call, PyObject **keep) {
    long long dst, src, elems, block_elems;
    int coll, dtype, op;
    *call = (struct zpp_call){0};
    if (!PyArg_ParseTuple(args, format, &coll, &dtype, &op, &dst, &src, &elems, &call->bits, &block_elems,
                          &call->node_ranks, keep))
        return -1;
    if (elems < 0 || block_elems < 0)
        return PyErr_Format(PyExc_ValueError, "comm: %lld elements in blocks of %lld", elems, block_elems), -1;
    if (coll < ZPP_COLL_ALL_GATHER_QUANT || coll > ZPP_COLL_ALL_REDUCE_QUANT)
        return PyErr_Format(PyExc_ValueError, "comm: collective %d is not a quantised one", coll), -1;
    call->coll = (enum zpp_coll)coll;
    call->dtype = (zpp_dtype)dtype;
    call->op = (zpp_reduce_op)op;
    call->dst = (void *)(uintptr_t)dst;
    call->src = (const void *)(uintptr_t)src;
    call->elems = (size_t)elems;
    call->block_elems = (size_t)block_elems;
    return 0;
}

PyObject *zpp_py_comm_quant(PyObject *self, PyObject *args) {
    struct zpp_call call;
    PyObject *none;
    return read_call(args, "iiiLLLiLi", &call, &none) == 0 ? zpp_py_comm_run(self, &call) : NULL;
}

PyObject *zpp_py_comm_submit_quant(PyObject *self, PyObject *args) {
    struct zpp_call call;
    PyObject *keep;
    if (read_call(args, "iiiLLLiLiO", &call, &keep) != 0) return NULL;
    Py_INCREF(keep);
    return zpp_py_work_submit(self, &call, keep, NULL);
}

/* --- one bit an element ------------------------------------------------------------------------------------------- */

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
    return zpp_py_result(status, &err);
}

/* --- heads for tokens --------------------------------------------------------------------------------------------- */

enum { HEADS_WORDS = 4, TENSOR_WORDS = 10 }; /* before the lengths; of a tensor, before its spans */

static struct zpp_heads_place read_place(const int64_t *words) {
    return (struct zpp_heads_place){(void *)(uintptr_t)words[0], (size_t)words[1], (size_t)words[2], (size_t)words[3]};
}

/* See python/zeropp/comm/heads.py for the words. */
static int read_heads(const int64_t *words, Py_ssize_t count, int ranks, struct zpp_heads_job *job) {
    const Py_ssize_t tensor_words = TENSOR_WORDS + 2 * ranks, before = HEADS_WORDS + ranks;
    const int64_t tensors = count > before ? words[3] : 0;
    if (tensors < 1 || tensors > ZPP_HEADS_TENSORS || count != before + tensors * tensor_words)
        return PyErr_Format(PyExc_ValueError, "comm: an exchange of heads of %zd words between %d ranks", count, ranks),
               -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (words[i] < 0) return PyErr_Format(PyExc_ValueError, "comm: word %zd of heads is negative", i), -1;
    job->to_tokens = words[0] != 0;
    job->dtype = (zpp_dtype)words[1];
    job->batch = (size_t)words[2];
    job->tensors = (int)tensors;
    for (int r = 0; r < ranks; r++) job->lengths[r] = (size_t)words[HEADS_WORDS + r];
    for (int i = 0; i < job->tensors; i++) {
        const int64_t *at = words + before + i * tensor_words;
        struct zpp_heads_tensor *tensor = &job->tensor[i];
        tensor->cut = read_place(at);
        tensor->whole = read_place(at + 4);
        tensor->heads = (size_t)at[8];
        tensor->width_bytes = (size_t)at[9];
        for (int r = 0; r < ranks; r++) {
            tensor->begin[r] = (size_t)at[TENSOR_WORDS + r];
            tensor->end[r] = (size_t)at[TENSOR_WORDS + ranks + r];
        }
    }
    return 0;
}

PyObject *zpp_py_heads(PyObject *object, PyObject *words) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    struct zpp_heads_job job;
    char *bytes = NULL;
    Py_ssize_t length = 0;
    zpp_comm *comm = zpp_py_comm_get(object);
    if (!comm || PyBytes_AsStringAndSize(words, &bytes, &length) != 0) return NULL;
    if (read_heads((const int64_t *)(const void *)bytes, length / (Py_ssize_t)sizeof(int64_t), zpp_comm_ranks(comm),
                   &job) != 0 ||
        !zpp_py_comm_acquire(object))
        return NULL;
    zpp_py_wait_init(&wait, zpp_comm_timeout_ns(comm));
    PyThreadState *state = PyEval_SaveThread();
    zpp_pool *pool = zpp_op_pool_take();
    const zpp_status status = zpp_heads_exchange(comm, &job, pool, &wait, &err);
    zpp_op_pool_give(pool);
    PyEval_RestoreThread(state);
    zpp_py_comm_release(object);
    return zpp_py_result(status, &err);
}

/* Enqueue the copies before the messages travel (into them, and of what no other rank has), or those out of them. */
static zpp_status copy_heads(const struct zpp_heads_job *job, int rank, int ranks, struct zpp_heads_on_cuda *on,
                             uint8_t *block, bool came, struct zpp_err *err) {
    const struct zpp_heads_plan plan = {job, rank, ranks, zpp_heads_cuda_copy, on};
    const void *pieces[ZPP_RANKS_MAX];
    zpp_status status = zpp_heads_check(job, ranks, err);
    for (int r = 0; r < ranks; r++) {
        pieces[r] = block;
        if (came && r != rank) block += zpp_heads_message_bytes(job, r, rank);
    }
    if (status == ZPP_OK && !came) status = zpp_heads_pack(&plan, block, err);
    if (status == ZPP_OK) status = zpp_heads_read(&plan, came ? pieces : NULL, err);
    return status == ZPP_OK ? zpp_heads_cuda_flush(on, err) : status;
}

PyObject *zpp_py_heads_on_device(PyObject *module, PyObject *args) {
    (void)module;
    const char *type;
    PyObject *words;
    char *bytes = NULL;
    int index, rank, ranks, came;
    Py_ssize_t length = 0;
    unsigned long long block;
    int32_t torch_type;
    struct zpp_heads_job job;
    struct zpp_heads_on_cuda on = {.blocks = 0};
    struct zpp_err err = ZPP_ERR_INIT;
    if (!PyArg_ParseTuple(args, "siiiOKp:heads_on_device", &type, &index, &rank, &ranks, &words, &block, &came) ||
        PyBytes_AsStringAndSize(words, &bytes, &length) != 0)
        return NULL;
    if (ranks < 1 || ranks > ZPP_RANKS_MAX || rank < 0 || rank >= ranks)
        return PyErr_Format(PyExc_ValueError, "comm: rank %d of %d", rank, ranks);
    if (read_heads((const int64_t *)(const void *)bytes, length / (Py_ssize_t)sizeof(int64_t), ranks, &job))
        return NULL;
    zpp_status status = zpp_accelerator_type(type, &torch_type, &err);
    if (status == ZPP_OK) status = zpp_accelerator_current(torch_type, index, &on.device, &on.native, &err);
    if (status == ZPP_OK)
        status = copy_heads(&job, rank, ranks, &on, (uint8_t *)(uintptr_t)block, came != 0, &err);
    return zpp_py_result(status, &err);
}
