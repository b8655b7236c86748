# SPDX-License-Identifier: Apache-2.0
"""Gradients on NVMe: equal to gradients in memory bit for bit, read, changed, counted, and lost without harm when
storage fails."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import full_disk, scratch
from ranks import on_ranks, shards_tier
from training import Recipe, batch, gpt, ours, same, train
from zeropp import Comm, Offload, Tier
from zeropp.zero.engine import engine_of

SPLIT: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, gathering": {"stage": 3, "host_copy": "off", "prefetch": 0},
}


def nvme(path: str, fraction: float = 1.0, others: bool = False, **config: Any) -> dict[str, Any]:
    grads = Tier("nvme", path=path, fraction=fraction)
    tier = Tier("nvme", path=path, fraction=0.7)
    stage = config.pop("stage", 2)
    offload = (
        Offload(grads=grads, optimizer=tier, params=tier if stage == 3 else Tier()) if others else Offload(grads=grads)
    )
    return {"stage": stage, "offload": offload, **config}


def prepared(width: int = 48, layers: int = 2, **config: Any) -> tuple[Any, Any]:
    model = gpt(width=width, layers=layers)
    return zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), zeropp.Config(**config))


def equal_to_memory(recipe: Recipe, **config: Any) -> None:
    """Losses, norms and parameters: gradients in the file, whole and in part, alone and beside the other tiers."""
    with scratch() as path:
        for name, stage in SPLIT.items():
            if dist.get_world_size() == 1 and "gathering" in name:
                continue
            wanted = ours(recipe, **stage, **config)
            for fraction, others in ((1.0, False), (0.4, True)):
                if others and "gathering" in name:
                    continue
                got = ours(recipe, **nvme(path, fraction, others, **stage), **config)
                same(f"{name}, fraction {fraction}, other tiers: {others}", got, wanted)


@on_ranks(1, 2)
def test_fp32() -> None:
    equal_to_memory(Recipe(steps=2, clip=0.5, micro=2))


@on_ranks(1, 2)
def test_bf16() -> None:
    equal_to_memory(Recipe(steps=2, clip=0.5, micro=2), precision="bf16")


def micro_steps(model: Any, optimizer: Any, steps: int, micro: int, scale: float) -> list[float]:
    losses = []
    for step in range(steps):
        for part in range(micro):
            loss = model(*batch(step, part))
            (loss * scale).backward()
            losses.append(loss.item())
            optimizer.step() if part == micro - 1 or scale == 1.0 else None
        optimizer.zero_grad()
    return losses


@on_ranks(1, 2)
def test_accumulate() -> None:
    """Every micro-step reduces, adds to the file, and keeps nothing: as in memory, where every micro-step reduces."""
    with scratch() as path:
        for precision in (None, "bf16"):
            common: dict[str, Any] = {"precision": precision}
            wanted = micro_steps(*prepared(**common, stage=3), 2, 4, 0.25)
            assert micro_steps(*prepared(**common, **nvme(path, stage=3)), 2, 4, 0.25) == wanted
            model, optimizer = prepared(**common, **nvme(path, 0.5, stage=3), accumulate=4)
            assert micro_steps(model, optimizer, 2, 4, 1.0) == wanted
            del model, optimizer


@on_ranks(1, 2)
def test_in_fewer_bits() -> None:
    """Gradients that travel in 8 or 4 bits end in the shard that goes to the file: as in memory, also where several backwards add to it, and
    where the last of them steps."""
    with scratch() as path:
        for bits, precision, stage in (("int8", None, 2), ("int4", "bf16", 3)):
            common: dict[str, Any] = {"comm": Comm(grads=bits), "precision": precision}
            recipe = Recipe(steps=2, clip=0.5, micro=2)
            wanted = ours(recipe, stage=stage, **common)
            for fraction, others in ((1.0, False), (0.4, True)):
                same(f"{bits}, {fraction}", ours(recipe, **nvme(path, fraction, others, stage=stage), **common), wanted)
            every = micro_steps(*prepared(**common, stage=stage), 2, 4, 0.25)
            for steps in ({}, {"step_in_backward": True}):
                model, optimizer = prepared(**common, **nvme(path, 0.5, stage=stage), accumulate=4, **steps)
                assert micro_steps(model, optimizer, 2, 4, 1.0) == every, (bits, steps)
                del model, optimizer
        if dist.get_world_size() > 1:
            exact = prepared(stage=3, precision="bf16")
            assert micro_steps(*exact, 2, 4, 0.25) != every, "they are rounded"


@on_ranks(1, 2)
def test_shards_of_whole_pages() -> None:
    """Large enough for several windows in a step, and for writes that wait for room."""
    with scratch() as path:
        runs = []
        for tiers in ({"stage": 3}, nvme(path, stage=3), nvme(path, 0.7, True, stage=3)):
            model, optimizer = prepared(512, **tiers)
            optimizer.zero_grad()
            runs.append((train(model, optimizer, 0, 2), [v.sum() for v in zeropp.full_state_dict(model).values()]))
            del model, optimizer
        assert runs[0] == runs[1] == runs[2]


@on_ranks(1, 2)
def test_a_part_of_the_model() -> None:
    """Units that a step does not use, frozen ones, and parameters whose gradient is dropped between two backwards."""
    with scratch() as path:
        runs = []
        for tiers in ({"stage": 2}, nvme(path), nvme(path, 0.5)):
            model = gpt(layers=3)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("blocks.1" not in name)
            adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
            model, adam = zeropp.prepare(model, adam, zeropp.Config(**tiers))
            losses = []
            for step in range(3):
                model(*batch(step)).backward()
                model.blocks[0].up.weight.grad = None
                loss = model(*batch(step, 1))
                loss.backward()
                if step == 1:
                    for parameter in model.blocks[2].parameters():
                        parameter.grad = None
                adam.step()
                adam.zero_grad()
                losses.append(loss.item())
            runs.append((losses, [v.clone() for v in zeropp.full_state_dict(model).values()]))
            del model, adam, loss
        for losses, values in runs[1:]:
            assert losses == runs[0][0]
            assert all(torch.equal(a, b) for a, b in zip(values, runs[0][1], strict=True))


@on_ranks(1, 2)
def test_reading_and_changing() -> None:
    """gathered(grads=True), get_full, set_full, clipping by value and by other norms reach the file."""
    with scratch() as path:
        runs = []
        for tiers in ({"stage": 2}, nvme(path), nvme(path, 0.5)):
            model, optimizer = prepared(**tiers)
            weight = model.blocks[1].down.weight
            losses, seen = [], []
            for step in range(2):
                loss = model(*batch(step))
                loss.backward()
                if dist.get_world_size() == 1 and "offload" in tiers:
                    with pytest.raises(zeropp.PartitionedParameterError, match=r"is not in p\.grad"):
                        _ = weight.grad
                with zeropp.gathered(weight, grads=True):
                    seen.append(weight.grad.clone())
                whole = zeropp.get_full(weight, "grad")
                assert torch.equal(whole, seen[-1])
                zeropp.set_full(weight, whole * 2, "grad")
                optimizer.clip_grad_value_(0.01)
                seen.append(zeropp.get_full(weight, "grad"))
                seen.append(torch.tensor(optimizer.clip_grad_norm_(0.1, norm_type=1.0)))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            runs.append((losses, seen))
            del model, optimizer, weight, loss
        for losses, seen in runs[1:]:
            assert losses == runs[0][0]
            assert all(torch.equal(a, b) for a, b in zip(seen, runs[0][1], strict=True))


@on_ranks(1, 2)
def test_memory_and_traffic() -> None:
    """Each tier holds what was planned; bytes to and from the disk equal the formulas."""
    with scratch() as path:
        for precision, fraction in ((None, 1.0), ("bf16", 1.0), (None, 0.5)):
            model, optimizer = prepared(256, precision=precision, **nvme(path, fraction))
            train(model, optimizer, 0, 1)
            model(*batch(1)).backward()
            seen = zeropp.memory(model, optimizer)
            for tier in ("cpu", "nvme"):
                one = seen[tier]["grads"]
                assert abs(one["held"] - one["planned"]) <= 0.03 * one["planned"] + 8192, (tier, one)
            filed = seen["nvme"]["grads"]["held"]
            bytes_ = (2 if precision else 4) * sum(p.numel() for p in model.parameters()) / dist.get_world_size()
            assert abs(filed - fraction * bytes_) <= 0.03 * bytes_, (filed, bytes_)
            assert not any(p.grad is not None for p in model.parameters() if type(p) is torch.nn.Parameter)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            zeropp.traffic(reset=True)
            tier = engine_of(model).grads
            model(*batch(2)).backward()
            tier.require_whole()
            first = zeropp.traffic(reset=True)["nvme"]
            slack = 0.05 * filed + (1 << 16)
            assert first["read"]["bytes"] <= slack, first
            assert filed - slack <= first["write"]["bytes"] <= filed + slack, (first, filed)
            model(*batch(3)).backward()
            optimizer.step()
            then = zeropp.traffic(reset=True)["nvme"]
            assert filed - slack <= then["write"]["bytes"] <= filed + slack, (then, filed)
            assert abs(then["read"]["bytes"] - 3 * filed) <= 2 * slack, (then, filed)  # added to, measured, stepped
            del model, optimizer, tier


def held(kind: str) -> int:
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith(kind))


@on_ranks(1)
def test_the_process_is_smaller() -> None:
    """160 MiB of gradients: the kernel says what one backward grew the process by at its peak."""
    torch.nn.Linear(1024, 1024)(torch.ones(2, 1024)).sum().backward()  # the first one makes buffers of its own
    with scratch() as path:
        grown = []
        for tiers in (nvme(path), {"stage": 2}):
            torch.manual_seed(0)
            model: Any = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(40)))
            model, _ = zeropp.prepare(model, None, zeropp.Config(**tiers))
            assert zeropp.memory(model)[shards_tier()]["grads"]["held"] == 0
            loss = model(torch.ones(2, 1024)).square().mean()
            ctypes.CDLL(None).malloc_trim(0)  # what earlier cases left would be taken first, and no growth be seen
            before = held("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
            loss.backward()
            grown.append(held("VmHWM") - before)
            if "offload" in tiers:
                seen = engine_of(model).grads.figures()
                assert 0 < seen["acquired_peak_bytes"] <= 32 << 20, seen
            del model, loss
        assert grown[0] < 80 << 20 < 140 << 20 < grown[1], grown


# -- storage that fails --------------------------------------------------------------------------------------------------
@on_ranks(1, 2)
def test_no_room() -> None:
    """One rank's disk is full (here: its files may not grow): prepare raises on every rank, and nothing is left."""
    from zeropp.zero.offload import grad_file

    last = dist.get_world_size() - 1
    with scratch() as path:
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with (
            full_disk(grad_file, last, 1 << 14),
            pytest.raises(zeropp.TierError, match=r"grads.*bytes at offset 0") as caught,
        ):
            zeropp.prepare(model, optimizer, zeropp.Config(**nvme(path, others=True, stage=3)))
        if dist.get_rank() == last:
            assert caught.value.path.endswith("grads") and caught.value.bytes_wanted > 1 << 14
        dist.barrier()
        assert not list(Path(path).iterdir())
        del caught
        model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=2))
        train(model, optimizer, 0, 1)


@on_ranks(1, 2)
def test_a_disk_that_fails() -> None:
    """The last rank's file loses its end: backward ends, the step raises on every rank, nothing is torn, and once the
    disk is well again zero_grad() and the next batch go on as if this batch had never been."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with scratch() as path:
        wanted = train(*prepared(stage=2), 0, 4)
        model, optimizer = prepared(**nvme(path))
        assert train(model, optimizer, 0, 2) == wanted[:2]
        file = engine_of(model).grads.path
        whole_bytes = file.stat().st_size
        model(*batch(50)).backward()
        engine_of(model).grads.require_whole()
        if last:
            os.truncate(file, whole_bytes // 2)
        dist.barrier()
        model(*batch(51)).backward()  # adds to what is not there
        with pytest.raises(zeropp.TierError, match=r"grads\".*at offset \d+") as caught:
            optimizer.step()
        if last:
            assert caught.value.path == str(file) and caught.value.offset_bytes is not None
            os.truncate(file, whole_bytes)
        with pytest.raises(zeropp.TierError, match="grads"):
            optimizer.clip_grad_norm_(1.0)
        optimizer.zero_grad()
        dist.barrier()
        assert train(model, optimizer, 2, 4) == wanted[2:]
        del model, optimizer, caught


@on_ranks(1, 2)
def test_a_step_that_fails() -> None:
    """Gradients that cannot be read in the middle of a step: as any step that storage fails under."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with scratch() as path:
        saved = Path(path) / "ckpt"
        wanted = train(*prepared(256, stage=2), 0, 3)
        model, optimizer = prepared(256, **nvme(path, others=True))
        assert train(model, optimizer, 0, 2) == wanted[:2]
        zeropp.save(saved, model, optimizer, step=2)
        model(*batch(2)).backward()
        optimizer.clip_grad_norm_(float("inf"))
        tier = engine_of(model).grads
        whole_bytes = tier.path.stat().st_size
        if last:
            os.truncate(tier.path, whole_bytes // 8)
        with pytest.raises(zeropp.TierError, match=r"grads\".*at offset \d+"):
            optimizer.step()
        if last:
            os.truncate(tier.path, whole_bytes)
        optimizer.zero_grad()
        with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
            train(model, optimizer, 2, 3)
        optimizer.zero_grad()
        dist.barrier()
        assert zeropp.load(saved, model, optimizer)["step"] == 2
        assert train(model, optimizer, 2, 3) == wanted[2:]
        del model, optimizer, tier


@on_ranks(1, 2)
def test_refusals() -> None:
    with scratch() as path:
        with pytest.raises(zeropp.ConfigError, match=r"offload\.grads\.kind.*Config\.stage=1"):
            zeropp.Config(**nvme(path, stage=1))
        same("cpu", ours(Recipe(steps=2), stage=2, offload=Offload(grads="cpu")), ours(Recipe(steps=2), stage=2))
