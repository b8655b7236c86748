# SPDX-License-Identifier: Apache-2.0
"""SGD with momentum against torch and against its formula, element by element.

The bound. u = 2^-24. Constants are rounded once (u each), then every operation once, so to first order

    g  = g + wd p                off_g = 3u (|g| + |wd p|), 0 without decay
    b' = mu b + (1 - tau) g      off_b = 3u (|mu b| + |(1 - tau) g|) + off_g (1 - tau);   first update: off_g
    d  = b', or g + mu b'        off_d = off_b, or 3u (|g| + |mu b'|) + off_g + mu off_b
    p' = p - lr d                u |p'| + 2u |lr d| + lr off_d

torch rounds the same operations in another order, or fused, and at most as often: two fp32 versions differ by at most
twice that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import sgd as reference
from torch import Tensor

U = 2.0**-24
QUIET = settings(deadline=None, max_examples=20)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "dampening and decay": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
LR = 1e-2


def bounds(p: Tensor, b: Tensor | None, g: Tensor, kind: dict[str, Any]) -> tuple[Tensor, Tensor]:
    p, g = p.double(), g.double()
    mu, share, decay = kind["momentum"], 1 - kind.get("dampening", 0.0), kind.get("weight_decay", 0.0)
    off_g = 3 * U * (g.abs() + (decay * p).abs()) if decay else torch.zeros_like(g)
    g = g + decay * p
    off_b, new_b = off_g, g
    if b is not None:
        off_b = 3 * U * ((mu * b.double()).abs() + (share * g).abs()) + share * off_g
        new_b = mu * b.double() + share * g
    d, off_d = new_b, off_b
    if kind.get("nesterov"):
        d, off_d = g + mu * new_b, 3 * U * (g.abs() + (mu * new_b).abs()) + off_g + mu * off_b
    return U * (p - LR * d).abs() + 2 * U * (LR * d).abs() + LR * off_d, off_b


def tensors(elems: int, seed: int, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def one(scale: float) -> Tensor:
        return (torch.randn(elems + offset, generator=rng) * scale)[offset:]

    return one(0.1), one(1e-2), one(1e-2)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("peer", ["torch", "formula"])
@QUIET
@given(elems=st.integers(0, 4097), offset=st.integers(0, 17), seed=st.integers(0, 99), first=st.booleans(),
       maximize=st.booleans())  # fmt: skip
def test_one_step_agrees(
    peer: str, kind: dict[str, Any], elems: int, offset: int, seed: int, first: bool, maximize: bool
) -> None:
    p, b, g = tensors(elems, seed, offset)
    way = -g if maximize else g
    before = None if first or kind["momentum"] == 0 else b
    off_p, off_b = bounds(p, before, way, kind)
    if peer == "formula":
        want_p, want_b = reference.step(p, before, way, lr=LR, **kind)
    else:
        param = p.clone().requires_grad_()
        param.grad = g.clone()
        optimizer = torch.optim.SGD([param], lr=LR, foreach=False, maximize=maximize, **kind)
        if before is not None:
            optimizer.state[param] = {"momentum_buffer": before.clone()}
        optimizer.step()
        want_p, want_b = param.detach(), optimizer.state[param].get("momentum_buffer")
    buffers = [b] if kind["momentum"] else []
    zeropp.ops.sgd_step_([p], [g], buffers, step=1 if first else 2, lr=LR, maximize=maximize, **kind)
    sides = 1.0001 if peer == "formula" else 2.0001
    assert bool(((p.double() - want_p.double()).abs() <= sides * off_p).all())
    if buffers:
        assert bool(((b.double() - want_b.double()).abs() <= sides * off_b).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@QUIET
@given(elems=st.integers(1, 4097), offset=st.integers(0, 33), seed=st.integers(0, 99))
def test_low_precision_in_and_out_is_the_fp32_step_between_casts(
    dtype: torch.dtype, elems: int, offset: int, seed: int
) -> None:
    p, b, g = tensors(elems, seed)
    low, out = torch.zeros(elems + offset, dtype=dtype), torch.full((elems + offset + 5,), 7.0, dtype=dtype)
    low[offset:] = g.to(dtype)
    p2, b2, rates = p.clone(), b.clone(), {"step": 2, "lr": LR, "momentum": 0.9}
    zeropp.ops.sgd_step_([p], [low[offset:].float()], [b], **rates)
    zeropp.ops.sgd_step_([p2], [low[offset:]], [b2], param_outs=[out[offset : offset + elems]], **rates)
    assert torch.equal(p, p2) and torch.equal(b, b2)
    assert torch.equal(out[offset : offset + elems], p.to(dtype))
    assert bool((out[:offset] == 7).all()) and bool((out[offset + elems :] == 7).all()), "wrote beside its part"


def test_the_first_update_does_not_read_the_buffer() -> None:
    p, g, b = torch.ones(50), torch.ones(50), torch.full((50,), float("nan"))
    zeropp.ops.sgd_step_([p], [g], [b], step=1, lr=0.5, momentum=0.9)
    assert torch.equal(b, g) and bool((p == 0.5).all())


def test_misuse() -> None:
    p, b, g = torch.ones(40), torch.zeros(40), torch.ones(40)
    with pytest.raises(ValueError, match=r"sgd_step_: momentum is 0\.9 and momentum_buffers is empty"):
        zeropp.ops.sgd_step_([p], [g], step=1, lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"nesterov with momentum 0\.9 and dampening 0\.5, wanted momentum > 0"):
        zeropp.ops.sgd_step_([p], [g], [b], step=1, lr=0.1, momentum=0.9, dampening=0.5, nesterov=True)
    with pytest.raises(ValueError, match="momentum is -1, wanted momentum >= 0 and finite"):
        zeropp.ops.sgd_step_([p], [g], [b], step=1, lr=0.1, momentum=-1.0)
    with pytest.raises(ValueError, match=r"params\[0\] and grads\[0\] share memory"):
        zeropp.ops.sgd_step_([p], [p], [b], step=1, lr=0.1)
    assert bool((p == 1).all()) and bool((b == 0).all())


def test_torch_sees_the_operator() -> None:
    p, g, b = [torch.randn(40)], [torch.randn(40)], [torch.ones(40)]
    rest = ([], [3], [1e-2], 0.9, 0.0, [0.1], True, False, 1.0, [], [])
    torch.library.opcheck(torch.ops.zeropp.sgd_step_.default, (p, g, b, *rest))
    plain = ([], [], [3], [1e-2], 0.0, 0.0, [0.1], False, False, 1.0, [], [])
    torch.library.opcheck(torch.ops.zeropp.sgd_step_.default, (p, g, *plain))
