# SPDX-License-Identifier: Apache-2.0
"""The step of Adam with a given momentum and variance, in float64: written to be read, not to be fast.

Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", algorithm 1,
line 13, with AdamW's decay and Adam's corrections, and no movement where the variance is 0:

    x_{t+1} = x_t - gamma m_t / (sqrt(v) + eta)
"""

from __future__ import annotations

import torch
from torch import Tensor


def step(
    x: Tensor, m: Tensor, v: Tensor, *, step_size: float, variance_step: int, beta2: float = 0.999, eps: float = 1e-8,
    decay: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the new x, and what was subtracted from it beside its decay."""
    x, m, v = x.double(), m.double(), v.double()
    moved = step_size * m / ((v / (1 - beta2**variance_step)).sqrt() + eps)
    moved = torch.where(v == 0, torch.zeros_like(moved), moved)
    return x * (1 - decay) - moved, moved
