# SPDX-License-Identifier: Apache-2.0
"""Tokens that several ranks hold alike are routed once (duplicate token dropping of DeepSpeed-TED, Singh et al. 2023, section 5.1).

The t ranks of tensor parallelism hold the same tokens. Each of them routes 1/t of these, and then they gather what came back, so that the
exchange carries each token once and each expert sees it once:

    take   (T, W) -> (T / t, W)   this rank's part of the rows
    join   (T / t, W) -> (T, W)   all parts, in order of the ranks

Each is the backward of the other one: gradients of rows that all ranks hold alike are alike too, so none of them is added up. The network
carries (t - 1) / t T rows to a rank for each join: one in the forward and one in the backward of a layer, and the weights of the tokens.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.comm.collective import all_gather
from zeropp.comm.job import sub_communicator
from zeropp.moe.hosts import register_operators

_numbers = itertools.count(1)
_sharers: weakref.WeakValueDictionary[int, Sharers] = weakref.WeakValueDictionary()


class Sharers:
    """The ranks that hold the same tokens, this one among them.

    Args:
        group: a mesh of one dimension, or a group. Collective over it. Rows on a GPU are gathered by its own all-gather.
    """

    def __init__(self, group: Any) -> None:
        self.group: Any = group if isinstance(group, dist.ProcessGroup) else group.get_group()
        self.members: list[int] = dist.get_process_group_ranks(self.group)
        self.comm: Any = sub_communicator(self.members, "that share tokens")
        self.ranks, self.rank = len(self.members), self.members.index(dist.get_rank())
        self.number = next(_numbers)
        _sharers[self.number] = self

    def part(self, tokens: int) -> slice:
        """Return which of so many tokens this rank routes; parts but the last ones have one size."""
        most = -(-tokens // self.ranks)
        return slice(min(tokens, most * self.rank), min(tokens, most * (self.rank + 1)))

    def take(self, rows: Tensor) -> Tensor:
        """Return this rank's part of rows (T, W) that all ranks hold alike. Differentiable."""
        result: Tensor = torch.ops.zeropp.moe_tokens_take.default(rows, self.number)
        return result

    def join(self, part: Tensor, tokens: int) -> Tensor:
        """Return the rows (T, W) of which each rank has its part. Differentiable. Collective."""
        result: Tensor = torch.ops.zeropp.moe_tokens_join.default(part, tokens, self.number)
        return result


def once(
    sharers: Sharers | None, routed: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:  # fmt: skip
    """Return ``routed(hidden, index, weights)`` of all tokens, where each rank routes those of its part alone.

    Args:
        sharers: None: every rank has tokens of its own.
    """
    if sharers is None or sharers.ranks == 1:
        return routed(hidden, index, weights)
    own = index[sharers.part(len(index))]
    return sharers.join(routed(sharers.take(hidden), own, sharers.take(weights)), len(hidden))


def _run_take(rows: Tensor, sharers: int) -> Tensor:
    return rows[_sharers[sharers].part(len(rows))].clone()


def _run_join(part: Tensor, tokens: int, sharers: int) -> Tensor:
    one = _sharers[sharers]
    most = -(-tokens // one.ranks)
    every = part.new_empty(one.ranks * most, part.shape[1])
    mine = (
        part.contiguous() if len(part) == most else torch.cat([part, part.new_zeros(most - len(part), part.shape[1])])
    )
    if part.is_cpu:
        all_gather(one.comm, every, mine)
    else:
        dist.all_gather_into_tensor(every, mine, group=one.group)
    return every[:tokens]


def _fake_take(rows: Tensor, sharers: int) -> Tensor:
    part = _sharers[sharers].part(rows.shape[0])
    return rows.new_empty((part.stop - part.start, rows.shape[1]))


def _fake_join(part: Tensor, tokens: int, sharers: int) -> Tensor:
    return part.new_empty((tokens, part.shape[1]))


def _take_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.tokens, ctx.sharers = inputs[0].shape[0], _sharers[inputs[1]]


def _take_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ctx.sharers.join(grad, ctx.tokens), None


def _join_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sharers = _sharers[inputs[2]]


def _join_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ctx.sharers.take(grad), None, None


_library = register_operators({
    "moe_tokens_take": ("(Tensor rows, int sharers) -> Tensor", _run_take, _fake_take),
    "moe_tokens_join": ("(Tensor part, int tokens, int sharers) -> Tensor", _run_join, _fake_join),
}, "CompositeExplicitAutograd")  # fmt: skip
torch.library.register_autograd("zeropp::moe_tokens_take", _take_backward, setup_context=_take_context, lib=_library)
torch.library.register_autograd("zeropp::moe_tokens_join", _join_backward, setup_context=_join_context, lib=_library)
JOIN: Any = torch.ops.zeropp.moe_tokens_join.default
