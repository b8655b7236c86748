# SPDX-License-Identifier: Apache-2.0
"""Buffers follow rank 0, as under DistributedDataParallel."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from data_parallel import data_parallel
from ranks import of_all_ranks, on_ranks
from tiny import sentence
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6
LR = 0.125  # a power of two: times a gradient it is exact, however the step is fused


class Net(nn.Module):
    """Two BatchNorms, a buffer of bool, one that is no multiple of 16 bytes, one that lies transposed, one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 10), nn.BatchNorm1d(10)
        self.second, self.last_norm = nn.Linear(10, 10), nn.BatchNorm1d(10, momentum=0.3)
        self.register_buffer("calls", torch.zeros(3, dtype=torch.int32))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("seen", torch.zeros(2, 10).t())
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += dist.get_rank() + 1
            self.seen = self.seen + x.detach().mean()  # another tensor takes its place
        x = torch.tanh(self.norm(self.first(x)))
        return self.last_norm(self.second(x)) * self.calls.sum() * (1 + self.seen.sum()) * self.mask.sum()


def batch(step: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(7, 6, generator=draw, device="cpu").to(torch.get_default_device())


def buffers(model: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in model.buffers()]


def run(
    model: Any, plain: nn.Module, optimizer: Any, no_sync: Callable[[], Any], backward: Callable[[Tensor], None]
) -> list[Any]:
    """Return the losses, and the buffers after each forward."""
    seen: list[Any] = []

    def forward(step: int) -> Tensor:
        loss = model(batch(step)).pow(2).mean() * 1e-3
        seen.extend([loss.detach().clone(), *buffers(plain)])
        return loss

    for step in range(STEPS):
        if step == 2:  # an evaluation between two steps takes rank 0's, too, once
            plain.eval()
            with torch.no_grad():
                forward(50)
                forward(51)
            plain.train()
        if step in (3, 4):
            with no_sync():
                forward(60 + step)
        if step == 5 and dist.get_rank() == 0:
            plain.norm.running_mean.fill_(0.5)
        backward(forward(step))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def like_ddp(**config: Any) -> None:
    torch.manual_seed(dist.get_rank())
    ours = Net()
    theirs = copy.deepcopy(ours)
    ddp = data_parallel(theirs)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=LR)
    wanted = run(ddp, theirs, optimizer, ddp.no_sync, lambda loss: loss.backward())
    model, optimizer = zeropp.prepare(ours, torch.optim.SGD(ours.parameters(), lr=LR), zeropp.Config(**config))
    seen = run(model, model, optimizer, lambda: zeropp.no_sync(model), optimizer.backward)
    for at, (one, other) in enumerate(zip(seen, wanted, strict=True)):
        assert torch.equal(one, other), (at, one, other)
    whole = zeropp.full_state_dict(model)  # each rank has rank 0's
    mine = {name: value.clone() for name, value in whole.items()}
    for name, value in mine.items():
        everyone = of_all_ranks(value.cpu())
        assert all(torch.equal(one, everyone[0]) for one in everyone), name


PLACES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "gathered": {"stage": 3, "host_copy": "off"},
}


@on_ranks()
@pytest.mark.parametrize(
    "place, ranks", [*((name, 2) for name in PLACES), ("stage 0", "2 hosts"), ("gathered", "2 hosts")]
)
def test_like_ddp(place: str) -> None:
    """Losses and running statistics, bit for bit, over steps that train, evaluate, and run forwards inside no_sync."""
    like_ddp(**PLACES[place])


@on_ranks(2)
def test_on_disk() -> None:
    with tempfile.TemporaryDirectory() as path:
        paths = [path]
        dist.broadcast_object_list(paths)
        like_ddp(stage=3, offload=zeropp.Offload(params="nvme", path=paths[0]))
        dist.barrier()


@on_ranks(2)
def test_two_forwards() -> None:
    """Both graphs stay good: what BatchNorm saved is not counted as changed."""
    torch.manual_seed(0)
    ours = Net()
    model, optimizer = zeropp.prepare(ours, torch.optim.SGD(ours.parameters(), lr=LR), zeropp.Config(stage=2))
    for step in range(2):
        optimizer.backward(model(batch(step)).mean() + model(batch(step + 9)).mean())
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_off() -> None:
    """False: each rank has its own, which the ranks' state dicts do not say."""
    torch.manual_seed(0)
    ours = Net()
    config = zeropp.Config.from_json({"stage": 2, "sync_buffers": False})
    model, optimizer = zeropp.prepare(ours, torch.optim.SGD(ours.parameters(), lr=LR), config)
    for step in range(2):
        optimizer.backward(model(batch(step)).mean())
        optimizer.step()
        optimizer.zero_grad()
    everyone = of_all_ranks(model.norm.running_mean.cpu())
    assert not torch.equal(everyone[0], everyone[1])


@on_ranks(2)
def test_alone() -> None:
    """Rank 0 evaluates alone, then all train on; a buffer that grew is each rank's own."""
    torch.manual_seed(0)
    ours = Net()
    model, optimizer = zeropp.prepare(ours, torch.optim.SGD(ours.parameters(), lr=LR), zeropp.Config(stage=2))
    for step in range(3):
        optimizer.backward(model(batch(step)).mean())
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(batch(step))
            model.mask = torch.ones(5, dtype=torch.bool)
        dist.barrier()
    assert model.mask.numel() == (5 if dist.get_rank() == 0 else 2)


@on_ranks(2)
def test_other_count() -> None:
    ours = Net()
    if dist.get_rank() == 1:
        ours.register_buffer("more", torch.zeros(2))
    told = sentence(lambda: zeropp.prepare(ours, None, zeropp.Config(stage=2)), zeropp.ConfigError)
    assert "prepare: rank 1's model differs from rank 0's: buffer" in told and "'more' (2,)" in told, told


@on_ranks(2)
def test_sync_batch_norm() -> None:
    """torch refuses it on a CPU under DDP, too; evaluated it works."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("SyncBatchNorm is refused on the CPU alone")
    ours = nn.SyncBatchNorm.convert_sync_batchnorm(Net())
    assert "GPU" in sentence(lambda: DistributedDataParallel(copy.deepcopy(ours)), ValueError)
    model, _ = zeropp.prepare(ours, torch.optim.SGD(ours.parameters(), lr=LR), zeropp.Config(stage=2))
    with torch.no_grad():
        model.eval()(batch(0))
    told = sentence(lambda: model.train()(batch(0)), zeropp.ConfigError)
    assert "'norm' is a SyncBatchNorm, which torch trains on GPUs alone" in told and "sync_buffers=True" in told, told


@on_ranks(2, alone=True, launch_s=60.0)
def test_a_rank_that_goes_another_way() -> None:
    """A rank evaluates while another one is in its backward: both raise at once, with both sides, and do not wait for the time-out."""
    torch.manual_seed(0)
    ours = Net()
    model, optimizer = zeropp.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1), zeropp.Config(stage=2))
    loss = model(batch(0)).mean()

    def go_on() -> Any:
        if dist.get_rank() == 1:
            with torch.no_grad():
                return model(batch(1))
        return optimizer.backward(loss)

    told = sentence(go_on, zeropp.CommError)
    assert "the model's buffers at the start of a forward" in told and "the reduction of the gradient of" in told, told
