/* SPDX-License-Identifier: Apache-2.0
 *
 * The fuzz targets of tests/fuzz/ under a deterministic driver. clang's libFuzzer, which follows coverage, goes further
 * (make fuzz); this needs no clang. What comes from other hosts: test_comm_fuzz_net.c.
 */
#define FUZZ_DRIVER 1
#include "../fuzz/comm_control_message.c"
#include "../fuzz/comm_p2p.c"
#include "../fuzz/comm_rendezvous.c"

#include "fuzz_driver.h"

static void rendezvous(void) { drive(fuzz_rendezvous); }
static void control_messages(void) { drive(fuzz_control_message); }
static void messages(void) { drive(fuzz_p2p); }

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(rendezvous), TEST(control_messages), TEST(messages), {0}};
    return test_main(argc, argv, cases);
}
