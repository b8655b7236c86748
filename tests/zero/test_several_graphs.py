# SPDX-License-Identifier: Apache-2.0
"""Several graphs in one backward: two forwards and one loss, as contrastive losses have, and layers that share their weights.

Values are those of plain torch. Whole units stay within the plan, and gradients are reduced while the backward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zeropp
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zeropp.zero.engine import engine_of

WIDTH, LAYERS = 64, 8
UNIT_BYTES = WIDTH * WIDTH * 4
DEVICES = ("cpu", "sim", "sim-lazy", "sim-offload")


def rows(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator("cpu").manual_seed(number), device="cpu").to(
        torch.get_default_device()
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


class BothWeights(torch.autograd.Function):
    """x @ a @ b, whose backward reads the weights of two units in one node, runs a nested backward, and reads them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, inner: nn.Module) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.inner = inner
        return inner(x) @ a @ b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            hidden = ctx.inner(again)
        torch.autograd.backward(hidden, gradient @ b.T @ a.T)
        hidden = hidden.detach()
        return again.grad, hidden.T @ (gradient @ b.T), (hidden @ a).T @ gradient, None


class Nested(nn.Module):
    """Its backward holds two units while nested backwards gather others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return BothWeights.apply(x, self.a.weight / 8, self.b.weight / 8, self.blocks)


def contrastive(model: nn.Module, step: int) -> Tensor:
    return (model(rows(step)) * model(rows(step + 100))).mean()


def three(model: nn.Module, step: int) -> Tensor:
    a, b, c = (model(rows(step + 100 * k)) for k in range(3))
    return (a * b).mean() + (b * c).mean() + c.square().mean()


def in_parts(model: nn.Module, step: int) -> Tensor:
    """Two graphs, one without the last blocks."""
    return (model(rows(step)) * model[: LAYERS // 2](rows(step + 100))).mean()


def checkpointed(reentrant: bool) -> Callable[[nn.Module, int], Tensor]:
    def loss(model: nn.Module, step: int) -> Tensor:
        ends = []
        for k in range(2):
            x = rows(step + 100 * k).requires_grad_()
            for block in model:
                x = checkpoint(block, x, use_reentrant=reentrant)
            ends.append(x)
        return (ends[0] * ends[1]).mean()

    return loss


class Albert(nn.Module):
    """Three blocks, each of which runs four times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            for block in self.blocks:
                x = block(x)
        return x


class PartlyUsed(nn.Linear):
    """A linear layer with a parameter that no forward uses, so its unit never has all its gradients."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.unused = nn.Parameter(torch.zeros(1))


def partly_used() -> nn.Sequential:
    model = stack()
    for block in model:
        linear = PartlyUsed()
        linear.weight.data.copy_(block.linear.weight.data)
        block.linear = linear
    return model


class WithHead(nn.Module):
    """A model whose loss reads the weight of its head outside of the head's forward, as chunked losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = stack(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], Tensor]]] = {
    "two forwards": (stack, contrastive),
    "three forwards": (stack, three),
    "a graph of half the model": (stack, in_parts),
    "checkpoints": (stack, checkpointed(False)),
    "reentrant checkpoints": (stack, checkpointed(True)),
    "blocks that run again": (Albert, lambda model, step: model(rows(step)).square().mean()),
    "parameters without gradients": (partly_used, lambda model, step: model(rows(step)).square().mean()),
    "a weight read outside": (WithHead, lambda model, step: (model(rows(step)) @ model.head.weight).square().mean()),
    "nested backwards": (Nested, contrastive),
}


def trained(
    make: Callable[[], nn.Module], loss_of: Callable[[Any, int], Tensor], config: zeropp.Config | None
) -> tuple[Any, Tensor]:
    """Return the model after three steps, and the losses of these."""
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if config:
        model, optimizer = zeropp.prepare(model, optimizer, config)
    losses = []
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, torch.stack(losses).cpu()


@on_ranks(2, devices=DEVICES)
@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("prefetch", [0, UNIT_BYTES])
def test_values_are_those_of_torch(case: str, prefetch: int) -> None:
    make, loss_of = LOSSES[case]
    plain, losses = trained(make, loss_of, None)
    if make is Nested:
        prefetch += 2 * LAYERS * UNIT_BYTES  # one node recomputes all blocks
    config = zeropp.Config(
        stage=3, host_copy="off", units=[PartlyUsed if make is partly_used else nn.Linear], prefetch=prefetch
    )
    model, ours = trained(make, loss_of, config)
    found = zeropp.full_state_dict(model)
    assert torch.equal(losses, ours)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name].cpu(), value.cpu(), rtol=1e-6, atol=1e-7, msg=name)


@on_ranks(2, devices=("cpu", "sim"))
@pytest.mark.parametrize("case", ["two forwards", "three forwards", "a graph of half the model", "checkpoints"])
@pytest.mark.parametrize("prefetch", [0, UNIT_BYTES])
def test_whole_units_stay_within_the_plan(case: str, prefetch: int) -> None:
    make, loss_of = LOSSES[case]
    config = zeropp.Config(stage=3, host_copy="off", units=[nn.Linear], prefetch=prefetch, bucket_bytes=2 * UNIT_BYTES)
    model, _ = trained(make, loss_of, config)
    assert engine_of(model).core.memory()["gathered_peak"] <= 2 * UNIT_BYTES + prefetch
    tier = "cpu" if torch.get_default_device().type == "cpu" else "device"
    assert zeropp.memory(model)[tier]["buckets_peak"]["held"] <= 4 * UNIT_BYTES


@on_ranks(2, devices=("cpu", "sim"))
@pytest.mark.parametrize("order", ["first", "last"])
def test_two_backwards_of_two_forwards(order: str) -> None:
    """The graphs are backpropagated one by one; the values of the second still hold."""

    def gradients(model: Any) -> None:
        losses = [model(rows(k)).square().mean() for k in range(2)]
        for loss in losses if order == "first" else reversed(losses):
            loss.backward()

    plain = stack()
    gradients(plain)
    config = zeropp.Config(stage=3, host_copy="off", units=[nn.Linear], prefetch=0, accumulate=2)
    model, optimizer = zeropp.prepare(stack(), None, config)
    gradients(model)
    assert optimizer is None
    for name, parameter in plain.named_parameters():
        found = zeropp.get_full(model.get_parameter(name), "grad")
        torch.testing.assert_close(found.cpu() * 2, parameter.grad.cpu(), rtol=1e-6, atol=1e-7, msg=name)
