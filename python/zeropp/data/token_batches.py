# SPDX-License-Identifier: Apache-2.0
"""Batches by tokens in place of samples, with a learning rate that follows the size of the batch.

A micro-batch takes samples, one after the other, as long as their lengths sum to at most ``max_tokens`` (Vaswani et al. 2017, section
5.1). A step is a fixed number of micro-batches, so its number of samples varies. The learning rate is scaled by
(samples of the step / base_batch): linearly (Goyal et al. 2017) or by the square root (Krizhevsky 2014).
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from zeropp import elastic
from zeropp.errors import ConfigError, counted, shown

ORDERS = ("dataloader", "random", "seqlen")
SCALINGS = ("linear", "sqrt", "none")
_log = logging.getLogger(__name__)


class TokenBatchSampler(Sampler[list[int]]):
    """Micro-batches of at most ``max_tokens`` tokens: a ``batch_sampler`` for torch's DataLoader, the same steps at any number of ranks.

        lengths = zeropp.data.open_index("index").values("length")
        sampler = zeropp.data.TokenBatchSampler(lengths, max_tokens=8192, micro_batches=4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, sampler.lr_factor)

    Args:
        lengths: tokens of each sample, ``[samples]``: a tensor or a sequence of numbers.
        max_tokens: the most tokens of a micro-batch. Longer samples are left out, with a warning.
        micro_batches: a step, over all ranks; a multiple of their number. A step's loss is the mean over them.
        min_batch, max_batch: samples of a micro-batch. Where fewer than ``min_batch`` fit, the first of them is left out.
        order: in which samples are taken: "dataloader" (by number), "random", or "seqlen" (by rising length).
        scaling: of the learning rate: "linear", "sqrt" or "none".
        base_batch: the samples of a step for which the learning rate is meant; None: ``micro_batches``, as in DeepSpeed.
        seed: of the random order.
        step: the first step that it gives.
        rank, ranks: default: of the process group, or 0 and 1 without one.

    Attributes:
        places: which of a step's micro-batches are this rank's.
        step: of the next list; may be set. It counts on over passes of the dataset.
        steps_a_pass: of the dataset. Micro-batches that fill no step are left out.
        left_out: samples that no step has.

    ``iter(sampler)`` gives the rest of a pass. Memory and time are linear in the number of samples.

    Raises:
        zeropp.ConfigError: an argument that is not allowed, or too few samples for one step.
    """

    state_is_global = True

    def __init__(
        self,
        lengths: Tensor | Sequence[int],
        *,
        max_tokens: int,
        micro_batches: int,
        min_batch: int = 1,
        max_batch: int | None = None,
        order: str = "dataloader",
        scaling: str = "linear",
        base_batch: int | None = None,
        seed: int = 1234,
        step: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        numbers = {"max_tokens": max_tokens, "micro_batches": micro_batches, "min_batch": min_batch}
        numbers |= {
            name: one for name, one in (("max_batch", max_batch), ("base_batch", base_batch)) if one is not None
        }
        _check(numbers, {"order": (order, ORDERS), "scaling": (scaling, SCALINGS)})
        for name, value in (("seed", seed), ("step", step)):
            _check_number(name, value, 0)
        self.places, per_rank = _places(micro_batches, rank, ranks)
        sizes = torch.as_tensor(lengths)
        if sizes.dim() != 1 or not len(sizes) or not bool((sizes >= 0).all()):
            raise ConfigError(
                f"TokenBatchSampler: lengths of shape {list(sizes.shape)}; wanted one number >= 0 for each of one sample or more"
            )
        taken = _in_order(sizes, order, seed)
        fits = sizes[taken] <= max_tokens
        self._samples = taken[fits]
        self._cuts = _packed(sizes[self._samples], max_tokens, min_batch, max_batch or len(sizes))
        self.steps_a_pass = len(self._cuts) // micro_batches
        if not self.steps_a_pass:
            raise ConfigError(
                f"TokenBatchSampler: {counted(len(sizes), 'sample')} give {len(self._cuts)} micro-batches of at most {max_tokens} tokens, "
                f"and a step has {micro_batches}; take fewer micro_batches, or a smaller max_tokens"
            )
        whole = self._cuts[: self.steps_a_pass * micro_batches]
        self.batch_sizes = _step_sizes(whole, micro_batches)
        """Samples of each step of a pass."""
        self.left_out = len(sizes) - sum(self.batch_sizes)
        if not bool(fits.all()):
            _log.warning(
                "TokenBatchSampler: %d samples have more than %d tokens and are left out",
                int((~fits).sum()),
                max_tokens,
            )
        self._scaling, self._base = scaling, base_batch or micro_batches
        self._micro_batches, self._per_rank = micro_batches, per_rank
        self._step, self._micro = step, 0

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        _check_number("step", value, 0)
        self._step, self._micro = value, 0

    def __len__(self) -> int:
        """Return the lists of a pass of this rank."""
        return self.steps_a_pass * self._per_rank

    def __iter__(self) -> Iterator[list[int]]:
        last = (self._step // self.steps_a_pass + 1) * self.steps_a_pass
        while self._step < last:
            step, micro = self._step, self._micro
            self._step, self._micro = (step, micro + 1) if micro + 1 < self._per_rank else (step + 1, 0)
            yield self.of_step(step)[self.places[micro]]

    def of_step(self, step: int) -> list[list[int]]:
        """Return all micro-batches of a step, of all ranks."""
        first = step % self.steps_a_pass * self._micro_batches
        return [self._samples[begin:end].tolist() for begin, end in self._cuts[first : first + self._micro_batches]]

    def lr_factor(self, step: int) -> float:
        """Return what the learning rate of a step is multiplied by: for ``torch.optim.lr_scheduler.LambdaLR``."""
        share = self.batch_sizes[step % self.steps_a_pass] / self._base
        return {"linear": share, "sqrt": math.sqrt(share), "none": 1.0}[self._scaling]

    def state_dict(self) -> dict[str, Any]:
        """Return where the sampler stands."""
        return {"step": self._step, "micro": self._micro, "per_rank": self._per_rank}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a sampler of the same arguments stood.

        Raises:
            zeropp.ConfigError: it stood inside a step, and the number of ranks was another one.
        """
        if state["micro"] and state["per_rank"] != self._per_rank:
            raise ConfigError(
                f"TokenBatchSampler: the state is inside step {state['step']} of other ranks; save between steps, or set step"
            )
        self._step, self._micro = state["step"], state["micro"]


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"TokenBatchSampler: {name} {shown(value)} is not allowed; wanted a whole number >= {least}")


def _check(numbers: Mapping[str, int], choices: Mapping[str, tuple[str, tuple[str, ...]]]) -> None:
    for name, value in numbers.items():
        _check_number(name, value, 1)
    most, least = numbers.get("max_batch", numbers["min_batch"]), numbers["min_batch"]
    if most < least:
        raise ConfigError(f"TokenBatchSampler: max_batch {most} is below min_batch {least}; wanted at least it")
    for name, (said, allowed) in choices.items():
        if said not in allowed:
            raise ConfigError(f"TokenBatchSampler: {name} {shown(said)} is not allowed; wanted {', '.join(allowed)}")


def _places(micro_batches: int, rank: int | None, ranks: int | None) -> tuple[list[int], int]:
    """Return (which of a step's micro-batches are this rank's, how many)."""
    mine = [one.sequences.start for one in elastic.share(micro_batches, 1, rank=rank, ranks=ranks)]
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if micro_batches % ranks:
        raise ConfigError(
            f"TokenBatchSampler: {micro_batches} micro_batches cannot be shared evenly by {ranks} ranks; wanted a multiple of {ranks}"
        )
    return mine, len(mine)


def _step_sizes(cuts: Sequence[tuple[int, int]], micro_batches: int) -> list[int]:
    """Return how many samples each step has."""
    steps = (cuts[first : first + micro_batches] for first in range(0, len(cuts), micro_batches))
    return [sum(end - begin for begin, end in step) for step in steps]


def _in_order(sizes: Tensor, order: str, seed: int) -> Tensor:
    if order == "random":
        return torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    return torch.argsort(sizes, stable=True) if order == "seqlen" else torch.arange(len(sizes))


def _packed(sizes: Tensor, max_tokens: int, min_batch: int, max_batch: int) -> list[tuple[int, int]]:
    """Return the (begin, end) of each micro-batch: as many samples as fit; binary search in running sums, so linear in all."""
    sums = [0.0, *itertools.accumulate(sizes.tolist())]
    cuts, begin = [], 0
    while begin < len(sizes):
        end = min(bisect.bisect_right(sums, sums[begin] + max_tokens) - 1, begin + max_batch)
        if end - begin >= min_batch:
            cuts.append((begin, end))
            begin = end
        else:
            begin += 1
    return cuts
