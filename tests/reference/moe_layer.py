# SPDX-License-Identifier: Apache-2.0
"""A layer of experts as a loop over tokens and choices, in fp64 (Shazeer et al. 2017, equation 2; gated experts as in Mixtral).

    y_t = sum_j w_tj E_{c_tj}(x_t),   E(x) = (silu(G x) * U x) D

A choice of -1 is dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor


def moe_layer(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return y (T, W) for x (T, W), chosen and weights (T, k), gate_up (E, 2 I, W) and down (E, W, I)."""
    outputs = []
    for token, experts, factors in zip(x, chosen.tolist(), weights, strict=True):
        y = torch.zeros_like(token)
        for expert, factor in zip(experts, factors, strict=True):
            if expert < 0:
                continue
            gate, up = (gate_up[expert] @ token).chunk(2)
            y = y + factor * (down[expert] @ (gate * torch.sigmoid(gate) * up))
        outputs.append(y)
    return torch.stack(outputs) if outputs else torch.zeros_like(x)
