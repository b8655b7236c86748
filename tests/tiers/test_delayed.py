# SPDX-License-Identifier: Apache-2.0
"""Updates that run beside the next pass: equal to their definition, to each other in every stage and tier, hidden behind a pass,
flushed where all of the training is wanted, resumable, and heard of when they fail."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import scratch
from optimizers import MADE, muon_groups, sgd_groups
from ranks import on_ranks
from training import Recipe, Run, batch, gpt, ours, same, train, within_rounding
from zeropp import Comm, Config, Offload, Tier
from zeropp.zero.engine import engine_of

EXACT = 3


def delayed(path: str | None = None, exact: int = EXACT, fraction: float = 1.0) -> dict[str, Any]:
    tier = Tier("cpu") if path is None else Tier("nvme", path=path, fraction=fraction)
    return {"offload": Offload(optimizer=tier, delayed_update=exact)}


def files(
    path: str, params: float = 1.0, grads: float = 1.0, states: float = 1.0, exact: int = EXACT, **more: Any
) -> dict[str, Any]:
    """Stage 3, and in files: these shares of each kind. No parameters: stage 2. No states: in memory."""

    def tier(fraction: float, otherwise: str) -> Tier:
        return Tier("nvme", path=path, fraction=fraction) if fraction else Tier(otherwise)

    kinds = {"params": tier(params, "device"), "grads": tier(grads, "device"), "optimizer": tier(states, "cpu")}
    return {"stage": 3 if params else 2, "offload": Offload(**kinds, delayed_update=exact, **more)}


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


@on_ranks(1, 2, pytest.param("2 hosts", marks=pytest.mark.slow))
def test_equals_its_definition() -> None:
    recipe = Recipe(steps=10, clip=0.5, micro=2)
    plain, exact = reference(recipe), reference(recipe, torch.float64)
    got = ours(recipe, stage=2, **delayed())
    within_rounding("delayed", got, plain, exact)
    usual = ours(recipe, stage=2)
    assert got.losses[: EXACT + 1] == usual.losses[: EXACT + 1] and got.losses[EXACT + 1] != usual.losses[EXACT + 1]


def recurrence(recipe: Recipe, **config: Any) -> Run:
    """The definition by exact steps, so bit for bit: the optimizer's values are put away while those of the step before compute."""
    model, run = gpt(), Run()
    model, optimizer = zeropp.prepare(model, recipe.optimizer(recipe.groups(model)), zeropp.Config(**config))
    parameters: list[Any] = list(model.parameters())
    before: list[Any] = []

    def compute_with(values: list[Any]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            zeropp.set_full(parameter, value)

    for step in range(recipe.steps):
        held = [zeropp.get_full(parameter) for parameter in parameters]  # in fp32
        if step > EXACT:
            compute_with(before)
        loss = model(*batch(step))
        loss.backward()
        if step > EXACT:
            compute_with(held)
        before = held
        if recipe.clip is not None:
            run.norms.append(optimizer.clip_grad_norm_(recipe.clip))
        run.losses.append(loss.item())
        run.rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        optimizer.zero_grad()
    named = zip(model.named_parameters(), before, strict=True)
    run.values = {name: value.to(parameter.dtype) for (name, parameter), value in named}
    return run


@on_ranks(1, 2)
def test_other_optimizers() -> None:
    """Every update that C makes, and SGD's in groups of their own: states and gradients and parameters in memory and in files."""
    recipes = {name: Recipe(steps=EXACT + 3, clip=0.5, optimizer=made) for name, made in MADE.items()}
    recipes["groups"] = Recipe(
        steps=EXACT + 3, groups=sgd_groups, optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
    )
    with scratch() as path:
        for number, (name, recipe) in enumerate(recipes.items()):
            for precision in (None, "bf16"):
                wanted = recurrence(recipe, stage=2, precision=precision)
                places = [{"stage": 1 + number % 3, **delayed()}, {"stage": 2, **delayed(path, fraction=0.6)}]
                places += [files(path, 0.7, 0.5, 0.4) if precision else files(path), files(path, 0.0, 1.0, 0.0)]
                for place in places[:: 1 if number % 2 else -1][: 3 if dist.get_world_size() > 1 else 4]:
                    same(f"{name}, {precision}, {place}", ours(recipe, precision=precision, **place), wanted)


@on_ranks(1, 2)
def test_equal_everywhere() -> None:
    """Every stage, on the CPU and on NVMe; what is accumulated and clipped in step() too; and fp16, whose first steps overflow."""
    with scratch() as path:
        configs: list[dict[str, Any]] = [{"precision": "bf16"}, {"accumulate": 2, "clip": 0.5}]
        configs.append({"precision": "fp16", "loss_scale": zeropp.LossScale(init=2.0**18)})
        for index, config in enumerate(configs):
            runs = []
            places = [
                {"stage": 1, **delayed()},
                {"stage": 2, **delayed(path)},
                {"stage": 3, **delayed(path, fraction=0.4)},
            ]
            # Gradients in a file that accumulate are reduced in every micro-step, which is another order of summation.
            places += [files(path, 0.6, 0.0 if index == 1 else 0.3, 0.5), {"stage": 3, **delayed()}]
            for place in places:
                torch.manual_seed(0)
                model, optimizer = prepared(**config, **place)
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


@on_ranks(1, 2)
def test_equal_in_files() -> None:
    """Parameters, gradients, both, and all three kinds, whole and in part; clipped, two micro-batches that are reduced once."""
    recipe = Recipe(steps=EXACT + 2, clip=0.5, micro=2)
    with scratch() as path:
        for precision in (None, "bf16"):
            wanted = ours(recipe, stage=2, precision=precision, **delayed())
            for place in (
                files(path, grads=0.0, states=0.0),
                files(path, params=0.0, states=0.0),
                files(path, states=0.0),
                files(path, 0.4, 0.7, 0.6),
                files(path, checksums=True),
            ):
                same(f"{precision}, {place}", ours(recipe, precision=precision, **place), wanted)


@on_ranks(1, 2)
def test_accumulates_in_files() -> None:
    """Every micro-step reduces, and adds to the place that no update reads."""
    with scratch() as path:
        runs = []
        for accumulate, place in (
            (1, {"stage": 2, **delayed(exact=1)}),
            (4, files(path, 0.0, exact=1)),
            (4, files(path, exact=1)),
        ):
            model, optimizer = prepared(accumulate=accumulate, **place)
            losses = []
            for step in range(4):
                for micro in range(4):
                    loss = model(*batch(step, micro))
                    (loss / (4 if accumulate == 1 else 1)).backward()  # powers of two: no rounding
                    losses.append(loss.item())
                    if accumulate > 1 or micro == 3:
                        optimizer.step()
                optimizer.zero_grad()
            runs.append((losses, list(zeropp.full_state_dict(model).values())))
            del model, optimizer, loss
        for losses, values in runs[1:]:
            assert losses == runs[0][0], (losses, runs[0][0])
            assert equal(values, runs[0][1])


@on_ranks(1, 2, pytest.param("2 hosts", marks=pytest.mark.slow))
def test_parts_in_files() -> None:
    """A frozen block, a block and single parameters without gradients in some steps, a parameter whose gradient is dropped: what is not
    stepped is the same in both copies of the file."""
    with scratch() as path:
        for precision in (None, "bf16"):
            runs = []
            for place in (
                {"stage": 2, **delayed(exact=1)},
                files(path, exact=1),
                files(path, 0.5, 0.5, 0.0, exact=1),
                files(path, grads=0.0, exact=1),
            ):
                model = gpt(layers=3)
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_("blocks.1" not in name)
                adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
                model, adam = zeropp.prepare(model, adam, zeropp.Config(precision=precision, **place))
                losses = []
                for step in range(8):
                    loss = model(*batch(step))
                    loss.backward()
                    if step in (2, 3, 6):
                        model.blocks[0].up.weight.grad = None
                        model.blocks[0].down.bias.grad = None
                    if step in (1, 4, 5):
                        for parameter in model.blocks[2].parameters():
                            parameter.grad = None
                    adam.step()
                    adam.zero_grad()
                    losses.append(loss.item())
                runs.append((losses, list(zeropp.full_state_dict(model).values())))
                del model, adam, loss, parameter
            for losses, values in runs[1:]:
                assert losses == runs[0][0], (losses, runs[0][0])
                assert equal(values, runs[0][1])


@on_ranks(1, pytest.param("2 hosts", marks=pytest.mark.slow))
def test_shards_of_whole_pages() -> None:
    """Large enough that an update takes several windows, and is under way while the next pass reads."""
    with scratch() as path:
        runs = []
        for place in ({"stage": 2, **delayed(exact=0)}, files(path, exact=0), files(path, 0.6, 0.4, 0.0, exact=0)):
            model, optimizer = prepared(width=512, **place)
            runs.append((train(model, optimizer, 0, 2), [v.sum() for v in zeropp.full_state_dict(model).values()]))
            del model, optimizer
        assert runs[0] == runs[1] == runs[2]


@on_ranks(1, "2 hosts")
def test_memory_of_files() -> None:
    """The copies of a delay lie where their kind does: in the files as much again, in memory what a fraction holds there."""
    with scratch() as path:
        for precision, place, make in (
            (None, files(path, exact=0), Recipe.optimizer),
            ("bf16", files(path, 0.5, 0.5, exact=0), MADE["Lion"]),
        ):
            model, optimizer = prepared(width=256, make=make, precision=precision, **place)
            train(model, optimizer, 0, 2)
            seen = zeropp.memory(model, optimizer)
            for kind in ("delayed", "optimizer"):
                for tier in ("cpu", "nvme"):
                    one = seen[tier][kind]
                    assert abs(one["held"] - one["planned"]) <= 0.03 * one["planned"] + 32768, (kind, tier, one)
            both = seen["nvme"]["params"]["held"] + seen["nvme"]["grads"]["held"]
            assert abs(seen["nvme"]["delayed"]["held"] - both) <= 0.03 * both and both > 1 << 19, (seen, both)
            engine = engine_of(model)
            assert engine.params.in_file and engine.grads.in_file
            for tier in (engine.params, engine.grads):
                filed = tier.figures()["mapping_bytes"] - tier.figures()["resident_bytes"]
                filed *= 2 if tier is engine.params else 1  # its home has both places
                assert tier.path.stat().st_size == filed, tier
            del model, optimizer, engine, tier


@on_ranks(1)
def test_exact_for_ever() -> None:
    """With more exact steps than there are, the bits of a run without it."""
    with scratch() as path:
        recipe = Recipe(steps=3, clip=0.5)
        for precision in (None, "bf16"):
            wanted = ours(recipe, stage=2, precision=precision)
            place = delayed(path, exact=99) if precision else delayed(exact=99)
            same(f"{precision}", ours(recipe, stage=2, precision=precision, **place), wanted)


@on_ranks(1)
def test_states_in_fewer_bits() -> None:
    """Adam's moments in 8 bits and bf16, of fp32 parameters and of bf16 ones."""
    for state, param in (("int8", "bf16"), ("bf16", None)):
        precision = zeropp.Precision(param=param, state=state)
        wanted = ours(Recipe(steps=3), stage=1, precision=precision)
        same(state, ours(Recipe(steps=3), stage=1, precision=precision, **delayed(exact=99)), wanted)


def prepared(width: int = 48, make: Any = Recipe.optimizer, **config: Any) -> tuple[Any, Any]:
    model = gpt(width=width)
    return zeropp.prepare(model, make(model.parameters()), zeropp.Config(**config))


def values_of(model: Any) -> list[torch.Tensor]:
    """Return values as a pass sees them, without a flush."""
    with zeropp.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@on_ranks(1, 2, pytest.param("2 hosts", marks=pytest.mark.slow))
def test_checkpoints() -> None:
    """A run that saved and went on, and one that was resumed from there, in another stage and tier, have the same bits; and the
    exact steps are not repeated."""
    with scratch() as path:
        saved = Path(path) / "ckpt"
        for precision in (None, "bf16"):
            model, optimizer = prepared(stage=2, precision=precision, **delayed())
            train(model, optimizer, 0, 6)
            zeropp.save(saved, model, optimizer, step=6)
            wanted = train(model, optimizer, 6, 10)
            for place in (
                {"stage": 1, **delayed(path, fraction=0.5)},
                {"stage": 3, **delayed()},
                files(path, 0.7, 0.6, 0.5),
            ):
                model, optimizer = prepared(precision=precision, **place)
                train(model, optimizer, 20, 26)  # what the load must overwrite, with an update under way
                assert zeropp.load(saved, model, optimizer)["step"] == 6
                assert train(model, optimizer, 6, 10) == wanted, (precision, place)
            zeropp.save(Path(path) / "from files", model, optimizer, step=10)
            further = train(model, optimizer, 10, 13)
            model, optimizer = prepared(stage=2, precision=precision, **delayed())
            zeropp.load(Path(path) / "from files", model, optimizer)
            assert train(model, optimizer, 10, 13) == further
            del model, optimizer


@on_ranks(1)
def test_a_frozen_float64_unit() -> None:
    """It cannot be unfrozen with states in a file or with a delay, so what is trained is stepped in C there, as without it."""

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
            self.fixed = torch.nn.Linear(8, 8, dtype=torch.float64).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.fixed(self.first(x).double()).float()).square().mean()

    seen = []
    with scratch() as path:
        for place in ({"offload": Offload(optimizer="nvme", path=path)}, delayed(exact=0)):
            model: Any = Mixed()
            optimizer: Any = MADE["Adagrad"]([p for p in model.parameters() if p.requires_grad])
            model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=2, **place))
            model(torch.ones(2, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(values_of(model))
            optimizer.flush()
            seen.append(values_of(model))
            del model, optimizer
    assert equal(seen[3], seen[0]) and not equal(seen[2], seen[3]), "one step behind, and then there"


@on_ranks(1, 2)
def test_checkpoints_of_others() -> None:
    """Check checkpoints of one optimizer without states and three with one each. The flushed values are the saved ones."""
    with scratch() as path:
        saved = Path(path) / "ckpt"
        for number, name in enumerate(("SGD", "Lion", "SGD nesterov", "Adagrad")):
            places = (
                {"stage": 2, **delayed()},
                {"stage": 2, **delayed(path, fraction=0.5)},
                files(path, 0.7, 0.6, 0.5),
            )
            common: dict[str, Any] = {"make": MADE[name], "precision": "bf16" if number % 2 else None}
            for source, target in ((0, 2), (2, 1)):
                model, optimizer = prepared(**common, **places[source])
                train(model, optimizer, 0, 5)
                zeropp.save(saved, model, optimizer, step=5)
                kept = values_of(model)
                wanted = train(model, optimizer, 5, 8)
                optimizer.flush()
                newest = values_of(model)
                model, optimizer = prepared(**common, **places[target])
                train(model, optimizer, 20, 25)  # what the load must overwrite, with an update under way
                assert zeropp.load(saved, model, optimizer)["step"] == 5
                assert equal(values_of(model), kept), name
                assert train(model, optimizer, 5, 8) == wanted, (name, source, target)
                optimizer.flush()
                assert equal(values_of(model), newest), name
                del model, optimizer


@on_ranks(1, 2)
def test_flushes() -> None:
    """After one delayed step a pass sees the first weights, and calls that need all of the training get the new ones."""
    with scratch() as path:
        model, optimizer = prepared(stage=2)
        first = values_of(model)
        train(model, optimizer, 0, 1)
        second = values_of(model)
        for place in (
            {"stage": 2, **delayed(exact=0)},
            {"stage": 2, **delayed(path, exact=0)},
            files(path, 0.8, exact=0),
        ):
            model, optimizer = prepared(**place)
            for flush in (
                lambda optimizer, model: optimizer.flush(),
                lambda optimizer, model: zeropp.full_state_dict(model),
                lambda optimizer, model: zeropp.get_full(next(model.parameters())),
                lambda optimizer, model: zeropp.save(Path(path) / "flushed", model, optimizer, step=1),
            ):
                model, optimizer = prepared(**place)
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


@on_ranks(1, 2)
def test_runs_beside_a_pass() -> None:
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
    seen = adam._engine.schedule.figures()
    assert seen["steps"] == 3 and seen["step_ns"] > 3e6
    assert seen["waited_ns"] < 0.3 * seen["step_ns"], seen
    grads = (
        dist.get_world_size() > 1 or torch.get_default_device().type != "cpu"
    )  # one rank of CPUs hands over its p.grad
    wanted = 6_000_000 * (4 + 4 * grads) // dist.get_world_size()
    found = zeropp.memory(model, adam)["cpu"]["delayed"]
    assert abs(found["held"] - wanted) < 0.01 * wanted and abs(found["planned"] - wanted) < 0.01 * wanted, found


@on_ranks(1, 2, "2 hosts")
def test_a_disk_that_fails() -> None:
    """The last rank's file loses its end: the step after raises on every rank, and the last checkpoint goes on."""
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
            with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
                train(model, optimizer, 7, 8)
            optimizer.zero_grad()
            with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
                zeropp.save(saved, model, optimizer, step=9)
            assert len(zeropp.full_state_dict(model)) > 0, "weights may be read, on every rank"
            assert zeropp.load(saved, model, optimizer)["step"] == 5
        assert train(model, optimizer, 5, 8) == wanted
        del model, optimizer


@contextlib.contextmanager
def no_writes_beyond(first: int, where: bool) -> Iterator[None]:
    """Make files of this rank unwritable from there on, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    dist.barrier()
    try:
        if where:
            resource.setrlimit(resource.RLIMIT_FSIZE, (first, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        dist.barrier()


@on_ranks(2, "2 hosts")
def test_a_full_disk_of_parameters() -> None:
    """An update of the last rank, delayed or exact, cannot write its parameters: all ranks raise, and all have the weights of
    before, whole; the last checkpoint goes on."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with scratch() as path:
        saved = Path(path) / "ckpt"
        for exact, precision in ((0, "bf16"), (99, None)):
            model, optimizer = prepared(precision=precision, **files(path, grads=0.0, states=0.0, exact=exact))
            train(model, optimizer, 0, 2)
            zeropp.save(saved, model, optimizer, step=2)
            weights = values_of(model)
            # So many that the update after them writes the second half of the file.
            wanted = train(model, optimizer, 2, 4 if exact else 5)
            zeropp.load(saved, model, optimizer)
            file = engine_of(model).params.path
            with no_writes_beyond(file.stat().st_size // 2, last):
                if not exact:
                    assert train(model, optimizer, 2, 3) == wanted[:1], "the update fails behind it"
                with pytest.raises(zeropp.TierError, match=r"params\".*at offset \d+"):
                    train(model, optimizer, 3, 4)
            optimizer.zero_grad()
            assert equal(values_of(model), weights)
            with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
                train(model, optimizer, 4, 5)
            optimizer.zero_grad()
            with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
                zeropp.save(saved, model, optimizer, step=9)
            assert zeropp.load(saved, model, optimizer)["step"] == 2
            assert train(model, optimizer, 2, 2 + len(wanted)) == wanted
            del model, optimizer


@on_ranks(1, pytest.param("2 hosts", marks=pytest.mark.slow))
def test_gradients_that_cannot_be_read() -> None:
    """The last rank's file loses its end when its gradients were measured: the update that reads them fails behind the step."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with scratch() as path:
        saved = Path(path) / "ckpt"
        model, optimizer = prepared(width=256, **files(path, exact=0))
        train(model, optimizer, 0, 2)
        zeropp.save(saved, model, optimizer, step=2)
        weights = values_of(model)
        wanted = train(model, optimizer, 2, 5)
        zeropp.load(saved, model, optimizer)
        file = engine_of(model).grads.path
        whole_bytes = file.stat().st_size
        loss = model(*batch(2))
        loss.backward()
        optimizer.clip_grad_norm_(float("inf"))
        if last:
            os.truncate(file, whole_bytes // 8)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(zeropp.TierError, match=r"grads\".*at offset \d+"):
            optimizer.flush()
        assert equal(values_of(model), weights)
        if last:
            os.truncate(file, whole_bytes)
        dist.barrier()
        assert zeropp.load(saved, model, optimizer)["step"] == 2
        assert train(model, optimizer, 2, 5) == wanted
        del model, optimizer, loss


@on_ranks(1, 2)
def test_ends_with_its_model() -> None:
    """A model that goes while its update runs: the file goes, too (`scratch` looks)."""
    with scratch() as path:
        for place in ({"stage": 2, **delayed(path, exact=0)}, files(path, exact=0), files(path, states=0.0, exact=0)):
            model, optimizer = prepared(**place)
            train(model, optimizer, 0, 2)
            del model, optimizer
            gc.collect()


@on_ranks(1)
def test_learns_like_the_exact_one() -> None:
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


@on_ranks(1)
def test_refusals() -> None:
    talks, waits = "its step talks to the other ranks", "its step is torch's own code"
    refused: tuple[tuple[Any, str], ...] = (
        (
            zeropp.optim.LAMB,
            f"delayed_update: 3 does not combine with optimizer LAMB: {talks}.*; use one of AdamW, Adam, Lion, Adagrad, SGD",
        ),
        (lambda params: zeropp.optim.Muon(muon_groups(model)), f"with optimizer Muon: {talks}"),
        (lambda params: zeropp.optim.OneBitAdam(params, freeze_step=3), f"with optimizer OneBitAdam: {talks}"),
        (torch.optim.RMSprop, f"with optimizer RMSprop: {waits}"),
    )
    model = gpt()
    for make, said in refused:
        with pytest.raises(zeropp.ConfigError, match=said):
            zeropp.prepare(model, make(model.parameters()), zeropp.Config(stage=1, **delayed()))
    config = zeropp.Config(stage=1, precision=zeropp.Precision(state="int8"), **delayed())
    with pytest.raises(
        zeropp.ConfigError,
        match=r"state: 'int8' does not combine with optimizer Lion and Config\.offload\.delayed_update=3",
    ):
        zeropp.prepare(model, MADE["Lion"](model.parameters()), config)
    model, optimizer = prepared(stage=1, **delayed())
    with (
        scratch() as path,
        pytest.raises(
            zeropp.ConfigError, match=r"offload_states\(\) does not combine with Config\.offload\.delayed_update=3"
        ),
    ):
        zeropp.offload_states(optimizer=optimizer, to="nvme", path=path)
    train(model, optimizer, 0, 1)


@on_ranks("2 hosts")
def test_equal_everywhere_over_hosts() -> None:
    """Every stage, gathers that cross once a step, parameters, gradients and states in files, whole and in part."""
    recipe = Recipe(steps=EXACT + 3, clip=0.5, micro=2)
    with scratch() as path:
        for precision in (None, "bf16"):
            wanted = ours(recipe, stage=1, precision=precision, **delayed())
            for place in (
                {"stage": 2, **delayed(path)},
                {"stage": 3, **delayed()},
                {"stage": 3, "prefetch": 0, "comm": Comm(secondary_shard="host"), **delayed()},
                files(path, grads=0.0, states=0.0),
                files(path, params=0.0, states=0.0),
                files(path, 0.4, 0.7, 0.6),
                files(path, checksums=True),
            ):
                same(f"{precision}, {place}", ours(recipe, precision=precision, **place), wanted)


@on_ranks("2 hosts")
def test_in_eight_bits() -> None:
    """Transfers are rounded as without a delay: the second copy of a host holds what was published, and no older values."""
    wire = Comm(params="int8", grads="int8")
    kept = Comm(params="int8", grads="int8", secondary_shard="host")
    runs = []
    for comm in (wire, kept):
        model, optimizer = prepared(comm=comm, prefetch=0, **delayed(exact=1))
        runs.append((train(model, optimizer, 0, 6), values_of(model)))
        del model, optimizer
    assert runs[0][0] == runs[1][0]
    assert all((a == b).all() for a, b in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Offload(delayed_update=True),
            "Offload.delayed_update: True is not allowed; wanted a whole number >= 0",
        ),
        (lambda: Offload(delayed_update=-1), "Offload.delayed_update: -1 is not allowed"),
        (
            lambda: Config(offload=Offload(delayed_update=3)),
            "does not combine with Config.offload.optimizer.kind='device'",
        ),
        (
            lambda: Config(stage=0, offload=Offload(optimizer="cpu", delayed_update=3)),
            "'cpu' does not combine with Config.stage=0",
        ),
        (
            lambda: Config(offload=Offload(params="nvme", path="/tmp", delayed_update=3)),
            "does not combine with Config.offload.optimizer.kind='device'",
        ),
    ],
)
def test_what_cannot_be_delayed_is_said(make: Any, said: str) -> None:
    with pytest.raises(zeropp.ConfigError) as caught:
        make()
    assert said in str(caught.value)


def test_json_has_the_same_key() -> None:
    config = Config.from_json({"stage": 2, "offload": {"optimizer": "cpu", "delayed_update": 40}})
    assert config.offload.delayed_update == 40
