/* SPDX-License-Identifier: Apache-2.0
 *
 * Triggers: what nn.Module.__call__ calls in the place of _call_impl, in C because it runs for every unit of every
 * step.
 *
 * Three layers find out when a unit is needed in backward, and none alone is enough (docs/units.md):
 *   gate          a hook on the tensors in a block's output: on time, and between two nodes, where releases are safe
 *   saved tensor  pack and unpack around everything autograd saves while a block runs: cannot be missed
 * (saved_tensors.c) auto-gather   PartitionedParameter.__torch_function__, for recomputation that calls no module
 */
#include "../base/stray.h"
#include "../base/timeline.h"
#include "py_zero.h"
#include "raise.h"

/* torch.func refuses saved-tensor hooks, and its tensors have no gradient of their own. */
static int inside_functorch(Zero *zero) {
    PyObject *stack = PyObject_CallNoArgs(zero->functorch_peek);
    if (!stack) return -1;
    const int answer = stack != Py_None;
    Py_DECREF(stack);
    return answer;
}

/* --- gates -------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Zero *zero;
    PyObject *call;     /* the module's own _call_impl, or what replaced it (compile) */
    PyObject *units;    /* tuple of Unit */
    PyObject *leaf;     /* tuple of dicts, see hangs_on_output; NULL: not one of torch's leaf modules */
    Py_ssize_t layer;   /* number among the layers that may be left out, where `skipped` is there */
    PyObject *skipped;  /* what is called in the place of `call` when the layer is left out; NULL: it never is */
    PyObject *check;    /* (args, kwargs, output) -> None, after its forwards in training until it returns; then NULL */
    bool moves;         /* some of its units are released; other units read in it stay until its backward ends */
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
        if (unit->unit->trainable || !zpp_unit_is_gathered(unit->unit) || has_unit(trigger, unit)) continue;
        if (zpp_unit_moves(unit->unit) && zpp_py_release(unit)) return -1;
    }
    return 0;
}

static PyObject *before_backward(PyObject *self, PyObject *gradient) {
    (void)gradient;
    Trigger *trigger = (Trigger *)self;
    Zero *zero = trigger->zero;
    if (zero->closed) Py_RETURN_NONE;
    long task = -1;
    if (zpp_py_enter_backward(zero, false, &task)) return NULL;
    if (!zero->moves) Py_RETURN_NONE;
    if (zero->moves_frozen && !zero->keep_passes && release_frozen(trigger)) return NULL;
    const Py_ssize_t count = PyTuple_Size(trigger->units);
    for (Py_ssize_t i = 0; i < count; i++) {
        Unit *unit = (Unit *)PyTuple_GetItem(trigger->units, i);
        if (zpp_unit_moves(unit->unit) && zpp_py_need(unit, ZPP_PHASE_BACKWARD)) return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef before_backward_def = { "zeropp_before_backward", before_backward, METH_O, NULL };

/* The tensor has hooks already: join their dict, under a key of our own. */
static int join_hooks(Trigger *trigger, PyObject *hooks) {
    PyObject *key = PyLong_FromVoidPtr(trigger);
    if (!key) return -1;
    const int failed = PyObject_SetItem(hooks, key, trigger->backward);
    Py_DECREF(key);
    return failed;
}

/* The prebuilt dict goes to the node, then the tensor forgets it, so that a later user hook cannot land in a dict that
 * lives on. */
static int register_gate(Trigger *trigger, PyObject *tensor, PyObject *node) {
    if (PyObject_SetAttr(tensor, zpp_str_backward_hooks, trigger->gate)) return -1;
    PyObject *done = PyObject_CallMethodObjArgs(node, zpp_str_register_hook_dict, tensor, NULL);
    if (!done) return -1;
    Py_DECREF(done);
    return PyObject_SetAttr(tensor, zpp_str_backward_hooks, Py_None);
}

static int gate_tensor(Trigger *trigger, PyObject *tensor) {
    PyObject *node = PyObject_GetAttr(tensor, zpp_str_grad_fn);
    if (!node) { /* not a tensor */
        PyErr_Clear();
        return 0;
    }
    PyObject *hooks = NULL;
    int failed = 0;
    if (node != Py_None) { /* else a leaf, whose gradient passes no node of ours */
        hooks = PyObject_GetAttr(tensor, zpp_str_backward_hooks);
        if (!hooks) PyErr_Clear();
        else failed = hooks != Py_None ? join_hooks(trigger, hooks) : register_gate(trigger, tensor, node);
    }
    Py_XDECREF(hooks);
    Py_DECREF(node);
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

/* The state that one call of a trigger has opened, so that its end closes just that. */
struct open_call {
    Py_ssize_t pinned;
    bool recompute, grad, outermost, functorch, pushed, dropped;
};

/* A backward that ended by an exception never ran its callback. */
static int forget_dead_backward(Zero *zero) {
    zero->in_backward = false;
    zero->keep_passes = 0;
    zpp_zero_backward_abort(zero->core);
    return zpp_py_backward_step_abort(zero) || zpp_py_backward_over(zero) ? -1 : 0;
}

/* A unit is given back by the call that leaves it, while another thread's call computes with it. */
static int require_one_caller(const Zero *zero) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (!zero->moves || !zero->depth || zero->caller == PyThread_get_thread_ident()) return 0;
    zpp_fail(&err, ZPP_STATE,
             "the model was called while a call in another thread goes on; its parameters come and go with one call "
             "at a time: take a lock around the calls");
    zpp_py_raise(&err);
    return -1;
}

/* Before the outermost forward of a call. */
static int begin_outermost(Zero *zero, bool grad) {
    if (zpp_stray_is_seen() && zpp_py_call(zero->raise_strays)) return -1;
    if (zero->in_backward && forget_dead_backward(zero)) return -1;
    if (zpp_py_backward_step_require_ended(zero, "a forward")) return -1;
    if (zero->buffers.where && zpp_py_sync_buffers(zero, grad)) return -1;
    zero->outer_grad = grad;
    if (grad && zero->check_unfrozen && zpp_py_call(zero->check_unfrozen)) return -1;
    return zpp_py_layer_drop_begin(zero, grad);
}

static int begin_call(Trigger *trigger, struct open_call *call) {
    Zero *zero = trigger->zero;
    long task = -1;
    call->recompute = zpp_py_backward_runs(zero, &task);
    if (!call->recompute && require_one_caller(zero)) return -1;
    const int grad = PyErr_Occurred() ? -1 : zpp_py_grad_mode(zero);
    if (grad < 0) return -1;
    call->grad = grad;
    call->outermost = zero->depth == 0;
    if (call->outermost && !call->recompute && begin_outermost(zero, grad)) return -1;
    const int functorch = zero->moves ? inside_functorch(zero) : 0;
    if (functorch < 0) return -1;
    call->functorch = functorch;
    return call->recompute ? zpp_py_enter_backward(zero, true, &task) : 0;
}

/* Of torch's own leaf modules (Linear, ...) everything that is saved is behind the one tensor that they return, so the
 * gate on it is enough, and saved-tensor hooks (5 us a module) are not needed; unless hooks of the user, or a
 * forward of the instance's own, run in between. leaf: the instance's dict, then the dicts of hooks. */
static bool hangs_on_output(const Trigger *trigger) {
    if (!trigger->leaf) return false;
    if (PyDict_GetItemWithError(PyTuple_GetItem(trigger->leaf, 0), zpp_str_forward) || PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    const Py_ssize_t count = PyTuple_Size(trigger->leaf);
    for (Py_ssize_t i = 1; i < count; i++)
        if (PyDict_Size(PyTuple_GetItem(trigger->leaf, i)) != 0) return false;
    return true;
}

static int open_unit(Unit *unit, const struct open_call *call) {
    Zero *zero = unit->zero;
    const enum zpp_phase phase = call->recompute ? ZPP_PHASE_BACKWARD : call->grad ? ZPP_PHASE_FORWARD : ZPP_PHASE_EVAL;
    if (call->recompute && zpp_py_backward_step_require_whole(unit)) return -1;
    if (zpp_py_need(unit, phase)) return -1;
    if (phase == ZPP_PHASE_FORWARD && zpp_unit_moves(unit->unit)) zpp_py_backward_step_ahead(zero);
    zpp_unit_pin(unit->unit);
    if (!call->recompute && (call->grad || zero->outer_grad))
        zpp_zero_count_use(zero->core, unit->unit->index, !call->grad);
    if (call->functorch) unit->unit->sticky = true; /* its saved tensors are out of our sight */
    return 0;
}

/* True in a forward with a graph, and where a backward recomputes one. */
static bool trains(const Trigger *trigger, const struct open_call *call) {
    return call->recompute || trigger->zero->outer_grad;
}

/* A layer that is left out is an identity, before anything is needed for it. */
static int open_units(Trigger *trigger, struct open_call *call) {
    if (trigger->skipped) {
        const int dropped = zpp_py_layer_enter(trigger->zero, trigger->layer, trains(trigger, call));
        call->dropped = dropped > 0;
        if (dropped) return dropped > 0 ? 0 : -1;
    }
    const Py_ssize_t count = PyTuple_Size(trigger->units);
    for (; call->pinned < count; call->pinned++)
        if (open_unit((Unit *)PyTuple_GetItem(trigger->units, call->pinned), call)) return -1;
    if (trigger->moves && call->grad && !call->functorch && !hangs_on_output(trigger)) {
        const int pushed = zpp_py_push_saved_hooks(trigger->zero);
        if (pushed < 0) return -1;
        call->pushed = pushed;
    }
    return 0;
}

/* True if no backward will come that ends what auto-gather began: there is no graph. A forward that raised leaves none
 * either. */
static bool ends_without_backward(const Zero *zero, const struct open_call *call) {
    const bool no_graph = !call->grad || !zero->builds_loss;
    return call->outermost && !call->recompute && no_graph && (zero->moves || zero->autos);
}

static int close_units(Trigger *trigger, const struct open_call *call) {
    Zero *zero = trigger->zero;
    int failed = 0;
    if (call->pushed) zpp_py_pop_saved_hooks(zero);
    for (Py_ssize_t i = 0; i < call->pinned; i++) {
        Unit *unit = (Unit *)PyTuple_GetItem(trigger->units, i);
        zpp_unit_unpin(unit->unit);
        /* The backward needs a recomputed block next. */
        if (!call->recompute && zpp_py_release(unit)) failed = -1;
    }
    if (failed || !ends_without_backward(zero, call)) return failed;
    return zero->graphs ? zpp_py_end_pass(zero) : zpp_py_release_all(zero);
}

/* For zeropp.trace. */
static const char *name_of(const Trigger *trigger, const struct open_call *call) {
    if (PyTuple_Size(trigger->units) < 1) return call->recompute ? "recomputation" : "model";
    return ((const Unit *)PyTuple_GetItem(trigger->units, 0))->unit->name;
}

/* Let the output of a layer in training be looked at, once. Return `output`, or NULL with an error set. */
static PyObject *check_output(Trigger *trigger, const struct open_call *call, PyObject *args, PyObject *kwargs,
                              PyObject *output) {
    PyObject *check = trigger->check;
    if (!output || !check || call->dropped || !trains(trigger, call)) return output;
    trigger->check = NULL;
    PyObject *done = PyObject_CallFunctionObjArgs(check, args, kwargs ? kwargs : Py_None, output, NULL);
    if (done) {
        Py_DECREF(check);
        Py_DECREF(done);
    } else {
        trigger->check = check; /* the next forward is refused, too */
        Py_CLEAR(output);
    }
    return output;
}

static bool is_gated(const Trigger *trigger, const struct open_call *call) {
    if (!call->grad || call->recompute || call->functorch || call->dropped) return false;
    return trigger->zero->moves || call->outermost;
}

static PyObject *run_forward(Trigger *trigger, const struct open_call *call, PyObject *args, PyObject *kwargs) {
    const uint64_t began_ns = zpp_span_begin();
    PyObject *output = PyObject_Call(call->dropped ? trigger->skipped : trigger->call, args, kwargs);
    if (began_ns) zpp_span_end(began_ns, ZPP_SPAN_FORWARD, name_of(trigger, call), 0);
    output = check_output(trigger, call, args, kwargs, output);
    if (output && is_gated(trigger, call) && gate_output(trigger, output, 0)) Py_CLEAR(output);
    return output;
}

/* `output`: a reference that goes to the caller of the module, or NULL with an error set, which is the one to show. */
static PyObject *end_call(Trigger *trigger, const struct open_call *call, PyObject *output) {
    PyObject *type, *value, *traceback;
    if (output) {
        if (close_units(trigger, call)) Py_CLEAR(output);
        return output;
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (close_units(trigger, call)) PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    return NULL;
}

static PyObject *trigger_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    Trigger *trigger = (Trigger *)self;
    Zero *zero = trigger->zero;
    if (zero->closed) return PyObject_Call(trigger->call, args, kwargs);
    struct open_call call = { 0 };
    if (begin_call(trigger, &call)) return NULL;
    if (!zero->depth) zero->caller = PyThread_get_thread_ident();
    zero->depth++;
    PyObject *output = open_units(trigger, &call) ? NULL : run_forward(trigger, &call, args, kwargs);
    zero->depth--;
    if (output && call.outermost && call.grad && !call.recompute) zero->builds_loss = zero->graphs = true;
    return end_call(trigger, &call, output);
}

static int trigger_traverse(PyObject *self, visitproc visit, void *arg) {
    Trigger *trigger = (Trigger *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)trigger->zero);
    Py_VISIT(trigger->call);
    Py_VISIT(trigger->units);
    Py_VISIT(trigger->leaf);
    Py_VISIT(trigger->skipped);
    Py_VISIT(trigger->check);
    Py_VISIT(trigger->gate);
    Py_VISIT(trigger->backward);
    return 0;
}

static int trigger_clear(PyObject *self) {
    Trigger *trigger = (Trigger *)self;
    Py_CLEAR(trigger->call);
    Py_CLEAR(trigger->units);
    Py_CLEAR(trigger->leaf);
    Py_CLEAR(trigger->skipped);
    Py_CLEAR(trigger->check);
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

static bool is_tuple_of_dicts(PyObject *tuple) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) == 0) return false;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++)
        if (!PyDict_Check(PyTuple_GetItem(tuple, i))) return false;
    return true;
}

/* Trigger(zero, units, call, leaf): leaf is a tuple of dicts or None, see hangs_on_output */
static int trigger_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    Trigger *trigger = (Trigger *)self;
    PyObject *zero, *units, *call, *leaf;
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Trigger takes no keyword arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "OO!OO", &zero, &PyTuple_Type, &units, &call, &leaf)) return -1;
    if (leaf != Py_None && !is_tuple_of_dicts(leaf)) {
        PyErr_SetString(PyExc_TypeError, "Trigger: leaf is neither None nor a tuple of dicts");
        return -1;
    }
    trigger->zero = (Zero *)Py_NewRef(zero);
    trigger->units = Py_NewRef(units);
    trigger->call = Py_NewRef(call);
    trigger->leaf = leaf == Py_None ? NULL : Py_NewRef(leaf);
    for (Py_ssize_t i = 0; i < PyTuple_Size(units); i++) {
        const struct zpp_unit *unit = ((Unit *)PyTuple_GetItem(units, i))->unit;
        trigger->moves |= zpp_unit_moves(unit);
        if (!unit->trainable) Py_CLEAR(trigger->leaf); /* any gate may release it again, also one on the same tensor */
    }
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
    Py_CLEAR(((Trigger *)self)->leaf); /* what runs there now need not be torch's own */
    return 0;
}

static PyObject *trigger_get_units(PyObject *self, void *unused) {
    (void)unused;
    return Py_NewRef(((Trigger *)self)->units);
}

/* may_skip(layer, skipped, check): see the fields. */
static PyObject *trigger_may_skip(PyObject *self, PyObject *args) {
    Trigger *trigger = (Trigger *)self;
    Py_ssize_t layer;
    PyObject *skipped, *check;
    if (!PyArg_ParseTuple(args, "nOO", &layer, &skipped, &check)) return NULL;
    trigger->layer = layer;
    Py_CLEAR(trigger->skipped);
    Py_CLEAR(trigger->check);
    trigger->skipped = Py_NewRef(skipped);
    trigger->check = Py_NewRef(check);
    Py_RETURN_NONE;
}

static PyMethodDef trigger_methods[] = {
    { "may_skip", trigger_may_skip, METH_VARARGS,
      "may_skip(layer, skipped, check): `skipped` is called in passes that leave out this layer." },
    { NULL, NULL, 0, NULL },
};

static PyGetSetDef trigger_getset[] = {
    { "call", trigger_get_call, trigger_set_call,
      "what the trigger surrounds: the module's _call_impl, or its compiled form", NULL },
    { "units", trigger_get_units, NULL, "the units that are whole while it runs", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot trigger_slots[] = {
    { Py_tp_init, trigger_init },         { Py_tp_dealloc, trigger_dealloc }, { Py_tp_traverse, trigger_traverse },
    { Py_tp_clear, trigger_clear },       { Py_tp_call, trigger_call },       { Py_tp_getset, trigger_getset },
    { Py_tp_methods, trigger_methods },   { 0, NULL },
};
static PyType_Spec trigger_spec = { "zeropp._C.Trigger", sizeof(Trigger), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                    trigger_slots };

/* --- setting up --------------------------------------------------------------------------------------------------- */

int zpp_py_hooks_attach(Zero *zero) {
    zero->end_callback = zpp_py_end_callback(zero);
    return zero->end_callback ? zpp_py_make_saved_hooks(zero) : -1;
}

int zpp_py_hooks_init(PyObject *module) {
    trigger_type = (PyTypeObject *)PyType_FromSpec(&trigger_spec);
    if (!trigger_type || zpp_py_backward_init() || zpp_py_saved_init()) return -1;
    return PyModule_AddObjectRef(module, "Trigger", (PyObject *)trigger_type);
}

/* --- parameters that are unfrozen (docs/design/0034) -------------------------------------------------------------- */

/* unfreeze(unit): it gets gradients from now on. */
static PyObject *zero_unfreeze(PyObject *self, PyObject *arg) {
    Zero *zero = (Zero *)self;
    struct zpp_err err = ZPP_ERR_INIT;
    long task = -1;
    const long unit = PyLong_AsLong(arg);
    if (unit == -1 && PyErr_Occurred()) return NULL;
    const bool runs = zpp_py_backward_runs(zero, &task);
    if (PyErr_Occurred() || (!runs && zero->in_backward && forget_dead_backward(zero))) return NULL;
    if (zpp_py_settle(zero)) return NULL;
    return zpp_py_result(zpp_zero_unfreeze(zero->core, (int)unit, &err), &err);
}

/* skip(unit, parameter): frozen, so in the backward that has just begun the reduction does not wait for its gradient.
 * (To release the unit does wait: frozen weights may be read when all gradients are in.) */
static PyObject *zero_skip(PyObject *self, PyObject *args) {
    int unit;
    Py_ssize_t param;
    if (!PyArg_ParseTuple(args, "in", &unit, &param)) return NULL;
    zpp_zero_skip(((Zero *)self)->core, unit, (size_t)param);
    Py_RETURN_NONE;
}

static void replace(PyObject **at, PyObject *callable) {
    PyObject *old = *at;
    *at = callable == Py_None ? NULL : Py_NewRef(callable);
    Py_XDECREF(old);
}

/* set_unfreeze_checks(check, skip): callables without arguments, or None; called before a forward that builds a graph,
 * and when a backward begins. */
static PyObject *zero_set_unfreeze_checks(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *check, *skipped;
    if (!PyArg_ParseTuple(args, "OO", &check, &skipped)) return NULL;
    replace(&zero->check_unfrozen, check);
    replace(&zero->skipped, skipped);
    Py_RETURN_NONE;
}

/* set_arrived(callable): called when a backward ends, before its last reductions. */
static PyObject *zero_set_arrived(PyObject *self, PyObject *callable) {
    replace(&((Zero *)self)->arrived, callable);
    Py_RETURN_NONE;
}

PyMethodDef zpp_py_hooks_methods[] = {
    { "set_arrived", zero_set_arrived, METH_O, "set_arrived(callable): called as backwards end." },
    { "unfreeze", zero_unfreeze, METH_O, "unfreeze(unit): enable gradients of a unit that was frozen at prepare." },
    { "skip", zero_skip, METH_VARARGS, "skip(unit, i): no gradient of parameter i comes in this backward." },
    { "set_unfreeze_checks", zero_set_unfreeze_checks, METH_VARARGS,
      "set_unfreeze_checks(check, skip): called before forwards that build a graph, and as backwards begin." },
    { NULL, NULL, 0, NULL },
};
