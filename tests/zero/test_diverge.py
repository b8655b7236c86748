# SPDX-License-Identifier: Apache-2.0
"""Ranks whose control flow differs: each computes with the right weights, and gradients are the right means.

DeepSpeed's stage 3 pairs gathers by order: where rank 0 asks for layer b and rank 1 for layer c, both get halves of
the two glued together, and train on. Here a gather reads by unit and has no partner call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks
from tiny import MODES
from torch import Tensor, nn


class Siblings(nn.Module):
    """Layers of one shape, so that a mix-up would go unnoticed by shapes."""

    def __init__(self, width: int, order: Callable[[int], str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(width, width) for name in "abcd"})
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order(dist.get_rank()):
            x = torch.tanh(self.layers[name](x))
        return x.pow(2).mean()


ORDERS: dict[str, Callable[[int], str]] = {
    "another sibling": lambda rank: "ab" if rank % 2 else "ac",
    "the other way round": lambda rank: "abcd" if rank % 2 else "dcba",
    "more often": lambda rank: "abba" if rank % 2 else "ab",
    "nothing in common": lambda rank: "ab" if rank % 2 else "cd",
    "one layer only": lambda rank: "abcd" if rank % 2 else "a",
}


def run(order: str, mode: str, width: int = 128) -> None:
    torch.manual_seed(0)
    plain = Siblings(width, ORDERS[order])
    model = copy.deepcopy(plain)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = zeropp.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(units=("Linear",), **MODES[mode])
    )
    for step in range(4):
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(step))
        want, got = plain(x), model(x)
        assert torch.equal(want, got), f"step {step}: loss {got.item()}, with the right weights {want.item()}"
        want.backward()
        got.backward()
        _average(plain)
        with zeropp.gathered(model, grads=True):
            for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(p, q), (step, name)
                assert (q.grad is None) == (p.grad is None), (step, name)
                if p.grad is not None:
                    assert torch.equal(q.grad, p.grad), (step, name, (q.grad - p.grad).abs().max())
        sgd.step()
        sgd.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        _follow(plain, model)


def _follow(plain: nn.Module, model: nn.Module) -> None:
    """Both have made one step. Ours rounds twice where torch fuses, so the next pass of the plain one begins with our values."""
    with zeropp.gathered(model), torch.no_grad():
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=2**-22, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
            p.copy_(q)


def _average(model: nn.Module) -> None:
    """Average gradients as DDP with find_unused_parameters: a gradient that any rank has, all have; zeros where there was none."""
    for p in model.parameters():
        has = torch.tensor([float(p.grad is not None)])
        dist.all_reduce(has)
        if has.item() == 0:
            continue
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad.div_(dist.get_world_size())
        dist.all_reduce(p.grad)


@on_ranks(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ORDERS)
def test_ranks_that_run_other_modules(order: str, mode: str) -> None:
    run(order, mode)
