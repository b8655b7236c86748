/* SPDX-License-Identifier: Apache-2.0
 *
 * What the optimizer calls: which gradients there are, their norm, where its states are, and the step, at once or
 * delayed. The work is done in zero/norm.c, zero/step_plan.h and zero/step_delayed.h; here Python objects are converted
 * for them. The step inside the backward is in py_step_in_backward.c.
 *
 * Local gradients (step_plan.h) are p.grad: references are held while a step may read them. The thread of a delayed
 * step uses neither Python's lock nor its objects, so what was p.grad then stays in a list until the step is over.
 */
#include <stdlib.h>

#include "../zero/step_device.h"
#include "../zero/step_plan.h"
#include "raise.h"
#include "py_zero.h"

static Unit *unit_at(const Zero *zero, Py_ssize_t index) {
    return (Unit *)PyList_GetItem(zero->units, index);
}

/* True if gradients are in p.grad, and not in shards. */
static bool is_local(const Zero *zero) {
    return zpp_zero_grads_are_local(zero->core);
}

/* Borrowed; of a sealed Zero. */
static struct zpp_step_unit *step_unit(const Unit *unit) {
    return &unit->zero->stepper.units[unit->unit->index];
}

/* --- local gradients ---------------------------------------------------------------------------------------------- */

void zpp_py_drop_grads(Unit *unit) {
    for (Py_ssize_t i = 0; unit->grad_refs && i < unit->count; i++) {
        Py_CLEAR(unit->grad_refs[i]);
        step_unit(unit)->local_grads[i] = NULL;
    }
}

/* Hold p.grad of one parameter, as a dense and contiguous tensor. Return 1 if it has one, 0 if not, -1 on errors. */
static int hold_gradient(Unit *unit, Py_ssize_t i) {
    PyObject *grad = zpp_py_local_of(unit, PyObject_GetAttr(unit->params[i], zpp_str_grad));
    if (!grad) return -1;
    if (grad == Py_None) {
        Py_DECREF(grad);
        return 0;
    }
    PyObject *dense = PyObject_CallMethodObjArgs(grad, zpp_str_contiguous, NULL);
    Py_DECREF(grad);
    if (!dense) return zpp_py_refuse_sparse(unit, i), -1;
    PyObject *address = PyObject_CallMethodObjArgs(dense, zpp_str_data_ptr, NULL);
    if (!address) {
        Py_DECREF(dense);
        return -1;
    }
    unit->grad_refs[i] = dense;
    step_unit(unit)->local_grads[i] = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    return 1;
}

int zpp_py_hold_gradients(Unit *unit, bool *any) {
    const bool was_plain = unit->is_plain;
    zpp_py_drop_grads(unit);
    if (zpp_py_swap(unit, true)) return -1;
    for (Py_ssize_t i = 0; i < unit->count; i++) {
        const int held = hold_gradient(unit, i);
        if (held < 0) return -1;
        *any |= held;
    }
    return was_plain ? 0 : zpp_py_swap(unit, false);
}

/* collect_grads() -> bool: True if there is a gradient to step with. Local ones are held until the next clear_grads. */
static PyObject *zero_collect_grads(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    if (zpp_py_settle(zero)) return NULL;
    if (!is_local(zero)) return PyBool_FromLong(zpp_zero_has_grad(zero->core));
    bool any = false;
    const Py_ssize_t count = PyList_Size(zero->units);
    for (Py_ssize_t i = 0; i < count; i++)
        if (unit_at(zero, i)->unit->trainable && zpp_py_hold_gradients(unit_at(zero, i), &any)) return NULL;
    return PyBool_FromLong(any);
}

int zpp_py_forget_gradients(Unit *unit) {
    const bool was_plain = unit->is_plain;
    zpp_py_drop_grads(unit);
    if (zpp_py_swap(unit, true)) return -1;
    for (Py_ssize_t i = 0; i < unit->count; i++)
        if (PyObject_SetAttr(unit->params[i], zpp_str_grad, Py_None)) return -1;
    return was_plain ? 0 : zpp_py_swap(unit, false);
}

static PyObject *zero_clear_grads(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    if (zpp_py_settle(zero)) return NULL;
    const Py_ssize_t count = PyList_Size(zero->units);
    for (Py_ssize_t i = 0; i < count && is_local(zero); i++)
        if (unit_at(zero, i)->unit->trainable && zpp_py_forget_gradients(unit_at(zero, i))) return NULL;
    zpp_zero_clear_grads(zero->core);
    Py_RETURN_NONE;
}

/* grads_pending() -> bool: True if this rank has gradients that are not reduced yet (no_sync). */
static PyObject *zero_grads_pending(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    return PyBool_FromLong(!is_local(zero) && zpp_zero_grads_pending(zero->core));
}

/* --- norm --------------------------------------------------------------------------------------------------------- */

/* [(unit, parameter, element, rank, ranks), ...] of what is not finite; new, or NULL with an error set. */
static PyObject *list_bad(const struct zpp_shard_norm *norms, int units, int ranks) {
    PyObject *bad = PyList_New(0);
    for (int at = 0; bad && at < units * ranks; at++) {
        const int unit = at / ranks, rank = at % ranks;
        const struct zpp_shard_norm *norm = &norms[rank * units + unit];
        if (norm->bad_param < 0) continue;
        PyObject *where = Py_BuildValue("(inniK)", unit, (Py_ssize_t)norm->bad_param, (Py_ssize_t)norm->bad_elem, rank,
                                        (unsigned long long)norm->origins);
        if (!where || PyList_Append(bad, where)) Py_CLEAR(bad);
        Py_XDECREF(where);
    }
    return bad;
}

/* norm() -> (sum of squares over all ranks of the job, [(unit, parameter, element, rank, ranks) that is not finite, ..]
 * of the data ranks, how many there are of all ranks); collective. element: the first such one of `rank`'s shard, -1
 * where it was not looked for. ranks: a bit for each data rank whose gradient was not finite before the sum. */
static PyObject *zero_norm(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    if (zpp_py_settle(zero)) return NULL;
    const int units = zero->stepper.units_count;
    struct zpp_shard_norm *norms = calloc((size_t)units * (size_t)zero->ranks + 1, sizeof *norms);
    if (!norms) return PyErr_NoMemory();
    if (zpp_py_follow(zero)) {
        free(norms);
        return NULL;
    }
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    struct zpp_job_norm job = {0};
    zpp_status status = zpp_norm_of_all(&zero->stepper, norms, &wait, &err);
    if (status == ZPP_OK) status = zpp_norm_of_job(&zero->stepper, norms, &job, &wait, &err);
    PyEval_RestoreThread(thread);
    PyObject *bad = status == ZPP_OK ? list_bad(norms, units, zero->ranks) : zpp_py_raise(&err);
    free(norms);
    return bad ? Py_BuildValue("(dNK)", job.squares, bad, (unsigned long long)job.bad) : NULL;
}

/* --- step --------------------------------------------------------------------------------------------------------- */

/* Return [vote of each rank of the job], or NULL with an error set. */
static PyObject *ask_ranks(Zero *zero,
                           zpp_status (*ask)(zpp_zero *, uint64_t, uint64_t *, const struct zpp_wait *,
                                             struct zpp_err *),
                           uint64_t vote) {
    const int ranks = zpp_zero_job_ranks(zero->core);
    uint64_t *votes = calloc((size_t)ranks, sizeof *votes);
    if (!votes) return PyErr_NoMemory();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = ask(zero->core, vote, votes, &wait, &err);
    PyEval_RestoreThread(thread);
    PyObject *list = status == ZPP_OK ? PyList_New(ranks) : NULL;
    for (int rank = 0; list && rank < ranks; rank++)
        if (PyList_SetItem(list, rank, PyLong_FromUnsignedLongLong(votes[rank]))) Py_CLEAR(list);
    free(votes);
    return status == ZPP_OK ? list : zpp_py_raise(&err);
}

/* step_begin(vote) -> [vote of each rank of the job]; collective. No rank reads parameters from then on. */
static PyObject *zero_step_begin(PyObject *self, PyObject *arg) {
    Zero *zero = (Zero *)self;
    const uint64_t vote = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred() || zpp_py_settle(zero) || zpp_py_release_all(zero)) return NULL;
    zero->builds_loss = false;
    return ask_ranks(zero, zpp_zero_step_begin, vote);
}

static zpp_status agree(zpp_zero *zero, uint64_t vote, uint64_t *votes, const struct zpp_wait *wait,
                        struct zpp_err *err) {
    return zpp_zero_agree(zero, &vote, sizeof vote, votes, wait, err);
}

/* agree(vote) -> [vote of each rank of the job]; collective. */
static PyObject *zero_agree(PyObject *self, PyObject *arg) {
    const uint64_t vote = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred() || zpp_py_follow((Zero *)self)) return NULL;
    return ask_ranks((Zero *)self, agree, vote);
}

/* step_end(by_grads=False): returns when every shard is written, on every rank; collective. */
static PyObject *zero_step_end(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    int by_grads = 0;
    if (!PyArg_ParseTuple(args, "|p", &by_grads) || zpp_py_follow(zero)) return NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_zero_step_end(zero->core, by_grads, &wait, &err);
    PyEval_RestoreThread(thread);
    for (Py_ssize_t i = 0; i < PyList_Size(zero->units); i++) zpp_py_drop_grads(unit_at(zero, i));
    return zpp_py_result(status, &err);
}

/* --- states ------------------------------------------------------------------------------------------------------- */

/* New; NULL with an error set. */
static int *group_numbers(const Unit *unit, PyObject *groups) {
    if (PyList_Size(groups) != unit->count) {
        PyErr_Format(PyExc_ValueError, "zero: %zd groups for the %zd parameters of unit %s", PyList_Size(groups),
                     unit->count, unit->unit->name);
        return NULL;
    }
    int *numbers = calloc((size_t)unit->count + 1, sizeof *numbers);
    if (!numbers) return (int *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < unit->count; i++) numbers[i] = (int)PyLong_AsLong(PyList_GetItem(groups, i));
    if (!PyErr_Occurred()) return numbers;
    free(numbers);
    return NULL;
}

static PyObject *replace_states(const Unit *unit, struct zpp_unit_states states, PyObject *groups) {
    states.groups = group_numbers(unit, groups);
    if (!states.groups) return NULL;
    struct zpp_unit_states *at = &step_unit(unit)->states;
    free(at->groups);
    *at = states;
    Py_RETURN_NONE;
}

/* set_states(kind, master, steps, first_param, groups, codes and scales of each moment): addresses, 0: none. Moments in
 * fp32 and fp64 are codes without scales. */
static PyObject *unit_set_states(PyObject *self, PyObject *args) {
    unsigned long long master, steps, first_param, codes[3], scales[3];
    int kind;
    PyObject *groups;
    if (!PyArg_ParseTuple(args, "iKKKO!KKKKKK", &kind, &master, &steps, &first_param, &PyList_Type, &groups, &codes[0],
                          &scales[0], &codes[1], &scales[1], &codes[2], &scales[2]))
        return NULL;
    struct zpp_unit_states states = { .master = (float *)(uintptr_t)master, .kind = (enum zpp_moments_kind)kind,
                                      .first_param = first_param, .steps = (int64_t *)(uintptr_t)steps };
    for (int k = 0; k < 3; k++)
        states.moments[k] = (struct zpp_moment){ (void *)(uintptr_t)codes[k], (float *)(uintptr_t)scales[k] };
    return replace_states((Unit *)self, states, groups);
}

/* set_states_in_file(shard, steps, groups): master and moments are a shard of Zero's optimizer file. */
static PyObject *unit_set_states_in_file(PyObject *self, PyObject *args) {
    unsigned long long steps;
    int shard;
    PyObject *groups;
    if (!PyArg_ParseTuple(args, "iKO!", &shard, &steps, &PyList_Type, &groups)) return NULL;
    const struct zpp_unit_states states = { .steps = (int64_t *)(uintptr_t)steps, .in_file = true,
                                            .file_shard = shard };
    return replace_states((Unit *)self, states, groups);
}

/* set_back_buffer(address): where a delayed step puts the new values of this rank's shard, in the unit's dtype. */
static PyObject *unit_set_back_buffer(PyObject *self, PyObject *address) {
    step_unit((Unit *)self)->back_buffer = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef zpp_py_unit_step_methods[] = {
    { "set_states", unit_set_states, METH_VARARGS,
      "set_states(kind, master, steps, first_param, groups, codes, scales, ...): addresses, 0: none." },
    { "set_states_in_file", unit_set_states_in_file, METH_VARARGS, "set_states_in_file(shard, steps, groups)" },
    { "set_back_buffer", unit_set_back_buffer, METH_O, "set_back_buffer(address): of a delayed step's new values." },
    { NULL, NULL, 0, NULL },
};

/* set_optim_file(OptimFile): the optimizer file that has the states of units in a file. */
static PyObject *zero_set_optim_file(PyObject *self, PyObject *optim_file) {
    Zero *zero = (Zero *)self;
    if (!zpp_py_optim_file_get(optim_file)) return NULL;
    Py_XDECREF(zero->optim_file);
    zero->optim_file = Py_NewRef(optim_file);
    Py_RETURN_NONE;
}

/* The stepper has the optimizer file of now. 0, or -1 with an error set: it is closed. */
static int refresh_optim_file(Zero *zero) {
    zero->stepper.optim_file = zero->optim_file ? zpp_py_optim_file_get(zero->optim_file) : NULL;
    return zero->optim_file && !zero->stepper.optim_file ? -1 : 0;
}

/* --- the step at once --------------------------------------------------------------------------------------------- */

/* Set the optimizer of a group and its rates from the five numbers of python/zeropp/zero/step/updates.py: `beta1` is
 * also Adagrad's lr_decay and SGD's momentum, `beta2` also Adagrad's initial sum and SGD's dampening. */
static bool set_optimizer(struct zpp_optim_segment *group, unsigned char update) {
    enum { NESTEROV = ZPP_OPTIM_SGD + 1 };
    if (update > NESTEROV) {
        PyErr_Format(PyExc_ValueError, "no optimizer has the number %d", (int)update);
        return false;
    }
    group->nesterov = update == NESTEROV;
    group->optimizer = group->nesterov ? ZPP_OPTIM_SGD : update;
    group->init_sum = true;
    group->lr_decay = group->momentum = group->beta1;
    group->initial_sum = group->dampening = group->beta2;
    return true;
}

/* Each group is (update, lr, beta1, beta2, eps, weight_decay, decoupled, maximize, moments): fields of a segment, and a
 * bit for each moment that the optimizer has. */
struct zpp_optim_segment *zpp_py_read_groups(PyObject *list) {
    const Py_ssize_t count = PyList_Size(list);
    struct zpp_optim_segment *groups = calloc((size_t)count + 1, sizeof *groups);
    if (!groups) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        int decoupled, maximize;
        unsigned moments;
        unsigned char update;
        struct zpp_optim_segment *group = &groups[i];
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "bdddddppI", &update, &group->lr, &group->beta1,
                              &group->beta2, &group->eps, &group->weight_decay, &decoupled, &maximize, &moments) ||
            !set_optimizer(group, update)) {
            free(groups);
            return NULL;
        }
        group->decoupled_decay = decoupled;
        group->maximize = maximize;
        static float mark; /* replaced by the unit's own memory */
        group->exp_avg = moments & 1 ? &mark : NULL;
        group->exp_avg_sq = moments & 2 ? &mark : NULL;
        group->max_exp_avg_sq = moments & 4 ? &mark : NULL;
    }
    return groups;
}

/* adam_step(groups, grad_scale): between step_begin and step_end. */
static PyObject *zero_adam_step(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *list;
    double scale;
    if (!PyArg_ParseTuple(args, "O!d", &PyList_Type, &list, &scale) || refresh_optim_file(zero)) return NULL;
    if (zpp_py_follow(zero)) return NULL;
    struct zpp_optim_segment *groups = zpp_py_read_groups(list);
    if (!groups) return NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault = { 0 };
    struct zpp_step_plan plan;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_status status = zpp_step_plan_make(&zero->stepper, groups, scale, false, &plan, &err);
    if (status == ZPP_OK) {
        if (zpp_zero_shards_on_device(zero->core)) status = zpp_step_device_run(&zero->stepper, &plan, &err);
        else status = zpp_step_plan_run(&plan, zero->pool, &zero->inconsistent, &fault, &err);
        zpp_step_plan_drop(&plan);
        zero->steps += status == ZPP_OK;
    }
    PyEval_RestoreThread(thread);
    free(groups);
    return zpp_py_result_aio(status, &err, &fault);
}

/* reset_uses(): a step was taken, so no backward follows the forwards before it. */
static PyObject *zero_reset_uses(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_zero_reset_uses(((Zero *)self)->core);
    Py_RETURN_NONE;
}

/* restart_step(): the next backward is the first of `accumulate`. */
static PyObject *zero_restart_step(PyObject *self, PyObject *unused) {
    (void)unused;
    ((Zero *)self)->micro = 0;
    Py_RETURN_NONE;
}

/* --- the delayed step -------------------------------------------------------------------------------------------- */

/* End without errors: the model or the process goes. */
void zpp_py_delayed_end(Zero *zero) {
    zpp_delayed *delayed = zero->delayed;
    zero->delayed = NULL;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_delayed_destroy(delayed);
    PyEval_RestoreThread(thread);
    Py_CLEAR(zero->delayed_grads);
}

static int make_delayed(Zero *zero) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (!zero->delayed_grads && !(zero->delayed_grads = PyList_New(0))) return -1;
    if (zero->delayed || zpp_delayed_create(zero->host, &zero->delayed, &err) == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

/* Local gradients stay alive until the step is over. */
static int hold_local_gradients(const Zero *zero) {
    const Py_ssize_t count = is_local(zero) ? PyList_Size(zero->units) : 0;
    for (Py_ssize_t u = 0; u < count; u++) {
        const Unit *unit = unit_at(zero, u);
        for (Py_ssize_t i = 0; i < unit->count; i++)
            if (unit->grad_refs[i] && PyList_Append(zero->delayed_grads, unit->grad_refs[i])) return -1;
    }
    return 0;
}

/* delayed_begin(groups, grad_scale, here): between step_begin and step_end, after delayed_wait and delayed_publish. */
static PyObject *zero_delayed_begin(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *list;
    double scale;
    int here;
    if (!PyArg_ParseTuple(args, "O!dp", &PyList_Type, &list, &scale, &here)) return NULL;
    if (refresh_optim_file(zero) || make_delayed(zero) || hold_local_gradients(zero)) return NULL;
    struct zpp_optim_segment *groups = zpp_py_read_groups(list);
    if (!groups) return NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_step_plan plan;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_status status = zpp_delayed_plan(&zero->stepper, groups, scale, &plan, &err);
    if (status == ZPP_OK) status = zpp_delayed_begin(zero->delayed, &plan, here, zero->pool, &err);
    PyEval_RestoreThread(thread);
    free(groups);
    zero->steps += status == ZPP_OK;
    return zpp_py_result(status, &err);
}

/* delayed_wait(): the step under way is over; raises what it came to, once. */
static PyObject *zero_delayed_wait(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    if (!zero->delayed) Py_RETURN_NONE;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_delayed_wait(zero->delayed, &fault, &err);
    PyEval_RestoreThread(thread);
    Py_CLEAR(zero->delayed_grads);
    zero->inconsistent |= status != ZPP_OK;
    return zpp_py_result_aio(status, &err, &fault);
}

/* delayed_publish(): between step_begin and step_end. */
static PyObject *zero_delayed_publish(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    if (!zero->delayed) Py_RETURN_NONE;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_delayed_publish(zero->delayed, zero->pool);
    PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

/* delay_steps(): before units are added. */
static PyObject *zero_delay_steps(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_zero_delay_steps(((Zero *)self)->core);
    Py_RETURN_NONE;
}

/* delayed_failed(): after delayed_finish. */
static PyObject *zero_delayed_failed(PyObject *self, PyObject *unused) {
    (void)unused;
    const Zero *zero = (Zero *)self;
    return PyBool_FromLong(zero->delayed && zpp_delayed_failed(zero->delayed));
}

static PyObject *unlocked(Zero *zero, void (*call)(zpp_delayed *)) {
    if (!zero->delayed) Py_RETURN_NONE;
    PyThreadState *thread = PyEval_SaveThread();
    call(zero->delayed);
    PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

static PyObject *zero_delayed_finish(PyObject *self, PyObject *unused) {
    (void)unused;
    return unlocked((Zero *)self, zpp_delayed_finish);
}

static PyObject *zero_delayed_drop(PyObject *self, PyObject *unused) {
    (void)unused;
    return unlocked((Zero *)self, zpp_delayed_drop);
}

static PyObject *zero_delayed_pending(PyObject *self, PyObject *unused) {
    (void)unused;
    const Zero *zero = (Zero *)self;
    return PyBool_FromLong(zero->delayed && zpp_delayed_pending(zero->delayed));
}

static PyObject *zero_delayed_figures(PyObject *self, PyObject *unused) {
    (void)unused;
    const Zero *zero = (Zero *)self;
    struct zpp_delayed_figures seen = { 0 };
    if (zero->delayed) zpp_delayed_figures(zero->delayed, &seen);
    return Py_BuildValue("{s:K,s:K,s:K,s:n}", "steps", (unsigned long long)seen.steps, "step_ns",
                         (unsigned long long)seen.step_ns, "waited_ns", (unsigned long long)seen.waited_ns,
                         "back_bytes", (Py_ssize_t)zpp_zero_back_bytes(zero->core));
}

static PyObject *zero_delayed_end(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_py_delayed_end((Zero *)self);
    Py_RETURN_NONE;
}

PyMethodDef zpp_py_step_methods[] = {
    { "collect_grads", zero_collect_grads, METH_NOARGS, "Find the gradients to step with; True if there is one." },
    { "clear_grads", zero_clear_grads, METH_NOARGS, "Forget all gradients." },
    { "grads_pending", zero_grads_pending, METH_NOARGS, "True if no_sync held gradients back." },
    { "norm", zero_norm, METH_NOARGS, "(sum of squares, parameters that are not finite); collective." },
    { "agree", zero_agree, METH_O, "agree(vote) -> votes of the job's ranks; collective." },
    { "step_begin", zero_step_begin, METH_O, "step_begin(vote) -> votes; collective." },
    { "step_end", zero_step_end, METH_VARARGS,
      "step_end(by_grads=False): every shard is written, or those of units with a gradient; collective." },
    { "set_optim_file", zero_set_optim_file, METH_O, "The optimizer file with the states of units in a file." },
    { "adam_step", zero_adam_step, METH_VARARGS, "adam_step(groups, grad_scale)" },
    { "reset_uses", zero_reset_uses, METH_NOARGS, "Forget forwards that no backward followed." },
    { "restart_step", zero_restart_step, METH_NOARGS, "The next backward is the first of a step." },
    { "delay_steps", zero_delay_steps, METH_NOARGS, "Files have two places for what a step touches; before units." },
    { "delayed_failed", zero_delayed_failed, METH_NOARGS, "After delayed_finish: will delayed_wait raise?" },
    { "delayed_begin", zero_delayed_begin, METH_VARARGS, "delayed_begin(groups, grad_scale, here)" },
    { "delayed_wait", zero_delayed_wait, METH_NOARGS, "Wait for the delayed step under way." },
    { "delayed_publish", zero_delayed_publish, METH_NOARGS, "Its new values go to their shards." },
    { "delayed_finish", zero_delayed_finish, METH_NOARGS, "No step runs any more; the shards are as before." },
    { "delayed_drop", zero_delayed_drop, METH_NOARGS, "The same, and forget it." },
    { "delayed_pending", zero_delayed_pending, METH_NOARGS, "Are there values that the shards do not have?" },
    { "delayed_figures", zero_delayed_figures, METH_NOARGS, "Counts and times." },
    { "delayed_end", zero_delayed_end, METH_NOARGS, "Wait for the step under way, and end its thread." },
    { NULL, NULL, 0, NULL },
};
