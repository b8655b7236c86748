/* SPDX-License-Identifier: Apache-2.0
 *
 * What this build and this machine have, for `python -m zeropp env`: CPU level, kernel variants, CUDA kernels and
 * driver, io_uring. Nothing is asked before a function is called.
 */
#include <Python.h>

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../base/cpu.h"
#include "../base/cuda_images.h"
#include "../base/device_cuda.h"
#include "raise.h"

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
    const int levels = ZPP_CPU_X86 ? ZPP_CPU_LEVELS : ZPP_CPU_AVX2; /* that this build has, of every op */
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

static PyMethodDef methods[] = {
    {"cpu_level", cpu_level, METH_NOARGS,
     "cpu_level()\n--\n\nInstruction sets in use, 'scalar', 'avx2' or 'avx512': the machine's, or what ZEROPP_CPU "
     "says."},
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
    {"uring", uring, METH_NOARGS,
     "uring()\n--\n\n(whether this build has io_uring, why the kernel refuses it or None)."},
    {NULL, NULL, 0, NULL},
};

int zpp_py_add_env(PyObject *module);
int zpp_py_add_env(PyObject *module) { return PyModule_AddFunctions(module, methods); }
