/* SPDX-License-Identifier: Apache-2.0
 *
 * The step inside the backward (docs/design/0032), as backward.c drives it and python/zeropp/zero/step_in_backward.py
 * sets it up.
 *
 *   a unit's gradients are complete on this rank   it is left: autograd reads its parameters no more
 *   they are reduced (one rank: the same moment)   it is stepped, by the thread of the backward; its gradient goes
 *   its shard is on its way to the file            it stays whole; later it is let go
 *
 * What fails is kept for backward_step_end, because other ranks wait for this one's reductions; nothing more is stepped
 * here.
 */
#include <stdlib.h>
#include <string.h>

#include "../zero/norm.h"
#include "py_aio.h"
#include "py_zero.h"
#include "pywait.h"
#include "raise.h"

static Unit *unit_at(const Zero *zero, Py_ssize_t index) {
    return (Unit *)PyList_GetItem(zero->units, index);
}

/* Nothing is reduced, so a unit's gradients are complete when all have come. */
static bool is_alone(const Zero *zero) {
    return zero->ranks == 1;
}

static void keep_failure(struct zpp_py_backward_step *backward_step, const struct zpp_err *err,
                         const struct zpp_aio_fault *fault) {
    if (backward_step->failed) return;
    backward_step->failed = true;
    backward_step->err = *err;
    if (fault && err->status == ZPP_TIER) backward_step->fault = *fault;
}

/* --- a unit stays whole until its shard is written ---------------------------------------------------------------- */

static bool is_on_disk(const Unit *unit) {
    return zpp_unit_on_disk(unit->unit);
}

static void pin(Unit *unit) {
    if (unit->backward_step.pinned) return;
    zpp_unit_pin(unit->unit);
    unit->backward_step.pinned = true;
}

static int unpin(Unit *unit) {
    if (!unit->backward_step.pinned) return 0;
    zpp_unit_unpin(unit->unit);
    unit->backward_step.pinned = false;
    return zpp_py_release(unit);
}

/* In memory, to be changed in place. */
static zpp_status open_shard(Unit *unit, struct zpp_err *err) {
    Zero *zero = unit->zero;
    if (!is_on_disk(unit)) return ZPP_OK;
    struct zpp_wait wait;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_zero_open_shard(zero->core, unit->unit->index, &wait, err);
    PyEval_RestoreThread(thread);
    if (status == ZPP_OK) pin(unit);
    return status;
}

/* The oldest of those on their way. Not before its place is wanted, also where it has arrived: what the next forward
 * begins with comes last. */
static int let_go(Zero *zero) {
    struct zpp_py_backward_step *backward_step = &zero->backward_step;
    const int index = backward_step->sending[0];
    struct zpp_err err = ZPP_ERR_INIT;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_zero_shard_sent(zero->core, index, &err);
    PyEval_RestoreThread(thread);
    backward_step->sending_count--;
    memmove(backward_step->sending, backward_step->sending + 1,
            (size_t)backward_step->sending_count * sizeof *backward_step->sending);
    if (status != ZPP_OK) keep_failure(backward_step, &err, zpp_zero_fault(zero->core));
    return unpin(unit_at(zero, index));
}

static int send(Unit *unit, struct zpp_err *err, zpp_status *status) {
    Zero *zero = unit->zero;
    struct zpp_py_backward_step *backward_step = &zero->backward_step;
    while (backward_step->sending_count == ZPP_BACKWARD_STEP_SENDING)
        if (let_go(zero)) return -1;
    *status = zpp_zero_send_shard(zero->core, unit->unit->index, err);
    if (*status == ZPP_OK) backward_step->sending[backward_step->sending_count++] = unit->unit->index;
    return 0;
}

/* Buffers whose writes have ended are read into again: between two units nobody else looks, and the disk would rest. */
static int read_on(Zero *zero) {
    struct zpp_py_backward_step *backward_step = &zero->backward_step;
    if (!backward_step->optim_file_open || backward_step->failed) return 0;
    zpp_optim_file *optim_file = zpp_py_optim_file_get(zero->optim_file);
    if (!optim_file) return -1;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    if (zpp_optim_file_backward_step_poll(optim_file, &fault, &err) != ZPP_OK) keep_failure(backward_step, &err,
                                                                                            &fault);
    return 0;
}

/* --- the update of one unit --------------------------------------------------------------------------------------- */

static zpp_status run_native(Unit *unit, zpp_optim_file *optim_file, struct zpp_aio_fault *fault,
                             struct zpp_err *err) {
    Zero *zero = unit->zero;
    struct zpp_step_plan plan = { .grad_scale = zero->backward_step.scale, .optim_file = optim_file,
                                  .files = { zpp_zero_param_file(zero->core), zpp_zero_grad_file(zero->core), false } };
    zpp_status status =
        zpp_step_plan_add(&zero->stepper, unit->unit->index, zero->backward_step.groups, &plan, err);
    if (optim_file && status == ZPP_OK && !zero->backward_step.optim_file_open) {
        status = zpp_optim_file_backward_step_begin(optim_file, fault, err);
        zero->backward_step.optim_file_open = status == ZPP_OK;
    }
    if (status == ZPP_OK) status = zpp_step_plan_run_unit(&plan, zero->pool, fault, err);
    zpp_step_plan_drop(&plan);
    return status;
}

static int step_native(Unit *unit, struct zpp_aio_fault *fault, struct zpp_err *err, zpp_status *status) {
    Zero *zero = unit->zero;
    zpp_optim_file *optim_file =
        zpp_py_step_unit(unit)->states.in_file && zero->optim_file ? zpp_py_optim_file_get(zero->optim_file) : NULL;
    if (PyErr_Occurred()) return -1;
    PyThreadState *thread = PyEval_SaveThread();
    *status = run_native(unit, optim_file, fault, err);
    PyEval_RestoreThread(thread);
    return 0;
}

static int step_in_python(Unit *unit) {
    PyObject *done = PyObject_CallFunction(unit->zero->backward_step.step, "i", unit->unit->index);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* In memory, where gradients are in a file. */
static zpp_status bring_gradient(Unit *unit, struct zpp_aio_fault *fault, struct zpp_err *err) {
    Zero *zero = unit->zero;
    if (!zpp_zero_grad_file(zero->core)) return ZPP_OK;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_zero_grad_here(zero->core, unit->unit->index, fault, err);
    PyEval_RestoreThread(thread);
    return status;
}

/* 0, also where it failed and that is kept; -1 with an error set. */
static int update(Unit *unit) {
    Zero *zero = unit->zero;
    struct zpp_py_backward_step *backward_step = &zero->backward_step;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct zpp_shard_norm norm;
    if (bring_gradient(unit, &fault, &err) != ZPP_OK) {
        keep_failure(backward_step, &err, &fault);
        return 0;
    }
    if (zpp_norm_of_unit(&zero->stepper, unit->unit->index, &norm, &err) != ZPP_OK) return PyErr_NoMemory(), -1;
    if (norm.bad_param >= 0) {
        zpp_fail(&err, ZPP_STATE, "a gradient is not finite");
        keep_failure(backward_step, &err, NULL);
        backward_step->bad_unit = unit->unit->index;
        backward_step->bad_param = (Py_ssize_t)norm.bad_param;
        return 0;
    }
    char words[ZPP_UNIT_WORDS];
    zpp_status status = open_shard(unit, &err);
    if (status == ZPP_TIER) fault = *zpp_zero_fault(zero->core);
    int failed = 0;
    if (status == ZPP_OK) {
        backward_step->stepped++;
        failed = backward_step->step ? step_in_python(unit) : step_native(unit, &fault, &err, &status);
    }
    if (!failed && status == ZPP_OK && is_on_disk(unit)) {
        failed = send(unit, &err, &status);
        if (status == ZPP_TIER) fault = *zpp_zero_fault(zero->core);
    }
    if (failed)
        zpp_fail(&err, ZPP_STATE, "the update of %s raised", zpp_unit_words(unit->unit, words, sizeof words));
    if (failed || status != ZPP_OK) keep_failure(backward_step, &err, &fault);
    return failed;
}

/* Its gradients are complete on this rank: what autograd has kept of its parameters is not to be read again. */
static int leave(Unit *unit) {
    if (unit->backward_step.left) return 0;
    unit->backward_step.left = true;
    if (is_on_disk(unit) && zpp_unit_is_gathered(unit->unit) && !unit->zero->backward_step.failed) pin(unit);
    PyObject *done = PyObject_CallFunction(unit->zero->backward_step.leave, "i", unit->unit->index);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* It is reduced: the update, and its gradient goes. */
static int step_unit(Unit *unit) {
    Zero *zero = unit->zero;
    const bool local = zpp_py_is_local(zero);
    bool any = false;
    if (unit->backward_step.stepped) return 0;
    unit->backward_step.stepped = true;
    if (local ? zpp_py_hold_gradients(unit, &any) : leave(unit)) return -1;
    if (!local) any = zpp_zero_grad_shard(zero->core, unit->unit->index, NULL) != NULL;
    if (any && local && leave(unit)) return -1;
    int failed = any && !zero->backward_step.failed ? update(unit) : 0;
    if (local && any && zpp_py_forget_gradients(unit)) failed = -1;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!local && zpp_zero_drop_grad(zero->core, unit->unit->index, &err) != ZPP_OK)
        keep_failure(&zero->backward_step, &err, zpp_zero_fault(zero->core));
    const int count = zero->backward_step.sending_count;
    const bool sent = count && zero->backward_step.sending[count - 1] == unit->unit->index;
    if (!sent && zpp_zero_shard_sent(zero->core, unit->unit->index, &err) != ZPP_OK)
        keep_failure(&zero->backward_step, &err, zpp_zero_fault(zero->core));
    if (!sent && unpin(unit)) failed = -1;
    return failed;
}

/* --- the next step's states --------------------------------------------------------------------------------------- */

static void read_ahead(Zero *zero) {
    zpp_optim_file *optim_file = zero->optim_file ? zpp_py_optim_file_get(zero->optim_file) : NULL;
    zero->backward_step.reads_ahead = false;
    if (optim_file) zpp_optim_file_backward_step_ahead(optim_file);
    else PyErr_Clear(); /* closed with the model */
}

/* The next forward waits for its units, and for states nobody before its end: these come when those were read. */
void zpp_py_backward_step_ahead(Zero *zero) {
    if (zero->backward_step.reads_ahead && !zpp_zero_reads_forward(zero->core)) read_ahead(zero);
}

/* --- what a backward calls ---------------------------------------------------------------------------------------- */

static int refuse(const char *what) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_fail(&err, ZPP_STATE,
             "zero: %s between a backward and optimizer.step(): with Config(step_in_backward=True) the backward has "
             "begun the step, and parameters are half new until optimizer.step() ends it; call that first",
             what);
    zpp_py_raise(&err);
    return -1;
}

int zpp_py_backward_step_require_ended(const Zero *zero, const char *what) {
    return zero->backward_step.pending ? refuse(what) : 0;
}

int zpp_py_backward_step_require_whole(const Unit *unit) {
    if (!unit->backward_step.left || !unit->zero->backward_step.open) return 0;
    char words[ZPP_UNIT_WORDS];
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_fail(&err, ZPP_STATE,
             "zero: %s is needed again after its gradients were complete, and with Config(step_in_backward=True) "
             "it may be stepped by then; something reads its weights and gives them no gradient (detach?); leave the "
             "option out",
             zpp_unit_words(unit->unit, words, sizeof words));
    zpp_py_raise(&err);
    return -1;
}

static void forget_units(Zero *zero) {
    for (Py_ssize_t i = 0; i < PyList_Size(zero->units); i++) {
        Unit *unit = unit_at(zero, i);
        if (!unit->backward_step.seen) continue;
        memset(unit->backward_step.seen, 0, (size_t)unit->count);
        unit->backward_step.missing = unit->count;
        unit->backward_step.partial = unit->backward_step.left = unit->backward_step.stepped = false;
    }
}

static int make_room(Zero *zero) {
    for (Py_ssize_t i = 0; i < PyList_Size(zero->units); i++) {
        Unit *unit = unit_at(zero, i);
        if (!unit->backward_step.seen) unit->backward_step.seen = calloc((size_t)unit->count + 1, 1);
        if (!unit->backward_step.seen) return PyErr_NoMemory(), -1;
    }
    return 0;
}

int zpp_py_backward_step_begin(Zero *zero) {
    struct zpp_py_backward_step *backward_step = &zero->backward_step;
    if (!backward_step->begin || !zero->boundary) return 0;
    if (make_room(zero)) return -1;
    if (backward_step->reads_ahead) read_ahead(zero);
    PyObject *said = PyObject_CallNoArgs(backward_step->begin), *groups = NULL;
    double scale;
    if (!said || !PyArg_ParseTuple(said, "O!d", &PyList_Type, &groups, &scale)) {
        Py_XDECREF(said);
        return -1;
    }
    free(backward_step->groups);
    backward_step->groups = zpp_py_read_groups(groups);
    Py_DECREF(said);
    if (!backward_step->groups) return -1;
    forget_units(zero);
    backward_step->scale = scale;
    backward_step->done = backward_step->stepped = 0;
    backward_step->failed = false;
    backward_step->bad_unit = -1;
    backward_step->open = true;
    zpp_zero_keep_grads(zero->core);
    return 0;
}

static int step_reduced(Zero *zero) {
    for (;;) {
        PyThreadState *thread = PyEval_SaveThread();
        const int index = zpp_zero_next_reduced(zero->core, zero->backward_step.done);
        PyEval_RestoreThread(thread);
        if (index < 0) return 0;
        zero->backward_step.done++;
        if (step_unit(unit_at(zero, index))) return -1;
    }
}

int zpp_py_backward_step_gradient(Unit *unit, Py_ssize_t param, bool partial) {
    Zero *zero = unit->zero;
    struct unit_backward_step *own = &unit->backward_step;
    if (!zero->backward_step.open) return 0;
    if (own->stepped) {
        char words[ZPP_PARAM_WORDS];
        struct zpp_err err = ZPP_ERR_INIT;
        zpp_fail(&err, ZPP_STATE,
                 "zero: a gradient of %s came after its unit was stepped; its module ran in a way that the hooks did "
                 "not see; leave out Config(step_in_backward=True), or make it a unit of its own with "
                 "Config(units=...)",
                 zpp_py_param_words(unit, param, words, sizeof words));
        zpp_py_raise(&err);
        return -1;
    }
    own->partial |= partial;
    if (!own->seen[param]) own->missing--;
    own->seen[param] = 1;
    const bool complete = own->missing == 0 && !own->partial && zpp_zero_used_once(zero->core, unit->unit->index);
    if (complete && leave(unit)) return -1;
    if (is_alone(zero) ? complete && step_unit(unit) : step_reduced(zero)) return -1;
    return read_on(zero);
}

int zpp_py_backward_step_close(Zero *zero) {
    struct zpp_py_backward_step *backward_step = &zero->backward_step;
    if (!backward_step->open) return 0;
    int failed = is_alone(zero) ? 0 : step_reduced(zero);
    for (Py_ssize_t i = PyList_Size(zero->units) - 1; is_alone(zero) && i >= 0 && !failed; i--)
        if (unit_at(zero, i)->unit->trainable) failed = step_unit(unit_at(zero, i));
    backward_step->open = false;
    backward_step->pending = backward_step->stepped || backward_step->failed;
    return failed;
}

static int end_writes(Zero *zero) {
    struct zpp_py_backward_step *backward_step = &zero->backward_step;
    int failed = 0;
    while (backward_step->sending_count && !failed) failed = let_go(zero);
    for (Py_ssize_t i = 0; i < PyList_Size(zero->units) && !failed; i++) failed = unpin(unit_at(zero, i));
    zpp_optim_file *optim_file = backward_step->optim_file_open && zero->optim_file
        ? zpp_py_optim_file_get(zero->optim_file) : NULL;
    backward_step->optim_file_open = false;
    if (!optim_file) return PyErr_Occurred() ? -1 : failed;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_optim_file_backward_step_end(optim_file, &fault, &err);
    PyEval_RestoreThread(thread);
    backward_step->reads_ahead = status == ZPP_OK;
    if (status != ZPP_OK) keep_failure(backward_step, &err, &fault);
    zpp_py_backward_step_ahead(zero);
    return failed;
}

int zpp_py_backward_step_abort(Zero *zero) {
    struct zpp_py_backward_step *backward_step = &zero->backward_step;
    if (!backward_step->open) return 0;
    backward_step->open = false;
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_fail(&err, ZPP_STATE, "zero: the backward ended by an exception after %d unit%s had been stepped",
             backward_step->stepped, backward_step->stepped == 1 ? "" : "s");
    if (backward_step->stepped) keep_failure(backward_step, &err, NULL);
    backward_step->pending = backward_step->stepped;
    const int failed = end_writes(zero);
    forget_units(zero);
    return failed;
}

void zpp_py_backward_step_forget(Zero *zero) {
    Py_CLEAR(zero->backward_step.begin);
    Py_CLEAR(zero->backward_step.leave);
    Py_CLEAR(zero->backward_step.step);
}

/* --- what the façade calls ---------------------------------------------------------------------------------------- */

/* set_backward_step(begin, leave, step | None): steps are inside the backward from now on, see struct
 * zpp_py_backward_step. */
static PyObject *zero_set_backward_step(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *begin, *left, *step;
    if (!PyArg_ParseTuple(args, "OOO", &begin, &left, &step)) return NULL;
    zpp_py_backward_step_forget(zero);
    zero->backward_step.begin = Py_NewRef(begin);
    zero->backward_step.leave = Py_NewRef(left);
    zero->backward_step.step = step == Py_None ? NULL : Py_NewRef(step);
    Py_RETURN_NONE;
}

/* backward_step_end() -> None, or (unit, parameter, ranks) whose gradient was not finite, as norm() has it; raises what
 * else failed. Everything that was stepped is written. */
static PyObject *zero_backward_step_end(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    struct zpp_py_backward_step *backward_step = &zero->backward_step;
    if (!backward_step->failed) zpp_zero_keep_for_forward(zero->core);
    const int broken = end_writes(zero);
    forget_units(zero);
    const bool failed = backward_step->failed || broken;
    backward_step->pending = backward_step->failed = false;
    zero->torn |= failed && backward_step->stepped;
    if (broken) return NULL;
    if (failed && backward_step->bad_unit >= 0)
        return Py_BuildValue("(nnK)", backward_step->bad_unit, backward_step->bad_param,
                             (unsigned long long)zpp_zero_origins(zero->core, (int)backward_step->bad_unit));
    if (failed) return zpp_py_raise_aio(&backward_step->err, &backward_step->fault);
    zero->steps++;
    Py_RETURN_NONE;
}

/* backward_step_drop(): the same, told to nobody: a load replaces all that was stepped. */
static PyObject *zero_backward_step_drop(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    const int broken = end_writes(zero);
    forget_units(zero);
    zero->backward_step.pending = zero->backward_step.failed = false;
    if (broken) return NULL;
    Py_RETURN_NONE;
}

static PyObject *zero_backward_step_pending(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(((Zero *)self)->backward_step.pending);
}

/* pool_grads(): before seal. */
static PyObject *zero_pool_grads(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_zero_pool_grads(((Zero *)self)->core);
    Py_RETURN_NONE;
}

PyMethodDef zpp_py_backward_step_methods[] = {
    { "set_backward_step", zero_set_backward_step, METH_VARARGS,
     "set_backward_step(begin, leave, step): step inside the backward." },
    { "backward_step_end", zero_backward_step_end, METH_NOARGS,
     "The step that the backward began is over; what failed in it." },
    { "backward_step_drop", zero_backward_step_drop, METH_NOARGS, "The same, and forget what failed." },
    { "backward_step_pending", zero_backward_step_pending, METH_NOARGS,
     "Has a backward begun a step that was not ended?" },
    { "pool_grads", zero_pool_grads, METH_NOARGS, "Gradients have memory until their unit is stepped." },
    { NULL, NULL, 0, NULL },
};
