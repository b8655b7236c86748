# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention as its papers state it, in float64 over whole matrices: written to be read, not to be fast.

Child et al. 2019; Zaheer et al. 2020 (BigBird); Beltagy et al. 2020 (Longformer): softmax attention in which a mask of
blocks says which scores exist.

    s = scale q k^T,  p = softmax over visible keys (no row where there is none),  o = p v
    dv = p^T do,  dp = do v^T,  delta = rowsum(do o),  ds = p (dp - delta),  dq = scale ds k,  dk = scale ds^T q
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


def attend(q: Tensor, k: Tensor, v: Tensor, do: Tensor, visible: Tensor, scale: float) -> Attention:
    """Return the attention of (H, S, D) tensors and its gradients, for ``visible`` (H or 1, S, S)."""
    q, k, v, do = q.double(), k.double(), v.double(), do.double()
    s = scale * q @ k.transpose(1, 2)
    top = s.masked_fill(~visible, -torch.inf).amax(2, keepdim=True)
    e = torch.where(visible, torch.exp(s - torch.where(top.isinf(), 0.0, top)), 0.0)
    total = e.sum(2, keepdim=True)
    p = e / torch.where(total == 0, 1.0, total)
    o = p @ v
    dp = do @ v.transpose(1, 2)
    delta = (do * o).sum(2, keepdim=True)
    ds = p * (dp - delta)
    return Attention(s, p, o, dp, delta, scale * ds @ k, scale * ds.transpose(1, 2) @ q, p.transpose(1, 2) @ do)
