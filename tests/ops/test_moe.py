# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts against loops over tokens in float64 (tests/reference/moe.py).

Bounds. u = 2^-24. A score: e^x within 2 ulp (exp.h), the difference x - max within u |x - max| which e^x turns
into a relative error, the sum of E terms within E u, one division: relative (8 + |x|max + E) u, twice that for a weight
divided by its sum. Combined rows: k + 2 roundings of fp32, relative to the sum of magnitudes, and one of the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import moe as reference
from torch import Tensor
from zeropp import ops

U = 2.0**-24
QUIET = settings(deadline=None, max_examples=15)
ROUND = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's own operations are small here: threads that wait for each other would be all the time spent."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of(tokens: int, experts: int, seed: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 3


def score_bound(x: Tensor) -> float:
    return (8 + 2 * x.abs().max().item() + x.shape[1]) * U


@QUIET
@given(
    tokens=st.integers(1, 200), experts=st.integers(1, 70), k=st.integers(1, 6), seed=st.integers(0, 99),
    sigmoid=st.booleans(), normalise=st.booleans(), biased=st.integers(0, 2),
)  # fmt: skip
def test_the_gate_follows_the_papers(
    tokens: int, experts: int, k: int, seed: int, sigmoid: bool, normalise: bool, biased: int
) -> None:
    k = min(k, experts)
    x = logits_of(tokens, experts, seed)
    bias = [None, torch.randn(experts), torch.randn(tokens, experts)][biased]
    scoring: Any = "sigmoid" if sigmoid else "softmax"
    mine, twin = x.clone().requires_grad_(), x.double().requires_grad_()
    gate = ops.moe_gate(mine, k, scoring=scoring, normalise=normalise, bias=bias)
    weights, chosen, balance, z = reference.gate(twin, k, sigmoid=sigmoid, normalise=normalise, bias=bias)
    assert torch.equal(gate.chosen.long(), chosen)
    assert torch.equal(gate.counts, torch.bincount(chosen.flatten(), minlength=experts))
    off = 2 * score_bound(x)
    assert bool(((gate.weights.double() - weights).abs() <= off * weights).all())
    assert abs(gate.balance_loss.item() - balance.item()) <= (off + 70 * U) * balance.item()
    lse_off = 2 * (score_bound(x) + x.abs().max().item() * U)
    assert abs(gate.z_loss.item() - z.item()) <= 2 * lse_off * (z.item() + z.item() ** 0.5 + 1)

    by_weight = torch.randn(tokens, k)
    ((gate.weights * by_weight).sum() + 2 * gate.balance_loss + 0.5 * gate.z_loss).backward()
    ((weights * by_weight).sum() + 2 * balance + 0.5 * z).backward()
    assert mine.grad is not None and twin.grad is not None
    # Differences of terms no greater than the greatest gradient by a weight (twice: and its mean), the losses' own
    # gradients, each with the scores' error and E additions; sums of few sigmoids divide by little.
    least = torch.sigmoid(x).min().item() if sigmoid else 1.0
    scale = 4 * (by_weight.abs().max().item() + 2 * experts + x.abs().max().item() + 8) / min(1.0, least * experts)
    assert (mine.grad.double() - twin.grad).abs().max().item() <= 8 * scale * score_bound(x)


def test_ties_nan_and_masked_experts() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1.0, 2, 2, 0], [nan, 1, 0, 5], [-inf, 3, -inf, -inf], [-inf] * 4])
    gate = ops.moe_gate(x, 2)
    assert gate.chosen[0].tolist() == [1, 2] and gate.chosen[1].tolist() == [3, 1]
    assert gate.chosen[2].tolist() == [1, 0] and gate.chosen[3].tolist() == [0, 1]
    assert bool(gate.weights[1].isnan().all()) and gate.weights[2].tolist()[0] == 1 and gate.weights[2, 1] < 1e-37


def test_a_bias_chooses_and_does_not_weigh() -> None:
    x = torch.zeros(1, 4)
    gate = ops.moe_gate(x, 1, normalise=False, bias=torch.tensor([0.0, 0, 9, 0]))
    assert gate.chosen.tolist() == [[2]] and gate.weights.item() == 0.25


@QUIET
@given(
    tokens=st.integers(0, 300), experts=st.integers(1, 40), k=st.integers(1, 4), capacity=st.integers(0, 60),
    seed=st.integers(-1, 50), draw=st.integers(0, 99),
)  # fmt: skip
def test_the_plan_is_a_stable_sort_that_drops_what_does_not_fit(
    tokens: int, experts: int, k: int, capacity: int, seed: int, draw: int
) -> None:
    k = min(k, experts)
    room = capacity or None
    chosen = ops.moe_gate(logits_of(tokens, experts, draw), k).chosen
    plan = ops.moe_plan(chosen, experts, capacity=room, seed=None if seed < 0 else seed)
    slots = plan.slots
    live = slots >= 0
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    assert torch.equal(plan.kept, counts.clamp(max=capacity) if room else counts)
    used = slots[live]
    assert used.unique().numel() == used.numel() and bool((used < plan.rows).all())
    starts = torch.arange(experts) * capacity if room else counts.cumsum(0) - counts
    for e in range(experts):  # rows 0 .. kept - 1 of its part, in order of tokens
        mine = slots[(chosen == e) & live]
        assert mine.tolist() == list(range(int(starts[e]), int(starts[e] + plan.kept[e])))
    if seed < 0 or room is None:
        assert live.tolist() == reference.keep(chosen.tolist(), experts, room) or tokens == 0
    elif k > 1:  # a second choice stays only where all first ones did
        for e in range(experts):
            for j in range(1, k):
                if bool(live[chosen[:, j] == e, j].any()):
                    assert bool(live[chosen[:, j - 1] == e, j - 1].all())


def test_random_token_selection_is_fair_and_follows_its_seed() -> None:
    chosen = torch.zeros(64, 1, dtype=torch.int32)
    stays = torch.zeros(64)
    for seed in range(400):
        stays += ops.moe_plan(chosen, 1, capacity=16, seed=seed).slots.flatten() >= 0
    # Binomial(400, 1/4): mean 100, standard deviation 8.7; five of them hold for all 64 but once in 30,000 times.
    assert stays.sum() == 400 * 16 and bool(((stays - 100).abs() < 44).all())
    again = [ops.moe_plan(chosen, 1, capacity=16, seed=7).slots for _ in range(2)]
    assert torch.equal(*again) and not torch.equal(again[0], ops.moe_plan(chosen, 1, capacity=16, seed=8).slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@QUIET
@given(
    tokens=st.integers(1, 60), experts=st.integers(1, 9), k=st.integers(1, 4), width=st.integers(1, 300),
    capacity=st.integers(0, 30), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_layer_is_the_loop_over_tokens_forward_and_backward(
    dtype: torch.dtype, tokens: int, experts: int, k: int, width: int, capacity: int, seed: int
) -> None:
    k, room = min(k, experts), capacity or None
    torch.manual_seed(seed)
    gate = ops.moe_gate(torch.randn(tokens, experts), k)
    plan = ops.moe_plan(gate, experts, capacity=room)
    x = torch.randn(tokens, width).to(dtype)
    factors = 2.0 ** torch.arange(experts)  # an expert multiplies exactly, so no error is its own
    starts = torch.arange(experts) * capacity if room else plan.kept.cumsum(0) - plan.kept
    of_row = torch.searchsorted(starts, torch.arange(plan.rows), right=True) - 1
    mine, weights = x.clone().requires_grad_(), gate.weights.clone().requires_grad_()
    rows = ops.moe_dispatch(mine, plan)
    y = ops.moe_combine(rows * factors[of_row, None].to(dtype), plan, weights)
    seen = torch.zeros(plan.rows, dtype=torch.bool)
    seen[plan.slots[plan.slots >= 0].long()] = True
    assert not rows[~seen].any() and rows.dtype == dtype and y.dtype == dtype

    twin, twin_weights = x.double().requires_grad_(), gate.weights.double().requires_grad_()
    chosen = gate.chosen.tolist()
    kept = reference.keep(chosen, experts, room)
    want = reference.layer(twin, twin_weights, chosen, kept, lambda e, row: float(factors[e]) * row)
    size = reference.layer(twin.abs(), twin_weights.abs(), chosen, kept, lambda e, row: float(factors[e]) * row)
    off = (k + 2) * U * size + ROUND[dtype] * want.abs() + 2.0**-24
    assert bool(((y.double() - want).abs() <= off).all())

    grad = torch.randn(tokens, width).to(dtype)
    y.backward(grad)
    want.backward(grad.double())
    assert mine.grad is not None and twin.grad is not None and weights.grad is not None
    assert twin_weights.grad is not None
    # Gradients of rows are rounded to the dtype once an assignment, scaled exactly, added, and rounded again. Small ones of fp16 are rounded
    # to multiples of 2^-24, so half of that is lost before the scaling, and once after it.
    scaled = factors[gate.chosen.long()]
    reach = grad.double().abs() * (gate.weights.double() * scaled).sum(1, keepdim=True)
    off = ((k + 2) * U + 3 * ROUND[dtype]) * reach + 2.0**-25 * (1 + scaled.sum(1, keepdim=True))
    assert bool(((mine.grad.double() - twin.grad).abs() <= off).all())
    dots = (width + 4) * U * float(factors[-1]) * (x.double() * grad.double()).abs().sum(1, keepdim=True)
    assert bool(((weights.grad.double() - twin_weights.grad).abs() <= dots + 1e-6).all())


@QUIET
@given(tokens=st.integers(1, 200), k=st.integers(1, 3), width=st.integers(1, 100), seed=st.integers(0, 99))
def test_dispatch_then_combine_is_identity(tokens: int, k: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    chosen = torch.stack([torch.randperm(5)[:k] for _ in range(tokens)]).int()
    plan = ops.moe_plan(chosen, 5)
    x = torch.randn(tokens, width)
    half = torch.full((tokens, k), 0.25)
    half[:, 0] = 1 - 0.25 * (k - 1)
    assert torch.equal(
        ops.moe_combine(ops.moe_dispatch(x, plan), plan), x if k == 1 else x * k if k == 2 else x + x + x
    )
    assert torch.allclose(ops.moe_combine(ops.moe_dispatch(x, plan), plan, half), x, rtol=4 * U, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_memory_and_size_do_not_show(dtype: torch.dtype) -> None:
    """Large enough to be written past the cache; reused memory, odd offsets, and one or two threads give one result."""
    torch.manual_seed(0)
    tokens, experts, width = 1500, 12, 1531
    gate = ops.moe_gate(torch.randn(tokens, experts), 2)
    x = torch.randn(tokens, width).to(dtype)
    before = torch.get_num_threads()
    results: list[tuple[Tensor, ...]] = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for capacity in (None, 200):
                plan = ops.moe_plan(gate, experts, capacity=capacity, seed=None if capacity is None else 1)
                room = torch.full((plan.rows * width + 3,), 7.0, dtype=dtype)
                rows = ops.moe_dispatch(x, plan, out=room[1:-2].view(plan.rows, width))
                assert torch.equal(rows, ops.moe_dispatch(x, plan))
                assert room[0] == 7 and bool((room[-2:] == 7).all()), "wrote beside its part"
                out = torch.full((tokens * width + 1,), 7.0, dtype=dtype)
                y = ops.moe_combine(rows, plan, gate.weights, out=out[1:].view(tokens, width))
                assert torch.equal(y, ops.moe_combine(rows, plan, gate.weights)) and out[0] == 7
                results.append((plan.slots, rows.clone(), y.clone(), *ops.moe_gate(torch.ones(tokens, 3), 1)))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_capacity() -> None:
    assert ops.moe_capacity(100, 8, 1) == 13 and ops.moe_capacity(100, 8, 2, 1.25) == 32
    assert ops.moe_capacity(3, 8, 1) == 4
    with pytest.raises(ValueError, match=r"factor -1\.0"):
        ops.moe_capacity(3, 8, 1, -1.0)


def test_a_layer_trains() -> None:
    """Gate and experts learn which half of the space a token is from."""
    torch.manual_seed(0)
    router = torch.nn.Linear(8, 2)
    experts = torch.nn.Parameter(0.1 * torch.randn(2, 8, 1))
    x = torch.randn(256, 8)
    y = torch.where(x[:, :1] > 0, x.sum(1, keepdim=True), -x.sum(1, keepdim=True))
    optimizer = torch.optim.Adam([*router.parameters(), experts], lr=0.05)
    losses = []
    for _ in range(150):
        gate = ops.moe_gate(router(x), 2)
        plan = ops.moe_plan(gate, 2, capacity=256)
        rows = ops.moe_dispatch(x, plan).view(2, 256, 8)
        out = ops.moe_combine(torch.bmm(rows, experts).view(512, 1), plan, gate.weights)
        loss = (out - y).square().mean() + 1e-3 * gate.balance_loss
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.35 * losses[0]


PLAN = ops.MoePlan(torch.tensor([[0], [1], [2]], dtype=torch.int32), torch.tensor([2, 1]), 0)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: ops.moe_gate(torch.zeros(3, 4), 5), ValueError, "moe_gate: k is 5, wanted 1 to 4"),
        (lambda: ops.moe_gate(torch.zeros(3, 4), 0), ValueError, "moe_gate: k is 0, wanted 1 to 4"),
        (lambda: ops.moe_gate(torch.zeros(3, 1025), 1), ValueError, "experts is 1025, wanted 1 to 1024"),
        (lambda: ops.moe_gate(torch.zeros(3), 1), ValueError, r"logits is torch.float32 \(3,\), wanted floating"),
        (lambda: ops.moe_gate(torch.zeros(3, 4).int(), 1), ValueError, "logits is torch.int32"),
        (lambda: ops.moe_gate([1.0], 1), TypeError, "logits is a list, wanted a tensor"),  # type: ignore[arg-type]
        (lambda: ops.moe_gate(torch.zeros(3, 4, device="meta"), 1), ValueError, "logits is on meta, wanted cpu"),
        (lambda: ops.moe_gate(torch.zeros(3, 4), 1, bias=torch.zeros(3)), ValueError, r"bias has shape \(3,\), wanted"),
        (lambda: ops.moe_gate(torch.zeros(3, 4), 1, scoring="max"), ValueError, "scoring is 'max'"),  # type: ignore[arg-type]
        (lambda: ops.moe_plan(PLAN.slots, 2), ValueError, r"moe_plan: chosen\[2\] is 2, wanted an expert 0 to 1"),
        (lambda: ops.moe_plan(PLAN.slots.long(), 3), ValueError, "chosen is int64, wanted int32"),
        (lambda: ops.moe_plan(PLAN.slots, 3, capacity=0), ValueError, "capacity is 0, wanted None or at least 1"),
        (lambda: ops.moe_plan(PLAN.slots, 3, capacity=1, seed=-1), ValueError, "seed is -1, wanted None or at least 0"),
        (lambda: ops.moe_dispatch(torch.zeros(4, 5), PLAN), ValueError, "x has 20 elements, wanted 15: 3 tokens of"),
        (lambda: ops.moe_dispatch(torch.zeros(3, 5).double(), PLAN), ValueError, "x is float64, wanted float32, bf"),
        (lambda: ops.moe_dispatch(torch.zeros(3, 0), PLAN), ValueError, "wanted rows"),
        (
            lambda: ops.moe_dispatch(torch.zeros(3, 5), PLAN._replace(slots=PLAN.slots + 1)),
            ValueError, r"slots\[2\] is 3, wanted -1 or a row below 3",
        ),
        (
            lambda: ops.moe_dispatch(torch.zeros(3, 5), PLAN._replace(slots=PLAN.slots - 1)),
            ValueError, "slots has 2 rows that are not dropped, wanted 3",
        ),
        (
            lambda: ops.moe_dispatch(torch.zeros(3, 5), PLAN._replace(kept=torch.tensor([9, 1]), capacity=2)),
            ValueError, r"kept\[0\] is 9, wanted 0 to capacity 2",
        ),
        (
            lambda: ops.moe_dispatch(torch.zeros(3, 5), PLAN, out=torch.zeros(3, 4)),
            ValueError, r"out is torch.float32 \(3, 4\), wanted torch.float32 \(3, 5\)",
        ),
        (
            lambda: ops.moe_dispatch(torch.zeros(3, 5), PLAN, out=torch.zeros(5, 3).t()),
            ValueError, "out is not contiguous",
        ),
        (
            lambda: ops.moe_combine(torch.zeros(3, 5), PLAN, torch.zeros(3, 2)),
            ValueError, r"weights has shape \(3, 2\), wanted \(3, 1\) as plan.slots",
        ),
        (lambda: ops.moe_combine(torch.zeros(3, 5), (1, 2)), TypeError, "plan is a tuple, wanted what"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_misuse_is_refused(call: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()


def test_out_that_shares_memory_or_loses_gradients_is_refused() -> None:
    x = torch.zeros(6, 5)
    with pytest.raises(ValueError, match="share memory"):
        ops.moe_dispatch(x[:3], PLAN, out=x[2:5])
    with pytest.raises(ValueError, match="requires grad"):
        ops.moe_dispatch(torch.zeros(3, 5, requires_grad=True), PLAN, out=torch.zeros(3, 5))
    assert not x.any()


def test_torch_sees_the_operators() -> None:
    torch.manual_seed(0)
    z = torch.ops.zeropp
    check = torch.library.opcheck
    logits = torch.randn(9, 5, requires_grad=True)
    none = torch.empty(0)
    for sigmoid in (False, True):
        check(z.moe_gate.default, (logits, none, 5, 2, sigmoid, True))
    gate = ops.moe_gate(logits.detach(), 2)
    check(z.moe_gate_backward.default, (torch.randn(9, 2), torch.ones(2), logits.detach(), gate.chosen, gate.counts, 2,
                                        False, True))  # fmt: skip
    for capacity, seed in ((0, -1), (3, 4)):
        check(z.moe_plan.default, (gate.chosen, 5, 2, capacity, seed))
        plan = ops.moe_plan(gate, 5, capacity=capacity or None)
        where = (plan.slots, plan.kept)
        x, rows = torch.randn(9, 7, requires_grad=True), torch.randn(plan.rows, 7, requires_grad=True)
        weights = torch.rand(9, 2, requires_grad=True)
        check(z.moe_dispatch.default, (x, *where, 2, capacity, 7))
        check(z.moe_dispatch_.default, (x.detach(), *where, torch.empty(plan.rows, 7), 2, capacity, 7))
        check(z.moe_combine.default, (rows, *where, weights, 2, capacity, 7))
        check(z.moe_combine.default, (rows, *where, none, 2, capacity, 7))
        check(z.moe_combine_.default, (rows.detach(), *where, weights.detach(), torch.empty(9, 7), 2, capacity, 7))
        check(
            z.moe_combine_backward.default, (torch.randn(9, 7), rows.detach(), *where, weights.detach(), 2, capacity, 7)
        )


def test_one_graph_under_compile() -> None:
    def layer(x: Tensor, logits: Tensor) -> Tensor:
        gate = zeropp.ops.moe_gate(logits, 2)
        plan = zeropp.ops.moe_plan(gate, 6, capacity=4)
        return zeropp.ops.moe_combine(zeropp.ops.moe_dispatch(x, plan) * 2, plan, gate.weights) + gate.balance_loss

    x, logits = torch.randn(10, 12), torch.randn(10, 6)
    leaves = [x.clone().requires_grad_(), logits.clone().requires_grad_()]
    twins = [x.clone().requires_grad_(), logits.clone().requires_grad_()]
    y = layer(*leaves)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(*twins)
    assert torch.equal(y, compiled)
    y.sum().backward()
    compiled.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, twins, strict=True))  # type: ignore[arg-type]
