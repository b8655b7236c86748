# SPDX-License-Identifier: Apache-2.0
"""Random reads and writes of 4 KiB to 1 MiB: a batch is submitted, then waited for, as tiers with small tensors do."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from aio_peers import deepspeed_handle
from harness import ROOT, Need, Run, alternate
from zeropp.aio import Engine

CLAIM = "Batches of small random reads and writes take at most 1/1.3 of DeepSpeed's time"
NEEDS = (Need("DeepSpeed", module="deepspeed", install="pip install -e .[bench], and apt-get install libaio-dev"),)
FILE_BYTES = 256 << 20


def run(bench: Run) -> None:
    """Each size, reads and writes, locked tensors on both sides."""
    sizes = [4 << 10, 64 << 10, 1 << 20] if bench.quick else [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20]
    handle = deepspeed_handle(1 << 20, 32)
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".aio-bench-") as folder, Engine(32, 1 << 20) as engine:
        path = Path(folder) / "file"
        source = torch.randint(0, 256, (FILE_BYTES,), dtype=torch.uint8)
        engine.write(source, path).wait()
        for size_bytes in sizes:
            count = min(1024, (64 << 20) // size_bytes)
            offsets = random.Random(size_bytes).sample(range(0, FILE_BYTES, size_bytes), count)
            ours = engine.empty((count, size_bytes), torch.uint8)
            theirs = [handle.new_cpu_locked_tensor(size_bytes, torch.empty(0, dtype=torch.uint8)) for _ in range(count)]
            read = {
                "ours": lambda ours=ours, offsets=offsets: engine_batch(engine.read, ours, path, offsets),
                "DeepSpeed aio": lambda theirs=theirs, offsets=offsets: deepspeed_batch(
                    handle, handle.async_pread, theirs, path, offsets
                ),
            }
            for call in read.values():
                call()
            for index, offset in enumerate(offsets):
                wanted = source[offset : offset + size_bytes]
                bench.check(torch.equal(ours[index], wanted), f"our read at {offset} differs")
                bench.check(torch.equal(theirs[index], wanted), f"DeepSpeed's read at {offset} differs")
            write = {
                "ours": lambda ours=ours, offsets=offsets: engine_batch(engine.write, ours, path, offsets),
                "DeepSpeed aio": lambda theirs=theirs, offsets=offsets: deepspeed_batch(
                    handle, handle.async_pwrite, theirs, path, offsets
                ),
            }
            measure(bench, "read", size_bytes, count, read)
            measure(bench, "write", size_bytes, count, write)
            for tensor in theirs:
                handle.free_cpu_locked_tensor(tensor)
        check = torch.empty_like(source)
        engine.read(check, path).wait()
        bench.check(torch.equal(check, source), "the file changed")


def measure(bench: Run, verb: str, size_bytes: int, count: int, group: dict[str, Callable[[], float]]) -> None:
    """One row: milliseconds of a batch."""
    samples = alternate(group, 5 if bench.quick else 11)
    case = f"random {verb} {size_bytes >> 10} KiB x {count}"
    bench.compare(case, samples, ours="ours", peers=["DeepSpeed aio"], unit="ms")


def engine_batch(start: Callable[..., object], tensors: torch.Tensor, path: Path, offsets: list[int]) -> float:
    """Submit all, then wait for all."""
    begin = time.perf_counter()
    futures = [start(tensors[index], path, offset) for index, offset in enumerate(offsets)]
    for future in futures:
        future.wait()  # type: ignore[attr-defined]
    return (time.perf_counter() - begin) * 1e3


def deepspeed_batch(
    handle: object, start: Callable[..., int], tensors: list[torch.Tensor], path: Path, offsets: list[int]
) -> float:
    """Submit and wait through DeepSpeed's handle, which counts completed requests."""
    begin = time.perf_counter()
    for tensor, offset in zip(tensors, offsets, strict=True):
        start(tensor, str(path), offset)
    handle.wait()  # type: ignore[attr-defined]
    return (time.perf_counter() - begin) * 1e3
