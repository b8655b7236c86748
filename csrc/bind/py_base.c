/* SPDX-License-Identifier: Apache-2.0
 *
 * csrc/base for Python: what this build and this machine have, checksums, the timeline, and stray reads. Nothing is
 * asked before a function is called.
 */
#include <Python.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../base/cpu.h"
#include "../base/crc32.h"
#include "../base/cuda_images.h"
#include "../base/device_cuda.h"
#include "../base/device_probe.h"
#include "../base/stray.h"
#include "../base/timeline.h"
#include "op_entries.h"
#include "raise.h"

/* --- for `python -m zeropp env` ----------------------------------------------------------------------------------- */

static PyObject *cpu_level(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyUnicode_FromString(zpp_cpu_level_name(zpp_cpu_level()));
}

static PyObject *cpu_detected(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyUnicode_FromString(zpp_cpu_level_name(zpp_cpu_detected()));
}

static PyObject *kernels(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    static const char *const ops[] = { "adam", "adagrad", "lion", "sgd", "norm", "quant", "moments", "onebit" };
    const int levels = ZPP_CPU_LEVELS; /* that this build has, of every op */
    PyObject *table = PyList_New(0);
    for (int row = 0; table && row < levels * (int)(sizeof ops / sizeof ops[0]); ++row) {
        const enum zpp_cpu_level level = (enum zpp_cpu_level)(row % levels);
        PyObject *usable = PyBool_FromLong(level <= zpp_cpu_level());
        PyObject *item = Py_BuildValue("ssN", ops[row / levels], zpp_cpu_level_name(level), usable);
        if (!item || PyList_Append(table, item) != 0) Py_CLEAR(table);
        Py_XDECREF(item);
    }
    return table;
}

static PyObject *cuda_images(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    PyObject *table = PyList_New(0);
    for (size_t image = 0; table && image < zpp_cuda_images_count; ++image) {
        PyObject *item = Py_BuildValue("sn", zpp_cuda_images[image].source, (Py_ssize_t)zpp_cuda_images[image].bytes);
        if (!item || PyList_Append(table, item) != 0) Py_CLEAR(table);
        Py_XDECREF(item);
    }
    return table;
}

static PyObject *cuda_toolkit(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyLong_FromLong(zpp_cuda_images_toolkit);
}

static PyObject *cuda_driver(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    struct zpp_err err = ZPP_ERR_INIT;
    int version = 0;
    zpp_status status;
    Py_BEGIN_ALLOW_THREADS
    status = zpp_cuda_driver_version(&version, &err);
    Py_END_ALLOW_THREADS
    return status == ZPP_OK ? PyLong_FromLong(version) : zpp_py_raise(&err);
}

/* What one probe says: None, or why it failed; new. */
static PyObject *probe_once(zpp_device *device, enum zpp_device_probe probe) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_wait ten_seconds = {10000000000u, NULL, NULL};
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_device_probe(device, probe, &ten_seconds, &err);
    PyEval_RestoreThread(thread);
    return Py_BuildValue("sz", zpp_device_probe_name(probe), status == ZPP_OK ? NULL : err.text);
}

static PyObject *probe_device(PyObject *module, PyObject *args) {
    (void)module;
    const char *type;
    int index;
    int32_t torch_type;
    zpp_device *device = NULL;
    void *native;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!PyArg_ParseTuple(args, "si:probe_device", &type, &index)) return NULL;
    if (zpp_accelerator_type(type, &torch_type, &err) != ZPP_OK ||
        zpp_accelerator_current(torch_type, index, &device, &native, &err) != ZPP_OK)
        return zpp_py_raise(&err);
    PyObject *list = PyList_New(0);
    for (int probe = 0; list && probe < ZPP_DEVICE_PROBES; probe++) {
        PyObject *row = probe_once(device, (enum zpp_device_probe)probe);
        if (!row || PyList_Append(list, row) != 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *uring(PyObject *module, PyObject *none) {
    (void)module, (void)none;
#ifdef ZPP_HAVE_URING
    const int built = 1;
#else
    const int built = 0;
#endif
    /* No ring is made: a kernel that has io_uring and lets us use it complains about the missing parameters
     * (EFAULT). */
    const long refused = syscall(SYS_io_uring_setup, 1u, NULL);
    const int reason = refused < 0 && errno != EFAULT && errno != EINVAL ? errno : 0;
    return Py_BuildValue("Nz", PyBool_FromLong(built), reason ? strerror(reason) : NULL);
}

/* --- checksums of checkpoints, by address: buffers are not in the limited API of 3.10 ----------------------------- */

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

/* --- zeropp.trace ------------------------------------------------------------------------------------------------- */

static const char *const kinds[ZPP_SPAN_KINDS] = {
    [ZPP_SPAN_FORWARD] = "forward", [ZPP_SPAN_BACKWARD] = "backward", [ZPP_SPAN_STEP] = "step",
    [ZPP_SPAN_GATHER] = "gather",   [ZPP_SPAN_REDUCE] = "reduce",     [ZPP_SPAN_WAIT] = "wait",
    [ZPP_SPAN_READ] = "read",       [ZPP_SPAN_WRITE] = "write",
};

static PyObject *timeline_start(PyObject *module, PyObject *args) {
    (void)module;
    Py_ssize_t capacity;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!PyArg_ParseTuple(args, "n:timeline_start", &capacity)) return NULL;
    return zpp_py_result(zpp_timeline_start((size_t)capacity, &err), &err);
}

static PyObject *timeline_stop(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_span *spans = NULL;
    size_t count = 0, dropped = 0;
    if (zpp_timeline_stop(&spans, &count, &dropped, &err) != ZPP_OK) return zpp_py_raise(&err);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; ++i) {
        const struct zpp_span *span = &spans[i];
        PyObject *row = Py_BuildValue("ssiKKK", kinds[span->kind], span->name, span->thread,
                                      (unsigned long long)span->began_ns, (unsigned long long)span->ended_ns,
                                      (unsigned long long)span->bytes);
        if (!row || PyList_SetItem(list, (Py_ssize_t)i, row) != 0) Py_CLEAR(list);
    }
    free(spans);
    return list ? Py_BuildValue("Nn", list, (Py_ssize_t)dropped) : NULL;
}

/* --- stray reads, for python/zeropp/zero/model/parameter.py ------------------------------------------------------- */

/* stray_seen() -> bool: True if a released unit's memory was read since the last stray_take(). */
static PyObject *stray_seen(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(zpp_stray_is_seen());
}

/* stray_take() -> addresses of the first such reads. Later reads of the same memory are recorded again. */
static PyObject *stray_take(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    uintptr_t addresses[ZPP_STRAY_ADDRESSES];
    const size_t count = zpp_stray_take(addresses);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++)
        if (PyList_SetItem(list, (Py_ssize_t)i, PyLong_FromUnsignedLongLong(addresses[i]))) Py_CLEAR(list);
    return list;
}

/* --- the module --------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"cpu_level", cpu_level, METH_NOARGS,
     "cpu_level()\n--\n\nInstruction sets in use, 'scalar', 'avx2', 'avx512' or 'neon': the machine's, or what "
     "ZEROPP_CPU says."},
    {"cpu_detected", cpu_detected, METH_NOARGS, "cpu_detected()\n--\n\nInstruction sets that this machine has."},
    {"kernels", kernels, METH_NOARGS,
     "kernels()\n--\n\nCPU kernels in this build: (op, instruction sets, whether it can run here)."},
    {"cuda_images", cuda_images, METH_NOARGS,
     "cuda_images()\n--\n\nCUDA kernels in this build: (source file, bytes of its fat binary)."},
    {"cuda_toolkit", cuda_toolkit, METH_NOARGS,
     "cuda_toolkit()\n--\n\nCUDA version that compiled the kernels, such as 13000 for 13.0; 0 without kernels."},
    {"cuda_driver", cuda_driver, METH_NOARGS,
     "cuda_driver()\n--\n\nCUDA version of the installed driver. Loads the driver, starts no GPU. Raises "
     "NotBuiltError."},
    {"probe_device", probe_device, METH_VARARGS,
     "probe_device(type, index, /)\n--\n\n[(what was tried, None or why it failed)] of a GPU. Raises NotBuiltError."},
    {"uring", uring, METH_NOARGS,
     "uring()\n--\n\n(whether this build has io_uring, why the kernel refuses it or None)."},
    {"crc32", crc32_of, METH_VARARGS,
     "crc32(address, size_bytes, value=0, /)\n--\n\nCRC-32 of memory, as zlib.crc32 gives it; value: of what came "
     "before."},
    {"crc32_copy", crc32_copy, METH_VARARGS,
     "crc32_copy(to, address, size_bytes, value=0, /)\n--\n\nThe same, and the memory is copied to `to`."},
    {"timeline_start", timeline_start, METH_VARARGS,
     "timeline_start(capacity, /)\n--\n\nKeep spans of time from now on, so many at most."},
    {"timeline_stop", timeline_stop, METH_NOARGS,
     "timeline_stop()\n--\n\n([(kind, name, thread, began_ns, ended_ns, bytes)], how many had no room)."},
    {"stray_seen", stray_seen, METH_NOARGS, "True if a released unit's memory was read since the last stray_take()."},
    {"stray_take", stray_take, METH_NOARGS, "Addresses of those reads; the list is cleared."},
    {NULL, NULL, 0, NULL},
};

int zpp_py_add_base(PyObject *module);
int zpp_py_add_base(PyObject *module) { return PyModule_AddFunctions(module, methods); }
