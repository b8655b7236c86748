/* SPDX-License-Identifier: Apache-2.0
 *
 * Status codes and the error record: status.h. This file only formats. It allocates nothing, so that an error can be
 * reported when memory has run out, too.
 */
#define ZPP_STATUS_ITSELF
#include "status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct status_row {
    zpp_status status;
    const char *name, *sentence, *exception;
};

static const struct status_row rows[] = {
#define ZPP_STATUS(name, value, sentence, exception) {ZPP_##name, #name, sentence, exception},
#include "status.def"
#undef ZPP_STATUS
};

static const struct status_row unknown_row = {ZPP_OK, "UNKNOWN", "an unknown status", "RuntimeError"};

static const struct status_row *find_row(zpp_status status) {
    for (size_t row = 0; row < sizeof rows / sizeof rows[0]; ++row) {
        if (rows[row].status == status) return &rows[row];
    }
    return &unknown_row;
}

static zpp_status fill(struct zpp_err *err, zpp_status status, int os_errno, int rank, const char *format,
                       va_list args) {
    if (!err) return status;
    err->status = status;
    err->os_errno = os_errno;
    err->rank = rank;
    vsnprintf(err->text, sizeof err->text, format, args);
    return status;
}

zpp_status zpp_fail(struct zpp_err *err, zpp_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fill(err, status, 0, ZPP_NO_RANK, format, args);
    va_end(args);
    return status;
}

zpp_status zpp_fail_rank(struct zpp_err *err, zpp_status status, int rank, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fill(err, status, 0, rank, format, args);
    va_end(args);
    return status;
}

/* strerror_r exists in a GNU and a POSIX form, which return the text in different ways. */
static const char *errno_text(int os_errno, char *scratch, size_t scratch_bytes) {
#if defined(__GLIBC__) && defined(_GNU_SOURCE)
    return strerror_r(os_errno, scratch, scratch_bytes);
#else
    if (strerror_r(os_errno, scratch, scratch_bytes) != 0) snprintf(scratch, scratch_bytes, "errno %d", os_errno);
    return scratch;
#endif
}

zpp_status zpp_fail_os(struct zpp_err *err, int os_errno, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fill(err, ZPP_OS, os_errno, ZPP_NO_RANK, format, args);
    va_end(args);
    if (err) {
        char scratch[128];
        const size_t used_bytes = strlen(err->text);
        snprintf(err->text + used_bytes, sizeof err->text - used_bytes, ": %s",
                 errno_text(os_errno, scratch, sizeof scratch));
    }
    return ZPP_OS;
}

const char *zpp_status_name(zpp_status status) { return find_row(status)->name; }
const char *zpp_status_sentence(zpp_status status) { return find_row(status)->sentence; }
const char *zpp_status_exception(zpp_status status) { return find_row(status)->exception; }
