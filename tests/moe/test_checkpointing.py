# SPDX-License-Identifier: Apache-2.0
"""Selective checkpointing that keeps exchanges and routing, with a router that never gives the same twice; and opcheck."""

from __future__ import annotations

import functools

import torch
from ranks import on_ranks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

EXPERTS, K, WIDTH, CALL = 8, 2, 16, 1


@on_ranks(1, 2)
def test_exchanges_are_not_made_again(ranks: int) -> None:
    import torch.distributed as dist
    import zeropp
    from zeropp import moe

    torch.manual_seed(dist.get_rank())
    exchange = moe.Exchange(dist.group.WORLD)
    layer = exchange.layer("checkpointed")
    x = torch.randn(12, WIDTH, requires_grad=True)
    router = torch.randn(WIDTH, EXPERTS, requires_grad=True)
    seen: list[list[list[int]]] = []
    noise = torch.Generator().manual_seed(dist.get_rank())

    def block(x: torch.Tensor) -> torch.Tensor:
        logits = x @ router
        gate = zeropp.ops.moe_gate(logits, K, bias=torch.randn(logits.shape, generator=noise))
        seen.append(gate.chosen.tolist())
        rows, plan = moe.dispatch(torch.relu(x), gate.chosen, EXPERTS, exchange=exchange, layer=layer)
        return moe.combine(torch.tanh(rows), plan, gate.weights)

    def calls() -> int:
        """Return how many dispatches there were, this one included."""
        _, plan = moe.dispatch(x.detach(), torch.zeros(12, 1).long(), EXPERTS, exchange=exchange, layer=layer)
        return int(plan.numbers[CALL])

    context = functools.partial(create_selective_checkpoint_contexts, moe.keep_exchanges)
    y = checkpoint(block, x, use_reentrant=False, context_fn=context)
    grads = torch.autograd.grad(y.square().sum(), (x, router))
    assert calls() == 2  # one of the forward
    assert len(seen) == 2
    assert seen[0] == seen[1]  # the block ran twice, and routed alike
    noise.manual_seed(dist.get_rank())
    y = block(x)
    for kept, plain in zip(grads, torch.autograd.grad(y.square().sum(), (x, router)), strict=True):
        assert torch.equal(kept, plain)
    assert calls() == 4
    noise.manual_seed(dist.get_rank())
    fixed = torch.zeros(12, K).long()

    def routed(x: torch.Tensor) -> torch.Tensor:
        rows, plan = moe.dispatch(torch.relu(x), fixed, EXPERTS, exchange=exchange, layer=layer)
        return moe.combine(torch.tanh(rows), plan)

    checkpoint(routed, x, use_reentrant=False).sum().backward()
    assert calls() == 7  # plain checkpointing dispatches again


def test_opcheck() -> None:
    from zeropp import moe

    one = moe.Exchange()
    layer = one.layer("opcheck")
    x, chosen = (
        torch.randn(4, 6, requires_grad=True),
        torch.tensor([[0, 1], [2, -1], [1, 1], [3, 0]], dtype=torch.int32),
    )
    ops = torch.ops.zeropp
    # Each dispatch has a number of its own, so that two do not return the same, as the fourth of these utilities wants.
    same = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.moe_rows_dispatch.default, (x, chosen, 4, one.number, layer), test_utils=same)
    rows, plan = moe.dispatch(x.detach(), chosen, 4, exchange=one, layer=layer)
    weights = torch.rand(4, 2, requires_grad=True)
    places = (plan.taken, plan.slots, plan.numbers)
    made = rows.clone().requires_grad_()
    torch.library.opcheck(ops.moe_rows_combine.default, (made, weights, plan.anchor, *places, True, one.number))
    grad = torch.randn(4, 6)
    torch.library.opcheck(
        ops.moe_rows_combine_backward.default, (grad, rows, weights.detach(), *places, True, True, one.number)
    )
    torch.library.opcheck(ops.moe_rows_dispatch_backward.default, (rows, *places, one.number))
