# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts as its papers state it, in float64 and loops over tokens: written to be read, not to be fast.

Shazeer et al. 2017 (top-k gating), GShard (Lepikhin et al. 2021, algorithm 1: capacity, first choices before second
ones), Switch (Fedus et al. 2022, equations 4 to 6: balance loss), ST-MoE (Zoph et al. 2022, equation 5: z loss):

    s_t = softmax(x_t) or sigmoid(x_t);   w_tj = s of the j-th best expert [over their sum]
    balance = E sum_e f_e P_e,  f_e = share of assignments,  P_e = mean_t s_te / sum_e s_te
    z = mean_t (log sum_e exp x_te)^2
    y_t = sum_j w_tj Expert_{e_tj}(x_t), without the assignments to a full expert
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def choose(by: list[float], k: int) -> list[int]:
    """Return the k largest, largest first, ties to the lower index."""
    return sorted(range(len(by)), key=lambda e: (-by[e], e))[:k]


def gate(
    x: Tensor, k: int, *, sigmoid: bool = False, normalise: bool = True, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights (T, k), chosen (T, k), balance and z loss; differentiable by torch's own autograd."""
    x = x.double()
    tokens, experts = x.shape
    by = x.detach() if bias is None else (x.detach().float() + bias.float())
    chosen = torch.tensor([choose(row, k) for row in by.tolist()], dtype=torch.long).reshape(tokens, k)
    s = torch.sigmoid(x) if sigmoid else torch.softmax(x, dim=1)
    weights = torch.stack([s[t, chosen[t]] for t in range(tokens)]) if tokens else s.new_zeros(0, k)
    if normalise:
        weights = weights / weights.sum(1, keepdim=True)
    share = torch.tensor([(chosen == e).sum().item() for e in range(experts)], dtype=torch.double) / (tokens * k)
    balance = experts * (share * (s / s.sum(1, keepdim=True)).mean(0)).sum()
    return weights, chosen, balance, torch.logsumexp(x, 1).square().mean()


def keep(chosen: list[list[int]], experts: int, capacity: int | None) -> list[list[bool]]:
    """Return which assignments find room: all first choices in order of tokens, then all second ones."""
    room = [len(chosen) * experts if capacity is None else capacity] * experts
    kept = [[False] * len(row) for row in chosen]
    for j in range(len(chosen[0]) if chosen else 0):
        for t, row in enumerate(chosen):
            if room[row[j]] > 0:
                room[row[j]] -= 1
                kept[t][j] = True
    return kept


def layer(
    x: Tensor, weights: Tensor, chosen: list[list[int]], kept: list[list[bool]], expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Return y_t, token by token."""
    rows = []
    for t, row in enumerate(chosen):
        y = torch.zeros_like(x[t])
        for j, e in enumerate(row):
            if kept[t][j]:
                y = y + weights[t, j] * expert(e, x[t])
        rows.append(y)
    return torch.stack(rows) if rows else x.clone()
