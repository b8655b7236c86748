/* SPDX-License-Identifier: Apache-2.0
 *
 * Frames are checked here before any other code uses their fields. No allocation depends on them.
 */
#include "frame.h"

#include <string.h>

#include "../internal.h"

static const uint64_t DATA_BYTES_MAX = (uint64_t)1 << 48;

static zpp_status check_error(const struct zpp_frame *frame, int ranks, struct zpp_err *err) {
    if (frame->bytes == 0 || frame->bytes >= ZPP_ERR_TEXT_BYTES)
        return zpp_fail(err, ZPP_PEER, "a comm error of %llu bytes, wanted 1 to %d", (unsigned long long)frame->bytes,
                        (int)ZPP_ERR_TEXT_BYTES - 1);
    if (frame->elems > (uint64_t)ranks && (frame->elems <= ZPP_OUTSIDE || frame->elems > ZPP_OUTSIDE_END))
        return zpp_fail(err, ZPP_PEER, "a comm error on rank %llu of a group of %d",
                        (unsigned long long)frame->elems - 1, ranks);
    if (frame->what == 0 || frame->what > 64)
        return zpp_fail(err, ZPP_PEER, "a comm error of status -%llu", (unsigned long long)frame->what);
    return ZPP_OK;
}

zpp_status zpp_frame_check(const void *raw, int ranks, struct zpp_frame *out, struct zpp_err *err) {
    struct zpp_frame frame;
    zpp_status status = ZPP_OK;
    memcpy(&frame, raw, sizeof frame);
    if (frame.magic != ZPP_FRAME_MAGIC || frame.zero)
        return zpp_fail(err, ZPP_PEER, "magic number %#x, wanted %#x (another version of zeropp, or of byte order)",
                        frame.magic, (unsigned)ZPP_FRAME_MAGIC);
    switch (frame.kind) {
    case ZPP_FRAME_DATA:
        if (frame.bytes > DATA_BYTES_MAX)
            return zpp_fail(err, ZPP_PEER, "a transfer of %llu bytes, wanted at most %llu",
                            (unsigned long long)frame.bytes, (unsigned long long)DATA_BYTES_MAX);
        break;
    case ZPP_FRAME_ERROR:
        status = check_error(&frame, ranks, err);
        if (status != ZPP_OK) return status;
        break;
    case ZPP_FRAME_FAREWELL:
        if (frame.bytes || frame.elems)
            return zpp_fail(err, ZPP_PEER, "a farewell of %llu bytes and %llu elements, wanted none",
                            (unsigned long long)frame.bytes, (unsigned long long)frame.elems);
        break;
    default: return zpp_fail(err, ZPP_PEER, "a frame of kind %u, wanted 1, 2 or 3", frame.kind);
    }
    *out = frame;
    return ZPP_OK;
}

size_t zpp_control_link_space(struct zpp_control_link *control, void **at) {
    if (control->raw_bytes < ZPP_FRAME_BYTES) {
        *at = control->raw + control->raw_bytes;
        return ZPP_FRAME_BYTES - control->raw_bytes;
    }
    struct zpp_frame frame; /* checked when it was whole */
    memcpy(&frame, control->raw, sizeof frame);
    *at = control->text + control->text_bytes;
    return (size_t)frame.bytes - control->text_bytes;
}

zpp_status zpp_control_link_parse(struct zpp_control_link *control, size_t bytes, int ranks, struct zpp_frame *out,
                                  struct zpp_err *err) {
    struct zpp_frame frame;
    if (control->raw_bytes < ZPP_FRAME_BYTES) {
        control->raw_bytes += bytes;
        if (control->raw_bytes < ZPP_FRAME_BYTES) return ZPP_AGAIN;
        const zpp_status status = zpp_frame_check(control->raw, ranks, &frame, err);
        if (status != ZPP_OK) return status;
        if (frame.kind == ZPP_FRAME_DATA)
            return zpp_fail(err, ZPP_PEER, "a frame of data on the control link, wanted a comm error or a farewell");
    } else {
        memcpy(&frame, control->raw, sizeof frame);
        control->text_bytes += bytes;
    }
    if (control->text_bytes < frame.bytes) return ZPP_AGAIN;
    control->text[control->text_bytes] = '\0';
    control->raw_bytes = control->text_bytes = 0;
    *out = frame;
    return ZPP_OK;
}
