# SPDX-License-Identifier: Apache-2.0
"""The step with a frozen variance against its formula, element by element, and against torch's operations.

The bound. u = 2^-24. Constants are rounded once (u each), then every operation once, so to first order

    k p  2u |k p|                      (k and product)
    s    8u |s|,  s = step_size m / d  (step_size, product; root, its factor, product, eps, addition in d; quotient)
    p'   u |p'| besides                (subtraction)
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import frozen as reference
from torch import Tensor

U = 2.0**-24
RATES: dict[str, Any] = {"step_size": 3e-3, "variance_step": 7, "beta2": 0.99}
QUIET = settings(deadline=None, max_examples=20)


def tensors(elems: int, seed: int, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """p, m and v; a ninth of v is 0."""
    rng = torch.Generator().manual_seed(seed)

    def one(scale: float) -> Tensor:
        return (torch.randn(elems + offset, generator=rng) * scale)[offset:]

    p, m, v = one(0.1), one(1e-2), one(1e-2).square()
    v[::9] = 0
    return p, m, v


@pytest.mark.parametrize("decay", [0.0, 0.1])
@QUIET
@given(elems=st.integers(0, 4097), offset=st.integers(0, 17), seed=st.integers(0, 99), t=st.integers(1, 1000))
def test_one_step_follows_the_paper(decay: float, elems: int, offset: int, seed: int, t: int) -> None:
    p, m, v = tensors(elems, seed, offset)
    rates = {**RATES, "variance_step": t, "decay": decay}
    want, moved = reference.step(p, m, v, **rates)
    allowed = U * (want.abs() + 2 * p.double().abs() + 8 * moved.abs())
    before = m.clone(), v.clone()
    zeropp.ops.frozen_adam_step_([p], [m], [v], **rates)
    assert bool(((p.double() - want).abs() <= 1.001 * allowed + 1e-44).all())
    assert torch.equal(m, before[0]) and torch.equal(v, before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@QUIET
@given(elems=st.integers(1, 4097), offset=st.integers(0, 33), seed=st.integers(0, 99))
def test_the_copy_out_is_a_cast(dtype: torch.dtype, elems: int, offset: int, seed: int) -> None:
    p, m, v = tensors(elems, seed)
    twin, out = p.clone(), torch.full((elems + offset + 5,), 7.0, dtype=dtype)
    zeropp.ops.frozen_adam_step_([p], [m], [v], **RATES)
    zeropp.ops.frozen_adam_step_([twin], [m], [v], param_outs=[out[offset : offset + elems]], **RATES)
    assert torch.equal(p, twin)
    assert torch.equal(out[offset : offset + elems], p.to(dtype))
    assert bool((out[:offset] == 7).all()) and bool((out[offset + elems :] == 7).all()), "wrote beside its part"


def test_what_was_never_seen_only_decays() -> None:
    """v = 0, whatever m and eps are; the least v above 0 moves, and a NaN is not hidden."""
    v = torch.tensor([0.0, -0.0, 0.0, 1e-45, math.nan, 1.0])
    m = torch.tensor([1.0, -1.0, math.nan, 1.0, 1.0, math.nan])
    p = torch.full((6,), 2.0)
    zeropp.ops.frozen_adam_step_([p], [m], [v], step_size=1.0, variance_step=1, beta2=0.0, eps=0.0, decay=0.5)
    assert p[:3].tolist() == [1.0, 1.0, 1.0] and p[3] < -1e20 and bool(p[4:].isnan().all())


def test_lists_threads_and_rates_of_each_tensor_do_not_show() -> None:
    """One call for many tensors, each with its own rates, and one call a tensor: the same bits."""
    lengths = [64, 1, 100_000, 0, *[7] * 1000, 92_938]
    lists = [list(part.split(lengths)) for part in tensors(sum(lengths), 8)]
    want = [p.clone() for p in lists[0]]
    rates = [
        {"step_size": 1e-3 * (k % 5), "variance_step": 1 + k % 9, "eps": 1e-8 * (k % 3), "decay": 0.1 * (k % 2)}
        for k in range(len(lengths))
    ]
    for k, rate in enumerate(rates):
        zeropp.ops.frozen_adam_step_([want[k]], [lists[1][k]], [lists[2][k]], **rate)  # type: ignore[arg-type]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        zeropp.ops.frozen_adam_step_(*lists, **{name: [rate[name] for rate in rates] for name in rates[0]})  # type: ignore
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(want, lists[0], strict=True))
    zeropp.ops.frozen_adam_step_([], [], [], step_size=1.0, variance_step=1)


def test_after_adam_it_moves_as_adam_does() -> None:
    """With the moments that Adam's step leaves behind, and its step: bit for bit Adam's new parameters."""
    p, m, v = tensors(5000, 3)
    g, start = torch.randn(5000, generator=torch.Generator().manual_seed(4)), p.clone()
    zeropp.ops.adam_step_([p], [g], [m], [v], step=3, lr=1e-2, weight_decay=0.1)
    step_size = 1e-2 / (1 - 0.9**3)
    zeropp.ops.frozen_adam_step_([start], [m], [v], step_size=step_size, variance_step=3, decay=1e-2 * 0.1)
    assert torch.equal(start, p)


@pytest.mark.parametrize(
    ("wrong", "kind", "sentence"),
    [
        ({"step_size": math.nan}, ValueError, "frozen_adam_step_: step_size is nan, wanted a finite number"),
        ({"step_size": "a"}, TypeError, "step_size is 'a', wanted a number"),
        ({"step_size": [1.0, 2.0]}, ValueError, "step_size has 2 numbers, wanted one, or 1 as params has tensors"),
        ({"variance_step": 0}, ValueError, r"variance_steps\[0\] is 0, wanted the number of this update, counted from 1"),
        ({"variance_step": 1.5}, TypeError, "step is a float, wanted a whole number"),
        ({"beta2": 1.0}, ValueError, "beta2 is 1, wanted 0 <= beta2 < 1"),
        ({"eps": -1.0}, ValueError, "eps is -1, wanted eps >= 0 and finite"),
        ({"decay": [math.inf]}, ValueError, "decay is inf, wanted a finite number"),
        ({"exp_avgs": [torch.zeros(39)]}, ValueError, r"exp_avgs\[0\] has 39 elements, wanted 40 as in params\[0\]"),
        ({"exp_avg_sqs": []}, ValueError, "exp_avg_sqs has 0 tensors, wanted 1 as in params"),
        ({"exp_avgs": torch.zeros(40)}, TypeError, "exp_avgs is a Tensor, wanted a list of tensors"),
        ({"exp_avgs": [torch.zeros(40).bfloat16()]}, ValueError, r"exp_avgs\[0\] is bfloat16, wanted float32"),
        ({"exp_avg_sqs": [torch.zeros(40).double()]}, ValueError, r"exp_avg_sqs\[0\] is float64, wanted float32"),
        ({"exp_avgs": [torch.zeros(80)[::2]]}, ValueError, r"exp_avgs\[0\] is not contiguous"),
        ({"exp_avgs": [torch.zeros(40, requires_grad=True)]}, ValueError, r"exp_avgs\[0\] requires grad"),
        ({"param_outs": [torch.zeros(40, dtype=torch.int32)]}, ValueError, r"param_outs\[0\] is int32, wanted float32"),
        ({"param_outs": [torch.zeros(40, device="meta")]}, ValueError, r"param_outs\[0\] is on meta, wanted cpu"),
    ],
)  # fmt: skip
def test_misuse_is_refused_and_writes_nothing(wrong: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    p = torch.ones(40)
    arguments: dict[str, Any] = {
        "params": [p], "exp_avgs": [torch.ones(40)], "exp_avg_sqs": [torch.ones(40)], **RATES, **wrong,
    }  # fmt: skip
    with pytest.raises(kind, match=sentence):
        zeropp.ops.frozen_adam_step_(**arguments)
    assert bool((p == 1).all())


def test_shared_memory_is_refused_but_of_what_is_only_read() -> None:
    p, m = torch.ones(40), torch.ones(40)
    with pytest.raises(ValueError, match=r"params\[0\] and exp_avgs\[0\] share memory"):
        zeropp.ops.frozen_adam_step_([p], [p], [m], **RATES)
    zeropp.ops.frozen_adam_step_([p], [m], [m], **RATES)


def test_torch_sees_the_operator() -> None:
    p, m, v = ([torch.rand(40)] for _ in range(3))
    op = torch.ops.zeropp.frozen_adam_step_.default
    for outs in ([], [torch.empty(40, dtype=torch.bfloat16)]):
        torch.library.opcheck(op, (p, m, v, outs, [3], [1e-3], [0.1], 0.999, [1e-8], []))

    def step(p: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
        zeropp.ops.frozen_adam_step_(p, [x * 2 for x in m], v, **RATES)

    twin = [p[0].clone()]
    step(p, m, v)
    torch.compile(step, fullgraph=True, backend="aot_eager")(twin, m, v)
    assert torch.equal(p[0], twin[0])
