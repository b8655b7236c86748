# SPDX-License-Identifier: Apache-2.0
"""get_full, get_local, set_full, set_local and local_range on two ranks, beside the same model under plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks
from tiny import sentence as sentence_of
from torch import Tensor, nn

SENTENCES = {
    "not prepared": "Parameter of shape (2, 3) is not a parameter of a model that zeropp.prepare was given",
    "shape": "set_full: values of shape (2,) for '0.weight' of shape (5, 7)",
    "no gradient": "'0.weight' has no gradient to replace; call backward first",
    "no state": "'0.weight' has no 'exp_avg' yet: states exist from the first optimizer.step() on",
    "part": "set_local: 1000 elements for '0.weight', of which this rank has",
    "kind": "'0.weight' has no 'momentum'; it has 'value', 'grad', 'exp_avg', 'exp_avg_sq'",
}

STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0}, "1": {"stage": 1}, "2": {"stage": 2}, "3 host copy": {"stage": 3},
    "3 gather": {"stage": 3, "host_copy": "off"}, "3 gather bf16": {"stage": 3, "host_copy": "off", "precision": "bf16"},
}  # fmt: skip


def pair(optimizer: Any = torch.optim.AdamW, **config: Any) -> tuple[nn.Module, Any, nn.Module, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    model = copy.deepcopy(plain)
    config.setdefault("units", ("Linear",))
    return (*zeropp.prepare(model, optimizer(model.parameters(), lr=1e-2), zeropp.Config(**config)), plain,
            optimizer(plain.parameters(), lr=1e-2))  # fmt: skip


def batch(model: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 28).view(4, 7)
    return model(x.to(next(iter(model.parameters())).dtype)).float().pow(2).mean()


def close(got: Tensor | None, wanted: Tensor, rough: bool) -> None:
    assert got is not None and got.shape == wanted.shape
    torch.testing.assert_close(got.float(), wanted, rtol=0.05 if rough else 1e-5, atol=2e-2 if rough else 1e-7)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_reads(stage: str) -> None:
    """Every kind, before and after a step; the parts of the ranks make the whole."""
    model, optimizer, plain, theirs = pair(**STAGES[stage])
    rough = "bf16" in stage
    for p in model.parameters():
        assert zeropp.get_full(p, "grad") is None and zeropp.get_full(p, "exp_avg") is None
        assert zeropp.get_local(p, "exp_avg") is None
    batch(model).backward()
    batch(plain).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(zeropp.get_full(p, "grad"), q.grad, rough)
        close(zeropp.get_full(p), q.detach(), rough)
    optimizer.step()
    theirs.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        whole = zeropp.get_full(p)
        assert whole.dtype == torch.float32
        close(whole, q.detach(), rough)
        for kind in ("exp_avg", "exp_avg_sq"):
            close(zeropp.get_full(p, kind), theirs.state[q][kind], rough)
        begin, end = zeropp.local_range(p)
        assert torch.equal(zeropp.get_local(p), whole.view(-1)[begin:end])
        ranges: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranges, (begin, end))
        covered = [i for first, last in ranges for i in range(first, last)]
        assert covered == list(range(p.numel())) * (2 if stage == "0" else 1)


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_writes(stage: str) -> None:
    """What is set is what is read, by everybody, and what the next step starts from."""
    model, optimizer, plain, theirs = pair(**STAGES[stage])
    rough = "bf16" in stage
    for net, adam in ((model, optimizer), (plain, theirs)):
        batch(net).backward()
        adam.step()
        adam.zero_grad()
        batch(net).backward()
    for i, (p, q) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
        wanted = {kind: torch.full(p.shape, (0.25 + i) * scale) for kind, scale in
                  (("value", 1.0), ("grad", 2.0), ("exp_avg", 0.5), ("exp_avg_sq", 3.0))}  # fmt: skip
        for kind, values in wanted.items():
            if i == 0 and kind in ("exp_avg", "grad"):
                begin, end = zeropp.local_range(p)
                zeropp.set_local(p, values.view(-1)[begin:end], kind)
            else:
                zeropp.set_full(p, values, kind)
            close(zeropp.get_full(p, kind), values, rough)
        q.data.copy_(wanted["value"])
        q.grad.copy_(wanted["grad"])
        theirs.state[q].update({kind: wanted[kind].clone() for kind in ("exp_avg", "exp_avg_sq")})
    optimizer.step()
    theirs.step()
    with zeropp.gathered(model):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            close(p.detach().float(), q.detach(), rough)


@on_ranks(2)
def test_other_optimizers() -> None:
    """States that torch's own optimizer keeps a piece at a time."""
    model, optimizer, plain, theirs = pair(lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), host_copy="off")
    for net, sgd in ((model, optimizer), (plain, theirs)):
        batch(net).backward()
        sgd.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(zeropp.get_full(p, "momentum_buffer"), theirs.state[q]["momentum_buffer"], False)
        zeropp.set_full(p, torch.full(p.shape, 7.0), "momentum_buffer")
        assert float(zeropp.get_full(p, "momentum_buffer").min()) == 7.0


@on_ranks(2)
def test_without_a_piece() -> None:
    """Three elements lie on one rank; the others have no state of them, and answer as it does."""
    model = nn.Linear(2, 1)
    model, optimizer = zeropp.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), zeropp.Config(host_copy="off", units=("Linear",))
    )
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    weight = model.weight
    told = sentence_of(lambda: zeropp.get_full(weight, "exp_avg"), zeropp.ConfigError)
    zeropp.set_full(weight, torch.full((1, 2), 3.0), "momentum_buffer")
    assert torch.equal(zeropp.get_full(weight, "momentum_buffer"), torch.full((1, 2), 3.0))
    assert "'weight' has no 'exp_avg'; it has 'value', 'grad', 'momentum_buffer'" in told


@on_ranks(2)
def test_refusals() -> None:
    model, optimizer, _, _ = pair(host_copy="off")
    p = next(iter(model.parameters()))
    told = {
        "not prepared": sentence_of(lambda: zeropp.get_full(nn.Parameter(torch.ones(2, 3))), zeropp.ConfigError),
        "shape": sentence_of(lambda: zeropp.set_full(p, torch.ones(2)), zeropp.ConfigError),
        "no gradient": sentence_of(lambda: zeropp.set_full(p, torch.ones(p.shape), "grad"), zeropp.Error),
        "no state": sentence_of(lambda: zeropp.set_full(p, torch.ones(p.shape), "exp_avg"), zeropp.Error),
        "part": sentence_of(lambda: zeropp.set_local(p, torch.ones(1000)), zeropp.ConfigError),
    }
    batch(model).backward()
    optimizer.step()
    told["kind"] = sentence_of(lambda: zeropp.get_local(p, "momentum"), zeropp.ConfigError)
    assert {name for name, said in told.items() if SENTENCES[name] in said} == set(SENTENCES), told
