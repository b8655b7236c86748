# SPDX-License-Identifier: Apache-2.0
"""Moments in fewer bits, by their definition: written to be read, not to be fast.

Stochastic rounding to bf16; and block-wise dynamic quantisation (Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization", sections 2 and 1.3) with the levels of csrc/ops/moments/moments.h, here as a table: decade i of K has 2^i
equal steps from 8^(i-K) to 8^(i+1-K), and below the first one lies 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK = 256
Floats = npt.NDArray[np.float32]
MASK = (1 << 64) - 1


def levels(k: int) -> npt.NDArray[np.float64]:
    """Return level(0), level(1), ...: 2^k of them; k = 7 for magnitudes with a sign, 8 for those without."""
    table = [0.0]
    for decade in range(1, k):
        low, steps = 8.0 ** (decade - k), 2**decade
        table += [low * (1 + 7 * step / steps) for step in range(steps)]
    return np.array([*table, 1.0])


def _next(state: int) -> tuple[int, int]:
    """Return (new state, number) of SplitMix64."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def random_bits(seed: int, stream: int, step: int, moment: int, first: int, count: int) -> npt.NDArray[np.int64]:
    """Return 0 .. 65535 for each of ``count`` elements of a tensor from ``first`` on."""
    key = seed & MASK
    for number in (stream, step):
        key = _next(key)[1] ^ number
    key = (_next(key)[1] + moment * 0x9E3779B97F4A7C15) & MASK
    x = (np.arange(first, first + count, dtype=np.uint64) + np.uint64(key & 0xFFFFFFFF)) & np.uint64(0xFFFFFFFF)
    for shift, factor, add in ((16, 0x7FEB352D, 0), (15, 0x846CA68B, key >> 32)):
        x ^= x >> np.uint64(shift)
        x = (x + np.uint64(add)) & np.uint64(0xFFFFFFFF)
        x = (x * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return (x >> np.uint64(16)).astype(np.int64)


def bf16(values: Floats, random: npt.NDArray[np.int64]) -> Floats:
    """Round finite values to bf16: away from zero where random is at least 65536 less the part that bf16 lacks."""
    magnitude = np.abs(values).astype(np.float64)
    spacing = 2.0 ** np.maximum(np.floor(np.log2(np.where(magnitude > 0, magnitude, 1))) - 7, -126 - 7)
    below = np.floor(magnitude / spacing)
    up = np.floor((magnitude / spacing - below) * 65536) + random >= 65536
    rounded: Floats = np.copysign((below + up) * spacing, values).astype(np.float32)
    return rounded


def _position(share: Floats, k: int) -> npt.NDArray[np.int64]:
    """Return 65536 times the place of a share of the scale among the levels, each operation rounded to fp32."""
    borders = 8.0 ** np.arange(1 - k, 1)
    decade = np.searchsorted(borders, share, side="right")  # 0: below level(1)
    raised = share * np.exp2(3.0 * (k - decade)).astype(np.float32)  # 1 .. 8, exact
    f = (raised + np.float32(6)) * np.float32(1 / 7)
    far = np.rint(f * np.exp2(decade + 16.0).astype(np.float32)) - 65536
    near = np.rint(share * np.float32(2.0 ** (3 * (k - 1) + 16)))
    place: npt.NDArray[np.int64] = np.where(decade > 0, far, near).astype(np.int64)
    return place


def encode(values: Floats, k: int, random: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], np.float32]:
    """Return codes and scale of one block of finite values."""
    scale = np.float32(max(np.abs(values).max(), np.float32(2.0**-126)))
    share = np.minimum(np.abs(values) * (np.float32(1) / scale), np.float32(1)).astype(np.float32)
    codes = np.minimum((_position(share, k) + random) >> 16, 2**k - 1)
    codes = np.where((codes == 0) & (values != 0), 1, codes) if k == 8 else codes + 128 * np.signbit(values)
    return codes.astype(np.uint8), scale


def decode(codes: npt.NDArray[np.uint8], scale: np.float32, k: int) -> Floats:
    """Return the values of the codes of one block."""
    table = levels(k).astype(np.float32)
    if k == 8:
        return np.asarray(table[codes] * scale, dtype=np.float32)
    return np.asarray(np.where(codes >= 128, -table[codes & 127] * scale, table[codes & 127] * scale), dtype=np.float32)
