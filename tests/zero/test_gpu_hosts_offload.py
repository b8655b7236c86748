# SPDX-License-Identifier: Apache-2.0
"""Shards on the hosts of (simulated) GPUs of two hosts (docs/design/0054). With one rank a host the bits are those of one host; bits of plain
torch, also with two ranks a host, and waits: tests/sim/test_sim_offload.py; a killed rank: test_faults.py."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from launch import run_ranks
from rank import use
from ranks import on_ranks, simulated
from torch import nn
from zeropp.config import Comm, Offload

WIDTH, STEPS = 32, 4
ON_HOST, STATES = Offload(params="cpu", optimizer="cpu"), Offload(optimizer="cpu")


class First(nn.Linear):
    """Its parameter ``spare`` has a gradient on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x).tanh()
        return x + x * self.spare if dist.get_rank() == 0 else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = First(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name != "Muon":
        return (getattr(zeropp.optim, name, None) or getattr(torch.optim, name))(model.parameters(), lr=1e-2)
    matrices = [one for one in model.parameters() if one.ndim == 2]
    others = [one for one in model.parameters() if one.ndim != 2]
    return zeropp.optim.Muon([{"params": matrices}, {"params": others, "use_muon": False}], lr=1e-2)


def prepared(options: dict[str, Any], optimizer: str = "AdamW") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model()
    config = zeropp.Config(**{"units": (nn.Linear,), "offload": ON_HOST, **options})
    return zeropp.prepare(model, optimizer_of(optimizer, model), config)


def train(model: Any, optimizer: Any, micro_steps: int, steps: int = STEPS, first: int = 0) -> list[float]:
    losses = []
    for step in range(first * micro_steps, (first + steps) * micro_steps):
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(4, WIDTH, generator=draw, device="cpu").to("sim")
        loss = model(x).float().square().mean()
        optimizer.backward(loss)
        losses.append(loss.detach())
        if (step + 1) % micro_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.flush()
    return [loss.item() for loss in losses]


def digest_of(model: Any, *states: str) -> str:
    """Return a digest of the bits of the parameters, and of these states."""
    digest = hashlib.sha256()
    values = dict(zeropp.full_state_dict(model))
    values |= {f"{name}: {one}": zeropp.get_full(p, one) for name, p in model.named_parameters() for one in states}
    for name in sorted(values):
        digest.update(name.encode() + values[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "stage 3": ({"clip": 0.1, "accumulate": 2}, "AdamW"),
    "stage 2": ({"stage": 2, "offload": STATES, "precision": "bf16", "accumulate": 2}, "AdamW"),
    "stage 1": ({"stage": 1, "offload": STATES, "clip": 0.1}, "LAMB"),
    "fewer bits": ({"comm": Comm(params="int8", grads="int8", block_elems=64)}, "AdamW"),
    "inside": ({"step_in_backward": True}, "AdamW"),
    "delayed": ({"offload": Offload(params="cpu", optimizer="cpu", delayed_update=1)}, "AdamW"),
    "files": ({"offload": Offload(params="cpu", optimizer="nvme", grads="nvme", path="FOLDER")}, "AdamW"),
    "loss scale": ({"precision": "fp16"}, "Lion"),
    "no prefetch": ({"prefetch": 0}, "SGD"),
    "Muon": ({"stage": 2, "offload": STATES}, "Muon"),
    "torch's own step": ({"accumulate": 2}, "RMSprop"),
    "one bit": ({"stage": 2, "offload": STATES}, "OneBitAdam"),
}
OFTEN = ("stage 3", "stage 2", "fewer bits", "inside")


def in_each_way(rank: int, ranks: int, hosts: str, names: list[str], folder: str) -> dict[str, Any]:
    """Return the losses and a digest of the parameters, by way."""
    begin(rank, hosts)
    found = {}
    for name in names:
        options, optimizer = WAYS[name]
        offload = options.get("offload")
        if name == "files":
            offload = Offload(params="cpu", optimizer="nvme", grads="nvme", path=folder)
        model, optimizer = prepared({**options, **({"offload": offload} if offload else {})}, optimizer)
        losses = train(model, optimizer, options.get("accumulate", 1))
        found[name] = [losses, digest_of(model)]
    dist.destroy_process_group()
    return found


def begin(rank: int, hosts: str) -> None:
    os.environ["ZEROPP_HOST_ID"] = hosts[rank]
    use("sim")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def values_of(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        assert outcome.code == 0, str(outcome)
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(
    "names",
    [list(OFTEN), pytest.param([name for name in WAYS if name not in OFTEN], marks=pytest.mark.slow)],
    ids=["often", "seldom"],
)
def test_two_hosts_have_the_bits_of_one(names: list[str], tmp_path: Path) -> None:
    found = []
    for hosts in ("ab", "aa"):
        (tmp_path / hosts).mkdir()
        args = (hosts, names, str(tmp_path / hosts))
        found.append(values_of(run_ranks(2, in_each_way, *args, timeout=240, env=simulated("sim"))))
    two, one = found
    for name in names:
        assert [rank[name] for rank in two] == [rank[name] for rank in one], name
        assert len({tuple(rank[name][0]) for rank in two}) == 2, name  # ranks have data of their own
        assert len({rank[name][1] for rank in two}) == 1, name


def goes_on(rank: int, ranks: int, hosts: str, folder: str, saves: bool) -> str:
    """Save a model that was trained, or load it on these hosts. Return a digest of its state."""
    begin(rank, hosts)
    model, optimizer = prepared({})
    if saves:
        train(model, optimizer, 1)
        zeropp.save(folder, model, optimizer, step=STEPS)
    else:
        zeropp.load(folder, model, optimizer)
    found = digest_of(model, "exp_avg", "exp_avg_sq")
    train(model, optimizer, 1, steps=1, first=STEPS)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("there", ["a", pytest.param("aa", marks=pytest.mark.slow)])
def test_one_host_reads_a_checkpoint_of_two(there: str, tmp_path: Path) -> None:
    """Of two ranks a host."""
    folder = str(tmp_path / "checkpoint")
    saved = values_of(run_ranks(4, goes_on, "aabb", folder, True, timeout=240, env=simulated("sim")))
    read = values_of(run_ranks(len(there), goes_on, there, folder, False, timeout=240, env=simulated("sim")))
    assert set(saved) == set(read) and len(set(saved)) == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "second copies": (
        {"comm": Comm(secondary_shard="host")},
        r"Comm\(secondary_shard='host'\) with shards on the hosts of several hosts is not supported yet; leave it out",
    ),
    "parameters in files": (
        {"offload": Offload(params="nvme", optimizer="cpu", path="/tmp")},
        r"Offload\(params='nvme'\) with shards on the hosts of several hosts is not supported yet",
    ),
    "experts": ({"experts": 2}, "Config.experts with shards on the hosts of several hosts is not supported yet"),
}


@on_ranks("2 hosts", devices=("sim",))
@pytest.mark.parametrize("what", REFUSED)
def test_what_several_hosts_lack_is_refused(what: str) -> None:
    options, said = REFUSED[what]
    with pytest.raises(zeropp.ConfigError, match=said):
        prepared(options)
    model, optimizer = prepared({})  # nothing was changed
    assert len(train(model, optimizer, 1, steps=1)) == 1


@on_ranks("2 hosts", devices=("sim",))
def test_weights_in_fewer_bits_are_refused() -> None:
    stored = zeropp.Config(precision=zeropp.Precision(param="bf16", stored="int8"), offload=Offload(params="cpu"))
    with pytest.raises(
        zeropp.ConfigError, match=r"Precision\(stored=\) with shards on the hosts of several hosts is not"
    ):
        zeropp.prepare(Model(), None, stored)


@on_ranks("2 hosts", devices=("sim",))
def test_ranks_that_differ_get_an_error() -> None:
    """Gathers are calls of all ranks."""
    model, _ = prepared({})
    x = torch.ones(2, WIDTH)
    with pytest.raises(zeropp.CommError, match="same order"):
        model.first(x) if dist.get_rank() else model.rest(x)
