/* SPDX-License-Identifier: Apache-2.0
 *
 * Hooks on what autograd saves while a unit is whole: the trigger of a gather in backward that cannot be missed.
 *
 * pack recognises a tensor in gathered memory by its address and saves it as it is, which costs nothing once the unit
 * is released; unpack gathers the unit again. Other tensors go on to the hooks that were there before (checkpoint,
 * offload).
 */
#include "py_zero.h"

/* Our pair on top of another one (checkpoint, offload): what is not ours goes on to it. */
typedef struct {
    PyObject_HEAD
    Zero *zero;
    PyObject *pack, *unpack; /* of the pair below; NULL: there is none */
} Chain;

static PyTypeObject *chain_type;

/* Return the unit in whose memory a tensor lies; -1: none, or not a tensor with an address. */
static int unit_of_tensor(Zero *zero, PyObject *tensor) {
    PyObject *address = PyObject_CallMethodObjArgs(tensor, zpp_str_data_ptr, NULL);
    if (!address) {
        PyErr_Clear();
        return -1;
    }
    const void *pointer = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    if (pointer) return zpp_zero_find(zero->core, pointer);
    PyObject *local = PyObject_GetAttr(tensor, zpp_str_local_tensor); /* a DTensor's own address is 0 */
    if (!local) PyErr_Clear();
    const int unit = local && local != tensor ? unit_of_tensor(zero, local) : -1;
    Py_XDECREF(local);
    return unit;
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
        long task = -1;
        if (zpp_py_enter_backward(zero, true, &task)) return NULL;
        Unit *unit = (Unit *)PyList_GetItem(zero->units, index);
        if (zpp_py_backward_step_require_whole(unit) || zpp_py_need(unit, ZPP_PHASE_BACKWARD)) return NULL;
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
int zpp_py_push_saved_hooks(Zero *zero) {
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

void zpp_py_pop_saved_hooks(Zero *zero) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); /* also on the way out of an exception */
    PyObject *done = PyObject_CallNoArgs(zero->pop_saved_hooks);
    if (!done) PyErr_Clear();
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
}

int zpp_py_make_saved_hooks(Zero *zero) {
    return make_pair(zero, NULL, &zero->pack, &zero->unpack);
}

int zpp_py_saved_init(void) {
    chain_type = (PyTypeObject *)PyType_FromSpec(&chain_spec);
    return chain_type ? 0 : -1;
}
