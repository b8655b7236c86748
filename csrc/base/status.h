/* SPDX-License-Identifier: Apache-2.0
 *
 * Status codes and the error record that travels with them.
 *
 * A function that can fail returns zpp_status and takes a caller-owned `struct zpp_err *` as its last argument.
 * The first place that knows the cause fills the record with zpp_fail(); callers pass it on untouched.
 * Negative is an error; ZPP_AGAIN (positive) means "not ready, nothing was done, ask again".
 */
#ifndef ZPP_BASE_STATUS_H
#define ZPP_BASE_STATUS_H

#include <stddef.h>
#include <stdint.h>

typedef enum zpp_status {
#define ZPP_STATUS(name, value, sentence, exception) ZPP_##name = (value),
#include "status.def"
#undef ZPP_STATUS
    /* Spelled ZPP_OK, ZPP_AGAIN, ZPP_INVALID, ... */
} zpp_status;

enum { ZPP_ERR_TEXT_BYTES = 768, ZPP_NO_RANK = -1 };

struct zpp_err {
    zpp_status status;
    int os_errno; /* 0 where the operating system was not involved */
    int rank;     /* the failed rank, or ZPP_NO_RANK */
    char text[ZPP_ERR_TEXT_BYTES]; /* one sentence: object, value seen, value wanted, way out; NUL-terminated */
};

#define ZPP_ERR_INIT { ZPP_OK, 0, ZPP_NO_RANK, "" }

/* Fill `err` (may be NULL) and return `status`. The sentence is cut, never overrun. */
zpp_status zpp_fail(struct zpp_err *err, zpp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* As zpp_fail, with the failed rank. */
zpp_status zpp_fail_rank(struct zpp_err *err, zpp_status status, int rank, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* As zpp_fail, for a failed system call: append ": strerror(os_errno)" and keep os_errno. */
zpp_status zpp_fail_os(struct zpp_err *err, int os_errno, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Fail again with a failure that was kept: copy it to `err` (may be NULL) and return its status. */
static inline zpp_status zpp_fail_again(struct zpp_err *err, const struct zpp_err *failure) {
    if (err) *err = *failure;
    return failure->status;
}

#if defined(__clang_analyzer__) && !defined(ZPP_STATUS_ITSELF)
/* The analyser sees one file at a time: these macros tell it that the functions return their status argument. */
#define zpp_fail(err, status, ...) ((void)(zpp_fail)(err, status, __VA_ARGS__), (status))
#define zpp_fail_rank(err, status, ...) ((void)(zpp_fail_rank)(err, status, __VA_ARGS__), (status))
#define zpp_fail_os(...) ((void)(zpp_fail_os)(__VA_ARGS__), ZPP_OS)
#endif

/* Return name ("TIMEOUT"), sentence and exception of a status, and "UNKNOWN" and so on for any other value. The strings
 * are static. */
const char *zpp_status_name(zpp_status status);
const char *zpp_status_sentence(zpp_status status);
const char *zpp_status_exception(zpp_status status);

#endif
