# SPDX-License-Identifier: Apache-2.0
"""Sequential O_DIRECT reads, writes and both at once: zeropp's engine, fio (io_uring and libaio) and DeepSpeed's aio.

"mixed": one file is read while as many bytes of another are written; fio does half of its blocks each way, in one file.
Locked tensors are each library's own; pageable ones are plain torch tensors. CPU seconds count every thread, user and system.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aio_peers import Cost, deepspeed_handle, fio, timed
from harness import ROOT, BenchError, Need, PeerMissing, Run, alone, alternate
from zeropp.aio import Engine

CLAIM = "The I/O engine reaches the disk's limit (fio's best), at a third of DeepSpeed's CPU time a byte"
NEEDS = (
    Need("fio", program="fio", install="apt-get install fio"),
    Need("DeepSpeed", module="deepspeed", install="pip install -e .[bench], and apt-get install libaio-dev"),
)
BLOCK_BYTES, DEPTH = 1 << 20, 32
QUICK_BYTES, FULL_BYTES = 256 << 20, 1 << 30
FIO, THEIRS = ("fio io_uring", "fio libaio"), "DeepSpeed aio"


def run(bench: Run) -> None:
    """Locked and pageable, each against all peers in the same rounds. Without DeepSpeed's engine, against fio alone."""
    size_bytes = QUICK_BYTES if bench.quick else FULL_BYTES
    rounds = 3 if bench.quick else 7
    handle = None
    try:
        handle = None if alone() else deepspeed_handle(BLOCK_BYTES, DEPTH)
    except PeerMissing as error:
        bench.leave_out(f"all rows against {THEIRS}", error)
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".aio-bench-") as folder, Engine(DEPTH, BLOCK_BYTES) as engine:
        path = Path(folder) / "file"
        source = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)
        engine.write(source, path).wait()
        for kind in ("locked", "pageable"):
            for access in ("read", "write", "mixed"):
                bench.log(f"{kind} {access}")
                measure(bench, engine, handle, kind, access, rounds, path, source)


def measure(
    bench: Run, engine: Engine, handle: Any, kind: str, access: str, rounds: int, path: Path, source: torch.Tensor
) -> None:
    """Rows of one case, once a pass of each has moved the right bytes. `handle`: DeepSpeed's, or None."""
    size_bytes = source.numel()
    parts = (size_bytes // 2, size_bytes // 2) if access == "mixed" else (size_bytes,)
    byte = torch.empty(0, dtype=torch.uint8)
    theirs: list[torch.Tensor] = []
    if kind == "locked":
        ours = [engine.empty(part, torch.uint8) for part in parts]
        if handle is not None:
            theirs = [handle.new_cpu_locked_tensor(part, byte) for part in parts]
    else:
        ours = [torch.empty(part, dtype=torch.uint8) for part in parts]
        if handle is not None:
            theirs = [torch.empty(part, dtype=torch.uint8) for part in parts]
    for tensor in (*ours, *theirs):
        tensor.copy_(source[: tensor.numel()])
    outs = {who: path.with_suffix("." + who) for who in ("ours", "theirs", "fio")}
    if access != "read":  # blocks that are there, for all
        for out in outs.values():
            engine.write(source ^ 1, out).wait()
    for tensor in (*ours[:1], *theirs[:1]) if access != "write" else ():
        tensor.zero_()
    group = contenders(engine, handle, ours, theirs, path, outs, access)
    for who, contender, buffers in (("ours", "ours", ours), ("theirs", THEIRS, theirs)):
        if contender not in group:
            continue
        group[contender]()
        if access != "write":
            bench.check(torch.equal(buffers[0], source[: parts[0]]), f"{kind} {access}: {who} read other bytes")
        if access != "read":
            check = torch.empty_like(source[: parts[-1]])
            engine.read(check, outs[who]).wait()
            bench.check(torch.equal(check, source[: parts[-1]]), f"{kind} {access}: {who} wrote other bytes")
    compare(bench, f"{access} {size_bytes >> 20} MB {kind}", rounds, size_bytes, group)
    for out in outs.values():
        out.unlink(missing_ok=True)
        engine.forget(out)
    if kind == "locked":
        for tensor in theirs:
            handle.free_cpu_locked_tensor(tensor)


def contenders(
    engine: Engine, handle: Any, ours: list[torch.Tensor], theirs: list[torch.Tensor], path: Path, outs: dict[str, Path], access: str
) -> dict[str, Callable[[], Cost]]:  # fmt: skip
    """Each moves as many bytes. The first buffer is read to, the last one written from."""
    reads, writes = access != "write", access != "read"
    jobs, mode = reads + writes, "rw" if reads and writes else access
    fio_path, size_bytes = outs["fio"] if writes else path, sum(tensor.numel() for tensor in ours)

    def our_pass() -> None:
        futures = [engine.read(ours[0], path)] if reads else []
        futures += [engine.write(ours[-1], outs["ours"])] if writes else []
        for future in futures:
            future.wait()

    def their_pass() -> None:
        if reads:
            handle.async_pread(theirs[0], str(path), 0)
        if writes:
            handle.async_pwrite(theirs[-1], str(outs["theirs"]), 0)
        done = handle.wait()
        if done != jobs:
            raise BenchError(f"DeepSpeed ended {done} of {jobs} requests")

    group = {
        "ours": lambda: timed(our_pass),
        "fio io_uring": lambda: fio("io_uring", fio_path, size_bytes, mode),
        "fio libaio": lambda: fio("libaio", fio_path, size_bytes, mode),
    }
    if handle is not None:
        group[THEIRS] = lambda: timed(their_pass)
    return group


def compare(bench: Run, case: str, rounds: int, size_bytes: int, group: dict[str, Callable[[], Cost]]) -> None:
    """Rows of bandwidth and of CPU time from the same rounds."""
    costs: dict[str, list[Cost]] = alternate(group, rounds, ours=["ours"])
    rates = {name: [size_bytes / cost.seconds / 1e9 for cost in seen] for name, seen in costs.items()}
    if not alone():
        rates["fio best"] = [max(a, b) for a, b in zip(rates["fio io_uring"], rates["fio libaio"], strict=True)]
    peers = [name for name in (*FIO, THEIRS) if name in group]
    bench.compare(case, rates, ours="ours", peers=peers, unit="GB/s", limit="fio best", better="higher")
    cpu = {name: [cost.cpu_seconds / size_bytes * 1e9 for cost in seen] for name, seen in costs.items()}
    bench.compare(
        f"{case} CPU", cpu, ours="ours", peers=[name for name in (THEIRS, FIO[0]) if name in group], unit="s/GB"
    )
