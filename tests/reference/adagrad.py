# SPDX-License-Identifier: Apache-2.0
"""Adagrad in its diagonal form, in float64: written to be read, not to be fast.

Duchi, Hazan & Singer 2011, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", figure 1
with diagonal matrices; the falling learning rate and the L2 penalty are torch.optim.Adagrad's.

    g_t = gradient + lambda x_{t-1}
    G_t = G_{t-1} + g_t^2
    x_t = x_{t-1} - eta / (1 + (t - 1) gamma) * g_t / (sqrt(G_t) + eps)
"""

from __future__ import annotations

from torch import Tensor


def step(
    x: Tensor,
    total: Tensor,
    gradient: Tensor,
    t: int,
    *,
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return x_t and G_t."""
    x, g = x.double(), gradient.double() + weight_decay * x.double()
    total = total.double() + g * g
    return x - lr / (1 + (t - 1) * lr_decay) * g / (total.sqrt() + eps), total
