/* SPDX-License-Identifier: Apache-2.0
 *
 * Regions in the memory of a device: each rank of a host owns a part, and all map all parts. On the devices of the CPU
 * it is a region of comm.h; on CUDA the parts lie in GPUs, and copies and kernels read them over the links between them
 * (docs/design/0037-device-interface.md).
 */
#ifndef ZPP_COMM_DEVICE_REGION_H
#define ZPP_COMM_DEVICE_REGION_H

#include "../base/device.h"
#include "comm.h"

typedef struct zpp_device_region zpp_device_region;
/* Collective, on one host; NOT_BUILT over several. `bytes` is of one part, the same on all ranks, and not initialised
 * on CUDA. Either every rank gets its region, or every rank an error: the one whose GPU has no memory left or cannot
 * map a peer's knows the cause, and the others name that rank. The group goes on, so NCCL can do the work instead. New;
 * free with zpp_device_region_destroy, which is local, after all work on it. The device is borrowed until then. */
zpp_status zpp_device_region_create(zpp_comm *comm, zpp_device *device, size_t bytes, zpp_device_region **out,
                                    struct zpp_err *err);
void zpp_device_region_destroy(zpp_device_region *region); /* NULL is fine */
void *zpp_device_region_base(const zpp_device_region *region, int rank);
size_t zpp_device_region_bytes(const zpp_device_region *region); /* of one part, rounded up */

#endif
