/* SPDX-License-Identifier: Apache-2.0
 *
 * The device cuda over a driver made for the test (lib_fake_cuda.c): contexts are balanced, nothing is lost, errors
 * name what happened. What only a GPU can show is test_base_cuda.c.
 */
#include "harness.h"

#include "../../csrc/base/cuda_images.h"
#include "../../csrc/base/device_cuda.h"
#include "beside.h"

/* Two images, each with one kernel: to the fake driver an image is the name of its kernel. */
const struct zpp_cuda_image zpp_cuda_images[] = {{"a_cuda.cu", "first", 6}, {"b_cuda.cu", "second", 7}, {0, 0, 0}};
const size_t zpp_cuda_images_count = 2;
const int zpp_cuda_images_toolkit = 13000;

static const struct zpp_wait ten_seconds = {10000000000u, NULL, NULL};
static void *fake;

static int *counter(const char *name) { return dlsym(fake, name); }
static int call_int(const char *name, int argument) {
    int (*function)(int);
    void *found = dlsym(fake, name);
    memcpy(&function, &found, sizeof function);
    return function(argument);
}

static zpp_device *new_device(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device;
    CHECK_OK(zpp_device_cuda_create(0, &device, &err));
    CHECK(strcmp(zpp_device_name(device), "cuda") == 0);
    return device;
}

static void end_device(zpp_device *device) {
    zpp_device_destroy(device);
    CHECK_EQUAL(call_int("fake_cuda_depth", 0), 0);
    CHECK_EQUAL(*counter("fake_cuda_retained"), 0);
    CHECK_EQUAL(*counter("fake_cuda_allocated"), 0);
    CHECK_EQUAL(*counter("fake_cuda_objects"), 0);
    CHECK_EQUAL(*counter("fake_cuda_modules"), 0);
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
    CHECK_EQUAL(*counter("fake_cuda_allocated"), 4);
    void *none = NULL;
    CHECK_FAILS(zpp_device_alloc(device, 1 << 29, &none, &err), ZPP_NOMEM,
                "cuda:0: no room for 536870912 bytes, 1000 of 268435456 bytes are free");
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
    *counter("fake_cuda_break_next") = 1;
    const char *sentence = "stream \"side\": copy: CUDA_ERROR_FAKE: a fake error (700)";
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
    CHECK_EQUAL(*counter("fake_cuda_retained"), 0);
}

static void kernels_are_found_in_every_image(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = new_device();
    CUfunction first, second, again;
    CHECK_OK(zpp_cuda_kernel(device, "second", &second, &err));
    CHECK_OK(zpp_cuda_kernel(device, "first", &first, &err));
    CHECK_OK(zpp_cuda_kernel(device, "second", &again, &err));
    CHECK(first != second && second == again);
    CHECK_EQUAL(*counter("fake_cuda_modules"), 2); /* loaded once */
    CHECK_FAILS(zpp_cuda_kernel(device, "third", &again, &err), ZPP_NOT_BUILT, "no kernel \"third\" among 2 images");
    int count = 5;
    void *args[] = {&count};
    const struct zpp_cuda_grid grid = {{2, 1, 1}, {256, 1, 1}, 0}, empty = {{0, 1, 1}, {256, 1, 1}, 0};
    CHECK_OK(zpp_cuda_launch(device, second, &grid, NULL, args, &err));
    CHECK_EQUAL(call_int("fake_cuda_launches", 1), 5);
    CHECK_FAILS(zpp_cuda_launch(device, second, &empty, NULL, args, &err), ZPP_DEVICE,
                "launching a kernel: CUDA_ERROR_FAKE");
    int version = 0;
    CHECK_OK(zpp_cuda_driver_version(&version, &err));
    CHECK_EQUAL(version, 13010);
    end_device(device);
}

int main(int argc, char **argv) {
    fake = load_beside("lib_fake_cuda.so", "ZEROPP_CUDA_DRIVER", NULL);
    CHECK(fake != NULL);
    static const struct test_case cases[] = {
        TEST(memory_is_page_aligned), TEST(copies_are_late_and_ordered), TEST(errors_stay),
        TEST(kernels_are_found_in_every_image), {0},
    };
    return test_main(argc, argv, cases);
}
