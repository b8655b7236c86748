/* SPDX-License-Identifier: Apache-2.0
 *
 * Layer dropping: which layers a pass leaves out. python/zeropp/zero/model/layer_drop.py decides, as a pure function of
 * the step and the micro-step, so that all ranks do the same without a message. What is left out stays so until the
 * next forward that builds a graph: a recomputation in the backward meets the layers that its forward met.
 */
#include "py_zero.h"

int zpp_py_layer_drop_begin(Zero *zero, bool grad) {
    PyObject *on_demand = zero->layer_drop.on_demand;
    if (!zero->layer_drop.begin && !on_demand) return 0;
    if (grad && zero->layer_drop.begin) {
        zero->layer_drop.trains = true;
        return zpp_py_call(zero->layer_drop.begin);
    }
    /* An evaluation reads all layers, and of units on demand a part. */
    zpp_zero_mask(zero->core, on_demand && !grad ? (const uint8_t *)PyBytes_AsString(on_demand) : NULL);
    return 0;
}

/* set_on_demand(units): bytes, 1 for each unit of which passes without gradients read parts (begin_part), so that
 * nothing gathers it ahead of need. */
static PyObject *zero_set_on_demand(PyObject *self, PyObject *units) {
    Zero *zero = (Zero *)self;
    if (!PyBytes_Check(units) || PyBytes_Size(units) != PyList_Size(zero->units))
        return PyErr_SetString(PyExc_ValueError, "set_on_demand: wanted bytes, one for each unit"), NULL;
    Py_XDECREF(zero->layer_drop.on_demand);
    zero->layer_drop.on_demand = Py_NewRef(units);
    Py_RETURN_NONE;
}

static int turn(Zero *zero, bool trains) {
    zero->layer_drop.trains = trains;
    PyObject *done = PyObject_CallFunctionObjArgs(zero->layer_drop.turn, trains ? Py_True : Py_False, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int zpp_py_layer_enter(Zero *zero, Py_ssize_t layer, bool trains) {
    PyObject *dropped = zero->layer_drop.dropped;
    if (!dropped) return 0;
    if (trains != zero->layer_drop.trains && turn(zero, trains)) return -1;
    return trains && layer < PyBytes_Size(dropped) && PyBytes_AsString(dropped)[layer];
}

/* set_layer_drop(begin, turn): begin() is called before each outermost forward that builds a graph, and calls
 * drop_layers; turn(trains) where layers of an evaluation come between those of training, and after. */
static PyObject *zero_set_layer_drop(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *begin, *turn_;
    if (!PyArg_ParseTuple(args, "OO", &begin, &turn_)) return NULL;
    zpp_py_layer_drop_forget(zero);
    zero->layer_drop.begin = Py_NewRef(begin);
    zero->layer_drop.turn = Py_NewRef(turn_);
    zpp_zero_mask(zero->core, NULL);
    Py_RETURN_NONE;
}

/* States of units that the whole step leaves out are not read ahead. 0, or -1 with an error set. */
static int expect_states(const Zero *zero, const char *unstepped) {
    if (!zero->optim_file) return 0;
    zpp_optim_file *optim_file = zpp_py_optim_file_get(zero->optim_file);
    if (!optim_file) return -1;
    for (int i = 0; i < zero->stepper.units_count; i++) {
        const struct zpp_unit_states *states = &zero->stepper.units[i].states;
        if (states->in_file) zpp_optim_file_backward_step_expect(optim_file, states->file_shard, !unstepped[i]);
    }
    return 0;
}

/* drop_layers(layers, units, unstepped): bytes, 1 for each layer that this pass leaves out, for each unit that it does
 * not need, and for each unit that no pass of this step needs. */
static PyObject *zero_drop_layers(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *layers, *units, *unstepped;
    if (!PyArg_ParseTuple(args, "SSS", &layers, &units, &unstepped)) return NULL;
    const Py_ssize_t count = PyList_Size(zero->units);
    if (PyBytes_Size(units) != count || PyBytes_Size(unstepped) != count) {
        PyErr_Format(PyExc_ValueError, "drop_layers: flags of %zd and %zd units, wanted %zd", PyBytes_Size(units),
                     PyBytes_Size(unstepped), count);
        return NULL;
    }
    PyObject *old = zero->layer_drop.dropped;
    zero->layer_drop.dropped = Py_NewRef(layers);
    Py_XDECREF(old);
    zpp_zero_mask(zero->core, (const uint8_t *)PyBytes_AsString(units));
    if (expect_states(zero, PyBytes_AsString(unstepped))) return NULL;
    Py_RETURN_NONE;
}

void zpp_py_layer_drop_forget(Zero *zero) {
    Py_CLEAR(zero->layer_drop.begin);
    Py_CLEAR(zero->layer_drop.turn);
    Py_CLEAR(zero->layer_drop.dropped);
}

void zpp_py_layer_drop_clear(Zero *zero) {
    zpp_py_layer_drop_forget(zero);
    Py_CLEAR(zero->layer_drop.on_demand);
}

PyMethodDef zpp_py_layer_drop_methods[] = {
    { "set_layer_drop", zero_set_layer_drop, METH_VARARGS,
      "set_layer_drop(begin, turn): called before forwards that build a graph, and where evaluation begins or ends." },
    { "drop_layers", zero_drop_layers, METH_VARARGS,
      "drop_layers(layers, units, unstepped): what the pass that begins leaves out." },
    { "set_on_demand", zero_set_on_demand, METH_O,
      "set_on_demand(units): passes without gradients read parts of these units." },
    { NULL, NULL, 0, NULL },
};
