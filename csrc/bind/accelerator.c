/* SPDX-License-Identifier: Apache-2.0
 *
 * The accelerators of torch (op_entries.h): the table, our devices beside torch's, and torch's current stream.
 */
#include "op_entries.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DEVICES = 64 };

typedef zpp_status (*create_fn)(int ordinal, zpp_device **out, struct zpp_err *err);

static struct accelerator {
    const char *name, *key;
    create_fn create;
    zpp_device *devices[MOST_DEVICES]; /* guarded by lock */
} table[] = {
    { .name = "cuda", .key = "CUDA", .create = zpp_device_cuda_create },
    { .name = "sim", .key = "PrivateUse1", .create = zpp_device_cuda_create },
};
enum { CUDA, SIM, ROWS };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* torch's PrivateUse1 may be any vendor's device: only a test says that it is the simulated one. */
static size_t rows_here(void) { return getenv("ZEROPP_CUDA_DRIVER") ? ROWS : SIM; }

static int32_t device_type_of(size_t row) {
    return row == CUDA ? zpp_torch.aoti_torch_device_type_cuda() : zpp_torch.aoti_torch_device_type_privateuse1();
}

static size_t find_row(int32_t torch_device_type) {
    size_t row = 0;
    while (row < rows_here() && device_type_of(row) != torch_device_type) row++;
    return row;
}

const char *zpp_accelerator_key(size_t row) { return row < rows_here() ? table[row].key : NULL; }

bool zpp_accelerator_has(int32_t torch_device_type) { return find_row(torch_device_type) < rows_here(); }

zpp_status zpp_accelerator_type(const char *name, int32_t *torch_device_type, struct zpp_err *err) {
    size_t row = 0;
    while (row < rows_here() && strcmp(table[row].name, name) != 0) row++;
    if (row == rows_here()) {
        return zpp_fail(err, ZPP_NOT_BUILT, "torch's device \"%s\" is not supported yet; wanted \"cuda\" or \"cpu\"",
                        name);
    }
    *torch_device_type = device_type_of(row);
    return ZPP_OK;
}

/* The stable ABI since torch 2.13, for any accelerator. */
static zpp_status look_up_stream(int32_t index, void **native, struct zpp_err *err) {
    StreamHandle stream = NULL;
    if (!zpp_torch.torch_stream_native_handle) {
        return zpp_fail(err, ZPP_NOT_BUILT, "this torch does not give the current stream of device %d; wanted torch >= "
                        "2.13, or a CUDA build of torch >= 2.11", (int)index);
    }
    AOTITorchError failed = zpp_torch.aoti_torch_get_current_stream(index, &stream);
    if (!failed) failed = zpp_torch.torch_stream_native_handle(stream, native);
    if (stream) zpp_torch.aoti_torch_delete_stream(stream);
    return failed ? zpp_fail(err, ZPP_DEVICE, "torch gives no current stream of device %d", (int)index) : ZPP_OK;
}

/* libtorch_cuda has a function of its own, in every version; it makes no handle on the way. */
static zpp_status current_stream(size_t row, int32_t index, void **native, struct zpp_err *err) {
    if (row != CUDA) return look_up_stream(index, native, err);
    if (!zpp_torch.aoti_torch_get_current_cuda_stream) {
        return zpp_fail(err, ZPP_NOT_BUILT, "this torch has no CUDA: install a CUDA build of torch");
    }
    if (zpp_torch.aoti_torch_get_current_cuda_stream(index, native) == 0) return ZPP_OK;
    return zpp_fail(err, ZPP_DEVICE, "torch gives no current stream of cuda:%d", (int)index);
}

zpp_status zpp_accelerator_current(int32_t torch_device_type, int32_t index, zpp_device **device, void **native,
                                   struct zpp_err *err) {
    const size_t row = find_row(torch_device_type);
    if (row == rows_here()) {
        return zpp_fail(err, ZPP_NOT_BUILT, "device type %d of torch is not supported yet; wanted a CUDA device",
                        (int)torch_device_type);
    }
    struct accelerator *found = &table[row];
    if (index < 0 || index >= MOST_DEVICES) {
        return zpp_fail(err, ZPP_INVALID, "%s:%d is beyond the %d devices that are supported", found->name, (int)index,
                        MOST_DEVICES);
    }
    zpp_status status = current_stream(row, index, native, err);
    if (status != ZPP_OK) return status;
    pthread_mutex_lock(&lock);
    if (!found->devices[index]) status = found->create(index, &found->devices[index], err);
    if (status == ZPP_OK) *device = found->devices[index];
    pthread_mutex_unlock(&lock);
    return status;
}
