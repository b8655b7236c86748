# SPDX-License-Identifier: Apache-2.0
"""The health check of a job: what each rank can do alone, each pair, and all together; then the search for what is slow.

Each exchange is an all-reduce in a communicator of just the ranks that take part, so what is measured is what training uses. A rank
that does not answer ends the check with a ``CommError`` that names it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zeropp.comm import group as comm_group
from zeropp.errors import CommError
from zeropp.health.search import Fault, search

_log = logging.getLogger("zeropp")

KIB, MIB = 1024, 1024 * 1024
SIZES = (8, 8 * KIB, MIB, 16 * MIB)  # bytes of the all-reduces of pairs and of the whole
SEARCH_BYTES = MIB
PAIRS_OF_AT_MOST = 16  # ranks; of more, pairs are left to the search
BLOCKS = 5  # the best of these counts: a short burst of other load is not a fault


@dataclass(frozen=True)
class Alone:
    """Measurements of one rank by itself."""

    rank: int
    host: str
    copy_gb_per_s: float
    matmul_gflops: float


@dataclass
class Report:
    """Findings of :func:`check`. Times are in seconds, per all-reduce."""

    ranks: int
    alone: list[Alone] = field(default_factory=list)
    pairs: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    """Pair -> bytes -> seconds; empty for more than 16 ranks."""

    whole: dict[int, float] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON takes it."""
        return {
            "ranks": self.ranks,
            "alone": [vars(one) for one in self.alone],
            "pairs": [{"ranks": list(pair), "seconds": times} for pair, times in self.pairs.items()],
            "whole": self.whole,
            "faults": [vars(fault) for fault in self.faults],
            "healthy": not self.faults,
        }


class _World:
    """All ranks of a group, and communicators of some of them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.core = comm_group.communicator(group)
        known = dist.group.WORLD if group is None else group
        assert known is not None  # communicator() has refused that
        self.group: dist.ProcessGroup = known
        self.store = dist.distributed_c10d._get_process_group_store(known)
        self.rank, self.ranks = known.rank(), known.size()
        self.members: tuple[int, ...] = tuple(range(self.ranks))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers."""
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = torch.empty(self.ranks, mine.numel(), dtype=torch.float64)
        self.core.all_gather(everyone.data_ptr(), mine.data_ptr(), mine.numel() * 8)
        return everyone.tolist()

    def time(self, ranks: tuple[int, ...], sizes: Sequence[int]) -> list[float]:
        """Seconds of an all-reduce among `ranks`, of each size: the slowest rank's best block. Collective over all ranks."""
        self.core.barrier()  # a rank that died since the last time is an error here, at once; a new communicator would wait for it
        mine = [0.0] * len(sizes)
        if ranks == self.members:
            mine = [_all_reduce_seconds(self.core, size) for size in sizes]
        elif self.rank in ranks:
            with _numbered_as(ranks):
                mine = self._time_apart(ranks, sizes)
        return [max(column) for column in zip(*self.gather(mine), strict=True)]

    def _time_apart(self, ranks: tuple[int, ...], sizes: Sequence[int]) -> list[float]:
        name = "health check of ranks " + ",".join(map(str, ranks))
        store = dist.distributed_c10d.PrefixStore(f"zeropp/{name}", self.store)
        core = comm_group.create(store, ranks.index(self.rank), len(ranks), comm_group.timeout_of(self.group), name)
        try:
            return [_all_reduce_seconds(core, size) for size in sizes]
        finally:
            comm_group.close(core)


@contextlib.contextmanager
def _numbered_as(ranks: tuple[int, ...]) -> Iterator[None]:
    """Let the rank of a CommError count, inside, in a communicator of some ranks; outside, in the job."""
    try:
        yield
    except CommError as error:
        if error.rank is not None and 0 <= error.rank < len(ranks):
            error.rank = ranks[error.rank]
        raise


def _best(block: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(repeats):
            block()
        seconds.append((time.perf_counter() - start) / repeats)
    return min(seconds)


def _all_reduce_seconds(core: Any, size: int) -> float:
    data = torch.zeros(max(size // 4, 1))
    core.barrier()
    return _best(lambda: core.all_reduce(data.data_ptr(), data.numel(), 0, 0), 1 if size >= MIB else 20)


def _alone() -> tuple[float, float]:
    """Return (copy GB/s, matrix product GFLOP/s) of this rank."""
    source, target = torch.ones(8 * MIB), torch.ones(8 * MIB)
    copy = source.numel() * 4 / _best(lambda: target.copy_(source), 1) / 1e9
    side = 256
    left, right, product = (torch.ones(side, side) for _ in range(3))
    flops = 2 * side**3 / _best(lambda: torch.mm(left, right, out=product), 5) / 1e9
    return copy, flops


def _host() -> str:
    """Name the machine: two network namespaces or containers of one machine differ in the host name."""
    return socket.gethostname()


def _hosts(world: _World) -> list[str]:
    room = 64
    name = _host().encode()[:room].ljust(room, b"\0")
    rows = world.gather([float(byte) for byte in name])
    return [bytes(int(value) for value in row).rstrip(b"\0").decode(errors="replace") for row in rows]


def _slow_alone(alone: Sequence[Alone], factor: float) -> list[Fault]:
    found = []
    for what, unit in (("copy_gb_per_s", "GB/s copied"), ("matmul_gflops", "GFLOP/s in a matrix product")):
        values = [getattr(one, what) for one in alone]
        usual = statistics.median_high(values)
        for one, value in zip(alone, values, strict=True):
            if value * factor < usual:
                found.append(
                    Fault("slow rank", (one.rank,), f"{value:.1f} {unit} by itself, the median is {usual:.1f}")
                )
    return found


def _search_links(world: _World, hosts: Sequence[str], factor: float) -> list[Fault]:
    """Within each host, and between one rank of each: links of one kind are compared with each other only."""

    def probe(ranks: tuple[int, ...]) -> float:
        return world.time(tuple(sorted(ranks)), [SEARCH_BYTES])[0]

    places = [tuple(r for r in world.members if hosts[r] == host) for host in dict.fromkeys(hosts)]
    found = [fault for place in places for fault in search(place, probe, factor)]
    return found + (search([place[0] for place in places], probe, factor) if len(places) > 1 else [])


def check(group: dist.ProcessGroup | None = None, *, factor: float = 3.0, pairs: bool = True) -> Report:
    """Measure every rank, every pair and the whole, and search for what is slow. Collective; some seconds.

    Args:
        group: default: the world. Its timeout limits the wait for a rank that does not answer.
        factor: slower than the best of its like by this much is a fault.
        pairs: measure every pair too (of at most 16 ranks).

    Returns:
        The same report on every rank.

    Raises:
        zeropp.CommError: a rank died (within seconds) or did not answer in time; ``.rank`` is its number.
    """
    world = _World(group)
    report = Report(world.ranks)
    hosts = _hosts(world)
    for rank, (copy, flops) in enumerate(world.gather(_alone())):
        report.alone.append(Alone(rank, hosts[rank], copy, flops))
    report.whole = dict(zip(SIZES, world.time(world.members, SIZES), strict=True))
    if pairs and world.ranks <= PAIRS_OF_AT_MOST:
        for pair in itertools.combinations(world.members, 2):
            report.pairs[pair] = dict(zip(SIZES, world.time(pair, SIZES), strict=True))
    report.faults = _slow_alone(report.alone, factor)
    known = {fault.ranks for fault in report.faults}
    report.faults += [fault for fault in _search_links(world, hosts, factor) if fault.ranks not in known]
    return report


def preflight(group: dist.ProcessGroup | None = None) -> Report:
    """Check before training: without the table of pairs. What is slow is logged as a warning, by rank 0.

    Raises:
        zeropp.CommError: a rank died or did not answer.
    """
    report = check(group, pairs=False)
    if int(os.environ.get("RANK", "0")) == 0:
        for fault in report.faults:
            _log.warning("preflight: %s; python -m zeropp doctor shows every pair", fault)
    return report
