# SPDX-License-Identifier: Apache-2.0
"""LAMB against the paper's formula, element by element (torch has no LAMB).

The bound. u = 2^-24. An update is some twelve roundings of terms |m'| / root and |decay p|, where m' = b m + w g may
cancel: 12 u (|b m| + |w g|) / (1 - b^t) / root + 3 u |decay p|. A norm's squares are added 256 to a lane: relative
(256 / 2 + 8) u at most, twice for a ratio; the ratio multiplies the step.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import lamb as reference
from torch import Tensor, nn

U = 2.0**-24
LR = 3e-3
QUIET = settings(deadline=None, max_examples=20)


def bound(p: Tensor, m: Tensor, g: Tensor, update: Tensor, v_new: Tensor, ratio: float, t: int, decay: float) -> Tensor:
    root = (v_new / (1 - 0.999**t)).sqrt() + 1e-6
    parts = (0.9 * m.double().abs() + 0.1 * g.double().abs()) / (1 - 0.9**t) / root
    off = 12 * U * parts + 3 * U * (decay * p.double()).abs() + 270 * U * update.abs()
    return LR * ratio * off + 2 * U * p.double().abs() + U * LR * ratio * update.abs()


def tensors(elems: int, seed: int, offset: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def one(scale: float) -> Tensor:
        return (torch.randn(elems + offset, generator=rng) * scale)[offset:]

    return one(0.1), one(1e-2), one(1e-2).square(), one(1e-2)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@QUIET
@given(
    elems=st.integers(0, 9000), offset=st.integers(0, 17), seed=st.integers(0, 99), t=st.integers(1, 50),
    maximize=st.booleans(),
)  # fmt: skip
def test_one_step_follows_the_paper(decay: float, elems: int, offset: int, seed: int, t: int, maximize: bool) -> None:
    p, m, v, g = tensors(elems, seed, offset)
    way = -g if maximize else g
    want_p, want_m, want_v, update, ratio = reference.step(p, m, v, way, t=t, lr=LR, weight_decay=decay)
    allowed = bound(p, m, way, update, want_v, ratio, t, decay)
    off_m = 3 * U * (0.9 * m.double().abs() + 0.1 * g.double().abs())
    zeropp.ops.lamb_step_([p], [g], [m], [v], step=t, lr=LR, weight_decay=decay, maximize=maximize)
    assert bool(((p.double() - want_p).abs() <= 1.001 * allowed).all())
    assert bool(((m.double() - want_m).abs() <= 1.001 * off_m).all())
    assert bool(((v.double() - want_v).abs() <= 8 * U * want_v + 1e-44).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@QUIET
@given(elems=st.integers(1, 4097), offset=st.integers(0, 33), seed=st.integers(0, 99))
def test_low_precision_in_and_out_is_the_fp32_step_between_casts(
    dtype: torch.dtype, elems: int, offset: int, seed: int
) -> None:
    p, m, v, g = tensors(elems, seed)
    low, out = torch.zeros(elems + offset, dtype=dtype), torch.full((elems + offset + 5,), 7.0, dtype=dtype)
    low[offset:] = g.to(dtype)
    p2, m2, v2 = p.clone(), m.clone(), v.clone()
    zeropp.ops.lamb_step_([p], [low[offset:].float()], [m], [v], step=3, lr=LR)
    zeropp.ops.lamb_step_([p2], [low[offset:]], [m2], [v2], step=3, lr=LR, param_outs=[out[offset : offset + elems]])
    assert torch.equal(p, p2) and torch.equal(m, m2) and torch.equal(v, v2)
    assert torch.equal(out[offset : offset + elems], p.to(dtype))
    assert bool((out[:offset] == 7).all()) and bool((out[offset + elems :] == 7).all()), "wrote beside its part"


def test_the_ratio_is_held_and_is_one_where_a_norm_is_zero() -> None:
    for start, trust, ratio in ((0.0, (0.0, 10.0), 1.0), (100.0, (0.0, 10.0), 10.0), (1e-3, (0.5, 10.0), 0.5)):
        p, m, v, g = torch.full((4,), start), torch.zeros(4), torch.zeros(4), torch.ones(4)
        zeropp.ops.lamb_step_([p], [g], [m], [v], step=1, lr=0.5, eps=0.0, trust=trust)
        assert torch.allclose(p, torch.full((4,), start - 0.5 * ratio), rtol=1e-6, atol=0)  # u is 1


def test_lists_threads_and_grad_scale_do_not_show() -> None:
    """One call for many tensors, more than a group holds, and one call a tensor: the same bits."""
    lengths = [64, 1, 300_001, 0, *[7] * 1000, 4096, 4097]
    lists = [list(part.split(lengths)) for part in tensors(sum(lengths), 8)]
    want = [[t.clone() for t in part] for part in lists]
    for p, m, v, g in zip(*want, strict=True):
        zeropp.ops.lamb_step_([p], [g * 0.25], [m], [v], step=2, lr=LR, weight_decay=0.1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        zeropp.ops.lamb_step_(lists[0], lists[3], lists[1], lists[2], step=2, lr=LR, weight_decay=0.1, grad_scale=0.25)
    finally:
        torch.set_num_threads(before)
    for k in range(3):
        assert all(torch.equal(a, b) for a, b in zip(lists[k], want[k], strict=True))


def test_the_optimizer_follows_the_operator_over_groups_and_checkpoints() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(50, 3)), nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(2))]
    optimizer = zeropp.optim.LAMB([{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:]}], lr=LR)
    state = [(p.detach().double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()) for p in params]
    for t in range(1, 21):
        for k, p in enumerate(params[:2]):  # the last never has a gradient
            p.grad = torch.randn_like(p)
            state[k] = reference.step(*state[k], p.grad, t=t, lr=LR, weight_decay=0.1 if k == 0 else 0.0)[:3]
        optimizer.step()
    for k, p in enumerate(params):  # twenty steps of at most 3e-3 of the norm, each within some 300 u of itself
        assert bool(((p.detach().double() - state[k][0]).abs() <= 1e-5 * state[k][0].norm()).all())
    assert params[2] not in optimizer.state
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    other = zeropp.optim.LAMB([{"params": twins[:1]}, {"params": twins[1:]}])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share the moments
    for p, twin in zip(params, twins, strict=True):
        p.grad = torch.randn_like(p)
        twin.grad = p.grad.clone()
    optimizer.step(), other.step()
    assert all(torch.equal(p, twin) for p, twin in zip(params, twins, strict=True))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"lr": -1.0}, r"lr is -1\.0, wanted lr >= 0 and finite"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1\.0, wanted 0 <= beta < 1"),
        ({"trust": (2.0, 1.0)}, r"trust is \(2\.0, 1\.0\), wanted 0 <= least <= greatest"),
    ],
)
def test_the_optimizer_refuses(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        zeropp.optim.LAMB([nn.Parameter(torch.zeros(1))], **wrong)


@pytest.mark.parametrize(
    ("wrong", "kind", "sentence"),
    [
        ({"lr": float("nan")}, ValueError, "lamb_step_: lr is nan, wanted a finite number"),
        ({"lr": "a"}, TypeError, "lr is 'a', wanted a number"),
        ({"beta2": 1.0}, ValueError, "beta2 is 1, wanted 0 <= beta2 < 1"),
        ({"step": 0}, ValueError, r"steps\[0\] is 0, wanted the number of this update"),
        ({"trust": (2.0, 1.0)}, ValueError, "trust_least is 2, wanted at most trust_most, 1"),
        ({"grads": [torch.zeros(39)]}, ValueError, r"grads\[0\] has 39 elements, wanted 40"),
        ({"exp_avg_sqs": [torch.zeros(40).half()]}, ValueError, r"exp_avg_sqs\[0\] is float16, wanted float32"),
        ({"grads": [torch.zeros(80)[::2]]}, ValueError, r"grads\[0\] is not contiguous"),
        ({"grads": [torch.zeros(40, requires_grad=True)]}, ValueError, r"grads\[0\] requires grad"),
    ],
)
def test_misuse_is_refused_and_writes_nothing(wrong: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    p, m, v = torch.ones(40), torch.zeros(40), torch.zeros(40)
    arguments: dict[str, Any] = {
        "params": [p], "grads": [torch.ones(40)], "exp_avgs": [m], "exp_avg_sqs": [v], "step": 1, "lr": 0.1, **wrong,
    }  # fmt: skip
    with pytest.raises(kind, match=sentence):
        zeropp.ops.lamb_step_(**arguments)
    assert bool((p == 1).all()) and not m.any() and not v.any()


def test_torch_sees_the_operator() -> None:
    p, g, m, v = ([torch.rand(40)] for _ in range(4))
    outs = [torch.empty(40, dtype=torch.bfloat16)]
    op = torch.ops.zeropp.lamb_step_.default
    for out in ([], outs):
        torch.library.opcheck(
            op, (p, g, m, v, out, [3], [1e-3], 0.9, 0.999, 1e-6, [0.1], 0.0, 10.0, False, 1.0, [], [])
        )


# --- the first pass alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.1])
@QUIET
@given(
    elems=st.integers(1, 9000), offset=st.integers(0, 17), seed=st.integers(0, 99), t=st.integers(1, 50),
    maximize=st.booleans(),
)  # fmt: skip
def test_the_first_pass_has_the_moments_of_a_step_and_the_norms_of_the_paper(
    decay: float, elems: int, offset: int, seed: int, t: int, maximize: bool
) -> None:
    """The sums are off by what updates are, twice, and (256 + 24) u by their additions."""
    p, m, v, g = tensors(elems, seed, offset)
    kept, twin = p.clone(), (p.clone(), m.clone(), v.clone())
    way = -g if maximize else g
    _, _, want_v, update, _ = reference.step(p, m, v, way, t=t, lr=LR, weight_decay=decay)
    off = (
        bound(torch.zeros_like(p), m, way, 0 * update, want_v, 1.0, t, decay) / LR + 3 * U * (decay * p.double()).abs()
    )
    sums = zeropp.ops.lamb_moments_([p], [g], [m], [v], step=t, weight_decay=decay, maximize=maximize)
    zeropp.ops.lamb_step_([twin[0]], [g], [twin[1]], [twin[2]], step=t, lr=LR, weight_decay=decay, maximize=maximize)
    assert torch.equal(p, kept) and torch.equal(m, twin[1]) and torch.equal(v, twin[2])
    norm, size = sums[0].tolist()
    squares = p.double().square().sum().item(), update.square().sum().item()
    assert abs(norm - squares[0]) <= 280 * U * squares[0]
    assert abs(size - squares[1]) <= 1.01 * (280 * U * squares[1] + (2 * update.abs() * off).sum().item())


def test_pieces_threads_and_grad_scale_do_not_show_in_the_first_pass() -> None:
    lengths = [64, 1, 300_001, 0, *[7] * 300, 4096, 4097]
    lists = [list(part.split(lengths)) for part in tensors(sum(lengths), 8)]
    want = [[one.clone() for one in part] for part in lists]
    rows = [
        zeropp.ops.lamb_moments_([p], [g * 0.25], [m], [v], step=2 + k % 3, weight_decay=0.1)
        for k, (p, m, v, g) in enumerate(zip(*want, strict=True))
    ]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        p, m, v, g = lists
        steps = [2 + k % 3 for k in range(len(lengths))]
        sums = zeropp.ops.lamb_moments_(p, g, m, v, step=steps, weight_decay=0.1, grad_scale=0.25)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(sums, torch.cat(rows)) and not sums[3].any()
    assert all(torch.equal(a, b) for k in (1, 2) for a, b in zip(want[k], lists[k], strict=True))
    assert zeropp.ops.lamb_moments_([], [], [], [], step=1).shape == (0, 2)


@pytest.mark.parametrize(
    ("wrong", "kind", "sentence"),
    [
        ({"step": 0}, ValueError, r"lamb_moments_: steps\[0\] is 0, wanted the number of this update"),
        ({"beta1": 1.0}, ValueError, "beta1 is 1, wanted 0 <= beta1 < 1"),
        ({"eps": -1.0}, ValueError, "eps is -1, wanted eps >= 0 and finite"),
        ({"weight_decay": float("inf")}, ValueError, "weight_decay is inf, wanted a finite number"),
        ({"grad_scale": "a"}, TypeError, "grad_scale is 'a', wanted a number"),
        ({"grads": [torch.zeros(39)]}, ValueError, r"grads\[0\] has 39 elements, wanted 40 as in params\[0\]"),
        ({"exp_avgs": [torch.zeros(40).bfloat16()]}, ValueError, r"exp_avgs\[0\] is bfloat16, wanted float32"),
        ({"params": [torch.zeros(80)[::2]]}, ValueError, r"params\[0\] is not contiguous"),
        ({"params": [torch.zeros(40, requires_grad=True)]}, ValueError, r"params\[0\] requires grad"),
    ],
)  # fmt: skip
def test_the_first_pass_refuses_misuse_and_writes_nothing(
    wrong: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    m, v = torch.zeros(40), torch.zeros(40)
    arguments: dict[str, Any] = {
        "params": [torch.ones(40)], "grads": [torch.ones(40)], "exp_avgs": [m], "exp_avg_sqs": [v], "step": 1, **wrong,
    }  # fmt: skip
    with pytest.raises(kind, match=sentence):
        zeropp.ops.lamb_moments_(**arguments)
    assert not m.any() and not v.any()


def test_torch_sees_the_first_pass() -> None:
    p, g, m, v = ([torch.rand(40)] for _ in range(4))
    op = torch.ops.zeropp.lamb_moments_.default
    torch.library.opcheck(op, (p, g, m, v, [3], 0.9, 0.999, 1e-6, [0.1], False, 1.0, [], []))

    def half(p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> Tensor:
        return zeropp.ops.lamb_moments_(p, [x * 2 for x in g], m, v, step=3).sqrt()

    twin = [m[0].clone()], [v[0].clone()]
    want, seen = half(p, g, m, v), torch.compile(half, fullgraph=True, backend="aot_eager")(p, g, *twin)
    assert torch.equal(want, seen) and torch.equal(m[0], twin[0][0]) and torch.equal(v[0], twin[1][0])
