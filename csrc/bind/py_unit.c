/* SPDX-License-Identifier: Apache-2.0
 *
 * What the other files of Zero and Unit stand on: a unit whole and released, and questions to torch and to Python.
 */
#include "py_zero.h"

#include "op_entries.h"
#include "raise.h"

void zpp_py_wait_for(const Zero *zero, struct zpp_wait *wait) {
    zpp_py_wait_init(wait, zero->timeout_ns);
}

int zpp_py_follow(Zero *zero) {
    if (!zero->accelerator) return 0;
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *same;
    void *native = NULL;
    zpp_status status = zpp_accelerator_current(zero->accelerator_type, zero->accelerator_index, &same, &native, &err);
    if (status == ZPP_OK) status = zpp_stream_follow(zpp_zero_compute(zero->core), native, &err);
    if (status == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

PyObject *zpp_py_raise_zero(const Zero *zero, const struct zpp_err *err) {
    return err->status == ZPP_TIER ? zpp_py_raise_aio(err, zpp_zero_fault(zero->core)) : zpp_py_raise(err);
}

/* --- whole and released ------------------------------------------------------------------------------------------- */

int zpp_py_swap(Unit *unit, bool plain) {
    if (!unit->released || unit->is_plain == plain || !unit->params) return 0;
    PyObject *class = plain ? unit->plain : unit->released;
    for (Py_ssize_t i = 0; i < unit->count; i++)
        if (PyObject_SetAttr(unit->params[i], zpp_str_class, class)) return -1;
    unit->is_plain = plain;
    return 0;
}

enum { RELEASE_LOCK_BYTES = 256 * 1024 };

/* The unit was given memory of its own, so its address has changed. */
static int bind_again(Unit *unit) {
    PyObject *done = PyObject_CallFunction(unit->zero->moved, "i", unit->unit->index);
    Py_XDECREF(done);
    if (done) unit->bound = unit->unit->whole;
    return done ? 0 : -1;
}

/* The node of autograd that runs on this thread. 0, or -1 with an error set. */
static int current_reader(Zero *zero, struct zpp_reader *reader) {
    *reader = (struct zpp_reader){ .outermost = zero->task, .task = -1 };
    if (!zpp_py_backward_runs(zero, &reader->task)) return PyErr_Occurred() ? -1 : 0;
    PyObject *node = PyObject_CallNoArgs(zero->current_node);
    PyObject *number = node ? PyObject_CallMethodObjArgs(node, zpp_str_sequence_nr, NULL) : NULL;
    if (number) reader->node = PyLong_AsUnsignedLongLong(number);
    Py_XDECREF(node);
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* Release units that the hooks gather again when they are read next, as far as this one needs their memory. */
static int evict_for(Unit *unit) {
    Zero *zero = unit->zero;
    struct zpp_reader now;
    int other;
    if (zero->keep_passes) return 0;
    if (current_reader(zero, &now)) return -1;
    if (now.task < 0) return 0;
    while ((other = zpp_zero_next_to_evict(zero->core, unit->unit->index, &now)) >= 0)
        if (zpp_py_release((Unit *)PyList_GetItem(zero->units, other))) return -1;
    zpp_zero_note_read(zero->core, unit->unit->index, &now);
    return 0;
}

int zpp_py_need(Unit *unit, enum zpp_phase phase) {
    Zero *zero = unit->zero;
    if (zpp_unit_moves(unit->unit)) {
        if (zpp_py_follow(zero)) return -1;
        if (phase == ZPP_PHASE_BACKWARD && evict_for(unit)) return -1;
        struct zpp_err err = ZPP_ERR_INIT;
        zpp_status status = ZPP_AGAIN;
        if (zpp_unit_is_gathered(unit->unit) || zpp_unit_bytes(unit->unit) < RELEASE_LOCK_BYTES)
            status = zpp_zero_need(zero->core, unit->unit->index, phase, NULL, &err);
        if (status == ZPP_AGAIN) {
            struct zpp_wait wait;
            zpp_py_wait_for(zero, &wait);
            PyThreadState *thread = PyEval_SaveThread();
            status = zpp_zero_need(zero->core, unit->unit->index, phase, &wait, &err);
            PyEval_RestoreThread(thread);
        }
        if (status != ZPP_OK) {
            zpp_py_raise_zero(zero, &err);
            return -1;
        }
        if (unit->unit->whole != unit->bound && zero->moved && bind_again(unit)) return -1;
    }
    return zpp_py_swap(unit, true);
}

int zpp_py_release(Unit *unit) {
    const struct zpp_unit *core = unit->unit;
    if (core->pins || unit->zero->keep_passes) return 0;
    if (core->sticky) return unit->zero->builds_loss ? 0 : zpp_py_swap(unit, false); /* keeps its memory */
    if (zpp_py_swap(unit, false)) return -1;
    if (!zpp_unit_moves(core)) return 0;
    if (zpp_py_follow(unit->zero)) return -1;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_zero_release(unit->zero->core, core->index, &err) == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

int zpp_py_end_pass(Zero *zero) {
    const Py_ssize_t count = PyList_Size(zero->units);
    if (zpp_py_follow(zero)) return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (zpp_py_release((Unit *)PyList_GetItem(zero->units, i))) return -1;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_zero_end_pass(zero->core, &err) == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

int zpp_py_release_all(Zero *zero) {
    const Py_ssize_t count = PyList_Size(zero->units);
    for (Py_ssize_t i = 0; i < count; i++) ((Unit *)PyList_GetItem(zero->units, i))->unit->sticky = false;
    zero->autos = zero->graphs = false;
    return zpp_py_end_pass(zero);
}

/* --- torch and Python --------------------------------------------------------------------------------------------- */

bool zpp_py_backward_runs(Zero *zero, long *task) {
    PyObject *id = PyObject_CallNoArgs(zero->current_graph_task_id);
    if (!id) return false;
    *task = PyLong_AsLong(id);
    Py_DECREF(id);
    return *task != -1;
}

int zpp_py_grad_mode(Zero *zero) {
    PyObject *on = PyObject_CallNoArgs(zero->is_grad_enabled);
    if (!on) return -1;
    const int answer = on == Py_True;
    Py_DECREF(on);
    return answer;
}

int zpp_py_call(PyObject *callable) {
    PyObject *held = Py_NewRef(callable); /* it may replace itself */
    PyObject *done = PyObject_CallNoArgs(held);
    Py_DECREF(held);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

PyObject *zpp_py_local_of(const Unit *unit, PyObject *tensor) {
    if (!unit->is_dtensor || !tensor || tensor == Py_None) return tensor;
    PyObject *local = PyObject_GetAttr(tensor, zpp_str_local_tensor);
    Py_DECREF(tensor);
    return local;
}

const char *zpp_py_param_words(const Unit *unit, Py_ssize_t param, char *text, size_t capacity) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    /* The façade keeps a Ref in each parameter (python/zeropp/zero/model/parameter.py). */
    PyObject *ref = unit->params ? PyObject_GetAttrString(unit->params[param], "_zeropp") : NULL;
    PyObject *name = ref ? PyObject_GetAttrString(ref, "name") : NULL;
    const char *utf8 = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    char words[ZPP_UNIT_WORDS];
    if (utf8)
        snprintf(text, capacity, "'%s'", utf8);
    else
        snprintf(text, capacity, "parameter %zd of %s", param, zpp_unit_words(unit->unit, words, sizeof words));
    Py_XDECREF(name);
    Py_XDECREF(ref);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
    return text;
}

void zpp_py_refuse_sparse(const Unit *unit, Py_ssize_t param) {
    char words[ZPP_PARAM_WORDS];
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError,
                 "zero: the gradient of %s is sparse; zeropp reduces and steps dense gradients, so build the embedding "
                 "with sparse=False",
                 zpp_py_param_words(unit, param, words, sizeof words));
}
