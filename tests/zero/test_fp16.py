# SPDX-License-Identifier: Apache-2.0
"""Config(precision="fp16") against torch.amp.GradScaler over fp32 masters, written out.

The reference: every rank computes fp16 gradients of the scaled loss; their mean is taken in fp32 in rank order and
rounded to fp16 once; GradScaler unscales, steps or skips, and updates the scale. zeropp must have the same losses,
gradients, scales and skipped steps bit for bit; masters within the bound of one AdamW step (helpers/parity.py), from
which the reference then goes on.

Clipping by value is tested here, too."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from parity import U
from ranks import of_all_ranks, on_ranks
from tiny import refused_step
from torch import Tensor, nn
from training import STAGES, batch, gpt, master_values

LR = 3e-3
BAD_STEP = 5


def _mean_over_ranks(gradient: Tensor) -> Tensor:
    if dist.get_world_size() == 1:
        return gradient
    everyone = [one.to(gradient.device) for one in of_all_ranks(gradient.cpu())]
    total = everyone[0].float()
    for other in everyone[1:]:
        total = total + other.float()
    return (total * (1.0 / len(everyone))).to(torch.float16)


def _explode(step: int) -> float:
    """On the last rank, one step's loss is so large that fp16 overflows."""
    return 3e4 if step == BAD_STEP and dist.get_rank() == dist.get_world_size() - 1 else 1.0


def same_as_grad_scaler(config: dict[str, Any]) -> list[float]:
    plain = gpt()
    masters = {n: p.detach().clone().requires_grad_() for n, p in plain.named_parameters()}
    plain, adam = plain.to(torch.float16), torch.optim.AdamW(masters.values(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=3)
    model = gpt()
    model, optimizer = zeropp.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=LR),
        zeropp.Config(precision="fp16", loss_scale=zeropp.LossScale(init=2.0**13, interval=3), **config),
    )  # fmt: skip
    losses, skipped = [], 0
    for step in range(10):
        want = plain(*batch(step)).float() * _explode(step)
        scaler.scale(want).backward()
        got = model(*batch(step)).float() * _explode(step)
        assert got.item() == want.item(), (step, got.item(), want.item())
        assert optimizer.loss_scale == scaler.get_scale(), (step, optimizer.loss_scale, scaler.get_scale())
        optimizer.backward(got)
        gradients = {n: _mean_over_ranks(p.grad) for n, p in plain.named_parameters()}
        scale = scaler.get_scale()
        with zeropp.gathered(model, grads=True):
            for name, p in model.named_parameters():
                assert torch.equal(p.grad.float(), (gradients[name].float() / scale).half().float()) or step == BAD_STEP, (
                    step, name,
                )  # fmt: skip
        for name, master in masters.items():
            master.grad = gradients[name].float()
        before = master_values(model)
        scaler.unscale_(adam)
        reference_norm = torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
        norm = optimizer.clip_grad_norm_(1.0)
        finite = bool(torch.isfinite(reference_norm))
        assert not finite or abs(norm - reference_norm.item()) <= 1e-5 * norm, (norm, reference_norm)
        scaler.step(adam)
        scaler.update()
        optimizer.step()
        assert bool(optimizer.overflow) == (not finite), (step, optimizer.overflow)
        skipped += not finite
        mine = master_values(model)
        if not finite:
            assert all(torch.equal(mine[n], before[n]) for n in mine), "a skipped step changed weights"
            where = "(rank " if torch.get_default_device().type == "cpu" else "("
            assert all(where in one and one.startswith("'") for one in optimizer.overflow)
        optimizer.zero_grad()
        plain.zero_grad()
        with torch.no_grad(), zeropp.gathered(model):
            for name, p in model.named_parameters():
                # The bound of helpers/parity.py for one step of AdamW, and clipping's factor, known to one rounding more.
                most = 8 * U * 12 * (0.11 / 0.0316) / 0.1 * LR + 4 * U * masters[name].abs()
                assert ((mine[name] - masters[name]).abs() <= most).all(), (step, name)
                assert torch.equal(p, mine[name].to(torch.float16)), (step, name)
                masters[name].copy_(mine[name])
            for name, p in plain.named_parameters():
                p.copy_(masters[name])
        losses.append(got.item())
    assert skipped == 1 and scaler.get_scale() == optimizer.loss_scale != 2.0**13
    return losses


@on_ranks(1, 2)
def test_every_stage() -> None:
    first = None
    for name, config in STAGES.items():
        losses = same_as_grad_scaler(config)
        # The step that overflows is part of the losses, and is 3e4 times as large on the last rank.
        assert first in (None, losses), name
        first = losses


def _tiny(**config: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(precision="fp16", **config))


@on_ranks(2)
def test_who_overflowed() -> None:
    """The parameter is named in `overflow` and in the log, and the next step is taken."""
    model, optimizer = _tiny(loss_scale=zeropp.LossScale(init=1024.0))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeropp").addHandler(handler)
    try:
        for factor in (1e5, 1.0):
            loss = (model(torch.ones(2, 4)).float() * factor).sum()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if factor == 1e5:
                # On a GPU the sum alone is looked at.
                where = (
                    "rank " if torch.get_default_device().type == "cpu" else ("rank ", "on some rank, or in the sum")
                )
                found = [
                    one.removeprefix("'1.weight' (") for one in optimizer.overflow if one.startswith("'1.weight' (")
                ]
                assert found and found[0].startswith(where), optimizer.overflow
                assert optimizer.loss_scale == 512.0
    finally:
        logging.getLogger("zeropp").removeHandler(handler)
    assert optimizer.overflow == [] and len(said) == 1, said
    assert said[0].startswith("step skipped: the gradients of '") and said[0].endswith(
        "at loss scale 1024; it is 512 now"
    )


@on_ranks(2)
def test_a_scale_that_cannot_go_down() -> None:
    model, optimizer = _tiny(loss_scale=64.0)
    optimizer.backward((model(torch.ones(2, 4)).float() * 1e6).sum())
    wanted = "are not finite at loss scale 64, which is fixed; weights and optimizer state are"
    assert wanted in refused_step(optimizer)
    assert optimizer.loss_scale == 64.0


@on_ranks(2)
def test_a_loss_that_was_not_scaled() -> None:
    model, optimizer = _tiny()
    model(torch.ones(2, 4)).float().sum().backward()
    wanted = "call optimizer.backward(loss) in place of loss.backward()"
    with pytest.raises(zeropp.Error, match=re.escape(wanted)):
        optimizer.step()


@on_ranks(1, 2)
def test_accumulates() -> None:
    """Two micro-steps, averaged: the norm is that of the mean gradient, whatever the scale."""
    norms = []
    for scale in (2.0, 1024.0):
        model, optimizer = _tiny(loss_scale=scale, accumulate=2)
        for micro in range(2):
            optimizer.backward((model(torch.full((2, 4), 1.0 + micro)).float() ** 2).mean())
        norms.append(optimizer.clip_grad_norm_(1e9))
        optimizer.step()
        optimizer.zero_grad()
    assert abs(norms[0] - norms[1]) <= 2e-3 * norms[0], norms  # fp16 keeps 11 bits


@on_ranks(1, 2)
def test_clips_values() -> None:
    """clip_grad_value_ as torch.nn.utils does it; alone, before and after the norm."""
    for config in STAGES.values():
        for order in (("value",), ("value", "norm"), ("norm", "value")):
            plain, model = gpt(), gpt()
            plain(*batch(0)).backward()
            gradients = {n: p.grad for n, p in plain.named_parameters()}
            if dist.get_world_size() > 1:
                for gradient in gradients.values():
                    total = gradient.cpu()  # gloo has no sums on a simulated GPU
                    dist.all_reduce(total)
                    gradient.copy_(total).div_(dist.get_world_size())
            model, optimizer = zeropp.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(**config)
            )
            model(*batch(0)).backward()
            bound = 0.3 * max(g.abs().max().item() for g in gradients.values())
            for what in order:
                if what == "value":
                    torch.nn.utils.clip_grad_value_(plain.parameters(), bound)
                    optimizer.clip_grad_value_(bound)
                else:
                    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                    got = optimizer.clip_grad_norm_(0.5)
                    assert abs(got - want.item()) <= 1e-5 * got, (config, order)
            with zeropp.gathered(model, grads=True):
                for name, p in model.named_parameters():
                    # Both clip the mean of the same gradients, added in another order: a few roundings of the bound.
                    assert ((p.grad - gradients[name]).abs() <= 1e-5 * bound).all(), (config, order, name)
            optimizer.step()
