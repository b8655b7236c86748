/* SPDX-License-Identifier: Apache-2.0
 *
 * Registers every op of csrc/ops/ops.def with libtorch, once a process, when Python calls _C.load_torch().
 */
#include <Python.h>
#include <string.h>

#include "op_entries.h"
#include "schema.h"

typedef void (*op_entry)(StableIValue *, uint64_t, uint64_t);

static const struct op {
    const char *name, *schema;
    op_entry cpu, cuda;
} ops[] = {
#define ZPP_OP(name, schema, cpu, cuda) { name, name schema, cpu, cuda },
#include "../ops/ops.def"
#undef ZPP_OP
};

enum { OPS = sizeof ops / sizeof ops[0] };
static const char NAMESPACE[] = "zeropp";

/* Libraries stay for the life of the process: deleting one takes its ops away. */
static AOTITorchError define_all(void) {
    TorchLibraryHandle library = NULL;
    AOTITorchError failed = zpp_torch.aoti_torch_library_init_fragment(NAMESPACE, __FILE__, __LINE__, &library);
    for (size_t k = 0; k < OPS && !failed; ++k) failed = zpp_torch.aoti_torch_library_def(library, ops[k].schema);
    return failed;
}

static AOTITorchError implement_all(const char *key, bool cuda) {
    TorchLibraryHandle library = NULL;
    AOTITorchError failed = zpp_torch.aoti_torch_library_init_impl(NAMESPACE, key, __FILE__, __LINE__, &library);
    for (size_t k = 0; k < OPS && !failed; ++k) {
        const op_entry entry = cuda ? ops[k].cuda : ops[k].cpu;
        if (entry) failed = zpp_torch.torch_library_impl(library, ops[k].name, entry, ZPP_TORCH_BUILT_FOR);
    }
    return failed;
}

static PyObject *load_torch(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    static bool registered;
    if (registered) Py_RETURN_NONE;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_torch_load(&err) != ZPP_OK) {
        PyErr_SetString(PyExc_ImportError, err.text);
        return NULL;
    }
    const char *unknown = zpp_schema_read_all();
    if (unknown) return PyErr_Format(PyExc_ImportError, "%s: its schema has an argument of no known type", unknown);
    AOTITorchError failed = define_all() || implement_all("CPU", false);
    for (size_t row = 0; !failed && zpp_accelerator_key(row); ++row) {
        failed = implement_all(zpp_accelerator_key(row), true);
    }
    if (failed) {
        PyErr_SetString(PyExc_ImportError, "libtorch refused to register the operators of zeropp (its reason is on "
                        "stderr): is another copy of zeropp loaded in this process?");
        return NULL;
    }
    registered = true;
    Py_RETURN_NONE;
}

/* (name, schema, has a CPU kernel, has a CUDA kernel) of every op: for `zeropp env` and the tests. */
static PyObject *op_table(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    PyObject *table = PyList_New((Py_ssize_t)OPS);
    for (size_t k = 0; table && k < OPS; ++k) {
        PyObject *row = Py_BuildValue("ssNN", ops[k].name, ops[k].schema, PyBool_FromLong(ops[k].cpu != NULL),
                                      PyBool_FromLong(ops[k].cuda != NULL));
        if (!row || PyList_SetItem(table, (Py_ssize_t)k, row) != 0) Py_CLEAR(table);
    }
    return table;
}

static PyObject *new_slot(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    const int64_t slot = zpp_torch_new_slot();
    return slot < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(slot);
}

static PyObject *drop_slot(PyObject *module, PyObject *number) {
    (void)module;
    const long long slot = PyLong_AsLongLong(number);
    if (slot == -1 && PyErr_Occurred()) return NULL;
    zpp_torch_drop_slot(slot);
    Py_RETURN_NONE;
}

/* (data pointer, elements, dtype) of an adopted tensor, as C sees it. */
static PyObject *look_slot(PyObject *module, PyObject *number) {
    (void)module;
    const long long slot = PyLong_AsLongLong(number);
    if (slot == -1 && PyErr_Occurred()) return NULL;
    AtenTensorHandle tensor = zpp_torch_adopted(slot);
    if (!tensor) return PyErr_Format(PyExc_ValueError, "slot %lld holds no tensor", slot);
    struct zpp_tensor look;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_torch_look(tensor, false, &look, &err) != ZPP_OK) {
        PyErr_SetString(PyExc_RuntimeError, err.text);
        return NULL;
    }
    const char *dtype = look.dtype == ZPP_DTYPES ? "other" : zpp_dtype_name(look.dtype);
    return Py_BuildValue("KKs", (unsigned long long)(uintptr_t)look.data, (unsigned long long)look.elems, dtype);
}

static PyMethodDef methods[] = {
    { "load_torch", load_torch, METH_NOARGS,
      "load_torch()\n--\n\nFind libtorch's functions and register torch.ops.zeropp, after `import torch`. Again is "
      "free." },
    { "op_table", op_table, METH_NOARGS, "op_table()\n--\n\nEvery op: (name, schema, on CPU, on CUDA)." },
    { "new_slot", new_slot, METH_NOARGS, "new_slot()\n--\n\nA slot for torch.ops.zeropp._adopt(tensor, slot)." },
    { "drop_slot", drop_slot, METH_O, "drop_slot(slot, /)\n--\n\nLet an adopted tensor go." },
    { "look_slot", look_slot, METH_O,
      "look_slot(slot, /)\n--\n\n(data pointer, elements, dtype) of an adopted tensor." },
    { NULL, NULL, 0, NULL },
};

int zpp_py_add_ops(PyObject *module);
int zpp_py_add_ops(PyObject *module) { return PyModule_AddFunctions(module, methods); }
