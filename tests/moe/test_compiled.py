# SPDX-License-Identifier: Apache-2.0
"""Blocks with experts of other ranks, compiled in one graph: losses and gradients of the blocks as they are."""

from __future__ import annotations

from typing import Any

import moe_models
import pytest
import torch
import zeropp
from moe_models import batch, loss_of
from ranks import on_ranks


def trained(name: str, implementation: str, compiled: bool, **config: Any) -> tuple[float, dict[str, Any]]:
    model = moe_models.build(name, implementation)
    model, _ = zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(experts=2, **config))
    if compiled:
        for block in model.model.layers:
            block.mlp.compile(backend="aot_eager", fullgraph=True)
    loss = loss_of(model, batch(0, torch.distributed.get_rank()))
    loss.backward()
    return loss.item(), {n: zeropp.get_full(p, "grad") for n, p in model.named_parameters()}


@pytest.mark.parametrize("implementation", [pytest.param("grouped_mm", marks=pytest.mark.slow), "zeropp"])
@on_ranks(2)
def test_a_block_is_one_graph(implementation: str) -> None:
    torch._dynamo.reset()
    loss, gradients = trained("Mixtral", implementation, compiled=False)
    got, compiled = trained("Mixtral", implementation, compiled=True)
    assert abs(got - loss) <= 1e-6 * loss
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
