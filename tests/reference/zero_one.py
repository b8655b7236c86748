# SPDX-License-Identifier: Apache-2.0
"""A local step of 0/1 Adam on one rank, in float64: written to be read, not to be fast.

Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", algorithm 1, lines 3 to 5,
with Adam's corrections, AdamW's decay, and no movement where the variance is 0:

    m = beta1 m + (1 - beta1) g,   x = x - gamma m / sqrt(v + eps),   u = u + gamma m
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    x: Tensor
    m: Tensor
    u: Tensor
    anchor: Tensor
    moved: Tensor
    """What was taken from x beside its decay."""


def step(
    x: Tensor, g: Tensor, m: Tensor, v: Tensor, u: Tensor, anchor: Tensor, *, step_size: float, variance_step: int,
    beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, decay: float = 0.0,
) -> Step:  # fmt: skip
    x, v, anchor = x.double(), v.double(), anchor.double()
    m = beta1 * m.double() + (1 - beta1) * g.double()
    moved = step_size * m / ((v / (1 - beta2**variance_step)).sqrt() + eps)
    moved = torch.where(v == 0, torch.zeros_like(moved), moved)
    return Step(x * (1 - decay) - moved, m, u.double() + step_size * m, anchor * (1 - decay), moved)
