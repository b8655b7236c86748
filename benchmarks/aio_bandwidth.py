# SPDX-License-Identifier: Apache-2.0
"""Sequential O_DIRECT reads and writes of one file: zeropp's engine, fio (io_uring and libaio) and DeepSpeed's aio.

Locked tensors are each library's own; pageable ones are plain torch tensors. CPU seconds count
every thread, user and system.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from aio_peers import Cost, deepspeed_handle, fio, timed
from harness import ROOT, Need, Run, alternate
from zeropp.aio import Engine

CLAIM = "The I/O engine reaches the disk's limit (fio's best), at a third of DeepSpeed's CPU time a byte"
NEEDS = (
    Need("fio", program="fio", install="apt-get install fio"),
    Need("DeepSpeed", module="deepspeed", install="pip install -e .[bench], and apt-get install libaio-dev"),
)
BLOCK_BYTES, DEPTH = 1 << 20, 32


def run(bench: Run) -> None:
    """Reads and writes, locked and pageable, each against all peers in the same rounds."""
    size_bytes = (256 << 20) if bench.quick else (1 << 30)
    rounds = 3 if bench.quick else 7
    handle = deepspeed_handle(BLOCK_BYTES, DEPTH)
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".aio-bench-") as folder, Engine(DEPTH, BLOCK_BYTES) as engine:
        path = Path(folder) / "file"
        source = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)
        engine.write(source, path).wait()
        locked = handle.new_cpu_locked_tensor(size_bytes, torch.empty(0, dtype=torch.uint8))
        memory = {
            "locked": (engine.empty(size_bytes, torch.uint8), locked),
            "pageable": (torch.empty_like(source), torch.empty_like(source)),
        }
        for kind, (ours, theirs) in memory.items():
            for tensor in (ours, theirs):
                tensor.zero_()
            engine.read(ours, path).wait()
            handle.sync_pread(theirs, str(path), 0)
            bench.check(torch.equal(ours, source), f"{kind}: our read differs from what was written")
            bench.check(torch.equal(theirs, source), f"{kind}: DeepSpeed's read differs from what was written")
            for write in (False, True):
                bench.log(f"{kind} {'write' if write else 'read'}")
                compare(bench, kind, write, rounds, size_bytes, contenders(engine, handle, ours, theirs, path, write))
                check = torch.empty_like(source)
                engine.read(check, path).wait()
                bench.check(torch.equal(check, source), f"{kind}: the file changed")
        handle.free_cpu_locked_tensor(locked)


def contenders(
    engine: Engine, handle: object, ours: torch.Tensor, theirs: torch.Tensor, path: Path, write: bool
) -> dict[str, Callable[[], Cost]]:
    """Each moves the whole file once. fio writes first of its own pattern, so its write rounds end with ours."""
    scratch = path.with_suffix(".fio") if write else path
    deepspeed = handle.sync_pwrite if write else handle.sync_pread  # type: ignore[attr-defined]
    start = engine.write if write else engine.read
    size_bytes = ours.numel()
    if write:
        engine.write(ours, scratch).wait()  # the same fresh blocks; fio overwrites them
    return {
        "ours": lambda: timed(lambda: start(ours, path).wait()),
        "fio io_uring": lambda: fio("io_uring", scratch, size_bytes, write),
        "fio libaio": lambda: fio("libaio", scratch, size_bytes, write),
        "DeepSpeed aio": lambda: timed(lambda: deepspeed(theirs, str(path), 0)),
    }


def compare(
    bench: Run, kind: str, write: bool, rounds: int, size_bytes: int, group: dict[str, Callable[[], Cost]]
) -> None:
    """Rows of bandwidth and of CPU time from the same rounds."""
    costs: dict[str, list[Cost]] = alternate(group, rounds)
    rates = {name: [size_bytes / cost.seconds / 1e9 for cost in seen] for name, seen in costs.items()}
    rates["fio best"] = [max(a, b) for a, b in zip(rates["fio io_uring"], rates["fio libaio"], strict=True)]
    case = f"{'write' if write else 'read'} {size_bytes >> 20} MB {kind}"
    peers = ["fio io_uring", "fio libaio", "DeepSpeed aio"]
    bench.compare(case, rates, ours="ours", peers=peers, unit="GB/s", limit="fio best", better="higher")
    cpu = {name: [cost.cpu_seconds / size_bytes * 1e9 for cost in seen] for name, seen in costs.items()}
    bench.compare(f"{case} CPU", cpu, ours="ours", peers=["DeepSpeed aio", "fio io_uring"], unit="s/GB")
