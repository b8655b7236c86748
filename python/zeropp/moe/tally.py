# SPDX-License-Identifier: Apache-2.0
"""Tokens that each expert of a layer was given, and the biases that move by them after every step of an optimizer.

With c_e tokens for expert e in the training passes since the last step, on all data ranks together (Wang et al. 2024, algorithm 1;
DeepSeek-V3, section 2.1.2):

    b_e <- b_e + rate * sign(mean(c) - c_e)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from zeropp.comm.collective import all_gather

BIAS = "e_score_correction_bias"


class Tally:
    """Counts of one layer. They are no buffers of a module: those are made equal on all ranks, and every rank counts its own tokens."""

    def __init__(self, experts: int) -> None:
        self.seen = torch.zeros(experts, dtype=torch.int64, device="cpu")
        """(E,): assignments in every pass."""
        self.trained = self.seen.clone()
        """(E,): assignments in training passes since the last step."""

    @torch.no_grad()
    def add(self, counts: Tensor, training: bool) -> None:
        """Add counts (E,) of a forward; what a checkpoint computes again inside backward was counted before."""
        if torch._C._current_graph_task_id() != -1:
            return
        self.seen = self.seen.to(counts.device) + counts
        if training:
            self.trained = self.trained.to(counts.device) + counts


class _Moved:
    """The bias of one module, and the module whose optimizer moves it."""

    def __init__(self, owner: nn.Module, tally: Tally, rate: float) -> None:
        self.owner, self.tally, self.rate = weakref.ref(owner), tally, rate

    def is_in(self, held: set[int]) -> bool:
        owner = self.owner()
        return owner is not None and any(id(parameter) in held for parameter in owner.parameters())


_moved: weakref.WeakKeyDictionary[nn.Module, _Moved] = weakref.WeakKeyDictionary()


def move_bias(module: nn.Module, owner: nn.Module, tally: Tally, rate: float) -> None:
    """Move the bias of a module after every step of an optimizer that has a parameter of ``owner``."""
    _moved[module] = _Moved(owner, tally, rate)
    _follow_steps()


@functools.cache
def _follow_steps() -> None:
    register_optimizer_step_post_hook(_after_step)


@torch.no_grad()
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    engine = getattr(optimizer, "_engine", None)
    if not _moved or (engine is not None and engine.accumulate > 1 and not engine.core.at_boundary):
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    due = [(module, one) for module, one in _moved.items() if one.is_in(held)]
    for (module, one), counts in zip(due, _of_data_ranks([one.tally.trained for _, one in due], engine), strict=True):
        bias = getattr(module, BIAS)
        counts = counts.to(bias.device, torch.float32)
        bias.view(-1).add_(torch.sign(counts.mean() - counts), alpha=one.rate)
        one.tally.trained.zero_()


def _of_data_ranks(counts: list[Tensor], engine: Any) -> list[Tensor]:
    """Return counts summed over the ranks that partition the model: a stage of a pipeline has layers of its own. Without an engine,
    over all ranks. Collective."""
    if engine is None or not counts:
        return summed(counts, dist.group.WORLD if dist.is_initialized() else None)
    own = torch.cat([one.cpu() for one in counts])
    every = own.new_empty(engine.ranks, len(own))
    all_gather(engine.comm, every, own)
    return list(every.sum(0).split([len(one) for one in counts]))


def summed(counts: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Return copies of counts, summed over a process group by one all-reduce; as they are without a group."""
    if not counts:
        return []
    joined = torch.cat([one.to(counts[0].device) for one in counts])
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(joined, group=group)
    return list(joined.split([len(one) for one in counts]))
