/* SPDX-License-Identifier: Apache-2.0 */
#include "harness.h"

#include <errno.h>

static void table(void) {
    CHECK(strcmp(zpp_status_name(ZPP_TIMEOUT), "TIMEOUT") == 0);
    CHECK(strcmp(zpp_status_exception(ZPP_NOMEM), "MemoryError") == 0);
    CHECK(strcmp(zpp_status_sentence(ZPP_OK), "success") == 0);
    CHECK(strcmp(zpp_status_name((zpp_status)-99), "UNKNOWN") == 0);
    CHECK(strcmp(zpp_status_exception((zpp_status)-99), "RuntimeError") == 0);
}

static void fail_fills_the_record(void) {
    struct zpp_err err = {ZPP_OK, 7, 3, "old"};
    CHECK_FAILS(zpp_fail(&err, ZPP_INVALID, "offset %d", 513), ZPP_INVALID, "offset 513");
    CHECK_EQUAL(err.os_errno, 0);
    CHECK_EQUAL(err.rank, ZPP_NO_RANK);
    CHECK_FAILS(zpp_fail_rank(&err, ZPP_PEER, 5, "rank %d died", 5), ZPP_PEER, "rank 5 died");
    CHECK_EQUAL(err.rank, 5);
    CHECK_FAILS(zpp_fail_os(&err, ENOENT, "open \"%s\"", "x"), ZPP_OS, "open \"x\": No such file");
    CHECK_EQUAL(err.os_errno, ENOENT);
    CHECK_EQUAL(zpp_fail(NULL, ZPP_STATE, "nobody listens"), ZPP_STATE);
    CHECK_EQUAL(zpp_fail_os(NULL, ENOENT, "nobody listens"), ZPP_OS);
}

static void long_sentences_are_cut(void) {
    char text[2 * ZPP_ERR_TEXT_BYTES];
    struct zpp_err err = ZPP_ERR_INIT;
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = 0;
    zpp_fail(&err, ZPP_INVALID, "%s", text);
    CHECK_EQUAL(strlen(err.text), ZPP_ERR_TEXT_BYTES - 1);
    zpp_fail_os(&err, EIO, "%s", text);
    CHECK_EQUAL(strlen(err.text), ZPP_ERR_TEXT_BYTES - 1);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(table), TEST(fail_fills_the_record), TEST(long_sentences_are_cut), {0},
    };
    return test_main(argc, argv, cases);
}
