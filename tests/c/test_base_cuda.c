/* SPDX-License-Identifier: Apache-2.0
 *
 * The device cuda on a GPU, where there is one; where there is none, the sentence that says so.
 */
#include "harness.h"

#include "../../csrc/base/device_cuda.h"

static const struct zpp_wait minute = {60000000000u, NULL, NULL};

static zpp_device *open_gpu(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = NULL;
    const zpp_status status = zpp_device_cuda_create(0, &device, &err);
    if (status == ZPP_OK) return device;
    printf("skipped, no GPU (%s): ", err.text);
    CHECK(status == ZPP_NOT_BUILT || status == ZPP_DEVICE || status == ZPP_INVALID);
    CHECK(strncmp(err.text, "device cuda: ", 13) == 0);
    return NULL;
}

static void bytes_go_there_and_back(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    enum { BYTES = 5 << 20 };
    zpp_device *device = open_gpu();
    if (!device) return;
    unsigned char *source, *result, *there, *other;
    zpp_stream *up, *down;
    zpp_event *arrived, *back;
    CHECK_OK(zpp_cuda_host_alloc(device, BYTES, (void **)&source, &err));
    CHECK_OK(zpp_cuda_host_alloc(device, BYTES, (void **)&result, &err));
    CHECK_OK(zpp_device_alloc(device, BYTES, (void **)&there, &err));
    CHECK_OK(zpp_device_alloc(device, BYTES, (void **)&other, &err));
    CHECK_EQUAL((uintptr_t)there % 4096, 0);
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_QUEUE, "up", &up, &err));
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_HOST, "down", &down, &err));
    CHECK_OK(zpp_event_create(device, &arrived, &err));
    CHECK_OK(zpp_event_create(device, &back, &err));
    for (int round = 0; round < 20; ++round) {
        for (int i = 0; i < BYTES; ++i) source[i] = (unsigned char)(i * 31 + round);
        CHECK_OK(zpp_stream_copy(up, there, source, BYTES, &err));
        CHECK_OK(zpp_stream_copy(up, other, there, BYTES, &err));
        CHECK_OK(zpp_event_record(arrived, up, &err));
        CHECK_OK(zpp_stream_wait(down, arrived, NULL, &err));
        CHECK_OK(zpp_stream_copy(down, result, other, BYTES, &err));
        CHECK_OK(zpp_event_record(back, down, &err));
        CHECK_OK(zpp_event_sync(back, &minute, &err));
        CHECK_OK(zpp_stream_poll(up, &err));
        CHECK(memcmp(source, result, BYTES) == 0);
    }
    void *none = NULL;
    CHECK_FAILS(zpp_device_alloc(device, (size_t)1 << 46, &none, &err), ZPP_NOMEM, "no room for 70368744177664 bytes");
    zpp_event_destroy(arrived);
    zpp_event_destroy(back);
    zpp_stream_destroy(up);
    zpp_stream_destroy(down);
    zpp_device_free(device, there, BYTES);
    zpp_device_free(device, other, BYTES);
    zpp_cuda_host_free(device, source);
    zpp_cuda_host_free(device, result);
    zpp_device_destroy(device);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(bytes_go_there_and_back), {0}};
    return test_main(argc, argv, cases);
}
