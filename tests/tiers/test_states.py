# SPDX-License-Identifier: Apache-2.0
"""Optimizer states on NVMe: equal to states in memory bit for bit, saved, loaded, counted, and whole or refused after
storage failed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import change, full_disk, scratch
from ranks import on_cpu_only, on_ranks, shards_tier
from training import STAGES, Recipe, batch, goes_on_from_each, gpt, ours, same, train
from zeropp import Offload, Tier
from zeropp.zero.engine import engine_of

SHARDED = {name: config for name, config in STAGES.items() if name != "stage 0"}


def nvme(path: str, fraction: float = 1.0) -> dict[str, Any]:
    return {"offload": Offload(optimizer=Tier("nvme", path=path, fraction=fraction))}


def equal_to_memory(recipe: Recipe, **config: Any) -> None:
    """Losses, norms and parameters, in every stage."""
    with scratch() as path:
        for name, stage in SHARDED.items():
            if dist.get_world_size() == 1 and "gathering" in name:
                continue
            wanted = ours(recipe, **stage, **config)
            for fraction in (1.0, 0.4) if name == "stage 2" else (1.0,):
                got = ours(recipe, **stage, **config, **nvme(path, fraction))
                same(f"{name}, fraction {fraction}", got, wanted)


@on_ranks(1, 2)
def test_fp32() -> None:
    equal_to_memory(Recipe(steps=4, clip=0.5, micro=2))


@on_ranks(1, 2)
def test_bf16() -> None:
    equal_to_memory(Recipe(steps=4, clip=0.5, micro=2), precision="bf16")


@on_ranks(1, 2)
def test_accumulate_and_clip_in_config() -> None:
    """Of a power of two: where one rank divides by three, a GPU's step rounds once, after clipping, and the host's twice."""
    equal_to_memory(Recipe(steps=3, micro=4, config={"accumulate": 4, "clip": 0.5}))


@on_ranks(1, 2)
def test_amsgrad_in_groups() -> None:
    """Groups of their own, one of them with a running maximum, and a schedule."""

    def groups(model: torch.nn.Module) -> Any:
        every = list(model.parameters())
        return [{"params": every[::2], "amsgrad": True}, {"params": every[1::2], "weight_decay": 0.1, "lr": 1e-3}]

    recipe = Recipe(
        steps=3,
        groups=groups,
        optimizer=lambda params: torch.optim.Adam(params, lr=3e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )
    equal_to_memory(recipe)


@on_ranks(1, 2)
def test_names_of_tiers() -> None:
    """Offload(optimizer="nvme", path=...) is the same; "cpu" is where the states are anyhow."""
    with scratch() as path:
        wanted = ours(Recipe(steps=3), stage=2)
        same("by name", ours(Recipe(steps=3), stage=2, offload=Offload(optimizer="nvme", path=path)), wanted)
        same("cpu", ours(Recipe(steps=3), stage=2, offload=Offload(optimizer="cpu")), wanted)


# -- a model that goes on after something happened to it ---------------------------------------------------------------
def prepared(**config: Any) -> tuple[Any, Any]:
    model = gpt()
    return zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), zeropp.Config(**config))


@on_ranks(1, 2)
def test_checkpoints() -> None:
    """Saved from a tier and loaded into memory, the other way, and from one fraction to another: goes on as it was."""
    with scratch() as path:
        saved = Path(path) / "ckpt"
        for precision in (None, "bf16"):
            common: dict[str, Any] = {"stage": 2, "precision": precision}
            held = [{**common, **tier} for tier in ({}, nvme(path), nvme(path, 0.3))]
            goes_on_from_each(saved, prepared, common, held, 6)


@on_ranks(1, 2)
def test_checkpoint_before_the_first_step() -> None:
    """No moments exist, so none are saved; a tier that has some forgets them."""
    with scratch() as path:
        model, optimizer = prepared(stage=1, **nvme(path))
        zeropp.save(Path(path) / "ckpt", model, optimizer, step=0)
        wanted = train(model, optimizer, 0, 3)
        zeropp.load(Path(path) / "ckpt", model, optimizer)
        assert train(model, optimizer, 0, 3) == wanted
        del model, optimizer


@on_ranks(1, 2)
def test_writing_whole_parameters() -> None:
    """gathered(write=True) reaches the fp32 master, and leaves the bits alone that bf16 does not show."""
    with scratch() as path:
        runs = []
        for tier in ({}, nvme(path), nvme(path, 0.5)):
            model, optimizer = prepared(stage=3, precision="bf16", **tier)
            train(model, optimizer, 0, 2)
            weight = next(p for p in model.parameters() if p.ndim == 2)
            with zeropp.gathered(weight, write=True):
                weight.data[0].fill_(0.25)
            runs.append((train(model, optimizer, 2, 5), list(zeropp.full_state_dict(model).values())))
            del model, optimizer, weight
        for losses, values in runs[1:]:
            assert losses == runs[0][0]
            assert all(torch.equal(a, b) for a, b in zip(values, runs[0][1], strict=True))


@on_ranks(1, 2)
def test_memory() -> None:
    """Each tier holds what was planned, within 3%."""
    on_cpu_only("parameters lie on the device, and test_device_memory.py counts those")
    with scratch() as path:
        for precision in (None, "bf16"):
            for fraction in (1.0, 0.5, 0.1):
                model = gpt(width=128)
                adam = torch.optim.AdamW(model.parameters())
                config = zeropp.Config(stage=2, precision=precision, **nvme(path, fraction))
                model, optimizer = zeropp.prepare(model, adam, config)
                assert zeropp.memory(model)["nvme"]["optimizer"]["held"] == 0, "there are no moments before a step"
                train(model, optimizer, 0, 1)
                seen = zeropp.memory(model, optimizer)
                for tier, kinds in (("nvme", ("master", "optimizer")), ("cpu", ("params", "master", "optimizer"))):
                    for kind in kinds:
                        one = seen[tier][kind]
                        assert abs(one["held"] - one["planned"]) <= 0.03 * one["planned"] + 8192, (tier, kind, one)
                whole = seen["nvme"]["optimizer"]["planned"] + seen[shards_tier()]["optimizer"]["planned"]
                assert abs(seen["nvme"]["optimizer"]["planned"] - fraction * whole) <= 1
                assert (seen["nvme"]["master"]["held"] > 0) == (precision == "bf16")
                del model, adam, optimizer


# -- storage that fails --------------------------------------------------------------------------------------------------
@on_ranks(1, 2)
def test_no_room() -> None:
    """One rank's disk is full (here: its files may not grow): prepare raises on every rank, and nothing is left. The
    same model can be prepared otherwise."""
    from zeropp.zero.offload import optim_file as offload

    last = dist.get_world_size() - 1
    with scratch() as path:
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with (
            full_disk(offload, last, 1 << 16),
            pytest.raises(zeropp.TierError, match=r"states.*bytes at offset 0") as caught,
        ):
            zeropp.prepare(model, optimizer, zeropp.Config(stage=1, **nvme(path)))
        if dist.get_rank() == last:
            assert caught.value.path.endswith("states") and caught.value.bytes_wanted > 1 << 16
        else:
            assert f"rank {dist.get_world_size() - 1}" in str(caught.value)
        dist.barrier()
        assert not list(Path(path).iterdir())
        model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=1))
        train(model, optimizer, 0, 1)


@on_ranks(1, 2)
def test_a_disk_that_fails() -> None:
    """The last rank's file loses its end in the middle of the training: the step raises on every rank, what is torn is
    neither stepped nor saved, and the last checkpoint brings the training back."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with scratch() as path:
        saved = Path(path) / "ckpt"
        wanted = train(*prepared(stage=2, precision="bf16"), 0, 6)
        model, optimizer = prepared(stage=2, precision="bf16", **nvme(path))
        assert train(model, optimizer, 0, 3) == wanted[:3]
        zeropp.save(saved, model, optimizer, step=3)
        states = next(Path(path).glob(f"zeropp-scratch-*/rank-{dist.get_rank()}/states"))
        whole_bytes = states.stat().st_size
        if last:
            os.truncate(states, whole_bytes // 2)
        with pytest.raises(zeropp.TierError, match=r"states\".*at offset \d+") as caught:
            train(model, optimizer, 3, 4)
        if last:
            assert caught.value.offset_bytes >= whole_bytes // 4 and caught.value.path == str(states)
            os.truncate(states, whole_bytes)
        optimizer.zero_grad()
        with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
            train(model, optimizer, 3, 4)
        optimizer.zero_grad()
        with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
            zeropp.save(saved, model, optimizer, step=4)
        assert zeropp.load(saved, model, optimizer)["step"] == 3
        assert train(model, optimizer, 3, 6) == wanted[3:]
        del model, optimizer, caught


@on_ranks(1, 2)
def test_a_bit_that_changes() -> None:
    """The last rank's disk changes a page. With checksums the step says so, on every rank; without, all train on, with
    other losses."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with scratch() as path:
        wanted = train(*prepared(stage=2), 0, 4)
        for checksums in (True, False):
            offload = Offload(optimizer="nvme", path=path, checksums=checksums)
            model, optimizer = prepared(stage=2, offload=offload)
            assert train(model, optimizer, 0, 1) == wanted[:1]
            tier: Any = engine_of(model).states
            before = tier.figures()  # what lies between first values was not written, and so not checked
            assert train(model, optimizer, 1, 2) == wanted[1:2]
            states, seen = tier.path, tier.figures()
            read, checked = (seen[kind] - before[kind] for kind in ("read_bytes", "checked_bytes"))
            assert read > 0 and checked == (read if checksums else 0)
            held = zeropp.memory(model, optimizer)[shards_tier()]
            assert ("checksums" in held) == checksums and (
                not checksums or seen["sums_bytes"] <= seen["reserved_bytes"] // 256 + 8192
            )
            if last:
                change(states, 0, 4096 if checksums else states.stat().st_size)
            if not checksums:
                got = train(model, optimizer, 2, 4)
                assert got[0] == wanted[2] and got[1] != wanted[3], "the loss is the same, though the file was changed"
                del model, optimizer, tier
                continue
            with pytest.raises(
                zeropp.TierError, match=r"states\" does not hold what was written: \d+ bytes at offset 0"
            ) as caught:
                train(model, optimizer, 2, 3)
            if last:
                assert caught.value.path == str(states) and caught.value.offset_bytes == 0
                assert "use another disk, and go on from a checkpoint" in str(caught.value)
            optimizer.zero_grad()
            with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
                train(model, optimizer, 2, 3)
            del model, optimizer, tier, caught


@on_ranks(1, 2)
def test_interrupted_after_the_step() -> None:
    """Ctrl-C that arrives when the step is done: raised where it was pressed, and nothing is torn or lost."""
    from zeropp.zero.engine import StepSchedule

    last = dist.get_rank() == dist.get_world_size() - 1
    wanted = train(*prepared(stage=2), 0, 4)
    with scratch() as path:
        model, optimizer = prepared(stage=2, **nvme(path))
        got = train(model, optimizer, 0, 1)
        loss = model(*batch(1))
        loss.backward()
        plain = StepSchedule.run

        def run(self: Any, optimizer: Any) -> None:
            plain(self, optimizer)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            if last:
                patch.setattr(StepSchedule, "run", run)
            with pytest.raises(KeyboardInterrupt) if last else contextlib.nullcontext():
                optimizer.step()
        optimizer.zero_grad()
        got += [loss.item(), *train(model, optimizer, 2, 4)]
        assert got == wanted
        del model, optimizer, loss


@on_ranks(1, 2)
def test_refusals() -> None:
    with scratch() as path:
        model, optimizer = prepared(stage=1, **nvme(path))
        optimizer.param_groups[0]["amsgrad"] = True
        with pytest.raises(zeropp.ConfigError, match=r"amsgrad was switched on after zeropp\.prepare"):
            train(model, optimizer, 0, 1)
        optimizer.param_groups[0]["amsgrad"] = False
        optimizer.zero_grad()
        assert train(model, optimizer, 0, 3) == train(*prepared(stage=1), 0, 3), (
            "nothing was stepped, so nothing is torn"
        )
        del model, optimizer
        file = Path(path) / f"file-{dist.get_rank()}"
        file.touch()
        with pytest.raises(zeropp.TierError, match=r"file-.*choose a folder that can be written"):
            prepared(stage=1, **nvme(str(file)))
