/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of the core as a tensor, on any device, without a copy: a DLPack capsule, which torch.from_dlpack takes. The
 * structures are those of DLPack before its version 1, which every torch reads (github.com/dmlc/dlpack).
 */
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>

#include "../base/dtype.h"

enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6 };

struct dl_tensor {
    void *data;
    int32_t device_type, device_index, dims;
    uint8_t type_code, bits;
    uint16_t lanes;
    int64_t *shape, *strides; /* strides NULL: contiguous */
    uint64_t offset_bytes;
};

struct dl_managed {
    struct dl_tensor tensor;
    PyObject *owner; /* `manager_ctx`: a reference, dropped by the deleter */
    void (*deleter)(struct dl_managed *managed);
    int64_t elems; /* ours, behind what DLPack defines: `shape` points here */
};

static const uint8_t type_codes[ZPP_DTYPES] = {
    [ZPP_F32] = DL_FLOAT, [ZPP_BF16] = DL_BFLOAT, [ZPP_F16] = DL_FLOAT, [ZPP_F64] = DL_FLOAT, [ZPP_I8] = DL_INT,
    [ZPP_U8] = DL_UINT,   [ZPP_I16] = DL_INT,     [ZPP_I32] = DL_INT,   [ZPP_I64] = DL_INT,   [ZPP_BOOL] = DL_BOOL,
};

static const char NAME[] = "dltensor"; /* until a tensor was made of the capsule, which then has another name */

/* The last view of the tensor is gone. Any thread, with or without the GIL; at the end of the process there is no
 * Python any more, and the owner stays. */
static void drop(struct dl_managed *managed) {
    if (!managed) return;
    if (Py_IsInitialized()) {
        const PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(managed->owner);
        PyGILState_Release(state);
    }
    free(managed);
}

static void drop_unused(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, NAME)) drop(PyCapsule_GetPointer(capsule, NAME));
}

static PyObject *memory_capsule(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *owner;
    unsigned long long address;
    long long elems;
    int dtype, device_type, device_index;
    if (!PyArg_ParseTuple(args, "OKLiii:memory_capsule", &owner, &address, &elems, &dtype, &device_type,
                          &device_index)) {
        return NULL;
    }
    if (elems < 0 || dtype < 0 || dtype >= ZPP_DTYPES || (elems && !address)) {
        return PyErr_Format(PyExc_ValueError, "memory_capsule: %lld elements of dtype %d at address %llu; wanted at "
                            "least 0 elements, a dtype below %d, and an address", elems, dtype, address, ZPP_DTYPES);
    }
    struct dl_managed *managed = calloc(1, sizeof *managed);
    if (!managed) return PyErr_NoMemory();
    managed->tensor.data = (void *)(uintptr_t)address;
    managed->tensor.device_type = device_type;
    managed->tensor.device_index = device_index;
    managed->tensor.dims = 1;
    managed->tensor.type_code = type_codes[dtype];
    managed->tensor.bits = (uint8_t)(8 * zpp_dtype_bytes((zpp_dtype)dtype));
    managed->tensor.lanes = 1;
    managed->tensor.shape = &managed->elems;
    managed->elems = elems;
    managed->deleter = drop;
    Py_INCREF(owner);
    managed->owner = owner;
    PyObject *capsule = PyCapsule_New(managed, NAME, drop_unused);
    if (!capsule) drop(managed);
    return capsule;
}

static PyMethodDef methods[] = {
    { "memory_capsule", memory_capsule, METH_VARARGS,
      "memory_capsule(owner, address, elems, dtype, device_type, device_index, /)\n--\n\nA DLPack capsule over memory "
      "that `owner` keeps alive; torch.from_dlpack makes a 1-D tensor of it, which has a reference to `owner`." },
    { NULL, NULL, 0, NULL },
};

int zpp_py_add_memory(PyObject *module);
int zpp_py_add_memory(PyObject *module) { return PyModule_AddFunctions(module, methods); }
