/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine where io_uring is refused (containers) or not built: a few threads, each with one pread or pwrite at a
 * time. Chunks, order and judgement are those of the ring; fewer operations are in flight, and a byte costs more CPU
 * time.
 */
#include <stdlib.h>

#include "internal.h"

static void run(zpp_aio *aio, struct zpp_aio_chunk *chunk) {
    ssize_t result;
    do {
        struct zpp_aio_op op;
        zpp_aio_chunk_op(chunk, &op);
        result = op.write ? aio->sys.pwrite(aio->sys.ctx, op.fd, op.memory, op.bytes, op.offset_bytes)
                          : aio->sys.pread(aio->sys.ctx, op.fd, op.memory, op.bytes, op.offset_bytes);
    } while (zpp_aio_settle(aio, chunk, result));
}

static void *thread(void *ctx) {
    zpp_aio *aio = ctx;
    pthread_mutex_lock(&aio->lock);
    for (;;) {
        struct zpp_aio_chunk *chunk = NULL;
        if (zpp_aio_take(aio, &chunk, 1)) {
            pthread_mutex_unlock(&aio->lock);
            run(aio, chunk);
            pthread_mutex_lock(&aio->lock);
            zpp_aio_finish(aio, chunk);
            /* The chunk may have released a bounce buffer, or a later request that depended on its own. */
            if (aio->urgent.first || aio->background.first) pthread_cond_signal(&aio->work);
            continue;
        }
        if (aio->stopping && !aio->urgent.first && !aio->background.first) break;
        pthread_cond_wait(&aio->work, &aio->lock);
    }
    pthread_cond_broadcast(&aio->work); /* let the next thread see the end, too */
    pthread_mutex_unlock(&aio->lock);
    return NULL;
}

/* The threads call the kernel and little else. Stacks of the usual 8 MiB count as private memory (RLIMIT_DATA), all of
 * them together as more than the buffers. */
enum { STACK_BYTES = 256 * 1024 };

static int start_thread(zpp_aio *aio, pthread_t *made) {
    pthread_attr_t attributes;
    int failed = pthread_attr_init(&attributes);
    if (failed) return failed;
    failed = pthread_attr_setstacksize(&attributes, STACK_BYTES);
    if (!failed) failed = pthread_create(made, &attributes, thread, aio);
    pthread_attr_destroy(&attributes);
    return failed;
}

zpp_status zpp_aio_pread_start(zpp_aio *aio, struct zpp_err *err) {
    unsigned wanted = aio->config.threads ? aio->config.threads : ZPP_AIO_DEFAULT_THREADS;
    if (wanted > aio->config.depth) wanted = aio->config.depth;
    for (; aio->threads_count < wanted; ++aio->threads_count) {
        const int failed = start_thread(aio, &aio->threads[aio->threads_count]);
        if (failed && aio->threads_count == 0) return zpp_fail_os(err, failed, "aio: no thread");
        if (failed) break; /* fewer threads are enough */
    }
    return ZPP_OK;
}
