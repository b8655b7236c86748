# SPDX-License-Identifier: Apache-2.0
"""Adagrad against torch and against the paper's formula, element by element.

The bound. u = 2^-24. Constants are rounded once (u each), then every operation once, so to first order

    g  = g + wd p          off_g = 3u (|g| + |wd p|), 0 without decay
    s' = s + g g           off_s = u s' + u g g + 2 |g| off_g
    D  = sqrt(s') + eps    relative: off_s / (2 s') + 3u        (square root, eps, addition)
    q  = r g / D           |q| (3u + that) + r off_g / D        (r, product, division)
    p' = p - q             u |p'| + off_q

torch rounds the same operations in another order, or fused, and at most as often: two fp32 versions differ by at most
twice that.
"""

from __future__ import annotations

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import adagrad as reference
from torch import Tensor

U = 2.0**-24
RATES = {"lr": 1e-2, "lr_decay": 1e-3, "eps": 1e-10}
QUIET = settings(deadline=None, max_examples=20)


def bounds(p: Tensor, s: Tensor, g: Tensor, t: int, decay: float) -> tuple[Tensor, Tensor]:
    p, s, g = p.double(), s.double(), g.double()
    off_g = 3 * U * (g.abs() + (decay * p).abs()) if decay else torch.zeros_like(g)
    g = g + decay * p
    total = s + g * g
    off_s = U * total + U * g * g + 2 * g.abs() * off_g
    denominator = total.sqrt() + RATES["eps"]
    size = RATES["lr"] / (1 + (t - 1) * RATES["lr_decay"])
    q = size * g / denominator
    off_q = q.abs() * (6 * U + off_s / (2 * total)) + size * off_g / denominator
    return U * (p - q).abs() + off_q, off_s


def tensors(elems: int, seed: int, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def one(scale: float) -> Tensor:
        return (torch.randn(elems + offset, generator=rng) * scale)[offset:]

    return one(0.1), one(1e-2).square(), one(1e-2)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("peer", ["torch", "paper"])
@QUIET
@given(elems=st.integers(0, 4097), offset=st.integers(0, 17), t=st.integers(1, 999), seed=st.integers(0, 99),
       maximize=st.booleans())  # fmt: skip
def test_one_step_agrees(peer: str, decay: float, elems: int, offset: int, t: int, seed: int, maximize: bool) -> None:
    p, s, g = tensors(elems, seed, offset)
    way = -g if maximize else g
    off_p, off_s = bounds(p, s, way, t, decay)
    if peer == "paper":
        want_p, want_s = reference.step(p, s, way, t, weight_decay=decay, **RATES)
    else:
        param = p.clone().requires_grad_()
        param.grad = g.clone()
        optimizer = torch.optim.Adagrad([param], weight_decay=decay, foreach=False, maximize=maximize, **RATES)
        optimizer.state[param] = {"step": torch.tensor(float(t - 1)), "sum": s.clone()}
        optimizer.step()
        want_p, want_s = param.detach(), optimizer.state[param]["sum"]
    zeropp.ops.adagrad_step_([p], [g], [s], step=t, weight_decay=decay, maximize=maximize, **RATES)
    sides = 1.0001 if peer == "paper" else 2.0001
    assert bool(((p.double() - want_p.double()).abs() <= sides * off_p).all())
    assert bool(((s.double() - want_s.double()).abs() <= sides * off_s).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@QUIET
@given(elems=st.integers(1, 4097), offset=st.integers(0, 33), seed=st.integers(0, 99))
def test_low_precision_in_and_out_is_the_fp32_step_between_casts(
    dtype: torch.dtype, elems: int, offset: int, seed: int
) -> None:
    p, s, g = tensors(elems, seed)
    low, out = torch.zeros(elems + offset, dtype=dtype), torch.full((elems + offset + 5,), 7.0, dtype=dtype)
    low[offset:] = g.to(dtype)
    p2, s2 = p.clone(), s.clone()
    zeropp.ops.adagrad_step_([p], [low[offset:].float()], [s], step=3, **RATES)
    zeropp.ops.adagrad_step_([p2], [low[offset:]], [s2], step=3, param_outs=[out[offset : offset + elems]], **RATES)
    assert torch.equal(p, p2) and torch.equal(s, s2)
    assert torch.equal(out[offset : offset + elems], p.to(dtype))
    assert bool((out[:offset] == 7).all()) and bool((out[offset + elems :] == 7).all()), "wrote beside its part"


def test_lists_and_steps_of_their_own() -> None:
    p, s, g = tensors(1000, 3)
    want_p, want_s = p.clone(), s.clone()
    for part in (slice(0, 400), slice(400, 1000)):
        step = 1 if part.start == 0 else 9
        zeropp.ops.adagrad_step_([want_p[part]], [g[part]], [want_s[part]], step=step, **RATES)
    lengths = [400, 600]
    zeropp.ops.adagrad_step_(p.split(lengths), g.split(lengths), s.split(lengths), step=[1, 9], **RATES)
    assert torch.equal(p, want_p) and torch.equal(s, want_s)


def test_misuse() -> None:
    p, s, g = torch.ones(40), torch.zeros(40), torch.ones(40)
    with pytest.raises(ValueError, match=r"adagrad_step_: steps\[0\] is 0, wanted the number of this update"):
        zeropp.ops.adagrad_step_([p], [g], [s], step=0, lr=0.1)
    with pytest.raises(ValueError, match="eps is -1, wanted eps >= 0 and finite"):
        zeropp.ops.adagrad_step_([p], [g], [s], step=1, lr=0.1, eps=-1.0)
    with pytest.raises(ValueError, match=r"state_sums\[0\] has 39 elements, wanted 40 as in params\[0\]"):
        zeropp.ops.adagrad_step_([p], [g], [s[:39]], step=1, lr=0.1)
    with pytest.raises(TypeError, match="step is a float, wanted a whole number"):
        zeropp.ops.adagrad_step_([p], [g], [s], step=1.5, lr=0.1)
    assert bool((p == 1).all()) and bool((s == 0).all())


def test_torch_sees_the_operator() -> None:
    p, g, s = [torch.randn(40)], [torch.randn(40).bfloat16()], [torch.ones(40)]
    torch.library.opcheck(
        torch.ops.zeropp.adagrad_step_.default, (p, g, s, [], [3], [1e-2], 0.0, 1e-10, [0.1], False, 1.0, [], [])
    )
