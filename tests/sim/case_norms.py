# SPDX-License-Identifier: Apache-2.0
"""Compare the gradients of norms on the simulated GPU with those on the CPU, bit for bit. Print the names of those that differ."""

from __future__ import annotations

import json
from collections.abc import Callable

import sim
import torch
from torch import nn

WIDTH = 16
NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "LayerNorm without weight": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "BatchNorm": lambda: nn.BatchNorm1d(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
}


def gradients(norm: str, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = NORMS[norm]().to(dtype).to(device)
    x = torch.randn(4, WIDTH).to(dtype).to(device).requires_grad_()
    module(x).float().pow(2).mean().backward()
    return [tensor.grad.cpu() for tensor in (x, *module.parameters()) if tensor.grad is not None]


differs = [
    f"{norm} in {dtype}"
    for norm in NORMS
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not all(map(torch.equal, gradients(norm, dtype, "cpu"), gradients(norm, dtype, "sim")))
]
print(json.dumps({"differs": differs, "error": sim.first_error()}))
