# SPDX-License-Identifier: Apache-2.0
"""Collectives between two hosts: network namespaces of this machine, joined by a cable (veth), with an address each.

Both ranks go into their namespaces before they open a socket, so nothing but the cable joins them. One launch holds all contenders, which
take turns in an order drawn anew each round, a barrier before each turn; results are compared before anything is timed. Sizes are those of
the whole tensor: what is reduced, the output of all_gather, the input of reduce_scatter; GB/s is that size over the time of one call.

The limit is raw sockets: the bytes that each rank must send and receive (all of the tensor in all_reduce, half of it in all_gather and
reduce_scatter, all of it one way in broadcast), both ways at once over a connection of their own. No arithmetic.

The cable is memory: both ends and the kernel's copying share the machine's cores. What is measured is cost, not a network's speed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Need, Run
from paired import Paired

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "comm"))
import netns

CLAIM = "between hosts at least 1.5x gloo's bandwidth from 1 MB, at least 0.8 of raw sockets"
NEEDS = (
    Need("gloo", module="torch.distributed"),
    Need("namespaces", program="ip", install="apt-get install iproute2"),
)

KIB, MIB = 1024, 1024 * 1024
PIECE = 256 * KIB
STORE_PORT, RAW_PORT = 29591, 29592


@dataclass(frozen=True)
class Case:
    """A collective of one size."""

    coll: str
    size_bytes: int

    @property
    def name(self) -> str:
        size = f"{self.size_bytes} B" if self.size_bytes < MIB else f"{self.size_bytes // MIB} MB"
        return f"{self.coll} {size} 2 ranks 2 hosts"

    @property
    def repeat(self) -> int:
        """Calls a turn: some milliseconds of the slowest contender."""
        return max(1, min(50, 16 * MIB // (self.size_bytes + 64 * KIB)))

    @property
    def raw_bytes(self) -> tuple[int, int]:
        """Return the bytes that ranks 0 and 1 must send."""
        if self.coll == "broadcast":
            return self.size_bytes, 0
        each = self.size_bytes if self.coll == "all_reduce" else self.size_bytes // 2
        return each, each


def cases(quick: bool) -> list[Case]:
    """Every row of the benchmark."""
    if quick:
        sizes = {"all_reduce": (4 * KIB, MIB, 64 * MIB), "all_gather": (MIB, 64 * MIB), "reduce_scatter": (64 * MIB,)}
    else:
        sizes = dict.fromkeys(
            ("all_reduce", "all_gather", "reduce_scatter", "broadcast"), (4 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
        )
    return [Case(coll, size) for coll, row in sizes.items() for size in row]


class RawSockets:
    """One connection between the two ranks."""

    def __init__(self, rank: int, addresses: list[str], size_bytes: int) -> None:
        if rank == 0:
            with socket.create_server((addresses[0], RAW_PORT)) as server:
                self.link = server.accept()[0]
        else:
            deadline = time.monotonic() + 60
            while True:
                try:
                    self.link = socket.create_connection((addresses[0], RAW_PORT), timeout=5)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
        self.link.setblocking(False)
        self.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.out, self.into = memoryview(bytearray(size_bytes)), memoryview(bytearray(size_bytes))

    def exchange(self, sends: int, receives: int) -> None:
        """Both ways at once, by the calling thread: what can move moves, else it sleeps."""
        sent = got = 0
        while sent < sends or got < receives:
            moved = 0
            with contextlib.suppress(BlockingIOError):
                moved = self.link.recv_into(self.into[got : min(got + PIECE, receives)]) if got < receives else 0
            got += moved
            with contextlib.suppress(BlockingIOError):
                more = self.link.send(self.out[sent : min(sent + PIECE, sends)]) if sent < sends else 0
                sent += more
                moved += more
            if not moved:
                select.select([self.link] if got < receives else [], [self.link] if sent < sends else [], [], 60.0)


def enter(name: str) -> None:
    """Move the calling thread, and those that it starts from now on, into a network namespace."""
    import ctypes

    libc, clone_newnet = ctypes.CDLL(None, use_errno=True), 0x40000000
    with Path(f"/var/run/netns/{name}").open() as file:
        if libc.setns(file.fileno(), clone_newnet) != 0:
            raise OSError(ctypes.get_errno(), f"setns into namespace {name}")


class Bench(Paired):
    """The state of a rank: the groups of all contenders."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        enter(args["names"][self.rank])
        os.environ["GLOO_SOCKET_IFNAME"] = args["links"][self.rank]
        import torch
        import torch.distributed as dist
        import zeropp

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        store = dist.TCPStore(args["addresses"][0], STORE_PORT, self.ranks, self.rank == 0)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.ranks)
        self.gloo = dist.group.WORLD
        self.zeropp = dist.new_group(list(range(self.ranks)), backend="zeropp")
        self.door = zeropp.comm.Communicator(self.zeropp)
        self.raw = RawSockets(self.rank, args["addresses"], max(case["size_bytes"] for case in args["cases"]))

    def tensors(self, case: Case) -> tuple[Any, Any]:
        """(tensor or output, input): fp32."""
        whole = self.torch.empty(case.size_bytes // 4)
        part = self.torch.empty(case.size_bytes // 4 // self.ranks)
        return (whole, part) if case.coll != "reduce_scatter" else (part, whole)

    def calls(self, case: Case, output: Any, source: Any) -> dict[str, Callable[[], Any]]:
        """One call of each contender, through torch.distributed's group objects on the peer's side, the engine on ours."""
        door, gloo = self.door, self.gloo
        if case.coll == "all_reduce":
            return {"ours": lambda: door.all_reduce(output), "gloo": lambda: gloo.allreduce([output]).wait()}
        if case.coll == "broadcast":
            return {
                "ours": lambda: door.broadcast(output, 0),
                "gloo": lambda: self.dist.broadcast(output, 0, group=gloo),
            }
        if case.coll == "all_gather":
            return {
                "ours": lambda: door.all_gather(output, source),
                "gloo": lambda: gloo._allgather_base(output, source).wait(),
            }
        return {
            "ours": lambda: door.reduce_scatter(output, source),
            "gloo": lambda: gloo._reduce_scatter_base(output, source).wait(),
        }

    def limit(self, case: Case, output: Any) -> tuple[str, Callable[[], Any]]:
        """The bytes that both ranks must send, both ways at once."""
        sends, receives = case.raw_bytes[self.rank], case.raw_bytes[1 - self.rank]
        return "raw sockets", lambda: self.raw.exchange(sends, receives)


def worker(args: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run all cases on one rank."""
    bench = Bench(args)
    for fields in args["cases"]:
        yield {"case": fields, **bench.measure(Case(**fields), args["rounds"])}
    bench.dist.barrier()
    bench.dist.destroy_process_group()


def run(bench: Run) -> None:
    """Launch a rank in each namespace and report a row for each case."""
    only = os.environ.get("TCP_ONLY", "")  # for work on one algorithm: cases whose name contains this
    chosen = [case for case in cases(bench.quick) if only in case.name]
    reason = netns.why_not()
    bench.check(reason is None, str(reason))
    with netns.TwoHosts() as hosts:
        args = {
            "cases": [vars(case) for case in chosen],
            "rounds": 7 if bench.quick else 15,
            "names": hosts.names,
            "links": hosts.links,
            "addresses": hosts.addresses,
        }
        bench.launch(
            "worker", ranks=2, args=args, threads=1, timeout_s=600.0, heard=lambda result: report(bench, result)
        )


def report(bench: Run, result: Mapping[str, Any]) -> None:
    """The row of one case."""
    bench.check(not result["wrong"], result["wrong"])
    case = Case(**result["case"])
    samples, small = result["samples"], case.size_bytes < MIB
    if not small:
        samples = {name: [case.size_bytes / t / 1e3 for t in values] for name, values in samples.items()}
    bench.compare(
        case.name,
        samples,
        ours="ours",
        peers=["gloo"],
        unit="us" if small else "GB/s",
        limit="raw sockets",
        better="lower" if small else "higher",
    )
