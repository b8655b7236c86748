# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_delayed.py do. A case runs on one rank and on two, but for those that need no second."""

from __future__ import annotations

import copy
import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from state_cases import scratch
from training import Recipe, Run, batch, gpt, ours, same, train, within_rounding
from zeropp import Offload, Tier

EXACT = 3


def delayed(path: str | None = None, exact: int = EXACT, fraction: float = 1.0) -> dict[str, Any]:
    tier = Tier("cpu") if path is None else Tier("nvme", path=path, fraction=fraction)
    return {"offload": Offload(optimizer=tier, delayed_update=exact)}


def reference(recipe: Recipe, dtype: torch.dtype = torch.float32) -> Run:
    """The definition in plain torch: the optimizer has a model of its own, and the computing one gets its weights as they were
    before each update, but for the first EXACT ones."""
    model, run = gpt(dtype=dtype), Run()
    held = copy.deepcopy(model)
    optimizer = recipe.optimizer(held.parameters())
    for step in range(recipe.steps):
        total = 0.0
        for micro in range(recipe.micro):
            loss = model(*batch(step, micro)) / recipe.micro
            loss.backward()
            total += loss.item()
        for mine, theirs in zip(held.parameters(), model.parameters(), strict=True):
            assert theirs.grad is not None
            mine.grad = theirs.grad.clone()
            dist.all_reduce(mine.grad)
            mine.grad /= dist.get_world_size()
            theirs.grad = None
        if recipe.clip is not None:
            run.norms.append(torch.nn.utils.clip_grad_norm_(held.parameters(), recipe.clip).item())
        before = [p.detach().clone() for p in held.parameters()]
        optimizer.step()
        after = [p.detach() for p in held.parameters()]
        with torch.no_grad():
            for mine, value in zip(model.parameters(), before if step >= EXACT else after, strict=True):
                mine.copy_(value)
        run.losses.append(total)
        run.rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return run


def equals_its_definition() -> None:
    recipe = Recipe(steps=10, clip=0.5, micro=2)
    plain, exact = reference(recipe), reference(recipe, torch.float64)
    got = ours(recipe, stage=2, **delayed())
    within_rounding("delayed", got, plain, exact)
    usual = ours(recipe, stage=2)
    assert got.losses[: EXACT + 1] == usual.losses[: EXACT + 1] and got.losses[EXACT + 1] != usual.losses[EXACT + 1]


def equal_everywhere() -> None:
    """Every stage, on the CPU and on NVMe; what is accumulated and clipped in step() too; and fp16, whose first steps overflow."""
    with scratch() as path:
        configs: list[dict[str, Any]] = [{"precision": "bf16"}, {"accumulate": 2, "clip": 0.5}]
        configs.append({"precision": "fp16", "loss_scale": zeropp.LossScale(init=2.0**18)})
        for index, config in enumerate(configs):
            runs = []
            for stage, place in ((1, delayed()), (2, delayed(path)), (3, delayed(path, fraction=0.4)), (3, delayed())):
                torch.manual_seed(0)
                model, optimizer = prepared(stage=stage, **config, **place)
                losses = []
                for step in range(8):
                    loss = model(*batch(step))
                    optimizer.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                runs.append((losses, list(zeropp.full_state_dict(model).values())))
                if index == 2:
                    assert optimizer.loss_scale < 2.0**18
                del model, optimizer, loss
            for losses, values in runs[1:]:
                assert losses == runs[0][0], (config, losses, runs[0][0])
                assert all(torch.equal(a, b) for a, b in zip(values, runs[0][1], strict=True)), config


def exact_for_ever() -> None:
    """With more exact steps than there are, the bits of a run without it."""
    with scratch() as path:
        recipe = Recipe(steps=3, clip=0.5)
        for precision in (None, "bf16"):
            wanted = ours(recipe, stage=2, precision=precision)
            place = delayed(path, exact=99) if precision else delayed(exact=99)
            same(f"{precision}", ours(recipe, stage=2, precision=precision, **place), wanted)


def states_in_fewer_bits() -> None:
    """Adam's moments in 8 bits and bf16, of fp32 parameters and of bf16 ones."""
    for state, param in (("int8", "bf16"), ("bf16", None)):
        precision = zeropp.Precision(param=param, state=state)
        wanted = ours(Recipe(steps=3), stage=1, precision=precision)
        same(state, ours(Recipe(steps=3), stage=1, precision=precision, **delayed(exact=99)), wanted)


def prepared(**config: Any) -> tuple[Any, Any]:
    model = gpt()
    return zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), zeropp.Config(**config))


def values_of(model: Any) -> list[torch.Tensor]:
    """As a pass sees them, without a flush."""
    with zeropp.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def checkpoints() -> None:
    """A run that saved and went on, and one that was resumed from there, in another stage and tier, have the same bits; and the
    exact steps are not repeated."""
    with scratch() as path:
        saved = Path(path) / "ckpt"
        for precision in (None, "bf16"):
            model, optimizer = prepared(stage=2, precision=precision, **delayed())
            train(model, optimizer, 0, 6)
            zeropp.save(saved, model, optimizer, step=6)
            wanted = train(model, optimizer, 6, 10)
            for stage, place in ((1, delayed(path, fraction=0.5)), (3, delayed())):
                model, optimizer = prepared(stage=stage, precision=precision, **place)
                train(model, optimizer, 20, 26)  # what the load must overwrite, with an update under way
                assert zeropp.load(saved, model, optimizer)["step"] == 6
                assert train(model, optimizer, 6, 10) == wanted, (precision, place)
            del model, optimizer


def flushes() -> None:
    """After one delayed step a pass sees the first weights, and whoever wants all of the training the new ones."""
    with scratch() as path:
        model, optimizer = prepared(stage=2)
        first = values_of(model)
        train(model, optimizer, 0, 1)
        second = values_of(model)
        for place in (delayed(exact=0), delayed(path, exact=0)):
            model, optimizer = prepared(stage=2, **place)
            for flush in (
                lambda optimizer, model: optimizer.flush(),
                lambda optimizer, model: zeropp.full_state_dict(model),
                lambda optimizer, model: zeropp.get_full(next(model.parameters())),
                lambda optimizer, model: zeropp.save(Path(path) / "flushed", model, optimizer, step=1),
            ):
                model, optimizer = prepared(stage=2, **place)
                train(model, optimizer, 0, 1)
                assert all(p.grad is None for p in model.parameters()), "the step took them"
                assert equal(values_of(model), first)
                assert zeropp.get_local(next(model.parameters()), "exp_avg") is not None, (
                    "ends the update, shows none of it"
                )
                assert equal(values_of(model), first)
                flush(optimizer, model)
                assert equal(values_of(model), second)
            parameter = next(model.parameters())
            train(model, optimizer, 1, 2)
            with zeropp.gathered(parameter, write=True):
                parameter.data.fill_(0.25)
            train(model, optimizer, 2, 3)  # publishes nothing: the pipe is empty
            assert bool((values_of(model)[0] == 0.25).all())
            with pytest.raises(zeropp.Error, match="no parameter has a gradient"):
                optimizer.step()
            del model, optimizer, parameter


def runs_beside_a_pass() -> None:
    """An update of 6 million parameters takes some time, and a step after a pass of 0.3 s waits for next to none of it."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000, bias=False) for _ in range(6)))
    adam = torch.optim.AdamW(model.parameters())
    model, adam = zeropp.prepare(model, adam, zeropp.Config(stage=2, **delayed(exact=0)))
    for _ in range(3):
        model(torch.ones(1, 1000)).sum().backward()
        adam.step()
        adam.zero_grad()
        time.sleep(0.3)
    adam.flush()
    seen = adam._engine.delayed.figures()
    assert seen["steps"] == 3 and seen["step_ns"] > 3e6
    assert seen["waited_ns"] < 0.3 * seen["step_ns"], seen
    ranks = dist.get_world_size()
    wanted = 6_000_000 * (4 + (4 if ranks > 1 else 0)) // ranks
    assert abs(zeropp.memory(model, adam)["cpu"]["delayed"]["held"] - wanted) < 0.01 * wanted


def a_disk_that_fails() -> None:
    """The last rank's file loses its end: the step after hears of it, on every rank, and the last checkpoint goes on."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with scratch() as path:
        saved = Path(path) / "ckpt"
        model, optimizer = prepared(stage=2, precision="bf16", **delayed(path))
        train(model, optimizer, 0, 5)
        zeropp.save(saved, model, optimizer, step=5)
        wanted = train(model, optimizer, 5, 8)
        zeropp.load(saved, model, optimizer)
        states = next(Path(path).glob(f"zeropp-scratch-*/rank-{dist.get_rank()}/states"))
        whole_bytes = states.stat().st_size
        for flushed in (False, True):
            if last:
                os.truncate(states, whole_bytes // 2)
            assert train(model, optimizer, 5, 6) == wanted[:1], "the update fails behind it"
            with pytest.raises(zeropp.TierError, match=r"states\".*at offset \d+"):
                if flushed:
                    optimizer.flush()
                else:
                    train(model, optimizer, 6, 7)
            if last:
                os.truncate(states, whole_bytes)
            optimizer.zero_grad()
            with pytest.raises(zeropp.Error, match="torn by a step that failed half-way"):
                train(model, optimizer, 7, 8)
            optimizer.zero_grad()
            with pytest.raises(zeropp.Error, match="torn by a step that failed half-way"):
                zeropp.save(saved, model, optimizer, step=9)
            assert len(zeropp.full_state_dict(model)) > 0, "weights may be read, on every rank"
            assert zeropp.load(saved, model, optimizer)["step"] == 5
        assert train(model, optimizer, 5, 8) == wanted
        del model, optimizer


def ends_with_its_model() -> None:
    """A model that goes while its update runs: the file goes, too (`scratch` looks)."""
    with scratch() as path:
        for _ in range(3):
            model, optimizer = prepared(stage=2, **delayed(path, exact=0))
            train(model, optimizer, 0, 2)
            del model, optimizer
            gc.collect()


def learns_like_the_exact_one() -> None:
    """After fifty steps, most of them where the loss falls fastest, it is where the exact one was ten to twenty steps before."""
    curves = []
    for place in ({}, delayed(exact=10)):
        model, optimizer = prepared(stage=2, **place)
        losses = []
        for step in range(50):
            loss = model(*batch(step, rows=8))
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            losses.append(loss.item())
            optimizer.zero_grad()
        curves.append([sum(losses[first : first + 10]) / 10 for first in range(0, 50, 10)])
    exact, late = curves
    assert exact[0] == late[0] and exact[4] < late[4] < exact[2], curves


def refusals() -> None:
    model = gpt()
    with pytest.raises(zeropp.ConfigError, match="delayed_update: 3 is not built yet for SGD; Adam and AdamW are"):
        zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(stage=1, **delayed()))
    model, optimizer = prepared(stage=1, **delayed())
    with (
        scratch() as path,
        pytest.raises(zeropp.ConfigError, match=r"Offload\(delayed_update=\.\.\.\) are not implemented yet"),
    ):
        zeropp.offload_states(optimizer=optimizer, to="nvme", path=path)
    train(model, optimizer, 0, 1)


ON_ONE_RANK = ("exact_for_ever", "states_in_fewer_bits", "refusals", "learns_like_the_exact_one")
CASES = {
    function.__name__: function
    for function in (
        equals_its_definition, equal_everywhere, exact_for_ever, states_in_fewer_bits, checkpoints, flushes, runs_beside_a_pass,
        a_disk_that_fails, ends_with_its_model, learns_like_the_exact_one, refusals,
    )
}  # fmt: skip
