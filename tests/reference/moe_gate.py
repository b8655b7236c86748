# SPDX-License-Identifier: Apache-2.0
"""A layer of experts with capacity, drops and groups as the papers state it, in float64 and loops over tokens: written to be read.

GShard (Lepikhin et al. 2021, algorithm 1: the first choice before the second one, both weights divided by their sum), Switch (Fedus
et al. 2022: capacity, equation 4), DeepSpeed-MoE (Rajbhandari et al. 2022; sharded_moe.py: with k > 2 an expert keeps the tokens of
greatest score, and weights are divided by the sum over what was not dropped), DeepSeek-V3 (2024, section 2.1.2: groups of experts).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def route(
    logits: Tensor,
    k: int,
    *,
    sigmoid: bool = False,
    capacity: float | None = None,
    least: int = 4,
    by_score: bool = False,
    groups: tuple[int, int] | None = None,
    bias: Tensor | None = None,
    first_only: bool = False,
) -> tuple[list[dict[int, Tensor]], Tensor, list[int]]:
    """Return for every token its weight by expert, without those that were dropped; the balance loss; and counts by expert."""
    tokens, experts = logits.shape
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, 1)
    chosen = [
        best_experts(row, k, groups) for row in (scores.detach() if bias is None else scores.detach() + bias).tolist()
    ]
    counts = [sum(e in row for row in chosen) for e in range(experts)]
    kept = keep(chosen, scores.detach(), capacity, least, by_score)
    weights = []
    for t, row in enumerate(chosen):
        mine = {e: scores[t, e] for e in row if (t, e) in kept}
        total = sum(mine.values(), torch.zeros((), dtype=scores.dtype)) if k > 1 else 1.0
        weights.append({e: w / total for e, w in mine.items()})
    even = scores / scores.sum(1, keepdim=True)
    balance = torch.zeros((), dtype=scores.dtype)
    for e in range(experts):
        share = sum(row[0] == e for row in chosen) / tokens if first_only else counts[e] / (tokens * k)
        balance = balance + experts * share * even[:, e].mean()
    return weights, balance, counts


def best_experts(scores: list[float], k: int, groups: tuple[int, int] | None) -> list[int]:
    """Return the k best experts, best first, of the best groups alone."""
    experts = list(range(len(scores)))
    if groups is not None:
        size = len(scores) // groups[0]
        parts = [experts[g * size : (g + 1) * size] for g in range(groups[0])]
        parts.sort(key=lambda part: -sum(sorted((scores[e] for e in part), reverse=True)[:2]))
        experts = sorted(e for part in parts[: groups[1]] for e in part)
    return sorted(experts, key=lambda e: -scores[e])[:k]


def keep(
    chosen: list[list[int]], scores: Tensor, capacity: float | None, least: int, by_score: bool
) -> set[tuple[int, int]]:
    """Return the pairs (token, expert) that find a place."""
    tokens, experts = scores.shape
    k = len(chosen[0]) if chosen else 1
    places = tokens if capacity is None else max(least, math.ceil(capacity * k * tokens / experts))
    order = [(t, row[j]) for j in range(k) for t, row in enumerate(chosen)]  # all first choices come before second ones
    if by_score:
        order.sort(key=lambda pair: -float(scores[pair]))
    taken: list[tuple[int, int]] = []
    for t, e in order:
        if sum(one == e for _, one in taken) < places:
            taken.append((t, e))
    return set(taken)


def layer(x: Tensor, weights: list[dict[int, Tensor]], expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return y_t, token by token."""
    rows = []
    for t, row in enumerate(weights):
        y = torch.zeros_like(x[t])
        for e, weight in row.items():
            y = y + weight * expert(e, x[t])
        rows.append(y)
    return torch.stack(rows)
