# SPDX-License-Identifier: Apache-2.0
"""Shards on the (simulated) GPUs of two hosts, which NCCL moves: what is refused, and how the way is chosen. Bits:
tests/sim/test_sim_on_device.py; waits of the host: test_host_waits.py; skipped steps: test_ahead.py."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import of_all_ranks, on_cpu_only, on_ranks
from torch import nn
from zeropp.zero.engine import engine_of

WIDTH = 32
COPY, NCCL = 1, 2  # of enum zpp_gather


ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


def prepared(optimizer: Any = ADAMW, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    return zeropp.prepare(model, optimizer(model.parameters()), zeropp.Config(units=(nn.Linear,), **options))


def train(model: Any, optimizer: Any, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(4, WIDTH, generator=draw, device="cpu").to("sim")
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "copies": ({"comm": zeropp.Comm(gather="copy")}, "GPUs of different hosts cannot map each other's memory"),
    "experts on the host": (
        {"experts": zeropp.Experts(offload=zeropp.Offload(optimizer="cpu"))},
        r"Experts\(offload=\) over several hosts is not supported yet; leave it out",
    ),
    "second copies": (
        {"comm": zeropp.Comm(secondary_shard="host")},
        r"Comm\(secondary_shard='host'\) over several hosts is not",
    ),
}


@on_ranks("2 hosts", devices=("sim",))
@pytest.mark.parametrize("what", REFUSED)
def test_what_several_hosts_lack_is_refused(what: str) -> None:
    options, said = REFUSED[what]
    with pytest.raises(zeropp.ConfigError, match=said):
        prepared(**options)
    model, optimizer = prepared()  # nothing was changed
    assert engine_of(model).core.gather_way() == (NCCL, "the ranks are on several hosts")
    assert len(train(model, optimizer, 1)) == 1


@on_ranks(2, devices=("sim",))
@pytest.mark.parametrize("gather", ["auto", "copy", "nccl"])
def test_the_way_on_one_host(gather: str) -> None:
    """From JSON, too; all give the same numbers."""
    model, optimizer = prepared(comm=zeropp.Comm(gather=gather))
    way, why = engine_of(model).core.gather_way()
    assert way == (NCCL if gather == "nccl" else COPY)
    assert why == ("the GPUs of all ranks map each other's memory" if gather == "auto" else "Comm(gather=) says so")
    losses = train(model, optimizer, 3)
    assert zeropp.Config.from_json('{"comm": {"gather": "nccl"}}').comm.gather == "nccl"
    model, optimizer = prepared()
    assert losses == train(model, optimizer, 3)


@on_ranks(2)
def test_a_way_of_gpus_is_none_of_the_cpu() -> None:
    on_cpu_only("the test is of a model on the CPU")
    with pytest.raises(
        zeropp.ConfigError, match=r"Config\.comm\.gather 'nccl' says how GPUs exchange the shards that they hold"
    ):
        prepared(comm=zeropp.Comm(gather="nccl"), device="cpu")


@on_ranks("2 hosts", devices=("sim",))
@pytest.mark.parametrize("name", ["LAMB", "Muon", "RMSprop"])
def test_other_optimizers_train(name: str) -> None:
    def make(params: Any) -> Any:
        if name != "Muon":
            return (getattr(zeropp.optim, name, None) or getattr(torch.optim, name))(params, lr=1e-2)
        matrices, others = [], []
        for one in params:
            (matrices if one.ndim == 2 else others).append(one)
        return zeropp.optim.Muon([{"params": matrices}, {"params": others, "use_muon": False}], lr=1e-2)

    model, optimizer = prepared(make, stage=2)
    losses = of_all_ranks(train(model, optimizer, 4))
    assert all(one[-1] < one[0] for one in losses)


@on_ranks("2 hosts", devices=("sim",))
def test_a_checkpoint_goes_on() -> None:
    folder = Path(of_all_ranks(tempfile.mkdtemp())[0])
    model, optimizer = prepared(stage=3)
    train(model, optimizer, 2)
    zeropp.save(folder / "one", model, optimizer)
    wanted = train(model, optimizer, 2, first=2)
    model, optimizer = prepared(stage=3)
    zeropp.load(folder / "one", model, optimizer)
    assert train(model, optimizer, 2, first=2) == wanted
