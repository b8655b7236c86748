/* SPDX-License-Identifier: Apache-2.0
 *
 * Methods of Zero for parameters and for gradients in a file (zero/offload/unit_file.h, zero/offload/grad_file.c). The
 * façade decides when the files are made and go away (python/zeropp/zero/offload/); py_step.c calls the step.
 *
 * Warnings of the I/O engine come from its threads, which never take the GIL: the last one is kept until the façade
 * fetches it.
 */
#include "py_zero.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "raise.h"

static pthread_mutex_t warning_lock = PTHREAD_MUTEX_INITIALIZER; /* guards every Zero's `warning` */

static void keep_warning(void *ctx, const char *text) {
    Zero *zero = ctx;
    pthread_mutex_lock(&warning_lock);
    snprintf(zero->warning, sizeof zero->warning, "%s", text);
    pthread_mutex_unlock(&warning_lock);
}

static zpp_unit_file *unit_file_of(PyObject *self) {
    zpp_unit_file *unit_file = zpp_zero_param_file(((Zero *)self)->core);
    if (!unit_file) PyErr_SetString(PyExc_ValueError, "zero: no parameters are in a file");
    return unit_file;
}

static zpp_unit_file *grads_of(PyObject *self) {
    zpp_unit_file *unit_file = zpp_zero_grad_file(((Zero *)self)->core);
    if (!unit_file) PyErr_SetString(PyExc_ValueError, "zero: no gradients are in a file");
    return unit_file;
}

static PyObject *open_file(PyObject *self, PyObject *args, zpp_unit_file *unit_file) {
    Zero *zero = (Zero *)self;
    struct zpp_scratch_options file = { .log = keep_warning, .log_ctx = zero };
    int make, checksums;
    Py_ssize_t stripe_bytes, block_bytes;
    PyObject *tuple;
    const char *folders[ZPP_AIO_PARTS];
    if (!unit_file ||
        !PyArg_ParseTuple(args, "O!ynpInp", &PyTuple_Type, &tuple, &file.path, &stripe_bytes, &make, &file.depth,
                          &block_bytes, &checksums) ||
        !zpp_py_aio_folders(tuple, folders, &file.folders_count))
        return NULL;
    file.folders = folders;
    file.stripe_bytes = (size_t)stripe_bytes;
    file.checksums = checksums;
    file.block_bytes = (size_t)block_bytes;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_unit_file_open(unit_file, &file, make, &fault, &err);
    PyEval_RestoreThread(thread);
    if (status != ZPP_OK) return zpp_py_raise_aio(&err, &fault);
    char text[sizeof zero->warning];
    pthread_mutex_lock(&warning_lock);
    snprintf(text, sizeof text, "%s", zero->warning);
    zero->warning[0] = '\0';
    pthread_mutex_unlock(&warning_lock);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *close_file(zpp_unit_file *unit_file) {
    if (!unit_file) return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_unit_file_close(unit_file);
    PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

/* open_params(folders, path, stripe_bytes, make, depth, block_bytes, checksums) -> the engine's warning, or '' */
static PyObject *open_params(PyObject *self, PyObject *args) {
    return open_file(self, args, unit_file_of(self));
}

static PyObject *close_params(PyObject *self, PyObject *unused) {
    (void)unused;
    if (!unit_file_of(self)) return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_zero_close_params(((Zero *)self)->core);
    PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

/* set_grads_fraction(fraction): before units are added. */
static PyObject *set_grads_fraction(PyObject *self, PyObject *arg) {
    const double fraction = PyFloat_AsDouble(arg);
    struct zpp_err err = ZPP_ERR_INIT;
    if (PyErr_Occurred()) return NULL;
    return zpp_py_result(zpp_zero_set_grads_fraction(((Zero *)self)->core, fraction, &err), &err);
}

static PyObject *open_grads(PyObject *self, PyObject *args) {
    return open_file(self, args, grads_of(self));
}

static PyObject *close_grads(PyObject *self, PyObject *unused) {
    (void)unused;
    return close_file(grads_of(self));
}

/* settle_grads(): all gradients are in their file; raises the first failure since they were cleared. */
static PyObject *settle_grads(PyObject *self, PyObject *unused) {
    (void)unused;
    if (!grads_of(self)) return NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_zero_grads_settle(((Zero *)self)->core, &fault, &err);
    PyEval_RestoreThread(thread);
    return zpp_py_result_aio(status, &err, &fault);
}

/* copy_grads(unit, first, elems, address, write): elements of this rank's shard of the reduced gradient. */
static PyObject *copy_grads(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    int index, write;
    Py_ssize_t first, elems;
    unsigned long long address;
    if (!grads_of(self) || !PyArg_ParseTuple(args, "innKp", &index, &first, &elems, &address, &write)) return NULL;
    if (index < 0 || index >= zpp_zero_units(zero->core) || first < 0 || elems < 0)
        return PyErr_SetString(PyExc_ValueError, "zero: unit, first or elems is out of range"), NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_zero_grad_copy(zero->core, index, (size_t)first, (size_t)elems,
                                                 (void *)(uintptr_t)address, write, &fault, &err);
    PyEval_RestoreThread(thread);
    return zpp_py_result_aio(status, &err, &fault);
}

/* Find elements of a unit's flat buffer in the mapping, which over several hosts has this rank's shard only. */
static bool place_in_mapping(const struct zpp_unit *unit, Py_ssize_t first, Py_ssize_t elems, size_t *offset_bytes) {
    const size_t begin = unit->file_first_elem, capacity = unit->file_elems;
    if (first < 0 || elems < 0 || (size_t)first < begin || (size_t)first - begin > capacity ||
        (size_t)elems > capacity - ((size_t)first - begin))
        return false;
    *offset_bytes = unit->file_offset_bytes + ((size_t)first - begin) * unit->elem_bytes;
    return true;
}

/* copy_params(unit, first, elems, address, write): elements of a unit's flat buffer and memory that the caller keeps
 * alive. */
static PyObject *copy_params(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    int index, write;
    Py_ssize_t first, elems;
    unsigned long long address;
    zpp_unit_file *unit_file = unit_file_of(self);
    if (!unit_file || !PyArg_ParseTuple(args, "innKp", &index, &first, &elems, &address, &write)) return NULL;
    const bool known = index >= 0 && index < zpp_zero_units(zero->core);
    const struct zpp_unit *unit = known ? zpp_zero_unit(zero->core, index) : NULL;
    size_t offset_bytes;
    if (!unit || !zpp_unit_in_file(unit) || !place_in_mapping(unit, first, elems, &offset_bytes))
        return PyErr_SetString(PyExc_ValueError, "zero: unit, first or elems is out of range"), NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status =
        zpp_unit_file_copy(unit_file, offset_bytes, (void *)(uintptr_t)address, (size_t)elems * unit->elem_bytes, write,
                           &fault, &err);
    PyEval_RestoreThread(thread);
    return zpp_py_result_aio(status, &err, &fault);
}

/* --- parts of units ----------------------------------------------------------------------------------------------- */

#define PART_NAME "zeropp._C.params_part"

struct part_handle {
    zpp_unit_file_part *part; /* NULL: it has ended */
    PyObject *zero, *keep;    /* owned: the file, and the owner of the memory */
};

/* A part that nobody waited for: its memory must not go before its read ends. */
static void drop_part(PyObject *capsule) {
    struct part_handle *handle = PyCapsule_GetPointer(capsule, PART_NAME);
    struct zpp_err ignored = ZPP_ERR_INIT;
    (void)zpp_unit_file_part_end(handle->part, NULL, &ignored);
    Py_DECREF(handle->zero);
    Py_DECREF(handle->keep);
    free(handle);
}

/* begin_part(unit, first, elems, address, keep) -> part: begin to read elements of a unit's flat buffer. */
static PyObject *begin_part(PyObject *self, PyObject *args) {
    int index;
    Py_ssize_t first, elems;
    unsigned long long address;
    PyObject *keep;
    zpp_unit_file *unit_file = unit_file_of(self);
    if (!unit_file || !PyArg_ParseTuple(args, "innKO", &index, &first, &elems, &address, &keep)) return NULL;
    zpp_zero *core = ((Zero *)self)->core;
    const struct zpp_unit *unit = index >= 0 && index < zpp_zero_units(core) ? zpp_zero_unit(core, index) : NULL;
    size_t offset_bytes;
    if (!unit || !zpp_unit_in_file(unit) || !place_in_mapping(unit, first, elems, &offset_bytes))
        return PyErr_SetString(PyExc_ValueError, "zero: unit, first or elems is out of range"), NULL;
    struct part_handle *handle = calloc(1, sizeof *handle);
    if (!handle) return PyErr_NoMemory();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    const zpp_status status = zpp_unit_file_part_begin(
        unit_file, unit->file_index, offset_bytes - unit->file_offset_bytes, (void *)(uintptr_t)address,
        (size_t)elems * unit->elem_bytes, &handle->part, &fault, &err);
    if (status != ZPP_OK) return free(handle), zpp_py_raise_aio(&err, &fault);
    handle->zero = Py_NewRef(self);
    handle->keep = Py_NewRef(keep);
    PyObject *capsule = PyCapsule_New(handle, PART_NAME, drop_part);
    if (capsule) return capsule;
    (void)zpp_unit_file_part_end(handle->part, NULL, &err);
    Py_DECREF(handle->zero);
    Py_DECREF(handle->keep);
    free(handle);
    return NULL;
}

/* part_memory(bytes) -> capsule of DLPack, or None where there is no engine. */
static PyObject *part_memory(PyObject *self, PyObject *args) {
    Py_ssize_t bytes;
    zpp_unit_file *unit_file = unit_file_of(self);
    if (!unit_file || !PyArg_ParseTuple(args, "n", &bytes)) return NULL;
    zpp_aio_arena *arena = zpp_unit_file_part_arena(unit_file);
    if (!arena) Py_RETURN_NONE;
    return zpp_py_aio_tensor(arena, (size_t)bytes);
}

/* end_part(part): its elements are in memory. */
static PyObject *end_part(PyObject *self, PyObject *capsule) {
    (void)self;
    struct part_handle *handle = PyCapsule_GetPointer(capsule, PART_NAME);
    if (!handle) return NULL;
    zpp_unit_file_part *part = handle->part;
    handle->part = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_unit_file_part_end(part, &fault, &err);
    PyEval_RestoreThread(thread);
    return zpp_py_result_aio(status, &err, &fault);
}

static PyObject *figures_of(const zpp_unit_file *unit_file) {
    if (!unit_file) return NULL;
    struct zpp_unit_file_figures seen;
    zpp_unit_file_figures(unit_file, &seen);
    return Py_BuildValue(
        "{s:K,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:K,s:K,s:K,s:n,s:K,s:K,s:K,s:s}", "mapping_address",
        (unsigned long long)(uintptr_t)zpp_unit_file_mapping(unit_file), "mapping_bytes",
        (Py_ssize_t)seen.mapping_bytes, "resident_bytes", (Py_ssize_t)seen.resident_bytes, "acquired_bytes",
        (Py_ssize_t)seen.acquired_bytes, "acquired_peak_bytes", (Py_ssize_t)seen.acquired_peak_bytes, "memory_bytes",
        (Py_ssize_t)seen.memory_bytes, "window_bytes", (Py_ssize_t)seen.window_bytes, "qcopies_bytes",
        (Py_ssize_t)seen.qcopies_bytes, "qcopies_held_bytes", (Py_ssize_t)seen.qcopies_held_bytes, "staging_bytes",
        (Py_ssize_t)seen.staging_bytes, "read_bytes", (unsigned long long)seen.read_bytes, "written_bytes",
        (unsigned long long)seen.written_bytes, "checked_bytes", (unsigned long long)seen.checked_bytes, "sums_bytes",
        (Py_ssize_t)seen.sums_bytes, "loads", (unsigned long long)seen.loads, "load_wait_ns",
        (unsigned long long)seen.load_wait_ns, "step_wait_ns", (unsigned long long)seen.step_wait_ns, "backend",
        seen.uring ? "io_uring" : "threads");
}

static PyObject *params_figures(PyObject *self, PyObject *unused) {
    (void)unused;
    return figures_of(unit_file_of(self));
}

static PyObject *grads_figures(PyObject *self, PyObject *unused) {
    (void)unused;
    return figures_of(grads_of(self));
}

/* step_state() -> (steps that succeeded, True if one left weights and states inconsistent) */
static PyObject *step_state(PyObject *self, PyObject *unused) {
    (void)unused;
    const Zero *zero = (Zero *)self;
    return Py_BuildValue("(KO)", (unsigned long long)zero->steps, zero->inconsistent ? Py_True : Py_False);
}

static PyObject *params_recovered(PyObject *self, PyObject *unused) {
    (void)unused;
    ((Zero *)self)->inconsistent = false;
    Py_RETURN_NONE;
}

/* set_weight_quant(bits, block_elems, in_memory): before units are added. */
static PyObject *set_weight_quant(PyObject *self, PyObject *args) {
    int bits, in_memory;
    Py_ssize_t block_elems;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!PyArg_ParseTuple(args, "inp", &bits, &block_elems, &in_memory)) return NULL;
    zpp_zero *core = ((Zero *)self)->core;
    return zpp_py_result(zpp_zero_set_weight_quant(core, bits, (size_t)block_elems, in_memory, &err), &err);
}

/* quantise_param(unit, param): one of the matrices that are kept in fewer bits; before seal. */
static PyObject *quantise_param(PyObject *self, PyObject *args) {
    zpp_zero *core = ((Zero *)self)->core;
    int index;
    Py_ssize_t param;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!PyArg_ParseTuple(args, "in", &index, &param)) return NULL;
    if (index < 0 || index >= zpp_zero_units(core) || param < 0)
        return PyErr_SetString(PyExc_ValueError, "zero: unit or parameter is out of range"), NULL;
    return zpp_py_result(zpp_zero_quantise_param(core, index, (size_t)param, &err), &err);
}

/* name_param(unit, param, name, row_elems, first_row): what errors of files call it; see struct zpp_param_name. */
static PyObject *name_param(PyObject *self, PyObject *args) {
    zpp_zero *core = ((Zero *)self)->core;
    int index;
    Py_ssize_t param, row_elems, first_row;
    const char *name;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!PyArg_ParseTuple(args, "insnn", &index, &param, &name, &row_elems, &first_row)) return NULL;
    if (index < 0 || index >= zpp_zero_units(core) || param < 0)
        return PyErr_SetString(PyExc_ValueError, "zero: unit or parameter is out of range"), NULL;
    return zpp_py_result(zpp_zero_name_param(core, index, (size_t)param, name, (size_t)row_elems, (size_t)first_row,
                                             &err), &err);
}

PyMethodDef zpp_py_unit_file_methods[] = {
    { "name_param", name_param, METH_VARARGS,
      "name_param(unit, param, name, row_elems, first_row): what errors of files call it." },
    { "set_weight_quant", set_weight_quant, METH_VARARGS,
      "set_weight_quant(bits, block_elems, in_memory): before units are added." },
    { "quantise_param", quantise_param, METH_VARARGS,
      "quantise_param(unit, param): kept in fewer bits. Before seal." },
    { "open_params", open_params, METH_VARARGS,
      "open_params(folders, path, stripe_bytes, make, depth, block_bytes, checksums) -> warning" },
    { "close_params", close_params, METH_NOARGS, "End the engine; the file stays." },
    { "copy_params", copy_params, METH_VARARGS, "copy_params(unit, first, elems, address, write)" },
    { "begin_part", begin_part, METH_VARARGS,
      "begin_part(unit, first, elems, address, keep) -> part: begin to read elements of a unit's flat buffer." },
    { "part_memory", part_memory, METH_VARARGS,
      "part_memory(bytes) -> a DLPack capsule of uint8 that parts are read to without looking up pages, or None." },
    { "end_part", end_part, METH_O, "end_part(part): its elements are in memory." },
    { "params_figures", params_figures, METH_NOARGS, "Bytes and times." },
    { "set_grads_fraction", set_grads_fraction, METH_O, "This share of the gradients lives in a file." },
    { "open_grads", open_grads, METH_VARARGS,
      "open_grads(folders, path, stripe_bytes, make, depth, block_bytes, checksums) -> warning" },
    { "close_grads", close_grads, METH_NOARGS, "End the engine; the file stays." },
    { "settle_grads", settle_grads, METH_NOARGS, "All are in their file; raises what failed." },
    { "copy_grads", copy_grads, METH_VARARGS, "copy_grads(unit, first, elems, address, write)" },
    { "grads_figures", grads_figures, METH_NOARGS, "Bytes and times." },
    { "step_state", step_state, METH_NOARGS, "(steps that succeeded, True after an inconsistent one)" },
    { "params_recovered", params_recovered, METH_NOARGS, "All parameters were loaded anew." },
    { NULL, NULL, 0, NULL },
};
