# SPDX-License-Identifier: Apache-2.0
"""Collectives between two, three and four processes of one machine, 4 bytes to 256 MB.

Interfaces: `direct` calls the engine (zeropp.comm.Communicator; gloo's process group; DeepSpeed's extension), `dist` goes through
torch.distributed's functions on both sides. Tensors: `arena` lie in memory that peers map (Communicator.empty), `ordinary` anywhere.
Sizes are those of the whole tensor: what is reduced or broadcast, the output of all_gather and gather, the input of reduce_scatter,
all_to_all and scatter; GB/s is that size over the time of one call. The root is rank 0. send_recv is a message of that size to the other
rank, and one back when it has come.

One launch for each number of ranks holds all contenders. They take turns in an order drawn anew each round, a barrier before each turn; a
turn is many calls of a small collective or one or a few of a large one. Results are compared before anything is timed.

Limits are memcpy by all ranks at once, each byte along the way that the collective must send it, without arithmetic and without waiting
(`Flow`; docs/design/0033): out of the peers' memory (`arena`), or into shared memory and out of the peers', piece by piece (`ordinary`). So
they hold what copying between the cores' caches costs, which copying inside of one does not. Below 1 MB a limit is mostly the calls
themselves.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import Need, Run, alone
from paired import Paired

CLAIM = "10x lower latency than gloo up to 8 KB, 1.5x to 5x its bandwidth from 1 MB, 1.2x DeepSpeed's shared-memory all-reduce"
NEEDS = (
    Need("gloo", module="torch.distributed"),
    Need("DeepSpeed shm", module="deepspeed"),
    Need("ninja", program="ninja", install="pip install ninja (DeepSpeed compiles its extension once with it)"),
)

KIB, MIB = 1024, 1024 * 1024
PIECE = 256 * KIB
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
ROOTED = ("reduce", "gather", "scatter")


@dataclass(frozen=True)
class Case:
    """One row or a few: a collective of one size, through one interface, on one kind of tensor."""

    ranks: int
    coll: str
    size_bytes: int
    kind: str

    @property
    def name(self) -> str:
        size = f"{self.size_bytes} B " if self.size_bytes < MIB else f"{self.size_bytes // MIB} MB "
        return f"{self.coll} {size if self.size_bytes else ''}{self.ranks} ranks {self.kind}"

    @property
    def repeat(self) -> int:
        """Calls a turn: some milliseconds of the slowest contender."""
        return max(1, min(100, 64 * MIB // (self.size_bytes + 64 * KIB)) // (self.ranks - 1))

    @property
    def elems(self) -> int:
        """Return the elements of the whole fp32 tensor: as many for each rank."""
        return max(self.size_bytes // 4 // self.ranks, 1) * self.ranks


def cases(quick: bool) -> list[Case]:
    """Every row of the benchmark: all sizes on two ranks, some on three and four."""

    def rows(ranks: int, colls: Sequence[str], sizes: Sequence[int], kinds: Sequence[str]) -> list[Case]:
        return [Case(ranks, coll, size, kind) for coll in colls for size in sizes for kind in kinds]

    doors, memories = ("direct", "dist"), ("arena", "ordinary")
    first, rest = COLLECTIVES[:1], COLLECTIVES[1:]
    if quick:
        return [
            *rows(2, first, (4, KIB, 8 * KIB), doors),
            *rows(2, rest, (8 * KIB,), doors),
            *rows(2, COLLECTIVES, (MIB, 64 * MIB), ("arena",)),
            *rows(2, first, (MIB, 64 * MIB), ("ordinary",)),
            *rows(2, (*rest, *ROOTED), (MIB,), ("ordinary",)),
            *rows(2, (*ROOTED, "send_recv"), (8 * KIB,), doors),
            *rows(2, ("barrier",), (0,), doors),
            *rows(4, first, (8 * KIB,), ("direct",)),
            *rows(4, COLLECTIVES, (MIB,), ("arena",)),
        ]
    return [
        *rows(2, first, (4, 64, KIB, 4 * KIB, 8 * KIB, 64 * KIB, 256 * KIB), doors),
        *rows(2, rest, (64, KIB, 8 * KIB, 256 * KIB), doors),
        *rows(2, COLLECTIVES, (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB), memories),
        *rows(2, (*ROOTED, "send_recv"), (64, 8 * KIB), doors),
        *rows(2, ROOTED, (MIB,), memories),
        *rows(2, ("send_recv",), (MIB,), ("ordinary",)),
        *rows(2, ("barrier",), (0,), doors),
        *(
            row
            for ranks in (3, 4)
            for row in (
                *rows(ranks, (*COLLECTIVES, *ROOTED), (8 * KIB,), doors),
                *rows(ranks, ("barrier",), (0,), doors),
                *rows(ranks, COLLECTIVES, (MIB, 16 * MIB), memories),
            )
        ),
    ]


def deepspeed_shm(rank: int, ranks: int) -> Callable[[Any], Any]:
    """DeepSpeed's shared-memory all-reduce, as a function of a tensor. Compiles once a machine (about a minute)."""
    from deepspeed.ops.op_builder import ShareMemCommBuilder

    module = ShareMemCommBuilder().load(verbose=False)
    module.initialize(ranks, rank)
    import torch

    return torch.ops.deepspeed.inference_all_reduce_


class Flow:
    """The copies that a collective has to make, each rank's between its own memory and a block of every rank.

    `arena`: the blocks stand for the ranks' tensors. `ordinary`: for slots, into which a rank copies a piece, and from which its peers copy it
    while it is in the cache. No rank waits, so the copied values mean nothing.
    """

    def __init__(self, rank: int, ranks: int, size_bytes: int, gather: Callable[[Any], list[Any]]) -> None:
        self.rank, self.ranks = rank, ranks
        own = os.memfd_create("zeropp-bench")
        os.ftruncate(own, size_bytes)
        places = gather((os.getpid(), own))
        files = [own if r == rank else os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR) for r, (pid, fd) in enumerate(places)]
        self.maps = [mmap.mmap(file, size_bytes) for file in files]
        self.block = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in self.maps]
        gather(None)  # before anybody closes what others open
        for file in files:
            os.close(file)

    @property
    def peers(self) -> list[int]:
        """The others, each rank beginning with the next one."""
        return [(self.rank + k) % self.ranks for k in range(1, self.ranks)]

    def arena(self, coll: str, size_bytes: int, output: int) -> Callable[[], None]:
        """Straight out of the peers' tensors; those of all_reduce are read, and written, again and again."""
        me, block, part = self.rank, self.block, size_bytes // self.ranks
        copies: list[tuple[int, int, int]] = []  # to, from, bytes
        if coll == "all_reduce":
            copies += [(block[me] + me * part, block[r] + me * part, part) for r in self.peers]
            copies += [(block[me] + r * part, block[r] + r * part, part) for r in self.peers]
        elif coll == "reduce_scatter":
            copies += [(output, block[r] + me * part, part) for r in self.peers]
        elif coll == "broadcast":
            copies += [(output, block[0], size_bytes)] if me else []
        elif coll == "reduce":
            copies += [] if me else [(block[me], block[r], size_bytes) for r in self.peers]
        elif coll == "gather":
            copies += [] if me else [(output + r * part, block[r], part) for r in range(self.ranks)]
        elif coll == "scatter":
            copies += [(output, block[0] + me * part, part)]
        else:
            offset = me * part if coll == "all_to_all" else 0
            copies += [(output + r * part, block[r] + offset, part) for r in (me, *self.peers)]
        return self.calls(copies)

    def ordinary(self, coll: str, size_bytes: int, output: int) -> Callable[[], None]:
        """Into my slot and out of the peers', a piece at a time. all_reduce: twice, parts and then sums."""
        me, block, part = self.rank, self.block, size_bytes // self.ranks
        step = PIECE // self.ranks // 64 * 64
        copies: list[tuple[int, int, int]] = []  # to, from, bytes
        if coll in ROOTED:
            return self.calls(self.rooted(coll, size_bytes if coll == "reduce" else part, output))
        for at in range(0, part, step):
            count, slot = min(step, part - at), at // step % 8 * PIECE
            mine, theirs = block[me] + slot, [block[r] + slot for r in self.peers]
            into = [output + r * part + at for r in (me, *self.peers)]
            if coll == "broadcast":  # all of it, from rank 0 to the others
                pairs = [(piece, block[0] + slot + k * step) for k, piece in enumerate(into)]
                copies += [(piece, there, count) if me else (there, piece, count) for piece, there in pairs]
                continue
            if coll == "all_gather":  # this rank's part for every rank, and its own copy of it
                copies += [(mine, into[0], count), (into[0], mine, count)]
            else:  # a part for each
                copies += [(mine + k * step, into[k], count) for k in range(1, self.ranks)]
            if coll in ("all_reduce", "reduce_scatter"):
                target = into[0] if coll == "all_reduce" else output + at
                copies += [(target, there + step, count) for there in theirs]
            else:
                copies += [(into[k + 1], there, count) for k, there in enumerate(theirs)]
            if coll == "all_to_all":
                copies += [(into[0], into[1], count)]
            if coll == "all_reduce":
                second = 8 * PIECE
                copies += [(mine + second, into[0], count)]
                copies += [(into[k + 1], there + second, count) for k, there in enumerate(theirs)]
        return self.calls(copies)

    def rooted(self, coll: str, size_bytes: int, output: int) -> list[tuple[int, int, int]]:
        """To rank 0 or from it, in pieces: of each rank that many bytes."""
        me, block = self.rank, self.block
        step = PIECE // self.ranks // 64 * 64
        copies: list[tuple[int, int, int]] = []  # to, from, bytes
        for at in range(0, size_bytes, step):
            count, slot = min(step, size_bytes - at), at // step % 8 * PIECE
            into = [output + at + (0 if coll == "reduce" else r * size_bytes) for r in range(self.ranks)]
            if coll == "scatter":  # the root's slot holds a piece for each
                slots = [block[0] + slot + r * step for r in range(self.ranks)]
                copies += [(output + at, slots[me], count)] if me else [(slots[r], into[r], count) for r in self.peers]
            else:
                copies += [(block[me] + slot, output + at, count)] if me else []
                copies += [] if me else [(into[r], block[r] + slot, count) for r in self.peers]
        if coll != "reduce" and not me:  # the root's own
            copies += [(output, block[0], size_bytes)]
        return copies

    @staticmethod
    def calls(copies: Sequence[tuple[int, int, int]]) -> Callable[[], None]:
        def run() -> None:
            for to, at, count in copies:
                ctypes.memmove(to, at, count)

        return run


class Bench(Paired):
    """The state of a rank: the groups of all contenders."""

    def __init__(self, largest_bytes: int) -> None:
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
        self.deepspeed = None if alone() else deepspeed_shm(self.rank, self.ranks)
        self.flow = Flow(self.rank, self.ranks, max(largest_bytes, 16 * PIECE), self.gathered)

    def tensors(self, case: Case) -> tuple[Any, Any]:
        """(tensor or output, input): fp32."""
        make = self.door.empty if case.kind == "arena" else self.torch.empty
        whole = make(case.elems)
        if case.coll in ("broadcast", "reduce", "barrier"):
            return whole, whole
        whole_both = case.coll in ("all_to_all", "send_recv")
        other = make(case.elems if whole_both else case.elems // self.ranks)
        return (other, whole) if case.coll in ("reduce_scatter", "scatter") else (whole, other)

    def result(self, case: Case, output: Any) -> Any:
        """Only the root of a reduction has a sum."""
        return output if case.coll != "reduce" or self.rank == 0 else output[:0]

    def calls(self, case: Case, output: Any, source: Any) -> dict[str, Callable[[], Any]]:
        """One call of each contender."""
        whole = {"gather": output, "scatter": source}.get(case.coll)
        parts = None if whole is None or self.rank else list(whole.chunk(self.ranks))  # torch takes lists there
        doors = self.through_dist if case.kind == "dist" else self.direct
        named = {name: (lambda call=call: call(output, source)) for name, call in doors(case.coll, parts).items()}
        deepspeed = self.deepspeed
        if deepspeed is not None and case.coll == "all_reduce" and case.kind != "dist":
            named["DeepSpeed shm"] = lambda: deepspeed(output)
        return named

    def through_dist(self, coll: str, parts: list[Any] | None) -> dict[str, Callable[[Any, Any], Any]]:
        """torch.distributed's function, with the group of each."""
        dist = self.dist
        call = {
            "all_reduce": lambda out, _, group: dist.all_reduce(out, group=group),
            "all_gather": lambda out, src, group: dist.all_gather_into_tensor(out, src, group=group),
            "reduce_scatter": lambda out, src, group: dist.reduce_scatter_tensor(out, src, group=group),
            "broadcast": lambda out, _, group: dist.broadcast(out, 0, group=group),
            "all_to_all": lambda out, src, group: dist.all_to_all_single(out, src, group=group),
            "reduce": lambda out, _, group: dist.reduce(out, 0, group=group),
            "gather": lambda _, src, group: dist.gather(src, parts, 0, group=group),
            "scatter": lambda out, _, group: dist.scatter(out, parts, 0, group=group),
            "barrier": lambda _, __, group: dist.barrier(group=group),
            "send_recv": lambda out, src, group: self.there_and_back(
                lambda: dist.send(src, 1 - self.rank, group=group), lambda: dist.recv(out, 1 - self.rank, group=group)
            ),
        }[coll]
        return {
            "ours": lambda out, src: call(out, src, self.zeropp),
            "gloo": lambda out, src: call(out, src, self.gloo),
        }

    def direct(self, coll: str, parts: list[Any] | None) -> dict[str, Callable[[Any, Any], Any]]:
        """The engine, and gloo's process group."""
        door, gloo, lists, other = self.door, self.gloo, [] if parts is None else [parts], 1 - self.rank
        calls: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
            "all_reduce": (lambda out, _: door.all_reduce(out), lambda out, _: gloo.allreduce([out]).wait()),
            "all_gather": (door.all_gather, lambda out, src: gloo._allgather_base(out, src).wait()),
            "reduce_scatter": (door.reduce_scatter, lambda out, src: gloo._reduce_scatter_base(out, src).wait()),
            "broadcast": (lambda out, _: door.broadcast(out, 0), lambda out, _: gloo.broadcast(out, 0).wait()),
            "all_to_all": (door.all_to_all, lambda out, src: gloo.alltoall_base(out, src, [], []).wait()),
            "reduce": (lambda out, _: door.reduce(out), lambda out, _: gloo.reduce([out]).wait()),
            "gather": (door.gather, lambda _, src: gloo.gather(lists, [src]).wait()),
            "scatter": (door.scatter, lambda out, _: gloo.scatter([out], lists).wait()),
            "barrier": (lambda *_: door.barrier(), lambda *_: gloo.barrier().wait()),
            "send_recv": (
                lambda out, src: self.there_and_back(lambda: door.send(src, other), lambda: door.recv(out, other)),
                lambda out, src: self.there_and_back(
                    lambda: gloo.send([src], other, 0).wait(), lambda: gloo.recv([out], other, 0).wait()
                ),
            ),
        }
        ours, theirs = calls[coll]
        return {"ours": ours, "gloo": theirs}

    def there_and_back(self, send: Callable[[], Any], receive: Callable[[], Any]) -> None:
        """Rank 0 begins."""
        if self.rank == 0:
            send()
            receive()
        else:
            receive()
            send()

    def limit(self, case: Case, output: Any) -> tuple[str, Callable[[], Any]] | None:
        """memcpy along the way of the bytes; those of send_recv wait for each other, which a copy does not, and a barrier has none."""
        if case.coll in ("send_recv", "barrier"):
            return None
        way = self.flow.ordinary if case.kind == "ordinary" else self.flow.arena
        private = self.torch.empty(case.elems)  # reduce_scatter's output is a part, its input whole
        call = way(case.coll, case.elems * 4, private.data_ptr())
        return "memcpy", lambda: (call(), private)  # which must live as long


def worker(args: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run all cases on one rank."""
    chosen = [Case(**fields) for fields in args["cases"]]
    bench = Bench(max(case.elems * 4 for case in chosen))
    for case in chosen:
        rounds = args["rounds"] if case.size_bytes <= 16 * MIB else max(5, args["rounds"] // 3)
        yield {"case": vars(case), **bench.measure(case, rounds)}
    bench.dist.barrier()
    bench.dist.destroy_process_group()


def algorithm_bandwidth(samples: Sequence[float], size_bytes: int) -> list[float]:
    """GB/s from microseconds."""
    return [size_bytes / micros / 1e3 for micros in samples]


def run(bench: Run) -> None:
    """Launch each number of ranks and report a row for each case and peer."""
    chosen = cases(bench.quick)
    only = os.environ.get("COLLECTIVES_ONLY")  # for work on one algorithm: cases whose name contains this
    if only:
        chosen = [case for case in chosen if only in case.name]
    bench.log(f"{len(chosen)} cases; DeepSpeed compiles its extension at its first use")
    for ranks in sorted({case.ranks for case in chosen}):
        here = [case for case in chosen if case.ranks == ranks]
        arguments = {
            "cases": [vars(case) for case in here],
            "rounds": 5 if bench.quick else 21 if ranks == 2 else 11,
        }
        bench.launch(
            "worker",
            ranks=ranks,
            args=arguments,
            threads=1,
            timeout_s=1200.0,
            heard=lambda result: report(bench, result),
        )


def report(bench: Run, result: Mapping[str, Any]) -> None:
    """The rows of one case."""
    bench.check(not result["wrong"], result["wrong"])
    case = Case(**result["case"])
    samples, small = result["samples"], case.size_bytes < MIB
    if not small:
        samples = {name: algorithm_bandwidth(values, case.elems * 4) for name, values in samples.items()}
    bench.compare(
        case.name,
        samples,
        ours="ours",
        peers=[name for name in samples if name not in ("ours", "memcpy")],
        unit="us" if small else "GB/s",
        limit="memcpy" if "memcpy" in samples else None,
        better="lower" if small else "higher",
    )
