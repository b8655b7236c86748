# SPDX-License-Identifier: Apache-2.0
"""Muon on shards against torch.optim.Muon and AdamW on whole tensors, at every stage."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks
from torch import Tensor, nn
from training import STAGES, batch, gpt

STEPS = 5
RATES = {"lr": 1e-2, "weight_decay": 0.1}


class Mixed(nn.Module):
    """Tall, wide and square matrices, and a vector; gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        shapes = {"tall": (37, 9), "wide": (8, 40), "square": (16, 16), "bias": (50,)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=draw)))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True)]).sum()


def gradients_of(model: list[Tensor], step: int, rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(p.shape, generator=draw) for p in model]


def muon(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return zeropp.optim.Muon([{"params": matrices}, {"params": others, "use_muon": False}], **RATES, **more)


@on_ranks(2)
def test_equals_torch() -> None:
    ranks = dist.get_world_size()
    for more in ({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}):
        plain = Mixed()
        shapes = [p.detach().clone() for p in plain.parameters()]
        matrices = torch.optim.Muon([p for p in plain.parameters() if p.ndim == 2], **RATES, **more)
        others = torch.optim.AdamW([plain.bias], **RATES)
        runs = {}
        for stage, config in STAGES.items():
            model = Mixed()
            runs[stage] = (*zeropp.prepare(model, muon(model, **more), zeropp.Config(units=[Mixed], **config)),)
        for step in range(STEPS):
            given = [gradients_of(shapes, step, rank) for rank in range(ranks)]
            for index, p in enumerate(plain.parameters()):
                total = given[0][index]
                for rank in range(1, ranks):
                    total = total + given[rank][index]
                p.grad = total * (1.0 / ranks)
            matrices.step()
            others.step()
            for stage, (model, optimizer) in runs.items():
                model(gradients_of(shapes, step, dist.get_rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
                # An ulp of the momentum may cross a border where it is rounded to bf16, as the iteration takes it: 2^-8 of
                # an entry that is 1 at most, ten of them a step to have room. A wrong matrix would show as lr itself.
                bound = 10 * 2.0**-8 * RATES["lr"] * (step + 1)
                for (name, want), seen in zip(
                    plain.named_parameters(), zeropp.full_state_dict(model).values(), strict=True
                ):
                    off = (seen - want.detach().cpu()).abs().max().item()
                    assert off <= bound, (stage, step, name, off, bound)
        values = {stage: zeropp.full_state_dict(model) for stage, (model, _) in runs.items()}
        for stage in values:
            assert all(torch.equal(values[stage][k], values["stage 0"][k]) for k in values[stage]), stage


@on_ranks(2)
def test_resumes() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    want: list[float] = []
    for stage in (2, 3):
        model = gpt()
        model, optimizer = zeropp.prepare(model, muon(model), zeropp.Config(stage=stage, clip=1.0))
        for step in range(0 if want else 3):
            model(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if want:
            zeropp.load(folder[0], model, optimizer)
        else:
            zeropp.save(folder[0], model, optimizer)
        seen = []
        for step in range(3, 6):
            loss = model(*batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        assert not want or seen == want, (seen, want)
        want = seen


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        (
            {},
            r"shape \(3,\) and torch.float32, wanted real matrices, or stacks of them; put the others in a group with use_muon=False",
        ),
        ({"use_muon": False, "ns_steps": 0}, "ns_steps is 0, wanted a whole number from 1 to 99"),
        ({"use_muon": False, "adjust_lr_fn": "best"}, "adjust_lr_fn is 'best', wanted None, 'original'"),
        ({"use_muon": False, "lr": -1.0}, "lr is -1.0, wanted lr >= 0"),
    ],
)
def test_what_cannot_be_is_refused(keywords: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        zeropp.optim.Muon([torch.nn.Parameter(torch.zeros(3))], **keywords)


def test_outside_of_prepare_it_says_where_it_works() -> None:
    optimizer = zeropp.optim.Muon([torch.nn.Parameter(torch.zeros(3, 3))])
    with pytest.raises(zeropp.Error, match=r"works inside zeropp\.prepare only"):
        optimizer.step()
