# SPDX-License-Identifier: Apache-2.0
"""One expert layer with the tokens, choices and experts of all ranks, and what a loop over tokens in fp64 makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from reference.moe_layer import moe_layer
from torch import Tensor

EXPERTS, K, WIDTH, INNER = 8, 3, 24, 16
EPS = 2.0**-24
#: fp32 against fp64: a result is a sum of at most K experts' sums of 2 INNER products of sums of WIDTH products, and a gradient by an
#: expert's weights one of as many rows as there are tokens.
BOUND = 64 * EPS


def _uneven(rank: int, ranks: int) -> tuple[int, Callable[[Tensor], Tensor]]:
    return 5 + 7 * rank, lambda chosen: chosen


def _one_without_tokens(rank: int, ranks: int) -> tuple[int, Callable[[Tensor], Tensor]]:
    return (0 if 0 < rank == ranks - 1 else 9), lambda chosen: chosen


def _none_for_the_last(rank: int, ranks: int) -> tuple[int, Callable[[Tensor], Tensor]]:
    return 6, lambda chosen: chosen % max(1, EXPERTS // ranks * (ranks - 1) or EXPERTS)


def _all_for_one(rank: int, ranks: int) -> tuple[int, Callable[[Tensor], Tensor]]:
    return 6, lambda chosen: torch.full_like(chosen, 5)


def _dropped(rank: int, ranks: int) -> tuple[int, Callable[[Tensor], Tensor]]:
    return 8, lambda chosen: torch.where(torch.rand(chosen.shape) < 0.5, -1, chosen)


CASES = {f.__name__[1:]: f for f in (_uneven, _one_without_tokens, _none_for_the_last, _all_for_one, _dropped)}


class Layer:
    """All ranks' tokens, choices and experts, which every rank makes from the same seed, and this rank's part."""

    def __init__(self, case: str, rank: int, ranks: int) -> None:
        torch.manual_seed(7)
        sizes = [CASES[case](r, ranks) for r in range(ranks)]
        self.x = [torch.randn(tokens, WIDTH) for tokens, _ in sizes]
        self.chosen = [change(torch.rand(tokens, EXPERTS).topk(K, 1)[1]) for tokens, change in sizes]
        self.weights = [torch.rand(tokens, K) for tokens, _ in sizes]
        self.grads = [torch.randn(tokens, WIDTH) for tokens, _ in sizes]
        self.gate_up = torch.randn(EXPERTS, 2 * INNER, WIDTH) * WIDTH**-0.5
        self.down = torch.randn(EXPERTS, WIDTH, INNER) * INNER**-0.5
        here = EXPERTS // ranks
        self.experts = slice(rank * here, (rank + 1) * here)
        first = sum(tokens for tokens, _ in sizes[:rank])
        self.tokens = slice(first, first + sizes[rank][0])
        self.rank = rank

    def here(self) -> list[Tensor]:
        """Return x, weights, gate_up and down of this rank, as leaves."""
        parts = (self.x[self.rank], self.weights[self.rank], self.gate_up[self.experts], self.down[self.experts])
        return [part.clone().requires_grad_() for part in parts]

    def run(self, leaves: list[Tensor], exchange: Any, layer: int) -> list[Tensor]:
        """Return y and the gradients of the leaves."""
        import zeropp

        x, weights, gate_up, down = leaves
        rows, plan = zeropp.moe.dispatch(x, self.chosen[self.rank], EXPERTS, exchange=exchange, layer=layer)
        made = torch.cat([
            torch.nn.functional.silu(part @ of[:INNER].t()) * (part @ of[INNER:].t()) @ out.t()
            for part, of, out in zip(rows.tensor_split(plan.ends[:-1].long().cpu()), gate_up, down, strict=True)
        ])  # fmt: skip
        y = zeropp.moe.combine(made, plan, weights)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.grads[self.rank], allow_unused=True)]

    def wanted(self) -> list[Tensor]:
        """Return the same of one process with all tokens and experts, in fp64."""
        joined = [torch.cat(parts).double().requires_grad_() for parts in (self.x, self.weights)]
        experts = [part.double().requires_grad_() for part in (self.gate_up, self.down)]
        y = moe_layer(joined[0], torch.cat(self.chosen), joined[1], *experts)
        grads = torch.autograd.grad(y, [*joined, *experts], torch.cat(self.grads).double())
        here = (self.tokens, self.tokens, self.tokens, self.experts, self.experts)
        return [whole[part] for whole, part in zip((y.detach(), *grads), here, strict=True)]


class OnDevice:
    """Tokens, weights and choices of a layer, on a device."""

    def __init__(self, case: str, dtype: torch.dtype, device: str) -> None:
        import torch.distributed as dist

        layer = Layer(case, dist.get_rank(), dist.get_world_size())
        rank = layer.rank
        self.leaves = [part.to(device).requires_grad_() for part in (layer.x[rank].to(dtype), layer.weights[rank])]
        self.chosen, self.grad = layer.chosen[rank].to(device), layer.grads[rank].to(device, dtype)

    def run(self, exchange: Any, number: int) -> list[torch.Tensor]:
        """Return rows, sums, and the gradients of tokens and weights, of experts that double."""
        import zeropp

        rows, plan = zeropp.moe.dispatch(self.leaves[0], self.chosen, EXPERTS, exchange=exchange, layer=number)
        y = zeropp.moe.combine(rows * 2, plan, self.leaves[1])
        return [rows, y, *torch.autograd.grad(y, self.leaves, self.grad)]
