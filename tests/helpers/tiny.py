# SPDX-License-Identifier: Apache-2.0
"""A small model, the ways of holding its parameters, and what many tests do with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import zeropp
from torch import Tensor, nn

MODES: dict[str, dict[str, Any]] = {
    "host copy": {"host_copy": "auto"},
    "gather": {"host_copy": "off", "prefetch": 0},
    "prefetch": {"host_copy": "off", "prefetch": 1 << 20},
}  # fmt: skip


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x * self.scalar).pow(2).mean()


def vector(step: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def sentence(act: Callable[[], Any], error: type[BaseException] = zeropp.Error) -> str:
    try:
        value = act()
    except error as caught:
        return f"{type(caught).__name__}: {caught}"
    raise AssertionError(f"accepted, and gave {value!r}")


def refused_step(optimizer: Any) -> str:
    """Return what a step says that is not taken: at once, or, where a GPU steps, when somebody asks how the step ended."""
    return sentence(lambda: (optimizer.step(), optimizer.flush()))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def values(model: nn.Module) -> list[Tensor]:
    with zeropp.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def unchanged(model: nn.Module, before: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True)), "weights changed"


def trains_on(model: nn.Module, optimizer: Any) -> None:
    """After a mistake the next good step works, and all ranks have the same weights."""
    before = values(model)
    optimizer.zero_grad()
    model(vector(7)).backward()
    optimizer.step()
    optimizer.zero_grad()
    after = values(model)
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    for value in after:
        everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, value)
        assert all(torch.equal(value, other) for other in everyone)
