# SPDX-License-Identifier: Apache-2.0
"""A GPT with tied embeddings under every stage: equal to each other bit for bit, and to torch DDP within fp32
rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks, shards_tier
from torch import nn
from torch.optim import lr_scheduler
from training import STAGES, Recipe, batch, every_stage, gpt, ours, reference, same, within_rounding


@on_ranks(1, 2, 3, 4)
def test_clipped() -> None:
    answer = every_stage(Recipe(clip=0.5))
    assert answer["last"] < 0.9 * answer["first"], "it must learn, or equal losses show little"


@on_ranks(2)
def test_clip_in_config() -> None:
    """Config(clip=) is clip_grad_norm_ inside step."""
    for config in STAGES.values():
        explicit = ours(Recipe(steps=5, clip=0.5), **config)
        explicit.norms = []
        same(f"{config}", ours(Recipe(steps=5, clip=0.5, config={"clip": 0.5}), **config), explicit)


@on_ranks(1, 2, 3, 4)
def test_no_sync() -> None:
    every_stage(Recipe(steps=8, micro=3, clip=1.0))


@on_ranks(1, 2, 3, 4)
def test_accumulate() -> None:
    """Config(accumulate=n): as DDP's no_sync with loss / n, and as one batch n times as large."""
    recipe = Recipe(steps=8, micro=3, config={"accumulate": 3})
    every_stage(recipe)
    big = _one_big_batch(steps=1)
    small = ours(Recipe(steps=1, micro=3, config={"accumulate": 3}), stage=3)
    # The same mean over three times the rows, added up in another order: a few roundings of sums over about 100
    # terms.
    assert abs(small.losses[0] - big) <= 32 * 2.0**-24 * big, (small.losses[0], big)


def _one_big_batch(steps: int) -> float:
    model = gpt()
    inputs, targets = zip(*(batch(0, micro) for micro in range(3)), strict=True)
    return model(torch.cat(inputs), torch.cat(targets)).item()


def _decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The usual split: no weight decay for vectors, another rate for the embeddings."""
    named = dict(model.named_parameters())
    tables = [p for n, p in named.items() if n in ("tokens.weight", "positions.weight")]
    matrices = [p for n, p in named.items() if p.ndim == 2 and not any(p is t for t in tables)]
    vectors = [p for p in named.values() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "betas": (0.8, 0.95)},
        {"params": tables, "lr": 1e-3, "eps": 1e-6},
    ]


def _schedule(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        milestones=[3],
    )


@on_ranks(2)
def test_groups_and_schedulers() -> None:
    for first in (False, True):
        every_stage(Recipe(steps=12, groups=_decay_groups, scheduler=_schedule, scheduler_first=first))


@on_ranks(2)
def test_one_cycle() -> None:
    """A scheduler that writes betas as well."""
    every_stage(
        Recipe(
            steps=10, scheduler=lambda o: lr_scheduler.OneCycleLR(o, max_lr=3e-3, total_steps=12), scheduler_first=True
        )
    )


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=2e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=2e-3, weight_decay=0.01, decoupled_weight_decay=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=2e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}
ADAMS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "Adam with L2": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.05),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=3e-3, amsgrad=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=3e-3, amsgrad=True),
    "AdamW maximize": lambda p: torch.optim.AdamW(p, lr=1e-4, maximize=True),
    "AdamW small beta": lambda p: torch.optim.AdamW(p, lr=3e-3, betas=(0.3, 0.9), eps=1e-5),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(3e-3)),
}


@on_ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs(name: str) -> None:
    """torch's own element-wise code on slices: with two ranks the gradients have DDP's bits, so the training has too. SGD and
    Adagrad are stepped in C, which rounds where torch fuses a multiplication with an addition."""
    recipe = Recipe(steps=6, optimizer=OPTIMIZERS[name])
    plain = reference(recipe)
    exact = reference(recipe, torch.float64)
    for stage, config in STAGES.items():
        got = ours(recipe, **config)
        if dist.get_world_size() == 2 and not name.startswith(("SGD", "Adagrad")):
            same(f"{name}, {stage}", got, plain)
        within_rounding(f"{name}, {stage}", got, plain, exact)


@on_ranks(2)
def test_lion() -> None:
    """zeropp.optim.Lion, whose kernel is fp32 only, so there is no exact run: with two ranks DDP's bits."""
    recipe = Recipe(steps=6, optimizer=lambda p: zeropp.optim.Lion(p, lr=3e-4, weight_decay=0.1))
    plain = reference(recipe)
    for stage, config in STAGES.items():
        same(stage, ours(recipe, **config), plain)


@on_ranks(2)
@pytest.mark.parametrize("name", ADAMS)
def test_ours(name: str) -> None:
    every_stage(Recipe(steps=8, optimizer=ADAMS[name]))


@on_ranks(1, 2, 3, 4)
def test_first_norm() -> None:
    """The norm that clip_grad_norm_ returns is that of the averaged gradients, to double precision of fp32 elements; a GPU's is rounded
    to an fp32 tensor."""
    rounds = 1e-12 if shards_tier() == "cpu" else 2.0**-24
    for config in STAGES.values():
        model = gpt()
        model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), zeropp.Config(**config))
        model(*batch(0)).backward()
        got = optimizer.clip_grad_norm_(float("inf"))
        with zeropp.gathered(model, grads=True):
            want = sum((p.grad.double() ** 2).sum() for p in model.parameters()).sqrt().item()
        assert abs(float(got) - want) <= rounds * want, (config, got, want)
        # Clipping is idempotent in its answer, and visible.
        assert optimizer.clip_grad_norm_(want / 2) == got
        with zeropp.gathered(model, grads=True):
            clipped = sum((p.grad.double() ** 2).sum() for p in model.parameters()).sqrt().item()
        assert abs(clipped - want / 2) <= 1e-4 * want, (config, clipped, want)


@on_ranks(2)
def test_other_norms() -> None:
    """test_clip_grad_norm_1d's other norms: torch.nn.utils.clip_grad_norm_ of the whole averaged gradients, before and after."""
    for config in STAGES.values():
        for p in (1.0, 3.0, float("inf")):
            model = gpt()
            model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), zeropp.Config(**config))
            model(*batch(0)).backward()
            with zeropp.gathered(model, grads=True):
                whole = [nn.Parameter(q.detach().clone()) for q in model.parameters()]
                for copy, q in zip(whole, model.parameters(), strict=True):
                    copy.grad = q.grad.double().float()
            want = torch.linalg.vector_norm(torch.cat([q.grad.flatten() for q in whole]).double(), p).item()
            got = optimizer.clip_grad_norm_(want / 3, norm_type=p)
            assert abs(got - want) <= 1e-12 * want, (config, p, got, want)
            torch.nn.utils.clip_grad_norm_(whole, want / 3, norm_type=p)
            with zeropp.gathered(model, grads=True):
                for copy, q in zip(whole, model.parameters(), strict=True):  # torch sums in fp32
                    assert (q.grad - copy.grad).abs().max() <= 1e-4 * copy.grad.abs().max(), (config, p)
