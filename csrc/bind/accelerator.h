/* SPDX-License-Identifier: Apache-2.0
 *
 * The accelerators of torch that zeropp has a device for: one row each of dispatch key, torch's device type and the
 * function that makes the device (docs/design/0037-device-interface.md says what another row has to bring).
 *
 *   cuda   CUDA
 *   sim    PrivateUse1, over the driver that ZEROPP_CUDA_DRIVER names; there only while that variable is set: tests/sim
 *
 * Threads: any, once torch's functions are loaded.
 */
#ifndef ZPP_BIND_ACCELERATOR_H
#define ZPP_BIND_ACCELERATOR_H

#include <stdbool.h>

#include "../base/device.h"

/* The dispatch key of row 0, 1, ... of this process; NULL behind the last. */
const char *zpp_accelerator_key(size_t row);
bool zpp_accelerator_has(int32_t torch_device_type);
/* Our device for torch's device `index`, made once and kept for the life of the process, and the driver's stream that
 * is current there in this thread. Other threads and `with torch.cuda.stream(...)` have other ones, so call it at every
 * entry. NOT_BUILT without a driver, or in a torch without that accelerator. */
zpp_status zpp_accelerator_current(int32_t torch_device_type, int32_t index, zpp_device **device, void **native,
                                   struct zpp_err *err);

#endif
