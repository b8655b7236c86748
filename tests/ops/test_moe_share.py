# SPDX-License-Identifier: Apache-2.0
"""Shares of tokens that a tensor-parallel group holds alike (TED): together they give what one rank gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from zeropp import moe, ops

EXPERTS, WIDTH, K = 6, 5, 2


def through_experts(x: Tensor, logits: Tensor, scale: Tensor) -> Tensor:
    """Expert e multiplies by scale[e]."""
    gate = ops.moe_gate(logits, K)
    rows, plan = moe.dispatch(x, gate.chosen, EXPERTS)
    parts = rows.tensor_split(plan.ends[:-1].long())
    made = torch.cat([part * factor for part, factor in zip(parts, scale, strict=True)])
    return moe.combine(made, plan, gate.weights)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_shares_of_duplicated_tokens_cover_each_once(ranks: int) -> None:
    torch.manual_seed(0)
    x, logits = torch.randn(17, WIDTH), torch.randn(17, EXPERTS)
    scale = torch.randn(EXPERTS, WIDTH)
    shares = [ops.moe_share(17, rank, ranks) for rank in range(ranks)]
    assert max(s.stop - s.start for s in shares) - min(s.stop - s.start for s in shares) <= 1
    pieces = [through_experts(x[s], logits[s], scale) for s in shares]
    assert torch.equal(torch.cat(pieces), through_experts(x, logits, scale))


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: ops.moe_share(5, 2, 2), ValueError, "rank 2 of 2; wanted tokens >= 0 and 0 <= rank < ranks"),
        (lambda: ops.moe_share(5.0, 0, 2), TypeError, "tokens is 5.0, wanted a whole number"),
    ],
)
def test_misuse_is_refused(call: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()
