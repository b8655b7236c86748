# SPDX-License-Identifier: Apache-2.0
"""Lion, SGD and Adagrad with states, parameters and gradients on NVMe: bit for bit as in memory; what is saved, counted, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import scratch
from optimizers import MADE, muon_groups, sgd_groups
from ranks import on_cpu_only, on_ranks
from training import Recipe, gpt, ours, same, train
from zeropp import Offload, Tier
from zeropp.zero.engine import engine_of

SGD, Adagrad, Lion = torch.optim.SGD, torch.optim.Adagrad, zeropp.optim.Lion
STATES = {"Lion": ["exp_avg"], "SGD": [], "SGD momentum": ["momentum_buffer"], "SGD nesterov": ["momentum_buffer"],
          "Adagrad": ["sum"]}  # fmt: skip


def tiers(path: str, fraction: float, *kinds: str) -> Offload:
    return Offload(**{kind: Tier("nvme", path=path, fraction=fraction) for kind in kinds})  # type: ignore[arg-type]


Place = tuple[int, float, tuple[str, ...]]
ALL = ("optimizer", "params", "grads")
PLACES: tuple[Place, ...] = (
    (1, 1.0, ("optimizer",)), (2, 1.0, ("optimizer", "grads")), (3, 1.0, ("optimizer",)), (3, 0.6, ("optimizer", "params")),
    (3, 1.0, ("params", "grads")), (3, 1.0, ALL),
)  # fmt: skip


def equal_to_memory(recipe: Recipe, *places: Place, **config: Any) -> None:
    """Losses, norms and parameters, whatever is in files, whole or in part."""
    wanted: dict[int, Any] = {}
    with scratch() as path:
        for stage, fraction, kinds in places:
            if stage not in wanted:
                wanted[stage] = ours(recipe, stage=stage, **config)
            got = ours(recipe, stage=stage, offload=tiers(path, fraction, *kinds), **config)
            same(f"stage {stage}, {kinds}, fraction {fraction}", got, wanted[stage])


@on_ranks()
@pytest.mark.parametrize("name, ranks", [("Lion", 1), ("SGD", 1), *((name, 2) for name in MADE)])
def test_equal(name: str) -> None:
    """fp32, with states in part; bf16, with all on disk."""
    equal_to_memory(Recipe(steps=3, clip=0.5, optimizer=MADE[name]), (2, 0.4, ("optimizer",)))
    equal_to_memory(Recipe(steps=2, optimizer=MADE[name]), (3, 1.0, ALL), precision="bf16")


@on_ranks(1, 2)
def test_equal_inside_the_backward() -> None:
    """The step in the backward, from disk, against the step after it, in memory: fp32, with states in part; bf16, with parameters, too."""
    ways: tuple[tuple[float, tuple[str, ...], str | None], ...] = (
        (0.4, ("optimizer",), None),
        (1.0, ("optimizer", "params"), "bf16"),
    )
    with scratch() as path:
        for name, made in MADE.items():
            for fraction, kinds, precision in ways:
                recipe, where = Recipe(steps=3, optimizer=made), tiers(path, fraction, *kinds)
                wanted = ours(recipe, stage=3, precision=precision)
                got = ours(recipe, stage=3, precision=precision, offload=where, step_in_backward=True)
                same(f"{name}, {kinds}, fraction {fraction}", got, wanted)


@pytest.mark.slow
@on_ranks(1, 2)
def test_equal_everywhere() -> None:
    for made in MADE.values():
        for precision in (None, "bf16"):
            equal_to_memory(Recipe(steps=3, optimizer=made), *PLACES, precision=precision)


@on_ranks(1, 2)
def test_groups_of_their_own() -> None:
    """One tier for groups with a momentum and without, and a schedule. Parameters and gradients are in files, too, in part."""
    recipe = Recipe(
        steps=3, groups=sgd_groups, optimizer=lambda params: SGD(params, lr=0.1, momentum=0.9, dampening=0.2),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )  # fmt: skip
    equal_to_memory(recipe, (3, 0.6, ALL))


def prepared(name: str, **config: Any) -> tuple[Any, Any]:
    model = gpt()
    return zeropp.prepare(model, MADE[name](model.parameters()), zeropp.Config(**config))


@on_ranks(2)
def test_checkpoints() -> None:
    """From a tier into memory, the other way, and from one fraction to another: goes on as it was. (SGD without momentum has no states.)"""
    with scratch() as path:
        saved = Path(path) / "ckpt"
        for name in ("Lion", "SGD momentum", "Adagrad"):
            places = ({}, {"offload": tiers(path, 1.0, "optimizer")}, {"offload": tiers(path, 0.3, "optimizer")})
            common: dict[str, Any] = {"stage": 2, "precision": "bf16" if name == "Adagrad" else None}
            model, optimizer = prepared(name, **common)
            first, wanted = train(model, optimizer, 0, 2), train(model, optimizer, 2, 4)
            for index, source in enumerate(places):
                model, optimizer = prepared(name, **common, **source)
                assert train(model, optimizer, 0, 2) == first, (name, source)
                zeropp.save(saved, model, optimizer, step=index)
                model, optimizer = prepared(name, **common, **places[(index + 1) % 3])
                train(model, optimizer, 10, 11)  # what the load must overwrite
                assert zeropp.load(saved, model, optimizer)["step"] == index
                assert train(model, optimizer, 2, 4) == wanted, (name, source)
            del model, optimizer


@on_ranks(2)
def test_bytes_and_values() -> None:
    """The file has the states that the optimizer has, and no others; what was never stepped is not read; values are those of
    memory."""
    with scratch() as path:
        for name, states in STATES.items():
            seen = []
            for place in ({}, {"offload": tiers(path, 1.0, "optimizer")}):
                model, optimizer = prepared(name, stage=2, precision="bf16", **place)
                before = zeropp.traffic()["nvme"]["read"]["bytes"] if place else 0
                train(model, optimizer, 0, 1)
                engine = engine_of(model)
                elems = sum(unit.shard.numel() for unit in engine.units)
                if place:
                    files = engine.states.figures()["file"]
                    assert list(files) == ["master", *states] and set(files.values()) == {4 * elems}, (name, files)
                    read = zeropp.traffic()["nvme"]["read"]["bytes"] - before
                    assert 4 * elems <= read <= 4.2 * elems + (64 << 10), (name, read, elems)  # masters, in whole pages
                    held = zeropp.memory(model, optimizer)["nvme"]["optimizer"]
                    assert abs(held["held"] - held["planned"]) <= 0.03 * held["planned"], (name, held)
                weight = next(p for p in model.parameters() if p.ndim == 2)
                seen.append([zeropp.get_full(weight, kind) for kind in ("value", *states)])
                del model, optimizer, weight, engine
            assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True)), name


@on_ranks(2)
def test_refusals() -> None:
    """Refusals: what cannot be streamed, and why; what was enabled too late; what a checkpoint has and the file has no room for."""
    on_cpu_only("other refusals come first there (test_sim_offload.py)")
    said = {
        "LAMB: its step needs norms of whole tensors": lambda model: zeropp.optim.LAMB(model.parameters()),
        "Muon: its step needs whole matrices": lambda model: zeropp.optim.Muon(muon_groups(model)),
        "OneBitAdam: its states travel between": lambda model: zeropp.optim.OneBitAdam(
            model.parameters(), freeze_step=3
        ),
        "RMSprop: its step is torch's own code": lambda model: torch.optim.RMSprop(model.parameters()),
    }
    with scratch() as path:
        for kind in ("optimizer", "params", "grads"):
            for words, made in said.items():
                model = gpt()
                if kind == "params" and words.startswith("OneBit"):  # stage 3 is refused before
                    continue
                config = zeropp.Config(stage=3 if kind == "params" else 2, offload=tiers(path, 1.0, kind))
                wanted = rf"offload\.{kind}\.kind: 'nvme' does not combine with optimizer {words}.*; use one of AdamW"
                with pytest.raises(zeropp.ConfigError, match=wanted):
                    zeropp.prepare(model, made(model), config)
        place = {"stage": 1, "offload": tiers(path, 1.0, "optimizer")}
        model, optimizer = prepared("SGD", **place)
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(zeropp.ConfigError, match=r"momentum was switched on after zeropp\.prepare"):
            train(model, optimizer, 0, 1)
        optimizer.param_groups[0]["momentum"] = 0.0
        optimizer.zero_grad()
        assert train(model, optimizer, 0, 3) == train(*prepared("SGD", stage=1), 0, 3), "nothing was stepped before"
        other, momentum = prepared("SGD momentum", stage=1)
        train(other, momentum, 0, 1)
        zeropp.save(Path(path) / "ckpt", other, momentum, step=1)
        with pytest.raises(
            zeropp.Error, match=r"'momentum_buffer': with offload\.optimizer='nvme' the file has no room for it"
        ):
            zeropp.load(Path(path) / "ckpt", model, optimizer)
        del model, optimizer
        model, _ = zeropp.prepare(gpt(), None, zeropp.Config(**place))
        with pytest.raises(zeropp.ConfigError, match="optimizer Adagrad keeps 'sum', for which the file"):
            zeropp.prepare(model, Adagrad(model.parameters()))
        del model
        dist.barrier()
