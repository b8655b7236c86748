# SPDX-License-Identifier: Apache-2.0
"""The layout around an all-to-all: several ranks in one process, against the experts applied token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from zeropp import ops

EXPERTS, WIDTH, K = 6, 5, 2


def exchanged(parts: list[Tensor], splits: list[list[int]]) -> list[Tensor]:
    """Return the result of an all-to-all: the s-th slice of rank r goes to rank s."""
    slices = [part.split(sizes) for part, sizes in zip(parts, splits, strict=True)]
    return [torch.cat([slices[r][s] for r in range(len(parts))]) for s in range(len(parts))]


def through_experts(inputs: list[Tensor], gates: list[ops.MoeGate], scale: Tensor) -> list[Tensor]:
    """Expert e multiplies by scale[e]; each rank has EXPERTS / ranks of them."""
    ranks, here = len(inputs), EXPERTS // len(inputs)
    plans = [ops.moe_plan(gate, EXPERTS) for gate in gates]
    counts = exchanged([plan.kept for plan in plans], [[here] * ranks] * ranks)
    layouts = [ops.moe_exchange(plan.kept, got.view(ranks, here)) for plan, got in zip(plans, counts, strict=True)]
    sent = [ops.moe_dispatch(x, plan) for x, plan in zip(inputs, plans, strict=True)]
    arrived = exchanged(sent, [layout.send_splits for layout in layouts])
    back = []
    for rank, (rows, layout) in enumerate(zip(arrived, layouts, strict=True)):
        assert [len(rows)] == [sum(layout.receive_splits)] == [int(layout.counts.sum())]
        grouped = ops.moe_dispatch(rows, layout.plan)
        of_experts = grouped.split(layout.counts.tolist())
        made = torch.cat([part * scale[rank * here + e] for e, part in enumerate(of_experts)])
        back.append(ops.moe_combine(made, layout.plan))
    returned = exchanged(back, [layout.receive_splits for layout in layouts])
    return [ops.moe_combine(rows, plan, gate.weights) for rows, plan, gate in zip(returned, plans, gates, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_experts_of_several_ranks_are_the_loop_over_tokens(ranks: int) -> None:
    torch.manual_seed(ranks)
    scale = torch.randn(EXPERTS, WIDTH, requires_grad=True)
    inputs = [torch.randn(7 + 3 * rank, WIDTH, requires_grad=True) for rank in range(ranks)]
    logits = [torch.randn(len(x), EXPERTS) for x in inputs]
    if ranks == 2:
        logits[0][:, :3] -= 100.0  # all of rank 0's tokens go to rank 1: an empty slice
    gates = [ops.moe_gate(of_rank, K) for of_rank in logits]
    outputs = through_experts(inputs, gates, scale)
    grads = torch.autograd.grad(sum(y.square().sum() for y in outputs), [*inputs, scale])
    wanted = [
        (x[:, None] * scale[gate.chosen.long()] * gate.weights[..., None]).sum(1)
        for x, gate in zip(inputs, gates, strict=True)
    ]
    want_grads = torch.autograd.grad(sum(y.square().sum() for y in wanted), [*inputs, scale])
    for mine, want in zip([*outputs, *grads], [*wanted, *want_grads], strict=True):
        torch.testing.assert_close(
            mine, want, rtol=64 * 2.0**-24, atol=64 * 2.0**-24 * float(want.detach().abs().max())
        )


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_shares_of_duplicated_tokens_cover_each_once(ranks: int) -> None:
    torch.manual_seed(0)
    x, logits = torch.randn(17, WIDTH), torch.randn(17, EXPERTS)
    scale = torch.randn(EXPERTS, WIDTH)
    shares = [ops.moe_share(17, rank, ranks) for rank in range(ranks)]
    assert max(s.stop - s.start for s in shares) - min(s.stop - s.start for s in shares) <= 1
    pieces = [through_experts([x[s]], [ops.moe_gate(logits[s], K)], scale)[0] for s in shares]
    assert torch.equal(torch.cat(pieces), through_experts([x], [ops.moe_gate(logits, K)], scale)[0])


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: ops.moe_exchange([1], torch.zeros(1, 1)), TypeError, "kept is a list, wanted a tensor"),
        (
            lambda: ops.moe_exchange(torch.zeros(4), torch.zeros(2, 2)), ValueError,
            r"kept is torch.float32 \(4,\), wanted int64 of 1 dimensions",
        ),
        (
            lambda: ops.moe_exchange(torch.zeros(4).long(), torch.zeros(2, 3).long()), ValueError,
            r"received is \(2, 3\), wanted \(R, E / R\) with E = 4",
        ),
        (
            lambda: ops.moe_exchange(torch.zeros(4).long(), -torch.ones(2, 2).long()), ValueError,
            "a count is negative",
        ),
        (lambda: ops.moe_share(5, 2, 2), ValueError, "rank 2 of 2; wanted tokens >= 0 and 0 <= rank < ranks"),
        (lambda: ops.moe_share(5.0, 0, 2), TypeError, "tokens is 5.0, wanted a whole number"),
    ],
)  # fmt: skip
def test_misuse_is_refused(call: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()
