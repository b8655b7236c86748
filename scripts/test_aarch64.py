# SPDX-License-Identifier: Apache-2.0
"""Build the C tests for aarch64, and run them in emulation on this machine.

    python scripts/test_aarch64.py [PROGRAM ...]     all of tests/c/test_*.c if none is named

The compiler is the package ``ziglang`` (extra ``wheels``), the emulator is qemu-user-static, the C library is Debian's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from debian import liburing, sysroot

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (
    "regions",  # test_comm_desc_rings: the emulator ignores MADV_REMOVE
    "a_forked_child_is_harmless",  # test_comm_faults: it ignores MADV_WIPEONFORK
    "ranks_share_what_is_read",  # test_zero_unit_file: it refuses mremap with an old size of 0
    "ranks_share_sums_of_parts",  # the same
    "poor_ring",  # test_aio_faults: it has no io_uring
    "direct_refused_late",  # test_aio_faults: its statx answers 0 for O_DIRECT's alignment: no file there takes O_DIRECT
    "control_messages",  # test_comm_fuzz: its recvmsg takes twice the descriptors that fit, and loses those beyond
)


def main() -> int:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not emulator:
        sys.exit("no emulator of aarch64 here: apt-get install qemu-user-static")
    variables = {
        "ZEROPP_TARGET": "aarch64-linux-gnu.2.28",
        "ZEROPP_LIBURING": str(liburing("aarch64")),
        "ZEROPP_EMULATOR": f"{emulator} -L {sysroot('aarch64')}",
        "ZEROPP_TEST_WITHOUT": " ".join(LEFT_OUT),
    }
    only = ["--only", *sys.argv[1:]] if sys.argv[1:] else []
    return subprocess.run(
        [sys.executable, "tests/c/run.py", *only], cwd=ROOT, env={**os.environ, **variables}
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
