/* SPDX-License-Identifier: Apache-2.0
 *
 * What a test sees of lib_fake_gpu.c.
 */
#ifndef ZPP_TESTS_FAKE_GPU_H
#define ZPP_TESTS_FAKE_GPU_H

struct fake_gpu {
    int objects;                 /* streams and events that stand */
    int comms, aborts;           /* communicators that stand; how many were aborted */
    volatile int stall;          /* nothing of NCCL is ever done */
    volatile int stall_init;     /* ranks never meet */
    volatile int late_launch;    /* a group is in progress first */
    volatile int async_error;    /* what ncclCommGetAsyncError finds */
    volatile int refuse_id;
};
extern struct fake_gpu fake_gpu; /* look it up with dlsym */

#endif
