/* SPDX-License-Identifier: Apache-2.0
 *
 * The type Rows: the exchange of rows of a mixture of experts (csrc/comm/rows.h). Tensors come by address; the arrays
 * of a plan are tensors of the caller. python/zeropp/moe/exchange.py checks shapes and dtypes.
 */
#include <Python.h>

#include "../comm/rows.h"
#include "../ops/moe/hosts.h"
#include "op_entries.h"
#include "py_comm.h"
#include "raise.h"

typedef struct Rows {
    PyObject_HEAD zpp_rows *rows;
    PyObject *comm; /* owned; NULL: one rank, without a group */
    bool holds;     /* the group, which counters of a device use beside all calls */
    int32_t device_type, device_index; /* of torch, of the opened device */
} Rows;

static PyTypeObject *rows_type;

static void *at(unsigned long long address) { return (void *)(uintptr_t)address; }

/* Whether there are weights is the same on all ranks, also on one without tokens, whose array has no address. */
static const float *weights_at(unsigned long long address, int weighted) {
    static const float none[1];
    if (!weighted) return NULL;
    return address ? at(address) : none;
}

/* --- around a call ------------------------------------------------------------------------------------------------ */

struct turn {
    struct zpp_err err;
    struct zpp_wait wait;
    PyThreadState *state;
    struct zpp_rows_by by;
};

/* torch's current stream on the opened device. */
static bool find_stream(const Rows *self, struct turn *turn) {
    zpp_device *device;
    if (zpp_accelerator_current(self->device_type, self->device_index, &device, &turn->by.native, &turn->err) == ZPP_OK)
        return true;
    zpp_py_raise(&turn->err);
    return false;
}

/* False with an error set: the group is closed, or torch has no such device. */
static bool turn_begin(Rows *self, struct turn *turn, int on_device) {
    *turn = (struct turn){.err = ZPP_ERR_INIT, .by = {.on_device = on_device != 0}};
    if (on_device && !find_stream(self, turn)) return false;
    zpp_comm *comm = self->comm ? zpp_py_comm_acquire(self->comm) : NULL;
    if (self->comm && !comm) return false;
    zpp_py_wait_init(&turn->wait, comm ? zpp_comm_timeout_ns(comm) : 0);
    turn->state = PyEval_SaveThread();
    turn->by.pool = on_device ? NULL : zpp_op_pool_take();
    return true;
}

static void turn_end(Rows *self, struct turn *turn) {
    zpp_op_pool_give(turn->by.pool);
    PyEval_RestoreThread(turn->state);
    if (self->comm) zpp_py_comm_release(self->comm);
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

static PyObject *add_layer(PyObject *object, PyObject *args) {
    const char *name;
    uint32_t layer = 0;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!PyArg_ParseTuple(args, "s:add_layer", &name)) return NULL;
    if (zpp_rows_add_layer(((Rows *)object)->rows, name, &layer, &err) != ZPP_OK) return zpp_py_raise(&err);
    return PyLong_FromUnsignedLong(layer);
}

/* open_device(type, index): None, or why the ranks cannot read each other's rows on it. */
static PyObject *open_device(PyObject *object, PyObject *args) {
    Rows *self = (Rows *)object;
    const char *type;
    int index;
    struct turn turn;
    zpp_device *device = NULL;
    void *native;
    bool opened = false;
    struct zpp_err missing = ZPP_ERR_INIT;
    if (!PyArg_ParseTuple(args, "si:open_device", &type, &index)) return NULL;
    self->device_index = index;
    if (zpp_accelerator_type(type, &self->device_type, &missing) != ZPP_OK ||
        zpp_accelerator_current(self->device_type, index, &device, &native, &missing) != ZPP_OK)
        return zpp_py_raise(&missing);
    if (!turn_begin(self, &turn, false)) return NULL;
    const zpp_status status = zpp_rows_open_device(self->rows, device, &turn.wait, &opened, &turn.err);
    if (opened && self->comm) {
        self->holds = true; /* before the turn lets the group go */
        PyEval_RestoreThread(turn.state);
        zpp_py_comm_hold(self->comm);
        turn.state = PyEval_SaveThread();
    }
    turn_end(self, &turn);
    if (status != ZPP_OK) return zpp_py_raise(&turn.err);
    if (opened) Py_RETURN_NONE;
    return PyUnicode_FromString(turn.err.text);
}

static PyObject *dispatch_begin(PyObject *object, PyObject *args) {
    Rows *self = (Rows *)object;
    unsigned long long x, chosen;
    Py_ssize_t tokens, width, k, experts;
    struct zpp_rows_dispatch dispatch;
    int dtype, on_device;
    struct turn turn;
    size_t rows_here = 0;
    if (!PyArg_ParseTuple(args, "IKKnnnnip:dispatch_begin", &dispatch.layer, &x, &chosen, &tokens, &width, &k, &experts,
                          &dtype, &on_device))
        return NULL;
    dispatch.tokens = (size_t)tokens;
    dispatch.width_elems = (size_t)width;
    dispatch.k = (size_t)k;
    dispatch.experts = (size_t)experts;
    dispatch.dtype = (zpp_dtype)dtype;
    dispatch.x = at(x);
    dispatch.chosen = at(chosen);
    if (!turn_begin(self, &turn, on_device)) return NULL;
    const zpp_status status =
        zpp_rows_dispatch_begin(self->rows, &dispatch, &turn.by, &turn.wait, &rows_here, &turn.err);
    turn_end(self, &turn);
    return status == ZPP_OK ? PyLong_FromSize_t(rows_here) : zpp_py_raise(&turn.err);
}

static PyObject *dispatch_end(PyObject *object, PyObject *args) {
    Rows *self = (Rows *)object;
    unsigned long long numbers, ends, taken, slots, buffer;
    int on_device;
    struct turn turn;
    if (!PyArg_ParseTuple(args, "KKKKKp:dispatch_end", &numbers, &ends, &taken, &slots, &buffer, &on_device))
        return NULL;
    const struct zpp_rows_plan plan = {at(numbers), at(ends), at(taken), at(slots)};
    if (!turn_begin(self, &turn, on_device)) return NULL;
    const zpp_status status = zpp_rows_dispatch_end(self->rows, &plan, at(buffer), &turn.by, &turn.err);
    turn_end(self, &turn);
    return zpp_py_result(status, &turn.err);
}

static PyObject *take(PyObject *object, PyObject *args) {
    Rows *self = (Rows *)object;
    unsigned long long numbers, taken, x, buffer;
    struct turn turn;
    if (!PyArg_ParseTuple(args, "KKKK:take", &numbers, &taken, &x, &buffer)) return NULL;
    const struct zpp_rows_plan plan = {at(numbers), NULL, at(taken), NULL};
    if (!turn_begin(self, &turn, true)) return NULL;
    const zpp_status status =
        zpp_rows_take(self->rows, &plan, at(x), at(buffer), &turn.by, &turn.wait, &turn.err);
    turn_end(self, &turn);
    return zpp_py_result(status, &turn.err);
}

static PyObject *combine(PyObject *object, PyObject *args) {
    Rows *self = (Rows *)object;
    unsigned long long numbers, taken, slots, made, weights, y;
    int weighted, on_device;
    struct turn turn;
    if (!PyArg_ParseTuple(args, "KKKKKpKp:combine", &numbers, &taken, &slots, &made, &weights, &weighted, &y,
                          &on_device))
        return NULL;
    const struct zpp_rows_plan plan = {at(numbers), NULL, at(taken), at(slots)};
    if (!turn_begin(self, &turn, on_device)) return NULL;
    const zpp_status status = zpp_rows_combine(self->rows, &plan, at(made), weights_at(weights, weighted), at(y),
                                               &turn.by, &turn.wait, &turn.err);
    turn_end(self, &turn);
    return zpp_py_result(status, &turn.err);
}

static PyObject *combine_backward(PyObject *object, PyObject *args) {
    Rows *self = (Rows *)object;
    unsigned long long numbers, taken, slots, grad_y, weights, made, grad_made, grad_weights, dots;
    int weighted, of_weights, on_device;
    struct turn turn;
    if (!PyArg_ParseTuple(args, "KKKKKppKKKKp:combine_backward", &numbers, &taken, &slots, &grad_y, &weights, &weighted,
                          &of_weights, &made, &grad_made, &grad_weights, &dots, &on_device))
        return NULL;
    const struct zpp_rows_plan plan = {at(numbers), NULL, at(taken), at(slots)};
    const struct zpp_rows_grads grads = {.grad_y = at(grad_y),
                                         .weights = weights_at(weights, weighted),
                                         .of_weights = of_weights != 0,
                                         .made = at(made),
                                         .grad_made = at(grad_made),
                                         .grad_weights = at(grad_weights),
                                         .dots = at(dots)};
    if (!turn_begin(self, &turn, on_device)) return NULL;
    const zpp_status status = zpp_rows_combine_backward(self->rows, &plan, &grads, &turn.by, &turn.wait, &turn.err);
    turn_end(self, &turn);
    return zpp_py_result(status, &turn.err);
}

static PyObject *dispatch_backward(PyObject *object, PyObject *args) {
    Rows *self = (Rows *)object;
    unsigned long long numbers, taken, slots, grad_buffer, grad_x;
    int on_device;
    struct turn turn;
    if (!PyArg_ParseTuple(args, "KKKKKp:dispatch_backward", &numbers, &taken, &slots, &grad_buffer, &grad_x,
                          &on_device))
        return NULL;
    const struct zpp_rows_plan plan = {at(numbers), NULL, at(taken), at(slots)};
    if (!turn_begin(self, &turn, on_device)) return NULL;
    const zpp_status status =
        zpp_rows_dispatch_backward(self->rows, &plan, at(grad_buffer), at(grad_x), &turn.by, &turn.wait, &turn.err);
    turn_end(self, &turn);
    return zpp_py_result(status, &turn.err);
}

/* --- between hosts ------------------------------------------------------------------------------------------------ */

static struct zpp_moe_hosts hosts_of(const int64_t *numbers, const void *host_of) {
    return (struct zpp_moe_hosts){.host_of = host_of,
                                  .ranks = (size_t)numbers[0],
                                  .rank = (size_t)numbers[1],
                                  .hosts = (size_t)numbers[2],
                                  .experts = (size_t)numbers[3],
                                  .k = (size_t)numbers[4]};
}

/* moe_hosts_count(numbers, host_of, chosen, tokens, counts): addresses but for tokens; numbers: int64 ranks, rank,
 * hosts, experts, k */
static PyObject *hosts_count(PyObject *module, PyObject *args) {
    unsigned long long numbers, host_of, chosen, counts;
    Py_ssize_t tokens;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKnK:moe_hosts_count", &numbers, &host_of, &chosen, &tokens, &counts)) return NULL;
    const struct zpp_moe_hosts hosts = hosts_of(at(numbers), at(host_of));
    const struct zpp_moe_tokens of = {at(chosen), (size_t)tokens};
    const size_t wrong = zpp_moe_hosts_count(&hosts, &of, at(counts));
    if (wrong == of.tokens * hosts.k) Py_RETURN_NONE;
    return PyErr_Format(PyExc_ValueError, "moe: chosen[%zu] is %d, wanted -1 or an expert 0 to %zu", wrong,
                        (int)of.chosen[wrong], hosts.experts - 1);
}

/* moe_hosts_route(numbers, host_of, chosen, tokens, counts, pairs, their choices, own choices, slots) */
static PyObject *hosts_route(PyObject *module, PyObject *args) {
    unsigned long long numbers, host_of, chosen, counts, pairs, theirs, own, slots;
    Py_ssize_t tokens;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKnKKKKK:moe_hosts_route", &numbers, &host_of, &chosen, &tokens, &counts, &pairs,
                          &theirs, &own, &slots))
        return NULL;
    const struct zpp_moe_hosts hosts = hosts_of(at(numbers), at(host_of));
    const struct zpp_moe_tokens of = {at(chosen), (size_t)tokens};
    const struct zpp_moe_pairs out = {at(pairs), at(theirs), at(own), at(slots)};
    zpp_moe_hosts_route(&hosts, &of, at(counts), &out);
    Py_RETURN_NONE;
}

/* moe_hosts_sum(own rows, rows of pairs, slots, tokens, hosts, width, dtype, y) */
static PyObject *hosts_sum(PyObject *module, PyObject *args) {
    unsigned long long own, came, slots, y;
    Py_ssize_t tokens, hosts, width;
    int dtype;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKnnniK:moe_hosts_sum", &own, &came, &slots, &tokens, &hosts, &width, &dtype, &y))
        return NULL;
    const void *const bases[] = {at(own), at(came)};
    const struct zpp_moe_peer_rows rows = {
        .bases = bases, .ranks = 2, .k = (size_t)hosts, .width_elems = (size_t)width, .dtype = (zpp_dtype)dtype};
    PyThreadState *state = PyEval_SaveThread();
    zpp_pool *pool = zpp_op_pool_take();
    zpp_moe_peer_sum(&rows, at(slots), (size_t)tokens, NULL, at(y), pool);
    zpp_op_pool_give(pool);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

/* --- the type ----------------------------------------------------------------------------------------------------- */

static PyObject *rows_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *group;
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_comm *comm = NULL;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O:Rows", &group)) return NULL;
    if (group != Py_None && !(comm = zpp_py_comm_acquire(group))) return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Rows *self = (Rows *)alloc(type, 0);
    zpp_status status = ZPP_OK;
    if (self) {
        PyThreadState *state = PyEval_SaveThread();
        status = zpp_rows_create(comm, &self->rows, &err);
        PyEval_RestoreThread(state);
        if (comm) self->comm = Py_NewRef(group);
    }
    if (comm) zpp_py_comm_release(group);
    if (status == ZPP_OK) return (PyObject *)self;
    Py_CLEAR(self);
    return zpp_py_raise(&err);
}

static void rows_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Rows *self = (Rows *)object;
    zpp_rows *rows = self->rows;
    Py_BEGIN_ALLOW_THREADS
    zpp_rows_destroy(rows); /* waits for what it has on a device */
    Py_END_ALLOW_THREADS
    if (self->holds) zpp_py_comm_drop(self->comm);
    Py_XDECREF(self->comm);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *get_ranks(PyObject *object, void *closure) {
    (void)closure;
    return PyLong_FromLong(zpp_rows_ranks(((Rows *)object)->rows));
}

static PyMethodDef rows_methods[] = {
    {"add_layer", add_layer, METH_VARARGS,
     "add_layer(name, /)\n--\n\nThe number of a new layer; all ranks add the same ones."},
    {"open_device", open_device, METH_VARARGS,
     "open_device(type, index, /)\n--\n\nLet the ranks read each other's rows there: None, or why they cannot."},
    {"dispatch_begin", dispatch_begin, METH_VARARGS,
     "dispatch_begin(layer, x, chosen, tokens, width, k, experts, dtype, on_device, /)\n--\n\nPublish and wait; rows "
     "of this rank."},
    {"dispatch_end", dispatch_end, METH_VARARGS,
     "dispatch_end(numbers, ends, taken, slots, buffer, on_device, /)\n--\n\nFill the plan, and gather the rows, but "
     "for those on a device."},
    {"take", take, METH_VARARGS, "take(numbers, taken, x, buffer, /)\n--\n\nGather the rows on a device."},
    {"combine", combine, METH_VARARGS,
     "combine(numbers, taken, slots, made, weights, weighted, y, on_device, /)\n--\n\nThe weighted sum at the "
     "tokens' owners."},
    {"combine_backward", combine_backward, METH_VARARGS,
     "combine_backward(numbers, taken, slots, grad_y, weights, weighted, of_weights, made, grad_made, grad_weights, "
     "dots, on_device, /)\n--\n\nGradients by the rows and by the weights."},
    {"dispatch_backward", dispatch_backward, METH_VARARGS,
     "dispatch_backward(numbers, taken, slots, grad_buffer, grad_x, on_device, /)\n--\n\nThe gradient by the "
     "tokens."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef rows_getset[] = {
    {"ranks", get_ranks, NULL, "How many ranks exchange rows.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot rows_slots[] = {
    {Py_tp_doc, "Rows(comm, /)\n--\n\nAn exchange of rows between the ranks of a group, or of one rank (None)."},
    {Py_tp_new, rows_new},
    {Py_tp_methods, rows_methods},
    {Py_tp_getset, rows_getset},
    {Py_tp_dealloc, rows_dealloc},
    {0, NULL},
};
static PyType_Spec rows_spec = {"zeropp._C.Rows", sizeof(Rows), 0, Py_TPFLAGS_DEFAULT, rows_slots};

static PyMethodDef functions[] = {
    {"moe_hosts_count", hosts_count, METH_VARARGS,
     "moe_hosts_count(numbers, host_of, chosen, tokens, counts, /)\n--\n\nPairs by the rank that takes them."},
    {"moe_hosts_route", hosts_route, METH_VARARGS,
     "moe_hosts_route(numbers, host_of, chosen, tokens, counts, pairs, theirs, own, slots, /)\n--\n\nThe way of "
     "tokens to other hosts: see csrc/ops/moe/hosts.h."},
    {"moe_hosts_sum", hosts_sum, METH_VARARGS,
     "moe_hosts_sum(own, came, slots, tokens, hosts, width, dtype, y, /)\n--\n\nThe sum over hosts of each token."},
    {NULL, NULL, 0, NULL},
};

static int add_numbers(PyObject *module) {
    if (PyModule_AddFunctions(module, functions) != 0) return -1;
    if (PyModule_AddIntConstant(module, "ROWS_DTYPE", ZPP_ROWS_DTYPE) != 0) return -1;
    return PyModule_AddIntConstant(module, "ROWS_NUMBERS", (long)zpp_rows_numbers(0));
}

int zpp_py_add_rows(PyObject *module) {
    rows_type = (PyTypeObject *)PyType_FromSpec(&rows_spec);
    if (!rows_type || PyModule_AddObjectRef(module, "Rows", (PyObject *)rows_type) != 0) return -1;
    return add_numbers(module);
}
