/* SPDX-License-Identifier: Apache-2.0
 *
 * The fuzz targets over what comes from other hosts, under the driver of test_comm_fuzz.c.
 */
#define FUZZ_DRIVER 1
#include "../fuzz/comm_frame.c"

#include "fuzz_driver.h"

static void frames(void) { drive(fuzz_frame); }

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(frames), {0}};
    return test_main(argc, argv, cases);
}
