# SPDX-License-Identifier: Apache-2.0
"""Steps before and after the all-to-all of a mixture of experts: row counts of each rank, and rows of several ranks by expert.

With E experts on R ranks, rank r has experts r E / R and on. A buffer of ``moe_plan`` lies in the order of experts, so what
goes to a rank is one slice of it; what arrives lies in the order of ranks, and within each in the order of experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zeropp.ops import checks
from zeropp.ops.moe import MoePlan, moe_plan

__all__ = ["MoeExchange", "moe_exchange", "moe_share"]


class MoeExchange(NamedTuple):
    """The layout of one rank's all-to-all, for ``torch.distributed.all_to_all_single``."""

    send_splits: list[int]
    """Rows to each rank: ``input_split_sizes`` on the way to the experts, ``output_split_sizes`` on the way back."""
    receive_splits: list[int]
    """Rows from each rank: the other way round."""
    plan: MoePlan
    """Of the rows that arrive: ``moe_dispatch`` groups them by expert, ``moe_combine`` puts them back in order."""
    counts: Tensor
    """(E / R,) int64: rows of each of this rank's experts, in the order of the grouped buffer."""


def moe_exchange(kept: Tensor, received: Tensor) -> MoeExchange:
    """The layout of a dropless all-to-all, from counts that were exchanged first.

    Args:
        kept: (E,) int64, ``moe_plan(...).kept``: rows of each expert that this rank sends.
        received: (R, E / R) int64: what each rank sends to each of this rank's experts; ``kept`` after an
            ``all_to_all_single`` of equal parts.

    Raises:
        TypeError, ValueError: a wrong argument, or a negative count.
    """
    name = "zeropp.ops.moe_exchange"
    for label, counts, dims in (("kept", kept, 1), ("received", received, 2)):
        checks.check_tensor(name, label, counts, checks.BOTH)
        if counts.dtype != torch.int64 or counts.dim() != dims:
            raise ValueError(
                f"{name}: {label} is {counts.dtype} {tuple(counts.shape)}, wanted int64 of {dims} dimensions"
            )
    ranks = received.shape[0]
    if kept.numel() != received.numel() or not ranks or not kept.numel():
        raise ValueError(
            f"{name}: received is {tuple(received.shape)}, wanted (R, E / R) with E = {kept.numel()}, the experts of kept"
        )
    if min(int(kept.min()), int(received.min())) < 0:
        raise ValueError(f"{name}: a count is negative, wanted numbers of rows")
    experts = torch.arange(received.shape[1], dtype=torch.int32, device=received.device).repeat(ranks)
    plan = moe_plan(torch.repeat_interleave(experts, received.flatten())[:, None], received.shape[1])
    return MoeExchange(kept.view(ranks, -1).sum(1).tolist(), received.sum(1).tolist(), plan, plan.kept)


def moe_share(tokens: int, rank: int, ranks: int) -> slice:
    """The tokens that one rank routes where a tensor-parallel group holds the same ones: duplicate-token dropping.

    Each rank of the group gates, sends and combines ``x[share]`` only, so that the all-to-all moves every token once, and an
    all-gather over the group makes the output whole (TED, Singh et al. 2023, section 5).

    Args:
        tokens: how many the group has; shares differ by at most one.
        rank: in the group, 0 <= rank < ranks.
        ranks: of the group.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    name = "zeropp.ops.moe_share"
    for label, value in (("tokens", tokens), ("rank", rank), ("ranks", ranks)):
        checks.check_whole(name, label, value)
    if tokens < 0 or not 0 <= rank < ranks:
        raise ValueError(f"{name}: tokens {tokens}, rank {rank} of {ranks}; wanted tokens >= 0 and 0 <= rank < ranks")
    return slice(tokens * rank // ranks, tokens * (rank + 1) // ranks)
