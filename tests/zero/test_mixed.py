# SPDX-License-Identifier: Apache-2.0
"""Several prepared models in one backward: ranks that go through them in another order neither wait for
each other for ever nor mix them up."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LATE_S = 25.0
"""The ranks' time-out is 60 s."""


class Part(nn.Module):
    """Layers, and with `spare` one that no rank uses and one that rank 0 alone uses: both wait for the end of the backward, and so
    do all others, which are reduced after them."""

    def __init__(
        self, seed: int, width: int = 32, layers: int = 3, spare: bool = True, reentrant: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.unused = nn.Linear(width, width) if spare else None
        self.first_only = nn.Linear(width, width) if spare else None
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 0 and self.first_only is not None:
            x = x + self.first_only(x)
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x))
        return x


def parts(count: int, **shape: Any) -> list[nn.Module]:
    return [Part(10 + number, **shape) for number in range(count)]


def in_order(models: list[Any], crossed: bool) -> list[Any]:
    """Each rank begins with another one."""
    first = dist.get_rank() % len(models) if crossed else 0
    return models[first:] + models[:first]


def batch(step: int, width: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, width, generator=draw, requires_grad=True)


def wanted(models: list[nn.Module], steps: int, width: int) -> list[Tensor]:
    """torch alone: the mean of the ranks' gradients, and SGD. What no rank has a gradient of stays."""
    for step in range(steps):
        sum(model(batch(step, width)).square().mean() for model in models).backward()
        for parameter in (p for model in models for p in model.parameters()):
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mine = mine.cpu()  # gloo has no sums on a simulated GPU
            dist.all_reduce(mine)
            mine = mine.to(parameter.device)
            with torch.no_grad():
                parameter -= 0.1 * mine / dist.get_world_size()
            parameter.grad = None
    return [p.detach() for model in models for p in model.parameters()]


def equal_to_torch(count: int, crossed: bool, shape: dict[str, Any] | None = None, **config: Any) -> float:
    """Seconds of the steps."""
    shape = shape or {}
    width, steps = shape.get("width", 32), 3
    expected = wanted(parts(count, **shape), steps, width)
    pairs = []
    for model in parts(count, **shape):
        pairs.append(zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(**config)))
    began = time.monotonic()
    for step in range(steps):
        x = batch(step, width)
        sum(model(x).square().mean() for model, _ in in_order(pairs, crossed)).backward()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    took = time.monotonic() - began
    got = [value for model, _ in pairs for value in zeropp.full_state_dict(model).values()]
    if dist.get_rank() == 0:
        torch.testing.assert_close(got, [one.cpu() for one in expected], rtol=1e-5, atol=1e-6)
    assert took < LATE_S, took
    return took


@on_ranks(2)
def test_one_fails() -> None:
    """The end of the first model's backward raises on rank 0. Its peers do not wait for the other model there; steps go on."""
    pairs = [
        zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(stage=0)) for model in parts(3)
    ]
    weight = pairs[0][0].layers[0].weight
    kept, began = weight.data, time.monotonic()

    def break_it(_: Tensor) -> None:
        weight.data = torch.zeros(1, device=weight.device)  # so its gradient does not fit

    for fails in (False, dist.get_rank() == 0, False):
        x = batch(0, 32)
        if fails:
            x.register_post_accumulate_grad_hook(break_it)  # the last that happens before the ends
        loss = sum(model(x).square().mean() for model, _ in in_order(pairs, crossed=True))
        try:
            loss.backward()
            assert not fails
        except RuntimeError as error:
            assert fails and "assign a gradient" in str(error), error
            weight.data = kept
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    assert time.monotonic() - began < LATE_S


FULL = {"spare": False}
TIGHT = {"bucket_bytes": 1 << 14}  # less than three units: a backward waits for the slower rank
DEEP = {"width": 48, "layers": 6, **FULL}
OFF = {"stage": 3, "host_copy": "off"}
CASES: dict[str, Callable[[], Any]] = {
    "2 models": partial(equal_to_torch, 2, False, **OFF),
    "2 models, crossed": partial(equal_to_torch, 2, True, **OFF),
    "3 models, crossed": partial(equal_to_torch, 3, True, stage=3),
    "3 models, crossed, stage 2": partial(equal_to_torch, 3, True, stage=2),
    "2 models, crossed, stage 0": partial(equal_to_torch, 2, True, stage=0),
    "few buckets": partial(equal_to_torch, 2, False, DEEP, stage=2, **TIGHT),
    "few buckets, crossed": partial(equal_to_torch, 3, True, DEEP, **OFF, **TIGHT),
    "checkpoints inside, crossed": partial(equal_to_torch, 2, True, {"reentrant": True}, **OFF),
}


@on_ranks()
@pytest.mark.parametrize(
    "case, ranks",
    [
        *((case, 2) for case in CASES),
        *((case, 4) for case in ("2 models, crossed", "3 models, crossed", "few buckets, crossed")),
    ],
)
def test_equal_to_torch(case: str) -> None:
    CASES[case]()


@on_ranks(2, devices=("sim",))
def test_few_buckets_of_a_gpu() -> None:
    """There a unit without a place for its bucket gets memory of its own, and does not wait for a peer in another model."""
    CASES["few buckets, crossed"]()


@on_ranks("2 hosts")
def test_same_order_over_hosts() -> None:
    equal_to_torch(2, False, FULL, stage=3)


@on_ranks("2 hosts")
def test_crossed_over_hosts() -> None:
    """There, gathers and sums are collectives of one group: a crossed order is an error at once, that says so.

    The models have one shape, so only their numbers tell their weights apart. The second case: the first model has number 0, which is
    not named."""
    pairs = [
        zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(stage=3))
        for model in parts(2, **FULL)
    ]
    x, began = batch(0, 32), time.monotonic()
    try:
        sum(model(x).square().mean() for model, _ in in_order(pairs, crossed=True)).backward()
    except zeropp.CommError as error:
        assert "object 1 of model " in str(error) and "in the same order" in str(error), error
        assert time.monotonic() - began < LATE_S
        return
    raise AssertionError("one model's weights came for the other's")
