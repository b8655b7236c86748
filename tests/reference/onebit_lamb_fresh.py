# SPDX-License-Identifier: Apache-2.0
"""The fresh variance and the ratio of 1-bit LAMB for one tensor, in float64: written to be read, not to be fast.

Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence Speed",
algorithm 1, lines 10 to 14, with Adam's corrections, and 0 where the variance is 0; m and m before are scaled:

    g' = (m - beta1 m before) / (1 - beta1),   v' = beta2 v' + (1 - beta2) g'^2
    u  = m / (sqrt(v) + eps) + lambda x,       r  = max of (sqrt(v) + eps) / (sqrt(v') + eps)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Fresh:
    gradient: Tensor
    variance: Tensor
    """v'"""
    alone: Tensor
    """u without its decay"""
    update: Tensor
    below: Tensor
    """sqrt(v) + eps"""
    real: Tensor
    """sqrt(v') + eps"""
    ratio: Tensor


def fresh(
    x: Tensor, m: Tensor, before: Tensor, v: Tensor, v_fresh: Tensor, *, t: int, freeze_step: int, coefficient: float,
    beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0,
) -> Fresh:  # fmt: skip
    x, v, v_fresh = x.double(), v.double(), v_fresh.double()
    m, before = m.double() / coefficient, before.double() / coefficient
    gradient = (m - beta1 * before) / (1 - beta1)
    v_fresh = beta2 * v_fresh + (1 - beta2) * gradient**2
    below = (v / (1 - beta2 ** min(t, freeze_step))).sqrt() + eps
    real = (v_fresh / (1 - beta2**t)).sqrt() + eps
    seen = (v != 0).double()
    alone = m / (1 - beta1**t) / below * seen
    return Fresh(gradient, v_fresh, alone, alone + weight_decay * x, below, real, below / real * seen)
