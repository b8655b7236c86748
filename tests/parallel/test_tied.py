# SPDX-License-Identifier: Apache-2.0
"""Parameters that two stages of a pipeline share: an embedding that is the head as well."""

from __future__ import annotations

import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from pipelines import CLASSES, CLIP, MICRO, ROWS, WIDTH, Block, Run, adam, loss_of, mesh_of, plain, require_close
from ranks import of_all_ranks, on_ranks
from tiny import sentence
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from zeropp.checkpoint.manifest import read_manifest
from zeropp.deepspeed.names.modules import initialize
from zeropp.deepspeed.pipeline import PipelineModule, TiedLayerSpec
from zeropp.zero.engine import engine_of

HELD = {"host_copy": "off"}
BOUND = 2e-6
"""Gradients of both uses are added after all micro-batches, and in one process within each: rounded in another order. 1.2e-7 was seen
after 20 steps."""


def tied_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(CLASSES, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, CLASSES, bias=False)]
    layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers)


def other_seed() -> nn.Sequential:
    """Return the net with values of this rank alone: those of the first stage's first data rank are taken."""
    model = tied_net()
    with torch.no_grad():
        model[0].weight.mul_(1.0 + dist.get_rank())
    return model


def tokens(step: int, data_rank: int, micro: int = MICRO) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + data_rank)
    rows = micro * ROWS
    return tuple(torch.randint(0, CLASSES, (rows,), generator=draw) for _ in range(2))  # type: ignore[return-value]


DATA: dict[str, Any] = {"build": tied_net, "data": tokens}


def own_copy(run: Run) -> Tensor:
    """Return this stage's copy of the shared parameter."""
    first = run.mesh.get_local_rank("pp") == 0
    parameter = (run.chunks[0][0] if first else run.chunks[-1][-1]).weight
    with zeropp.gathered(parameter):
        return parameter.detach().cpu()


@pytest.mark.parametrize(
    ("name", "reduce", "options"),
    [
        ("1F1B", "last", {"stage": 3, **HELD}),
        ("Interleaved1F1B", "each", {"stage": 2}),
        ("GPipe", "last", {"stage": 0}),
        pytest.param("1F1B", "last", {"stage": 1}, marks=pytest.mark.slow),
        pytest.param("1F1B", "each", {"stage": 3}, marks=pytest.mark.slow),
        pytest.param("InterleavedZeroBubble", "last", {"stage": 2}, marks=pytest.mark.slow),
    ],
)
@on_ranks(4)
def test_trains(name: str, reduce: str, options: dict[str, Any]) -> None:
    """Two stages of two data ranks, 20 clipped steps, against one process; both copies keep the same bits."""
    wanted, norms = plain(20, 2, **DATA)
    run = Run(mesh_of(2, 2), name, reduce=reduce, build=other_seed, data=tokens, **options)
    found, own_norms = run.train(20)
    assert own_norms == pytest.approx(norms, rel=1e-5)
    assert sorted(found) == sorted(wanted)
    require_close(found, wanted, BOUND)
    copies = of_all_ranks(own_copy(run))
    assert all(torch.equal(one, copies[0]) for one in copies)


@on_ranks(4)
def test_the_rank_that_fills_a_shared_copy_is_late() -> None:
    """Ranks of a host have one copy, which one of them fills. The values of the first stage must not be overwritten by that."""
    module, mesh = importlib.import_module("zeropp.zero.prepare"), mesh_of(2, 2)
    fill = module.fill

    def late(*args: Any) -> None:
        time.sleep(0.05 if mesh.get_local_rank("dp") == 0 else 0.0)
        fill(*args)

    module.fill = late
    try:
        run = Run(mesh, "1F1B", build=other_seed, data=tokens, stage=3)
    finally:
        module.fill = fill
    copies = of_all_ranks(own_copy(run))
    assert all(torch.equal(one, copies[0]) for one in copies)
    assert torch.equal(copies[0], tied_net()[0].weight.to(copies[0].dtype))


@pytest.mark.parametrize(
    ("name", "reduce", "options", "tiers"),
    [
        ("1F1B", "last", {"stage": 3}, ("params", "grads", "optimizer")),
        ("1F1B", "each", {"stage": 2, "precision": "bf16"}, ("grads", "optimizer")),
        pytest.param("Interleaved1F1B", "last", {"stage": 1}, ("optimizer",), marks=pytest.mark.slow),
        pytest.param(
            "1F1B", "each", {"stage": 3, "precision": "bf16"}, ("params", "optimizer"), marks=pytest.mark.slow
        ),
    ],
)
@on_ranks(4)
def test_trains_from_nvme(name: str, reduce: str, options: dict[str, Any], tiers: tuple[str, ...]) -> None:
    """Against one process; the copies, in files of two stages, keep the same bits, and are saved and loaded."""
    wanted, norms = plain(4, 2, **DATA)
    exact = "precision" not in options
    with tempfile.TemporaryDirectory() as folder:
        scratch, saved = (str(Path(of_all_ranks(folder)[0]) / one) for one in ("scratch", "saved"))
        offload = zeropp.Offload(**dict.fromkeys(tiers, "nvme"), path=scratch)
        run = Run(mesh_of(2, 2), name, reduce=reduce, build=other_seed, data=tokens, offload=offload, **options)
        found, own_norms = run.train(4)
        assert own_norms == pytest.approx(norms, rel=1e-5 if exact else 0.05)
        require_close(found, wanted, BOUND if exact else 0.02)
        zeropp.save(saved, run.chunks, run.optimizer, step=4)
        run.train(1)
        zeropp.load(saved, run.chunks, run.optimizer)
        copies = of_all_ranks(own_copy(run))
        assert all(torch.equal(one, copies[0]) for one in copies)
        assert torch.equal(copies[0], found["0.weight"])


@pytest.mark.parametrize(
    ("name", "reduce", "options"),
    [
        ("1F1B", "last", {"stage": 3}),
        ("GPipe", "last", {"stage": 0}),
        pytest.param("Interleaved1F1B", "each", {"stage": 2}, marks=pytest.mark.slow),
        pytest.param("1F1B", "last", {"stage": 1, "precision": "bf16"}, marks=pytest.mark.slow),
    ],
)
@on_ranks(
    4,
    devices=(
        "sim",
        pytest.param("sim-lazy", marks=pytest.mark.slow),
        pytest.param("sim-offload", marks=pytest.mark.slow),
    ),
)
def test_trains_on_gpus(name: str, reduce: str, options: dict[str, Any]) -> None:
    """With shards on the device and on its host, against one process; both copies keep the same bits."""
    wanted, norms = plain(4, 2, **DATA)
    run = Run(mesh_of(2, 2), name, reduce=reduce, build=other_seed, data=tokens, **options)
    found, own_norms = run.train(4)
    exact = "precision" not in options
    assert own_norms == pytest.approx(norms, rel=1e-5 if exact else 0.05)
    require_close(found, wanted, BOUND if exact else 0.02)
    if name != "Interleaved1F1B":
        copies = of_all_ranks(own_copy(run))
        assert all(torch.equal(one, copies[0]) for one in copies)


@on_ranks(2)
def test_without_data_ranks() -> None:
    """Gradients stay in p.grad; fp16 scales the loss, and all stages skip a step together."""
    wanted, norms = plain(4, 1, **DATA)
    found, own_norms = Run(mesh_of(2, 1), "1F1B", stage=2, **DATA).train(4)
    assert own_norms == pytest.approx(norms, rel=1e-5)
    require_close(found, wanted, BOUND)
    run = Run(mesh_of(2, 1), "1F1B", stage=3, precision="fp16", loss_scale=zeropp.LossScale(init=2.0**40), **DATA)
    run.train(3)
    assert run.optimizer.loss_scale < 2.0**40
    assert len(set(of_all_ranks(run.optimizer.loss_scale))) == 1


@on_ranks(4)
def test_units_and_norm() -> None:
    """A unit of its own on both stages, of one length, which one of them counts."""
    run = Run(mesh_of(2, 2), "1F1B", stage=3, **HELD, **DATA)
    units = [unit for unit in engine_of(run.chunks).units if unit.tied]
    assert [(unit.tied, unit.params[0].names, len(unit.params)) for unit in units] == [
        ((0, 1), ["0.weight", "5.weight"], 1)
    ]
    assert len(set(of_all_ranks((units[0].elems, units[0].shard_elems)))) == 1
    run.forward_backward(0)
    own = engine_of(run.chunks).own_gradients(units[0])[0]
    assert own is not None
    parts = of_all_ranks(own)
    assert torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3])  # both stages have the sum
    _, norms = plain(1, 2, **DATA)
    assert run.optimizer.clip_grad_norm_(CLIP) == pytest.approx(norms[0], rel=1e-6)


@on_ranks(4)
def test_checkpoints() -> None:
    """One copy is written; it is read by a model on one stage, and what that saves by two stages."""
    mesh, folder = mesh_of(2, 2), of_all_ranks(tempfile.mkdtemp())[0]
    run = Run(mesh, "1F1B", stage=3, **HELD, **DATA)
    run.train(2)
    zeropp.save(folder, run.chunks, run.optimizer, step=2)
    parameters = read_manifest(Path(folder) / "step-2")["parameters"]
    held = parameters["0.weight"]
    assert held["names"] == ["0.weight", "5.weight"] and "5.weight" not in parameters
    assert sum(end - begin for _, begin, end in held["pieces"][""]) == CLASSES * WIDTH
    after, _ = run.train(1)
    whole = tied_net()
    whole, optimizer = zeropp.prepare(whole, adam(whole), zeropp.Config(stage=2, accumulate=MICRO))
    zeropp.load(folder, whole, optimizer)
    for rows, classes in zip(*(part.chunk(MICRO) for part in tokens(0, dist.get_rank() % 2)), strict=True):
        loss_of(whole(rows), classes).backward()
    optimizer.clip_grad_norm_(CLIP)
    optimizer.step()
    optimizer.zero_grad()
    require_close(zeropp.full_state_dict(whole), after, BOUND)
    zeropp.save(folder, whole, optimizer, step=3)
    again = Run(mesh, "GPipe", stage=1, build=other_seed, data=tokens)
    assert zeropp.load(folder, again.chunks, again.optimizer)["step"] == 3
    same = zeropp.full_state_dict(again.chunks)
    assert all(torch.equal(values, same[name]) for name, values in zeropp.full_state_dict(whole).items())


class Embedded(nn.Module):
    """A stage of one's own: the first embeds, the second uses the embedding as its head."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        if first:
            self.embed = nn.Embedding(CLASSES, WIDTH)
        else:
            self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x) if hasattr(self, "embed") else self.head(x)


@on_ranks(2)
def test_chunks_of_ones_own() -> None:
    """Chunks say which names are one parameter; a schedule trains it."""
    mesh = mesh_of(2, 1)
    first = mesh.get_local_rank("pp") == 0
    chunks = zeropp.parallel.Chunks([Embedded(first)], tied=[("embed.weight", "head.weight")])
    chunks, optimizer = zeropp.prepare(chunks, adam(chunks), zeropp.Config(stage=2), mesh=mesh)
    (stage,) = zeropp.parallel.stages(chunks, mesh["pp"])
    kind = torch_schedules.Schedule1F1B
    schedule = zeropp.parallel.pipeline(kind(stage, MICRO, loss_fn=loss_of))
    x, y = tokens(0, 0)
    schedule.step(*((x,) if first else ()), target=None if first else y)
    told = sentence(lambda: schedule.step(*((x,) if first else ()), target=None if first else y))
    assert "the gradient of 'embed.weight'" in told and "Config(accumulate=k)" in told, told
    optimizer.step()
    optimizer.zero_grad()
    copies = of_all_ranks(next(chunks.parameters()).detach().clone())
    assert torch.equal(*copies)
    told = sentence(lambda: zeropp.set_full(next(chunks.parameters()), copies[0]), zeropp.ConfigError)
    assert "'embed.weight' is tied over ranks 0 and 1 of the pipeline" in told, told
    if not first:
        optimizer.param_groups[0]["lr"] = 0.5
    told = sentence(lambda: schedule.step(*((x,) if first else ()), target=None if first else y))
    assert "'embed.weight' is stepped with lr=0.001 on rank 0 of the pipeline, and with lr=0.5 on rank 1" in told, told


@on_ranks(2)
def test_refusals() -> None:
    mesh = mesh_of(2, 1)
    rank = mesh.get_local_rank("pp")

    def refused(module: nn.Module, **options: Any) -> str:
        return sentence(lambda: zeropp.prepare(module, None, zeropp.Config(**options), mesh=mesh), zeropp.ConfigError)

    def stage_of(shared: nn.Module) -> nn.Module:
        return nn.ModuleDict({"shared": shared, f"own{rank}": nn.Linear(2, 2)})

    told = refused(stage_of(nn.Linear(4, 4 + rank)), stage=2)
    assert (
        "'shared.weight' is on ranks 0 and 1 of the pipeline, so it is one parameter, and its shape is [4, 4]" in told
    ), told
    told = refused(stage_of(nn.Linear(4, 4).requires_grad_(rank == 0)), stage=2)
    assert "its requires_grad is True on the one and False on the other" in told, told
    torch.manual_seed(rank)
    told = refused(stage_of(nn.Linear(4, 4)), stage=2)
    assert "'shared.weight' is on ranks 0 and 1 of the pipeline and has other values on each" in told, told
    assert "tied=[('shared.weight',)]" in told, told
    told = refused(stage_of(nn.Linear(4, 4, device="meta")), stage=2)
    assert "has no values yet that would tell whether it is one" in told, told
    told = refused(nn.Linear(4, 4), stage=2)
    assert "'weight' is on ranks 0 and 1 of the pipeline, and so is every other one" in told, told


@on_ranks(2)
def test_layers_of_deepspeed() -> None:
    """A TiedLayerSpec on two stages: DeepSpeed's name for the same."""
    layers = [TiedLayerSpec("e", nn.Linear, WIDTH, WIDTH), torch.relu, TiedLayerSpec("e", nn.Linear, WIDTH, WIDTH)]
    model = PipelineModule(layers, 2, partition_method="uniform", loss_fn=nn.functional.mse_loss)
    settings = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": MICRO, "zero_optimization": {"stage": 2}}  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=settings)
    draw = torch.Generator().manual_seed(0)
    rows = [(torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)) for _ in range(MICRO)]
    before = of_all_ranks(next(model.parameters()).detach().clone())
    assert torch.equal(*before)
    engine.train_batch(iter(rows))
    after = of_all_ranks(next(model.parameters()).detach().clone())
    assert torch.equal(*after) and not torch.equal(after[0], before[0])
