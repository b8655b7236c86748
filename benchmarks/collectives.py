# SPDX-License-Identifier: Apache-2.0
"""Collectives between two processes of one machine, 4 bytes to 256 MB.

Doors: `direct` calls the engine (zeropp.comm.Communicator; gloo's process group; DeepSpeed's extension), `dist` goes through
torch.distributed's functions on both sides. Tensors: `arena` lie in memory that peers map (Communicator.empty), `ordinary` anywhere.
Sizes are those of the whole tensor: what is reduced, the output of all_gather, the input of reduce_scatter; GB/s is that
size over the time of one call.

One launch holds all contenders. They take turns in an order drawn anew each round, a barrier before each turn; a turn is many calls of
a small collective or one or a few of a large one. Results are compared before anything is timed.

Limits are memcpy with both ranks copying at once: of the bytes that a rank must read from its peers (2 (N - 1) / N of the tensor in
all_reduce, (N - 1) / N in the others), out of shared memory (`arena`), or into it and out of it (`ordinary`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import Need, Run
from paired import Paired

CLAIM = "10x lower latency than gloo up to 8 KB, 3x to 5x its bandwidth from 1 MB, 1.2x DeepSpeed's shared-memory all-reduce"
NEEDS = (
    Need("gloo", module="torch.distributed"),
    Need("DeepSpeed shm", module="deepspeed"),
    Need("ninja", program="ninja", install="pip install ninja (DeepSpeed compiles its extension once with it)"),
)

KIB, MIB = 1024, 1024 * 1024
SMALL = (4, 64, KIB, 4 * KIB, 8 * KIB, 64 * KIB, 256 * KIB)
LARGE = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
RANKS = 2


@dataclass(frozen=True)
class Case:
    """One row or a few: a collective of one size, through one door, on one kind of tensor."""

    coll: str
    size_bytes: int
    kind: str

    @property
    def name(self) -> str:
        size = f"{self.size_bytes} B" if self.size_bytes < MIB else f"{self.size_bytes // MIB} MB"
        return f"{self.coll} {size} {RANKS} ranks {self.kind}"

    @property
    def repeat(self) -> int:
        """Calls a turn: some milliseconds of the slowest contender."""
        return max(1, min(100, 64 * MIB // (self.size_bytes + 64 * KIB)))


def cases(quick: bool) -> list[Case]:
    """Every row of the benchmark."""
    small = (4, KIB, 8 * KIB) if quick else SMALL
    large = (MIB, 64 * MIB) if quick else LARGE
    found = [Case("all_reduce", size, door) for size in small for door in ("direct", "dist")]
    for coll in ("all_gather", "reduce_scatter"):
        found += [
            Case(coll, size, door) for size in ((8 * KIB,) if quick else small[1:]) for door in ("direct", "dist")
        ]
    found += [
        Case(coll, size, kind)
        for coll in ("all_reduce", "all_gather", "reduce_scatter")
        for size in large
        for kind in ("arena", "ordinary")
    ]
    return found


def deepspeed_shm(rank: int, ranks: int) -> Callable[[Any], Any]:
    """DeepSpeed's shared-memory all-reduce, as a function of a tensor. Compiles once a machine (about a minute)."""
    from deepspeed.ops.op_builder import ShareMemCommBuilder

    module = ShareMemCommBuilder().load(verbose=False)
    module.initialize(ranks, rank)
    import torch

    return torch.ops.deepspeed.inference_all_reduce_


class Bench(Paired):
    """What a rank holds: the groups of all contenders."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        import zeropp

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        dist.init_process_group("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.gloo = dist.group.WORLD
        self.zeropp = dist.new_group(list(range(self.ranks)), backend="zeropp")
        self.door = zeropp.comm.Communicator(self.zeropp)
        self.deepspeed = deepspeed_shm(self.rank, self.ranks)

    def tensors(self, case: Case) -> tuple[Any, Any]:
        """(tensor or output, input): fp32."""
        elems = case.size_bytes // 4
        make = self.door.empty if case.kind == "arena" else self.torch.empty
        whole = make(max(elems, 1))
        part = make(max(elems // self.ranks, 1))
        return (whole, part) if case.coll != "reduce_scatter" else (part, whole)

    def calls(self, case: Case, output: Any, source: Any) -> dict[str, Callable[[], Any]]:
        """One call of each contender."""
        dist, door, gloo, group = self.dist, self.door, self.gloo, self.zeropp
        if case.coll == "all_reduce":
            if case.kind == "dist":
                return {
                    "ours": lambda: dist.all_reduce(output, group=group),
                    "gloo": lambda: dist.all_reduce(output, group=gloo),
                }
            return {
                "ours": lambda: door.all_reduce(output),
                "gloo": lambda: gloo.allreduce([output]).wait(),
                "DeepSpeed shm": lambda: self.deepspeed(output),
            }
        if case.coll == "all_gather":
            if case.kind == "dist":
                return {
                    "ours": lambda: dist.all_gather_into_tensor(output, source, group=group),
                    "gloo": lambda: dist.all_gather_into_tensor(output, source, group=gloo),
                }
            return {
                "ours": lambda: door.all_gather(output, source),
                "gloo": lambda: gloo._allgather_base(output, source).wait(),
            }
        if case.kind == "dist":
            return {
                "ours": lambda: dist.reduce_scatter_tensor(output, source, group=group),
                "gloo": lambda: dist.reduce_scatter_tensor(output, source, group=gloo),
            }
        return {
            "ours": lambda: door.reduce_scatter(output, source),
            "gloo": lambda: gloo._reduce_scatter_base(output, source).wait(),
        }

    def limit(self, case: Case, output: Any) -> tuple[str, Callable[[], Any]]:
        """memcpy of the bytes that a rank must read from its peers."""
        share = (self.ranks - 1) / self.ranks
        size = int(case.size_bytes * share * (2 if case.coll == "all_reduce" else 1))
        shared = self.door.empty(max(size // 4, 1))
        shared.zero_()
        private, inside = output.data_ptr(), shared.data_ptr()
        room = min(size, output.numel() * 4)

        def out() -> None:
            ctypes.memmove(private, inside, room)

        def in_and_out() -> None:
            ctypes.memmove(inside, private, room)
            ctypes.memmove(private, inside, room)

        return "memcpy", out if case.kind == "arena" else in_and_out


def worker(args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All cases on one rank."""
    bench = Bench()
    results = []
    for fields in args["cases"]:
        case = Case(**fields)
        rounds = args["rounds"] if case.size_bytes <= 16 * MIB else max(5, args["rounds"] // 3)
        results.append(bench.measure(case, rounds))
    bench.dist.barrier()
    bench.dist.destroy_process_group()
    return results


def algorithm_bandwidth(samples: Sequence[float], size_bytes: int) -> list[float]:
    """GB/s from microseconds."""
    return [size_bytes / micros / 1e3 for micros in samples]


def run(bench: Run) -> None:
    """Launch two ranks and report a row for each case and peer."""
    chosen = cases(bench.quick)
    only = os.environ.get("COLLECTIVES_ONLY")  # for work on one algorithm: cases whose name contains this
    if only:
        chosen = [case for case in chosen if only in case.name]
    bench.log(f"{len(chosen)} cases on {RANKS} ranks; DeepSpeed compiles its extension at its first use")
    arguments = {"cases": [vars(case) for case in chosen], "rounds": 11 if bench.quick else 21}
    results = bench.launch("worker", ranks=RANKS, args=arguments, threads=1, timeout_s=1200.0)[0]
    for case, result in zip(chosen, results, strict=True):
        bench.check(not result["wrong"], result["wrong"])
        samples, small = result["samples"], case.size_bytes < MIB
        if not small:
            samples = {name: algorithm_bandwidth(values, case.size_bytes) for name, values in samples.items()}
        peers = [name for name in samples if name not in ("ours", "memcpy")]
        bench.compare(
            case.name,
            samples,
            ours="ours",
            peers=peers,
            unit="us" if small else "GB/s",
            limit="memcpy",
            better="lower" if small else "higher",
        )
