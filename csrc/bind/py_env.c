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
    static const struct {
        const char *op;
        enum zpp_cpu_level level;
    } rows[] = {
#define ZPP_ADAM_VARIANT(level, version) {"adam", level},
#include "../ops/adam/variants.def"
#undef ZPP_ADAM_VARIANT
#define ZPP_ADAGRAD_VARIANT(level, version) {"adagrad", level},
#include "../ops/adagrad/variants.def"
#undef ZPP_ADAGRAD_VARIANT
#define ZPP_LION_VARIANT(level, version) {"lion", level},
#include "../ops/lion/variants.def"
#undef ZPP_LION_VARIANT
#define ZPP_SGD_VARIANT(level, version) {"sgd", level},
#include "../ops/sgd/variants.def"
#undef ZPP_SGD_VARIANT
#define ZPP_NORM_VARIANT(level, version) {"norm", level},
#include "../ops/norm/variants.def"
#undef ZPP_NORM_VARIANT
#define ZPP_QUANT_VARIANT(level, version) {"quant", level},
#include "../ops/quant/variants.def"
#undef ZPP_QUANT_VARIANT
#define ZPP_MOMENTS_VARIANT(level, version) {"moments", level},
#include "../ops/moments/variants.def"
#undef ZPP_MOMENTS_VARIANT
#define ZPP_ONEBIT_VARIANT(level, version) {"onebit", level},
#include "../ops/onebit/variants.def"
#undef ZPP_ONEBIT_VARIANT
    };
    PyObject *table = PyList_New(0);
    for (size_t row = 0; table && row < sizeof rows / sizeof rows[0]; ++row) {
        PyObject *usable = PyBool_FromLong(rows[row].level <= zpp_cpu_level());
        PyObject *item = Py_BuildValue("ssN", rows[row].op, zpp_cpu_level_name(rows[row].level), usable);
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
