# SPDX-License-Identifier: Apache-2.0
"""Which ranks work on one prepared model: those that partition it, and all those that step together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zeropp.comm.group import communicator, create, group_name, keep_for_group, link_to_job, timeout_of


@dataclass(frozen=True)
class JobRanks:
    """The ranks of a prepared model, as communicators (``_C.Comm``).

    Args:
        data: the ranks that partition each unit and average its gradients; None: this rank alone.
        job: all ranks that take a step together: they have one norm, one loss scale, and skip together. It contains the ranks of
            ``data``. None: those of ``data`` are all.
        stages: of the pipeline that these ranks are, as many in each.
    """

    data: Any = None
    job: Any = None
    stages: int = 1

    @property
    def all(self) -> Any:
        """Return the communicator of all ranks; None: this rank is alone."""
        return self.data if self.job is None else self.job


def world() -> JobRanks:
    """Return the ranks of whatever process group runs, all of them data ranks; start one where torchrun started this process."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return JobRanks()
        dist.init_process_group("zeropp")
    return JobRanks() if dist.get_world_size() == 1 else JobRanks(communicator())


def over(data: Sequence[int] | dist.ProcessGroup) -> JobRanks:
    """Return the ranks of a job in which these, this rank among them, partition one model. Collective over them."""
    every = world()
    mine = sub_communicator(data)
    return every if mine is every.data else JobRanks(mine, every.data)


def sub_communicator(ranks: Sequence[int] | dist.ProcessGroup, purpose: str = "") -> Any:
    """Return the ``_C.Comm`` of some ranks of the default group; None for one rank.

    It is made over the default group's store. Collective over those ranks at their first call; then kept for as long as the default
    group lives. Its messages give the ranks the numbers that they have in the job.

    Args:
        ranks: numbers of ranks in the default group, this rank's among them, in the order of the shards; or a group.
        purpose: words behind the ranks in messages, such as ``that share tokens``. Those ranks get a communicator for this alone, which
            calls need whose order among a coordinator's collectives is not fixed.

    Raises:
        ValueError: this rank is not among them, or one of them is twice there.
    """
    numbers = list(ranks) if isinstance(ranks, Sequence) else dist.get_process_group_ranks(ranks)
    me, every = dist.get_rank(), dist.get_world_size()
    if me not in numbers or len(set(numbers)) != len(numbers) or not 0 <= min(numbers) <= max(numbers) < every:
        raise ValueError(
            f"comm: a group of ranks {numbers} on rank {me} of {every}; wanted different ranks of the job, this one among them"
        )
    if len(numbers) == 1:
        return None
    if not purpose and numbers == list(range(every)):
        return communicator()
    behind = f" {purpose}" if purpose else ""
    return keep_for_group(dist.group.WORLD, f"ranks {numbers}{behind}", lambda store: _make(store, numbers, behind))


def _make(store: Any, numbers: list[int], behind: str) -> Any:
    group = dist.group.WORLD
    assert group is not None
    name = f"{group_name(group)}, ranks {', '.join(map(str, numbers))}{behind}"
    comm = create(store, numbers.index(dist.get_rank()), len(numbers), timeout_of(group), name)
    link_to_job(comm, numbers)
    return comm
