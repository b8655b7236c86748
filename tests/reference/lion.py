# SPDX-License-Identifier: Apache-2.0
"""Lion as its paper states it, in float64: written to be read, not to be fast.

Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2:

    c_t     = beta_1 m_{t-1} + (1 - beta_1) g_t
    theta_t = theta_{t-1} - eta_t (sign(c_t) + lambda theta_{t-1})
    m_t     = beta_2 m_{t-1} + (1 - beta_2) g_t
"""

from __future__ import annotations

from torch import Tensor


def step(
    theta: Tensor, m: Tensor, gradient: Tensor, *, lr: float, beta1: float, beta2: float, weight_decay: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return theta_t, m_t, and c_t (whose sign moves theta)."""
    theta, m, g = theta.double(), m.double(), gradient.double()
    c = beta1 * m + (1 - beta1) * g
    return theta - lr * (c.sign() + weight_decay * theta), beta2 * m + (1 - beta2) * g, c
