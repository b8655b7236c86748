# SPDX-License-Identifier: Apache-2.0
"""Meshes of two dimensions over the backend, four ranks: FSDP2's HSDP against DDP and one process, DTensor's redistribution."""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from conformance import of_rank, same
from launch import run_ranks
from torch import nn

RANKS, STEPS = 4, 3


class Net(nn.Module):
    """Two blocks and a head, sizes that four ranks and two do not divide, an embedding that the head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 23), nn.Tanh(), nn.Linear(23, 10), nn.LayerNorm(10)) for _ in range(2)
        )
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(step: int, rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    return torch.randint(0, 13, (3, 7), generator=draw), torch.randint(0, 13, (3, 7), generator=draw)


def loss_of(model: nn.Module, step: int, rank: int, micro: int) -> torch.Tensor:
    tokens, targets = batch(step, rank, micro)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum: unlike Adam's, its step is as far off as the gradients are."""
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def hsdp(rank: int, ranks: int, reshard: bool, micros: int) -> None:
    """Losses and gradients of every step, then weights; on ranks that hold the same slice, the same bits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, alone = net(), net()
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizers = [optimizer_of(each) for each in (model, parallel, alone)]
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and parameter.placements == (Replicate(), Shard(0)), parameter
        rows = -(-parameter.shape[0] // 2)  # of the first half
        assert parameter.to_local().shape[0] == (rows if rank % 2 == 0 else parameter.shape[0] - rows)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(micros):
            last = micro == micros - 1
            model.set_requires_all_reduce(last)
            parallel.require_backward_grad_sync = last
            ours, theirs = (loss_of(each, step, rank, micro) for each in (model, parallel))
            everybody = [loss_of(alone, step, r, micro) for r in range(ranks)]
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(ours, everybody[rank])
            for loss in (ours, theirs, torch.stack(everybody).mean()):
                loss.backward()
        for (name, mine), other, third in zip(
            model.named_parameters(), parallel.parameters(), alone.parameters(), strict=True
        ):
            assert isinstance(mine.grad, DTensor) and other.grad is not None and third.grad is not None, name
            whole = mine.grad.full_tensor()
            torch.testing.assert_close(whole, other.grad, msg=lambda text, name=name: f"{name}, DDP: {text}")
            torch.testing.assert_close(whole, third.grad, msg=lambda text, name=name: f"{name}, alone: {text}")
            assert third.grad.abs().max() > 1e-4, f"{name}: nothing to compare"
        for optimizer in optimizers:
            optimizer.step()
    replicas = mesh["replicate"].get_group()
    for mine, third in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), third)
        local = mine.to_local().detach().contiguous()
        copies = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(copies, local, group=replicas)
        same(copies[0], copies[1])


def redistribution(rank: int, ranks: int) -> None:
    """From every placement on a 2 x 2 mesh to every other, whole values equal bit for bit; sums of integers, so that order is no matter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for shape in ((7, 5), (1, 3)):  # the second: some ranks hold nothing
        whole = of_rank(0, *shape).mul(100).round()
        ways = list(itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2))
        spread = {way: distribute_tensor(whole, mesh, way) for way in ways}
        for way in ways:
            same(spread[way].full_tensor(), whole)
        for source, target in itertools.product(ways, repeat=2):
            moved = spread[source].redistribute(mesh, target)
            assert moved.placements == target
            same(moved.to_local(), spread[target].to_local())
        each = [of_rank(r, *shape).mul(100).round() for r in range(ranks)]
        everything = each[0] + each[1] + each[2] + each[3]
        for target in ways:
            summed = DTensor.from_local(each[rank], mesh, (Partial(), Partial())).redistribute(mesh, target)
            same(summed.full_tensor(), everything)
            same(summed.to_local(), distribute_tensor(everything, mesh, target).to_local())
        across = DTensor.from_local(each[rank], mesh, (Partial(), Shard(0))).redistribute(mesh, (Shard(1), Replicate()))
        same(across.full_tensor(), torch.cat([each[0] + each[2], each[1] + each[3]]))
    left, right = of_rank(1, 6, 8).mul(10).round(), of_rank(2, 8, 4).mul(10).round()
    product = distribute_tensor(left, mesh, (Shard(0), Shard(1))) @ distribute_tensor(
        right, mesh, (Replicate(), Shard(0))
    )
    same(product.full_tensor(), left @ right)


PARTS: dict[str, Callable[[int, int], None]] = {
    "HSDP": lambda rank, ranks: hsdp(rank, ranks, reshard=True, micros=1),
    "HSDP, two passes and one all-reduce, whole in between": lambda rank, ranks: hsdp(
        rank, ranks, reshard=False, micros=2
    ),
    "DTensor": redistribution,
}


def everything(rank: int, ranks: int) -> dict[str, str]:
    """Each part's outcome; stops at the first failure, because the ranks no longer agree then."""
    import zeropp  # noqa: F401

    dist.init_process_group("zeropp")
    outcomes = dict.fromkeys(PARTS, "not reached")
    for name, check in PARTS.items():
        try:
            check(rank, ranks)
        except BaseException:
            outcomes[name] = traceback.format_exc()
            break
        outcomes[name] = "ok"
    dist.destroy_process_group()
    return outcomes


@cache
def outcomes() -> list[dict[str, str]]:
    """One launch for all."""
    return [outcome.value for outcome in run_ranks(RANKS, everything, timeout=240)]


@pytest.mark.parametrize("name", PARTS)
def test_two_dimensions(name: str) -> None:
    for rank, outcome in enumerate(outcomes()):
        assert outcome[name] == "ok", f"rank {rank}: {outcome[name]}"
