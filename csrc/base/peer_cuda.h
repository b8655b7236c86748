/* SPDX-License-Identifier: Apache-2.0
 *
 * Device memory of one process that others of the host map, as they do with a memfd: made here, sent as a file
 * descriptor, mapped there. Copy engines and kernels of the importing GPU read it over NVLink or PCIe.
 *
 * Threads: any; one at a time a record.
 */
#ifndef ZPP_BASE_PEER_CUDA_H
#define ZPP_BASE_PEER_CUDA_H

#include "device.h"

struct zpp_peer_memory {
    void *base; /* NULL: none */
    size_t bytes;
    uint64_t handle; /* of the driver */
    bool own;        /* made here, and so counted here */
};

/* Return the bytes that sizes are multiples of. NOT_BUILT where the driver cannot export memory (some containers and
 * virtual GPUs). */
zpp_status zpp_peer_cuda_grain(zpp_device *device, size_t *bytes, struct zpp_err *err);
/* Make `bytes` of memory, not initialised, and a descriptor for peers, which the caller closes. */
zpp_status zpp_peer_cuda_create(zpp_device *device, size_t bytes, struct zpp_peer_memory *out, int *fd,
                                struct zpp_err *err);
/* Map a peer's. NOT_BUILT if this GPU cannot reach the other one. The caller still owns `fd`. */
zpp_status zpp_peer_cuda_import(zpp_device *device, int fd, size_t bytes, struct zpp_peer_memory *out,
                                struct zpp_err *err);
/* Unmap it, after all work on it; the memory itself lives until the last process unmaps it. NULL base is fine. */
void zpp_peer_cuda_unmap(zpp_device *device, struct zpp_peer_memory *memory);

#endif
