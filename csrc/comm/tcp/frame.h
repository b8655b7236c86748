/* SPDX-License-Identifier: Apache-2.0
 *
 * The byte format of connections between hosts. Every transfer of a collective begins with a frame on each connection
 * that it uses; the control link carries frames with a message. Fields are in the byte order of the machine: the magic
 * number tells a machine of the other order apart.
 *
 *    0  u32 magic   4  u16 kind   6  u16 connection   8  u64 seq   16  u64 what   24  u64 elems   32  u64 bytes
 *   40  u32 part   44  u32 zero
 *
 *   DATA      seq, what, elems: the collective (sig.c); bytes: of the whole transfer; its payload follows
 *   ERROR   what: minus the status; elems: failed rank + 1; bytes: length of the message that follows
 *   FAREWELL  nothing; the sender has destroyed its communicator
 */
#ifndef ZPP_COMM_FRAME_H
#define ZPP_COMM_FRAME_H

#include <stdbool.h>
#include "../../base/status.h"

enum { ZPP_FRAME_BYTES = 48, ZPP_FRAME_MAGIC = 0x5a505431 };
enum zpp_frame_kind { ZPP_FRAME_DATA = 1, ZPP_FRAME_ERROR, ZPP_FRAME_FAREWELL };

struct zpp_frame {
    uint32_t magic;
    uint16_t kind, connection;
    uint64_t seq, what, elems, bytes;
    uint32_t part, zero;
};
_Static_assert(sizeof(struct zpp_frame) == ZPP_FRAME_BYTES, "a frame is as documented");

/* Return PEER, with a message, if the kind, a length or a rank of the frame is impossible. `raw` has
 * ZPP_FRAME_BYTES. */
zpp_status zpp_frame_check(const void *raw, int ranks, struct zpp_frame *out, struct zpp_err *err);

/* The incoming bytes of one peer's control link, in pieces of any size. */
struct zpp_control_link {
    uint8_t raw[ZPP_FRAME_BYTES];
    char text[ZPP_ERR_TEXT_BYTES];
    size_t raw_bytes, text_bytes;
};
/* Return how many bytes of the stream fit at `*at`; never 0. */
size_t zpp_control_link_space(struct zpp_control_link *control, void **at);
/* Parse after `bytes` were put there. OK: `*out` is a whole frame (ERROR: its message is in `text`, NUL-terminated)
 * until the next call. AGAIN: more bytes are needed. PEER, with a message: the bytes are no control message. */
zpp_status zpp_control_link_parse(struct zpp_control_link *control, size_t bytes, int ranks, struct zpp_frame *out,
                                  struct zpp_err *err);

#endif
