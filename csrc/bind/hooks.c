/* SPDX-License-Identifier: Apache-2.0
 *
 * The callables that torch calls in forward and backward. All are C, because they run for every unit of every step.
 *
 * When is a unit needed in backward? Three layers, none alone is enough (docs/units.md):
 *   gate          a hook on the tensors in a block's output: on time, and between two nodes, where releases are safe
 *   saved tensor  pack and unpack around everything autograd saves while a block runs: cannot be missed
 *   auto-gather   PartitionedParameter.__torch_function__, for recomputation that calls no module
 * A backward ends in a callback of the outermost graph task, queued at the first of these events, or by a gradient hook.
 */
#include "py_zero.h"

#include "../base/wait.h"
#include "raise.h"

/* --- asking torch --------------------------------------------------------------------------------------------------- */

bool zpp_py_backward_runs(Zero *zero, long *task) {
    PyObject *id = PyObject_CallNoArgs(zero->current_graph_task_id);
    if (!id) return false;
    *task = PyLong_AsLong(id);
    Py_DECREF(id);
    return *task != -1;
}

static int grad_mode(Zero *zero) {
    PyObject *on = PyObject_CallNoArgs(zero->is_grad_enabled);
    if (!on) return -1;
    const int answer = on == Py_True;
    Py_DECREF(on);
    return answer;
}

/* torch.func refuses saved-tensor hooks, and its tensors have no gradient of their own. */
static int inside_functorch(Zero *zero) {
    PyObject *stack = PyObject_CallNoArgs(zero->functorch_peek);
    if (!stack) return -1;
    const int answer = stack != Py_None;
    Py_DECREF(stack);
    return answer;
}

/* --- the beginning and the end of a backward ------------------------------------------------------------------------ */

static bool reduces_now(Zero *zero) {
    if (!zero->sync) return false;
    zero->micro++;
    if (zero->micro < zero->accumulate) return false;
    zero->micro = 0;
    return true;
}

static int begin_backward(Zero *zero, long task) {
    struct zpp_err err = ZPP_ERR_INIT;
    zero->reduces = reduces_now(zero);
    if (zpp_zero_backward_begin(zero->core, zero->reduces, &err) != ZPP_OK) {
        zpp_py_raise(&err);
        return -1;
    }
    zero->in_backward = true;
    zero->task = task;
    const Py_ssize_t count = PyList_Size(zero->units);
    for (Py_ssize_t i = 0; i < count; i++) ((Unit *)PyList_GetItem(zero->units, i))->got = 0;
    PyObject *done = PyObject_CallFunctionObjArgs(zero->queue_callback, zero->end_callback, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int zpp_py_enter_backward(Zero *zero, bool recompute) {
    long task = -1;
    if (!zpp_py_backward_runs(zero, &task)) return PyErr_Occurred() ? -1 : 0;
    if (!recompute && zero->moves) {
        const int grad = grad_mode(zero);
        if (grad < 0) return -1;
        /* create_graph: this backward saves views that no hook of ours sees, for the next one to read. */
        if (grad) zero->keep_passes = 2;
    }
    return zero->in_backward ? 0 : begin_backward(zero, task);
}

/* Stage 0: like DDP, every parameter that has a gradient on some rank has it on all. */
static int show_whole_gradients(Zero *zero) {
    const Py_ssize_t units = PyList_Size(zero->units);
    for (Py_ssize_t at = 0; at < units; at++) {
        Unit *unit = (Unit *)PyList_GetItem(zero->units, at);
        const uint8_t *present = NULL;
        if (!unit->grad_views || !zpp_zero_grad_shard(zero->core, unit->unit->index, &present)) continue;
        for (Py_ssize_t i = 0; i < unit->count; i++)
            if (present[i] && PyObject_SetAttr(unit->params[i], zpp_str_grad, PyList_GetItem(unit->grad_views, i))) return -1;
    }
    return 0;
}

static PyObject *end_backward(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    if (zero->closed || !zero->in_backward) Py_RETURN_NONE;
    zero->in_backward = false;
    zero->builds_loss = false;
    zero->backwards++;
    zero->at_boundary = zero->reduces;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_zero_backward_end(zero->core, &wait, &err);
    PyEval_RestoreThread(thread);
    if (status != ZPP_OK) return zpp_py_raise(&err);
    if (zero->reduces && zero->stage == 0 && zero->ranks > 1 && show_whole_gradients(zero)) return NULL;
    if (zero->keep_passes > 0 && --zero->keep_passes > 0) Py_RETURN_NONE;
    if (zpp_py_release_all(zero)) return NULL;
    Py_RETURN_NONE;
}

/* --- a gradient has been accumulated ------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    Unit *unit;
    Py_ssize_t param;
} GradHook;

static PyTypeObject *grad_hook_type;

/* The address of a dense, contiguous gradient; `*grad` is replaced by a contiguous copy where it is neither. */
static void *gradient_address(PyObject **grad, Unit *unit, Py_ssize_t param) {
    PyObject *flag = PyObject_CallMethodObjArgs(*grad, zpp_str_is_contiguous, NULL);
    if (!flag) {
        PyErr_Clear(); /* sparse layouts have no contiguity */
        PyErr_Format(PyExc_ValueError, "zero: the gradient of parameter %zd of unit %s is sparse; zeropp reduces dense gradients, "
                     "so build the embedding with sparse=False", param, unit->unit->name);
        return NULL;
    }
    const bool contiguous = flag == Py_True;
    Py_DECREF(flag);
    if (!contiguous) {
        PyObject *copy = PyObject_CallMethodObjArgs(*grad, zpp_str_contiguous, NULL);
        if (!copy) return NULL;
        Py_DECREF(*grad);
        *grad = copy;
    }
    PyObject *address = PyObject_CallMethodObjArgs(*grad, zpp_str_data_ptr, NULL);
    if (!address) return NULL;
    void *pointer = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    return pointer;
}

enum { RELEASE_LOCK_BYTES = 256 * 1024 };

static int hand_over(Unit *unit, Py_ssize_t param, const void *from, bool partial) {
    Zero *zero = unit->zero;
    struct zpp_err err = ZPP_ERR_INIT;
    const size_t bytes = unit->unit->param_elems[param] * unit->unit->elem_bytes;
    zpp_status status = ZPP_AGAIN;
    if (bytes < RELEASE_LOCK_BYTES)
        status = zpp_zero_grad(zero->core, unit->unit->index, (size_t)param, from, partial, NULL, &err);
    if (status == ZPP_AGAIN) {
        struct zpp_wait wait;
        zpp_py_wait_for(zero, &wait);
        PyThreadState *thread = PyEval_SaveThread();
        status = zpp_zero_grad(zero->core, unit->unit->index, (size_t)param, from, partial, &wait, &err);
        PyEval_RestoreThread(thread);
    }
    if (status == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

/* A unit used once is no longer read once all its gradients are in. */
static int after_gradient(Unit *unit) {
    if (++unit->got < (size_t)unit->count) return 0;
    unit->got = 0;
    const struct zpp_unit *core = unit->unit;
    if (core->pins || unit->zero->keep_passes || core->sticky || !zpp_zero_used_once(unit->zero->core, core->index)) return 0;
    return zpp_py_release(unit);
}

/* Where nothing is reduced (one rank), the hook only notices that a backward runs. */
static PyObject *take_gradient(PyObject *self, PyObject *param) {
    GradHook *hook = (GradHook *)self;
    Unit *unit = hook->unit;
    Zero *zero = unit->zero;
    if (zero->closed) Py_RETURN_NONE;
    if (zpp_py_enter_backward(zero, false)) return NULL;
    if (zero->ranks == 1) Py_RETURN_NONE;
    long task = -1;
    if (!zpp_py_backward_runs(zero, &task) && PyErr_Occurred()) return NULL;
    /* While released, `grad` would go through __torch_function__, fifty times slower. */
    if (!unit->is_plain && zpp_py_swap(unit, true)) return NULL;
    PyObject *grad = PyObject_GetAttr(param, zpp_str_grad);
    if (!grad) return NULL;
    if (grad == Py_None) { /* another hook took it */
        Py_DECREF(grad);
        Py_RETURN_NONE;
    }
    PyObject *original = grad;
    const void *from = gradient_address(&grad, unit, hook->param);
    const bool partial = task != zero->task && zpp_zero_uses(zero->core, unit->unit->index) == 0;
    int failed = !from && unit->unit->param_elems[hook->param] ? -1 : hand_over(unit, hook->param, from, partial);
    if (PyErr_Occurred()) failed = -1;
    if (!failed && zero->stage > 0) failed = PyObject_SetAttr(param, zpp_str_grad, Py_None);
    if (!failed && zero->stage == 0 && unit->grad_views && original != PyList_GetItem(unit->grad_views, hook->param))
        failed = PyObject_SetAttr(param, zpp_str_grad, PyList_GetItem(unit->grad_views, hook->param));
    Py_DECREF(grad);
    if (failed || after_gradient(unit)) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef take_gradient_def = { "zeropp_take_gradient", take_gradient, METH_O, NULL };

static void grad_hook_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((GradHook *)self)->unit);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot grad_hook_slots[] = { { Py_tp_dealloc, grad_hook_dealloc }, { 0, NULL } };
static PyType_Spec grad_hook_spec = { "zeropp._C.GradHook", sizeof(GradHook), 0, Py_TPFLAGS_DEFAULT, grad_hook_slots };

PyObject *zpp_py_grad_hook(Unit *unit, Py_ssize_t param) {
    GradHook *hook = PyObject_New(GradHook, grad_hook_type);
    if (!hook) return NULL;
    hook->unit = (Unit *)Py_NewRef((PyObject *)unit);
    hook->param = param;
    PyObject *callable = PyCFunction_NewEx(&take_gradient_def, (PyObject *)hook, NULL);
    Py_DECREF(hook);
    return callable;
}

/* --- saved tensors ---------------------------------------------------------------------------------------------------- */

/* Our pair on top of somebody else's (checkpoint, offload): what is not ours goes on to them. */
typedef struct {
    PyObject_HEAD
    Zero *zero;
    PyObject *pack, *unpack; /* theirs; NULL: nobody */
} Chain;

static PyTypeObject *chain_type;

/* Which unit's memory a tensor lies in; -1: none, or not a tensor with an address. */
static int unit_of_tensor(Zero *zero, PyObject *tensor) {
    PyObject *address = PyObject_CallMethodObjArgs(tensor, zpp_str_data_ptr, NULL);
    if (!address) {
        PyErr_Clear();
        return -1;
    }
    const void *pointer = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    return zpp_zero_find(zero->core, pointer);
}

/* A tensor in a unit is saved as it is: it costs nothing once the unit is released. (chain, unit, tensor) marks it. */
static PyObject *pack_tensor(PyObject *self, PyObject *tensor) {
    Chain *chain = (Chain *)self;
    const int unit = chain->zero->closed ? -1 : unit_of_tensor(chain->zero, tensor);
    if (unit >= 0) return Py_BuildValue("(OiO)", self, unit, tensor);
    if (chain->pack) return PyObject_CallFunctionObjArgs(chain->pack, tensor, NULL);
    return Py_NewRef(tensor);
}

static PyObject *unpack_tensor(PyObject *self, PyObject *packed) {
    Chain *chain = (Chain *)self;
    const bool ours = PyTuple_Check(packed) && PyTuple_Size(packed) == 3 && PyTuple_GetItem(packed, 0) == self;
    if (!ours) return chain->unpack ? PyObject_CallFunctionObjArgs(chain->unpack, packed, NULL) : Py_NewRef(packed);
    Zero *zero = chain->zero;
    const Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GetItem(packed, 1));
    if (!zero->closed) {
        if (zpp_py_enter_backward(zero, true)) return NULL;
        if (zpp_py_need((Unit *)PyList_GetItem(zero->units, index), ZPP_PHASE_BACKWARD)) return NULL;
    }
    return Py_NewRef(PyTuple_GetItem(packed, 2));
}

static PyMethodDef pack_def = { "zeropp_pack", pack_tensor, METH_O, NULL };
static PyMethodDef unpack_def = { "zeropp_unpack", unpack_tensor, METH_O, NULL };

static void chain_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Chain *chain = (Chain *)self;
    Py_XDECREF(chain->zero);
    Py_XDECREF(chain->pack);
    Py_XDECREF(chain->unpack);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot chain_slots[] = { { Py_tp_dealloc, chain_dealloc }, { 0, NULL } };
static PyType_Spec chain_spec = { "zeropp._C.SavedTensors", sizeof(Chain), 0, Py_TPFLAGS_DEFAULT, chain_slots };

static int make_pair(Zero *zero, PyObject *theirs, PyObject **pack, PyObject **unpack) {
    Chain *chain = PyObject_New(Chain, chain_type);
    if (!chain) return -1;
    chain->zero = (Zero *)Py_NewRef((PyObject *)zero);
    chain->pack = theirs ? Py_NewRef(PyTuple_GetItem(theirs, 0)) : NULL;
    chain->unpack = theirs ? Py_NewRef(PyTuple_GetItem(theirs, 1)) : NULL;
    *pack = PyCFunction_NewEx(&pack_def, (PyObject *)chain, NULL);
    *unpack = PyCFunction_NewEx(&unpack_def, (PyObject *)chain, NULL);
    Py_DECREF(chain);
    return *pack && *unpack ? 0 : -1;
}

static int push_pair(Zero *zero, PyObject *pack, PyObject *unpack) {
    PyObject *done = PyObject_CallFunctionObjArgs(zero->push_saved_hooks, pack, unpack, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* 1: pushed, 0: ours is on top already, -1: error. Only the top pair runs, so ours goes on top of whatever is there. */
static int push_saved_hooks(Zero *zero) {
    PyObject *top = PyObject_CallFunctionObjArgs(zero->top_saved_hooks, Py_True, NULL);
    if (!top) return -1;
    int answer = 1;
    if (top == Py_None) {
        if (push_pair(zero, zero->pack, zero->unpack)) answer = -1;
    } else {
        PyObject *their_pack = PyTuple_GetItem(top, 0);
        const bool ours = PyCFunction_Check(their_pack) && PyCFunction_GetFunction(their_pack) == pack_tensor &&
                          ((Chain *)PyCFunction_GetSelf(their_pack))->zero == zero;
        PyObject *pack = NULL, *unpack = NULL;
        if (ours) answer = 0;
        else if (make_pair(zero, top, &pack, &unpack) || push_pair(zero, pack, unpack)) answer = -1;
        Py_XDECREF(pack);
        Py_XDECREF(unpack);
    }
    Py_DECREF(top);
    return answer;
}

static void pop_saved_hooks(Zero *zero) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); /* also on the way out of an exception */
    PyObject *done = PyObject_CallNoArgs(zero->pop_saved_hooks);
    if (!done) PyErr_Clear();
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
}

/* --- triggers ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Zero *zero;
    PyObject *call;     /* the module's own _call_impl, or what replaced it (compile) */
    PyObject *units;    /* tuple of Unit */
    PyObject *gate;     /* {0: backward}, shared by all tensors that it is put on */
    PyObject *backward; /* callable: the gate's only entry */
} Trigger;

static PyTypeObject *trigger_type;

static bool has_unit(Trigger *trigger, const Unit *unit) {
    const Py_ssize_t count = PyTuple_Size(trigger->units);
    for (Py_ssize_t i = 0; i < count; i++)
        if ((Unit *)PyTuple_GetItem(trigger->units, i) == unit) return true;
    return false;
}

/* Frozen units get no gradient that would release them; here we stand between two nodes, so it is safe to. */
static int release_frozen(Trigger *trigger) {
    Zero *zero = trigger->zero;
    const Py_ssize_t count = PyList_Size(zero->units);
    for (Py_ssize_t i = 0; i < count; i++) {
        Unit *unit = (Unit *)PyList_GetItem(zero->units, i);
        if (unit->unit->trainable || unit->unit->state != ZPP_UNIT_FULL || has_unit(trigger, unit)) continue;
        if (unit->unit->place == ZPP_PLACE_SHARD && zpp_py_release(unit)) return -1;
    }
    return 0;
}

static PyObject *before_backward(PyObject *self, PyObject *gradient) {
    (void)gradient;
    Trigger *trigger = (Trigger *)self;
    Zero *zero = trigger->zero;
    if (zero->closed) Py_RETURN_NONE;
    if (zpp_py_enter_backward(zero, false)) return NULL;
    if (!zero->moves) Py_RETURN_NONE;
    if (!zero->keep_passes && release_frozen(trigger)) return NULL;
    const Py_ssize_t count = PyTuple_Size(trigger->units);
    for (Py_ssize_t i = 0; i < count; i++) {
        Unit *unit = (Unit *)PyTuple_GetItem(trigger->units, i);
        if (unit->unit->place == ZPP_PLACE_SHARD && zpp_py_need(unit, ZPP_PHASE_BACKWARD)) return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef before_backward_def = { "zeropp_before_backward", before_backward, METH_O, NULL };

/* Somebody has hooked the tensor already: join the dict, under a key of our own. */
static int join_hooks(Trigger *trigger, PyObject *hooks) {
    PyObject *key = PyLong_FromVoidPtr(trigger);
    if (!key) return -1;
    const int failed = PyObject_SetItem(hooks, key, trigger->backward);
    Py_DECREF(key);
    return failed;
}

/* The prebuilt dict goes to the node, then the tensor forgets it, so that a later user hook cannot land in a dict that lives on. */
static int lend_hooks(Trigger *trigger, PyObject *tensor) {
    PyObject *node = PyObject_GetAttr(tensor, zpp_str_grad_fn);
    if (!node) return -1;
    if (node == Py_None) { /* a leaf: its gradient passes no node of ours */
        Py_DECREF(node);
        return 0;
    }
    int failed = PyObject_SetAttr(tensor, zpp_str_backward_hooks, trigger->gate);
    if (!failed) {
        PyObject *done = PyObject_CallMethodObjArgs(node, zpp_str_register_hook_dict, tensor, NULL);
        failed = !done;
        Py_XDECREF(done);
        if (!failed) failed = PyObject_SetAttr(tensor, zpp_str_backward_hooks, Py_None);
    }
    Py_DECREF(node);
    return failed;
}

static int gate_tensor(Trigger *trigger, PyObject *tensor) {
    PyObject *requires = PyObject_GetAttr(tensor, zpp_str_requires_grad);
    if (!requires) { /* not a tensor */
        PyErr_Clear();
        return 0;
    }
    const bool wanted = requires == Py_True;
    Py_DECREF(requires);
    if (!wanted) return 0;
    PyObject *hooks = PyObject_GetAttr(tensor, zpp_str_backward_hooks);
    if (!hooks) {
        PyErr_Clear();
        return 0;
    }
    const int failed = hooks != Py_None ? join_hooks(trigger, hooks) : lend_hooks(trigger, tensor);
    Py_DECREF(hooks);
    return failed;
}

enum { OUTPUT_DEPTH = 16 }; /* deeper nesting is left to the saved-tensor hooks */

static int gate_output(Trigger *trigger, PyObject *output, int depth) {
    if (output == Py_None || depth > OUTPUT_DEPTH) return 0;
    if (PyTuple_Check(output)) {
        for (Py_ssize_t i = 0; i < PyTuple_Size(output); i++)
            if (gate_output(trigger, PyTuple_GetItem(output, i), depth + 1)) return -1;
        return 0;
    }
    if (PyList_Check(output)) {
        for (Py_ssize_t i = 0; i < PyList_Size(output); i++)
            if (gate_output(trigger, PyList_GetItem(output, i), depth + 1)) return -1;
        return 0;
    }
    if (PyDict_Check(output)) {
        PyObject *key, *value;
        Py_ssize_t at = 0;
        while (PyDict_Next(output, &at, &key, &value))
            if (gate_output(trigger, value, depth + 1)) return -1;
        return 0;
    }
    return gate_tensor(trigger, output);
}

/* What one call of a trigger has opened, so that the way out closes just that. */
struct open_call {
    Py_ssize_t pinned;
    bool recompute, grad, outermost, functorch, pushed;
};

/* A backward that ended by an exception never ran its callback. */
static int forget_dead_backward(Zero *zero) {
    zero->in_backward = false;
    zero->keep_passes = 0;
    zpp_zero_backward_abort(zero->core);
    return zpp_py_release_all(zero);
}

static int look_around(Trigger *trigger, struct open_call *call) {
    Zero *zero = trigger->zero;
    long task = -1;
    call->recompute = zpp_py_backward_runs(zero, &task);
    const int grad = PyErr_Occurred() ? -1 : grad_mode(zero);
    if (grad < 0) return -1;
    call->grad = grad;
    call->outermost = zero->depth == 0;
    if (call->outermost && !call->recompute) {
        if (zero->in_backward && forget_dead_backward(zero)) return -1;
        zero->outer_grad = grad;
        zero->builds_loss |= grad;
    }
    const int functorch = zero->moves ? inside_functorch(zero) : 0;
    if (functorch < 0) return -1;
    call->functorch = functorch;
    return call->recompute ? zpp_py_enter_backward(zero, true) : 0;
}

static int open_units(Trigger *trigger, struct open_call *call) {
    Zero *zero = trigger->zero;
    const enum zpp_phase phase = call->recompute ? ZPP_PHASE_BACKWARD : call->grad ? ZPP_PHASE_FORWARD : ZPP_PHASE_EVAL;
    const Py_ssize_t count = PyTuple_Size(trigger->units);
    for (; call->pinned < count; call->pinned++) {
        Unit *unit = (Unit *)PyTuple_GetItem(trigger->units, call->pinned);
        if (zpp_py_need(unit, phase)) return -1;
        unit->unit->pins++;
        if (!call->recompute && (call->grad || zero->outer_grad)) zpp_zero_count_use(zero->core, unit->unit->index);
        if (call->functorch) unit->unit->sticky = true; /* its saved tensors are out of our sight */
    }
    if (zero->moves && call->grad && !call->functorch) {
        const int pushed = push_saved_hooks(zero);
        if (pushed < 0) return -1;
        call->pushed = pushed;
    }
    return 0;
}

static int close_units(Trigger *trigger, const struct open_call *call) {
    int failed = 0;
    if (call->pushed) pop_saved_hooks(trigger->zero);
    for (Py_ssize_t i = 0; i < call->pinned; i++) {
        Unit *unit = (Unit *)PyTuple_GetItem(trigger->units, i);
        unit->unit->pins--;
        /* The backward needs a recomputed block next. */
        if (!call->recompute && zpp_py_release(unit)) failed = -1;
    }
    /* Without a graph no backward will come that ends what auto-gather began. */
    if (call->outermost && !call->recompute && !call->grad && !failed && (trigger->zero->moves || trigger->zero->autos))
        failed = zpp_py_release_all(trigger->zero);
    return failed;
}

static PyObject *trigger_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    Trigger *trigger = (Trigger *)self;
    Zero *zero = trigger->zero;
    if (zero->closed) return PyObject_Call(trigger->call, args, kwargs);
    struct open_call call = { 0 };
    if (look_around(trigger, &call)) return NULL;
    PyObject *output = NULL;
    zero->depth++;
    int failed = open_units(trigger, &call);
    if (!failed) output = PyObject_Call(trigger->call, args, kwargs);
    if (output && call.grad && !call.recompute && !call.functorch && (zero->moves || call.outermost))
        failed = gate_output(trigger, output, 0);
    zero->depth--;
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    if (!output || failed) PyErr_Fetch(&type, &value, &traceback);
    const int close_failed = close_units(trigger, &call);
    if (type) { /* the first error is the one to show */
        PyErr_Clear();
        PyErr_Restore(type, value, traceback);
    }
    if (failed || close_failed) {
        Py_XDECREF(output);
        return NULL;
    }
    return output;
}

static int trigger_traverse(PyObject *self, visitproc visit, void *arg) {
    Trigger *trigger = (Trigger *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)trigger->zero);
    Py_VISIT(trigger->call);
    Py_VISIT(trigger->units);
    Py_VISIT(trigger->gate);
    Py_VISIT(trigger->backward);
    return 0;
}

static int trigger_clear(PyObject *self) {
    Trigger *trigger = (Trigger *)self;
    Py_CLEAR(trigger->call);
    Py_CLEAR(trigger->units);
    Py_CLEAR(trigger->gate);
    Py_CLEAR(trigger->backward);
    PyObject *zero = (PyObject *)trigger->zero;
    trigger->zero = NULL;
    Py_XDECREF(zero);
    return 0;
}

static void trigger_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    (void)trigger_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

/* Trigger(zero, units, call) */
static int trigger_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    Trigger *trigger = (Trigger *)self;
    PyObject *zero, *units, *call;
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Trigger takes no keyword arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "OO!O", &zero, &PyTuple_Type, &units, &call)) return -1;
    trigger->zero = (Zero *)Py_NewRef(zero);
    trigger->units = Py_NewRef(units);
    trigger->call = Py_NewRef(call);
    trigger->backward = PyCFunction_NewEx(&before_backward_def, self, NULL);
    trigger->gate = trigger->backward ? Py_BuildValue("{iO}", 0, trigger->backward) : NULL;
    return trigger->gate ? 0 : -1;
}

static PyObject *trigger_get_call(PyObject *self, void *unused) {
    (void)unused;
    return Py_NewRef(((Trigger *)self)->call);
}

static int trigger_set_call(PyObject *self, PyObject *value, void *unused) {
    (void)unused;
    if (!value) {
        PyErr_SetString(PyExc_AttributeError, "Trigger.call cannot be deleted");
        return -1;
    }
    PyObject *old = ((Trigger *)self)->call;
    ((Trigger *)self)->call = Py_NewRef(value);
    Py_XDECREF(old);
    return 0;
}

static PyObject *trigger_get_units(PyObject *self, void *unused) {
    (void)unused;
    return Py_NewRef(((Trigger *)self)->units);
}

static PyGetSetDef trigger_getset[] = {
    { "call", trigger_get_call, trigger_set_call, "what the trigger surrounds: the module's _call_impl, or its compiled form", NULL },
    { "units", trigger_get_units, NULL, "the units that are whole while it runs", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot trigger_slots[] = {
    { Py_tp_init, trigger_init },         { Py_tp_dealloc, trigger_dealloc }, { Py_tp_traverse, trigger_traverse },
    { Py_tp_clear, trigger_clear },       { Py_tp_call, trigger_call },       { Py_tp_getset, trigger_getset },
    { 0, NULL },
};
static PyType_Spec trigger_spec = { "zeropp._C.Trigger", sizeof(Trigger), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                    trigger_slots };

/* --- setting up ---------------------------------------------------------------------------------------------------------- */

static PyMethodDef end_backward_def = { "zeropp_end_backward", end_backward, METH_NOARGS, NULL };

int zpp_py_hooks_attach(Zero *zero) {
    zero->end_callback = PyCFunction_NewEx(&end_backward_def, (PyObject *)zero, NULL);
    if (!zero->end_callback) return -1;
    return make_pair(zero, NULL, &zero->pack, &zero->unpack);
}

int zpp_py_hooks_init(PyObject *module) {
    grad_hook_type = (PyTypeObject *)PyType_FromSpec(&grad_hook_spec);
    chain_type = (PyTypeObject *)PyType_FromSpec(&chain_spec);
    trigger_type = (PyTypeObject *)PyType_FromSpec(&trigger_spec);
    if (!grad_hook_type || !chain_type || !trigger_type) return -1;
    return PyModule_AddObjectRef(module, "Trigger", (PyObject *)trigger_type);
}
