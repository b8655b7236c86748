/* SPDX-License-Identifier: Apache-2.0
 *
 * What every C test program uses. A program is a list of cases:
 *
 *     static void adds(void) { CHECK(1 + 1 == 2); }
 *     int main(int argc, char **argv) {
 *         static const struct test_case cases[] = {TEST(adds), {0}};
 *         return test_main(argc, argv, cases);
 *     }
 *
 * Arguments name the cases to run; none: all. ZEROPP_TEST_WITHOUT names cases that this machine cannot run, between
 * blanks. CHECK aborts with file, line and what was seen, so that a debugger or a
 * sanitizer stops where it failed.
 */
#ifndef ZPP_TESTS_HARNESS_H
#define ZPP_TESTS_HARNESS_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../csrc/base/status.h"

#ifdef TEST_MACHINE_BYTES
/* In emulation the machine has this much memory. Arenas have the size of the machine's memory and cost addresses alone,
 * but the emulator keeps a record of every page of addresses: five ranks with arenas of 24 GiB made it take 7 GiB. */
long sysconf(int name) {
    long (*next)(int);
    void *symbol = dlsym(RTLD_NEXT, "sysconf");
    memcpy(&next, &symbol, sizeof next);
    return name == _SC_PHYS_PAGES ? TEST_MACHINE_BYTES / next(_SC_PAGESIZE) : next(name);
}
#endif

#if defined(__SANITIZE_THREAD__)
#define ZPP_UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ZPP_UNDER_TSAN 1
#endif
#endif

struct test_case {
    const char *name;
    void (*run)(void);
};
#define TEST(function) {#function, function}

#define CHECK(condition)                                                                                    \
    do {                                                                                                    \
        if (!(condition)) {                                                                                 \
            fprintf(stderr, "%s:%d: in %s: failed: %s\n", __FILE__, __LINE__, __func__, #condition);        \
            abort();                                                                                        \
        }                                                                                                   \
    } while (0)

#define CHECK_EQUAL(seen, wanted)                                                                           \
    do {                                                                                                    \
        const long long seen_ = (long long)(seen), wanted_ = (long long)(wanted);                           \
        if (seen_ != wanted_) {                                                                             \
            fprintf(stderr, "%s:%d: in %s: %s is %lld, wanted %lld\n", __FILE__, __LINE__, __func__, #seen, \
                    seen_, wanted_);                                                                        \
            abort();                                                                                        \
        }                                                                                                   \
    } while (0)

/* `call` uses a `struct zpp_err err` of the caller's. */
#define CHECK_OK(call)                                                                                      \
    do {                                                                                                    \
        const zpp_status status_ = (call);                                                                  \
        if (status_ != ZPP_OK) {                                                                            \
            fprintf(stderr, "%s:%d: in %s: %s: %s: %s\n", __FILE__, __LINE__, __func__, #call,              \
                    zpp_status_name(status_), err.text);                                                    \
            abort();                                                                                        \
        }                                                                                                   \
    } while (0)

/* `call` must fail with `status`, and its sentence must have `part` in it. */
#define CHECK_FAILS(call, wanted_status, part)                                                              \
    do {                                                                                                    \
        const zpp_status status_ = (call);                                                                  \
        if (status_ != (wanted_status) || err.status != status_ || !strstr(err.text, (part))) {             \
            fprintf(stderr, "%s:%d: in %s: %s gave %s: \"%s\", wanted %s with \"%s\"\n", __FILE__,          \
                    __LINE__, __func__, #call, zpp_status_name(status_), err.text,                          \
                    zpp_status_name(wanted_status), (part));                                                \
            abort();                                                                                        \
        }                                                                                                   \
    } while (0)

static inline bool test_wanted(int argc, char **argv, const char *name) {
    for (int index = 1; index < argc; ++index) {
        if (strcmp(argv[index], name) == 0) return true;
    }
    return argc < 2;
}

static inline bool test_left_out(const char *name) {
    const char *names = getenv("ZEROPP_TEST_WITHOUT");
    const size_t length = strlen(name);
    for (const char *at = names; at && (at = strstr(at, name)); at += length)
        if ((at == names || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0')) return true;
    return false;
}

static inline int test_main(int argc, char **argv, const struct test_case *cases) {
    int passed = 0;
    for (; cases->name; ++cases) {
        if (!test_wanted(argc, argv, cases->name)) continue;
        printf("%s ... ", cases->name);
        fflush(stdout);
        ++passed;
        if (test_left_out(cases->name)) {
            printf("left out\n");
            continue;
        }
        cases->run();
        printf("ok\n");
    }
    printf("%d cases passed\n", passed);
    return passed ? 0 : 1;
}

#endif
