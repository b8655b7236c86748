/* SPDX-License-Identifier: Apache-2.0
 *
 * memfd_create, F_ADD_SEALS, mmap. MFD_CLOEXEC keeps the memory out of programs started by the user's script.
 *
 * Under ThreadSanitizer, ranks that are threads of one process share one mapping of a memfd instead of mapping it
 * twice: the tool follows addresses, so only then does it see that two ranks touch the same byte. (A table of mappings,
 * which other builds do not have.)
 */
#include "memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ZPP_TSAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define ZPP_TSAN 1
#endif

enum { SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

zpp_status zpp_memfd_create(const char *label, size_t bytes, int *fd, struct zpp_err *err) {
    const int made = memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made < 0) return zpp_fail_os(err, errno, "comm: no shared memory of %zu bytes (memfd_create)", bytes);
    /* Anyone may open a memfd by /proc/PID/fd as far as its mode allows, which is 0777 when it is made. */
    if (fchmod(made, S_IRUSR | S_IWUSR) != 0 || ftruncate(made, (off_t)bytes) != 0 ||
        fcntl(made, F_ADD_SEALS, SIZE_SEALS) != 0) {
        const zpp_status status =
            zpp_fail_os(err, errno, "comm: no shared memory of %zu bytes (sizing a memfd)", bytes);
        close(made);
        return status;
    }
    *fd = made;
    return ZPP_OK;
}

static zpp_status check(int fd, size_t bytes, struct stat *info, struct zpp_err *err) {
    if (fstat(fd, info) != 0)
        return zpp_fail_os(err, errno, "comm: shared memory of a peer cannot be examined (fstat)");
    const int seals = fcntl(fd, F_GET_SEALS);
    if (info->st_size < 0 || (size_t)info->st_size != bytes || seals < 0 || !(seals & F_SEAL_SHRINK))
        return zpp_fail(err, ZPP_PEER,
                        "comm: shared memory of a peer is %lld bytes with seals %#x, wanted %zu bytes sealed "
                        "against shrinking; do all ranks run the same zeropp?",
                        (long long)info->st_size, (unsigned)seals, bytes);
    return ZPP_OK;
}

static zpp_status map_new(int fd, size_t bytes, void **base, struct zpp_err *err) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED && errno == ENOMEM)
        return zpp_fail(err, ZPP_NOMEM, "comm: no memory for %zu bytes of shared memory (mmap)", bytes);
    if (at == MAP_FAILED) return zpp_fail_os(err, errno, "comm: %zu bytes of shared memory cannot be mapped", bytes);
    *base = at;
    return ZPP_OK;
}

#ifdef ZPP_TSAN
#include <pthread.h>

enum { MAPPINGS = 4096 };
static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;
static struct mapping {
    void *base;
    dev_t device;
    ino_t inode;
    int users;
} mappings[MAPPINGS];

static zpp_status map_shared(int fd, const struct stat *info, size_t bytes, void **base, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    struct mapping *hole = NULL, *found = NULL;
    pthread_mutex_lock(&mappings_lock);
    for (int i = 0; i < MAPPINGS && !found; i++) {
        struct mapping *one = &mappings[i];
        if (!one->users)
            hole = hole ? hole : one;
        else if (one->device == info->st_dev && one->inode == info->st_ino)
            found = one;
    }
    if (!found && hole) {
        status = map_new(fd, bytes, &hole->base, err);
        if (status == ZPP_OK) {
            hole->device = info->st_dev;
            hole->inode = info->st_ino;
            found = hole;
        }
    }
    if (found) {
        found->users++;
        *base = found->base;
    } else if (status == ZPP_OK) {
        status = zpp_fail(err, ZPP_NOMEM, "comm: more than %d mappings under ThreadSanitizer", MAPPINGS);
    }
    pthread_mutex_unlock(&mappings_lock);
    return status;
}

static bool last_user(void *base) {
    bool last = true;
    pthread_mutex_lock(&mappings_lock);
    for (int i = 0; i < MAPPINGS; i++)
        if (mappings[i].users && mappings[i].base == base) {
            last = --mappings[i].users == 0;
            break;
        }
    pthread_mutex_unlock(&mappings_lock);
    return last;
}
#endif

zpp_status zpp_memfd_map(int fd, size_t bytes, void **base, struct zpp_err *err) {
    struct stat info;
    const zpp_status status = check(fd, bytes, &info, err);
    if (status != ZPP_OK) return status;
#ifdef ZPP_TSAN
    return map_shared(fd, &info, bytes, base, err);
#else
    return map_new(fd, bytes, base, err);
#endif
}

void zpp_memfd_unmap(void *base, size_t bytes) {
    if (!base) return;
#ifdef ZPP_TSAN
    if (!last_user(base)) return;
#endif
    munmap(base, bytes);
}

void zpp_memfd_punch(void *base, size_t bytes) {
    /* MADV_REMOVE works on shared mappings, needs no descriptor, and frees the pages for all ranks. */
    if (bytes) (void)madvise(base, bytes, MADV_REMOVE);
}
