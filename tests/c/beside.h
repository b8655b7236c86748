/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads a stand-in for a library that lies beside the test's own program, and points zeropp at it.
 */
#ifndef ZPP_TESTS_BESIDE_H
#define ZPP_TESTS_BESIDE_H

#include <dlfcn.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Sets the environment variables `variable` and, if not NULL, `other` to its path. NULL if it cannot be loaded. */
static void *load_beside(const char *file, const char *variable, const char *other) {
    char program[4096], path[4096 + 64];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length <= 0) return NULL;
    program[length] = 0;
    snprintf(path, sizeof path, "%s/%s", dirname(program), file);
    setenv(variable, path, 1);
    if (other) setenv(other, path, 1);
    return dlopen(path, RTLD_NOW);
}

#endif
