# SPDX-License-Identifier: Apache-2.0
"""Build the C tests for aarch64, and run them in emulation on this machine.

    python scripts/test_aarch64.py [PROGRAM ...]     all of tests/c/test_*.c if none is named
    python scripts/test_aarch64.py --sample          the kernels, pages of 64 KiB, and what orders memory; skipped by
                                                     name where compiler, emulator or network is missing

The compiler is the package ``ziglang`` (extra ``wheels``), the emulator is qemu-user-static, the C library is Debian's.
"""

from __future__ import annotations

import importlib.util
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
SAMPLE = (
    "test_base_crc32", "test_base_dtype", "test_comm_litmus", "test_comm_reduce", "test_fp8", "test_lamb", "test_moe",
    "test_moments", "test_onebit", "test_ops_adam", "test_ops_norm", "test_pages_base_mem", "test_quant",
    "test_sparse_attention",
)  # fmt: skip


def missing() -> str | None:
    """Return what this machine lacks, and how to get it."""
    if not (shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")):
        return "no emulator of aarch64 here: apt-get install qemu-user-static"
    if not importlib.util.find_spec("ziglang"):
        return "no compiler for aarch64 here: pip install 'zeropp[wheels]'"
    return None


def main() -> int:
    programs = sys.argv[1:]
    if lacks := missing():
        if programs != ["--sample"]:
            sys.exit(lacks)
        print(f"aarch64: skipped, {lacks}")
        return 0
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    try:
        variables = {
            "ZEROPP_TARGET": "aarch64-linux-gnu.2.28",
            "ZEROPP_LIBURING": str(liburing("aarch64")),
            "ZEROPP_EMULATOR": f"{emulator} -L {sysroot('aarch64')}",
            "ZEROPP_TEST_WITHOUT": " ".join(LEFT_OUT),
        }
    except SystemExit as unreachable:
        if programs != ["--sample"]:
            raise
        print(f"aarch64: skipped, Debian's libraries cannot be had: {unreachable}")
        return 0
    os.environ.pop("CC", None)  # the compiler is ziglang, whatever the machine's is called
    programs = list(SAMPLE) if programs == ["--sample"] else programs
    only = ["--only", *programs] if programs else []
    return subprocess.run(
        [sys.executable, "tests/c/run.py", *only], cwd=ROOT, env={**os.environ, **variables}
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
