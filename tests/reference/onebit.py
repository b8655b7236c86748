# SPDX-License-Identifier: Apache-2.0
"""One-bit compression with error feedback as 1-bit Adam states it, in float64: written to be read, not to be fast.

Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", section 4.2;
the scale is the mean magnitude, of all scales the one with the least squared error (its l1 form, as in signSGD with
error feedback, Karimireddy et al. 2019).

    worker i:  c_i = x_i + error_i,  send C[c_i] = mean|c_i| sign(c_i),  error_i = c_i - C[c_i]
    server:    c = mean_i C[c_i] + error,  send C[c],  error = c - C[c]
"""

from __future__ import annotations

import torch
from torch import Tensor


def compress(x: Tensor, error: Tensor, chunk_elems: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, the new error, and c."""
    c = x.double() + error.double()
    chunks = [chunk for chunk in c.split(chunk_elems) if chunk.numel()]
    values = [torch.where(chunk >= 0, 1.0, -1.0).double() * chunk.abs().mean() for chunk in chunks]
    value = torch.cat(values) if values else torch.zeros_like(c)
    return value, c - value, c


def server(values: list[Tensor], error: Tensor, chunk_elems: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same for the mean of what the workers sent."""
    return compress(torch.stack(values).mean(0), error, chunk_elems)
