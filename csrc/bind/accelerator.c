/* SPDX-License-Identifier: Apache-2.0
 *
 * Where ops on CUDA run: our device beside torch's, and torch's current stream (op_entries.h).
 */
#include <pthread.h>

#include "op_entries.h"

enum { MOST_DEVICES = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards devices */
static zpp_device *devices[MOST_DEVICES];

zpp_status zpp_op_cuda(int32_t index, zpp_device **device, void **stream, struct zpp_err *err) {
    if (!zpp_torch.aoti_torch_get_current_cuda_stream) {
        return zpp_fail(err, ZPP_NOT_BUILT, "this torch has no CUDA: install a CUDA build of torch");
    }
    if (index < 0 || index >= MOST_DEVICES) {
        return zpp_fail(err, ZPP_INVALID, "cuda:%d is beyond the %d devices that are supported", (int)index,
                        MOST_DEVICES);
    }
    if (zpp_torch.aoti_torch_get_current_cuda_stream(index, stream) != 0) {
        return zpp_fail(err, ZPP_DEVICE, "torch gives no current stream of cuda:%d", (int)index);
    }
    pthread_mutex_lock(&lock);
    const zpp_status status = devices[index] ? ZPP_OK : zpp_device_cuda_create(index, &devices[index], err);
    if (status == ZPP_OK) *device = devices[index];
    pthread_mutex_unlock(&lock);
    return status;
}
