# SPDX-License-Identifier: Apache-2.0
"""ZeRO++ (qwZ, qgZ) in ZeRO-2 and ZeRO-3: the bits, the bytes, the losses."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks
from torch import Tensor, nn
from training import Recipe, batch, gpt, ours, same
from zeropp import Comm
from zeropp.zero.engine import Engine, engine_of
from zeropp.zero.model_state import SHARD

BLOCK = 64
LR = 3e-3


def _prepared(**config: Any) -> tuple[Any, Any, Engine]:
    model = gpt()
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR), zeropp.Config(**config))
    return model, optimizer, engine_of(model)


def _rounded(flat: Tensor, bits: int) -> Tensor:
    """Return every rank's shard, quantised by itself."""
    shards = flat.chunk(dist.get_world_size())
    return torch.cat(
        [zeropp.ops.quantise(s.contiguous(), bits=bits, block_elems=BLOCK).dequantise(flat.dtype) for s in shards]
    )


def _image_bytes(elems: int, bits: int) -> int:
    return elems * bits // 8 + 4 * -(-elems // BLOCK)


def _exact(model: Any, engine: Engine) -> list[Tensor]:
    with zeropp.gathered(model):
        return [unit.whole.clone() for unit in engine.units]


def same_bits(params: str, grads: str, precision: str | None = None) -> None:
    bits = {"int8": 8, "int4": 4}
    comm = Comm(params=params, grads=grads, block_elems=BLOCK)
    model, optimizer, engine = _prepared(comm=comm, precision=precision, prefetch=0)
    assert not engine.host_copy and any(unit.place == SHARD for unit in engine.units)
    for step in range(3):
        exact = _exact(model, engine)
        for unit, flat in zip(engine.units, exact, strict=True):  # the slices are what gathered() shows
            assert unit.place != SHARD or torch.equal(flat.chunk(engine.ranks)[engine.rank], unit.shard)
        wanted = [
            _rounded(flat, bits[params]) if unit.place == SHARD else flat
            for unit, flat in zip(engine.units, exact, strict=True)
        ]
        assert any(not torch.equal(a, b) for a, b in zip(exact, wanted, strict=True))

        # The same model in plain torch, with the rounded values.
        plain = gpt().to(next(iter(exact)).dtype)
        values = {
            entry.names[0]: flat[entry.offset_elems : entry.offset_elems + entry.numel].view(entry.shape)
            for unit, flat in zip(engine.units, wanted, strict=True)
            for entry in unit.params
        }
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(values[name])
        loss, plain_loss = model(*batch(step)), plain(*batch(step))
        assert loss.item() == plain_loss.item(), (step, loss.item(), plain_loss.item())
        loss.backward()
        plain_loss.backward()

        gradients = {name: p.grad for name, p in plain.named_parameters()}
        for unit in engine.units:
            flat = torch.zeros(unit.elems, dtype=unit.dtype)
            for entry in unit.params:
                flat[entry.offset_elems : entry.offset_elems + entry.numel] = gradients[entry.names[0]].flatten()
            everyone = [torch.empty_like(flat) for _ in range(engine.ranks)]
            dist.all_gather(everyone, flat)
            found = engine.gradient_shard(unit)
            assert found is not None
            shards = [one.chunk(engine.ranks)[engine.rank].to(found[0].device, copy=True) for one in everyone]
            sources = [zeropp.ops.quantise(one, bits=bits[grads], block_elems=BLOCK) for one in shards]
            mean = torch.empty_like(found[0])
            zeropp.ops.quant_sum_(sources, mean, factor=1 / engine.ranks)
            assert torch.equal(found[0], mean), (step, unit.name, (found[0] - mean).abs().max())
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(devices=("cpu", "sim", "sim-lazy", "sim-offload"))
@pytest.mark.parametrize(
    "params, grads, precision, ranks",
    [("int8", "int8", None, 2), ("int4", "int4", None, 2), ("int8", "int4", "bf16", 2), ("int8", "int4", "bf16", 3)],
)
def test_same_bits(params: str, grads: str, precision: str | None) -> None:
    same_bits(params, grads, precision)


@on_ranks(2, 3, devices=("cpu", "sim"))
def test_bytes() -> None:
    """Traffic of 3 steps at each format, and what the formula says of units."""
    steps, answers = 3, {}
    for how in ("exact", "int8", "int4"):
        comm = Comm(params=how, grads=how, block_elems=BLOCK)
        model, optimizer, engine = _prepared(comm=comm, host_copy="off", prefetch=0)
        zeropp.traffic(reset=True)
        for step in range(steps):
            model(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        moved = zeropp.traffic()["shm"]

        def wire(unit: Any, how: str = how) -> int:
            return (
                unit.shard_elems * unit.dtype.itemsize
                if how == "exact"
                else _image_bytes(unit.shard_elems, 8 if how == "int8" else 4)
            )

        others = engine.ranks - 1
        answers[how] = {
            "reduced": moved["reduce_scatter"]["bytes"],
            "wanted": steps * others * sum(wire(unit) for unit in engine.units),
            "gathered": moved["all_gather"]["bytes"],
            "shards": 2 * steps * others * sum(wire(unit) for unit in engine.units if unit.place == SHARD),
        }
    exact = answers["exact"]
    for seen in answers.values():
        assert seen["reduced"] == seen["wanted"]
        # Twice a step and unit of the shards; the rest (small units, votes) is the same whatever the form.
        assert exact["gathered"] - seen["gathered"] == exact["shards"] - seen["shards"]


@on_ranks(2, devices=("cpu", "sim", "sim-lazy", "sim-offload"))
def test_reading() -> None:
    comm = Comm(params="int4", grads="int8", block_elems=BLOCK)
    model, optimizer, engine = _prepared(comm=comm)
    for step in range(2):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    shards = [unit.shard.clone() for unit in engine.units]
    state = zeropp.full_state_dict(model)
    with zeropp.gathered(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.cpu(), state[name]), name
    with zeropp.gathered(model, write=True):
        pass
    assert all(torch.equal(unit.shard, before) for unit, before in zip(engine.units, shards, strict=True))
    with zeropp.gathered(model, write=True), torch.no_grad():
        next(model.parameters()).mul_(0.5)
    with torch.no_grad():  # what was written is what is gathered from now on
        loss = model(*batch(9)).item()
        assert loss == model(*batch(9)).item()
    plain = gpt()
    exact = _exact(model, engine)
    values = {
        entry.names[0]: (_rounded(flat, 4) if unit.place == SHARD else flat)[
            entry.offset_elems : entry.offset_elems + entry.numel
        ].view(entry.shape)
        for unit, flat in zip(engine.units, exact, strict=True)
        for entry in unit.params
    }
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(values[name])
        assert plain(*batch(9)).item() == loss


@on_ranks(2, devices=("cpu", "sim"))
def test_accumulates() -> None:
    """Two reducing backwards add up; stages 2 and 3 have the same bits; ahead of need or not, and every run."""
    comm = Comm(grads="int8", block_elems=BLOCK)
    model, optimizer, engine = _prepared(comm=comm, stage=3)
    parts = []
    for micro in range(2):
        model(*batch(0, micro)).backward()
        parts.append([engine.gradient_shard(unit)[0].clone() for unit in engine.units])  # type: ignore[index]
        optimizer.zero_grad()
    for micro in range(2):
        model(*batch(0, micro)).backward()
    for i, unit in enumerate(engine.units):
        assert torch.equal(engine.gradient_shard(unit)[0], parts[0][i] + parts[1][i]), unit.name  # type: ignore[index]
    recipe = Recipe(steps=5, micro=2, clip=1.0)
    two, three = ours(recipe, stage=2, comm=comm), ours(recipe, stage=3, comm=comm)
    same("stage 2 against stage 3", two, three)
    both = Comm(params="int8", grads="int4", block_elems=BLOCK)
    first = ours(recipe, comm=both, prefetch=0)
    same("again", ours(recipe, comm=both, prefetch=0), first)
    same("ahead", ours(recipe, comm=both, prefetch=1 << 20), first)
    exact = ours(recipe)
    assert first.losses != exact.losses and two.losses != exact.losses


@on_ranks(2)
def test_with_others() -> None:
    """Each alone and both, with micro-steps and clipping: states on NVMe, and `accumulate=` in place of `no_sync`, change no bit."""
    recipe = Recipe(steps=4, micro=2, clip=1.0)
    counted = Recipe(steps=4, micro=2, clip=1.0, config={"accumulate": 2})
    exact = ours(recipe)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    nvme = zeropp.Offload(optimizer=zeropp.Tier("nvme", path=folders[0]))
    for params, grads in (("int8", "exact"), ("exact", "int4"), ("int8", "int4")):
        comm = Comm(params=params, grads=grads, block_elems=BLOCK)
        alone = ours(recipe, comm=comm)
        assert alone.losses != exact.losses
        same(f"{params} {grads}, states on NVMe", ours(recipe, comm=comm, offload=nvme), alone)
        same(f"{params} {grads}, accumulate=2", ours(counted, comm=comm), alone)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])


DEMO = {"exact": Comm(), "int8 int4": Comm(params="int8", grads="int4")}


def demo_model(how: str) -> float:
    """Train what `make demo` trains by default, to its end, and return the validation loss."""
    from gpt import GPT, PRESETS, learning_rate  # of examples/, which `training` finds
    from text import Text

    preset, text, rank, ranks = PRESETS["small"], Text(), dist.get_rank(), dist.get_world_size()
    cut: dict[str, Any] = {
        "rank": rank, "ranks": ranks, "batch": preset.batch, "context": preset.model.context, "device": torch.device("cpu"),
    }  # fmt: skip
    torch.manual_seed(0)
    model = GPT(preset.model)
    adam = torch.optim.AdamW(model.parameters(), lr=preset.lr)
    model, optimizer = zeropp.prepare(model, adam, zeropp.Config(comm=DEMO[how]))
    for step in range(preset.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, preset.steps, preset.lr)
        model(*text.batch(step, **cut)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        mean = torch.stack([model(*one) for one in text.validation_batches(**cut)]).mean()
    dist.all_reduce(mean)
    return mean.item() / ranks


@on_ranks(2)
def test_converges() -> None:
    recipe = Recipe(steps=70)
    exact = ours(recipe)
    answer = {"first": exact.losses[0], "exact": sum(exact.losses[-10:]) / 10}
    for params, grads in (("int8", "int8"), ("int8", "int4")):
        run = ours(recipe, comm=Comm(params=params, grads=grads))
        answer[f"{params} {grads}"] = sum(run.losses[-10:]) / 10
    assert answer["exact"] < 0.9 * answer["first"], "it must learn, or equal losses show little"
    assert abs(answer["int8 int8"] / answer["exact"] - 1) < 0.02, answer
    assert abs(answer["int8 int4"] / answer["exact"] - 1) < 0.05, answer


@pytest.mark.slow
@pytest.mark.timeout(1500)
@on_ranks(2, test_s=1200.0, launch_s=1400.0)
def test_the_demo_model_ends_within_half_a_percent() -> None:
    losses = {how: demo_model(how) for how in DEMO}
    for loss in losses.values():
        assert loss == pytest.approx(losses["exact"], rel=0.005), losses


def test_what_cannot_work() -> None:
    with pytest.raises(
        zeropp.ConfigError, match=r"Config\.comm\.grads: 'int8' does not combine with Config\.stage=1: .* use stage 2"
    ):
        zeropp.Config(stage=1, comm=zeropp.Comm(grads="int8"))
    with pytest.raises(zeropp.ConfigError, match="gathered at stage 3 only"):
        zeropp.Config(stage=2, comm=zeropp.Comm(params="int8"))
    with pytest.raises(zeropp.ConfigError, match="2 is not allowed; wanted 'host', or 0 for none"):
        zeropp.Config(comm=zeropp.Comm(secondary_shard=2))
    with pytest.raises(zeropp.ConfigError, match=r"'int4' does not combine with Config\.offload\.params\.kind='nvme'"):
        zeropp.Config(comm=zeropp.Comm(params="int4"), offload=zeropp.Offload(params="nvme", path="/tmp"))
    for block in (24, 8192):
        with pytest.raises(zeropp.ConfigError, match="a multiple of 16, at most 4096"):
            zeropp.Comm(block_elems=block)


WIRES: dict[str, dict[str, Any]] = {
    "int8": {"stage": 3, "comm": Comm(grads="int8", block_elems=BLOCK)},
    "int4, accumulates": {"stage": 2, "comm": Comm(grads="int4", block_elems=BLOCK), "accumulate": 2, "bucket_bytes": 1},
    "fp32 in bf16": {"stage": 1, "precision": zeropp.Precision(reduce="bf16")},
    "bf16 in fp32": {"stage": 3, "precision": zeropp.Precision(param="bf16", accumulate="fp32", reduce="bf16")},
}  # fmt: skip


@on_ranks(2, devices=("sim", "sim-lazy"))
@pytest.mark.parametrize("name", WIRES)
def test_gradients_in_fewer_bits_between_gpus(name: str) -> None:
    """Shards on the device give the bits of shards on the host, whose gradients the CPU quantises and adds."""
    states = (
        zeropp.Offload(optimizer="cpu") if WIRES[name]["stage"] < 3 else zeropp.Offload(params="cpu", optimizer="cpu")
    )
    found = []
    for offload in (zeropp.Offload(), states):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = zeropp.Config(**WIRES[name], offload=offload, units=(nn.Linear,))
        model, optimizer = zeropp.prepare(model, optimizer, config)
        dtype = next(model.parameters()).dtype
        for step in range(3):
            for micro in range(config.accumulate):
                x = torch.linspace(-1, 1 + step + micro + dist.get_rank(), 4 * 96, device="cpu").view(4, 96)
                model(x.to(torch.get_default_device(), dtype)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([value.cpu().tolist() for value in zeropp.full_state_dict(model).values()])
    assert found[0] == found[1]
