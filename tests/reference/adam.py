# SPDX-License-Identifier: Apache-2.0
"""Adam as its papers state it, in float64: written to be read, not to be fast.

Kingma & Ba 2015, "Adam: A Method for Stochastic Optimization", algorithm 1; the decoupled decay of Loshchilov &
Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2; the maximum of Reddi, Kale & Kumar 2018, "On the
Convergence of Adam and Beyond", algorithm 2 (as torch has it: the maximum of the uncorrected second moment).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class State:
    """theta, m, v and v-hat-max of the papers; all float64."""

    theta: Tensor
    m: Tensor
    v: Tensor
    v_max: Tensor


def start(theta: Tensor) -> State:
    """Return the state with m_0 = 0, v_0 = 0."""
    theta = theta.double()
    return State(theta.clone(), torch.zeros_like(theta), torch.zeros_like(theta), torch.zeros_like(theta))


def step(
    s: State,
    gradient: Tensor,
    t: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    amsgrad: bool = False,
    maximize: bool = False,
) -> State:
    """Return the state after update number t."""
    g = gradient.double()
    if maximize:
        g = -g
    theta = s.theta
    if decoupled:
        theta = theta - lr * weight_decay * theta
    else:
        g = g + weight_decay * theta
    m = beta1 * s.m + (1 - beta1) * g
    v = beta2 * s.v + (1 - beta2) * g * g
    v_max = torch.maximum(s.v_max, v)
    m_hat = m / (1 - beta1**t)
    v_hat = (v_max if amsgrad else v) / (1 - beta2**t)
    theta = theta - lr * m_hat / (v_hat.sqrt() + eps)
    return State(theta, m, v, v_max)
