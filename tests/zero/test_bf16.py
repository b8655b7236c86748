# SPDX-License-Identifier: Apache-2.0
"""bf16 with fp32 masters: the same bits as a plain torch loop.

The reference, written out: every rank computes bf16 gradients; their mean is taken in fp32 in rank order and rounded
to bf16 once (what travels is bf16); torch's AdamW steps fp32 masters with it; parameters are the masters, rounded.
zeropp must have the same gradients and losses bit for bit, and parameters that are its own masters rounded. Masters
are held to the bound of one AdamW step (helpers/parity.py), and the reference then goes on from zeropp's masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from parity import U
from ranks import on_ranks, shards_tier
from torch import Tensor, nn
from training import STAGES, batch, gpt, loss_after_fifty_steps, master_values

LR = 3e-3


def _mean_over_ranks(gradient: Tensor) -> Tensor:
    everyone = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, gradient)
    total = everyone[0].float()
    for other in everyone[1:]:
        total = total + other.float()
    return (total * (1.0 / len(everyone))).to(torch.bfloat16)


def _reference() -> tuple[nn.Module, dict[str, Tensor], torch.optim.Optimizer]:
    """A bf16 model, its fp32 masters, and torch's AdamW over them."""
    model = gpt()
    masters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    return model.to(torch.bfloat16), masters, torch.optim.AdamW(masters.values(), lr=LR)


def same_as_reference(config: dict[str, Any]) -> list[float]:
    plain, masters, adam = _reference()
    model = gpt()
    model, optimizer = zeropp.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=LR), zeropp.Config(precision="bf16", **config)
    )
    losses = []
    for step in range(12):
        want = plain(*batch(step))
        want.backward()
        got = model(*batch(step))
        assert got.dtype == torch.bfloat16
        got.backward()
        assert got.item() == want.item(), (step, got.item(), want.item())
        gradients = {n: _mean_over_ranks(p.grad) for n, p in plain.named_parameters()}
        with zeropp.gathered(model, grads=True):
            for name, p in model.named_parameters():
                assert torch.equal(p.grad, gradients[name]), (step, name, (p.grad - gradients[name]).abs().max())
        for name, master in masters.items():
            master.grad = gradients[name].float()
        adam.step()
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        mine = master_values(model)
        with torch.no_grad(), zeropp.gathered(model):
            for name, p in model.named_parameters():
                # The bound of helpers/parity.py, over 12 steps: moments are sums of up to 12 terms, sqrt(1 - 0.999^12) <=
                # 0.11.
                most = 4 * U * 12 * (0.11 / 0.0316) / 0.1 * LR + 4 * U * masters[name].abs()
                assert ((mine[name] - masters[name]).abs() <= most).all(), (step, name)
                assert torch.equal(p, mine[name].to(torch.bfloat16)), (step, name)
                masters[name].copy_(mine[name])
            for name, p in plain.named_parameters():
                p.copy_(masters[name])
        losses.append(got.item())
    return losses


@on_ranks(1, 2, pytest.param(3, marks=pytest.mark.slow))
def test_every_stage() -> None:
    first = None
    for name, config in STAGES.items():
        losses = same_as_reference(config)
        assert first in (None, losses), name
        first = losses


@on_ranks(2)
def test_converges() -> None:
    """50 steps of bf16 end where fp32 ends."""
    last = {}
    for precision in ("fp32", "bf16"):
        model = gpt()
        model, optimizer = zeropp.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=LR), zeropp.Config(precision=precision)
        )
        last[precision] = loss_after_fifty_steps(model, optimizer)
    # bf16 keeps 8 bits: a loss of about 4 nats is known to 0.03 in one forward; the means of ten must agree to that.
    assert abs(last["bf16"] - last["fp32"]) < 0.03 * last["fp32"], last


@on_ranks(1, 2, pytest.param(3, marks=pytest.mark.slow))
def test_bf16_model() -> None:
    """A model that is bf16 already: its masters begin with those values, and then have bits that bf16 has not."""
    model = gpt(dtype=torch.bfloat16)
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    before = master_values(model)
    for step in range(3):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = master_values(model)
    with zeropp.gathered(model):
        for name, p in model.named_parameters():
            assert p.dtype == torch.bfloat16
            assert torch.equal(p, after[name].to(torch.bfloat16)), name
            assert torch.equal(before[name], before[name].to(torch.bfloat16).float()), name
    moved = sum((after[n] != before[n]).sum().item() for n in after)
    kept_in_bf16 = sum((after[n].to(torch.bfloat16) != before[n].to(torch.bfloat16)).sum().item() for n in after)
    assert moved > 2 * kept_in_bf16, "steps this small live in the masters only"


@on_ranks(2)
def test_master_in_time() -> None:
    """A bf16 model without an optimizer has no fp32 copy; an optimizer that comes later brings it, and so do fp32 values."""
    for config in STAGES.values():
        model = gpt(dtype=torch.bfloat16)
        zeropp.prepare(model, None, zeropp.Config(**config))
        assert zeropp.memory(model)[shards_tier()]["master"]["held"] == 0
        model(*batch(0)).backward()
        model.zero_grad()
        fine = {name: p.detach() + 1e-4 for name, p in gpt().named_parameters()}
        late, _ = zeropp.prepare(model, torch.optim.AdamW(model.parameters()))
        backward_step, _ = zeropp.prepare(model_2 := gpt(dtype=torch.bfloat16), torch.optim.AdamW(model_2.parameters()))
        wanted = master_values(backward_step)
        assert all(torch.equal(values, wanted[name]) for name, values in master_values(late).items())

        other = gpt(dtype=torch.bfloat16)
        zeropp.prepare(other, None, zeropp.Config(**config))
        zeropp.load_full_state_dict(other, {name: p.to(torch.bfloat16) for name, p in fine.items()}, strict=False)
        assert zeropp.memory(other)[shards_tier()]["master"]["held"] == 0
        zeropp.load_full_state_dict(other, fine, strict=False)
        assert zeropp.memory(other)[shards_tier()]["master"]["held"] > 0
        other, _ = zeropp.prepare(other, torch.optim.AdamW(other.parameters()))
        assert all(torch.equal(values, fine[name]) for name, values in master_values(other).items())


@on_ranks(2)
def test_inputs_are_cast() -> None:
    """Floating-point inputs come in bf16, others as they are, at any depth."""

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, *, more: dict[str, Any]) -> Tensor:
            seen.append((x.dtype, more["mask"].dtype, more["list"][0].dtype))
            return self.linear(x).sum()

    seen: list[Any] = []
    model, _ = zeropp.prepare(Probe(), None, zeropp.Config(precision="bf16"))
    model(torch.randn(2, 4), more={"mask": torch.ones(2, dtype=torch.long), "list": [torch.randn(2)]})
    assert seen == [(torch.bfloat16, torch.int64, torch.bfloat16)]
