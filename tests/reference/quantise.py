# SPDX-License-Identifier: Apache-2.0
"""Block quantisation as ZeRO++ (Wang et al. 2023, section 3.2) and ZeroQuant state it, in float64, block by block.

symmetric    scale = max |x| / L                L = 2^(bits - 1) - 1
asymmetric   scale = (max x - min x) / (2^bits - 1),  mid = (max x + min x) / 2
code = round((x - mid) / scale)                 value = code scale + mid
"""

from __future__ import annotations

import torch
from torch import Tensor


def blocks(x: Tensor, block_elems: int) -> list[Tensor]:
    """Return the array in blocks; the last may be shorter."""
    return list(x.double().split(block_elems)) if x.numel() else []


def scale_and_mid(block: Tensor, bits: int, asymmetric: bool) -> tuple[float, float]:
    """Return the exact scale and middle of one block."""
    if not asymmetric:
        return block.abs().max().item() / (2 ** (bits - 1) - 1), 0.0
    high, low = block.max().item(), block.min().item()
    return (high - low) / (2**bits - 1), (high + low) / 2


def unpack_nibbles(codes: Tensor, elems: int) -> Tensor:
    """Unpack signed 4-bit codes, two a byte, the even one in the low half."""
    wide = codes.to(torch.int16)
    nibbles = torch.stack([wide & 15, wide >> 4 & 15], dim=1).flatten()[:elems]
    return torch.where(nibbles > 7, nibbles - 16, nibbles)
