# SPDX-License-Identifier: Apache-2.0
"""Steps inside the backward: the bits of the step after it, in every stage and tier; gradients that come and go; fewer bytes; what is
refused in between, and what fails."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import scratch
from ranks import on_cpu_only, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Recipe, batch, gpt, ours, same, train
from zeropp import Comm, Config, Offload, Precision, Tier
from zeropp.zero.engine import engine_of

Steps = dict[str, Any]
BACKWARD_STEP: Steps = {"step_in_backward": True}


def on_cpu() -> bool:
    return torch.get_default_device().type == "cpu"


def tiers(path: str, params: float = 0.0, states: float = 0.0) -> Offload:
    """Fractions of them in files; 0: in memory."""
    return Offload(
        params=Tier("nvme", path=path, fraction=params) if params else Tier(),
        optimizer=Tier("nvme", path=path, fraction=states) if states else Tier("cpu"),
    )


def filed(path: str, grads: float, params: float = 0.0, states: float = 0.0) -> Offload:
    """And a fraction of the gradients."""
    return dataclasses.replace(tiers(path, params, states), grads=Tier("nvme", path=path, fraction=grads))


def prepared(width: int = 48, lr: float = 3e-3, **config: Any) -> tuple[Any, Any]:
    model = gpt(width=width)
    return zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr), zeropp.Config(**config))


def everywhere(path: str) -> dict[str, Steps]:
    combinations: dict[str, Steps] = {
        "stage 1": {"stage": 1},
        "stage 2": {"stage": 2},
        "stage 2, states in a file": {"stage": 2, "offload": tiers(path, states=1.0)},
        "stage 3": {"stage": 3},
        "stage 3, some states in a file": {"stage": 3, "offload": tiers(path, states=0.4)},
        "stage 3, parameters in a file": {"stage": 3, "offload": tiers(path, params=1.0)},
        "stage 3, both": {"stage": 3, "offload": tiers(path, params=1.0, states=1.0)},
        "stage 3, some of both": {"stage": 3, "offload": tiers(path, params=0.6, states=0.5)},
    }
    if dist.get_world_size() > 1:
        combinations["stage 3, gathering"] = {"stage": 3, "host_copy": "off", "prefetch": 1 << 20}
    return combinations


def equal(recipe: Recipe, **config: Any) -> None:
    """To the step after the backward in the same stage, whose equality in every tier other tests show."""
    with scratch() as path:
        wanted: dict[int, Any] = {}
        for name, place in everywhere(path).items():
            stage = place["stage"]
            if stage not in wanted:
                wanted[stage] = ours(recipe, stage=stage, **config)
            same(name, ours(recipe, **place, **config, **BACKWARD_STEP), wanted[stage])


def groups(model: nn.Module) -> Any:
    every = list(model.parameters())
    return [{"params": every[::2], "amsgrad": True}, {"params": every[1::2], "weight_decay": 0.1, "lr": 1e-3}]


@on_ranks(1, 2)
def test_fp32() -> None:
    """With gradients that no_sync held back."""
    equal(Recipe(steps=3, micro=2))


@on_ranks(1, 2)
def test_bf16() -> None:
    equal(Recipe(steps=2, micro=2, config={"accumulate": 2}), precision="bf16")


@on_ranks(1)
def test_amsgrad_in_groups() -> None:
    schedule = Recipe(
        steps=3,
        groups=groups,
        optimizer=lambda params: torch.optim.Adam(params, lr=3e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )
    equal(schedule)


@on_ranks(1, 2)
def test_other_optimizers() -> None:
    """torch's own code on shards, ours on states in fewer bits, and Adam without a master."""
    made = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        "Lion": lambda params: zeropp.optim.Lion(params, lr=1e-3),
        "RAdam": lambda params: torch.optim.RAdam(params, lr=3e-3),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=3e-3),
    }
    cases: list[tuple[str, Any]] = [("SGD", None), ("RAdam", "bf16"), ("Lion", Precision(state="int8"))]
    cases += [("AdamW", Precision(state="int8")), ("AdamW", Precision(param="bf16", master="bf16", state="bf16"))]
    for name, precision in cases:
        recipe, common = (
            Recipe(steps=3, optimizer=made[name]),
            {"stage": 3 if name == "AdamW" else 2, "precision": precision},
        )
        same(f"{name} {precision}", ours(recipe, **common, **BACKWARD_STEP), ours(recipe, **common))


@on_ranks(1, 2)
def test_gradients_in_a_file() -> None:
    """Several backwards add to them there, the last one steps: the bits of a step that reads them afterwards."""
    recipe = Recipe(steps=2, micro=3, config={"accumulate": 3})
    with scratch() as path:
        for precision in (None, "bf16"):
            common: Steps = {"precision": precision}
            for stage, offload in (
                (2, filed(path, 1.0)),
                (2, filed(path, 0.5, states=0.6)),
                (3, filed(path, 1.0, params=1.0, states=1.0)),
                (3, filed(path, 0.7, params=0.6)),
            ):
                wanted = ours(recipe, stage=stage, offload=Offload(grads=offload.grads), **common)
                same(
                    f"{precision}, {offload}",
                    ours(recipe, stage=stage, offload=offload, **common, **BACKWARD_STEP),
                    wanted,
                )
            if dist.get_world_size() > 1:
                apart: Steps = {"stage": 3, "host_copy": "off", "prefetch": 1 << 20, **common}
                wanted = ours(recipe, offload=filed(path, 1.0), **apart)
                same(
                    f"{precision}, gathering", ours(recipe, offload=filed(path, 1.0), **apart, **BACKWARD_STEP), wanted
                )


@on_ranks(1, 2)
def test_gradients_held_back() -> None:
    """no_sync within such a step: before the first reduction, and between two; and a gradient that is dropped."""
    with scratch() as path:
        for stage in (2, 3):
            runs = []
            for steps in ({}, BACKWARD_STEP):
                model, optimizer = prepared(stage=stage, offload=filed(path, 0.8), accumulate=2, **steps)
                losses = []
                for step in range(3):
                    for micro in range(4):  # the second and the last are reduced
                        with contextlib.nullcontext() if micro % 2 else zeropp.no_sync(model):
                            loss = model(*batch(step, micro))
                            loss.backward()
                        if micro == 1 and step == 1:
                            model.blocks[1].up.weight.grad = None
                        losses.append(loss.item())
                        optimizer.step()
                        optimizer.zero_grad()
                runs.append((losses, list(zeropp.full_state_dict(model).values())))
                del model, optimizer, loss
            assert runs[0][0] == runs[1][0], runs
            assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@on_ranks(1, 2)
def test_bytes_of_gradients() -> None:
    """Of n backwards n - 1 write, and n - 1 read what was written: the last sum is not written. Nothing stays in memory."""
    micro = 3
    with scratch() as path:
        for stage in (2, 3):
            model, optimizer = prepared(256, stage=stage, offload=filed(path, 1.0), accumulate=micro, **BACKWARD_STEP)
            engine = engine_of(model)
            counts = []
            for step in range(3):
                for part in range(micro):
                    model(*batch(step, part)).backward()
                    if step == 1 and part == 0:
                        one = zeropp.memory(model, optimizer)["nvme"]["grads"]
                        assert one["held"] == pytest.approx(one["planned"], rel=0.03), one
                    optimizer.step()
                    if part < micro - 1:
                        engine.grads.require_whole()  # so small a model's would be found in memory otherwise
                seen = engine.grads.figures()
                assert seen["acquired_bytes"] == 0 and seen["acquired_peak_bytes"] <= 32 << 20, seen
                assert not any(p.grad is not None for p in model.parameters() if type(p) is nn.Parameter)
                counts.append((seen["read_bytes"], seen["written_bytes"]))
            size = zeropp.memory(model, optimizer)["nvme"]["grads"]["held"]
            for before, after in itertools.pairwise(counts):
                for kind in range(2):
                    assert after[kind] - before[kind] == pytest.approx((micro - 1) * size, rel=0.05), (counts, size)
            del model, optimizer, engine


@on_ranks(1, 2)
def test_float64() -> None:
    runs = []
    for steps in ({}, BACKWARD_STEP):
        model: Any = gpt(dtype=torch.float64)
        adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, adam = zeropp.prepare(model, adam, zeropp.Config(stage=2, **steps))
        runs.append((train(model, adam, 0, 3), list(zeropp.full_state_dict(model).values())))
        del model, adam
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@on_ranks(1, 2)
def test_shards_of_whole_pages() -> None:
    """The model is large enough that shards begin at pages, and that a unit's states are several records."""
    with scratch() as path:
        runs = []
        for place in ({"stage": 3}, {"stage": 3, "offload": tiers(path, 1.0, 1.0), **BACKWARD_STEP}):
            model, optimizer = prepared(384, **place)
            losses = train(model, optimizer, 0, 3)
            runs.append((losses, list(zeropp.full_state_dict(model).values())))
            del model, optimizer
        assert runs[0][0] == runs[1][0]
        assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


class Odd(nn.Module):
    """Blocks that are checkpointed in both ways, that run twice, that run on some ranks only, and that are frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.old, self.new = (nn.Linear(32, 32) for _ in range(3))
        self.twice, self.sometimes, self.frozen, self.never = (nn.Linear(32, 32) for _ in range(4))
        self.last = nn.Linear(32, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.old, x, use_reentrant=True)
        x = checkpoint(self.new, x, use_reentrant=False)
        x = self.twice(torch.tanh(self.twice(x)))
        if (step + dist.get_rank()) % 3 == 0:
            x = x + self.sometimes(x)
        return self.last(self.frozen(x)).square().mean()


@on_ranks(1, 2)
def test_odd_models() -> None:
    """With gradients in a file of two backwards, of which the last may give a unit none."""
    with scratch() as path:
        for name in ("stage 1", "stage 2, states in a file", "stage 3, both", "stage 3, gathering", "gradients"):
            in_a_file: Steps = {"stage": 2, "offload": filed(path, 0.9), "accumulate": 2}
            runs, place = [], in_a_file if name == "gradients" else everywhere(path).get(name, {"stage": 3})
            for steps in ({}, BACKWARD_STEP):
                model: Any = Odd()
                adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
                model, adam = zeropp.prepare(model, adam, zeropp.Config(units=(nn.Linear,), **place, **steps))
                losses = []
                for step in range(6 if name == "gradients" else 4):
                    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
                    loss = model(torch.randn(4, 32, generator=draw), step)
                    loss.backward()
                    adam.step()
                    adam.zero_grad()
                    losses.append(loss.item())
                runs.append((losses, list(zeropp.full_state_dict(model).values())))
                del model, adam, loss
            assert runs[0][0] == runs[1][0], (place, runs[0][0], runs[1][0])
            assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True)), place


@on_ranks(1, 2)
def test_checkpoints() -> None:
    """Saved with the one and loaded with the other, in another tier, and the other way: goes on as it was."""
    with scratch() as path:
        saved = Path(path) / "ckpt"
        both: Steps = {"stage": 3, "offload": tiers(path, 0.5, 1.0)}
        for precision in (None, "bf16"):
            common: Steps = {"precision": precision}
            model, optimizer = prepared(stage=3, **common)
            first, wanted = train(model, optimizer, 0, 3), train(model, optimizer, 3, 6)
            for source, target in (
                ({**both, **BACKWARD_STEP}, {"stage": 3}),
                ({"stage": 3}, {**both, **BACKWARD_STEP}),
                (BACKWARD_STEP, both | BACKWARD_STEP),
            ):
                model, optimizer = prepared(**common, **source)
                assert train(model, optimizer, 0, 3) == first
                zeropp.save(saved, model, optimizer, step=3)
                assert train(model, optimizer, 3, 6) == wanted
                model, optimizer = prepared(**common, **target)
                train(model, optimizer, 10, 12)  # what the load must overwrite, read ahead or not
                assert zeropp.load(saved, model, optimizer)["step"] == 3
                assert train(model, optimizer, 3, 6) == wanted, (precision, source, target)
            del model, optimizer


@on_ranks(1, 2, "2 hosts")
def test_gradients_come_and_go() -> None:
    """A rank holds the gradients of a unit or two, and not the model's: counted at their peak."""
    width, layers = 64, 6
    for stage in (2, 3):
        held = {}
        for backward_step in (False, True):
            torch.manual_seed(0)
            model: Any = gpt(width=width, layers=layers)
            adam = torch.optim.AdamW(model.parameters())
            model, adam = zeropp.prepare(model, adam, zeropp.Config(stage=stage, step_in_backward=backward_step))
            engine, peak = engine_of(model), 0

            def look(_: Any, engine: Any = engine, model: Any = model) -> None:
                nonlocal peak
                if engine.ranks > 1:
                    dist.barrier()  # no rank runs ahead, so that nothing waits in buckets
                own = engine.core.memory()["grads"]
                if engine.ranks == 1:
                    with torch._C.DisableTorchFunctionSubclass():
                        own = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
                peak = max(peak, own)

            for unit in engine.units:
                for entry in unit.params:
                    entry.param.register_post_accumulate_grad_hook(look)
            train(model, adam, 0, 2)
            held[backward_step] = peak
            largest = sorted(unit.shard_elems * 4 for unit in engine.units)[-2:]
            if backward_step:
                assert peak <= sum(largest) + (largest[-1] if engine.ranks > 1 else 0), (peak, largest)
                assert all(p.grad is None for p in model.parameters())
            del model, adam, engine, look
        assert held[True] < 0.5 * held[False], held


def until_idle() -> None:
    """Wait until the reads ahead of the next step have ended and are counted."""
    before = None
    while before != (before := zeropp.traffic()["nvme"]["read"]["bytes"]):
        time.sleep(0.1)


@on_ranks(1, 2)
def test_bytes_of_a_step() -> None:
    """Parameters are read twice and not a third time, once where the forward keeps them for the backward, and not at all where the
    step keeps them for the forward; states once, and all is written once. Beside a GPU the step reads parameters itself, and what is
    whole there is old then, so that no forward keeps it."""
    ranks = dist.get_world_size()
    with scratch() as path:
        bounds = ((0, 3.5, 4.2), ("auto", 1.95, 2.6)) if on_cpu() else ((0, 4.5, 5.2), ("auto", 3.9, 4.6))
        for prefetch, least, most in bounds:  # a model of 6 MB stays, where anything may
            model, optimizer = prepared(256, stage=3, offload=tiers(path, 1.0, 1.0), prefetch=prefetch, **BACKWARD_STEP)
            train(model, optimizer, 0, 2)
            until_idle()
            filed = zeropp.memory(model, optimizer)["nvme"]
            psi = filed["params"]["held"] * ranks
            dist.barrier()
            zeropp.traffic(reset=True)
            dist.barrier()
            train(model, optimizer, 2, 4)
            until_idle()
            mine = zeropp.traffic()["nvme"]
            both = torch.tensor([mine["read"]["bytes"], mine["write"]["bytes"]])
            dist.all_reduce(both)
            read, written = (value / 2 / psi for value in both.tolist())
            assert 2.95 <= written <= 3.1, written
            # A rank that lags reads a unit again; the last one of the forward may still be there in the backward.
            assert read >= least and (read <= most or ranks > 1), (prefetch, read)
            del model, optimizer


@on_ranks(1, 2)
def test_kept_for_the_next_forward() -> None:
    """Units that the step leaves in memory and the next forward begins with stay there. Calls that write them, and passes
    without a backward, find and leave everything as in a run without files."""
    with scratch() as path:
        losses: list[list[float]] = []
        for tier in ({}, {"offload": tiers(path, 1.0, 1.0)}):
            model, optimizer = prepared(128, stage=3, **tier, **BACKWARD_STEP)
            filed = engine_of(model).params
            seen = train(model, optimizer, 0, 2)
            if filed.in_file:  # beside a GPU the step is on the host, and what is whole on the GPU is old after it
                block = 12 * 128 * 128 * 4 if on_cpu() else 0
                assert block <= filed.figures()["acquired_bytes"] <= 3 * block
            first = model.blocks[0]
            with torch.no_grad(), zeropp.gathered(first, write=True):
                for parameter in first.parameters():
                    parameter.mul_(0.5)
            assert not filed.in_file or filed.figures()["acquired_bytes"] == 0
            seen += train(model, optimizer, 2, 4)
            zeropp.set_full(first.up.weight, zeropp.get_full(first.up.weight) * 2)
            seen += train(model, optimizer, 4, 5)
            with torch.no_grad():
                seen += [model(*batch(9)).item() for _ in range(2)]
            assert not filed.in_file or filed.figures()["acquired_bytes"] == 0
            seen += train(model, optimizer, 5, 6)
            with torch.no_grad():  # a pass that begins with another unit
                model.blocks[1](torch.zeros(1, 4, 128))
            zeropp.save(f"{path}/kept{len(losses)}", model, optimizer, step=6)
            seen += train(model, optimizer, 6, 8)
            zeropp.load(f"{path}/kept{len(losses)}", model, optimizer)
            seen += train(model, optimizer, 6, 8)
            assert seen[-2:] == seen[-4:-2]
            losses.append(seen)
            del model, optimizer, filed, first
        assert losses[0] == losses[1]


def refused() -> Any:
    return pytest.raises(zeropp.Error, match=r"between a backward and optimizer\.step\(\)")


@on_ranks(1, 2)
def test_between_backward_and_step() -> None:
    """Parameters are half new, so whatever reads them is refused, and step() goes on."""
    for stage in (2, 3):
        model, optimizer = prepared(stage=stage, **BACKWARD_STEP)
        wanted = train(model, optimizer, 0, 3)
        model, optimizer = prepared(stage=stage, **BACKWARD_STEP)
        for step in range(3):
            loss = model(*batch(step))
            loss.backward(retain_graph=True)
            weight = model.blocks[0].up.weight
            for use in (
                lambda model=model, step=step: model(*batch(step)),
                lambda optimizer=optimizer: optimizer.zero_grad(),
                lambda model=model: zeropp.full_state_dict(model),
                lambda weight=weight: zeropp.get_full(weight),
                lambda weight=weight: zeropp.get_local(weight),
                lambda model=model, optimizer=optimizer: zeropp.save("nowhere", model, optimizer),
                lambda loss=loss: loss.backward(),
            ):
                with refused():
                    use()
            with refused(), zeropp.gathered(weight):
                pass
            optimizer.step()
            assert loss.item() == wanted[step]
            del loss
        with pytest.raises(zeropp.Error, match="no backward has begun this step"):
            optimizer.step()
        with pytest.raises(
            zeropp.ConfigError, match=r"clip_grad_norm_\(\) does not combine with Config\.step_in_backward=True"
        ):
            optimizer.clip_grad_norm_(1.0)
        with pytest.raises(zeropp.ConfigError, match=r"clip_grad_value_\(\) does not combine"):
            optimizer.clip_grad_value_(1.0)
        loss = model(*batch(0))
        with pytest.raises(zeropp.Error, match="create_graph=True"):
            loss.backward(create_graph=True)
        del loss
        model(*batch(3)).backward()
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(
            zeropp.Error, match=r"param_groups\[0\]\['lr'\] was 0.003 when the backward began.* is 0.5 now"
        ):
            optimizer.step()
        train(model, optimizer, 4, 5)
        del model, optimizer, weight


@on_ranks(1, 2, "2 hosts")
def test_not_finite() -> None:
    """The loss is: nothing was stepped, and the next batch goes on. One gradient in the middle is: torn, on every rank."""
    on_cpu_only("a GPU tells of it later, as tests/zero/test_step_in_backward_gpu.py shows")
    with scratch() as path:
        saved = Path(path) / "ckpt"
        for place in ({"stage": 2}, {"stage": 3, "offload": tiers(path, 1.0, 1.0)}):
            model, optimizer = prepared(**place, **BACKWARD_STEP)
            wanted = train(model, optimizer, 0, 2) + train(model, optimizer, 2, 4)
            model, optimizer = prepared(**place, **BACKWARD_STEP)
            seen = train(model, optimizer, 0, 2)
            (model(*batch(9)) * float("nan")).backward()
            with pytest.raises(zeropp.Error, match=r"is not finite; nothing was stepped on this rank"):
                optimizer.step()
            optimizer.zero_grad()
            seen += train(model, optimizer, 2, 4)
            assert seen == wanted
            zeropp.save(saved, model, optimizer, step=4)
            wanted = train(model, optimizer, 4, 5)
            handle = model.blocks[0].down.weight.register_hook(lambda gradient: gradient * float("inf"))
            model(*batch(5)).backward()
            with pytest.raises(
                zeropp.Error,
                match=r"blocks\.0\.down\.weight.* is not finite; weights and optimizer state are inconsistent",
            ):
                optimizer.step()
            handle.remove()
            optimizer.zero_grad()
            with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
                model(*batch(5)).backward()
            with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
                zeropp.save(saved, model, optimizer, step=5)
            assert zeropp.load(saved, model, optimizer)["step"] == 4
            assert train(model, optimizer, 4, 5) == wanted
            del model, optimizer


@on_ranks(1, 2, "2 hosts")
def test_a_disk_that_fails() -> None:
    """The last rank's states lose their end, or the file of parameters does: step() raises on every rank, and a load goes on."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with scratch() as path:
        saved = Path(path) / "ckpt"
        model, optimizer = prepared(stage=3, offload=tiers(path, states=1.0), **BACKWARD_STEP)
        train(model, optimizer, 0, 2)
        zeropp.save(saved, model, optimizer, step=2)
        wanted = train(model, optimizer, 2, 4)
        zeropp.load(saved, model, optimizer)
        states = next(Path(path).glob(f"zeropp-scratch-*/rank-{dist.get_rank()}/states"))
        whole_bytes = states.stat().st_size
        if last:
            os.truncate(states, whole_bytes // 2)
        model(*batch(2)).backward()
        with pytest.raises(zeropp.TierError, match=r"states\".*at offset \d+"):
            optimizer.step()
        if last:
            os.truncate(states, whole_bytes)
        with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
            model(*batch(3)).backward()
        with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
            optimizer.step()
        assert zeropp.load(saved, model, optimizer)["step"] == 2
        assert train(model, optimizer, 2, 4) == wanted
        del model, optimizer


@on_ranks(1, 2)
def test_gradients_that_cannot_be_read() -> None:
    """The last rank's file of gradients loses its end before the last backward, which steps what it can read before: step() says so on
    every rank, and a load goes on."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with scratch() as path:
        saved = Path(path) / "ckpt"

        def step_of(model: Any, optimizer: Any, step: int) -> float:
            losses = []
            for micro in range(2):
                loss = model(*batch(step, micro))
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
            optimizer.zero_grad()
            return sum(losses)

        model, optimizer = prepared(256, stage=2, offload=filed(path, 1.0), accumulate=2, **BACKWARD_STEP)
        step_of(model, optimizer, 0)
        zeropp.save(saved, model, optimizer, step=1)
        wanted = [step_of(model, optimizer, step) for step in (1, 2)]
        zeropp.load(saved, model, optimizer)
        tier = engine_of(model).grads
        model(*batch(1)).backward()
        tier.require_whole()
        whole_bytes = tier.path.stat().st_size
        if last:
            os.truncate(tier.path, whole_bytes // 2)
        model(*batch(1, 1)).backward()
        with pytest.raises(zeropp.TierError, match=r"grads\".*at offset \d+"):
            optimizer.step()
        if last:
            os.truncate(tier.path, whole_bytes)
        optimizer.zero_grad()
        dist.barrier()
        with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
            step_of(model, optimizer, 1)
        optimizer.zero_grad()
        assert zeropp.load(saved, model, optimizer)["step"] == 1
        assert [step_of(model, optimizer, step) for step in (1, 2)] == wanted
        del model, optimizer, tier


class Peeks(nn.Module):
    """Reads a weight that its last layer has, where its first one is computed, and gives it no gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.last.weight.detach() + self.last(x)).square().mean()


@on_ranks(1)
def test_weights_that_autograd_kept() -> None:
    """A stepped weight counts as changed in place: an error of autograd, or ours, and never another gradient."""
    with scratch() as path:
        for place in ({"stage": 1}, {"stage": 3}, {"stage": 3, "offload": tiers(path, params=1.0)}):
            model: Any = Peeks()
            adam = torch.optim.AdamW(model.parameters())
            config = zeropp.Config(units=(nn.Linear,), **place, **BACKWARD_STEP)
            model, adam = zeropp.prepare(model, adam, config)
            loss = model(torch.ones(8, 8))
            with pytest.raises((RuntimeError, zeropp.Error), match=r"modified by an inplace operation|is needed again"):
                loss.backward()
            del model, adam, loss


@on_ranks(1)
def test_a_backward_that_raises() -> None:
    """After some units were stepped: the next step() says so, and a load goes on."""
    with scratch() as path:
        saved = Path(path) / "ckpt"
        model, optimizer = prepared(stage=3, offload=tiers(path, 1.0, 1.0), **BACKWARD_STEP)
        train(model, optimizer, 0, 2)
        zeropp.save(saved, model, optimizer, step=2)
        wanted = train(model, optimizer, 2, 4)

        def stop(gradient: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

        handle = model.blocks[0].down.weight.register_hook(stop)
        with pytest.raises(ZeroDivisionError):
            model(*batch(4)).backward()
        handle.remove()
        with pytest.raises(zeropp.Error, match=r"between a backward and optimizer\.step"):
            model(*batch(4))
        with pytest.raises(zeropp.Error, match=r"ended by an exception after \d+ units? had been stepped"):
            optimizer.step()
        optimizer.zero_grad()  # what the dead backward left
        assert zeropp.load(saved, model, optimizer)["step"] == 2
        assert train(model, optimizer, 2, 4) == wanted
        del model, optimizer


@on_ranks(1)
def test_refusals() -> None:
    model = gpt()
    adam = zeropp.optim.LAMB(model.parameters(), lr=1e-3)
    with pytest.raises(zeropp.ConfigError, match="step_in_backward: True does not combine with optimizer LAMB"):
        zeropp.prepare(model, adam, zeropp.Config(stage=2, **BACKWARD_STEP))


def equal_over_hosts(recipe: Recipe, **config: object) -> None:
    with scratch() as path:
        places: dict[str, Steps] = {
            "stage 1": {"stage": 1},
            "stage 2, states in a file": {"stage": 2, "offload": tiers(path, states=1.0)},
            "stage 3": {"stage": 3},
            "stage 3, a second copy": {"stage": 3, "comm": Comm(secondary_shard="host")},
            "stage 3, in 8 bits": {"stage": 3, "comm": Comm(params="int8", grads="int8")},
            "stage 3, both in files": {"stage": 3, "offload": tiers(path, params=1.0, states=1.0)},
            "stage 3, some parameters in a file": {"stage": 3, "prefetch": 0, "offload": tiers(path, params=0.5)},
        }
        if recipe.config.get("accumulate", 1) > 1:
            places["stage 2, gradients in a file"] = {"stage": 2, "offload": filed(path, 1.0)}
            in_bits: Steps = {"stage": 2, "comm": Comm(grads="int8")}
            filed_bits: Steps = {**in_bits, "offload": filed(path, 1.0)}
            once = Recipe(steps=2)  # in a file each backward of a step is reduced, and rounded, by itself
            same("8 bits, in memory", ours(once, **filed_bits, **config), ours(once, **in_bits, **config))
            places["stage 2, gradients in a file, sent in 8 bits"] = filed_bits
            places["stage 3, all in files"] = {"stage": 3, "offload": filed(path, 0.6, params=0.7, states=1.0)}
        for name, place in places.items():
            same(name, ours(recipe, **place, **config, **BACKWARD_STEP), ours(recipe, **place, **config))


@on_ranks("2 hosts")
def test_fp32_over_hosts() -> None:
    """With gradients that no_sync held back."""
    equal_over_hosts(Recipe(steps=3, micro=2))


@on_ranks("2 hosts")
def test_bf16_over_hosts() -> None:
    equal_over_hosts(Recipe(steps=2, micro=2, config={"accumulate": 2}), precision="bf16")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"step_in_backward": 1}, "step_in_backward: 1 is not allowed; wanted True or False"),
        ({"clip": 1.0}, "does not combine with Config.clip=1.0: clipping needs the norm of all gradients"),
        ({"precision": "fp16"}, "does not combine with Config.precision='fp16'"),
        ({"stage": 0}, "does not combine with Config.stage=0"),
        (
            {"offload": Offload(optimizer="cpu", delayed_update=3)},
            "does not combine with Config.offload.delayed_update=3",
        ),
        (
            {"offload": Offload(grads="nvme", path="/tmp")},
            "Config.offload.grads.kind='nvme' and Config.accumulate=1: a gradient lives until its unit is stepped",
        ),
        ({"offload": Offload(grads="nvme", path="/tmp")}, "say how many with accumulate="),
    ],
)
def test_what_cannot_step_in_backward_is_said(more: dict[str, Any], said: str) -> None:
    with pytest.raises(zeropp.ConfigError) as caught:
        Config(**{"stage": 2, "step_in_backward": True, **more})
    assert said in str(caught.value)


def test_json_has_the_same_key() -> None:
    assert Config.from_json({"stage": 2, "step_in_backward": True}).step_in_backward
