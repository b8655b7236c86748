/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults of a group that tests provoke on one host and on several: bodies for ranks.h.
 */
#ifndef ZPP_TESTS_GROUP_FAULTS_H
#define ZPP_TESTS_GROUP_FAULTS_H

#include "ranks.h"

/* Rank 1 aborts the group; every rank gets its message, and a later abort changes nothing. */
static inline void test_abort(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (me->rank == 1) {
        pause_ms(50);
        zpp_comm_abort(me->comm, "no space on disk");
        pause_ms(300); /* stays in the group, so that no rank reports that it left */
    }
    CHECK_FAILS(zpp_barrier(me->comm, NULL, &err), ZPP_ABORTED, "rank 1 aborted group \"test\": no space on disk");
    CHECK_EQUAL(err.rank, 1);
    CHECK_FAILS(zpp_comm_health(me->comm, &err), ZPP_ABORTED, "no space on disk");
    zpp_comm_abort(me->comm, "too late to change it");
    CHECK_FAILS(zpp_comm_health(me->comm, &err), ZPP_ABORTED, "no space on disk");
}

/* Two ranks, of which rank 0 expects a byte more than rank 1 sends. */
static inline void test_other_splits(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    char from[2][16] = {{0}}, to[2][16];
    void *dsts[2] = {to[0], to[1]};
    const void *srcs[2] = {from[0], from[1]};
    size_t out[2] = {8, 8}, in[2] = {8, me->rank == 0 ? 9 : 8};
    const struct zpp_call call = {
        .coll = ZPP_COLL_ALL_TO_ALL, .dtype = ZPP_U8, .dsts = dsts, .srcs = srcs, .dst_bytes = in, .src_bytes = out};
    zpp_status status = zpp_comm_call(me->comm, &call, NULL, &err);
    if (me->rank == 1 && status == ZPP_OK) status = zpp_barrier(me->comm, NULL, &err); /* its own part was consistent */
    CHECK_EQUAL(status, ZPP_PEER);
    CHECK(strstr(err.text, "rank 1 sends 8 bytes to rank 0, which expects 9"));
}

#endif
