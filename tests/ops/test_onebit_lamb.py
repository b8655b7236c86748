# SPDX-License-Identifier: Apache-2.0
"""1-bit LAMB's fresh variance and norms against the paper's formula.

The bounds. u = 2^-24. g' is a difference of m and beta1 m before, which may cancel: off by 5u (|m| + |beta1 m before|)
/ (1 - beta1); v' by (1 - beta2) (2 |g'| + that) times that, and 6u v'. The update is off by 9u |a| + 3u |decay x|. Squares
are added 256 to a lane, so a sum by (256 + 24) u of itself, and by 2 |u| times what u is off.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import onebit_lamb_fresh as reference
from torch import Tensor

U = 2.0**-24
RATES: dict[str, Any] = {"step": 9, "freeze_step": 5, "coefficient": 3.0, "weight_decay": 0.1}
QUIET = settings(deadline=None, max_examples=20)


def tensors(elems: int, seed: int, offset: int = 0) -> list[Tensor]:
    """p, m, m before, v and v'; a ninth of v is 0."""
    rng = torch.Generator().manual_seed(seed)

    def one(scale: float) -> Tensor:
        return (torch.randn(elems + offset, generator=rng) * scale)[offset:]

    found = [one(0.1), one(1e-2), one(1e-2), one(1e-2).square(), one(1e-2).square()]
    found[3][::9] = 0
    return found


@pytest.mark.parametrize("decay", [0.0, 0.1])
@QUIET
@given(
    elems=st.integers(1, 9000), offset=st.integers(0, 17), seed=st.integers(0, 99), t=st.integers(1, 50),
    coefficient=st.floats(0.01, 100),
)  # fmt: skip
def test_one_pass_follows_the_paper(
    decay: float, elems: int, offset: int, seed: int, t: int, coefficient: float
) -> None:
    own = tensors(elems, seed, offset)
    p, m, before, v, fresh = own
    want = reference.fresh(*own, t=t, freeze_step=5, coefficient=coefficient, weight_decay=decay)
    off_g = 5 * U * (m.double().abs() + 0.9 * before.double().abs()) / coefficient / (1 - 0.9)
    off_v = 0.001 * (2 * want.gradient.abs() + off_g) * off_g + 6 * U * want.variance
    kept = [one.clone() for one in own[:4]]
    sums, largest = zeropp.ops.onebit_lamb_fresh_(
        [p], [m], [before], [v], [fresh], step=t, freeze_step=5, coefficient=coefficient, weight_decay=decay
    )
    assert bool(((fresh.double() - want.variance).abs() <= 1.001 * off_v + 1e-44).all())
    assert all(torch.equal(a, b) for a, b in zip(own, kept, strict=False)), "wrote to what it reads"
    off = 9 * U * want.alone.abs(), 9 * U * want.alone.abs() + 3 * U * (decay * p.double()).abs()
    for seen, values, wrong in zip(sums[0].tolist(), (want.alone, want.update), off, strict=True):
        square = values.square().sum().item()
        assert abs(seen - square) <= 1.01 * (280 * U * square + (2 * values.abs() * wrong).sum().item())
    root = (want.variance / (1 - 0.999**t)).sqrt()
    off_real = root * (off_v / (2 * want.variance)).nan_to_num(0.0) + 6 * U * want.real
    off_ratio = want.ratio * (8 * U + off_real / want.real) * 1.01
    assert (want.ratio - off_ratio).max().item() <= largest.item() <= (want.ratio + off_ratio).max().item()


def test_lists_threads_and_rates_of_each_tensor_do_not_show() -> None:
    """One call for many tensors and one call a tensor: the same bits; a tensor without elements has zeros."""
    lengths = [64, 1, 100_001, 0, *[7] * 300, 4096, 4097]
    lists = [list(part.split(lengths)) for part in tensors(sum(lengths), 8)]
    want = [[one.clone() for one in part] for part in lists]
    rates = [
        {"step": 6 + k % 9, "coefficient": 1.0 + k % 3, "eps": 1e-8 * (k % 2), "weight_decay": 0.1 * (k % 2)}
        for k in range(len(lengths))
    ]
    single: list[tuple[Tensor, Tensor]] = []
    for k, rate in enumerate(rates):
        single.append(zeropp.ops.onebit_lamb_fresh_(*([part[k]] for part in want), freeze_step=5, **rate))  # type: ignore
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = {name: [rate[name] for rate in rates] for name in rates[0]}
        sums, largest = zeropp.ops.onebit_lamb_fresh_(*lists, freeze_step=5, **together)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(sums, torch.cat([one for one, _ in single]))
    assert torch.equal(largest, torch.cat([one for _, one in single]))
    assert all(torch.equal(a, b) for a, b in zip(want[4], lists[4], strict=True))
    assert not sums[3].any() and not largest[3]
    sums, largest = zeropp.ops.onebit_lamb_fresh_([], [], [], [], [], step=1, freeze_step=1)
    assert sums.shape == (0, 2) and largest.shape == (0,)


@pytest.mark.parametrize("place", [0, 15, 40, 4099])
def test_a_nan_is_the_largest_and_what_was_never_seen_has_no_part(place: int) -> None:
    own = tensors(4100, 1)
    own[3][:] = 0
    sums, largest = zeropp.ops.onebit_lamb_fresh_(*([one] for one in own), **{**RATES, "weight_decay": 0.0})
    assert not sums.any() and not largest.any()
    own[3][:] = 1.0
    own[1][place] = math.nan
    sums, largest = zeropp.ops.onebit_lamb_fresh_(*([one] for one in own), **RATES)
    assert bool(sums.isnan().all()) and bool(largest.isnan().all()) and int(own[4].isnan().sum()) == 1


@pytest.mark.parametrize(
    ("wrong", "kind", "sentence"),
    [
        ({"coefficient": 0.0}, ValueError, "onebit_lamb_fresh_: coefficient is 0, wanted coefficient > 0"),
        ({"coefficient": -1.0}, ValueError, "coefficient is -1, wanted coefficient >= 0 and finite"),
        ({"coefficient": "a"}, TypeError, "coefficient is 'a', wanted a number"),
        ({"step": 0}, ValueError, r"steps\[0\] is 0, wanted the number of this update, counted from 1"),
        ({"freeze_step": 0}, ValueError, "freeze_step is 0, wanted freeze_step >= 1"),
        ({"freeze_step": 1.5}, TypeError, "freeze_step is 1.5, wanted a whole number"),
        ({"beta1": 1.0}, ValueError, "beta1 is 1, wanted 0 <= beta1 < 1"),
        ({"beta2": -0.1}, ValueError, "beta2 is -0.1, wanted 0 <= beta2 < 1"),
        ({"eps": -1.0}, ValueError, "eps is -1, wanted eps >= 0 and finite"),
        ({"weight_decay": math.nan}, ValueError, "weight_decay is nan, wanted a finite number"),
        ({"befores": [torch.zeros(39)]}, ValueError, r"befores\[0\] has 39 elements, wanted 40 as in params\[0\]"),
        ({"fresh_sqs": []}, ValueError, "fresh_sqs has 0 tensors, wanted 1 as in params"),
        ({"exp_avgs": torch.zeros(40)}, TypeError, "exp_avgs is a Tensor, wanted a list of tensors"),
        ({"fresh_sqs": [torch.zeros(40).bfloat16()]}, ValueError, r"fresh_sqs\[0\] is bfloat16, wanted float32"),
        ({"params": [torch.zeros(40).half()]}, ValueError, r"params\[0\] is float16, wanted float32"),
        ({"exp_avg_sqs": [torch.zeros(80)[::2]]}, ValueError, r"exp_avg_sqs\[0\] is not contiguous"),
        ({"params": [torch.zeros(40, requires_grad=True)]}, ValueError, r"params\[0\] requires grad"),
    ],
)
def test_misuse_is_refused_and_writes_nothing(wrong: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    names, fresh = ("params", "exp_avgs", "befores", "exp_avg_sqs"), torch.ones(40)
    arguments: dict[str, Any] = {name: [torch.ones(40)] for name in names}
    arguments |= {"fresh_sqs": [fresh], **RATES, **wrong}
    with pytest.raises(kind, match=sentence):
        zeropp.ops.onebit_lamb_fresh_(**arguments)
    assert bool((fresh == 1).all())


def test_shared_memory_is_refused() -> None:
    one, other = torch.ones(40), torch.ones(40)
    with pytest.raises(ValueError, match=r"(?=.*exp_avg_sqs\[0\])(?=.*fresh_sqs\[0\]).* share memory"):
        zeropp.ops.onebit_lamb_fresh_([one], [one], [one], [other], [other], **RATES)


def test_torch_sees_the_operator() -> None:
    own = [[torch.rand(40) + 0.1] for _ in range(5)]
    op = torch.ops.zeropp.onebit_lamb_fresh_.default
    torch.library.opcheck(op, (*own, [9], 5, [3.0], 0.9, 0.999, [1e-8], [0.1]))

    def step(own: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
        sums, largest = zeropp.ops.onebit_lamb_fresh_(*own, **RATES)
        return sums * 2, largest + 1

    twin = [[one[0].clone()] for one in own]
    want, seen = step(own), torch.compile(step, fullgraph=True, backend="aot_eager")(twin)
    assert all(torch.equal(a, b) for a, b in zip(want, seen, strict=True)) and torch.equal(own[4][0], twin[4][0])
