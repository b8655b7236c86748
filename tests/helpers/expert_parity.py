# SPDX-License-Identifier: Apache-2.0
"""Losses, gradients, norm and values of a model under ``Config(experts=)`` against one process on the joined batch."""

from __future__ import annotations

from typing import Any

import moe_models
import torch
import zeropp
from moe_models import batch, loss_of
from ranks import of_all_ranks
from torch import Tensor

# Of the largest gradient of a parameter. One fp32 rounding is 6e-8; sums of some hundred products in another order, through two
# layers and back, stay below a hundred of them.
BOUND = 1e-5
STEPS = 2


def reference(
    name: str, ranks: int, steps: int = STEPS
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return losses, gradients of each step, and final values of one process on all ranks' batches."""
    model = moe_models.build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for step in range(steps):
        loss = loss_of(model, torch.cat([batch(step, rank) for rank in range(ranks)]))
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {n: p.detach().clone() for n, p in model.named_parameters()}


def compare(got: Tensor | None, wanted: Tensor, what: str) -> None:
    assert got is not None, what
    assert got.shape == wanted.shape, what
    error = (got.cpu() - wanted.cpu()).abs().max().item()
    assert error <= BOUND * max(wanted.abs().max().item(), 1e-3), (what, error, wanted.abs().max().item())


def parity(name: str, experts: Any, implementation: str = "grouped_mm", **more: Any) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses, gradients, values = reference(name, ranks)
    model = moe_models.build(name, implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(experts=experts, **more))
    for step in range(STEPS):
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        assert abs(sum(of_all_ranks(loss.item())) / ranks - losses[step]) <= BOUND * losses[step]
        for path, parameter in model.named_parameters():
            if path in gradients[step]:
                compare(zeropp.get_full(parameter, "grad"), gradients[step][path], f"step {step}: gradient of {path}")
        squares = sum(g.double().square().sum() for g in gradients[step].values())
        assert abs(optimizer.clip_grad_norm_(1e9) - squares**0.5) <= BOUND * squares**0.5
        optimizer.step()
        optimizer.zero_grad()
    whole = zeropp.full_state_dict(model)
    for path, value in values.items():
        compare(whole[path], value, f"value of {path}")
