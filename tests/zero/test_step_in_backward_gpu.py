# SPDX-License-Identifier: Apache-2.0
"""A step inside the backward on shards that a GPU holds: the bits of the step after it, the memory of gradients, and what fails."""

from __future__ import annotations

import ctypes
import gc
import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import of_all_ranks, on_ranks
from torch import nn
from zeropp import Comm, Precision

WIDTH, LAYERS, STEPS = 48, 5, 4
SELDOM = pytest.mark.slow


class Model(nn.Module):
    """Layers, of which the first is used twice, and every other batch leaves out the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.seldom = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, uses_all: bool = True) -> torch.Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = layer(x).tanh()
        return self.seldom(x) if uses_all else x


def prepared(make: Any = torch.optim.AdamW, **options: Any) -> tuple[Model, Any]:
    there = torch.get_default_device()
    with torch.device("cpu"):  # a lazy stream draws when it runs
        torch.manual_seed(0)
        model = Model().to(there)
    optimizer = make(model.parameters(), lr=1e-2)
    config = zeropp.Config(units=("Linear",), **{"prefetch": 1 << 17, **options})
    return zeropp.prepare(model, optimizer, config)


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(10 * number + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator, device="cpu").to(torch.get_default_device())


def train(model: Model, optimizer: Any, first: int = 0, steps: int = STEPS, micro: int = 1) -> list[float]:
    losses = []
    dtype = next(model.parameters()).dtype
    for number in range(first * micro, (first + steps) * micro):
        loss = model(batch(number).to(dtype), number % 2 == 0).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        if (number + 1) % micro == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [float(one) for one in losses]


def values(model: Model) -> dict[str, Any]:
    return {name: value.cpu() for name, value in zeropp.full_state_dict(model).items()}


CASES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, bf16": {"stage": 3, "precision": "bf16"},
    "stage 2, no master": {"stage": 2, "precision": Precision(param="bf16", master="bf16", state="int8")},
    "stage 3, accumulates": {"stage": 3, "accumulate": 3},
    "stage 1, accumulates": {"stage": 1, "accumulate": 2},
    "stage 3, few buckets": {"stage": 3, "bucket_bytes": 1},
    "stage 3, fewer bits": {"stage": 3, "comm": Comm(params="int8", grads="int8")},
}
OFTEN = ("stage 1", "stage 3", "stage 3, few buckets")
OPTIMIZERS = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True),
    "Lion": lambda params, lr: zeropp.optim.Lion(params, lr=lr),
    "RAdam": torch.optim.RAdam,
}


def check_same(make: Any = torch.optim.AdamW, **options: Any) -> None:
    found, wanted = prepared(make, step_in_backward=True, **options), prepared(make, **options)
    micro = options.get("accumulate", 1)
    assert train(*found, micro=micro) == train(*wanted, micro=micro)
    after = values(wanted[0])
    assert all(torch.equal(value, after[name]) for name, value in values(found[0]).items())


@on_ranks(1, 2, devices=("sim", "sim-lazy"))
@pytest.mark.parametrize("name", CASES)
def test_it_has_the_bits_of_the_step_after_the_backward(name: str) -> None:
    check_same(**CASES[name])


@on_ranks("2 hosts", devices=("sim", "sim-lazy"))
@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=SELDOM) for n in CASES])
def test_nccl_has_the_bits_of_the_step_after_the_backward(name: str) -> None:
    check_same(**CASES[name])


@on_ranks("2 hosts", devices=("sim-lazy",))
def test_nccl_with_steps_by_calls_of_torch() -> None:
    check_same(OPTIMIZERS["RAdam"], accumulate=2, bucket_bytes=1)


@on_ranks(2, devices=("sim-lazy",))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers(name: str) -> None:
    check_same(OPTIMIZERS[name])


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "RAdam, accumulates": ("RAdam", {"accumulate": 2, "bucket_bytes": 1}),
    "RAdam, stage 1": ("RAdam", {"stage": 1, "precision": "bf16"}),
    "Lion, states in bf16": ("Lion", {"precision": Precision(state="bf16")}),
}


@on_ranks(1, 2, devices=("sim-lazy",))
@pytest.mark.parametrize("name", CALLS)
def test_steps_by_calls_of_torch(name: str) -> None:
    make, options = CALLS[name]
    check_same(OPTIMIZERS[make], **options)


@on_ranks(2, "2 hosts", devices=("sim",))
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_have_the_memory_of_two_units(stage: int) -> None:
    model, optimizer = prepared(stage=stage, step_in_backward=True)
    train(model, optimizer)
    grads = zeropp.memory(model)["device"]["grads"]
    shard = max(unit.shard_elems for unit in model.layers[0].weight._zeropp.engine.units) * 4
    assert grads["held"] == 2 * shard < 6 * shard, grads


@on_ranks(1, 2, devices=("sim",))
def test_all_memory_is_given_back() -> None:
    sim: Any = importlib.import_module("sim")
    kept = []
    for _ in range(3):
        model, optimizer = prepared(step_in_backward=True)
        train(model, optimizer)
        del model, optimizer
        gc.collect()
        counts = (
            ctypes.c_int64 * 17
        )()  # struct sim_counts of tests/sim/sim.h: streams, events, .., blocks, block_bytes
        sim.driver.sim_get_counts(ctypes.byref(counts))
        kept.append([counts[at] for at in (9, 10, 13, 14)])
    assert kept[1] == kept[2] and kept[2][3] > 0, kept


@on_ranks(1, 2, devices=("sim", "sim-lazy"))
@pytest.mark.parametrize("make", ["AdamW", "RAdam"])
def test_a_gradient_that_is_not_finite(make: str) -> None:
    """Every rank raises, and only a load goes on."""
    folder = Path(of_all_ranks(tempfile.mkdtemp())[0])
    model, optimizer = prepared(getattr(torch.optim, make), step_in_backward=True)
    train(model, optimizer)
    zeropp.save(folder / "saved", model, optimizer, step=STEPS)
    wanted = train(model, optimizer, STEPS)
    zeropp.load(folder / "saved", model, optimizer)
    handle = model.layers[2].weight.register_hook(lambda gradient: gradient * float("inf"))
    model(batch(9)).square().mean().backward()
    handle.remove()
    said = r"'layers\.2\.weight'.* was not finite in this step or one before it; weights and optimizer state are inconsistent"
    with pytest.raises(zeropp.Error, match=said):
        optimizer.step()
        optimizer.flush()
    with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
        model(batch(9)).square().mean().backward()
    zeropp.load(folder / "saved", model, optimizer)
    assert train(model, optimizer, STEPS) == wanted
    of_all_ranks(None)
    shutil.rmtree(folder, ignore_errors=True)


@on_ranks(1, devices=("sim-lazy",))
def test_an_end_is_waited_for() -> None:
    """A host that does not wait for the GPU sees nothing of a gradient that is not finite."""
    sim: Any = importlib.import_module("sim")
    model, optimizer = prepared(step_in_backward=True)
    train(model, optimizer)
    optimizer.flush()
    (model(batch(9)) * float("nan")).square().mean().backward()
    optimizer.step()
    sim.driver.sim_leave_out_between(-1, sim.stream_number(torch.accelerator.current_stream().stream_id))
    try:
        optimizer.flush()
    finally:
        sim.driver.sim_leave_out_between(-2, 0)


@on_ranks(2, devices=("sim-lazy",))
def test_at_most_eight_steps_are_unknown() -> None:
    """Without a flush, the ninth step at the latest tells of the first."""
    model, optimizer = prepared(step_in_backward=True)
    handle = model.layers[2].weight.register_hook(lambda gradient: gradient * float("nan"))
    steps = 0
    with pytest.raises(zeropp.Error, match="inconsistent"):
        while steps < 12:
            model(batch(steps)).square().mean().backward()
            optimizer.step()
            steps += 1
    handle.remove()
    assert steps <= 8
    assert len(set(of_all_ranks(steps))) == 1
