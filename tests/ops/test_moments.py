# SPDX-License-Identifier: Apache-2.0
"""Moments in bf16 and 8 bits: the same bits as the definition given the same random bits; rounding whose mean is the
value; optimizers on them take the fp32 step between decoding and encoding, and converge where those in fp32 do; bad input
is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import moments as reference
from torch import Tensor
from zeropp.ops import (
    adagrad_step_,
    adam_step_,
    lamb_step_,
    lion_step_,
    moments_decode_,
    moments_encode_,
    moments_scales,
    sgd_step_,
)

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
KINDS = (torch.bfloat16, torch.uint8)


def values_of(elems: int, moment: str, seed: int = 0) -> Tensor:
    """Six decades, a few zeros; of second moments no signs."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(elems, generator=make) * 10 ** (-6 * torch.rand(elems, generator=make))
    x[torch.rand(elems, generator=make) < 0.02] = 0.0
    return x if moment == "exp_avg" else x * x


def room(elems: int, kind: torch.dtype, first: int = 0) -> tuple[Tensor, Tensor]:
    return torch.zeros(elems, dtype=kind), torch.zeros(moments_scales(elems, first) if kind == torch.uint8 else 0)


def encoded(x: Tensor, kind: torch.dtype, **how: Any) -> tuple[Tensor, Tensor]:
    codes, scales = room(x.numel(), kind, how.get("first", 0))
    moments_encode_(x, codes, scales, **how)
    return codes, scales


def decoded(codes: Tensor, scales: Tensor, **how: Any) -> Tensor:
    x = torch.empty(codes.numel())
    moments_decode_(codes, scales, x, **how)
    return x


def blocks(elems: int, first: int) -> list[slice]:
    """The elements of each block that a piece has a part of."""
    borders = [0, *range((-first) % 256 or 256, elems, 256), elems] if elems else []
    return [slice(a, b) for a, b in itertools.pairwise(borders) if a < b]


@settings(deadline=None, max_examples=60)
@given(elems=st.integers(0, 1500), first=st.integers(0, 2000), moment=st.sampled_from(MOMENTS), step=st.integers(0, 9))
def test_bits_of_the_definition(elems: int, first: int, moment: str, step: int) -> None:
    x = values_of(elems, moment, elems)
    bits = reference.random_bits(3, 11, step, MOMENTS.index(moment), first, elems)
    how = {"moment": moment, "first": first}
    codes, _ = encoded(x, torch.bfloat16, **how, seed=3, stream=11, step=step)
    want = torch.from_numpy(reference.bf16(x.numpy(), bits)) if step else x.bfloat16().float()
    assert torch.equal(codes.float(), want)
    codes, scales = encoded(x, torch.uint8, **how, seed=3, stream=11, step=step)
    k = 7 if moment == "exp_avg" else 8
    random = bits if step else np.full(elems, 32768)
    found = decoded(codes, scales, **how)
    for index, block in enumerate(blocks(elems, first)):
        want_codes, want_scale = reference.encode(x[block].numpy(), k, random[block])
        assert torch.equal(codes[block], torch.from_numpy(want_codes))
        assert scales[index].item() == want_scale
        assert np.array_equal(found[block].numpy(), reference.decode(want_codes, want_scale, k))


def test_levels_are_the_dynamic_tree() -> None:
    """Seven decades (eight without a sign), each with twice the steps of the one below; the greatest is the scale."""
    for moment, k in (("exp_avg", 7), ("exp_avg_sq", 8)):
        codes = torch.arange(2**k).to(torch.uint8)
        for scale in (1.0, 2.0**-20):
            x = decoded(codes, torch.tensor([scale]), moment=moment)
            assert torch.equal(x, torch.from_numpy(reference.levels(k)).float() * scale)
    negative = decoded(torch.arange(128, 256).to(torch.uint8), torch.ones(1))
    assert torch.equal(-negative, decoded(torch.arange(128).to(torch.uint8), torch.ones(1)))


def neighbours(x: Tensor, kind: torch.dtype, moment: str) -> tuple[Tensor, Tensor]:
    """The magnitudes that can be held below and above that of each value."""
    size = x.abs().double()
    if kind == torch.bfloat16:
        gap = 2.0 ** (size.clamp(min=1e-30).log2().floor() - 7)
        return (size / gap).floor() * gap, (size / gap).floor() * gap + gap
    levels = torch.from_numpy(reference.levels(7 if moment == "exp_avg" else 8))
    scale = x.view(-1, 256).abs().amax(1, keepdim=True).double()
    place = torch.searchsorted(levels, size.view(-1, 256) / scale).clamp(1, len(levels) - 1)
    return (levels[place - 1] * scale).view(-1), (levels[place] * scale).view(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", MOMENTS[:2])
def test_rounding_has_no_bias(kind: torch.dtype, moment: str) -> None:
    """Up with the probability p of the share of the way up: among 1,500 roundings p * 1,500 times, within six standard
    deviations, and 16 random bits (8 bits: four fp32 roundings of a place among 256, too); so the mean is the value."""
    elems, rounds = 2048, 1500
    x = values_of(elems, moment, 5)
    if moment == "exp_avg_sq" and kind == torch.uint8:  # what is below level(1) stays above 0, by design
        x = x.clamp(min=float(x.max()) * 8.0**-7)
    low, high = neighbours(x, kind, moment)
    ups = torch.zeros(elems, dtype=torch.float64)
    for step in range(1, rounds + 1):
        found = decoded(*encoded(x, kind, moment=moment, step=step), moment=moment)
        share = (found.abs().double() - low) / (high - low)
        assert bool(((share.round() - share).abs() < 1e-4).all()) and bool((share.round().abs() <= 1).all())
        assert bool((found.signbit() == x.signbit()).all())
        ups += share.round()
    p = (x.abs().double() - low) / (high - low)
    off = ups - p * rounds
    deviation = (rounds * p * (1 - p)).sqrt()
    assert bool((off.abs() <= 6 * deviation + 4 + rounds * 2.0**-14).all())
    assert abs(float(off.sum())) < 5 * float((deviation**2).sum().sqrt()) + elems * rounds * 2.0**-16
    assert float(deviation.sum()) > elems  # most values lie between two levels


def test_what_is_not_zero_stays_above_zero() -> None:
    x = torch.cat([torch.tensor([1.0]), torch.full((255,), 1e-20)])
    for step in range(20):
        codes, _ = encoded(x, torch.uint8, moment="exp_avg_sq", step=step)
        assert int(codes[1:].min()) == 1
    assert int(encoded(torch.zeros(256), torch.uint8, moment="exp_avg_sq", step=1)[0].max()) == 0


def test_not_finite_is_not_hidden() -> None:
    for bad in (float("nan"), float("inf"), 1e38):
        x = torch.ones(600)
        x[300] = bad
        codes, scales = encoded(x, torch.uint8, step=1)
        back = decoded(codes, scales)
        assert back[256:512].isnan().all() and bool((back[:256] == 1).all()) and bool((back[512:] == 1).all())
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0] * 8)
    back = decoded(*encoded(x, torch.bfloat16, step=3))
    assert torch.equal(back, x) or torch.equal(back.nan_to_num(nan=7.0), x.nan_to_num(nan=7.0))


# --- Adam
# ---------------------------------------------------------------------------------------------------------------------


def adam_state(params: list[Tensor], kind: torch.dtype, amsgrad: bool = False) -> dict[str, Any]:
    zeros = [[torch.zeros(p.numel(), dtype=kind) for p in params] for _ in range(3 if amsgrad else 2)]
    scales = [torch.zeros(moments_scales(p.numel())) for _ in zeros for p in params] if kind == torch.uint8 else []
    return {"exp_avgs": zeros[0], "exp_avg_sqs": zeros[1], "scales": scales,
            **({"max_exp_avg_sqs": zeros[2]} if amsgrad else {})}  # fmt: skip


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_adam_is_the_fp32_step_between_decode_and_encode(kind: torch.dtype, amsgrad: bool) -> None:
    sizes = (1, 300, 256, 5000)
    params = [values_of(n, "exp_avg", n) for n in sizes]
    plain = [p.clone() for p in params]
    state = adam_state(params, kind, amsgrad)
    lists = [state[name] for name in ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs") if name in state]
    rates = {"lr": 1e-2, "weight_decay": 0.1, "grad_scale": 0.5}
    for step in (1, 2, 3):
        grads = [values_of(n, "exp_avg", n + step) for n in sizes]
        scales = [state["scales"][i * 4 : i * 4 + 4] if kind == torch.uint8 else [torch.zeros(0)] * 4 for i in range(3)]
        moments = [[decoded(c, s, moment=name) for c, s in zip(codes, sc, strict=True)]
                   for name, codes, sc in zip(MOMENTS, lists, scales, strict=False)]  # fmt: skip
        adam_step_(params, grads, **state, step=step, seed=9, **rates)
        more = {"max_exp_avg_sqs": moments[2]} if amsgrad else {}
        adam_step_(plain, grads, *moments[:2], **more, step=step, **rates)
        assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))
        for name, codes, sc, mine in zip(MOMENTS, lists, scales, moments, strict=False):
            for index in range(4):
                want, want_scale = encoded(mine[index], kind, moment=name, seed=9, stream=index, step=step)
                assert torch.equal(codes[index], want) and torch.equal(sc[index], want_scale)


def test_threads_do_not_show() -> None:
    before, results = torch.get_num_threads(), []
    values = [values_of(n, "exp_avg", n) for n in (70000, 5, 120001)]  # once: torch's own pow shows the threads
    for threads in (1, 2):
        torch.set_num_threads(threads)
        params = [p.clone() for p in values]
        state = adam_state(params, torch.uint8)
        for step in (1, 2):
            adam_step_(params, [p.clone() for p in params], **state, step=step, lr=1e-2)
        results.append([*params, *state["exp_avgs"], *state["exp_avg_sqs"], *state["scales"]])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def train(kind: torch.dtype, steps: int = 400) -> float:
    """Logistic regression on noisy labels, minibatches: the loss on all data at the end."""
    make = torch.Generator().manual_seed(1)
    x = torch.randn(2000, 40, generator=make) * torch.logspace(-2, 1, 40)
    true = torch.randn(40, generator=make) / torch.logspace(-2, 1, 40)
    y = (torch.rand(2000, generator=make) < torch.sigmoid(x @ true)).float()
    w = torch.zeros(40)
    state = adam_state([w], kind)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    for step in range(1, steps + 1):
        rows = torch.randint(0, 2000, (64,), generator=make)
        leaf = w.clone().requires_grad_()
        loss(x[rows] @ leaf, y[rows]).backward()
        assert leaf.grad is not None
        adam_step_([w], [leaf.grad], **state, step=step, lr=0.05, weight_decay=0.0)
    return float(loss(x @ w, y))


def test_converges_as_fp32_does() -> None:
    """0.693 at the start; fp32 ends near 0.46, whatever the batches within 0.01."""
    fp32 = train(torch.float32)
    assert fp32 < 0.55
    for kind in KINDS:
        assert abs(train(kind) - fp32) < 0.01


def test_a_second_moment_forgets() -> None:
    """beta2 = 0.999 and gradients that end: to nearest, bf16 would never fall (each step is less than half of its
    spacing); the mean of many elements falls as fp32's does. After 1,000 steps: 0.368."""
    elems = 4096
    for kind in KINDS:
        p, g = [torch.zeros(elems)], [torch.ones(elems)]
        state = adam_state(p, kind)
        adam_step_(p, g, **state, step=1, lr=0.0)
        sc = state["scales"][1:] if kind == torch.uint8 else [torch.zeros(0)]
        begin = decoded(state["exp_avg_sqs"][0], sc[0], moment="exp_avg_sq").mean()
        for step in range(2, 1002):
            adam_step_(p, [torch.zeros(elems)], **state, step=step, lr=0.0)
        share = float(decoded(state["exp_avg_sqs"][0], sc[0], moment="exp_avg_sq").mean() / begin)
        assert abs(share - 0.999**1000) < 0.02


def test_operators_as_torch_sees_them() -> None:
    ops = torch.ops.zeropp
    x, (codes, scales) = torch.randn(300), room(300, torch.uint8)
    torch.library.opcheck(ops.moments_encode_.default, (x, codes, scales, 0, 0, 1, 2, 3))
    torch.library.opcheck(ops.moments_decode_.default, (codes, scales, torch.empty(300), 0, 0))
    for kind in KINDS:
        params, grads = [torch.randn(300), torch.randn(5)], [torch.randn(300), torch.randn(5)]
        s = adam_state(params, kind)
        numbers = ([1e-3], 0.9, 0.999, 1e-8, [0.0], True, False, 1.0, [], [])
        arguments = (params, grads, s["exp_avgs"], s["exp_avg_sqs"], [], s["scales"], [], [1, 2], 4, *numbers)
        torch.library.opcheck(ops.adam_step_low_.default, arguments)

    def step(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        adam_step_([p], [p * 2], [m], [v], step=1, lr=0.1)
        return p + 1

    a, b = [[torch.ones(20), *(torch.zeros(20, dtype=torch.bfloat16) for _ in range(2))] for _ in range(2)]
    assert torch.equal(step(*a), torch.compile(step, fullgraph=True, backend="aot_eager")(*b))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"exp_avg_sqs": [torch.zeros(300)]}, r"exp_avg_sqs\[0\] is float32, wanted uint8"),
        ({"exp_avgs": [torch.zeros(300, dtype=torch.int8)]}, r"exp_avgs\[0\] is int8, wanted"),
        ({"scales": []}, "scales has 0 tensors, wanted 2: one for each moment of each parameter"),
        ({"scales": [torch.zeros(2), torch.zeros(3)]}, r"scales\[1\] has 3 elements, wanted 2"),
        ({"scales": [torch.zeros(2).double(), torch.zeros(2)]}, r"scales\[0\] is float64, wanted float32"),
        ({"step": 0}, r"steps\[0\] is 0, wanted"),
        ({"grads": [torch.zeros(299)]}, r"grads\[0\] has 299 elements, wanted 300"),
    ],
)
def test_refusals(change: dict[str, Any], sentence: str) -> None:
    params = [torch.ones(300)]
    call: dict[str, Any] = {"grads": [torch.ones(300)], **adam_state(params, torch.uint8), "step": 1, "lr": 0.1}
    with pytest.raises(ValueError, match=f"^zeropp.ops.adam_step_: {sentence}"):
        adam_step_(params, **{**call, **change})
    assert bool((params[0] == 1).all())


def test_refusals_of_the_codec() -> None:
    x, (codes, scales) = torch.ones(300), room(300, torch.uint8)
    with pytest.raises(ValueError, match="scales has 2 elements, wanted 3: elements 250 to 550 in blocks of 256"):
        moments_encode_(x, codes, scales, first=250)
    with pytest.raises(ValueError, match="scales has 2 elements, wanted 0: bf16 has none"):
        moments_encode_(x, codes.bfloat16(), scales)
    with pytest.raises(ValueError, match="moment is 'm', wanted one of 'exp_avg'"):
        moments_encode_(x, codes, scales, moment="m")
    with pytest.raises(ValueError, match="dst has 3 elements, wanted 300"):
        moments_decode_(codes, scales, torch.empty(3))
    with pytest.raises(ValueError, match=r"shares? memory"):
        moments_encode_(x, x.view(torch.uint8)[:300], scales)
    with pytest.raises(TypeError, match=r"seed is 1\.5, wanted a whole number"):
        moments_encode_(x, codes, scales, seed=1.5)  # type: ignore[arg-type]
    assert zeropp.ops.moments_scales(0, 255) == 0 and zeropp.ops.moments_scales(2, 255) == 2


# --- Lion, Adagrad, SGD, LAMB
# ---------------------------------------------------------------------------------------------------------------------

STEPS: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "lion": (lion_step_, ("exp_avg",), {"lr": 1e-2, "weight_decay": 0.1}),
    "adagrad": (adagrad_step_, ("sum",), {"lr": 1e-2, "lr_decay": 0.01}),
    "sgd": (sgd_step_, ("momentum_buffer",), {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2}),
    "lamb": (lamb_step_, ("exp_avg", "exp_avg_sq"), {"lr": 1e-2, "weight_decay": 0.1}),
}


def low_lists(names: tuple[str, ...], sizes: tuple[int, ...], kind: torch.dtype, firsts: tuple[int, ...]) -> Any:
    """Codes of zeros, a list a moment, and scales in one list, moment after moment."""
    codes = [[torch.zeros(n, dtype=kind) for n in sizes] for _ in names]
    scales = [torch.zeros(moments_scales(n, f)) for _ in names for n, f in zip(sizes, firsts, strict=True)]
    return codes, scales if kind == torch.uint8 else []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", STEPS)
def test_a_step_is_the_fp32_step_between_decode_and_encode(optimizer: str, kind: torch.dtype) -> None:
    """Also of pieces of tensors: blocks and random bits count from the tensor's first element. (The fp32 steps are held to
    their references in test_lion.py, test_adagrad.py, test_sgd.py and test_lamb.py.)"""
    call, names, rates = STEPS[optimizer]
    sizes, whole = (1, 300, 256, 5000), optimizer == "lamb"
    firsts = (0, 0, 0, 0) if whole else (0, 300, 255, 70001)
    streams = (0, 1, 2, 3) if whole else (4, 5, 6, 9)
    params = [values_of(n, "exp_avg", n) for n in sizes]
    plain, outs = [p.clone() for p in params], [torch.zeros(n, dtype=torch.bfloat16) for n in sizes]
    codes, scales = low_lists(names, sizes, kind, firsts)
    more = {} if whole else {"firsts": firsts, "streams": streams}
    for step in (1, 2, 3):
        grads = [values_of(n, "exp_avg", n + step) for n in sizes]
        none = [torch.zeros(0)] * 4
        of = [scales[4 * k : 4 * k + 4] if scales else none for k in range(len(names))]
        places = [{"moment": name, "first": f} for name in names for f in firsts]
        states = [[decoded(c, s, **places[4 * k + i]) for i, (c, s) in enumerate(zip(codes[k], of[k], strict=True))]
                  for k in range(len(names))]  # fmt: skip
        call(params, grads, *codes, **rates, step=step, grad_scale=0.5, scales=scales, seed=9, param_outs=outs, **more)
        call(plain, grads, *states, **rates, grad_scale=0.5, **({} if optimizer == "lion" else {"step": step}))
        for index, (mine, want) in enumerate(zip(params, plain, strict=True)):
            assert torch.equal(mine, want) and torch.equal(outs[index], mine.bfloat16())
            for k in range(len(names)):
                want_codes, want_scales = encoded(
                    states[k][index], kind, **places[4 * k + index], seed=9, stream=streams[index], step=step
                )
                assert torch.equal(codes[k][index], want_codes) and torch.equal(of[k][index], want_scales)


@pytest.mark.parametrize("optimizer", STEPS)
def test_threads_do_not_show_in_any_step(optimizer: str) -> None:
    call, names, rates = STEPS[optimizer]
    sizes, before, results = (70000, 5, 120001), torch.get_num_threads(), []
    values = [values_of(n, "exp_avg", n) for n in sizes]  # once: torch's own pow shows the threads
    for threads in (1, 2):
        torch.set_num_threads(threads)
        params = [p.clone() for p in values]
        codes, scales = low_lists(names, sizes, torch.uint8, (0, 0, 0))
        for step in (1, 2):
            call(params, [p.clone() for p in params], *codes, **rates, step=step, scales=scales)
        results.append([*params, *(one for each in codes for one in each), *scales])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("optimizer", STEPS)
def test_every_step_converges_as_in_fp32(optimizer: str) -> None:
    """A least-squares problem of condition 100, noisy gradients, 300 steps: the loss of fp32 within a tenth of the first."""
    call, names, rates = STEPS[optimizer]
    rates = {**rates, "lr": {"lion": 2e-3, "adagrad": 0.3, "sgd": 2e-2, "lamb": 2e-2}[optimizer], "weight_decay": 0.0}
    losses: dict[torch.dtype, float] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # so small that threads would only wait for each other
    for kind in (torch.float32, *KINDS):
        make = torch.Generator().manual_seed(2)
        x, true = torch.randn(400, 64, generator=make) * torch.logspace(-1, 0, 64), torch.randn(64, generator=make)
        w, y = torch.full((64,), 0.1), x @ true
        codes, scales = low_lists(names, (64,), kind, (0,))
        first = float((y - x @ w).square().mean())
        for step in range(1, 301):
            rows = torch.randint(0, 400, (100,), generator=make)
            grad = 2 * x[rows].T @ (x[rows] @ w - y[rows]) / 100
            low = {"scales": scales} if kind != torch.float32 else {}
            count = {} if optimizer == "lion" and kind == torch.float32 else {"step": step}
            call([w], [grad], *codes, **rates, **low, **count)
        losses[kind] = float((y - x @ w).square().mean()) / first
    torch.set_num_threads(before)
    assert losses[torch.float32] < 0.5, losses
    assert all(abs(losses[kind] - losses[torch.float32]) < 0.1 for kind in KINDS), losses


@pytest.mark.parametrize("kind", KINDS)
def test_low_operators_as_torch_sees_them(kind: torch.dtype) -> None:
    ops = torch.ops.zeropp
    params, grads, places = [torch.randn(300)], [torch.randn(300)], [2, 0, 10]
    numbers = {"lion": ([1e-3], 0.9, 0.99, [0.0], False, 1.0), "adagrad": ([1e-3], 0.0, 1e-10, [0.0], False, 1.0),
               "sgd": ([1e-3], 0.9, 0.0, [0.0], False, False, 1.0)}  # fmt: skip
    for name, rates in numbers.items():
        codes, scales = low_lists(("one",), (300,), kind, (10,))
        arguments = (params, grads, codes[0], scales, [], places, 4, *rates, [], [])
        torch.library.opcheck(getattr(ops, f"{name}_step_low_").default, arguments)
    codes, scales = low_lists(("one", "two"), (300,), kind, (0,))
    rates = ([1e-3], 0.9, 0.999, 1e-6, [0.0], 0.0, 10.0, False, 1.0, [], [])
    torch.library.opcheck(ops.lamb_step_low_.default, (params, grads, *codes, scales, [], [1], 4, *rates))

    def step(p: Tensor, m: Tensor) -> Tensor:
        lion_step_([p], [p * 2], [m], step=1, lr=0.1)
        return p + 1

    a, b = [[torch.ones(20), torch.zeros(20, dtype=torch.bfloat16)] for _ in range(2)]
    assert torch.equal(step(*a), torch.compile(step, fullgraph=True, backend="aot_eager")(*b))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"step": None}, "step is None, wanted the number of this update"),
        ({"step": 0}, r"steps\[0\] is 0, wanted the number of this update, counted from 1"),
        ({"step": [1, 2]}, "steps has 2 numbers, wanted 1 as params has tensors"),
        ({"firsts": [-1]}, r"firsts\[0\] is -1, wanted at least 0"),
        ({"streams": [1, 2]}, "streams has 2 numbers, wanted 1"),
        ({"firsts": [250]}, r"scales\[0\] has 2 elements, wanted 3: 300 elements from 250 on in blocks of 256"),
        ({"scales": []}, "scales has 0 tensors, wanted 1: one for each moment of each parameter"),
        ({"exp_avgs": [torch.zeros(300, dtype=torch.int8)]}, r"exp_avgs\[0\] is int8, wanted bfloat16 or uint8"),
        ({"exp_avgs": [torch.zeros(300, dtype=torch.bfloat16)]}, "scales has 1 tensors, wanted 0: bf16 has none"),
        ({"exp_avgs": [torch.zeros(299, dtype=torch.uint8)]}, r"exp_avgs\[0\] has 299 elements, wanted 300"),
    ],
)
def test_refusals_of_a_low_step(change: dict[str, Any], sentence: str) -> None:
    params, (codes, scales) = [torch.ones(300)], low_lists(("one",), (300,), torch.uint8, (0,))
    call: dict[str, Any] = {"grads": [torch.ones(300)], "exp_avgs": codes[0], "scales": scales, "step": 1, "lr": 0.1}
    with pytest.raises(ValueError, match=f"^zeropp.ops.lion_step_: {sentence}"):
        lion_step_(params, **{**call, **change})
    assert bool((params[0] == 1).all())
    with pytest.raises(TypeError, match=r"seed is 1\.5, wanted a whole number"):
        lion_step_(params, **call, seed=1.5)
