# SPDX-License-Identifier: Apache-2.0
"""Models on some ranks of a job: each set of data ranks has a model of its own, and all ranks step together.

Four ranks as two stages of two data ranks, whose models differ in their units; or two ranks with a model each. One process
with both models on the joined batch has the same norm, clips by the same factor, and skips the same steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import of_all_ranks, on_ranks, shards_tier
from torch import Tensor, nn
from zeropp.comm import job
from zeropp.zero.prepare import prepare_over

STEPS = 4
CLIP = 0.05


def _stage(number: int) -> nn.Sequential:
    """The second one has more units, and other shapes."""
    torch.manual_seed(7 + number)
    widths = (12, 20, 12) if number == 0 else (12, 33, 40, 12)
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.Tanh()]
    return nn.Sequential(*layers)


def _batch(step: int, number: int, rank: int) -> Tensor:
    return torch.randn(3, 12, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank))


def _loss(model: nn.Module, x: Tensor, factor: float = 1.0) -> Tensor:
    return model(x).square().sum(dim=1).mean() * factor


def _place() -> tuple[int, int, job.JobRanks]:
    """Return (stage, data rank, the ranks): ranks 0 and 2 have stage 0, so numbers in a group are not those in the job."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    mine = [rank % 2 + 2 * k for k in range(half)]
    return rank % 2, mine.index(rank), job.over(mine)


def _joined(half: int, steps: int) -> tuple[list[float], list[nn.Sequential]]:
    models = [_stage(0), _stage(1)]
    parameters = [p for model in models for p in model.parameters()]
    adam = torch.optim.AdamW(parameters, lr=1e-2)
    norms = []
    for step in range(steps):
        for number, model in enumerate(models):
            _loss(model, torch.cat([_batch(step, number, rank) for rank in range(half)])).backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, CLIP)))
        adam.step()
        adam.zero_grad()
    return norms, models


def steps_as_one(config: dict[str, Any]) -> None:
    number, data, ranks = _place()
    half = dist.get_world_size() // 2
    model = _stage(number)
    model, optimizer = prepare_over(
        ranks, model, torch.optim.AdamW(model.parameters(), lr=1e-2), zeropp.Config(**config)
    )
    norms, models = _joined(half, STEPS)
    for step in range(STEPS):
        _loss(model, _batch(step, number, data)).backward()
        norm = float(optimizer.clip_grad_norm_(CLIP))
        assert norm == pytest.approx(norms[step], rel=1e-5), step  # fp32 gradients, summed in another order
        optimizer.step()
        optimizer.zero_grad()
    with zeropp.gathered(list(model.parameters())):
        for mine, wanted in zip(model.parameters(), models[number].parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), wanted.detach(), rtol=1e-4, atol=1e-5)


@on_ranks(2, 4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norm_is_of_the_job(stage: int) -> None:
    steps_as_one({"stage": stage})


@on_ranks(4)
def test_shards_alone() -> None:
    steps_as_one({"stage": 3, "host_copy": "off"})


@on_ranks(4)
def test_delayed() -> None:
    """Votes of all ranks come to every rank: the update of one stage is published on the others too."""
    number, data, ranks = _place()
    model = _stage(number)
    config = zeropp.Config(stage=2, offload=zeropp.Offload(optimizer="cpu", delayed_update=1))
    model, optimizer = prepare_over(ranks, model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        _loss(model, _batch(step, number, data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))


@on_ranks(4)
def test_overflow_is_of_the_job() -> None:
    """One rank of the second stage overflows: every rank skips, and says which parameter, and on the CPU of which rank of the job."""
    number, data, ranks = _place()
    model = _stage(number)
    config = zeropp.Config(stage=2, precision="fp16", loss_scale=zeropp.LossScale(init=1024.0))
    model, optimizer = prepare_over(ranks, model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    factor = 1e9 if dist.get_rank() == 3 else 1.0
    optimizer.backward(_loss(model, _batch(0, number, data).half(), factor))
    optimizer.step()
    scaler = optimizer._engine.scaler
    assert (scaler.scale, scaler.skipped) == (512.0, 1)
    # Shards of a GPU learn of the overflow from their sum, which does not tell whose it is.
    origin = "rank 3 before the sum" if shards_tier() == "cpu" else "on some rank, or in the sum"
    assert scaler.overflow and all(origin in one for one in scaler.overflow), scaler.overflow
    assert len({tuple(one) for one in of_all_ranks([tuple(scaler.overflow)])}) == 1
    optimizer.zero_grad()
    optimizer.backward(_loss(model, _batch(0, number, data).half()))
    optimizer.step()
    assert scaler.skipped == 1


@on_ranks(4)
@pytest.mark.parametrize("p", [1.0, 3.0, float("inf")])
def test_other_norms(p: float) -> None:
    number, data, ranks = _place()
    model = _stage(number)
    model, optimizer = prepare_over(
        ranks, model, torch.optim.AdamW(model.parameters(), lr=1e-2), zeropp.Config(stage=2)
    )
    _loss(model, _batch(0, number, data)).backward()
    norm = float(optimizer.clip_grad_norm_(CLIP, norm_type=p))
    models = [_stage(0), _stage(1)]
    for at, one in enumerate(models):
        _loss(one, torch.cat([_batch(0, at, rank) for rank in range(2)])).backward()
    wanted = nn.utils.clip_grad_norm_([q for one in models for q in one.parameters()], CLIP, norm_type=p)
    assert norm == pytest.approx(float(wanted), rel=1e-5)


@on_ranks(4)
def test_no_gradient_anywhere_but_there() -> None:
    """A stage without gradients, because it is frozen in this backward, steps with the others."""
    number, data, ranks = _place()
    model = _stage(number)
    model, optimizer = prepare_over(
        ranks, model, torch.optim.AdamW(model.parameters(), lr=1e-2), zeropp.Config(stage=2)
    )
    if number == 0:
        _loss(model, _batch(0, number, data)).backward()
    optimizer.step()


@on_ranks(4)
def test_names_are_of_the_job() -> None:
    number, _, ranks = _place()
    model = _stage(number)
    if dist.get_rank() == 3:
        model.add_module("more", nn.Linear(2, 2))
    with pytest.raises(
        zeropp.ConfigError, match="rank 3's model differs from rank 1's"
    ):  # also where it is the other stage
        prepare_over(ranks, model, None, zeropp.Config(stage=2))


@on_ranks(4, alone=True)
def test_a_job_that_is_closed_before_a_step_is_an_error() -> None:
    from zeropp.comm import group

    number, _, ranks = _place()
    model = _stage(number)
    model, optimizer = prepare_over(ranks, model, torch.optim.AdamW(model.parameters()), zeropp.Config(stage=2))
    _loss(model, torch.randn(3, 12)).backward()
    group.close(ranks.job)
    with pytest.raises(zeropp.Error, match='has closed group "default_pg"'):
        optimizer.step()
