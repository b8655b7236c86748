# SPDX-License-Identifier: Apache-2.0
"""Training whose number of ranks changes: each rank's part of a batch of fixed size, and going on where a run stood.

torchrun starts the script anew whenever ranks come or go (``--nnodes MIN:MAX --max-restarts N``). What keeps the run one
run is that a step stays the same step: the same sequences in the batch, the same mean of their losses, whatever the number
of ranks. For a batch of B sequences, R ranks and micro-batches of at most m sequences, every rank does

    n = ceil(ceil(B / R) / m)      micro-steps,

and the mean over ranks and micro-steps (what ``Config(accumulate=n)`` gives) of ``weight * mean loss of the sequences`` is
the mean over the B sequences: ``weight = sequences in it * R * n / B``. B need not be a multiple of anything.
How a whole script looks: examples/elastic_gpt.py; the page: docs/elastic.md.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from zeropp.checkpoint.load import load
from zeropp.checkpoint.manifest import steps_in
from zeropp.comm.collective import Ranks
from zeropp.errors import ConfigError
from zeropp.zero.engine import engine_of

__all__ = ["MicroBatch", "place", "resume", "share"]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-step of one rank."""

    sequences: range
    """Which of the step's sequences, 0 to ``batch``. Never empty: a rank that has none left gets one again, of weight 0, because every
    rank does as many backwards."""
    weight: float
    """What the mean loss of these sequences is multiplied by before ``backward``."""


def place(model: nn.Module, micro_batch: MicroBatch) -> None:
    """Say which sequences of the step's batch the next forward of a prepared model works on.

    Call it before each forward of a loop over :func:`share` with ``Efficiency(token_drop=)``: the tokens that a layer keeps depend on a
    sequence's place in the batch. Without it sequences are numbered micro-step by micro-step, and rank by rank within each.
    """
    engine_of(model).clock.place = micro_batch.sequences.start


def share(batch: int, micro_batch: int, *, rank: int | None = None, ranks: int | None = None) -> list[MicroBatch]:
    """This rank's micro-steps of every step, alike for every step: ``len()`` of it is what ``Config(accumulate=)`` takes.

    Args:
        batch: sequences a step over all ranks; stays the same when the number of ranks changes.
        micro_batch: the most sequences in one forward, by what a rank's memory holds.
        rank, ranks: default: of the process group, or 0 and 1 without one.

    Raises:
        zeropp.ConfigError: a number that is not allowed, or fewer sequences than ranks.
    """
    rank, ranks = _place(rank, ranks)
    for name, value in (("batch", batch), ("micro_batch", micro_batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"elastic.share: {name} {value!r} is not allowed; wanted a whole number >= 1")
    if not 0 <= rank < ranks:
        raise ConfigError(f"elastic.share: rank {rank!r} of {ranks!r} is not allowed; wanted 0 <= rank < ranks")
    if batch < ranks:
        raise ConfigError(
            f"elastic.share: batch {batch} is less than the {ranks} ranks; raise it, or start fewer ranks (--nnodes MIN:{batch})"
        )
    begin, end = rank * batch // ranks, (rank + 1) * batch // ranks
    most = -(-batch // ranks)
    steps = -(-most // micro_batch)
    cuts = [begin + i * (end - begin) // steps for i in range(steps + 1)]
    parts = [range(low, high) for low, high in itertools.pairwise(cuts)]
    return [
        MicroBatch(sequences=part or range(begin, begin + 1), weight=len(part) * ranks * steps / batch)
        for part in parts
    ]


def _place(rank: int | None, ranks: int | None) -> tuple[int, int]:
    if (rank is None) != (ranks is None):
        raise ConfigError(f"elastic.share: rank={rank!r} with ranks={ranks!r}; give both, or neither")
    if rank is not None and ranks is not None:
        return rank, ranks
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1:
        raise ConfigError(
            f"elastic.share: {started} ranks were started and there is no process group yet; call "
            "torch.distributed.init_process_group('zeropp') first"
        )
    return 0, 1


def resume(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *, scheduler: Any = None, loader: Any = None
) -> dict[str, Any] | None:
    """:func:`zeropp.load` of the newest good checkpoint in ``path``; None where none was finished yet. Collective.

    A run that was ended before its first checkpoint starts over. Damaged checkpoints, and a folder with nothing but
    these, are treated as ``load`` does.
    """
    engine = engine_of(model)
    if not Ranks(engine).only_rank_0(lambda: bool(steps_in(Path(path)))):
        return None
    return load(path, model, optimizer, scheduler=scheduler, loader=loader)
