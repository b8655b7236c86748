/* SPDX-License-Identifier: Apache-2.0
 *
 * The type Comm: one group of ranks. Tensors come as addresses and element counts, dtypes and operations as the codes
 * of COMM_DTYPES and COMM_OPS; python/zeropp/comm/group.py turns tensors into these. Every call that may wait
 * releases the GIL and can be interrupted by a signal handler.
 *
 * Comm(store, rank, ranks, timeout_s, name, log=None)
 */
#include "py_comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "raise.h"

/* --- life -------------------------------------------------------------------------------------------------------- */

/* The variables of the environment about networks. Copied: another thread may change the environment while ranks
 * meet. */
struct network_words {
    char host_id[64], interface[32], toward[256];
};

static void copy_word(char *out, size_t capacity, const char *name, const char *other) {
    const char *value = getenv(name);
    if ((!value || !value[0]) && other) value = getenv(other);
    snprintf(out, capacity, "%s", value ? value : "");
}

static struct zpp_network_options network_options(struct network_words *words) {
    const char *family = getenv("ZEROPP_IP_FAMILY"), *connections = getenv("ZEROPP_TCP_CONNECTIONS");
    const char *full_ranks = getenv("ZEROPP_FULL_RANKS");
    copy_word(words->host_id, sizeof words->host_id, "ZEROPP_HOST_ID", NULL);
    copy_word(words->interface, sizeof words->interface, "ZEROPP_IFNAME", "GLOO_SOCKET_IFNAME");
    copy_word(words->toward, sizeof words->toward, "MASTER_ADDR", NULL);
    return (struct zpp_network_options){
        .host_id = words->host_id,
        .interface = words->interface,
        .toward = words->toward,
        .family = family && family[0] ? (family[1] ? -1 : family[0] - '0') : 0,
        .connections = connections && connections[0] ? (int)strtol(connections, NULL, 10) : 0,
        .full_ranks = full_ranks && full_ranks[0] ? (int)strtol(full_ranks, NULL, 10) : 0,
    };
}

static int comm_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"store", "rank", "ranks", "timeout_s", "name", "log", NULL};
    Comm *self = (Comm *)object;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    PyObject *store, *log = Py_None;
    double timeout_s;
    int rank, ranks;
    const char *name;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oiids|O", names, &store, &rank, &ranks, &timeout_s, &name, &log))
        return -1;
    if (self->comm) return PyErr_Format(PyExc_RuntimeError, "Comm: made once, used for ever"), -1;
    const struct zpp_store rendezvous = zpp_py_store_of(store);
    struct network_words words;
    zpp_py_wait_init(&wait, 0);
    const struct zpp_comm_options options = {
        .rank = rank,
        .ranks = ranks,
        .timeout_ns = timeout_s > 0.0 && timeout_s < 1e9 ? (uint64_t)(timeout_s * 1e9) : 0,
        .name = name,
        .log = log == Py_None ? NULL : zpp_py_log,
        .log_ctx = log == Py_None ? NULL : log,
        .wait = &wait,
        .network = network_options(&words),
    };
    PyThreadState *state = PyEval_SaveThread();
    zpp_comm *comm = NULL;
    const zpp_status status = zpp_comm_create(&options, &rendezvous, &comm, &err);
    PyEval_RestoreThread(state);
    if (status != ZPP_OK) return zpp_py_raise(&err), -1;
    Py_INCREF(log);
    self->log = log;
    self->comm = comm;
    return 0;
}

static PyObject *comm_close(PyObject *object, PyObject *none) {
    (void)none;
    Comm *self = (Comm *)object;
    if (!self->comm || self->closing) Py_RETURN_NONE;
    self->closing = true;
    if (self->users)
        zpp_comm_abort(self->comm, "it was closed while a call was in progress");
    else if (!self->holders)
        zpp_py_comm_destroy(self);
    else
        zpp_comm_leave(self->comm);
    Py_RETURN_NONE;
}

static void comm_dealloc(PyObject *object) {
    Comm *self = (Comm *)object;
    PyTypeObject *type = Py_TYPE(object);
    zpp_py_comm_destroy(self);
    Py_XDECREF(self->log);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* --- collectives, blocking --------------------------------------------------------------------------------------- */

/* Integers of a call. PyArg_ParseTuple costs more than a small collective does. */
static int read_ints(PyObject *const *args, Py_ssize_t count, Py_ssize_t wanted, const char *signature,
                     long long *out) {
    if (count != wanted)
        return PyErr_Format(PyExc_TypeError, "%s: %zd arguments, wanted %zd", signature, count, wanted), -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        out[i] = PyLong_AsLongLong(args[i]);
        if (out[i] == -1 && PyErr_Occurred()) return -1;
        if (out[i] < 0)
            return PyErr_Format(PyExc_ValueError, "%s: argument %zd is %lld, wanted at least 0", signature, i + 1,
                                out[i]),
                   -1;
    }
    return 0;
}

static void *address(long long value) { return (void *)(uintptr_t)value; }

/* Run a collective whose arguments are integers. `fields` has a letter for each of them: d dst, s src, e elems, t
 * dtype, o op, r root. Those after the first `least` may be left out; a dtype that is left out is uint8. */
static PyObject *run_ints(PyObject *self, PyObject *const *args, Py_ssize_t count, enum zpp_coll coll,
                          const char *fields, Py_ssize_t least, const char *signature) {
    enum { MOST = 5 };
    long long v[MOST];
    const Py_ssize_t all = (Py_ssize_t)strlen(fields), wanted = count == all ? all : least;
    struct zpp_call call = {.coll = coll, .dtype = ZPP_U8};
    if (read_ints(args, count, wanted, signature, v) != 0) return NULL;
    for (Py_ssize_t i = 0; i < wanted; i++) {
        switch (fields[i]) {
        case 'd': call.dst = address(v[i]); break;
        case 's': call.src = address(v[i]); break;
        case 'e': call.elems = (size_t)v[i]; break;
        case 't': call.dtype = (zpp_dtype)v[i]; break;
        case 'o': call.op = (zpp_reduce_op)v[i]; break;
        default: call.root = (int)v[i];
        }
    }
    return zpp_py_comm_run(self, &call);
}

static PyObject *all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return run_ints(self, args, count, ZPP_COLL_ALL_REDUCE, "deto", 4, "all_reduce(ptr, elems, dtype, op)");
}

static PyObject *reduce(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return run_ints(self, args, count, ZPP_COLL_REDUCE, "detor", 5, "reduce(ptr, elems, dtype, op, root)");
}

static PyObject *all_gather(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return run_ints(self, args, count, ZPP_COLL_ALL_GATHER, "dset", 3,
                    "all_gather(dst_ptr, src_ptr, src_elems[, dtype])");
}

static PyObject *reduce_scatter(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return run_ints(self, args, count, ZPP_COLL_REDUCE_SCATTER, "dseto", 5,
                    "reduce_scatter(dst_ptr, src_ptr, dst_elems, dtype, op)");
}

static PyObject *broadcast(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return run_ints(self, args, count, ZPP_COLL_BROADCAST, "dert", 3, "broadcast(ptr, elems, root[, dtype])");
}

static PyObject *barrier(PyObject *self, PyObject *none) {
    (void)none;
    const struct zpp_call call = {.coll = ZPP_COLL_BARRIER};
    return zpp_py_comm_run(self, &call);
}

static PyObject *barrier_within(PyObject *self, PyObject *args) {
    const struct zpp_call call = {.coll = ZPP_COLL_BARRIER};
    double timeout_s;
    if (!PyArg_ParseTuple(args, "d", &timeout_s)) return NULL;
    return zpp_py_comm_run_within(self, &call, timeout_s > 0.0 ? (uint64_t)(timeout_s * 1e9) : 1);
}

/* --- all-to-all, gather, scatter: arguments are read in py_comm_calls.c ------------------------------------------ */

static PyObject *exchange_call(PyObject *object, PyObject *args, struct zpp_call *call) {
    const zpp_comm *comm = zpp_py_comm_get(object);
    return comm ? zpp_py_exchange_call(zpp_comm_ranks(comm), args, call) : NULL;
}

static PyObject *gather_call(PyObject *object, PyObject *args, struct zpp_call *call) {
    const zpp_comm *comm = zpp_py_comm_get(object);
    return comm ? zpp_py_gather_call(zpp_comm_ranks(comm), args, call) : NULL;
}

static PyObject *exchange(PyObject *self, PyObject *args) {
    struct zpp_call call;
    PyObject *owner = exchange_call(self, args, &call);
    PyObject *answer = owner ? zpp_py_comm_run(self, &call) : NULL;
    Py_XDECREF(owner);
    return answer;
}

static PyObject *all_gather_into(PyObject *self, PyObject *args) {
    struct zpp_call call;
    PyObject *owner = gather_call(self, args, &call);
    PyObject *answer = owner ? zpp_py_comm_run(self, &call) : NULL;
    Py_XDECREF(owner);
    return answer;
}

/* --- asynchronous ------------------------------------------------------------------------------------------------ */

static PyObject *submit(PyObject *self, PyObject *args) {
    long long dst, src, elems;
    int coll, dtype, op, root;
    PyObject *keep;
    if (!PyArg_ParseTuple(args, "iiiiLLLO", &coll, &dtype, &op, &root, &dst, &src, &elems, &keep)) return NULL;
    if (elems < 0) return PyErr_Format(PyExc_ValueError, "submit: %lld elements", elems);
    const struct zpp_call call = {.coll = (enum zpp_coll)coll,
                                  .dtype = (zpp_dtype)dtype,
                                  .op = (zpp_reduce_op)op,
                                  .root = root,
                                  .dst = address(dst),
                                  .src = address(src),
                                  .elems = (size_t)elems};
    if (coll >= ZPP_COLL_ALL_TO_ALL && coll <= ZPP_COLL_SCATTER)
        return PyErr_Format(PyExc_ValueError, "submit: collective %d wants submit_exchange", coll);
    Py_INCREF(keep);
    return zpp_py_work_submit(self, &call, keep, NULL);
}

static PyObject *submit_exchange(PyObject *self, PyObject *args) {
    struct zpp_call call;
    const Py_ssize_t count = PyTuple_Size(args);
    if (count != 6 && count != 7)
        return PyErr_Format(PyExc_TypeError,
                            "submit_exchange(coll, dtype, root, dsts, srcs[, rows], keep): %zd arguments", count);
    PyObject *first = PyTuple_GetSlice(args, 0, count - 1), *keep = PyTuple_GetItem(args, count - 1);
    PyObject *owner = first ? exchange_call(self, first, &call) : NULL;
    Py_XDECREF(first);
    if (!owner) return NULL;
    Py_INCREF(keep);
    return zpp_py_work_submit(self, &call, keep, owner);
}

static PyObject *submit_gather(PyObject *self, PyObject *args) {
    struct zpp_call call;
    const Py_ssize_t count = PyTuple_Size(args);
    if (count != 5)
        return PyErr_Format(PyExc_TypeError, "submit_gather(dsts, src_ptr, src_elems, dtype, keep): %zd arguments",
                            count);
    PyObject *first = PyTuple_GetSlice(args, 0, 4), *keep = PyTuple_GetItem(args, 4);
    PyObject *owner = first ? gather_call(self, first, &call) : NULL;
    Py_XDECREF(first);
    if (!owner) return NULL;
    Py_INCREF(keep);
    return zpp_py_work_submit(self, &call, keep, owner);
}

/* --- the rest ---------------------------------------------------------------------------------------------------- */

static PyObject *send(PyObject *self, PyObject *args) { return zpp_py_transfer(self, args, true); }

static PyObject *recv(PyObject *self, PyObject *args) { return zpp_py_transfer(self, args, false); }

static PyObject *set_timeout(PyObject *self, PyObject *args) {
    double timeout_s;
    zpp_comm *comm = zpp_py_comm_get(self);
    if (!comm || !PyArg_ParseTuple(args, "d", &timeout_s)) return NULL;
    zpp_comm_set_timeout(comm, timeout_s > 0.0 && timeout_s < 1e9 ? (uint64_t)(timeout_s * 1e9) : 0);
    Py_RETURN_NONE;
}

static PyObject *set_name(PyObject *self, PyObject *args) {
    const char *name;
    zpp_comm *comm = zpp_py_comm_get(self);
    if (!comm || !PyArg_ParseTuple(args, "s", &name)) return NULL;
    zpp_comm_set_name(comm, name);
    Py_RETURN_NONE;
}

static PyObject *set_job_ranks(PyObject *self, PyObject *list) {
    int numbers[ZPP_RANKS_MAX];
    zpp_comm *comm = zpp_py_comm_get(self);
    if (!comm) return NULL;
    if (!PyList_Check(list) || PyList_Size(list) != zpp_comm_ranks(comm))
        return PyErr_Format(PyExc_ValueError, "comm: job ranks of a group of %d ranks are not a list of so many",
                            zpp_comm_ranks(comm));
    for (int rank = 0; rank < zpp_comm_ranks(comm); rank++)
        numbers[rank] = (int)PyLong_AsLong(PyList_GetItem(list, rank));
    if (PyErr_Occurred()) return NULL;
    zpp_comm_set_job_ranks(comm, numbers);
    Py_RETURN_NONE;
}

static PyObject *link_with(PyObject *self, PyObject *other) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_comm *comm = zpp_py_comm_get(self), *with = comm ? zpp_py_comm_get(other) : NULL;
    if (!with) return NULL;
    return zpp_py_result(zpp_comm_link(comm, with, &err), &err);
}

static PyObject *look_for_dead(PyObject *self, PyObject *none) {
    (void)none;
    zpp_comm *comm = zpp_py_comm_get(self);
    if (!comm) return NULL;
    zpp_comm_look_for_dead(comm);
    Py_RETURN_NONE;
}

static PyObject *comm_abort(PyObject *object, PyObject *args) {
    const char *message = NULL;
    if (!PyArg_ParseTuple(args, "|z", &message)) return NULL;
    zpp_comm *comm = ((Comm *)object)->comm;
    if (comm) zpp_comm_abort(comm, message); /* also while another thread waits in here: that is what it is for */
    Py_RETURN_NONE;
}

static PyObject *check(PyObject *object, PyObject *none) {
    (void)none;
    struct zpp_err err = ZPP_ERR_INIT;
    const zpp_comm *comm = zpp_py_comm_get(object);
    if (!comm) return NULL;
    return zpp_py_result(zpp_comm_health(comm, &err), &err);
}

static PyObject *traffic(PyObject *object, PyObject *none) {
    (void)none;
    static const char *const names[ZPP_TRAFFIC_KINDS] = {
        "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "p2p", "other"};
    Comm *self = (Comm *)object;
    struct zpp_traffic counts = self->last;
    if (self->comm) zpp_comm_traffic(self->comm, &counts);
    PyObject *answer = PyDict_New();
    for (int kind = 0; answer && kind < ZPP_TRAFFIC_KINDS; kind++) {
        PyObject *row = Py_BuildValue("{sKsKsK}", "bytes", (unsigned long long)counts.bytes[kind], "calls",
                                      (unsigned long long)counts.calls[kind], "network_bytes",
                                      (unsigned long long)counts.network_bytes[kind]);
        const unsigned long long far = counts.far_bytes[kind];
        PyObject *far_bytes = row && far ? PyLong_FromUnsignedLongLong(far) : NULL;
        if (far_bytes && PyDict_SetItemString(row, "far_bytes", far_bytes) != 0) Py_CLEAR(row);
        Py_XDECREF(far_bytes);
        if (!row || PyDict_SetItemString(answer, names[kind], row) != 0) Py_CLEAR(answer);
        Py_XDECREF(row);
    }
    return answer;
}

static PyObject *region_create(PyObject *self, PyObject *args) {
    const char *kind;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "sn", &kind, &bytes)) return NULL;
    const bool one = strcmp(kind, "one") == 0;
    if (!one && strcmp(kind, "per_rank") != 0)
        return PyErr_Format(PyExc_ValueError, "region_create: kind is '%s', wanted 'per_rank' or 'one'", kind);
    if (bytes < 0) return PyErr_Format(PyExc_ValueError, "region_create: %zd bytes", bytes);
    return zpp_py_region_new(self, one ? ZPP_REGION_ONE : ZPP_REGION_PER_RANK, (size_t)bytes);
}

static PyObject *alloc(PyObject *self, PyObject *args) {
    Py_ssize_t bytes;
    int here = 0;
    if (!PyArg_ParseTuple(args, "n|p", &bytes, &here)) return NULL;
    if (bytes < 0) return PyErr_Format(PyExc_ValueError, "alloc: %zd bytes", bytes);
    return zpp_py_block_new(self, (size_t)bytes, here);
}

static PyObject *get_rank(PyObject *self, void *closure) {
    (void)closure;
    const zpp_comm *comm = zpp_py_comm_get(self);
    return comm ? PyLong_FromLong(zpp_comm_rank(comm)) : NULL;
}

static PyObject *get_ranks(PyObject *self, void *closure) {
    (void)closure;
    const zpp_comm *comm = zpp_py_comm_get(self);
    return comm ? PyLong_FromLong(zpp_comm_ranks(comm)) : NULL;
}

static PyObject *get_hosts(PyObject *self, void *closure) {
    (void)closure;
    const zpp_comm *comm = zpp_py_comm_get(self);
    return comm ? PyLong_FromLong(zpp_comm_hosts(comm)) : NULL;
}

static PyObject *get_host_of(PyObject *self, void *closure) {
    (void)closure;
    const zpp_comm *comm = zpp_py_comm_get(self);
    const int ranks = comm ? zpp_comm_ranks(comm) : 0;
    PyObject *list = comm ? PyList_New(ranks) : NULL;
    for (int rank = 0; list && rank < ranks; rank++)
        if (PyList_SetItem(list, rank, PyLong_FromLong(zpp_comm_host(comm, rank))) != 0) Py_CLEAR(list);
    return list;
}

static PyObject *get_host_ranks(PyObject *self, void *closure) {
    (void)closure;
    const zpp_comm *comm = zpp_py_comm_get(self);
    PyObject *here = comm ? PyList_New(0) : NULL;
    for (int rank = 0; here && rank < zpp_comm_ranks(comm); rank++) {
        if (zpp_comm_host(comm, rank) != zpp_comm_host(comm, zpp_comm_rank(comm))) continue;
        PyObject *number = PyLong_FromLong(rank);
        if (!number || PyList_Append(here, number) != 0) Py_CLEAR(here);
        Py_XDECREF(number);
    }
    return here;
}

static PyObject *get_job_ranks(PyObject *self, void *closure) {
    (void)closure;
    const zpp_comm *comm = zpp_py_comm_get(self);
    const int ranks = comm ? zpp_comm_ranks(comm) : 0;
    PyObject *list = comm ? PyList_New(ranks) : NULL;
    for (int rank = 0; list && rank < ranks; rank++)
        if (PyList_SetItem(list, rank, PyLong_FromLong(zpp_comm_job_rank(comm, rank)))) Py_CLEAR(list);
    return list;
}

static PyObject *get_closed(PyObject *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(!((Comm *)self)->comm || ((Comm *)self)->closing);
}

#define FAST(name, doc) \
    { #name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, doc }
static PyMethodDef comm_methods[] = {
    FAST(all_reduce, "all_reduce(ptr, elems, dtype, op, /)\n--\n\nCombine the tensor over all ranks, in place."),
    FAST(reduce, "reduce(ptr, elems, dtype, op, root, /)\n--\n\nCombine over all ranks, into the root's tensor."),
    FAST(all_gather,
         "all_gather(dst_ptr, src_ptr, src_elems, dtype=uint8, /)\n--\n\ndst = every rank's src, in rank order."),
    FAST(reduce_scatter, "reduce_scatter(dst_ptr, src_ptr, dst_elems, dtype, op, /)\n--\n\ndst = my shard of src, "
                         "combined over all ranks."),
    FAST(broadcast, "broadcast(ptr, elems, root, dtype=uint8, /)\n--\n\nEverybody's tensor = the root's."),
    {"barrier", barrier, METH_NOARGS, "barrier()\n--\n\nWait for all ranks."},
    {"barrier_within", barrier_within, METH_VARARGS,
     "barrier_within(timeout_s, /)\n--\n\nbarrier with a timeout of its own."},
    {"send", send, METH_VARARGS, "send(ptr, bytes, to, tag, keep, /)\n--\n\nA Transfer."},
    {"recv", recv, METH_VARARGS, "recv(ptr, bytes, source, tag, keep, /)\n--\n\nA Transfer; source -1: any."},
    {"set_timeout", set_timeout, METH_VARARGS,
     "set_timeout(timeout_s, /)\n--\n\nOf later waits of this rank; 0: none."},
    {"set_job_ranks", set_job_ranks, METH_O,
     "set_job_ranks(list, /)\n--\n\nLet messages and errors give the ranks these numbers, which they have in the job."},
    {"link", link_with, METH_O,
     "link(comm, /)\n--\n\nLet both groups end together: an error of one is an error of the other, with its rank."},
    {"look_for_dead", look_for_dead, METH_NOARGS,
     "look_for_dead()\n--\n\nEnd the group by the name of a rank that died, if one did; check() raises the error."},
    {"set_name", set_name, METH_VARARGS, "set_name(name, /)\n--\n\nOf the group, for messages of this rank."},
    {"exchange", exchange, METH_VARARGS,
     "exchange(coll, dtype, root, dsts, srcs, /)\n--\n\nAll-to-all, gather, scatter: lists of (ptr, bytes), one a "
     "rank."},
    {"submit", submit, METH_VARARGS,
     "submit(coll, dtype, op, root, dst_ptr, src_ptr, elems, keep, /)\n--\n\nA collective, later; a Work."},
    {"submit_exchange", submit_exchange, METH_VARARGS,
     "submit_exchange(coll, dtype, root, dsts, srcs[, rows], keep)\n--\n\nexchange, later; a Work."},
    {"all_gather_into", all_gather_into, METH_VARARGS,
     "all_gather_into(dst_ptrs, src_ptr, src_elems, dtype, /)\n--\n\nall_gather into one tensor a rank."},
    {"submit_gather", submit_gather, METH_VARARGS,
     "submit_gather(dst_ptrs, src_ptr, src_elems, dtype, keep, /)\n--\n\nall_gather_into, later; a Work."},
    {"onebit_layout", zpp_py_onebit_layout, METH_VARARGS,
     "onebit_layout(elems, chunk_elems, /)\n--\n\n(slice_elems, message_bytes, scratch_bytes, result_bytes)."},
    {"onebit_all_reduce", zpp_py_onebit_all_reduce, METH_VARARGS,
     "onebit_all_reduce(elems, chunk_elems, src_ptr, dtype, worker_error_ptr, server_error_ptr, scratch_ptr, "
     "result_ptr, gather, /)\n--\n\nMean over ranks at one bit an element: see csrc/comm/onebit.h."},
    {"heads", zpp_py_heads, METH_O, "heads(words, /)\n--\n\nExchange heads for tokens: see csrc/comm/heads.h."},
    {"quant", zpp_py_comm_quant, METH_VARARGS,
     "quant(coll, dtype, op, dst_ptr, src_ptr, elems, bits, block_elems, node_ranks, /)\n--\n\nA quantised "
     "collective."},
    {"submit_quant", zpp_py_comm_submit_quant, METH_VARARGS,
     "submit_quant(coll, dtype, op, dst_ptr, src_ptr, elems, bits, block_elems, node_ranks, keep, /)\n--\n\nquant, "
     "later; a Work."},
    {"abort", comm_abort, METH_VARARGS,
     "abort(message=None, /)\n--\n\nEnd every wait of every rank with this message."},
    {"check", check, METH_NOARGS, "check()\n--\n\nRaise the error that ended the group, if one did."},
    {"close", comm_close, METH_NOARGS, "close()\n--\n\nLeave the group; never waits for peers."},
    {"traffic", traffic, METH_NOARGS,
     "traffic()\n--\n\n{kind: {'bytes', 'calls', 'network_bytes'}}: what this rank read from its peers, and what of "
     "it came from other hosts; 'far_bytes' of them from other nodes, where a call named nodes."},
    {"region_create", region_create, METH_VARARGS,
     "region_create(kind, bytes, /)\n--\n\nCollective; 'per_rank' or 'one'."},
    {"alloc", alloc, METH_VARARGS,
     "alloc(bytes, here=False, /)\n--\n\nA Block of this rank's arena, which collectives read in place; here: which "
     "the ranks of this host read, of a group over several."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef comm_getset[] = {
    {"rank", get_rank, NULL, "My rank in the group.", NULL},
    {"ranks", get_ranks, NULL, "How many ranks the group has.", NULL},
    {"hosts", get_hosts, NULL, "On how many hosts its ranks are.", NULL},
    {"job_ranks", get_job_ranks, NULL, "What messages call the ranks: their numbers in the job.", NULL},
    {"host_of", get_host_of, NULL, "The number of each rank's host.", NULL},
    {"host_ranks", get_host_ranks, NULL, "The ranks on this rank's host, itself among them, in order.", NULL},
    {"closed", get_closed, NULL, "Whether close() was called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot comm_slots[] = {
    {Py_tp_doc, "Comm(store, rank, ranks, timeout_s, name, log=None)\n--\n\nA group of ranks."},
    {Py_tp_init, comm_init},
    {Py_tp_methods, comm_methods},
    {Py_tp_getset, comm_getset},
    {Py_tp_dealloc, comm_dealloc},
    {0, NULL},
};
static PyType_Spec comm_spec = {"zeropp._C.Comm", sizeof(Comm), 0, Py_TPFLAGS_DEFAULT, comm_slots};

/* Names in the order of their codes. */
static PyObject *dtype_names(void) {
    PyObject *names = PyTuple_New(ZPP_DTYPES);
    for (int code = 0; names && code < ZPP_DTYPES; code++)
        if (PyTuple_SetItem(names, code, PyUnicode_FromString(zpp_dtype_name((zpp_dtype)code))) != 0) Py_CLEAR(names);
    return names;
}

static int add_constants(PyObject *module) {
    static const char *const colls[] = {"",          "barrier", "all_reduce", "all_gather", "reduce_scatter",
                                        "broadcast", "reduce",  "all_to_all", "gather",     "scatter",
                                        "all_gather_quant", "reduce_scatter_quant", "all_reduce_quant"};
    _Static_assert(sizeof colls / sizeof colls[0] == ZPP_COLLS, "a name for each collective");
    PyObject *names = dtype_names();
    PyObject *ops = Py_BuildValue("(ssssssss)", "sum", "avg", "product", "min", "max", "band", "bor", "bxor");
    PyObject *table = PyDict_New();
    int failed = !names || !ops || !table;
    for (int code = 1; !failed && code < ZPP_COLLS; code++) {
        PyObject *value = PyLong_FromLong(code);
        failed = !value || PyDict_SetItemString(table, colls[code], value) != 0;
        Py_XDECREF(value);
    }
    failed = failed || PyModule_AddObjectRef(module, "COMM_DTYPES", names) != 0 ||
             PyModule_AddObjectRef(module, "COMM_OPS", ops) != 0 ||
             PyModule_AddObjectRef(module, "COMM_COLLECTIVES", table) != 0;
    Py_XDECREF(names);
    Py_XDECREF(ops);
    Py_XDECREF(table);
    return failed ? -1 : 0;
}

static PyMethodDef module_methods[] = {
    {"heads_on_device", zpp_py_heads_on_device, METH_VARARGS,
     "heads_on_device(type, index, rank, ranks, words, address, came, /)\n--\n\nEnqueue the copies of an exchange of "
     "heads on torch's current stream: into the messages at the address, or, where they came, out of them."},
    {NULL, NULL, 0, NULL},
};

int zpp_py_add_comm(PyObject *module); /* called by module.c */
int zpp_py_add_comm(PyObject *module) {
    zpp_py_comm_type = (PyTypeObject *)PyType_FromSpec(&comm_spec);
    if (!zpp_py_comm_type || PyModule_AddObjectRef(module, "Comm", (PyObject *)zpp_py_comm_type) != 0) return -1;
    if (zpp_py_add_comm_memory(module) != 0 || zpp_py_add_comm_work(module) != 0 ||
        zpp_py_add_nccl(module) != 0 || zpp_py_add_rows(module) != 0 ||
        PyModule_AddFunctions(module, module_methods) != 0)
        return -1;
    return add_constants(module);
}
