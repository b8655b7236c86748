# SPDX-License-Identifier: Apache-2.0
"""The model and data of the test of FSDP2, and what the CPU makes of them."""

from __future__ import annotations

import torch

STEPS, WIDTH, BLOCKS = 3, 64, 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))


def data(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(STEPS)]


def reference(ranks: int) -> list[list[float]]:
    """Return the losses of each rank on the CPU, with the mean of their gradients."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        for rank in range(ranks):
            loss = (model(data(rank)[step]) ** 2).mean()
            (loss / ranks).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
