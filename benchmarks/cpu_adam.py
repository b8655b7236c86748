# SPDX-License-Identifier: Apache-2.0
"""One step of AdamW over one flat tensor: ours, torch's fused one and DeepSpeed's, on the same buffers.

The work is memory traffic, 28 bytes a parameter, so the limit is a loop over the same streams without arithmetic
(cpu_adam_limit.c, built here with cc). Rows ``bf16`` take bf16 gradients and leave bf16 parameters beside the fp32
master, which is one pass for us, and cast, step, cast for the peers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import BenchError, Need, Run, alone, alternate, timed
from torch import Tensor

CLAIM = "fp32 AdamW reaches memory's limit as the best peers do; bf16 in and out in one pass beats cast, step, cast"
NEEDS = (
    Need("DeepSpeedCPUAdam", module="deepspeed"),
    Need("rmw4, the limit", program="cc", install="apt-get install gcc"),
)

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
PART_ELEMS = 10_000_000
LIMITS = {"fp32": "rmw4", "bf16": "rmw5"}


@dataclass(frozen=True)
class Case:
    """A case that is measured in one block."""

    elems: int
    threads: int
    huge: bool
    """Buffers on huge pages (mmap, MADV_HUGEPAGE); else torch's allocator."""
    rounds: int
    """Of each part."""

    def name(self, kind: str) -> str:
        """Return the name of the row."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{kind} {self.elems // 1_000_000}M {threads}{' huge pages' if self.huge else ''}"


@dataclass
class Buffers:
    """Memory that all contenders share: its placement decides as much as the contender."""

    p: Tensor
    m: Tensor
    v: Tensor
    g: Tensor
    g16: Tensor
    p16: Tensor


def empty(elems: int, dtype: torch.dtype, huge: bool) -> Tensor:
    """Memory of one stream."""
    if not huge:
        return torch.empty(elems, dtype=dtype)
    size = elems * dtype.itemsize
    room = mmap.mmap(-1, (size + (2 << 20)) >> 21 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=dtype, count=elems)


def make(elems: int, huge: bool) -> Buffers:
    """A run that goes on: moments of the size that the gradients give them."""
    b = Buffers(
        *(empty(elems, torch.float32, huge) for _ in range(4)), *(empty(elems, torch.bfloat16, huge) for _ in range(2))
    )
    rng = torch.Generator().manual_seed(0)
    b.p.normal_(0, 0.1, generator=rng)
    b.g.normal_(0, 0.01, generator=rng)
    b.m.copy_(b.g).mul_(0.5)
    torch.mul(b.g, b.g, out=b.v)
    b.g16.copy_(b.g)
    b.p16.copy_(b.p)
    return b


def parts(b: Buffers) -> list[Buffers]:
    """Return the same memory in pieces of PART_ELEMS, stepped one after the other.

    Contenders then alternate within some ten milliseconds: a pass of 100M lasts long enough for the machine's speed to
    change between two of them (docs/design/0002-adam-streams.md).
    """
    streams = [stream.split(PART_ELEMS) for stream in (b.p, b.m, b.v, b.g, b.g16, b.p16)]
    return [Buffers(*pieces) for pieces in zip(*streams, strict=True)]


def huge_bytes() -> int:
    """Huge pages that this process really has."""
    return int(re.findall(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[0]) << 10


Step = Callable[[], object]


def torch_step(b: Buffers) -> Step:
    """torch.optim.AdamW(fused=True) over these buffers."""
    param = torch.nn.Parameter(b.p)
    param.grad = b.g
    optimizer = torch.optim.AdamW([param], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
    optimizer.state[param] = {"step": torch.tensor(0.0), "exp_avg": b.m, "exp_avg_sq": b.v}
    return optimizer.step


def deepspeed_step(b: Buffers) -> Step:
    """DeepSpeedCPUAdam over these buffers."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    param = torch.nn.Parameter(b.p)
    param.grad = b.g
    optimizer = DeepSpeedCPUAdam([param], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True)
    optimizer.state[param] = {"step": 0, "exp_avg": b.m, "exp_avg_sq": b.v}
    step: Step = optimizer.step
    return step


def our_step(b: Buffers, low: bool) -> Step:
    """Ours: with ``low``, bf16 gradients in and bf16 parameters out in the same pass."""
    import zeropp.ops

    count = [0]
    grads, outs = ([b.g16], [b.p16]) if low else ([b.g], [])

    def step() -> None:
        count[0] += 1
        zeropp.ops.adam_step_(
            [b.p], grads, [b.m], [b.v], param_outs=outs, step=count[0], lr=LR, beta1=BETAS[0], beta2=BETAS[1],
            eps=EPS, weight_decay=DECAY,
        )  # fmt: skip

    return step


def between_casts(b: Buffers, step: Step) -> Step:
    """Return a step between casts, for a peer that supports fp32 only."""

    def cast_step_cast() -> None:
        b.g.copy_(b.g16)
        step()
        b.p16.copy_(b.p)

    return cast_step_cast


def contenders(kind: str, b: Buffers) -> dict[str, Step]:
    """Ours and the peers; the peers' names say how they work. Without peers torch stays, for the check."""
    peers = {"torch AdamW fused": torch_step}
    if not alone():
        peers["DeepSpeedCPUAdam"] = deepspeed_step
    if kind == "fp32":
        return {"ours": our_step(b, False), **{name: step(b) for name, step in peers.items()}}
    casts = {f"{name} cast-step-cast": between_casts(b, step(b)) for name, step in peers.items()}
    return {"ours": our_step(b, True), **casts}


def build_limit() -> ctypes.CDLL:
    """Compile the loops of cpu_adam_limit.c for this machine."""
    with tempfile.TemporaryDirectory(prefix="zeropp-bench-") as folder:
        library = Path(folder) / "limit.so"
        source = Path(__file__).with_name("cpu_adam_limit.c")
        command = ["cc", "-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-pthread", str(source), "-o"]
        done = subprocess.run([*command, str(library)], capture_output=True, text=True)
        if done.returncode != 0:
            raise BenchError(f"cpu_adam: cc cannot build {source.name}:\n{done.stderr}")
        loaded = ctypes.CDLL(str(library))
    loaded.limit_pass.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32]
    return loaded


def limit_step(limit: ctypes.CDLL, kind: str, b: Buffers, threads: int) -> Step:
    """The pass without arithmetic; it leaves the buffers as they are."""
    gradient, copy = (b.g, None) if kind == "fp32" else (b.g16, b.p16.data_ptr())

    def step() -> None:
        arguments = (b.p.data_ptr(), b.m.data_ptr(), b.v.data_ptr(), gradient.data_ptr(), copy)
        failed = limit.limit_pass(*arguments, b.p.numel(), threads, 0)
        if failed:
            raise BenchError(f"cpu_adam: a thread of the limit's loop cannot start: {os.strerror(failed)}")

    return step


def set_threads(threads: int) -> None:
    """Set the threads of torch, which zeropp follows, and of every OpenMP runtime here: DeepSpeed may load its own."""
    torch.set_num_threads(threads)
    maps = Path("/proc/self/maps").read_text()
    for path in set(re.findall(r"(/\S*lib[gi]?omp\S*\.so\S*)", maps)):
        ctypes.CDLL(path).omp_set_num_threads(threads)


def check(bench: Run, kind: str) -> None:
    """After three steps from the same start all agree: fp32 within rounding, bf16 within one of its units."""
    elems = (1 << 20) + 32
    names = list(contenders(kind, make(64, False)))
    results: dict[str, Buffers] = {}
    for name in names:
        b = make(elems, False)
        step = contenders(kind, b)[name]
        for _ in range(3):
            step()
        results[name] = b
    for name in names[1:]:
        off = (results["ours"].p - results[name].p).abs().max().item()
        bench.check(off < 2e-6, f"{kind}: ours and {name} differ by {off:.2g} after 3 steps of {LR}, 2e-6 allowed")
        if kind == "bf16":
            ours, theirs = results["ours"].p16.float(), results[name].p16.float()
            over = ((ours - theirs).abs() - 2e-6 - ours.abs() * 2**-7).max().item()
            bench.check(over <= 0, f"{kind}: copies of ours and {name} differ by more than one unit of bf16")


def measure(bench: Run, case: Case, limit: ctypes.CDLL | None) -> None:
    """One block: fp32 and bf16 on the same buffers."""
    set_threads(case.threads)
    huge_before = huge_bytes()
    b = make(case.elems, case.huge)
    if case.huge:
        wanted = case.elems * 4 * 4 * 0.9
        got = huge_bytes() - huge_before
        bench.check(
            got >= wanted, f"{case.name('fp32')}: {got >> 20} MiB of huge pages given, {int(wanted) >> 20} wanted"
        )
    for kind in ("fp32", "bf16"):
        samples: dict[str, list[float]] = {}
        for part in parts(b):
            steps = contenders(kind, part)
            if limit is not None:
                steps[LIMITS[kind]] = limit_step(limit, kind, part, case.threads)
            timers = {name: timed(step) for name, step in steps.items()}
            of_part = alternate(timers, rounds=case.rounds, ours=["ours"])
            for name, times in of_part.items():
                samples.setdefault(name, []).extend(t * case.elems / part.p.numel() for t in times)
        peers = [name for name in samples if name not in ("ours", LIMITS[kind])]
        bench.compare(case.name(kind), samples, ours="ours", peers=peers, unit="ms", limit=LIMITS[kind])


def cases(quick: bool) -> list[Case]:
    """Return all combinations of sizes, threads and pages; quick keeps each value once."""
    if quick:
        return [Case(10_000_000, 1, False, 41), Case(10_000_000, 2, True, 41), Case(100_000_000, 1, False, 3)]
    return [
        Case(elems, threads, huge, 101 if elems < 50_000_000 else 9)
        for elems in (10_000_000, 100_000_000)
        for threads in (1, 2)
        for huge in (False, True)
    ]


def run(bench: Run) -> None:
    """Entry of run.py."""
    limit = None if alone() else build_limit()
    for kind in LIMITS:
        check(bench, kind)
    bench.log("contenders agree")
    for case in cases(bench.quick):
        bench.log(f"{case.name('fp32 and bf16')}, {case.rounds} rounds")
        measure(bench, case, limit)


if __name__ == "__main__":
    sys.exit("run this with: python benchmarks/run.py cpu_adam")
