# SPDX-License-Identifier: Apache-2.0
"""LAMB as its paper states it, in float64: written to be read, not to be fast.

You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2:

    m_t = beta_1 m_{t-1} + (1 - beta_1) g_t,   v_t = beta_2 v_{t-1} + (1 - beta_2) g_t^2
    r_t = m_t / (1 - beta_1^t) / (sqrt(v_t / (1 - beta_2^t)) + eps)
    x_t = x_{t-1} - eta phi(|x|) / |r_t + lambda x| (r_t + lambda x)
"""

from __future__ import annotations

import math

from torch import Tensor


def step(
    x: Tensor, m: Tensor, v: Tensor, gradient: Tensor, *, t: int, lr: float, beta1: float = 0.9, beta2: float = 0.999,
    eps: float = 1e-6, weight_decay: float = 0.0, trust: tuple[float, float] = (0.0, 10.0),
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:  # fmt: skip
    """Return x_t, m_t, v_t, the update, and the ratio of norms within ``trust`` (1 where a norm is 0)."""
    x, m, v, g = x.double(), m.double(), v.double(), gradient.double()
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    update = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps) + weight_decay * x
    norm, size = math.sqrt(x.square().sum().item()), math.sqrt(update.square().sum().item())
    ratio = min(max(norm / size, trust[0]), trust[1]) if norm > 0 and size > 0 else 1.0
    return x - lr * ratio * update, m, v, update, ratio
