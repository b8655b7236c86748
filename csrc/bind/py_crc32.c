/* SPDX-License-Identifier: Apache-2.0
 *
 * The checksum of checkpoints for Python, by address (buffers are not in the limited API of 3.10), without its lock.
 */
#include <Python.h>

#include "../base/crc32.h"

static void *address_of(unsigned long long address) { return (void *)(uintptr_t)address; }

static PyObject *crc32_of(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long from;
    Py_ssize_t bytes;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, "Kn|I:crc32", &from, &bytes, &crc)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = zpp_crc32(crc, address_of(from), (size_t)bytes);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *crc32_copy(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long to, from;
    Py_ssize_t bytes;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, "KKn|I:crc32_copy", &to, &from, &bytes, &crc)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = zpp_crc32_copy(crc, address_of(to), address_of(from), (size_t)bytes);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef methods[] = {
    {"crc32", crc32_of, METH_VARARGS,
     "crc32(address, size_bytes, value=0, /)\n--\n\nCRC-32 of memory, as zlib.crc32 gives it; value: of what came "
     "before."},
    {"crc32_copy", crc32_copy, METH_VARARGS,
     "crc32_copy(to, address, size_bytes, value=0, /)\n--\n\nThe same, and the memory is copied to `to`."},
    {NULL, NULL, 0, NULL},
};

int zpp_py_add_crc32(PyObject *module);
int zpp_py_add_crc32(PyObject *module) { return PyModule_AddFunctions(module, methods); }
