# SPDX-License-Identifier: Apache-2.0
"""Learning rates by consumed tokens."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zeropp
from torch.optim import lr_scheduler
from zeropp import Growth, TokenDrop
from zeropp.efficiency.token_drop import layer_tokens
from zeropp.optim import LayerTokenLR, by_tokens


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)


def rates(scheduler: Any, optimizer: Any, steps: int, *tokens: int) -> list[float]:
    found = []
    for step in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(*tokens[step : step + 1])
    return found


def cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


def test_the_decay_goes_by_tokens_and_ends_with_them() -> None:
    optimizer = sgd()
    scheduler = by_tokens(lr_scheduler.CosineAnnealingLR(optimizer, T_max=100), total=1000)
    found = rates(scheduler, optimizer, 5, 100, 200, 300, 400, 400)
    assert found == pytest.approx([cosine(0.0), cosine(0.1), cosine(0.3), cosine(0.6), cosine(1.0)], abs=1e-12)
    assert scheduler.finished and scheduler.last_epoch == 100
    assert scheduler.get_last_lr() == pytest.approx([0.0])


def test_full_steps_are_the_plain_schedule() -> None:
    one, other = sgd(), sgd()
    plain = lr_scheduler.LinearLR(one, 1.0, 0.0, total_iters=10)
    ours = by_tokens(lr_scheduler.LinearLR(other, 1.0, 0.0, total_iters=10), total=640, tokens=lambda step: 64)
    assert rates(plain, one, 12) == rates(ours, other, 12)


def test_a_warm_up_goes_by_steps() -> None:
    optimizer = sgd()
    inside = lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 4, 1.0) * (1 - max(0, step - 4) / 16))
    scheduler = by_tokens(inside, total=96 + 4 * 8, steps=20, warmup=4)
    found = rates(scheduler, optimizer, 8, 8, 8, 8, 8, 24, 24, 48, 0)
    assert found == pytest.approx([0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.0])


def test_a_restored_schedule_continues() -> None:
    optimizer = sgd()
    schedule = Growth(8, 64, steps=6, multiple=8)

    def make(optimizer: Any) -> Any:
        return by_tokens(
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=50), total=400, tokens=lambda step: int(schedule(step))
        )

    through = rates(make(optimizer), optimizer, 9)
    first, second = sgd(), sgd()
    before = make(first)
    begun = rates(before, first, 4)
    after = make(second)
    after.load_state_dict(before.state_dict())
    second.load_state_dict(first.state_dict())
    assert begun + rates(after, second, 5) == through


def test_a_checkpoint_holds_it() -> None:
    def make() -> tuple[Any, Any, Any]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        scheduler = by_tokens(lr_scheduler.CosineAnnealingLR(optimizer, T_max=50), total=400)
        return *zeropp.prepare(model, optimizer, zeropp.Config(stage=1)), scheduler

    model, optimizer, scheduler = make()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step(100)
    with tempfile.TemporaryDirectory() as folder:
        zeropp.save(folder, model, optimizer, scheduler=scheduler)
        again, other, restored = make()
        zeropp.load(folder, again, other, scheduler=restored)
    assert restored.consumed == 100 and other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(
        cosine(0.24)
    )


@pytest.mark.parametrize("kind", ["linear", "log"])
def test_layer_tokens_warm_up_and_decay(kind: str) -> None:
    optimizer = sgd()
    drop = TokenDrop(keep=Growth(4, 16, steps=3, multiple=4))

    def counts(step: int) -> int:
        return layer_tokens(drop, step, 2, 16, 2, 4)

    assert [counts(step) for step in range(4)] == [2 * (4 * 2 + 32), 2 * (8 * 2 + 32), 2 * (12 * 2 + 32), 2 * 64]
    scheduler = LayerTokenLR(optimizer, counts, total=1000, warmup=100, warmup_type=kind)
    consumed = [0, 80, 176, 288, 416]
    warm = {"linear": lambda c: c / 100, "log": lambda c: math.log(1 + c) / math.log(100)}[kind]
    wanted = [warm(c) if c < 100 else (1000 - c) / 900 for c in consumed]
    assert rates(scheduler, optimizer, 5) == pytest.approx(wanted)
    again = LayerTokenLR(sgd(), counts, total=1000, warmup=100, warmup_type=kind)
    again.load_state_dict(scheduler.state_dict())
    assert again.last_epoch == 5 and again.consumed(5) == 544


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no steps": (lambda: by_tokens(lr_scheduler.ExponentialLR(sgd(), 0.9), total=5), "the number of steps of the ExponentialLR, which does not say it"),
    "total": (lambda: by_tokens(lr_scheduler.CosineAnnealingLR(sgd(), T_max=5), total=0), "by_tokens: total: 0 is not allowed"),
    "warmup": (lambda: by_tokens(lr_scheduler.CosineAnnealingLR(sgd(), T_max=5), total=9, warmup=5), "fewer than the scheduler's 5 steps"),
    "unknown tokens": (lambda: by_tokens(lr_scheduler.CosineAnnealingLR(sgd(), T_max=5), total=9).step(), "call step(tokens)"),
    "no scheduler": (lambda: by_tokens(sgd(), total=9), "one of torch's schedulers"),  # type: ignore[arg-type]
    "no count of steps": (lambda: by_tokens(lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(sgd())]), total=9, steps=9),
        "which ChainedScheduler does not"),
    "log of one": (lambda: LayerTokenLR(sgd(), lambda step: 1, total=9, warmup=1, warmup_type="log"), "because log(1) is 0"),
    "layer warm-up": (lambda: LayerTokenLR(sgd(), lambda step: 1, total=9, warmup=9), "LayerTokenLR.warmup: 9 is not allowed; wanted fewer than total"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    act, sentence = REFUSED[name]
    with pytest.raises(zeropp.ConfigError) as caught:
        act()
    assert sentence in str(caught.value)
