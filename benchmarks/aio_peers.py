# SPDX-License-Identifier: Apache-2.0
"""The peers of the I/O benches: fio with one job, and DeepSpeed's aio handle."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import BenchError, Need, PeerMissing

LIBAIO = Need("DeepSpeed aio", library="aio", install="apt-get install libaio-dev, and a C++ compiler")


@dataclass(frozen=True)
class Cost:
    """The cost of one pass."""

    seconds: float
    cpu_seconds: float


def timed(call: Callable[[], object]) -> Cost:
    """Wall and CPU time (all threads of this process, user and system) of a call."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    end, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(end - start, cpu)


def fio(engine: str, path: Path, size_bytes: int, access: str, over: bool = True) -> Cost:
    """One sequential pass of fio over the file, 1 MiB blocks, 32 deep; ``access``: "read", "write", or "rw" (half of the blocks
    each). ``over`` False: into a file that is not there."""
    command = [
        "fio", "--name=pass", f"--filename={path}", f"--ioengine={engine}", f"--rw={access}",
        "--bs=1M", "--iodepth=32", "--direct=1", f"--size={size_bytes}", "--output-format=json", f"--overwrite={int(over)}",
        "--invalidate=0", "--thread",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise BenchError(f"fio {engine}: exit status {done.returncode}: {done.stderr[-500:]}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved_bytes = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    if moved_bytes != size_bytes:
        raise BenchError(f"fio {engine}: moved {moved_bytes} bytes, wanted {size_bytes}")
    seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
    return Cost(seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds)


def deepspeed_handle(block_bytes: int, depth: int) -> Any:
    """DeepSpeed's handle, one thread. Its first use compiles for minutes.

    Raises:
        PeerMissing: it cannot be built here. The first thing it lacks is libaio's header, and its own error does not say so.
    """
    LIBAIO.check()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        built = AsyncIOBuilder().load(verbose=False)
    except (RuntimeError, OSError) as error:  # a compiler that is missing or fails, a library that cannot be loaded
        raise PeerMissing(f"peer DeepSpeed aio: it cannot be built here: {error}; {LIBAIO.install}") from error
    return built.aio_handle(block_bytes, depth, False, True, 1)
