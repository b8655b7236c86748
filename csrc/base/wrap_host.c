/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that wraps (wrap.h) on the CPU: a memfd that is mapped again and again. Tests use it; training on the CPU has
 * range.c, where released memory is not there at all.
 */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device_host.h"
#include "mem.h"

zpp_status zpp_host_map_grain(zpp_device *device, size_t *bytes, struct zpp_err *err) {
    (void)device, (void)err;
    *bytes = zpp_page_bytes();
    return ZPP_OK;
}

static zpp_status map_all(int fd, struct zpp_mapping *mapping, struct zpp_err *err) {
    unsigned char *base = mapping->base;
    for (size_t at = 0; at < mapping->address_bytes; at += mapping->memory_bytes) {
        const size_t left = mapping->address_bytes - at;
        const size_t bytes = left < mapping->memory_bytes ? left : mapping->memory_bytes;
        if (mmap(base + at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
            return zpp_fail_os(err, errno, "wrapped memory: %zu bytes cannot be mapped at offset %zu", bytes, at);
        }
    }
    return ZPP_OK;
}

zpp_status zpp_host_map_wrapped(zpp_device *device, size_t address_bytes, size_t memory_bytes, struct zpp_mapping *out,
                                struct zpp_err *err) {
    const int fd = memfd_create("zeropp-wrap", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)memory_bytes) != 0) {
        const int failed = errno;
        if (fd >= 0) close(fd);
        return zpp_fail_os(err, failed, "wrapped memory: %zu bytes cannot be made (memfd_create)", memory_bytes);
    }
    void *base = mmap(NULL, address_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    zpp_status status = ZPP_OK;
    if (base == MAP_FAILED) {
        status = zpp_fail_os(err, errno, "wrapped memory: %zu bytes of addresses cannot be reserved", address_bytes);
    } else {
        struct zpp_mapping mapping = {base, address_bytes, memory_bytes, zpp_page_bytes(), NULL};
        status = map_all(fd, &mapping, err);
        if (status) zpp_host_unmap_wrapped(device, &mapping);
        else *out = mapping;
    }
    close(fd); /* the mappings keep the memory */
    return status;
}

void zpp_host_unmap_wrapped(zpp_device *device, struct zpp_mapping *mapping) {
    (void)device;
    munmap(mapping->base, mapping->address_bytes);
}
