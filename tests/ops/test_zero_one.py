# SPDX-License-Identifier: Apache-2.0
"""0/1 Adam's step by a rank's own momentum against its formula, element by element.

The bound. u = 2^-24. Constants are rounded once (u each), then every operation once, so to first order

    m'   3u (|b m| + |w g|) + u |w g|             (constant, product, addition; unscaling)
    u'   u |u'| + |step_size| off_m + 2u |step_size m'|
    p'   u |p'| + 2u |k p| + 8u |s| + |s / m'| off_m       with s the movement
    a'   2u |a|
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import zero_one as reference
from torch import Tensor

U = 2.0**-24
RATES: dict[str, Any] = {"step_size": 3e-3, "variance_step": 7, "beta2": 0.99}
QUIET = settings(deadline=None, max_examples=20)


def tensors(elems: int, seed: int, offset: int = 0) -> list[Tensor]:
    """p, g, m, v, u and the anchor; a ninth of v is 0."""
    rng = torch.Generator().manual_seed(seed)

    def one(scale: float) -> Tensor:
        return (torch.randn(elems + offset, generator=rng) * scale)[offset:]

    found = [one(0.1), one(1e-2), one(1e-2), one(1e-2).square(), one(1e-4), one(0.1)]
    found[3][::9] = 0
    return found


def apply(own: list[Tensor], **rates: Any) -> None:
    p, g, m, v, u, a = ([one] for one in own)
    zeropp.ops.zero_one_adam_step_(p, g, m, v, moved=u, anchors=a, **{**RATES, **rates})


@pytest.mark.parametrize("decay", [0.0, 0.1])
@QUIET
@given(elems=st.integers(0, 4097), offset=st.integers(0, 17), seed=st.integers(0, 99), t=st.integers(1, 1000))
def test_one_step_follows_the_paper(decay: float, elems: int, offset: int, seed: int, t: int) -> None:
    own = tensors(elems, seed, offset)
    p, g, m, v, _, a = (one.clone().double() for one in own)
    rates = {**RATES, "variance_step": t, "decay": decay}
    want = reference.step(*own, **rates)
    apply(own, **rates)
    off_m = 3 * U * (0.9 * m.abs() + 0.1 * g.abs()) + U * 0.1 * g.abs()
    per_m = 3e-3 / ((v / (1 - 0.99**t)).sqrt() + 1e-8) * (v != 0)
    allowed = {
        "p": U * (want.x.abs() + 2 * p.abs() + 8 * want.moved.abs()) + per_m * off_m,
        "m": off_m,
        "u": U * want.u.abs() + 3e-3 * off_m + 2 * U * (3e-3 * want.m).abs(),
        "a": 2 * U * a.abs(),
    }
    seen = {"p": (own[0], want.x), "m": (own[2], want.m), "u": (own[4], want.u), "a": (own[5], want.anchor)}
    for name, (got, wanted) in seen.items():
        assert bool(((got.double() - wanted).abs() <= 1.001 * allowed[name] + 1e-44).all()), name
    assert torch.equal(own[1].double(), g) and torch.equal(own[3].double(), v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@QUIET
@given(elems=st.integers(1, 4097), offset=st.integers(0, 33), seed=st.integers(0, 99))
def test_low_precision_in_and_out_is_the_fp32_step_between_casts(
    dtype: torch.dtype, elems: int, offset: int, seed: int
) -> None:
    own = tensors(elems, seed)
    low, out = torch.zeros(elems + offset, dtype=dtype), torch.full((elems + offset + 5,), 7.0, dtype=dtype)
    low[offset:] = own[1].to(dtype)
    twin = [one.clone() for one in own]
    own[1], twin[1] = low[offset:].float(), low[offset:]
    apply(own, decay=0.1)
    apply(twin, decay=0.1, param_outs=[out[offset : offset + elems]])
    assert all(torch.equal(a, b) for a, b in zip(own[2:], twin[2:], strict=True)) and torch.equal(own[0], twin[0])
    assert torch.equal(out[offset : offset + elems], own[0].to(dtype))
    assert bool((out[:offset] == 7).all()) and bool((out[offset + elems :] == 7).all()), "wrote beside its part"


def test_what_is_not_kept_changes_nothing_else() -> None:
    """Without u and anchors: the same p and m; without a gradient's part it is the step with a frozen variance."""
    own = tensors(1000, 5)
    twin = [one.clone() for one in own]
    apply(own, decay=0.1)
    zeropp.ops.zero_one_adam_step_([twin[0]], [twin[1]], [twin[2]], [twin[3]], decay=0.1, **RATES)
    assert torch.equal(own[0], twin[0]) and torch.equal(own[2], twin[2])
    zeropp.ops.zero_one_adam_step_([own[0]], [own[1]], [own[2]], [own[3]], beta1=0.5, grad_scale=0.0, **RATES)
    twin[2] *= 0.5
    zeropp.ops.frozen_adam_step_([twin[0]], [twin[2]], [twin[3]], **RATES)
    assert torch.equal(own[0], twin[0]) and torch.equal(own[2], twin[2])


def test_what_was_never_seen_only_decays() -> None:
    own = [
        torch.full((3,), 2.0),
        torch.tensor([1.0, math.nan, 1.0]),
        *(torch.zeros(3) for _ in range(3)),
        torch.ones(3),
    ]
    own[3][2] = 1.0
    apply(own, decay=0.5, eps=0.0, beta2=0.0, step_size=1.0)
    assert own[0][:2].tolist() == [1.0, 1.0] and own[0][2] == 1 - (1 - 0.9) and own[5].tolist() == [0.5] * 3
    assert own[2][1].isnan() and own[4][1].isnan()


def test_lists_threads_and_rates_of_each_tensor_do_not_show() -> None:
    """One call for many tensors, each with its own rates, and one call a tensor: the same bits."""
    lengths = [64, 1, 100_000, 0, *[7] * 1000, 92_938]
    lists = [list(part.split(lengths)) for part in tensors(sum(lengths), 8)]
    want = [[one.clone() for one in part] for part in lists]
    rates = [
        {"step_size": 1e-3 * (k % 5), "variance_step": 1 + k % 9, "eps": 1e-8 * (k % 3), "decay": 0.1 * (k % 2)}
        for k in range(len(lengths))
    ]
    for k, rate in enumerate(rates):
        want[1][k] *= 0.25
        apply([part[k] for part in want], **rate)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        p, g, m, v, u, a = lists
        together: dict[str, Any] = {name: [rate[name] for rate in rates] for name in rates[0]}
        zeropp.ops.zero_one_adam_step_(p, g, m, v, moved=u, anchors=a, grad_scale=0.25, **{**RATES, **together})
    finally:
        torch.set_num_threads(before)
    for k in (0, 2, 4, 5):
        assert all(torch.equal(x, y) for x, y in zip(want[k], lists[k], strict=True)), k
    zeropp.ops.zero_one_adam_step_([], [], [], [], **RATES)


@pytest.mark.parametrize(
    ("wrong", "kind", "sentence"),
    [
        ({"step_size": math.inf}, ValueError, "zero_one_adam_step_: step_size is inf, wanted a finite number"),
        ({"variance_step": 0}, ValueError, r"variance_steps\[0\] is 0, wanted the number of this update, counted from 1"),
        ({"beta1": 1.0}, ValueError, "beta1 is 1, wanted 0 <= beta1 < 1"),
        ({"beta2": -1.0}, ValueError, "beta2 is -1, wanted 0 <= beta2 < 1"),
        ({"grad_scale": math.nan}, ValueError, "grad_scale is nan, wanted a finite number"),
        ({"grad_scale": "a"}, TypeError, "grad_scale is 'a', wanted a number"),
        ({"eps": [-1.0]}, ValueError, "eps is -1, wanted eps >= 0 and finite"),
        ({"decay": math.nan}, ValueError, "decay is nan, wanted a finite number"),
        ({"grads": [torch.zeros(39)]}, ValueError, r"grads\[0\] has 39 elements, wanted 40 as in params\[0\]"),
        ({"grads": [torch.zeros(40).double()]}, ValueError, r"grads\[0\] is float64, wanted float32, bfloat16 or"),
        ({"moved": [torch.zeros(40).half()]}, ValueError, r"moved\[0\] is float16, wanted float32"),
        ({"anchors": [torch.zeros(3)]}, ValueError, r"anchors\[0\] has 3 elements, wanted 40 as in params\[0\]"),
        ({"anchors": torch.zeros(40)}, TypeError, "anchors is a Tensor, wanted a list of tensors"),
        ({"exp_avg_sqs": [torch.zeros(80)[::2]]}, ValueError, r"exp_avg_sqs\[0\] is not contiguous"),
        ({"grads": [torch.zeros(40, requires_grad=True)]}, ValueError, r"grads\[0\] requires grad"),
        ({"param_outs": [torch.zeros(40, device="meta")]}, ValueError, r"param_outs\[0\] is on meta, wanted cpu"),
    ],
)  # fmt: skip
def test_misuse_is_refused_and_writes_nothing(wrong: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    p, m, u, a = (torch.ones(40) for _ in range(4))
    arguments: dict[str, Any] = {
        "params": [p], "grads": [torch.ones(40)], "exp_avgs": [m], "exp_avg_sqs": [torch.ones(40)], "moved": [u],
        "anchors": [a], **RATES, **wrong,
    }  # fmt: skip
    with pytest.raises(kind, match=sentence):
        zeropp.ops.zero_one_adam_step_(**arguments)
    assert all(bool((one == 1).all()) for one in (p, m, u, a))


def test_shared_memory_is_refused() -> None:
    p, g, m, v, u, _ = tensors(40, 1)
    with pytest.raises(ValueError, match=r"(?=.*params\[0\])(?=.*anchors\[0\]).* share memory"):
        zeropp.ops.zero_one_adam_step_([p], [g], [m], [v], moved=[u], anchors=[p], **RATES)
    with pytest.raises(ValueError, match=r"(?=.*grads\[0\])(?=.*moved\[0\]).* share memory"):
        zeropp.ops.zero_one_adam_step_([p], [g], [m], [v], moved=[g], **RATES)


def test_torch_sees_the_operator() -> None:
    p, g, m, v, u, a = ([torch.rand(40)] for _ in range(6))
    op = torch.ops.zeropp.zero_one_adam_step_.default
    for more in ([[], [], []], [u, a, [torch.empty(40, dtype=torch.bfloat16)]]):
        torch.library.opcheck(op, (p, g, m, v, *more, [3], [1e-3], [0.1], 0.9, 0.999, [1e-8], 0.5, [], []))

    def step(own: list[list[Tensor]]) -> None:
        p, g, m, v, u, a = own
        zeropp.ops.zero_one_adam_step_(p, [x * 2 for x in g], m, v, moved=u, anchors=a, decay=0.1, **RATES)

    own = [p, g, m, v, u, a]
    twin = [[one[0].clone()] for one in own]
    step(own)
    torch.compile(step, fullgraph=True, backend="aot_eager")(twin)
    assert all(torch.equal(x[0], y[0]) for x, y in zip(own, twin, strict=True))
