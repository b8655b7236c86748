# SPDX-License-Identifier: Apache-2.0
"""Meshes of several dimensions on the (simulated) GPUs of two hosts: four ranks train there with the bits that they have on one host.

Ranks begin on one host, and ``over`` lets them meet again on the hosts that letters name: "aabb" are two on each. Slices exchange by
NCCL (backend "simulated"), and stages through the host (gloo).
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from meetings import over
from pipelines import CLASSES, CLIP, MICRO, ROWS, WIDTH, Block, Run, adam, batch, loss_of, mesh_of, net
from ranks import on_ranks
from tiny import sentence
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from zeropp.comm.collective import exchange
from zeropp.comm.group import communicator
from zeropp.comm.heads import Cut, query_spans, to_heads, to_tokens
from zeropp.zero.engine import engine_of

STEPS = 2
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ON_HOST, COPY, NCCL = 0, 1, 2  # of enum zpp_gather
Trained = tuple[list[float], list[float], dict[str, Tensor]]


def told(value: Any) -> list[Any]:
    """Return what all ranks say; the backend of slices has no collective of objects."""
    return exchange(communicator(), value)


# -- tp 2 x dp 2 -----------------------------------------------------------------------------------------------------------


def sliced(dtype: torch.dtype = torch.float32) -> tuple[Any, nn.Sequential]:
    """Return the mesh, whose slices are neighbours, and the model."""
    mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("dp", "tp"))
    plan: dict[str, Any] = {}
    for block in range(1, 7):
        plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
    return mesh, zeropp.parallel.tensor(net().to(dtype), mesh["tp"], plan)


def train_slices(
    mesh: Any, model: Any, optimizer: Any, first: int = 0, accumulate: int = 1, clips: bool = True
) -> Trained:
    losses, norms = [], []
    for step in range(first, first + STEPS):
        for micro in range(accumulate):
            x, y = batch(accumulate * step + micro, mesh.get_local_rank("dp"))
            losses.append(loss_of(model(x.to(next(model.parameters()).dtype)).float(), y))
            optimizer.backward(losses[-1])
        norms.append(optimizer.clip_grad_norm_(CLIP) if clips else 0.0)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses], [float(norm) for norm in norms], zeropp.full_state_dict(model)


def of_slices(way: int, **options: Any) -> Trained:
    mesh, model = sliced(HALVES.get(options.get("precision"), torch.float32))
    model, optimizer = zeropp.prepare(model, adam(model), zeropp.Config(**options), mesh=mesh)
    assert engine_of(model).core.gather_way()[0] == way
    clips = not options.get("step_in_backward", False)
    return train_slices(mesh, model, optimizer, accumulate=options.get("accumulate", 1), clips=clips)


# -- pp 2 x dp 2 -----------------------------------------------------------------------------------------------------------


def tied_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(CLASSES, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, CLASSES, bias=False)]
    layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers)


def tokens(step: int, data_rank: int, micro: int = MICRO) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + data_rank)
    first, second = (torch.randint(0, CLASSES, (micro * ROWS,), generator=draw) for _ in range(2))
    return first, second


def train_stages(run: Run, first: int = 0) -> Trained:
    losses, norms = [], []
    for step in range(first, first + STEPS):
        losses += run.forward_backward(step)
        norms.append(run.optimizer.clip_grad_norm_(CLIP))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return [loss.item() for loss in losses], [float(norm) for norm in norms], zeropp.full_state_dict(run.chunks)


def of_stages(way: int, name: str = "1F1B", tied: bool = True, **options: Any) -> Trained:
    what: dict[str, Any] = {"build": tied_net, "data": tokens} if tied else {}
    if options.pop("offload", False):
        options["offload"] = zeropp.Offload(params="cpu", optimizer="cpu")
    run = Run(mesh_of(2, 2), name, **what, **options)
    assert engine_of(run.chunks).core.gather_way()[0] == way
    return train_stages(run)


# -- sp 2 x dp 2 -----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Four heads, of which each rank has the tokens of a part of the sequence."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cut, self.spans = Cut(group, [4, 4]), query_spans(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        mine = [one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.up(x).chunk(3, -1)]
        q, k, v = to_heads(self.cut, mine, (self.spans,) * 3)
        y = torch.softmax(q @ k.transpose(2, 3), -1) @ v
        return x + self.down(to_tokens(self.cut, y, self.spans).transpose(1, 2).flatten(2))


def of_sequences(way: int, **options: Any) -> Trained:
    """All four are data ranks. Those of a dimension compute one sequence together."""
    mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("dp", "sp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(mesh["sp"].get_group()) for _ in range(2)))
    model, optimizer = zeropp.prepare(model, adam(model), zeropp.Config(**options), mesh=mesh)
    assert engine_of(model).core.gather_way()[0] == way
    losses, norms = [], []
    for step in range(STEPS):
        x, _ = batch(step, mesh.get_local_rank("dp"))
        losses.append(model(x[None].chunk(2, 1)[mesh.get_local_rank("sp")]).square().mean())
        losses[-1].backward()
        norms.append(optimizer.clip_grad_norm_(CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses], [float(norm) for norm in norms], zeropp.full_state_dict(model)


# -- training --------------------------------------------------------------------------------------------------------------


def require_same(found: Trained, wanted: Trained) -> None:
    assert found[0] == wanted[0] and found[1] == wanted[1]
    assert found[2].keys() == wanted[2].keys()
    for name, values in wanted[2].items():
        assert torch.equal(found[2][name], values), name


def require_bits_of_one_host(body: Callable[..., Trained], hosts: str, way: int, **options: Any) -> None:
    wanted = body(min(way, COPY), **options)
    with over(hosts):
        require_same(body(way, **options), wanted)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("hosts", "way", "options"),
    [
        ("aabb", NCCL, {"stage": 1}),
        ("aabb", NCCL, {"stage": 3}),
        ("abab", COPY, {"stage": 2}),
        pytest.param("abab", COPY, {"stage": 3, "step_in_backward": True}, marks=SLOW),
        pytest.param("aabb", NCCL, {"stage": 3, "step_in_backward": True}, marks=SLOW),
        pytest.param("aabb", NCCL, {"stage": 0}, marks=SLOW),
        pytest.param("aabb", NCCL, {"stage": 2, "accumulate": 2}, marks=SLOW),
        pytest.param("aabb", NCCL, {"stage": 3, "precision": "fp16"}, marks=SLOW),
        pytest.param("abcd", NCCL, {"stage": 3, "precision": "bf16"}, marks=SLOW),
    ],
)
@on_ranks(4, devices=("sim", pytest.param("sim-lazy", marks=SLOW)), backend="simulated")
def test_slices(hosts: str, way: int, options: dict[str, Any]) -> None:
    """On aabb slices are within a host and data ranks over both; on abab it is the other way round."""
    require_bits_of_one_host(of_slices, hosts, way, **options)


@pytest.mark.parametrize(
    ("hosts", "way", "options"),
    [
        ("aabb", COPY, {"stage": 3}),
        ("abab", NCCL, {"stage": 2}),
        pytest.param("aabb", COPY, {"stage": 0, "name": "GPipe"}, marks=SLOW),
        pytest.param("aabb", COPY, {"stage": 1, "tied": False}, marks=SLOW),
        pytest.param("aabb", ON_HOST, {"stage": 3, "offload": True}, marks=SLOW),
        pytest.param("abab", NCCL, {"stage": 3}, marks=SLOW),
        pytest.param("abab", NCCL, {"stage": 1, "name": "GPipe"}, marks=SLOW),
        pytest.param(
            "abab", NCCL, {"stage": 3, "name": "Interleaved1F1B", "reduce": "each", "tied": False}, marks=SLOW
        ),
    ],
)
@on_ranks(4, devices=("sim", pytest.param("sim-lazy", marks=SLOW)))
def test_stages(hosts: str, way: int, options: dict[str, Any]) -> None:
    """On aabb a stage is on one host, whose ranks copy; on abab each stage is over both. They share a parameter."""
    require_bits_of_one_host(of_stages, hosts, way, **options)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=SLOW)])
@on_ranks(4, devices=("sim", pytest.param("sim-lazy", marks=SLOW)), backend="simulated")
def test_parts_of_sequences(stage: int) -> None:
    require_bits_of_one_host(of_sequences, "aabb", NCCL, stage=stage)


@pytest.mark.slow
@on_ranks(4, devices=("sim",), backend="simulated")
def test_nccl_on_one_host() -> None:
    require_same(of_slices(NCCL, stage=3, comm=zeropp.Comm(gather="nccl")), of_slices(COPY, stage=3))


@pytest.mark.slow
@on_ranks(4, devices=("sim-lazy",), backend="simulated")
def test_waits_of_the_host() -> None:
    """A step with a mesh waits for the norm of all ranks once, wherever these are."""
    sim: Any = importlib.import_module("sim")

    def waits_of_a_step() -> dict[str, int]:
        mesh, model = sliced()
        model, optimizer = zeropp.prepare(model, adam(model), zeropp.Config(stage=3), mesh=mesh)
        x, y = batch(0, mesh.get_local_rank("dp"))
        waits: dict[str, int] = {}
        for _ in range(3):
            waits.clear()
            with sim.waits_of_the_host(waits):
                loss_of(model(x), y).backward()
                optimizer.clip_grad_norm_(CLIP)
                optimizer.step()
                optimizer.zero_grad()
        return waits

    once = {"cuEventQuery, again and again": 1}
    assert waits_of_a_step() == once
    with over("aabb"):
        assert waits_of_a_step() == once


# -- what else there is to a job -------------------------------------------------------------------------------------------


@on_ranks(4, devices=("sim",), backend="simulated")
def test_slices_go_on_from_a_checkpoint() -> None:
    """Two hosts save, and two others and one load: all go on with the same bits. Without an optimizer the model computes the same."""
    folder = Path(told(tempfile.mkdtemp())[0], "saved")
    x, _ = batch(99, 0)

    def go_on() -> Trained:
        mesh, model = sliced()
        model, optimizer = zeropp.prepare(model, adam(model), zeropp.Config(stage=3), mesh=mesh)
        zeropp.load(folder, model, optimizer)
        return train_slices(mesh, model, optimizer, STEPS)

    with over("aabb"):
        mesh, model = sliced()
        model, optimizer = zeropp.prepare(model, adam(model), zeropp.Config(stage=3), mesh=mesh)
        train_slices(mesh, model, optimizer)
        zeropp.save(folder, model, optimizer)
        with torch.no_grad():
            answer = model(x).cpu()
        wanted = train_slices(mesh, model, optimizer, STEPS)
        require_same(go_on(), wanted)
        mesh, model = sliced()
        model, _ = zeropp.prepare(model, None, zeropp.Config(stage=3), mesh=mesh)
        zeropp.load(folder, model)
        with torch.no_grad():
            assert torch.equal(model(x).cpu(), answer)
    require_same(go_on(), wanted)


@on_ranks(4, devices=("sim",))
def test_stages_go_on_from_a_checkpoint() -> None:
    folder = Path(told(tempfile.mkdtemp())[0], "saved")
    with over("abab"):
        run = Run(mesh_of(2, 2), "1F1B", build=tied_net, data=tokens, stage=2)
        train_stages(run)
        zeropp.save(folder, run.chunks, run.optimizer)
        wanted = train_stages(run, STEPS)
    with over("aabb"):
        run = Run(mesh_of(2, 2), "1F1B", build=tied_net, data=tokens, stage=2)
        zeropp.load(folder, run.chunks, run.optimizer)
        require_same(train_stages(run, STEPS), wanted)


# -- what is refused -------------------------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "a mesh of several dimensions with shards on the hosts of several hosts is": {
        "offload": zeropp.Offload(params="cpu", optimizer="cpu")
    },
    "Config.experts in a mesh of several dimensions over several hosts is": {"experts": 2},
}


@on_ranks(4, devices=("sim",), backend="simulated")
def test_refusals() -> None:
    with over("aabb"):
        for what, options in REFUSED.items():
            mesh, model = sliced()
            with pytest.raises(
                zeropp.ConfigError, match=f"{what} not supported yet; .*whose data dimensions lie within a host"
            ):
                zeropp.prepare(model, adam(model), zeropp.Config(**options), mesh=mesh)


@on_ranks(4, devices=("sim",))
def test_stages_on_different_numbers_of_hosts() -> None:
    """One copies and the other one uses NCCL. What only the second one lacks is refused on all ranks."""
    rank = dist.get_rank()
    wanted = of_stages(COPY, stage=2)
    with over("aaab"):
        require_same(of_stages(COPY if rank < 2 else NCCL, stage=2), wanted)
        for said in told(sentence(lambda: of_stages(ON_HOST, stage=3, offload=True), zeropp.ConfigError)):
            assert (
                "a mesh of several dimensions with shards on the hosts of several hosts is not supported yet" in said
            ), said
            assert "a mesh whose data dimensions lie within a host" in said, said
