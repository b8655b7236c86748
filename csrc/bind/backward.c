/* SPDX-License-Identifier: Apache-2.0
 *
 * The beginning and the end of a backward, and the gradients in between: what parameters call.
 *
 * A backward begins at the first event that one of our hooks sees, and ends in a callback that torch calls when its
 * outermost graph task is done; there the last reductions are waited for, and all units released. One backward may go
 * through several prepared models: they end in one order on all ranks (docs/design/0008).
 */
#include "py_zero.h"

#include "../base/mem.h"
#include "../base/wait.h"
#include "raise.h"

/* --- prepared models, in the order in which they were sealed ------------------------------------------------------ */

/* seal() is collective, so any two engines with ranks in common are in the same order on all of these ranks. All this
 * is read and changed with Python's lock held. */
static Zero *first_engine;

void zpp_py_list_engine(Zero *zero) {
    Zero **at = &first_engine;
    while (*at) at = &(*at)->next_engine;
    *at = zero;
}

void zpp_py_unlist_engine(Zero *zero) {
    Zero **at = &first_engine;
    while (*at && *at != zero) at = &(*at)->next_engine;
    if (!*at) return;
    *at = zero->next_engine;
    zero->next_engine = NULL;
}

/* The first engine that is in the backward of this graph task, or NULL. */
static Zero *first_in(long task) {
    Zero *one = first_engine;
    while (one && !(one->in_backward && one->task == task)) one = one->next_engine;
    return one;
}

/* Note whether another engine is in this backward, or may come into it: the backward itself then waits for no peer. */
static void note_shared_backward(Zero *zero) {
    bool others = false;
    for (Zero *one = first_engine; one; one = one->next_engine) {
        if (one == zero || one->ranks == 1) continue;
        if (one->in_backward) zpp_zero_share_backward(one->core);
        others = others || one->in_backward || one->builds_loss;
    }
    if (others) zpp_zero_share_backward(zero->core);
}

/* --- the beginning and the end of a backward ---------------------------------------------------------------------- */

static bool boundary_now(Zero *zero) {
    if (!zero->sync) return false;
    zero->micro++;
    if (zero->micro < zero->accumulate) return false;
    zero->micro = 0;
    return true;
}

static void choose_reduction(Zero *zero) {
    zero->boundary = boundary_now(zero);
    /* Gradients in a file are reduced in every micro-step: held back, they would fill the memory. */
    const bool each = zpp_zero_reduces_each_backward(zero->core) || zero->pass.each;
    zero->reduces = (each ? zero->sync : zero->boundary) && !zero->hold;
}

/* --- one graph of an open pass (py_pass.c) ------------------------------------------------------------------------ */

/* Open the pass of the coordinator with the first graph that gives gradients. */
static int open_core(Zero *zero) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_py_pass *pass = &zero->pass;
    choose_reduction(zero);
    if (zpp_zero_reduces_each_backward(zero->core)) pass->each = true;
    if (zpp_zero_pass_open(zero->core, zero->reduces, pass->each, &err) == ZPP_OK) return pass->begun = true, 0;
    zpp_py_raise(&err);
    return -1;
}

int zpp_py_graph_begin(Zero *zero) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_py_pass *pass = &zero->pass;
    if (!pass->units) return 0;
    if (!pass->begun && open_core(zero)) return -1;
    const uint8_t *units = (const uint8_t *)PyBytes_AsString(pass->units);
    if (zpp_zero_graph_begin(zero->core, units, pass->forwards, &err) == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

int zpp_py_graph_end(Zero *zero) {
    if (zero->pass.units && zpp_py_run_end(zero, zpp_zero_graph_end)) return -1;
    Py_CLEAR(zero->pass.units);
    return zpp_py_end_pass(zero);
}

static int refuse_unannounced(const Unit *unit, Py_ssize_t param) {
    struct zpp_err err = ZPP_ERR_INIT;
    char words[ZPP_PARAM_WORDS];
    zpp_fail(&err, ZPP_STATE,
             "zero: a gradient of %s came in a backward that the pipeline's schedule did not run; run all backwards of "
             "a step in the schedule that zeropp.parallel.pipeline was given",
             zpp_py_param_words(unit, param, words, sizeof words));
    zpp_py_raise(&err);
    return -1;
}

/* --- a backward that is a pass of its own ------------------------------------------------------------------------- */

/* A backward outside of an open pass is one of its own. */
static int begin_alone(Zero *zero) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_status status = ZPP_OK;
    if (zpp_py_settle(zero)) return -1;
    if (zero->pass.required) {
        status = zpp_fail(&err, ZPP_STATE,
                          "zero: a backward of a pipeline's stage outside of an adopted schedule, so nothing says "
                          "which backward is the last; call zeropp.parallel.pipeline(schedule) once, then "
                          "schedule.step()");
    } else {
        choose_reduction(zero);
        status = zpp_zero_backward_begin(zero->core, zero->reduces, &err);
    }
    if (status == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

static int begin_backward(Zero *zero, long task) {
    if (zpp_py_follow(zero) || zpp_py_backward_step_require_ended(zero, "a second backward")) return -1;
    if (zero->pass.open ? zpp_py_graph_begin(zero) : begin_alone(zero)) return -1;
    zero->in_backward = true;
    zero->task = task;
    if (zero->ranks > 1) note_shared_backward(zero);
    const Py_ssize_t count = PyList_Size(zero->units);
    for (Py_ssize_t i = 0; i < count; i++) ((Unit *)PyList_GetItem(zero->units, i))->got = 0;
    if (zpp_py_backward_step_begin(zero) || (zero->skipped && zpp_py_call(zero->skipped))) return -1;
    PyObject *done = PyObject_CallFunctionObjArgs(zero->queue_callback, zero->end_callback, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Another backward would need the values that this one replaces. */
static int refuse_graph(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_fail(&err, ZPP_STATE,
             "zero: a backward with create_graph=True, where Config(step_in_backward=True) changes parameters inside "
             "the backward; leave out one of the two");
    zpp_py_raise(&err);
    return -1;
}

/* create_graph: such a backward saves views that no hook of ours sees, for the next one to read. */
static int note_grad_mode(Zero *zero, long task) {
    if (!(zero->moves || zero->backward_step.begin) || task == zero->graded_task) return 0;
    const int grad = zpp_py_grad_mode(zero);
    if (grad < 0 || (grad && zero->backward_step.begin && refuse_graph())) return -1;
    if (grad) zero->keep_passes = 2;
    zero->graded_task = task;
    return 0;
}

int zpp_py_enter_backward(Zero *zero, bool recompute, long *task) {
    if (!zpp_py_backward_runs(zero, task)) return PyErr_Occurred() ? -1 : 0;
    if (!recompute && note_grad_mode(zero, *task)) return -1;
    return zero->in_backward ? 0 : begin_backward(zero, *task);
}

/* --- freed memory of gradients ------------------------------------------------------------------------------------ */

/* malloc keeps what was freed: tens of MiB of holes where gradients are large. A model with something on the disk is
 * short of memory, and its passes wait for the disk longer than for these page faults. */
enum { TRIM_EVERY_BYTES = 32 << 20, TRIM_AT_END_BYTES = 1 << 20 };

static void trim(Zero *zero, size_t from_bytes) {
    if (!zero->trims || zero->untrimmed_bytes < from_bytes) return;
    zero->untrimmed_bytes = 0;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_mem_trim();
    PyEval_RestoreThread(thread);
}

/* Autograd drops a gradient after the hook that takes it, so a trim has to do with those before. */
static void took_gradient(const Unit *unit, Py_ssize_t param) {
    trim(unit->zero, TRIM_EVERY_BYTES);
    unit->zero->untrimmed_bytes += unit->unit->param_elems[param] * unit->unit->elem_bytes;
}

static PyObject *zero_trim_gradients(PyObject *self, PyObject *unused) {
    (void)unused;
    ((Zero *)self)->trims = true;
    Py_RETURN_NONE;
}

PyMethodDef zpp_py_backward_methods[] = {
    { "trim_gradients", zero_trim_gradients, METH_NOARGS,
      "Memory of gradients that were taken goes back to the system." },
    { NULL, NULL, 0, NULL },
};

/* Sticky units stay until a step, because another graph than this backward's may need them. A step inside the backward
 * allows no second graph, so there they are released. */
int zpp_py_backward_over(Zero *zero) {
    return zero->backward_step.begin ? zpp_py_release_all(zero) : zpp_py_end_pass(zero);
}

/* 0, or -1 with an error set. */
static int end_one(Zero *zero) {
    const int failed = zero->arrived ? zpp_py_call(zero->arrived) : 0;
    zero->in_backward = false;
    if (failed) return -1;
    if (zero->pass.open) return trim(zero, TRIM_AT_END_BYTES), zpp_py_graph_end(zero);
    zero->builds_loss = false;
    zero->backwards++;
    zero->at_boundary = zero->boundary;
    if (zpp_py_follow(zero) || zpp_py_backward_step_drain(zero)) return -1;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_zero_backward_end(zero->core, &wait, &err);
    PyEval_RestoreThread(thread);
    trim(zero, TRIM_AT_END_BYTES);
    if (status != ZPP_OK) {
        zpp_py_raise(&err);
        return -1;
    }
    if (zpp_py_backward_step_close(zero)) return -1;
    if (zpp_py_show_gradients(zero)) return -1;
    if (zero->keep_passes > 0 && --zero->keep_passes > 0) return 0;
    return zpp_py_backward_over(zero);
}

/* The errors of several ends: the first is raised, with the later ones as its context, and theirs. */
struct raised {
    PyObject *type, *value, *traceback, *last;
};

static void keep_raised(struct raised *raised) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (!raised->value) {
        *raised = (struct raised){ type, value, traceback, value };
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    if (value == raised->last) { /* one object twice would be a ring */
        Py_DECREF(value);
        return;
    }
    PyException_SetContext(raised->last, value); /* takes the reference */
    raised->last = value;
}

/* True for Ctrl-C and the like, after which the other models' ends are not waited for. */
static bool is_interrupt(void) {
    return !PyErr_ExceptionMatches(PyExc_Exception);
}

/* torch calls this for each engine of the backward, in the order of their first events, which need not be the same on
 * all ranks: two ranks would wait for each other in the ends of different engines. So the first call ends them all, in
 * the order of their seals. An error of one must not leave the peers of another waiting: the other ends are run, then
 * it is raised. */
static PyObject *end_backward(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self, *one;
    if (zero->closed || !zero->in_backward) Py_RETURN_NONE;
    const long task = zero->task;
    struct raised raised = { NULL, NULL, NULL, NULL };
    bool interrupted = false;
    while (!interrupted && (one = first_in(task))) {
        Py_INCREF((PyObject *)one);
        if (end_one(one)) {
            interrupted = is_interrupt();
            keep_raised(&raised);
        }
        Py_DECREF((PyObject *)one);
    }
    if (!raised.value) Py_RETURN_NONE;
    PyErr_Restore(raised.type, raised.value, raised.traceback);
    return NULL;
}

/* --- a gradient has been accumulated ------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    Unit *unit;
    Py_ssize_t param;
} GradHook;

static PyTypeObject *grad_hook_type;

static void refuse_late(const Unit *unit, Py_ssize_t param) {
    char words[ZPP_PARAM_WORDS];
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_fail(&err, ZPP_STATE,
             "zero: a gradient of %s came after the gradients of its unit were reduced; its module ran in a way that "
             "the hooks did not see; make it a unit of its own with Config(units=...)",
             zpp_py_param_words(unit, param, words, sizeof words));
    zpp_py_raise(&err);
}

/* The address of a dense, contiguous gradient; `*grad` is replaced by a contiguous copy where it is neither, and by its
 * local tensor where it is a DTensor. */
static void *gradient_address(PyObject **grad, Unit *unit, Py_ssize_t param) {
    *grad = zpp_py_local_of(unit, *grad);
    if (!*grad) return NULL;
    PyObject *flag = PyObject_CallMethodObjArgs(*grad, zpp_str_is_contiguous, NULL);
    if (flag != Py_True) { /* sparse layouts have no contiguity, or cannot be made so */
        PyObject *copy = flag ? PyObject_CallMethodObjArgs(*grad, zpp_str_contiguous, NULL) : NULL;
        Py_XDECREF(flag);
        if (!copy) return zpp_py_refuse_sparse(unit, param), NULL;
        Py_DECREF(*grad);
        *grad = copy;
    } else {
        Py_DECREF(flag);
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
    if (zpp_py_follow(zero)) return -1;
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
    if (status == ZPP_STATE && zpp_zero_came_late(zero->core, unit->unit->index))
        refuse_late(unit, param);
    else
        zpp_py_raise(&err);
    return -1;
}

/* A unit is no longer read once all its gradients are in, if no nested backward has more of them. */
static int after_gradient(Unit *unit) {
    if (++unit->got < (size_t)unit->count) return 0;
    unit->got = 0;
    const struct zpp_unit *core = unit->unit;
    if (core->pins || unit->zero->keep_passes || core->sticky) return 0;
    if (!zpp_zero_gets_gradients_once(unit->zero->core, core->index)) return 0;
    return zpp_py_release(unit);
}

/* The coordinator takes no gradients: the hook only notices that a backward runs, and releases the unit. */
static int keep_gradient(Unit *unit, Py_ssize_t param, bool partial) {
    const Zero *zero = unit->zero;
    if (zero->backward_step.begin) took_gradient(unit, param);
    if (zpp_py_backward_step_gradient(unit, param, partial)) return -1;
    return zero->moves ? after_gradient(unit) : 0;
}

/* p.grad of a gradient that was handed over: None, or (stage 0) the view of the bucket. */
static int replace_grad(const Unit *unit, Py_ssize_t index, PyObject *param, const PyObject *original) {
    if (unit->zero->stage > 0) return PyObject_SetAttr(param, zpp_str_grad, Py_None);
    if (!unit->grad_views || original == PyList_GetItem(unit->grad_views, index)) return 0;
    return PyObject_SetAttr(param, zpp_str_grad, PyList_GetItem(unit->grad_views, index));
}

/* `grad`: a reference of the caller's, which it gives up. */
static int reduce_gradient(Unit *unit, Py_ssize_t index, PyObject *param, PyObject *grad, bool partial) {
    const PyObject *original = grad;
    const void *from = gradient_address(&grad, unit, index);
    int failed = !from && unit->unit->param_elems[index] ? -1 : hand_over(unit, index, from, partial);
    if (PyErr_Occurred()) failed = -1;
    if (!failed) failed = replace_grad(unit, index, param, original);
    Py_XDECREF(grad);
    if (unit->zero->stage > 0) took_gradient(unit, index);
    return failed || zpp_py_backward_step_gradient(unit, index, partial) || after_gradient(unit) ? -1 : 0;
}

static int take_from_param(Unit *unit, Py_ssize_t index, PyObject *param, bool partial) {
    /* While released, `grad` would go through __torch_function__, fifty times slower. */
    if (!unit->is_plain && zpp_py_swap(unit, true)) return -1;
    PyObject *grad = PyObject_GetAttr(param, zpp_str_grad);
    if (!grad) return -1;
    if (grad != Py_None) return reduce_gradient(unit, index, param, grad, partial);
    Py_DECREF(grad); /* another hook took it */
    return 0;
}

int zpp_py_take_from_param(Unit *unit, Py_ssize_t index) {
    return take_from_param(unit, index, unit->params[index], false);
}

static PyObject *take_gradient(PyObject *self, PyObject *param) {
    const GradHook *hook = (GradHook *)self;
    Unit *unit = hook->unit;
    Zero *zero = unit->zero;
    if (zero->closed) Py_RETURN_NONE;
    long task = -1;
    if (zpp_py_enter_backward(zero, false, &task)) return NULL;
    if (zero->pass.open && !zero->pass.units) return refuse_unannounced(unit, hook->param), NULL;
    const bool partial = task != zero->task && zpp_zero_uses(zero->core, unit->unit->index) == 0;
    const int failed = zpp_zero_takes_grads(zero->core) ? take_from_param(unit, hook->param, param, partial)
                                                        : keep_gradient(unit, hook->param, partial);
    if (failed) return NULL;
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

/* --- setting up --------------------------------------------------------------------------------------------------- */

static PyMethodDef end_backward_def = { "zeropp_end_backward", end_backward, METH_NOARGS, NULL };

PyObject *zpp_py_end_callback(Zero *zero) {
    return PyCFunction_NewEx(&end_backward_def, (PyObject *)zero, NULL);
}

int zpp_py_backward_init(void) {
    grad_hook_type = (PyTypeObject *)PyType_FromSpec(&grad_hook_spec);
    return grad_hook_type ? 0 : -1;
}
