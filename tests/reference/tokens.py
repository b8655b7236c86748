# SPDX-License-Identifier: Apache-2.0
"""Random token dropping as its paper states it (Yao et al. 2022, random-LTD), in loops over tokens.

gather   part_bk = full_b,kept(bk)
scatter  out_bs = part_bk where s = kept(bk), else full_bs
sample   SplitMix64 and Lemire's choice below a bound (csrc/ops/random.h), selection sampling (Knuth 3.4.2 S)
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 2**64 - 1


class SplitMix64:
    """Steele, Lea & Flood 2014."""

    def __init__(self, state: int) -> None:
        self.state = state & MASK

    def next(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, bound: int) -> int:
        """Return one of 0 .. bound - 1, all equally likely: products whose low half would favour some are drawn again."""
        while True:
            product = (self.next() >> 32) * bound
            if (product & 0xFFFFFFFF) >= 2**32 % bound:
                return product >> 32


def sample(batch: int, seq: int, keep: int, seed: int, layer: int) -> list[list[int]]:
    """Return the kept positions of every sample."""
    result = []
    for b in range(batch):
        draw = SplitMix64(SplitMix64(SplitMix64(seed).next() ^ layer).next() ^ b)
        kept: list[int] = []
        for s in range(seq):
            if len(kept) < keep and draw.below(seq - s) < keep - len(kept):
                kept.append(s)
        result.append(kept)
    return result


def gather(full: Tensor, kept: Tensor) -> Tensor:
    """Return part_bk = full_b,kept(bk)."""
    return torch.stack([torch.stack([full[b, s] for s in row]) for b, row in enumerate(kept.tolist())])


def scatter(full: Tensor, part: Tensor, kept: Tensor) -> Tensor:
    """Return out_bs = part_bk where s = kept(bk), else full_bs."""
    rows = []
    for b, row in enumerate(kept.tolist()):
        rows.append(torch.stack([part[b, row.index(s)] if s in row else full[b, s] for s in range(full.shape[1])]))
    return torch.stack(rows)
