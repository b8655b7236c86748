# SPDX-License-Identifier: Apache-2.0
"""A model on a GPU whose shards are on the host: what else than training there is. tests/sim/test_sim_offload.py has the training."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from ranks import of_all_ranks, on_ranks
from zeropp.zero.engine import engine_of

WIDTH = 32


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))


def prepared(stage: int = 3, **offload: Any) -> tuple[torch.nn.Module, Any]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kinds = {"optimizer": "cpu", **({"params": "cpu"} if stage == 3 else {}), **offload}
    return zeropp.prepare(
        model, optimizer, zeropp.Config(stage=stage, offload=zeropp.Offload(**kinds), units=("Linear",))
    )


def step(model: torch.nn.Module, optimizer: Any, seed: int) -> float:
    torch.manual_seed(seed)
    loss = model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def folder_of_all() -> Path:
    return Path(of_all_ranks(tempfile.mkdtemp())[0])


@on_ranks(1, 2, devices=("sim-lazy",))
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_goes_on_where_it_was(stage: int) -> None:
    folder = folder_of_all()
    model, optimizer = prepared(stage)
    step(model, optimizer, 1)
    zeropp.save(folder / "one", model, optimizer, step=1)
    wanted = [step(model, optimizer, 2), step(model, optimizer, 3)]
    again, its = prepared(stage)
    zeropp.load(folder / "one", again, its)
    assert [step(again, its, 2), step(again, its, 3)] == wanted
    of_all_ranks(None)
    shutil.rmtree(folder, ignore_errors=True)


@on_ranks(1, 2, devices=("sim-lazy",))
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_are_read_and_written(stage: int) -> None:
    model, optimizer = prepared(stage)
    plain = {name: value.cpu() for name, value in build().state_dict().items()}
    with zeropp.gathered(model):
        assert all(torch.equal(p.detach().cpu(), plain[name]) for name, p in model.named_parameters())
    with zeropp.gathered(model, write=True), torch.no_grad():
        model[0].weight.fill_(0.5)
    found = zeropp.full_state_dict(model)
    assert torch.equal(found["0.weight"].cpu(), torch.full((WIDTH, WIDTH), 0.5, device="cpu"))
    assert torch.equal(found["2.weight"].cpu(), plain["2.weight"])
    before = step(model, optimizer, 1)
    assert step(model, optimizer, 1) < before


@on_ranks(1, 2, devices=("sim-lazy",))
def test_a_loss_is_evaluated_between_steps() -> None:
    model, optimizer = prepared()
    step(model, optimizer, 1)
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        before = model(x).square().mean()
    state = zeropp.full_state_dict(model)
    plain = build()
    plain.load_state_dict(state)
    assert float(before) == float(plain(x).square().mean())


@on_ranks(1, 2, devices=("sim-lazy",))
def test_gradients_are_shown_on_the_device() -> None:
    model, _ = prepared()
    torch.manual_seed(5)
    x = torch.randn(4, WIDTH)
    model(x).square().mean().backward()
    plain = build()
    plain(x).square().mean().backward()
    with zeropp.gathered(model, grads=True):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and p.grad.device.type == "sim"
            torch.testing.assert_close(p.grad, q.grad)


@on_ranks(1, 2, devices=("sim-lazy",))
def test_states_on_disk_have_the_bits_of_those_in_memory() -> None:
    folder = folder_of_all()
    losses = []
    for tier in ("cpu", zeropp.Tier("nvme", path=str(folder))):
        model, optimizer = prepared(optimizer=tier)
        losses.append([step(model, optimizer, seed) for seed in range(3)])
        del model, optimizer
    assert losses[0] == losses[1]


@on_ranks(2, devices=("sim",))
@pytest.mark.parametrize(
    "stage, offload",
    [(0, {}), (3, {"params": "device"}), (3, {"optimizer": "device"})],
    ids=["stage 0", "params on the device", "optimizer on the device"],
)
def test_what_does_not_work_yet_is_named(stage: int, offload: dict[str, Any]) -> None:
    with pytest.raises(zeropp.ConfigError, match=r"not supported yet; |needs|stage"):
        prepared(stage, **offload)


@on_ranks(2, devices=("sim",))
def test_whole_units_have_the_memory_of_two_and_what_is_read_ahead() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    offload = zeropp.Offload(params="cpu", optimizer="cpu")
    prefetch, grain = 4096, 4096  # of mapped memory on the simulated GPU
    zeropp.prepare(model, None, zeropp.Config(stage=3, offload=offload, units=("Linear",), prefetch=prefetch))
    unit = max(one.whole.nbytes for one in engine_of(model).units)
    model(torch.ones(2, WIDTH)).sum().backward()
    wanted = -(-(2 * unit + prefetch) // grain) * grain
    assert zeropp.memory(model)["device"]["gathered"]["held"] == wanted < 8 * unit


class Fails(torch.autograd.Function):
    """The identity. Its backward fails while ``now`` is true."""

    now = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Fails.now:
            raise RuntimeError("the backward fails")
        return gradient


@on_ranks(1, devices=("sim", "sim-lazy"))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_goes_on_after_a_backward_that_failed(stage: int) -> None:
    model, optimizer = prepared(stage)
    wanted = [step(model, optimizer, 1), step(model, optimizer, 2), step(model, optimizer, 3)]
    model, optimizer = prepared(stage)
    first = step(model, optimizer, 1)
    Fails.now = True
    with pytest.raises(RuntimeError, match="the backward fails"):
        model[2](Fails.apply(model[1](model[0](torch.ones(4, WIDTH))))).sum().backward()
    Fails.now = False
    optimizer.zero_grad()
    assert [first, step(model, optimizer, 2), step(model, optimizer, 3)] == wanted
