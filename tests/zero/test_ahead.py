# SPDX-License-Identifier: Apache-2.0
"""Steps that the host enqueues ahead of a GPU: those that the GPU skips before the host knows, and what is said of them later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks
from torch import nn

STEPS, BAD_STEPS = 7, (1, 2, 4)


def prepared(optimizer: str, **config: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    adam = zeropp.optim.Lion(model.parameters()) if optimizer == "Lion" else torch.optim.AdamW(model.parameters())
    config = {"units": [nn.Linear], **config}
    return zeropp.prepare(model, adam, zeropp.Config(**config))


def trained(optimizer: str, flushes: bool, stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """Train in fp16, where some losses overflow on the last rank, and return parameters, norms, and what is known at the end."""
    loss_scale = zeropp.LossScale(init=2.0**10, interval=2)
    model, adam = prepared(optimizer, stage=stage, precision="fp16", loss_scale=loss_scale)
    norms = []
    for step in range(STEPS):
        bad = step in BAD_STEPS and dist.get_rank() == dist.get_world_size() - 1
        loss = model(torch.full((2, 16), step / 8.0)).float().square().mean() * (1e6 if bad else 1.0)
        adam.backward(loss)
        norms.append(adam.clip_grad_norm_(0.5))
        adam.step()
        if flushes:
            adam.flush()
        adam.zero_grad()
    overflowed = bool(adam.overflow)
    adam.flush()
    engine = adam._engine
    known = (adam.loss_scale, overflowed, engine.clock.step, engine.scaler.skipped)
    known += tuple(int(unit.steps.sum()) for unit in engine.trained)
    return list(zeropp.full_state_dict(model).values()), norms, known


@on_ranks(1, 2, devices=("sim", "sim-lazy"))
@pytest.mark.parametrize("stage, optimizer", [(3, "AdamW"), (0, "AdamW"), (2, "Lion")])
def test_skipped_steps_that_the_host_does_not_know_of(stage: int, optimizer: str) -> None:
    """Adam's rates are those of the steps that were taken, whether the host knew them or not. So all bits are equal."""
    wanted, norms, known = trained(optimizer, True, stage)
    found, found_norms, found_known = trained(optimizer, False, stage)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert known == found_known and known[2] == STEPS - len(BAD_STEPS) and known[3] == len(BAD_STEPS)
    for step, (a, b) in enumerate(zip(norms, found_norms, strict=True)):
        assert a.shape == () and a.device.type == "sim" and (a == b or step in BAD_STEPS)
        assert bool(torch.isfinite(a)) == (step not in BAD_STEPS)


@on_ranks(1, 2, "2 hosts", devices=("sim", "sim-lazy"))
def test_gradients_that_are_not_finite() -> None:
    """Without a loss scale the step is skipped, and a later step or flush() raises on every rank, once."""
    for raises in ("flush", "step"):
        model, adam = prepared("AdamW")
        before = [value.clone() for value in zeropp.full_state_dict(model).values()]
        last = dist.get_rank() == dist.get_world_size() - 1
        (model(torch.ones(2, 16)).sum() * (float("nan") if last else 1.0)).backward()
        adam.step()
        adam.zero_grad()
        said = r"gradients of '0.weight' \(.*were not finite \(norm nan\) in a step before this one"
        if raises == "flush":
            with pytest.raises(zeropp.Error, match=said):
                adam.flush()
        else:
            with pytest.raises(zeropp.Error, match=said):
                for _ in range(10):  # at most eight steps are under way
                    model(torch.zeros(2, 16)).sum().backward()
                    adam.step()
        if raises == "flush":
            after = zeropp.full_state_dict(model).values()
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert all(int(unit.steps.sum()) == 0 for unit in adam._engine.trained)
        adam.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        adam.step()
        adam.flush()


@on_ranks(2, devices=("sim-lazy",))
def test_other_parameters_than_in_the_steps_under_way() -> None:
    """A step that counts other parameters waits for those before it, whose ends it could not tell apart."""
    runs = []
    for flushes in (True, False):
        model, adam = prepared("AdamW", stage=1)
        for step in range(4):
            inputs = torch.ones(2, 16)
            model[1](inputs).sum().backward() if step % 2 else model(inputs).sum().backward()
            adam.step()
            adam.zero_grad()
            if flushes:
                adam.flush()
        adam.flush()
        runs.append((zeropp.full_state_dict(model), [unit.steps.tolist() for unit in adam._engine.trained]))
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(runs[0][0][name], runs[1][0][name]) for name in runs[0][0])
