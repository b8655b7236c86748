/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of the simulated GPU. A device's memory is one file without a name (memfd), of which blocks of cuMemAlloc are
 * parts; a handle of cuMemCreate is a file of its own. So memory may be mapped at several addresses and by several
 * processes, as on a GPU. Fresh memory is NaN in every floating type (bytes 0xff).
 *
 * Strict where the driver is: granularity, ranges that were not reserved, handles that are dead, what was not made for
 * export. A write past the end of a block of cuMemAlloc is found when the block is freed. A range that is unmapped is
 * gone at once: an operation that still uses it ends the process, as an illegal address ends a context.
 *
 * Locks: `lock` guards the lists.
 */
#include "internal.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    ALIGN_BYTES = 256, /* cuMemAlloc promises this and no more, so blocks lie at odd multiples of it */
    GUARD_BYTES = 256, /* at least, behind each block */
    GUARD = 0xa5,
    NAN_BYTE = 0xff,
    PAGE_BYTES = 4096,
    MOST_HANDLES = 1 << 15,
    FIRST_HANDLE = 1000,
    ACCESS_NONE = 0, /* CUmemAccess_flags */
    ACCESS_READ = 1,
    HOST_FLAGS = 7, /* PORTABLE, DEVICEMAP, WRITECOMBINED */
};

struct block { /* of cuMemAlloc; sorted by address */
    struct block *next;
    uintptr_t start, end; /* with what lies before and behind it */
    char *memory;
    size_t bytes;
};
static struct arena {
    char *base;
    size_t bytes, used_bytes;
    int file;
    struct block *blocks;
} arenas[SIM_MOST_DEVICES];

enum range_kind { HOST_ALLOCATED, HOST_REGISTERED, RESERVED, OPENED };
struct range {
    struct range *next;
    enum range_kind kind;
    char *memory;
    size_t bytes;
};
static struct range *ranges;

struct handle {
    int file; /* -1: dead */
    size_t bytes;
    int device;
    bool exportable;
};
static struct handle handles[MOST_HANDLES];
static int handles_made;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

static int file_of(size_t bytes) {
    const int file = memfd_create("simulated GPU", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)bytes)) sim_fatal("no file for %zu bytes of device memory", bytes);
    return file;
}

/* --- lists -------------------------------------------------------------------------------------------------------- */

static bool overlaps(const struct range *range, const char *memory, size_t bytes) {
    return memory < range->memory + range->bytes && range->memory < memory + bytes;
}

static void add_range(enum range_kind kind, void *memory, size_t bytes) { /* locked */
    struct range *range = malloc(sizeof *range);
    if (!range) sim_fatal("no memory for a range");
    *range = (struct range){ranges, kind, memory, bytes};
    ranges = range;
}

static struct range *find_range(enum range_kind kind, const char *memory, size_t bytes) { /* locked; that holds it */
    struct range *range = ranges;
    while (range && !(range->kind == kind && memory >= range->memory && memory + bytes <= range->memory + range->bytes))
        range = range->next;
    return range;
}

/* Takes a range that begins at `memory` off the list. 0: there is none. */
static size_t take_range(enum range_kind kind, const void *memory) {
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    struct range **link = &ranges;
    while (*link && !((*link)->kind == kind && (*link)->memory == memory)) link = &(*link)->next;
    if (*link) {
        struct range *range = *link;
        *link = range->next;
        bytes = range->bytes;
        free(range);
    }
    pthread_mutex_unlock(&lock);
    return bytes;
}

enum sim_memory sim_memory_of(const void *memory) {
    enum sim_memory kind = SIM_PAGEABLE;
    pthread_mutex_lock(&lock);
    for (int device = 0; device < SIM_MOST_DEVICES; device++) {
        const struct arena *arena = &arenas[device];
        if (arena->base && (const char *)memory >= arena->base && (const char *)memory < arena->base + arena->bytes)
            kind = SIM_DEVICE;
    }
    for (const struct range *range = ranges; range && kind == SIM_PAGEABLE; range = range->next)
        if (overlaps(range, memory, 1)) kind = range->kind <= HOST_REGISTERED ? SIM_PINNED : SIM_DEVICE;
    pthread_mutex_unlock(&lock);
    return kind;
}

/* --- cuMemAlloc --------------------------------------------------------------------------------------------------- */

static struct arena *arena_of(int device) { /* locked */
    struct arena *arena = &arenas[device];
    if (arena->base) return arena;
    arena->bytes = sim_setting("SIM_DEVICE_BYTES", UINT64_C(1) << 34);
    arena->file = file_of(arena->bytes);
    arena->base = mmap(NULL, arena->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena->file, 0);
    if (arena->base == MAP_FAILED) sim_fatal("no addresses for %zu bytes of device memory", arena->bytes);
    return arena;
}

/* The first gap that is large enough. */
static struct block *place(struct arena *arena, size_t bytes) {
    const size_t whole = round_up(ALIGN_BYTES + bytes + GUARD_BYTES, 2 * ALIGN_BYTES);
    uintptr_t start = (uintptr_t)arena->base;
    struct block **link = &arena->blocks;
    while (*link && (*link)->start - start < whole) {
        start = (*link)->end;
        link = &(*link)->next;
    }
    if (start + whole > (uintptr_t)arena->base + arena->bytes) return NULL;
    struct block *block = malloc(sizeof *block);
    if (!block) sim_fatal("no memory for a block");
    *block = (struct block){*link, start, start + whole, (char *)(start + ALIGN_BYTES), bytes};
    return *link = block;
}

int sim_alloc(int device, size_t bytes, void **out) {
    pthread_mutex_lock(&lock);
    struct arena *arena = arena_of(device);
    const struct block *block = arena->bytes - arena->used_bytes < bytes ? NULL : place(arena, bytes);
    if (block) {
        arena->used_bytes += block->end - block->start;
        memset(block->memory, NAN_BYTE, bytes);
        memset(block->memory + bytes, GUARD, block->end - (uintptr_t)(block->memory + bytes));
        *out = block->memory;
    }
    pthread_mutex_unlock(&lock);
    if (!block) return ZPP_CU_OUT_OF_MEMORY;
    SIM_COUNT(blocks, 1);
    SIM_COUNT(block_bytes, (int64_t)bytes);
    return ZPP_CU_SUCCESS;
}

static struct block **find_block(const void *memory, int *device) { /* locked */
    for (*device = 0; *device < SIM_MOST_DEVICES; ++*device) {
        struct block **link = &arenas[*device].blocks;
        while (*link && (*link)->memory != memory) link = &(*link)->next;
        if (*link) return link;
    }
    return NULL;
}

static void check_guard(const struct block *block) {
    for (const unsigned char *at = (unsigned char *)block->memory + block->bytes; at < (unsigned char *)block->end;
         at++)
        if (*at != GUARD)
            sim_fatal("a write past the end of a block of %zu bytes, at byte %zu", block->bytes,
                      (size_t)(at - (unsigned char *)block->memory));
}

int sim_free(void *memory) {
    int device;
    pthread_mutex_lock(&lock);
    const bool known = find_block(memory, &device) != NULL;
    pthread_mutex_unlock(&lock);
    if (!known) return ZPP_CU_INVALID_VALUE;
    const char *before = sim_because("cuMemFree");
    sim_device_synchronize(device);
    sim_because(before);
    pthread_mutex_lock(&lock);
    struct block **link = find_block(memory, &device), *block = *link;
    *link = block->next;
    arenas[device].used_bytes -= block->end - block->start;
    pthread_mutex_unlock(&lock);
    check_guard(block);
    SIM_COUNT(blocks, -1);
    SIM_COUNT(block_bytes, -(int64_t)block->bytes);
    free(block);
    return ZPP_CU_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *memory, size_t bytes) {
    int device;
    void *found = NULL;
    CUresult result = sim_current_device(&device);
    if (!result) result = bytes ? sim_alloc(device, bytes, &found) : ZPP_CU_INVALID_VALUE;
    if (!result) *memory = (CUdeviceptr)(uintptr_t)found;
    return result;
}

CUresult cuMemFree(CUdeviceptr memory) {
    int device;
    const CUresult result = sim_current_device(&device);
    return result || !memory ? result : sim_free((void *)(uintptr_t)memory);
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    int device;
    const CUresult result = sim_current_device(&device);
    if (result) return result;
    pthread_mutex_lock(&lock);
    const struct arena *arena = arena_of(device);
    *free_bytes = arena->bytes - arena->used_bytes;
    *total_bytes = arena->bytes;
    pthread_mutex_unlock(&lock);
    return ZPP_CU_SUCCESS;
}

/* --- page-locked memory of the host ------------------------------------------------------------------------------- */

int sim_host_alloc(size_t bytes, void **out) {
    const size_t whole = round_up(bytes ? bytes : 1, PAGE_BYTES);
    void *memory = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return ZPP_CU_OUT_OF_MEMORY;
    memset(memory, NAN_BYTE, whole);
    pthread_mutex_lock(&lock);
    add_range(HOST_ALLOCATED, memory, whole);
    pthread_mutex_unlock(&lock);
    SIM_COUNT(blocks, 1);
    SIM_COUNT(block_bytes, (int64_t)whole);
    *out = memory;
    return ZPP_CU_SUCCESS;
}

int sim_host_free(void *memory) {
    const size_t bytes = take_range(HOST_ALLOCATED, memory);
    if (!bytes) return ZPP_CU_INVALID_VALUE;
    const char *before = sim_because("cuMemFreeHost");
    for (int device = 0; device < sim_devices(); device++) sim_device_synchronize(device);
    sim_because(before);
    munmap(memory, bytes);
    SIM_COUNT(blocks, -1);
    SIM_COUNT(block_bytes, -(int64_t)bytes);
    return ZPP_CU_SUCCESS;
}

CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags) {
    int device;
    const CUresult result = sim_current_device(&device);
    if (result) return result;
    return !bytes || flags & ~(unsigned int)HOST_FLAGS ? ZPP_CU_INVALID_VALUE : sim_host_alloc(bytes, memory);
}

CUresult cuMemFreeHost(void *memory) {
    int device;
    const CUresult result = sim_current_device(&device);
    return result ? result : sim_host_free(memory);
}

static bool registrations_shared;

void sim_share_registrations(bool shared) { registrations_shared = shared; }

static bool is_taken(const struct range *range, const char *memory, size_t bytes) {
    const bool same = range->memory == memory && range->bytes == bytes;
    return range->kind <= HOST_REGISTERED && overlaps(range, memory, bytes) && !(same && registrations_shared);
}

CUresult cuMemHostRegister(void *memory, size_t bytes, unsigned int flags) {
    int device;
    CUresult result = sim_current_device(&device);
    if (result) return result;
    if (!bytes || flags & ~3u) return ZPP_CU_INVALID_VALUE; /* PORTABLE, DEVICEMAP */
    pthread_mutex_lock(&lock);
    size_t locked_bytes = bytes;
    for (const struct range *range = ranges; range; range = range->next) {
        if (is_taken(range, memory, bytes)) result = ZPP_CU_HOST_REGISTER_ALREADY;
        if (range->kind == HOST_REGISTERED) locked_bytes += range->bytes;
    }
    if (!result && locked_bytes > sim_setting("SIM_PINNED_BYTES", UINT64_MAX)) result = ZPP_CU_OUT_OF_MEMORY;
    if (!result) add_range(HOST_REGISTERED, memory, bytes);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemHostUnregister(void *memory) {
    int device;
    const CUresult result = sim_current_device(&device);
    if (result) return result;
    return take_range(HOST_REGISTERED, memory) ? ZPP_CU_SUCCESS : NOT_REGISTERED;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *device_memory, void *memory, unsigned int flags) {
    if (flags || sim_memory_of(memory) != SIM_PINNED) return ZPP_CU_INVALID_VALUE;
    *device_memory = (CUdeviceptr)(uintptr_t)memory;
    return ZPP_CU_SUCCESS;
}

/* --- memory that is mapped ---------------------------------------------------------------------------------------- */

/* A GPU's is 2 MiB. It is small here, so that small models go round their ring. */
static size_t grain_bytes(void) { return sim_setting("SIM_GRAIN_BYTES", PAGE_BYTES); }

static bool is_grained(CUdeviceptr address, size_t bytes) {
    return bytes && bytes % grain_bytes() == 0 && address % grain_bytes() == 0;
}

static bool is_location(const CUmemLocation *location) {
    const int ordinal = location->id >= FIRST_DEVICE ? location->id - FIRST_DEVICE : location->id;
    return location->type == ZPP_CU_MEM_ON_DEVICE && ordinal >= 0 && ordinal < sim_devices();
}

static bool are_properties(const CUmemAllocationProp *properties) {
    return properties->type == ZPP_CU_MEM_PINNED &&
           (properties->requestedHandleTypes & ~ZPP_CU_MEM_POSIX_HANDLE) == 0 && is_location(&properties->location);
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags which) {
    if (which & ~1 || !are_properties(properties)) return ZPP_CU_INVALID_VALUE;
    *bytes = grain_bytes();
    return ZPP_CU_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t align_bytes, CUdeviceptr hint,
                             unsigned long long flags) {
    int device;
    const CUresult result = sim_current_device(&device);
    if (result) return result;
    if (flags || !is_grained(0, bytes) || (align_bytes & (align_bytes - 1))) return ZPP_CU_INVALID_VALUE;
    const size_t align = align_bytes > grain_bytes() ? align_bytes : grain_bytes();
    char *found =
        mmap((void *)(uintptr_t)hint, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return ZPP_CU_OUT_OF_MEMORY;
    char *memory = (char *)round_up((uintptr_t)found, align);
    if (memory > found) munmap(found, (size_t)(memory - found));
    munmap(memory + bytes, align - (size_t)(memory - found));
    pthread_mutex_lock(&lock);
    add_range(RESERVED, memory, bytes);
    pthread_mutex_unlock(&lock);
    *address = (CUdeviceptr)(uintptr_t)memory;
    return ZPP_CU_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    const size_t reserved = take_range(RESERVED, (void *)(uintptr_t)address);
    if (!reserved) return ZPP_CU_INVALID_VALUE;
    if (reserved != bytes) sim_fatal("cuMemAddressFree of %zu bytes, of which %zu were reserved", bytes, reserved);
    munmap((void *)(uintptr_t)address, bytes);
    return ZPP_CU_SUCCESS;
}

static CUmemGenericAllocationHandle add_handle(int file, size_t bytes, int device, bool exportable) {
    pthread_mutex_lock(&lock);
    int index = handles_made;
    if (handles_made < MOST_HANDLES) handles_made++;
    else /* the dead ones are taken again this late, so that the use of a dead one is mostly found */
        for (index = 0; index < MOST_HANDLES && handles[index].file >= 0;) index++;
    if (index == MOST_HANDLES) sim_fatal("%d handles of cuMemCreate live, and there is room for no more", index);
    handles[index] = (struct handle){file, bytes, device, exportable};
    pthread_mutex_unlock(&lock);
    return (CUmemGenericAllocationHandle)(FIRST_HANDLE + index);
}

static struct handle *find_handle(CUmemGenericAllocationHandle handle) {
    if (handle < FIRST_HANDLE || handle >= (CUmemGenericAllocationHandle)(FIRST_HANDLE + handles_made)) return NULL;
    struct handle *found = &handles[handle - FIRST_HANDLE];
    return found->file < 0 ? NULL : found;
}

static int ordinal_of(const CUmemLocation *location) {
    return location->id >= FIRST_DEVICE ? location->id - FIRST_DEVICE : location->id;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    if (flags || !is_grained(0, bytes) || !are_properties(properties)) return ZPP_CU_INVALID_VALUE;
    const int device = ordinal_of(&properties->location);
    pthread_mutex_lock(&lock);
    struct arena *arena = arena_of(device);
    const bool room = arena->bytes - arena->used_bytes >= bytes;
    if (room) arena->used_bytes += bytes;
    pthread_mutex_unlock(&lock);
    if (!room) return ZPP_CU_OUT_OF_MEMORY;
    const int file = file_of(bytes);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) sim_fatal("no addresses for %zu bytes", bytes);
    memset(memory, NAN_BYTE, bytes);
    munmap(memory, bytes);
    *handle = add_handle(file, bytes, device, properties->requestedHandleTypes & ZPP_CU_MEM_POSIX_HANDLE);
    SIM_COUNT(blocks, 1);
    SIM_COUNT(block_bytes, (int64_t)bytes);
    return ZPP_CU_SUCCESS;
}

/* What is mapped stays mapped, and keeps its memory. */
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct handle *found = find_handle(handle);
    if (!found) return ZPP_CU_INVALID_VALUE;
    close(found->file);
    found->file = -1;
    if (found->device >= 0) { /* not imported from a peer, whose memory it is */
        pthread_mutex_lock(&lock);
        arenas[found->device].used_bytes -= found->bytes;
        pthread_mutex_unlock(&lock);
        SIM_COUNT(blocks, -1);
        SIM_COUNT(block_bytes, -(int64_t)found->bytes);
    }
    return ZPP_CU_SUCCESS;
}

static bool is_reserved(CUdeviceptr address, size_t bytes) {
    pthread_mutex_lock(&lock);
    const bool found = find_range(RESERVED, (char *)(uintptr_t)address, bytes) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    const struct handle *found = find_handle(handle);
    if (offset || flags || !found || bytes != found->bytes || !is_grained(address, bytes)) return ZPP_CU_INVALID_VALUE;
    if (!is_reserved(address, bytes)) return ZPP_CU_INVALID_VALUE;
    void *mapped = mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->file, 0);
    return mapped == MAP_FAILED ? ZPP_CU_OUT_OF_MEMORY : ZPP_CU_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    if (!is_grained(address, bytes) || !is_reserved(address, bytes) || !count) return ZPP_CU_INVALID_VALUE;
    int allowed = PROT_NONE;
    for (size_t i = 0; i < count; i++) {
        if (!is_location(&access[i].location)) return ZPP_CU_INVALID_VALUE;
        if (access[i].flags == ACCESS_READ) allowed |= PROT_READ;
        else if (access[i].flags == ZPP_CU_MEM_READ_WRITE) allowed |= PROT_READ | PROT_WRITE;
        else if (access[i].flags != ACCESS_NONE) return ZPP_CU_INVALID_VALUE;
    }
    return mprotect((void *)(uintptr_t)address, bytes, allowed) ? ZPP_CU_INVALID_VALUE : ZPP_CU_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    if (!is_grained(address, bytes) || !is_reserved(address, bytes)) return ZPP_CU_INVALID_VALUE;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)(uintptr_t)address, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED ? ZPP_CU_OUT_OF_MEMORY
                                                                                          : ZPP_CU_SUCCESS;
}

/* --- for other processes ------------------------------------------------------------------------------------------ */

/* A file descriptor, which the caller sends to its peer over a Unix socket. */
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
    const struct handle *found = find_handle(handle);
    if (!found || !found->exportable || type != ZPP_CU_MEM_POSIX_HANDLE || flags) return ZPP_CU_INVALID_VALUE;
    const int file = fcntl(found->file, F_DUPFD_CLOEXEC, 0);
    if (file < 0) return ZPP_CU_OUT_OF_MEMORY;
    memcpy(out, &file, sizeof file);
    return ZPP_CU_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *descriptor,
                                        CUmemAllocationHandleType type) {
    struct stat about;
    const int file = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
    if (type != ZPP_CU_MEM_POSIX_HANDLE || file < 0 || fstat(file, &about)) return ZPP_CU_INVALID_VALUE;
    *handle = add_handle(file, (size_t)about.st_size, -1, false);
    return ZPP_CU_SUCCESS;
}
