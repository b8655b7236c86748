/* SPDX-License-Identifier: Apache-2.0
 *
 * The device cuda over the simulated GPU: contexts are balanced, nothing is lost, errors name what happened. What only
 * a GPU can show is test_base_cuda.c.
 */
#include "sim_gpu.h"

#include "../../csrc/base/cuda_images.h"
#include "../../csrc/base/device_cuda.h"

/* Two images, each with one kernel. */
static char second_image[] = "sim:second";
const struct zpp_cuda_image zpp_cuda_images[] = {
    {"a_cuda.cu", "sim:first", 10}, {"b_cuda.cu", second_image, 11}, {0, 0, 0}};
const char zpp_cuda_images_kinds[] = "sm_80, PTX of sm_80";
const size_t zpp_cuda_images_count = 2;
const int zpp_cuda_images_toolkit = 13000;

enum { MEMORY_BYTES = 1 << 28 };
static const uint64_t ALL_LAZY = ~UINT64_C(0);
static const struct zpp_wait ten_seconds = {10000000000u, NULL, NULL};

static zpp_device *new_device(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device;
    CHECK_OK(zpp_device_cuda_create(0, &device, &err));
    CHECK(strcmp(zpp_device_name(device), "cuda") == 0);
    return device;
}

static void end_device(zpp_device *device) {
    zpp_device_destroy(device);
    const struct sim_counts counts = sim_gpu_counts();
    CHECK_EQUAL(counts.contexts, 0);
    CHECK_EQUAL(counts.blocks, 0);
    CHECK_EQUAL(counts.streams, 0);
    CHECK_EQUAL(counts.events, 0);
    CHECK_EQUAL(counts.modules, 0);
    CHECK_EQUAL(SIM(sim_contexts_pushed)(), 0);
}

static void a_gpu_without_code_is_named(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = new_device();
    CUfunction function;
    memcpy(second_image, "old:", 4);
    CHECK_FAILS(zpp_cuda_kernel(device, "second", &function, &err), ZPP_NOT_BUILT,
                "no kernels for its architecture sm_");
    CHECK(strstr(err.text, "only for sm_80, PTX of sm_80; build zeropp from source"));
    memcpy(second_image, "sim:", 4);
    CHECK_OK(zpp_cuda_kernel(device, "second", &function, &err));
    end_device(device);
}

static void memory_is_page_aligned(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = new_device();
    void *blocks[5], *host;
    for (int i = 0; i < 5; ++i) {
        CHECK_OK(zpp_device_alloc(device, (size_t)i * 700, &blocks[i], &err));
        CHECK_EQUAL((uintptr_t)blocks[i] % 4096, 0);
        memset(blocks[i], 1, (size_t)i * 700);
    }
    CHECK_OK(zpp_cuda_host_alloc(device, 0, &host, &err));
    zpp_cuda_host_free(device, host);
    zpp_device_free(device, blocks[2], 1400);
    CHECK_EQUAL(sim_gpu_counts().blocks, 4);
    void *none = NULL;
    CHECK_FAILS(zpp_device_alloc(device, 1 << 29, &none, &err), ZPP_NOMEM,
                "cuda:0: no room for 536870912 bytes (a block of memory), 268410368 of 268435456 bytes are free; "
                "zeropp holds 21984 bytes in blocks, 0 for gathered units");
    CHECK(none == NULL);
    end_device(device); /* frees the other four */
}

static zpp_status saw_native(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)err;
    CHECK(wait != NULL);
    **(void ***)arg = native;
    return ZPP_OK;
}

static void copies_are_late_and_ordered(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = new_device();
    zpp_stream *side, *host;
    zpp_event *event;
    int from = 7, *to;
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_QUEUE, "side", &side, &err));
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_HOST, "host", &host, &err));
    CHECK_OK(zpp_event_create(device, &event, &err));
    CHECK_OK(zpp_device_alloc(device, sizeof *to, (void **)&to, &err));
    CHECK_OK(zpp_event_sync(event, NULL, &err)); /* never recorded */
    SIM(sim_set_schedule)(ALL_LAZY, 0);
    *to = 0;
    CHECK_OK(zpp_stream_copy(side, to, &from, sizeof from, &err));
    CHECK_OK(zpp_event_record(event, side, &err));
    CHECK_EQUAL(*to, 0);
    CHECK_EQUAL(zpp_stream_poll(side, &err), ZPP_AGAIN);
    CHECK_EQUAL(zpp_event_sync(event, NULL, &err), ZPP_AGAIN);
    CHECK_OK(zpp_event_sync(event, &ten_seconds, &err));
    CHECK_EQUAL(*to, 7);
    CHECK_OK(zpp_stream_poll(side, &err));
    CHECK_OK(zpp_stream_wait(host, event, NULL, &err));

    void *seen = side, **where = &seen;
    CHECK_OK(zpp_stream_launch(host, saw_native, &where, sizeof where, &err));
    CHECK(seen == NULL); /* the default stream, until one is adopted */
    zpp_stream_adopt(host, &from);
    CHECK_OK(zpp_stream_launch(host, saw_native, &where, sizeof where, &err));
    CHECK(seen == &from);
    zpp_stream_adopt(host, NULL);
    SIM(sim_set_schedule)(0, 0);
    *to = 0;
    CHECK_OK(zpp_stream_copy(side, to, &from, sizeof from, &err));
    CHECK_EQUAL(*to, 7); /* an eager stream runs inside the call */
    zpp_event_destroy(event);
    zpp_stream_destroy(side);
    zpp_stream_destroy(host);
    end_device(device);
}

static void errors_stay(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = new_device();
    zpp_stream *stream, *other;
    zpp_event *event;
    int cell = 0;
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_QUEUE, "side", &stream, &err));
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_THREAD, "other", &other, &err));
    CHECK_OK(zpp_event_create(device, &event, &err));
    SIM(sim_faults)->fail_copy = 700;
    const char *sentence =
        "stream \"side\": copy: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered (700)";
    CHECK_FAILS(zpp_stream_copy(stream, &cell, &cell, sizeof cell, &err), ZPP_DEVICE, sentence);
    CHECK_FAILS(zpp_stream_copy(stream, &cell, &cell, sizeof cell, &err), ZPP_DEVICE, sentence);
    CHECK_FAILS(zpp_stream_poll(stream, &err), ZPP_DEVICE, sentence);
    CHECK_FAILS(zpp_event_record(event, stream, &err), ZPP_DEVICE, sentence);
    CHECK_FAILS(zpp_event_sync(event, &ten_seconds, &err), ZPP_DEVICE, sentence);
    CHECK_FAILS(zpp_stream_wait(other, event, NULL, &err), ZPP_DEVICE, sentence);
    CHECK_FAILS(zpp_stream_poll(other, &err), ZPP_DEVICE, sentence);
    zpp_event_destroy(event);
    zpp_stream_destroy(stream);
    zpp_stream_destroy(other);
    end_device(device);
    CHECK_FAILS(zpp_device_cuda_create(1, &device, &err), ZPP_INVALID, "ordinal is 1, wanted 0 to 0: 1 devices");
    CHECK_EQUAL(sim_gpu_counts().contexts, 0);
}

static int threads_of_second;

static void run_first(const void *arg, unsigned int block, unsigned int thread) {
    (void)arg, (void)block, (void)thread;
}

static void run_second(const void *arg, unsigned int block, unsigned int thread) {
    (void)block, (void)thread;
    threads_of_second += *(const int *)arg;
}

static struct sim_kernel first_kernel = {"first", sizeof(int), run_first, false, NULL};
static struct sim_kernel second_kernel = {"second", sizeof(int), run_second, false, NULL};

static void kernels_are_found_in_every_image(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = new_device();
    CUfunction first, second, again;
    CHECK_OK(zpp_cuda_kernel(device, "second", &second, &err));
    CHECK_OK(zpp_cuda_kernel(device, "first", &first, &err));
    CHECK_OK(zpp_cuda_kernel(device, "second", &again, &err));
    CHECK(first != second && second == again);
    CHECK_EQUAL(sim_gpu_counts().modules, 2); /* loaded once */
    CHECK_FAILS(zpp_cuda_kernel(device, "third", &again, &err), ZPP_NOT_BUILT, "no kernel \"third\" among 2 images");
    int count = 5;
    void *args[] = {&count};
    const struct zpp_cuda_grid grid = {{2, 1, 1}, {256, 1, 1}, 0}, empty = {{0, 1, 1}, {256, 1, 1}, 0};
    CHECK_OK(zpp_cuda_launch(device, second, &grid, NULL, args, &err));
    count = 6; /* the launch has taken its value along */
    SIM(sim_finish)();
    CHECK_EQUAL(threads_of_second, 2 * 256 * 5);
    CHECK_FAILS(zpp_cuda_launch(device, second, &empty, NULL, args, &err), ZPP_DEVICE,
                "launching a kernel: CUDA_ERROR_INVALID_VALUE");
    int version = 0;
    CHECK_OK(zpp_cuda_driver_version(&version, &err));
    CHECK_EQUAL(version, 13010);
    end_device(device);
}

/* What a GPU would do to a program that makes these mistakes, the simulation reports. */
static void mistakes_are_errors(void) {
    const struct zpp_cuda_api *cuda;
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_cuda_api(&cuda, &err));
    CUdeviceptr memory;
    CUstream stream;
    CUevent event;
    CHECK(cuda->cuMemAlloc(&memory, 8) != ZPP_CU_SUCCESS); /* without a context */
    zpp_device *device = new_device();
    CUdevice ordinal;
    CUcontext context;
    CHECK_EQUAL(cuda->cuDeviceGet(&ordinal, 0), ZPP_CU_SUCCESS);
    CHECK_EQUAL(cuda->cuDevicePrimaryCtxRetain(&context, ordinal), ZPP_CU_SUCCESS);
    CHECK_EQUAL(cuda->cuCtxPushCurrent(context), ZPP_CU_SUCCESS);
    CHECK_EQUAL(cuda->cuStreamCreateWithPriority(&stream, ZPP_CU_STREAM_NON_BLOCKING, 0), ZPP_CU_SUCCESS);
    CHECK_EQUAL(cuda->cuEventCreate(&event, ZPP_CU_EVENT_DISABLE_TIMING), ZPP_CU_SUCCESS);
    CHECK_EQUAL(cuda->cuStreamDestroy(stream), ZPP_CU_SUCCESS);
    CHECK(cuda->cuEventRecord(event, stream) != ZPP_CU_SUCCESS); /* a dead stream */
    CHECK_EQUAL(cuda->cuEventDestroy(event), ZPP_CU_SUCCESS);
    CHECK(cuda->cuEventQuery(event) != ZPP_CU_SUCCESS); /* a dead event */
    uint64_t counter = 0;
    CHECK(cuda->cuStreamWriteValue64(NULL, (CUdeviceptr)(uintptr_t)&counter, 1, 0) != ZPP_CU_SUCCESS); /* pageable */
    CHECK_EQUAL(cuda->cuMemHostRegister(&counter, sizeof counter, 0), ZPP_CU_SUCCESS);
    CHECK_EQUAL(cuda->cuMemHostRegister(&counter, sizeof counter, 0), ZPP_CU_HOST_REGISTER_ALREADY);
    CHECK_EQUAL(cuda->cuStreamWriteValue64(NULL, (CUdeviceptr)(uintptr_t)&counter, 1, 0), ZPP_CU_SUCCESS);
    CHECK_EQUAL(cuda->cuStreamSynchronize(NULL), ZPP_CU_SUCCESS);
    CHECK_EQUAL(counter, 1);
    CHECK_EQUAL(cuda->cuMemHostUnregister(&counter), ZPP_CU_SUCCESS);
    CHECK_EQUAL(cuda->cuCtxPopCurrent(&context), ZPP_CU_SUCCESS);
    CHECK_EQUAL(cuda->cuDevicePrimaryCtxRelease(ordinal), ZPP_CU_SUCCESS);
    end_device(device);
}

int main(int argc, char **argv) {
    char bytes[32];
    snprintf(bytes, sizeof bytes, "%d", MEMORY_BYTES);
    setenv("SIM_DEVICE_BYTES", bytes, 1);
    sim_gpu_load();
    SIM(sim_kernel_register)(&first_kernel);
    SIM(sim_kernel_register)(&second_kernel);
    static const struct test_case cases[] = {
        TEST(a_gpu_without_code_is_named),
        TEST(memory_is_page_aligned),           TEST(copies_are_late_and_ordered), TEST(errors_stay),
        TEST(kernels_are_found_in_every_image), TEST(mistakes_are_errors),         {0},
    };
    return test_main(argc, argv, cases);
}
