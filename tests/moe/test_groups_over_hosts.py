# SPDX-License-Identifier: Apache-2.0
"""Experts on several hosts (one machine under several names) with each option that reads or sends in a way of its own.

``aabb``: the ranks that exchange tokens share a host, and those with the same experts do not. ``abab``: the other way round.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import moe_models
import pytest
import torch
import torch.distributed as dist
import zeropp
from expert_optimizers import (
    LAMB_BOUND,
    MUON_BOUND,
    PAPERS,
    MuonOfEach,
    close,
    lamb,
    muon,
    one_bit_follows_its_paper,
    one_process,
    trained,
)
from expert_parity import BOUND, compare, parity, reference
from launch import run_ranks
from moe_models import batch, loss_of
from ranks import of_all_ranks, on_ranks
from torch import Tensor
from zeropp.zero.engine import engine_of
from zeropp.zero.model_state import SHARD

SLOW = pytest.mark.slow
HOSTS = ["aabb", pytest.param("abab", marks=SLOW)]
BLOCK = 64


def on(hosts: str) -> None:
    os.environ["ZEROPP_HOST_ID"] = hosts[dist.get_rank()]


@pytest.mark.parametrize("hosts", HOSTS)
@on_ranks(4, alone=True)
def test_steps_of_whole_tensors(hosts: str) -> None:
    """A tensor of experts is cut over hosts, and has the trust ratio or the direction of one process."""
    on(hosts)
    wanted = one_process("Mixtral", lamb, 4), one_process("Mixtral", MuonOfEach, 4)
    for stage in (1, 3):
        close(trained("Mixtral", lamb, zeropp.Config(stage=stage, experts=2)), wanted[0], LAMB_BOUND)
        close(trained("Mixtral", muon, zeropp.Config(stage=stage, experts=2)), wanted[1], MUON_BOUND)


@pytest.mark.parametrize("hosts", ["abab", pytest.param("aabb", marks=SLOW)])
@pytest.mark.parametrize(
    "kind", [kind if at == 0 else pytest.param(kind, marks=SLOW) for at, kind in enumerate(PAPERS)]
)
@on_ranks(4, alone=True)
def test_one_bit_follows_its_paper(kind: str, hosts: str) -> None:
    on(hosts)
    one_bit_follows_its_paper(kind)


@pytest.mark.parametrize("hosts", HOSTS)
@on_ranks(4, alone=True)
def test_a_second_copy_on_each_host(hosts: str) -> None:
    """hpZ: the backward gathers within the host."""
    on(hosts)
    parity("Mixtral", 2, stage=3, comm=zeropp.Comm(secondary_shard="host"))


def off_by(got: Tensor, wanted: Tensor) -> float:
    """Return the error, in parts of the norm of what is wanted."""
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-6))


# A sum of rounded values in blocks of 64, rounded once more between hosts: each rounding is at most 1/254 of its block's largest
# element, and that is at most a few times the block's root mean square. Another divisor would be off by a half at least.
ROUNDED = 0.05


@pytest.mark.parametrize("hosts", HOSTS)
@on_ranks(4, alone=True)
def test_gradients_in_8_bits(hosts: str) -> None:
    """qgZ: gradients of experts are those of one process but for the rounding."""
    on(hosts)
    for stage in (2, 3):
        losses, gradients, _ = reference("Mixtral", 4, steps=1)
        model = moe_models.build("Mixtral", "grouped_mm")
        config = zeropp.Config(stage=stage, experts=2, comm=zeropp.Comm(grads="int8", block_elems=BLOCK))
        model, _ = zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
        loss = loss_of(model, batch(0, dist.get_rank()))
        loss.backward()
        assert abs(sum(of_all_ranks(loss.item())) / 4 - losses[0]) <= BOUND * losses[0]
        errors = {}
        for path, parameter in model.named_parameters():
            if ".experts." in path:  # whose gradients are alike, so that no block has much larger ones of a neighbour
                gradient = zeropp.get_full(parameter, "grad")
                assert gradient is not None, path
                errors[path] = off_by(gradient, gradients[0][path])
        assert min(errors.values()) > BOUND and max(errors.values()) <= ROUNDED, errors


def as_gathered(model: Any, ep: int) -> dict[str, Tensor]:
    """Return the values that the forward computes with: each shard rounded by itself, and all experts."""
    engine, mine = engine_of(model), {}
    with zeropp.gathered(model):
        for unit in engine.units:
            flat = unit.whole.clone()
            if unit.place == SHARD:
                shards = flat.chunk(flat.numel() // unit.shard.numel())
                flat = torch.cat([
                    zeropp.ops.quantise(one.contiguous(), bits=8, block_elems=BLOCK).dequantise(flat.dtype) for one in shards
                ])  # fmt: skip
            for entry in unit.params:
                values = flat[entry.offset_elems : entry.offset_elems + entry.numel]
                mine[entry.names[0]] = values.view(entry.param.shape).clone()
    parts = of_all_ranks(mine)[:ep]
    return {name: torch.cat([one[name] for one in parts]) if ".experts." in name else mine[name] for name in mine}


@pytest.mark.parametrize("hosts", HOSTS)
@on_ranks(4, alone=True)
def test_parameters_in_8_bits(hosts: str) -> None:
    """qwZ: experts are gathered in 8 bits by the ranks that share them, on whichever host these are."""
    on(hosts)
    model = moe_models.build("Mixtral", "grouped_mm")
    comm = zeropp.Comm(params="int8", block_elems=BLOCK)
    config = zeropp.Config(stage=3, experts=2, comm=comm, prefetch=0)
    model, _ = zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    exact, rounded = zeropp.full_state_dict(model), as_gathered(model, 2)
    plain = moe_models.build("Mixtral")
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(rounded[name])
    assert any(not torch.equal(rounded[name], exact[name]) for name in rounded if ".experts." in name)
    wanted = loss_of(plain, torch.cat([batch(0, rank) for rank in range(4)]))
    wanted.backward()
    loss = loss_of(model, batch(0, dist.get_rank()))
    loss.backward()
    assert abs(sum(of_all_ranks(loss.item())) / 4 - wanted.item()) <= BOUND * wanted.item()
    for (path, parameter), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        compare(zeropp.get_full(parameter, "grad"), theirs.grad, path)


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def goes_on(
    rank: int, ranks: int, folder: str, number: int, hosts: str, experts: Any, stage: int, killed: int | None
) -> list[str]:
    """Load the checkpoint of the layout before this one, compare, take a step, and save. Return what differs.

    ``killed``: a rank that dies in one more save, which leaves the checkpoint before it.
    """
    import torch.distributed as dist
    from zeropp.config import Experts

    os.environ["ZEROPP_HOST_ID"] = hosts[rank]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(zeropp.moe.MoE(16, 4, 2, intermediate=8) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = None if experts is None else Experts(parallel=experts)
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=stage, experts=parts))
    differ = []
    if number:
        zeropp.load(folder, model, optimizer)
        before = torch.load(Path(folder, "values.pt"))
        differ = [name for name, value in everything(model).items() if not torch.equal(value, before[name])]
    draw = torch.Generator().manual_seed(100 * number + rank)
    model(torch.randn(12, 16, generator=draw)).square().mean().backward()
    optimizer.step()
    zeropp.save(folder, model, optimizer, step=number)
    values = everything(model)
    dist.barrier()
    if rank == 0:
        torch.save(values, Path(folder, "values.pt"))
    dist.barrier()
    if killed is None:
        dist.destroy_process_group()
        return differ
    optimizer.step()
    if rank == killed:
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    try:
        zeropp.save(folder, model, optimizer, step=100 + number)
    except zeropp.CommError as error:
        return [*differ, *([] if error.rank == killed else [str(error)])]
    return [*differ, f"rank {killed} was killed in a save, and this rank got no error"]


def everything(model: Any) -> dict[str, Tensor]:
    found = dict(zeropp.full_state_dict(model))
    for name, parameter in model.named_parameters():
        moment = zeropp.get_full(parameter, "exp_avg")
        if moment is not None:
            found[f"{name}: exp_avg"] = moment
    return found


ROUND = [("aabb", 2, 3), ("aa", 2, 1), ("abab", 4, 2), ("a", 1, 3), ("ab", 2, 0), ("abab", 2, 3)]
"""Hosts, ranks with different experts, stage."""


@pytest.mark.parametrize(
    "layouts", [ROUND[:3], pytest.param(ROUND[2:], marks=SLOW), pytest.param(ROUND[::-1], marks=SLOW)]
)
def test_checkpoints_go_from_hosts_to_one_and_back(layouts: list[Any], tmp_path: Path) -> None:
    """In between a rank is killed in a save, and the checkpoint before is read."""
    for number, (hosts, experts, stage) in enumerate(layouts):
        killed = 1 if number == 1 and len(hosts) > 1 else None
        arguments = (str(tmp_path), number, hosts, experts, stage, killed)
        outcomes = run_ranks(len(hosts), goes_on, *arguments, check=False)
        for outcome in outcomes:
            ended = (-signal.SIGKILL, None) if outcome.rank == killed else (0, [])
            assert (outcome.code, outcome.value) == ended, f"{layouts[number]}: {outcome}"
