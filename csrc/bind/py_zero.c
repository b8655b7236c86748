/* SPDX-License-Identifier: Apache-2.0
 *
 * The life of Zero and Unit, and what the façade calls. What runs every step is in hooks.c and py_step.c.
 */
#include "op_entries.h"
#include "py_zero.h"

#include <stddef.h>
#include <stdlib.h>
#include <structmember.h>

#include "../base/cpu.h"
#include "raise.h"
#include "py_comm.h"

PyObject *zpp_str_class, *zpp_str_grad, *zpp_str_data_ptr, *zpp_str_forward, *zpp_str_backward_hooks,
    *zpp_str_grad_fn, *zpp_str_register_hook_dict, *zpp_str_is_contiguous, *zpp_str_contiguous, *zpp_str_local_tensor,
    *zpp_str_sequence_nr;

static PyTypeObject *unit_type;

/* --- Unit --------------------------------------------------------------------------------------------------------- */

static void drop_params(Unit *unit) {
    zpp_py_drop_grads(unit);
    for (Py_ssize_t i = 0; unit->params && i < unit->count; i++) Py_XDECREF(unit->params[i]);
    free(unit->params);
    unit->params = NULL;
    Py_CLEAR(unit->plain);
    Py_CLEAR(unit->released);
    Py_CLEAR(unit->grad_views);
}

static void unit_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Unit *unit = (Unit *)self;
    drop_params(unit);
    free(unit->grad_refs);
    Py_XDECREF(unit->zero);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *unit_need(PyObject *self, PyObject *unused) {
    (void)unused;
    Unit *unit = (Unit *)self;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_py_backward_step_require_ended(unit->zero, "a parameter was read")) return NULL;
    unit->unit->wants_exact = true;
    const int failed = zpp_py_need(unit, ZPP_PHASE_EVAL);
    unit->unit->wants_exact = false;
    if (failed) return NULL;
    return zpp_py_result(zpp_zero_make_exact(unit->zero->core, unit->unit->index, &err), &err);
}

/* auto(): an operation reads a released parameter. Whole until the backward that may follow ends. */
static PyObject *unit_auto(PyObject *self, PyObject *unused) {
    (void)unused;
    Unit *unit = (Unit *)self;
    long task = -1;
    const bool in_backward = zpp_py_backward_runs(unit->zero, &task);
    if (PyErr_Occurred() || (in_backward && zpp_py_enter_backward(unit->zero, true, &task))) return NULL;
    const int refused = in_backward ? zpp_py_backward_step_require_whole(unit)
                                    : zpp_py_backward_step_require_ended(unit->zero, "a parameter was read");
    if (refused) return NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!in_backward && zpp_zero_make_sticky(unit->zero->core, unit->unit->index, &err)) return zpp_py_raise(&err);
    if (zpp_py_need(unit, in_backward ? ZPP_PHASE_BACKWARD : ZPP_PHASE_FORWARD)) return NULL;
    if (!in_backward && zpp_unit_moves(unit->unit)) zpp_py_backward_step_ahead(unit->zero);
    unit->zero->autos = true;
    Py_RETURN_NONE;
}

static PyObject *unit_pin(PyObject *self, PyObject *arg) {
    Unit *unit = (Unit *)self;
    const long by = PyLong_AsLong(arg);
    if (by == -1 && PyErr_Occurred()) return NULL;
    unit->unit->pins += (int)by;
    Py_RETURN_NONE;
}

static PyObject *unit_set_copy(PyObject *self, PyObject *unused) {
    (void)unused;
    ((Unit *)self)->unit->is_copy = true;
    Py_RETURN_NONE;
}

static PyObject *unit_release(PyObject *self, PyObject *unused) {
    (void)unused;
    if (zpp_py_release((Unit *)self)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *unit_keep_shard(PyObject *self, PyObject *unused) {
    (void)unused;
    Unit *unit = (Unit *)self;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_py_follow(unit->zero)) return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_zero_keep_shard(unit->zero->core, unit->unit->index, &err);
    PyEval_RestoreThread(thread);
    if (status != ZPP_OK) return zpp_py_raise_zero(unit->zero, &err);
    Py_RETURN_NONE;
}

static PyObject *unit_grad_hook(PyObject *self, PyObject *arg) {
    const Py_ssize_t param = PyLong_AsSsize_t(arg);
    if (param == -1 && PyErr_Occurred()) return NULL;
    return zpp_py_grad_hook((Unit *)self, param);
}

/* grad() -> (address, dtype, present: bytes) of the reduced gradient, or None; address 0: in a file, see copy_grads. */
static PyObject *unit_grad(PyObject *self, PyObject *unused) {
    (void)unused;
    Unit *unit = (Unit *)self;
    const uint8_t *present = NULL;
    zpp_zero *core = unit->zero->core;
    if (!zpp_zero_takes_grads(core)) Py_RETURN_NONE;
    if (zpp_py_settle(unit->zero)) return NULL;
    const int index = unit->unit->index;
    if (!zpp_zero_grad_shard(core, index, &present)) Py_RETURN_NONE;
    return Py_BuildValue("Kiy#", (unsigned long long)(uintptr_t)zpp_zero_grad_address(core, index),
                         (int)zpp_zero_grad_dtype(core, index), (const char *)present, unit->count);
}

/* held() -> (address, touched: bytes) of the gradient that this rank has not reduced, in its grad_dtype, or None. */
static PyObject *unit_held(PyObject *self, PyObject *unused) {
    (void)unused;
    Unit *unit = (Unit *)self;
    const uint8_t *touched = NULL;
    if (unit->zero->ranks == 1) Py_RETURN_NONE;
    const void *bucket = zpp_zero_held_grad(unit->zero->core, unit->unit->index, &touched);
    if (!bucket) Py_RETURN_NONE;
    return Py_BuildValue("Ky#", (unsigned long long)(uintptr_t)bucket, (const char *)touched, unit->count);
}

static PyObject *unit_clear_grad(PyObject *self, PyObject *arg) {
    Unit *unit = (Unit *)self;
    const Py_ssize_t param = PyLong_AsSsize_t(arg);
    if ((param == -1 && PyErr_Occurred()) || zpp_py_settle(unit->zero)) return NULL;
    if (zpp_zero_takes_grads(unit->zero->core))
        zpp_zero_clear_grad(unit->zero->core, unit->unit->index, (size_t)param);
    Py_RETURN_NONE;
}

static PyObject *unit_set_grad_views(PyObject *self, PyObject *views) {
    Unit *unit = (Unit *)self;
    PyObject *old = unit->grad_views;
    unit->grad_views = Py_NewRef(views);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *offsets_of(const struct zpp_unit *core) {
    PyObject *offsets = PyList_New((Py_ssize_t)core->params);
    for (size_t i = 0; offsets && i < core->params; i++)
        if (PyList_SetItem(offsets, (Py_ssize_t)i, PyLong_FromSize_t(core->offset_elems[i]))) Py_CLEAR(offsets);
    return offsets;
}

static PyObject *unit_layout(PyObject *self, PyObject *unused) {
    (void)unused;
    const struct zpp_unit *core = ((Unit *)self)->unit;
    const unsigned char *bucket = NULL;
    Zero *zero = ((Unit *)self)->zero;
    if (core->grad && zero->stage == 0) bucket = zpp_zero_whole_gradient(zero->core, core->index);
    return Py_BuildValue("{s:n,s:n,s:n,s:N,s:K,s:K,s:K,s:i}", "elems", (Py_ssize_t)core->elems, "shard_elems",
                         (Py_ssize_t)core->shard_elems, "elem_bytes", (Py_ssize_t)core->elem_bytes, "offsets",
                         offsets_of(core), "whole", (unsigned long long)(uintptr_t)core->whole, "shard",
                         (unsigned long long)(uintptr_t)core->shard, "gradient", (unsigned long long)(uintptr_t)bucket,
                         "place", (int)core->place);
}

static PyObject *unit_get_full(PyObject *self, void *unused) {
    (void)unused;
    const Unit *unit = (Unit *)self;
    return PyBool_FromLong(zpp_unit_is_gathered(unit->unit) && (!unit->released || unit->is_plain));
}

static PyMethodDef unit_methods[] = {
    { "need", unit_need, METH_NOARGS, "Gather, and give the parameters their own class." },
    { "auto", unit_auto, METH_NOARGS,
      "Gather for an operation that reads a released parameter; released when its backward ends." },
    { "pin", unit_pin, METH_O, "pin(+1) keeps the unit whole until pin(-1)." },
    { "set_copy", unit_set_copy, METH_NOARGS, "Other ranks of the job have the same parameters, and count them." },
    { "release", unit_release, METH_NOARGS, "Release, unless something still needs it." },
    { "keep_shard", unit_keep_shard, METH_NOARGS, "Take this rank's shard out of the gathered copy." },
    { "grad_hook", unit_grad_hook, METH_O, "The callable for parameter i's post-accumulate-grad hook." },
    { "grad", unit_grad, METH_NOARGS, "(address, dtype, present) of the reduced gradient shard, or None." },
    { "held", unit_held, METH_NOARGS, "(address, touched) of the whole gradient that is not reduced, or None." },
    { "clear_grad", unit_clear_grad, METH_O, "Forget the gradient of parameter i." },
    { "set_grad_views", unit_set_grad_views, METH_O, "Stage 0: the tensors that p.grad becomes." },
    { "layout", unit_layout, METH_NOARGS, "Sizes in elements, and addresses." },
    { NULL, NULL, 0, NULL },
};
static PyGetSetDef unit_getset[] = {
    { "full", unit_get_full, NULL, "whole and readable now", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};
static PyType_Slot unit_slots[] = {
    { Py_tp_dealloc, unit_dealloc }, { Py_tp_methods, unit_methods }, { Py_tp_getset, unit_getset }, { 0, NULL },
};
static PyType_Spec unit_spec = { "zeropp._C.Unit", sizeof(Unit), 0, Py_TPFLAGS_DEFAULT, unit_slots };

/* --- Zero --------------------------------------------------------------------------------------------------------- */

/* torch's functions, by their names in `functions` of Zero(). */
static const struct {
    const char *name;
    size_t offset; /* in Zero */
} torch_functions[] = {
#define FUNCTION(name) { #name, offsetof(Zero, name) }
    FUNCTION(current_graph_task_id), FUNCTION(is_grad_enabled), FUNCTION(queue_callback), FUNCTION(functorch_peek),
    FUNCTION(top_saved_hooks), FUNCTION(push_saved_hooks), FUNCTION(pop_saved_hooks), FUNCTION(raise_strays),
    FUNCTION(current_node),
#undef FUNCTION
};
enum { TORCH_FUNCTIONS = sizeof torch_functions / sizeof torch_functions[0] };

static PyObject **torch_function(Zero *zero, size_t k) {
    return (PyObject **)(void *)((char *)zero + torch_functions[k].offset);
}

static int keep_functions(Zero *zero, PyObject *functions) {
    for (size_t k = 0; k < TORCH_FUNCTIONS; k++) {
        PyObject *function = PyDict_GetItemString(functions, torch_functions[k].name);
        if (!function) return PyErr_Format(PyExc_KeyError, "Zero: functions lacks %s", torch_functions[k].name), -1;
        *torch_function(zero, k) = Py_NewRef(function);
    }
    return 0;
}

/* `given`: a _C.Comm or None, which the core uses until its end. 0, or -1 with an error set. */
static int keep_comm(PyObject *given, PyObject **held, zpp_comm **out) {
    if (given == Py_None) return 0;
    *out = zpp_py_comm_get(given);
    if (!*out) return -1;
    *held = Py_NewRef(given);
    zpp_py_comm_hold(given);
    return 0;
}

static void drop_comm(PyObject *held) {
    if (!held) return;
    zpp_py_comm_drop(held);
    Py_DECREF(held);
}

static int keep_comms(Zero *zero, PyObject *comm, PyObject *job, PyObject *copy, struct zpp_zero_options *options) {
    if (keep_comm(comm, &zero->comm, &options->comm) || keep_comm(job, &zero->job, &options->job)) return -1;
    const zpp_comm *any = options->comm ? options->comm : options->job;
    if (any) zero->timeout_ns = zpp_comm_timeout_ns(any);
    return keep_comm(copy, &zero->intranode, &options->copy);
}

/* The devices of the coordinator: the CPU, and where `name` is given the accelerator of torch with that name. */
static zpp_status open_devices(Zero *zero, const char *name, int index, struct zpp_zero_options *options,
                               struct zpp_err *err) {
    void *native = NULL;
    zpp_status status = zpp_device_cpu_create(&zero->host, err);
    options->device = zero->host;
    if (status != ZPP_OK || !name) return status;
    zero->accelerator_index = index;
    status = zpp_accelerator_type(name, &zero->accelerator_type, err);
    if (status == ZPP_OK)
        status = zpp_accelerator_current(zero->accelerator_type, index, &zero->accelerator, &native, err);
    options->host = zero->host;
    options->device = zero->accelerator;
    return status;
}

static zpp_status open_core(Zero *zero, int threads, const struct zpp_zero_options *options, struct zpp_err *err) {
    zpp_status status = zpp_op_pool_create(threads, &zero->pool, err);
    if (status == ZPP_OK) status = zpp_zero_create(options, &zero->core, err);
    if (status != ZPP_OK) return status;
    zero->ranks = zpp_zero_ranks(zero->core);
    zpp_zero_set_grad_scale(zero->core, 1.0 / zero->accumulate);
    return ZPP_OK;
}

/* Zero(stage, comm | None, comm of the job | None: it is `comm`, prefetch_bytes, bucket_bytes, accumulate, threads,
 * functions, params_fraction, comm of this host's ranks, which have a copy of FILE units of their own | None, type of
 * torch's device | None for the CPU, its index, are shards on it, way of zpp_gather) */
static int zero_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    Zero *zero = (Zero *)self;
    PyObject *comm, *job, *copy, *functions;
    Py_ssize_t prefetch_bytes, bucket_bytes;
    int threads, device_index, shards_on_device, gather;
    const char *device;
    (void)kwargs;
    double params_fraction;
    if (!PyArg_ParseTuple(args, "iOOnniiO!dOzipi", &zero->stage, &comm, &job, &prefetch_bytes, &bucket_bytes,
                          &zero->accumulate, &threads, &PyDict_Type, &functions, &params_fraction, &copy, &device,
                          &device_index, &shards_on_device, &gather))
        return -1;
    zero->sync = true;
    zero->graded_task = -1;
    zero->units = PyList_New(0);
    zero->group_comms = PyList_New(0);
    if (!zero->units || !zero->group_comms) return -1;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_zero_options options = {.stage = zero->stage,
                                       .prefetch_bytes = (size_t)prefetch_bytes,
                                       .bucket_bytes = (size_t)bucket_bytes,
                                       .params_fraction = params_fraction,
                                       .gather = (enum zpp_gather)gather,
                                       .shards = shards_on_device ? ZPP_SHARDS_ON_DEVICE : ZPP_SHARDS_ON_HOST};
    if (keep_comms(zero, comm, job, copy, &options)) return -1;
    zpp_status status = open_devices(zero, device, device_index, &options, &err);
    if (status == ZPP_OK) status = open_core(zero, threads, &options, &err);
    if (status != ZPP_OK) {
        zpp_py_raise(&err);
        return -1;
    }
    return keep_functions(zero, functions) || zpp_py_hooks_attach(zero) ? -1 : 0;
}

static void drop_callables(Zero *zero) {
    for (size_t k = 0; k < TORCH_FUNCTIONS; k++) Py_CLEAR(*torch_function(zero, k));
    Py_CLEAR(zero->end_callback);
    Py_CLEAR(zero->pack);
    Py_CLEAR(zero->unpack);
    Py_CLEAR(zero->check_unfrozen);
    Py_CLEAR(zero->arrived);
    Py_CLEAR(zero->moved);
    Py_CLEAR(zero->skipped);
    Py_CLEAR(zero->settled);
    zpp_py_pass_end(zero);
    zpp_py_layer_drop_clear(zero);
    zpp_py_buffers_end(zero);
    zpp_py_backward_step_forget(zero);
}

/* close(): the model is gone. Breaks the cycle through the parameters' hooks; their memory lives as long as tensors use
 * it. */
static PyObject *zero_close(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    if (zero->closed) Py_RETURN_NONE;
    zero->closed = true;
    zpp_py_unlist_engine(zero);
    const Py_ssize_t count = PyList_Size(zero->units);
    for (Py_ssize_t i = 0; i < count; i++) drop_params((Unit *)PyList_GetItem(zero->units, i));
    PyObject *units = zero->units;
    zero->units = PyList_New(0);
    Py_DECREF(units);
    zpp_py_delayed_end(zero); /* before the tier that it steps */
    Py_CLEAR(zero->optim_file);
    drop_callables(zero);
    Py_RETURN_NONE;
}

static void zero_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Zero *zero = (Zero *)self;
    zpp_py_unlist_engine(zero);
    Py_CLEAR(zero->units);
    zpp_py_delayed_end(zero);
    Py_CLEAR(zero->optim_file);
    drop_callables(zero);
    zpp_step_in_backward_destroy(zero->backward_step.core);
    zpp_step_ahead_destroy(zero->ahead);
    zpp_stepper_fini(&zero->stepper);
    zpp_zero_destroy(zero->core);
    zpp_pool_destroy(zero->pool);
    zpp_device_destroy(zero->host);
    drop_comm(zero->comm);
    drop_comm(zero->job);
    drop_comm(zero->intranode);
    for (Py_ssize_t i = zero->group_comms ? PyList_Size(zero->group_comms) : 0; i-- > 0;)
        zpp_py_comm_drop(PyList_GetItem(zero->group_comms, i));
    Py_XDECREF(zero->group_comms);
    PyObject_Free(self);
    Py_DECREF(type);
}

static int sizes_of(PyObject *list, size_t **out) {
    const Py_ssize_t count = PyList_Size(list);
    size_t *sizes = count < 0 ? NULL : calloc((size_t)count + 1, sizeof *sizes);
    if (!sizes) {
        if (count >= 0) PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) sizes[i] = PyLong_AsSize_t(PyList_GetItem(list, i));
    if (PyErr_Occurred()) {
        free(sizes);
        return -1;
    }
    *out = sizes;
    return 0;
}

/* add_unit(name, dtype, sizes, trainable, frozen_reserved, place, grad_dtype, wire_dtype, group=0, held=False,
 * shared=False, on_host=False) -> index */
static PyObject *zero_add_unit(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    struct zpp_unit_spec spec = { 0 };
    PyObject *sizes;
    int dtype, trainable, frozen_reserved, place, grad_dtype, wire_dtype, held = 0, shared = 0, on_host = 0, index = -1;
    if (!PyArg_ParseTuple(args, "siO!ppiii|ippp", &spec.name, &dtype, &PyList_Type, &sizes, &trainable,
                          &frozen_reserved, &place, &grad_dtype, &wire_dtype, &spec.group, &held, &shared, &on_host))
        return NULL;
    size_t *param_elems = NULL;
    if (sizes_of(sizes, &param_elems)) return NULL;
    spec.dtype = (zpp_dtype)dtype;
    spec.grad_dtype = (zpp_dtype)grad_dtype;
    spec.wire_dtype = (zpp_dtype)wire_dtype;
    spec.params = (size_t)PyList_Size(sizes);
    spec.param_elems = param_elems;
    spec.trainable = trainable;
    spec.held = held;
    spec.frozen_reserved = frozen_reserved;
    spec.shared = shared;
    spec.on_host = on_host;
    spec.place = (enum zpp_place)place;
    struct zpp_err err = ZPP_ERR_INIT;
    const zpp_status status = zpp_zero_add_unit(zero->core, &spec, &index, &err);
    free(param_elems);
    if (status != ZPP_OK) return zpp_py_raise(&err);
    const bool moves = zpp_unit_moves(zpp_zero_unit(zero->core, index)); /* of a FILE unit: it may */
    zero->moves |= moves;
    zero->moves_frozen |= moves && !trainable;
    return PyLong_FromLong(index);
}

/* add_group(name, [part of each data rank], divisor; 0: the number of data ranks) -> index */
static PyObject *zero_add_group(PyObject *self, PyObject *args) {
    const Zero *zero = (const Zero *)self;
    struct zpp_group_spec spec = {0};
    struct zpp_err err = ZPP_ERR_INIT;
    int part_of[ZPP_RANKS_MAX], index = -1;
    PyObject *parts;
    if (!PyArg_ParseTuple(args, "sO!d", &spec.name, &PyList_Type, &parts, &spec.divisor)) return NULL;
    if (PyList_Size(parts) != zero->ranks)
        return PyErr_Format(PyExc_ValueError, "zero: parts of %zd ranks for group \"%s\" of %d data ranks",
                            PyList_Size(parts), spec.name, zero->ranks);
    for (int rank = 0; rank < zero->ranks; rank++) part_of[rank] = (int)PyLong_AsLong(PyList_GetItem(parts, rank));
    if (PyErr_Occurred()) return NULL;
    spec.part_of = part_of;
    const zpp_status status = zpp_zero_add_group(zero->core, &spec, &index, &err);
    return status == ZPP_OK ? PyLong_FromLong(index) : zpp_py_raise(&err);
}

/* set_group_comm(index of add_group, comm of the group's ranks) */
static PyObject *zero_set_group_comm(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    struct zpp_err err = ZPP_ERR_INIT;
    PyObject *given;
    int index;
    if (!PyArg_ParseTuple(args, "iO", &index, &given)) return NULL;
    zpp_comm *comm = zpp_py_comm_get(given);
    if (!comm || PyList_Append(zero->group_comms, given) != 0) return NULL;
    zpp_py_comm_hold(given);
    if (zpp_zero_set_group_comm(zero->core, index, comm, &err) != ZPP_OK) return zpp_py_raise(&err);
    Py_RETURN_NONE;
}

/* set_wire(params_bits, grads_bits, block_elems): 0 bits = exact. */
static PyObject *zero_set_wire(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    struct zpp_err err = ZPP_ERR_INIT;
    int params_bits, grads_bits;
    Py_ssize_t block_elems;
    if (!PyArg_ParseTuple(args, "iin", &params_bits, &grads_bits, &block_elems)) return NULL;
    return zpp_py_result(zpp_zero_set_wire(zero->core, params_bits, grads_bits, (size_t)block_elems, &err), &err);
}

/* set_secondary(comm of this host's ranks): hpZ, see csrc/zero/placement/sharded_net.c. */
static PyObject *zero_set_secondary(PyObject *self, PyObject *intranode) {
    Zero *zero = (Zero *)self;
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_comm *comm = zpp_py_comm_get(intranode);
    if (!comm) return NULL;
    if (zpp_zero_set_secondary(zero->core, comm, &err) != ZPP_OK) return zpp_py_raise(&err);
    drop_comm(zero->intranode);
    zpp_py_comm_hold(intranode);
    zero->intranode = Py_NewRef(intranode);
    Py_RETURN_NONE;
}

static PyObject *zero_publish(PyObject *self, PyObject *unused) {
    (void)unused;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_zero_publish(((Zero *)self)->core, &err) != ZPP_OK) return zpp_py_raise(&err);
    Py_RETURN_NONE;
}

static PyObject *zero_seal(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_py_follow(zero)) return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_status status = zpp_zero_seal(zero->core, &err);
    if (status == ZPP_OK) status = zpp_stepper_init(zero->core, zero->pool, &zero->stepper, &err);
    PyEval_RestoreThread(thread);
    if (status != ZPP_OK) return zpp_py_raise(&err);
    zpp_py_list_engine(zero);
    Py_RETURN_NONE;
}

/* bind_unit(index, params, plain class, released class | None) -> Unit; in the order of the indices. */
static PyObject *zero_bind_unit(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *params, *plain, *released;
    int index;
    if (!PyArg_ParseTuple(args, "iO!OO", &index, &PyList_Type, &params, &plain, &released)) return NULL;
    const bool fits = index == (int)PyList_Size(zero->units) && index < zpp_zero_units(zero->core) &&
                      (size_t)PyList_Size(params) == zpp_zero_unit(zero->core, index)->params;
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "zero: unit %d with %zd parameters does not fit what was added", index,
                     PyList_Size(params));
        return NULL;
    }
    Unit *unit = PyObject_New(Unit, unit_type);
    if (!unit) return NULL;
    const size_t capacity = (size_t)PyList_Size(params) + 1;
    *unit = (Unit){.ob_base = unit->ob_base,
                   .zero = (Zero *)Py_NewRef(self),
                   .unit = zpp_zero_unit(zero->core, index),
                   .count = PyList_Size(params),
                   .bound = zpp_zero_unit(zero->core, index)->whole,
                   .params = calloc(capacity, sizeof(PyObject *)),
                   .grad_refs = calloc(capacity, sizeof(PyObject *)),
                   .plain = Py_NewRef(plain),
                   .released = released == Py_None ? NULL : Py_NewRef(released),
                   .is_plain = true,
                   .is_dtensor = PyObject_HasAttrString(plain, "_local_tensor")};
    if (!unit->params || !unit->grad_refs) {
        Py_DECREF(unit);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < unit->count; i++) unit->params[i] = Py_NewRef(PyList_GetItem(params, i));
    if (PyList_Append(zero->units, (PyObject *)unit)) {
        Py_DECREF(unit);
        return NULL;
    }
    return (PyObject *)unit;
}

/* set_moved(callable): called with the number of a unit whose whole memory has another address. */
static PyObject *zero_set_moved(PyObject *self, PyObject *callable) {
    Zero *zero = (Zero *)self;
    PyObject *old = zero->moved;
    zero->moved = Py_NewRef(callable);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *zero_release_all(PyObject *self, PyObject *unused) {
    (void)unused;
    if (zpp_py_release_all((Zero *)self)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *zero_memory(PyObject *self, PyObject *unused) {
    (void)unused;
    struct zpp_zero_memory memory;
    zpp_zero_memory(((Zero *)self)->core, &memory);
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n}", "params", (Py_ssize_t)memory.param_bytes,
                         "gathered", (Py_ssize_t)memory.gathered_bytes, "grads", (Py_ssize_t)memory.grad_bytes,
                         "buckets", (Py_ssize_t)memory.bucket_bytes, "buckets_peak",
                         (Py_ssize_t)memory.bucket_peak_bytes, "gathered_peak", (Py_ssize_t)memory.gathered_peak_bytes,
                         "on_disk", (Py_ssize_t)memory.on_disk_bytes, "pinned", (Py_ssize_t)memory.pinned_bytes,
                         "resident", (Py_ssize_t)memory.resident_bytes, "blocks", (Py_ssize_t)memory.block_bytes,
                         "on_host", (Py_ssize_t)memory.on_host_bytes);
}

/* page_locked(bytes) -> address */
static PyObject *zero_page_locked(PyObject *self, PyObject *bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    void *memory = NULL;
    const size_t wanted = PyLong_AsSize_t(bytes);
    if (PyErr_Occurred()) return NULL;
    const zpp_status status = zpp_zero_page_locked(((Zero *)self)->core, wanted, &memory, &err);
    return status == ZPP_OK ? PyLong_FromVoidPtr(memory) : zpp_py_raise(&err);
}

/* gather_way() -> (way of zpp_gather, why) */
static PyObject *zero_gather_way(PyObject *self, PyObject *unused) {
    const char *why = NULL;
    (void)unused;
    const enum zpp_gather way = zpp_zero_gather_way(((Zero *)self)->core, &why);
    return Py_BuildValue("iz", (int)way, why);
}

static PyObject *zero_gather_ns(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(zpp_zero_gather_ns(((Zero *)self)->core));
}

static PyObject *zero_get_in_backward(PyObject *self, void *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    long task = -1;
    if (zero->closed) Py_RETURN_FALSE;
    const bool runs = zpp_py_backward_runs(zero, &task);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(runs);
}

static PyGetSetDef zero_getset[] = {
    { "in_backward", zero_get_in_backward, NULL, "true if a backward runs in this thread", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};
static PyMemberDef zero_members[] = {
    { "depth", T_INT, offsetof(Zero, depth), READONLY, "forwards open now" },
    { "builds_loss", T_BOOL, offsetof(Zero, builds_loss), READONLY, "true if a graph waits for its backward" },
    { "sync", T_BOOL, offsetof(Zero, sync), 0, "true if backwards reduce; false inside no_sync" },
    { "hold", T_BOOL, offsetof(Zero, hold), 0, "true if gradients stay on this rank at boundaries, too" },
    { "at_boundary", T_BOOL, offsetof(Zero, at_boundary), READONLY, "true if the last backward was a boundary" },
    { "parts", T_INT, offsetof(Zero, pass.parts), READONLY, "micro-batches of the last pass that is averaged, or 0" },
    { "backwards", T_ULONGLONG, offsetof(Zero, backwards), READONLY, "backwards so far" },
    { "closed", T_BOOL, offsetof(Zero, closed), READONLY, "true once the model is gone" },
    { NULL, 0, 0, 0, NULL },
};

static PyMethodDef zero_methods[] = {
    {"add_unit", zero_add_unit, METH_VARARGS,
     "add_unit(name, dtype, sizes, trainable, frozen_reserved, place, grad_dtype, wire_dtype, group=0) -> index"},
    {"add_group", zero_add_group, METH_VARARGS,
     "add_group(name, part of each data rank, divisor) -> index: before units are added."},
    {"set_group_comm", zero_set_group_comm, METH_VARARGS, "set_group_comm(index, comm of the group's ranks)"},
    {"set_wire", zero_set_wire, METH_VARARGS,
     "set_wire(params_bits, grads_bits, block_elems): before units are added."},
    {"set_secondary", zero_set_secondary, METH_O,
     "set_secondary(comm of this host): a copy of the parameters a host. Before seal."},
    {"publish", zero_publish, METH_NOARGS, "My shards were written outside of a step: before a barrier."},
    {"seal", zero_seal, METH_NOARGS, "Collective: make the memory of all units."},
    {"bind_unit", zero_bind_unit, METH_VARARGS, "bind_unit(index, params, plain, released) -> Unit"},
    {"set_moved", zero_set_moved, METH_O, "set_moved(callable): called with a unit whose whole memory moved."},
    {"gather_way", zero_gather_way, METH_NOARGS,
     "gather_way() -> (0: nothing moves between GPUs, 1: copies, 2: NCCL; why)"},
    {"gather_ns", zero_gather_ns, METH_NOARGS, "How long modules and readers waited for their units, so far."},
    {"release_all", zero_release_all, METH_NOARGS, "Release every unit that is not pinned."},
    {"memory", zero_memory, METH_NOARGS, "Bytes held on this rank, by kind."},
    {"page_locked", zero_page_locked, METH_O,
     "page_locked(bytes) -> address of memory of the host that the accelerator reads and writes, until the core ends."},
    {"close", zero_close, METH_NOARGS, "The model is gone: let go of its parameters."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot zero_slots[] = {
    { Py_tp_init, zero_init },
    { Py_tp_dealloc, zero_dealloc },
    { Py_tp_methods, zero_methods },
    { Py_tp_getset, zero_getset },
    { Py_tp_members, zero_members },
    { 0, NULL },
};
static PyType_Spec zero_spec = { "zeropp._C.Zero", sizeof(Zero), 0, Py_TPFLAGS_DEFAULT, zero_slots };

/* --- module ------------------------------------------------------------------------------------------------------- */

static int intern_names(void) {
    const struct {
        PyObject **at;
        const char *name;
    } names[] = { { &zpp_str_class, "__class__" },           { &zpp_str_grad, "grad" },
                  { &zpp_str_data_ptr, "data_ptr" },         { &zpp_str_forward, "forward" },
                  { &zpp_str_grad_fn, "grad_fn" },           { &zpp_str_backward_hooks, "_backward_hooks" },
                  { &zpp_str_contiguous, "contiguous" },     { &zpp_str_register_hook_dict, "_register_hook_dict" },
                  { &zpp_str_is_contiguous, "is_contiguous" }, { &zpp_str_local_tensor, "_local_tensor" },
                  { &zpp_str_sequence_nr, "_sequence_nr" } };
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++)
        if (!(*names[k].at = PyUnicode_InternFromString(names[k].name))) return -1;
    return 0;
}

/* Methods of Zero that live in other files. */
static int add_methods(PyTypeObject *type, PyMethodDef *methods) {
    for (PyMethodDef *def = methods; def->ml_name; def++) {
        PyObject *method = PyDescr_NewMethod(type, def);
        const int failed = !method || PyObject_SetAttrString((PyObject *)type, def->ml_name, method);
        Py_XDECREF(method);
        if (failed) return -1;
    }
    return 0;
}

int zpp_py_add_zero(PyObject *module);
int zpp_py_add_zero(PyObject *module) {
    PyMethodDef *const elsewhere[] = { zpp_py_step_methods,     zpp_py_unit_file_methods, zpp_py_backward_step_methods,
                                       zpp_py_hooks_methods, zpp_py_backward_methods,  zpp_py_buffers_methods,
                                       zpp_py_layer_drop_methods, zpp_py_pass_methods,   zpp_py_step_ahead_methods };
    if (intern_names() || zpp_py_hooks_init(module)) return -1;
    unit_type = (PyTypeObject *)PyType_FromSpec(&unit_spec);
    PyTypeObject *zero_type = (PyTypeObject *)PyType_FromSpec(&zero_spec);
    if (!unit_type || !zero_type) return -1;
    for (size_t i = 0; i < sizeof elsewhere / sizeof elsewhere[0]; i++)
        if (add_methods(zero_type, elsewhere[i])) return -1;
    if (add_methods(unit_type, zpp_py_unit_step_methods)) return -1;
    return PyModule_AddObjectRef(module, "Zero", (PyObject *)zero_type);
}
