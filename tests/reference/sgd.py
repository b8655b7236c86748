# SPDX-License-Identifier: Apache-2.0
"""SGD with momentum, in float64: written to be read, not to be fast.

Sutskever, Martens, Dahl & Hinton 2013, "On the importance of initialization and momentum in deep learning", section 2,
in the form of torch.optim.SGD, where the learning rate multiplies the buffer and not the gradient:

    g = gradient + lambda p
    b = mu b + (1 - tau) g          (b = g in the first update)
    p = p - eta b                   (Nesterov: p - eta (g + mu b))
"""

from __future__ import annotations

from torch import Tensor


def step(
    p: Tensor,
    buffer: Tensor | None,
    gradient: Tensor,
    *,
    lr: float,
    momentum: float,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the new p and b; ``buffer`` None: the first update."""
    p, g = p.double(), gradient.double() + weight_decay * p.double()
    b = g if buffer is None else momentum * buffer.double() + (1 - dampening) * g
    return p - lr * (g + momentum * b if nesterov else b), b
