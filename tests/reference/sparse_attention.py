# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention as its papers state it, in float64 over whole matrices: written to be read, not to be fast.

Child et al. 2019; Zaheer et al. 2020 (BigBird); Beltagy et al. 2020 (Longformer): softmax attention in which a mask of
blocks says which scores exist.

    s = scale q k^T,  p = softmax over visible keys (no row where there is none),  o = (m p) v, with m of dropout or 1
    dv = (m p)^T do,  dp = m (do v^T),  delta = rowsum(do o),  ds = p (dp - delta),  dq = scale ds k,  dk = scale ds^T q
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Attention(NamedTuple):
    """The results of attention and its backward, (H, ...) of one sample."""

    s: Tensor
    p: Tensor
    o: Tensor
    dp: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def seen(mask: Tensor, block: int, seq: int, *, causal: bool, keys: Tensor | None) -> Tensor:
    """Return (H, S, S): query i of head h sees key j. ``mask`` is (H, blocks, blocks), ``keys`` (S,)."""
    heads = mask.shape[0]
    result = torch.zeros(heads, seq, seq, dtype=torch.bool)
    for h in range(heads):
        for i in range(seq):
            for j in range(seq):
                visible = bool(mask[h, i // block, j // block]) and not (causal and j > i)
                result[h, i, j] = visible and (keys is None or bool(keys[j]))
    return result


MASK = 2**64 - 1


def mixed(state: int) -> int:
    """Return what SplitMix64 (Steele, Lea & Flood 2014) draws next after ``state``."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def kept(seed: int, head: int, seq: int, dropout: float) -> Tensor:
    """Return (S, S) factors of dropout of one head, numbered over all samples: 0, or 1 / (1 - rate)."""
    below = min(int(dropout * 65536 + 0.5), 65535)
    result = torch.zeros(seq, seq, dtype=torch.float64)
    for i in range(seq):
        key = mixed(mixed(mixed(seed & MASK) ^ head) ^ i)
        for j in range(seq):
            draw = mixed((key + j // 4 * 0x9E3779B97F4A7C15) & MASK) >> 16 * (j % 4) & 0xFFFF
            result[i, j] = 0.0 if draw < below else 65536 / (65536 - below)
    return result


def attend(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, visible: Tensor, scale: float, keep: Tensor | None = None
) -> Attention:
    """Return the attention of (H, S, D) tensors and its gradients, for ``visible`` (H or 1, S, S); p and dp without ``keep``."""
    q, k, v, do = q.double(), k.double(), v.double(), do.double()
    m = torch.ones(()) if keep is None else keep
    s = scale * q @ k.transpose(1, 2)
    top = s.masked_fill(~visible, -torch.inf).amax(2, keepdim=True)
    e = torch.where(visible, torch.exp(s - torch.where(top.isinf(), 0.0, top)), 0.0)
    total = e.sum(2, keepdim=True)
    p = e / torch.where(total == 0, 1.0, total)
    o = (m * p) @ v
    dp = m * (do @ v.transpose(1, 2))
    delta = (do * o).sum(2, keepdim=True)
    ds = p * (dp - delta)
    return Attention(s, p, o, dp, delta, scale * ds @ k, scale * ds.transpose(1, 2) @ q, (m * p).transpose(1, 2) @ do)
