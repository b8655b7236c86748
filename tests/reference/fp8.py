# SPDX-License-Identifier: Apache-2.0
"""8-bit floats as their paper states them (Micikevicius et al. 2022), by search among all values, not to be fast.

value of a code: (-1)^s 2^(e - bias) (1 + m / 2^M), or for e = 0: (-1)^s 2^(1 - bias) m / 2^M
e4m3: 4 exponent bits, bias 7, no infinity, NaN is s.1111.111;   e5m2: 5, bias 15, as IEEE
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GREATEST = {"e4m3": 448.0, "e5m2": 57344.0}
SHAPE = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}  # exponent bits, mantissa bits, bias


def value(code: int, form: str) -> float:
    """Return the value of a code."""
    exponent_bits, mantissa_bits, bias = SHAPE[form]
    sign = -1.0 if code & 0x80 else 1.0
    e, m = (code & 0x7F) >> mantissa_bits, code & (2**mantissa_bits - 1)
    if form == "e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if form == "e5m2" and e == 2**exponent_bits - 1:
        return sign * math.inf if m == 0 else math.nan
    return sign * 2.0 ** (max(e, 1) - bias) * ((e > 0) + m / 2**mantissa_bits)


def encode(x: float, form: str) -> int:
    """Return the nearest code, ties to the even one, clamped to the largest."""
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    a = min(abs(x), GREATEST[form])
    codes = [code for code in range(0x80) if math.isfinite(value(code, form))]
    best = min(codes, key=lambda code: (abs(value(code, form) - a), code & 1))
    return sign | best


def quantise(x: Tensor, form: str, block_elems: int) -> tuple[list[int], Tensor]:
    """Return codes and scales; fp32 arithmetic as csrc/ops/quant/fp8.h says, one operation at a time."""
    codes: list[int] = []
    scales = []
    for block in x.float().split(block_elems) if x.numel() else []:
        top = block.abs().max()
        if not bool(block.isfinite().all()):
            scales.append(torch.tensor(math.nan))
            codes += [0] * block.numel()
            continue
        scale = torch.maximum(top / torch.tensor(GREATEST[form]), torch.tensor(2.0**-126))
        scales.append(scale)
        codes += [encode(y, form) for y in (block * (1.0 / scale)).tolist()]
    return codes, torch.stack(scales) if scales else torch.empty(0)
