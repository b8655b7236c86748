# SPDX-License-Identifier: Apache-2.0
"""Ranks that do something together: all succeed, or all raise an error that names the rank that failed, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from zeropp.comm.group import OP_CODES, dtype_code
from zeropp.errors import CheckpointError, ConfigError, NotBuiltError, TierError
from zeropp.files.heap_trim import byte_view

T = TypeVar("T")
_KINDS: dict[str, type[Exception]] = {
    cls.__name__: cls for cls in (CheckpointError, ConfigError, MemoryError, NotBuiltError, TierError)
}


def broadcast(comm: Any, tensor: torch.Tensor, root: int = 0) -> None:
    """Give a contiguous tensor of any device the values that it has on rank ``root``. Collective.

    ``comm`` is None for one rank, else a communicator of the core, which reads memory of the host. So what is on an
    accelerator goes through a copy on the host, and the host waits for it: this is for setting up, and for what a step
    rarely does. The same holds for :func:`all_gather`.
    """
    if comm is None:
        return
    values = tensor.cpu()  # the same tensor, if it is there
    comm.broadcast(values.data_ptr(), values.nbytes, root)
    if values is not tensor:
        tensor.copy_(values)


def all_gather(comm: Any, every: torch.Tensor, mine: torch.Tensor) -> None:
    """Fill the contiguous tensor ``every`` with ``mine`` of all ranks, in their order. Collective. Both have one type
    and may be on any device; ``every`` has the elements of ``mine`` times the number of ranks."""
    if comm is None:
        every.copy_(mine)
        return
    own, values = mine.cpu(), every if every.is_cpu else torch.empty_like(every, device="cpu")
    comm.all_gather(values.data_ptr(), own.data_ptr(), own.nbytes)
    if values is not every:
        every.copy_(values)


def add_up(comm: Any, tensor: torch.Tensor) -> None:
    """Add a contiguous tensor of any device over all ranks, in their order, in place. Collective. See :func:`broadcast` for what is on an
    accelerator."""
    if comm is None:
        return
    values = tensor.cpu()
    comm.all_reduce(values.data_ptr(), values.numel(), dtype_code(values.dtype), OP_CODES["sum"])
    if values is not tensor:
        tensor.copy_(values)


def exchange(comm: Any, mine: Any) -> list[Any]:
    """Return what every rank of a communicator gave, in rank order. Collective. The values travel as JSON, so tuples become lists.
    ``comm`` is None for one rank."""
    data = json.dumps(mine).encode()
    if comm is None:
        return [json.loads(data)]
    lengths = torch.empty(comm.ranks, dtype=torch.int64, device="cpu")
    all_gather(comm, lengths, torch.tensor([len(data)], dtype=torch.int64, device="cpu"))
    longest = int(lengths.max())
    padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
    every = torch.empty(longest * comm.ranks, dtype=torch.uint8, device="cpu")
    all_gather(comm, every, padded)
    whole = bytes(byte_view(every))
    return [json.loads(whole[rank * longest : rank * longest + int(lengths[rank])]) for rank in range(comm.ranks)]


class Member(Protocol):
    """One rank of a group: an engine, or whatever else holds a communicator."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def comm(self) -> Any: ...


class Ranks:
    """The ranks of one engine, exchanging plain data. Every method is collective."""

    def __init__(self, engine: Member) -> None:
        self.rank, self.count, self.comm = engine.rank, engine.ranks, engine.comm

    def exchange(self, mine: Any) -> list[Any]:
        """Return what every rank gave, in rank order. The values travel as JSON, so tuples become lists."""
        return exchange(self.comm, mine)

    def all_do(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank and share the results.

        Raises:
            The error of this rank's own work; or, where another rank failed, an error of the same kind that names it.
        """
        results, error = self.all_try(work)
        if error is not None:
            raise error
        return results

    def all_try(self, work: Callable[[], T]) -> tuple[list[T], BaseException | None]:
        """Do as :meth:`all_do`, with the error returned: either None on every rank, or an error on every rank."""
        own: BaseException | None = None
        mine: dict[str, Any] = {}
        try:
            mine["result"] = work()
        except BaseException as error:  # a KeyboardInterrupt, too, must reach the others before it goes on here
            own = error
            mine = {"kind": type(error).__name__, "said": str(error) or type(error).__name__}
        every = self.exchange(mine)
        if own is not None:
            return [], own
        for rank, one in enumerate(every):
            if "said" in one:
                return [], _KINDS.get(one["kind"], CheckpointError)(f"rank {rank}: {one['said']}")
        return [one["result"] for one in every], None

    def only_rank_0(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0; every rank gets its result, or an error."""
        return cast(T, self.all_do(lambda: work() if self.rank == 0 else None)[0])


def job_of(engine: Any) -> Ranks:
    """Return all ranks of the job that an engine belongs to: they step together, and fail together."""
    return _all_of(engine.comm if engine.job is None else engine.job)


def _all_of(comm: Any) -> Ranks:
    return Ranks(_JobMember(0, 1, None) if comm is None else _JobMember(comm.rank, comm.ranks, comm))


def in_the_whole_job(comm: Any, work: Callable[[], T]) -> T:
    """Return what ``work`` returns on this rank. Where it fails on one stage of a pipeline, it fails on all: the others would
    wait for that stage. ``comm``: all ranks of the job; None: there are no stages."""
    if comm is None:
        return work()
    done: list[T] = []
    of_all_ranks(comm, lambda: done.append(work()))
    return done[0]


def of_all_ranks(comm: Any, work: Callable[[], T]) -> list[T]:
    """Return what ``work`` returns on each rank, in their order, as JSON has it. Where it fails on one rank, it fails on all."""
    return _all_of(comm).all_do(work)


@dataclass(frozen=True)
class _JobMember:
    """This rank among all ranks of the job."""

    rank: int
    ranks: int
    comm: Any
