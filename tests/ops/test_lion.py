# SPDX-License-Identifier: Apache-2.0
"""Lion against the paper's formula, element by element (torch has no Lion).

The bound. u = 2^-24. Constants are rounded once (u each), then every operation once, so to first order

    c  = b m + w g         off by at most 3u (|b m| + |w g|)      (constant, product, addition); where |c| is not more
                           than that, its sign is not determined and the step may be off by 2 lr
    p' = k p - lr sign(c)  u |p'| + 2u |k p| + u lr               (subtraction; k and product; lr)
    m' = b2 m + w2 g       3u (|b2 m| + |w2 g|)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import lion as reference
from torch import Tensor, nn

U = 2.0**-24
RATES = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.99}
QUIET = settings(deadline=None, max_examples=20)


def bounds(p: Tensor, m: Tensor, g: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    p, m, g = p.double(), m.double(), g.double()
    b, b2, lr = RATES["beta1"], RATES["beta2"], RATES["lr"]
    c = b * m + (1 - b) * g
    unsure = c.abs() <= 3 * U * ((b * m).abs() + ((1 - b) * g).abs())
    kept = (1 - lr * decay) * p
    off_p = U * ((kept - lr * c.sign()).abs() + 2 * kept.abs() + lr) + torch.where(unsure, 2 * lr, 0.0)
    return off_p, 3 * U * ((b2 * m).abs() + ((1 - b2) * g).abs())


def tensors(elems: int, seed: int, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def one(scale: float) -> Tensor:
        return (torch.randn(elems + offset, generator=rng) * scale)[offset:]

    return one(0.1), one(1e-2), one(1e-2)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@QUIET
@given(elems=st.integers(0, 4097), offset=st.integers(0, 17), seed=st.integers(0, 99), maximize=st.booleans())
def test_one_step_follows_the_paper(decay: float, elems: int, offset: int, seed: int, maximize: bool) -> None:
    p, m, g = tensors(elems, seed, offset)
    way = -g if maximize else g
    off_p, off_m = bounds(p, m, way, decay)
    want_p, want_m, _ = reference.step(p, m, way, weight_decay=decay, **RATES)
    zeropp.ops.lion_step_([p], [g], [m], weight_decay=decay, maximize=maximize, **RATES)
    assert bool(((p.double() - want_p).abs() <= 1.0001 * off_p).all())
    assert bool(((m.double() - want_m).abs() <= 1.0001 * off_m).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@QUIET
@given(elems=st.integers(1, 4097), offset=st.integers(0, 33), seed=st.integers(0, 99))
def test_low_precision_in_and_out_is_the_fp32_step_between_casts(
    dtype: torch.dtype, elems: int, offset: int, seed: int
) -> None:
    p, m, g = tensors(elems, seed)
    low, out = torch.zeros(elems + offset, dtype=dtype), torch.full((elems + offset + 5,), 7.0, dtype=dtype)
    low[offset:] = g.to(dtype)
    p2, m2 = p.clone(), m.clone()
    zeropp.ops.lion_step_([p], [low[offset:].float()], [m], **RATES)
    zeropp.ops.lion_step_([p2], [low[offset:]], [m2], param_outs=[out[offset : offset + elems]], **RATES)
    assert torch.equal(p, p2) and torch.equal(m, m2)
    assert torch.equal(out[offset : offset + elems], p.to(dtype))
    assert bool((out[:offset] == 7).all()) and bool((out[offset + elems :] == 7).all()), "wrote beside its part"


def test_zero_and_nan() -> None:
    """sign(0) is 0 and sign(NaN) NaN."""
    p, m = torch.ones(3), torch.zeros(3)
    zeropp.ops.lion_step_([p], [torch.tensor([0.0, float("nan"), 1e-45])], [m], lr=0.5)
    assert p[0] == 1 and p[1].isnan() and p[2] == 1  # (1 - beta1) * 1e-45 rounds to 0
    p = torch.ones(2)
    zeropp.ops.lion_step_([p], [torch.tensor([1e-30, -1e-30])], [torch.zeros(2)], lr=0.5)
    assert p.tolist() == [0.5, 1.5]


def test_lists_threads_and_grad_scale_do_not_show() -> None:
    p, m, g = tensors(200_003, 8)
    want_p, want_m = p.clone(), m.clone()
    zeropp.ops.lion_step_([want_p], [g * 0.25], [want_m], weight_decay=0.1, **RATES)
    lengths = [64, 1, 100_000, *[7] * 1000, 92_938]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        zeropp.ops.lion_step_(
            p.split(lengths), g.split(lengths), m.split(lengths), weight_decay=0.1, grad_scale=0.25, **RATES
        )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(p, want_p) and torch.equal(m, want_m)


def test_the_optimizer_follows_the_paper_over_groups_and_checkpoints() -> None:
    """Each step's bound added up (errors of m shrink by beta2 a step: 4 covers them); a reload goes on bit for bit."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(50, 3)), nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(2))]
    groups = [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:]}]
    optimizer = zeropp.optim.Lion(groups, lr=RATES["lr"], betas=(0.9, 0.99))
    state = [(p.detach().double(), torch.zeros_like(p).double()) for p in params]
    allowed = [torch.zeros_like(p).double() for p in params]
    for _ in range(20):
        for k, p in enumerate(params[:2]):  # the last never has a gradient
            p.grad = torch.randn_like(p)
            decay = 0.1 if k == 0 else 0.0
            m = optimizer.state[p]["exp_avg"] if p in optimizer.state else torch.zeros_like(p)
            allowed[k] += 4 * bounds(p.detach(), m, p.grad, decay)[0]
            state[k] = reference.step(*state[k], p.grad, weight_decay=decay, **RATES)[:2]
        optimizer.step()
    for k, p in enumerate(params):
        assert bool(((p.detach().double() - state[k][0]).abs() <= allowed[k]).all())
    assert params[2] not in optimizer.state
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    other = zeropp.optim.Lion([{"params": twins[:1]}, {"params": twins[1:]}])
    other.load_state_dict(optimizer.state_dict())
    for p, twin in zip(params, twins, strict=True):
        p.grad = torch.randn_like(p)
        twin.grad = p.grad.clone()
    optimizer.step(), other.step()
    assert all(torch.equal(p, twin) for p, twin in zip(params, twins, strict=True))


def test_the_optimizer_takes_a_closure_and_trains() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 1), torch.randn(64, 8)
    y = x @ (0.5 * torch.randn(8, 1))
    optimizer = zeropp.optim.Lion(layer.parameters(), lr=1e-2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (layer(x) - y).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(300)]
    assert losses[-1] < 0.01 * losses[0]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"lr": -1.0}, "lr is -1.0, wanted lr >= 0 and finite"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0, wanted 0 <= beta < 1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1, wanted weight_decay >= 0"),
    ],
)
def test_the_optimizer_refuses(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        zeropp.optim.Lion([nn.Parameter(torch.zeros(1))], **wrong)


@pytest.mark.parametrize(
    ("wrong", "kind", "sentence"),
    [
        ({"lr": -1.0}, ValueError, "lion_step_: lr is -1, wanted lr >= 0 and finite"),
        ({"lr": float("nan")}, ValueError, "lr is nan, wanted lr >= 0 and finite"),
        ({"lr": "a"}, TypeError, "lr is 'a', wanted a number"),
        ({"beta1": 1.0}, ValueError, "beta1 is 1, wanted 0 <= beta1 < 1"),
        ({"weight_decay": float("inf")}, ValueError, "weight_decay is inf, wanted a finite number"),
        ({"grads": [torch.zeros(39)]}, ValueError, r"grads\[0\] has 39 elements, wanted 40 as in params\[0\]"),
        ({"grads": []}, ValueError, "grads has 0 tensors, wanted 1 as in params"),
        ({"grads": torch.zeros(40)}, TypeError, "grads is a Tensor, wanted a list of tensors"),
        ({"grads": [torch.zeros(40).double()]}, ValueError, r"grads\[0\] is float64, wanted float32, bfloat16 or"),
        ({"grads": [torch.zeros(80)[::2]]}, ValueError, r"grads\[0\] is not contiguous"),
        ({"exp_avgs": [torch.zeros(40).half()]}, ValueError, r"exp_avgs\[0\] is float16, wanted float32"),
        ({"grads": [torch.zeros(40, requires_grad=True)]}, ValueError, r"grads\[0\] requires grad"),
        ({"param_outs": [torch.zeros(40, device="meta")]}, ValueError, r"param_outs\[0\] is on meta, wanted cpu"),
    ],
)
def test_misuse_is_refused_and_writes_nothing(wrong: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    p, m = torch.ones(40), torch.zeros(40)
    arguments: dict[str, Any] = {"params": [p], "grads": [torch.ones(40)], "exp_avgs": [m], "lr": 0.1, **wrong}
    with pytest.raises(kind, match=sentence):
        zeropp.ops.lion_step_(**arguments)
    assert bool((p == 1).all()) and bool((m == 0).all())


def test_shared_memory_is_refused() -> None:
    p = torch.ones(40)
    with pytest.raises(ValueError, match=r"params\[0\] and exp_avgs\[0\] share memory"):
        zeropp.ops.lion_step_([p], [torch.ones(40)], [p], lr=0.1)


def test_torch_sees_the_operator() -> None:
    p, g, m = [torch.randn(40)], [torch.randn(40)], [torch.zeros(40)]
    outs = [torch.empty(40, dtype=torch.bfloat16)]
    op = torch.ops.zeropp.lion_step_.default
    torch.library.opcheck(op, (p, g, m, [], [1e-3], 0.9, 0.99, [0.1], False, 1.0, [], []))
    torch.library.opcheck(op, (p, g, m, outs, [1e-3], 0.9, 0.99, [0.1], False, 1.0, [], []))

    def step(p: list[Tensor], g: list[Tensor], m: list[Tensor]) -> None:
        zeropp.ops.lion_step_(p, [x * 2 for x in g], m, lr=1e-3)

    twin_p, twin_m = [p[0].clone()], [m[0].clone()]
    step(p, g, m)
    torch.compile(step, fullgraph=True, backend="aot_eager")(twin_p, g, twin_m)
    assert torch.equal(p[0], twin_p[0]) and torch.equal(m[0], twin_m[0])
