/* SPDX-License-Identifier: Apache-2.0
 *
 * The types Region and Block: shared memory as Python objects. Addresses are Python ints; the memory lives as long as
 * the object, and may outlive the group.
 */
#include <Python.h>

#include "py_comm.h"
#include "../base/mem.h"
#include "raise.h"

typedef struct Region {
    PyObject_HEAD zpp_region *region; /* NULL after close */
    int ranks, kind;
} Region;

typedef struct Block {
    PyObject_HEAD zpp_block *block;
} Block;

static PyTypeObject *region_type, *block_type;

/* --- Region ------------------------------------------------------------------------------------------------------ */

/* Borrowed; NULL with an error set: not a Region, or a closed one. */
static zpp_region *region_of(PyObject *object) {
    if (!PyObject_TypeCheck(object, region_type)) {
        PyErr_Format(PyExc_TypeError, "wanted a zeropp._C.Region, not %R", object);
        return NULL;
    }
    Region *self = (Region *)object;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!self->region) {
        zpp_fail(&err, ZPP_STATE, "comm: this region is closed");
        zpp_py_raise(&err);
    }
    return self->region;
}

PyObject *zpp_py_region_new(PyObject *comm, int kind, size_t bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_comm *c = zpp_py_comm_acquire(comm);
    zpp_region *region = NULL;
    if (!c) return NULL;
    Region *self = PyObject_New(Region, region_type);
    zpp_status status = ZPP_OK;
    if (self) {
        self->region = NULL;
        self->ranks = zpp_comm_ranks(c);
        self->kind = kind;
        PyThreadState *state = PyEval_SaveThread();
        status = zpp_region_create(c, (enum zpp_region_kind)kind, bytes, &region, &err);
        PyEval_RestoreThread(state);
        self->region = region;
    }
    zpp_py_comm_release(comm);
    if (status != ZPP_OK) {
        Py_CLEAR(self);
        return zpp_py_raise(&err);
    }
    return (PyObject *)self;
}

static PyObject *region_base(PyObject *object, PyObject *args) {
    zpp_region *region = region_of(object);
    int rank = 0;
    if (!region || !PyArg_ParseTuple(args, "|i", &rank)) return NULL;
    if (rank < 0 || rank >= ((Region *)object)->ranks)
        return PyErr_Format(PyExc_ValueError, "comm: rank %d, wanted 0..%d", rank, ((Region *)object)->ranks - 1);
    return PyLong_FromVoidPtr(zpp_region_base(region, rank));
}

static PyObject *region_trim(PyObject *object, PyObject *args) {
    zpp_region *region = region_of(object);
    Py_ssize_t offset_bytes, bytes;
    if (!region || !PyArg_ParseTuple(args, "nn", &offset_bytes, &bytes)) return NULL;
    const size_t all_bytes = zpp_region_bytes(region), page_bytes = zpp_page_bytes();
    if (offset_bytes < 0 || bytes < 0 || (size_t)offset_bytes % page_bytes || (size_t)bytes % page_bytes ||
        (size_t)offset_bytes > all_bytes || (size_t)bytes > all_bytes - (size_t)offset_bytes)
        return PyErr_Format(PyExc_ValueError, "comm: trim of [%zd, +%zd), wanted multiples of %zu within %zu bytes",
                            offset_bytes, bytes, page_bytes, all_bytes);
    zpp_region_trim(region, (size_t)offset_bytes, (size_t)bytes);
    Py_RETURN_NONE;
}

static PyObject *region_bytes(PyObject *object, void *closure) {
    (void)closure;
    zpp_region *region = region_of(object);
    return region ? PyLong_FromSize_t(zpp_region_bytes(region)) : NULL;
}

static PyObject *region_close(PyObject *object, PyObject *none) {
    (void)none;
    Region *self = (Region *)object;
    zpp_region_destroy(self->region);
    self->region = NULL;
    Py_RETURN_NONE;
}

static void region_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    zpp_region_destroy(((Region *)object)->region);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef region_methods[] = {
    {"base", region_base, METH_VARARGS, "base(rank=0, /)\n--\n\nAddress of the part of `rank` in this process."},
    {"trim", region_trim, METH_VARARGS,
     "trim(offset_bytes, bytes, /)\n--\n\nGive pages of my own part back to the system; they read as zero again."},
    {"close", region_close, METH_NOARGS, "close()\n--\n\nUnmap; the addresses are not valid any more."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef region_getset[] = {
    {"bytes", region_bytes, NULL, "Bytes of one part, rounded up to pages.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot region_slots[] = {
    {Py_tp_doc, "Memory that all ranks of a group map."},
    {Py_tp_methods, region_methods},
    {Py_tp_getset, region_getset},
    {Py_tp_dealloc, region_dealloc},
    {0, NULL},
};
static PyType_Spec region_spec = {"zeropp._C.Region", sizeof(Region), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, region_slots};

/* --- Block ------------------------------------------------------------------------------------------------------- */

PyObject *zpp_py_block_new(PyObject *comm, size_t bytes, bool here) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_comm *c = zpp_py_comm_acquire(comm);
    zpp_block *block = NULL;
    if (!c) return NULL;
    const zpp_status status = zpp_comm_alloc(here ? zpp_comm_here(c) : c, bytes, &block, &err);
    zpp_py_comm_release(comm);
    if (status != ZPP_OK) return zpp_py_raise(&err);
    Block *self = PyObject_New(Block, block_type);
    if (self)
        self->block = block;
    else
        zpp_block_free(block);
    return (PyObject *)self;
}

static PyObject *block_address(PyObject *object, void *closure) {
    (void)closure;
    return PyLong_FromVoidPtr(zpp_block_data(((Block *)object)->block));
}

static PyObject *block_bytes(PyObject *object, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(zpp_block_bytes(((Block *)object)->block));
}

static void block_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    zpp_block_free(((Block *)object)->block);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyGetSetDef block_getset[] = {
    {"address", block_address, NULL, "Address in this process.", NULL},
    {"bytes", block_bytes, NULL, "Bytes, as asked for.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot block_slots[] = {
    {Py_tp_doc, "A block of this rank's arena; given back when the object dies."},
    {Py_tp_getset, block_getset},
    {Py_tp_dealloc, block_dealloc},
    {0, NULL},
};
static PyType_Spec block_spec = {"zeropp._C.Block", sizeof(Block), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, block_slots};

int zpp_py_add_comm_memory(PyObject *module) {
    region_type = (PyTypeObject *)PyType_FromSpec(&region_spec);
    block_type = (PyTypeObject *)PyType_FromSpec(&block_spec);
    if (!region_type || !block_type) return -1;
    if (PyModule_AddObjectRef(module, "Region", (PyObject *)region_type) != 0) return -1;
    return PyModule_AddObjectRef(module, "Block", (PyObject *)block_type);
}
