# SPDX-License-Identifier: Apache-2.0
"""The exchange of rows on 1 to 4 ranks, with one expert layer around it, against a loop over tokens in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import of_all_ranks, on_ranks
from reference.moe_layer import moe_layer
from torch import Tensor

EXPERTS, K, WIDTH, INNER = 8, 3, 24, 16
EPS = 2.0**-24
#: fp32 against fp64: a result is a sum of at most K experts' sums of 2 INNER products of sums of WIDTH products, and a gradient by an
#: expert's weights one of as many rows as there are tokens.
BOUND = 64 * EPS


def _uneven(rank: int, ranks: int) -> tuple[int, Callable[[Tensor], Tensor]]:
    return 5 + 7 * rank, lambda chosen: chosen


def _one_without_tokens(rank: int, ranks: int) -> tuple[int, Callable[[Tensor], Tensor]]:
    return (0 if 0 < rank == ranks - 1 else 9), lambda chosen: chosen


def _none_for_the_last(rank: int, ranks: int) -> tuple[int, Callable[[Tensor], Tensor]]:
    return 6, lambda chosen: chosen % max(1, EXPERTS // ranks * (ranks - 1) or EXPERTS)


def _all_for_one(rank: int, ranks: int) -> tuple[int, Callable[[Tensor], Tensor]]:
    return 6, lambda chosen: torch.full_like(chosen, 5)


def _dropped(rank: int, ranks: int) -> tuple[int, Callable[[Tensor], Tensor]]:
    return 8, lambda chosen: torch.where(torch.rand(chosen.shape) < 0.5, -1, chosen)


CASES = {f.__name__[1:]: f for f in (_uneven, _one_without_tokens, _none_for_the_last, _all_for_one, _dropped)}


class Layer:
    """All ranks' tokens, choices and experts, which every rank makes from the same seed, and this rank's part."""

    def __init__(self, case: str, rank: int, ranks: int) -> None:
        torch.manual_seed(7)
        sizes = [CASES[case](r, ranks) for r in range(ranks)]
        self.x = [torch.randn(tokens, WIDTH) for tokens, _ in sizes]
        self.chosen = [change(torch.rand(tokens, EXPERTS).topk(K, 1)[1]) for tokens, change in sizes]
        self.weights = [torch.rand(tokens, K) for tokens, _ in sizes]
        self.grads = [torch.randn(tokens, WIDTH) for tokens, _ in sizes]
        self.gate_up = torch.randn(EXPERTS, 2 * INNER, WIDTH) * WIDTH**-0.5
        self.down = torch.randn(EXPERTS, WIDTH, INNER) * INNER**-0.5
        here = EXPERTS // ranks
        self.experts = slice(rank * here, (rank + 1) * here)
        first = sum(tokens for tokens, _ in sizes[:rank])
        self.tokens = slice(first, first + sizes[rank][0])
        self.rank = rank

    def here(self) -> list[Tensor]:
        """Return x, weights, gate_up and down of this rank, as leaves."""
        parts = (self.x[self.rank], self.weights[self.rank], self.gate_up[self.experts], self.down[self.experts])
        return [part.clone().requires_grad_() for part in parts]

    def run(self, leaves: list[Tensor], exchange: Any, layer: int) -> list[Tensor]:
        """Return y and the gradients of the leaves."""
        import zeropp

        x, weights, gate_up, down = leaves
        rows, plan = zeropp.moe.dispatch(x, self.chosen[self.rank], EXPERTS, exchange=exchange, layer=layer)
        made = torch.cat([
            torch.nn.functional.silu(part @ of[:INNER].t()) * (part @ of[INNER:].t()) @ out.t()
            for part, of, out in zip(rows.tensor_split(plan.ends[:-1].long()), gate_up, down, strict=True)
        ])  # fmt: skip
        y = zeropp.moe.combine(made, plan, weights)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.grads[self.rank], allow_unused=True)]

    def wanted(self) -> list[Tensor]:
        """Return the same of one process with all tokens and experts, in fp64."""
        joined = [torch.cat(parts).double().requires_grad_() for parts in (self.x, self.weights)]
        experts = [part.double().requires_grad_() for part in (self.gate_up, self.down)]
        y = moe_layer(joined[0], torch.cat(self.chosen), joined[1], *experts)
        grads = torch.autograd.grad(y, [*joined, *experts], torch.cat(self.grads).double())
        here = (self.tokens, self.tokens, self.tokens, self.experts, self.experts)
        return [whole[part] for whole, part in zip((y.detach(), *grads), here, strict=True)]


@pytest.mark.parametrize("case", list(CASES))
@on_ranks(1, 2, 4)
def test_a_layer_is_the_loop_over_tokens(case: str, ranks: int) -> None:
    import torch.distributed as dist
    import zeropp

    layer = Layer(case, dist.get_rank(), ranks)
    exchange = zeropp.moe.Exchange(dist.group.WORLD)
    number = exchange.layer("of the test")
    first = layer.run(layer.here(), exchange, number)
    for mine, want in zip(first, layer.wanted(), strict=True):
        scale = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(mine.double(), want, rtol=BOUND, atol=BOUND * scale)
    for mine, again in zip(first, layer.run(layer.here(), exchange, number), strict=True):
        assert torch.equal(mine, again)


@on_ranks(1, 2, 4)
def test_sums_have_the_same_bits_for_every_number_of_ranks(ranks: int) -> None:
    import torch.distributed as dist
    import zeropp

    exchange = zeropp.moe.Exchange(dist.group.WORLD)
    number = exchange.layer("bits")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = Layer("uneven", dist.get_rank(), ranks)
        x, weights, chosen = layer.x[layer.rank].to(dtype), layer.weights[layer.rank], layer.chosen[layer.rank]
        results = []
        for one, at in ((exchange, number), (None, 0)):
            leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
            rows, plan = zeropp.moe.dispatch(leaves[0], chosen, EXPERTS, exchange=one, layer=at)
            y = zeropp.moe.combine(rows * 2, plan, leaves[1])
            results.append([y.detach(), *torch.autograd.grad(y, leaves, layer.grads[layer.rank].to(dtype))])
        for mine, alone in zip(*results, strict=True):
            assert torch.equal(mine, alone)
        factor = (2 * weights.double()).sum(1, keepdim=True)
        rounding = EPS * 8 + torch.finfo(dtype).eps
        torch.testing.assert_close(results[0][0].double(), factor * x.double(), rtol=rounding, atol=rounding)


@on_ranks(2)
def test_rows_lie_where_the_plan_says() -> None:
    import torch.distributed as dist
    import zeropp

    rank = dist.get_rank()
    exchange = zeropp.moe.Exchange(dist.group.WORLD)
    number = exchange.layer("places")
    hidden = (100.0 * rank + torch.arange(3.0))[:, None].repeat(1, 16)
    chosen = torch.tensor([[0, 3], [3, 1], [2, -1]])
    rows, plan = zeropp.moe.dispatch(hidden, chosen, 4, exchange=exchange, layer=number)
    assert plan.ends.tolist() == ([2, 4] if rank == 0 else [2, 6])
    assert rows[:, 0].tolist() == ([0, 100, 1, 101] if rank == 0 else [2, 102, 0, 1, 100, 101])
    assert of_all_ranks(plan.taken.shape[0]) == [4, 6]
    y = zeropp.moe.combine(rows, plan)
    assert torch.equal(y, hidden * torch.tensor([[2.0], [2.0], [1.0]]))


@pytest.mark.parametrize(
    ("what", "sentences"),
    [
        ("k", ["2 of 8 experts a token", "1 of 8 experts a token"]),
        ("width", ["rows of 16 float32", "rows of 24 float32"]),
        ("dtype", ["rows of 16 float32", "rows of 16 bfloat16"]),
        ("layer", ["of layer 0 (first)", "of layer 1 (second)"]),
    ],
)
@on_ranks(2, alone=True)
def test_ranks_that_differ_are_shown_both(what: str, sentences: list[str]) -> None:
    import torch.distributed as dist
    import zeropp

    exchange = zeropp.moe.Exchange(dist.group.WORLD)
    layers = [exchange.layer("first"), exchange.layer("second")]
    other = dist.get_rank() == 1
    hidden = torch.randn(4, 24 if other and what == "width" else 16)
    hidden = hidden.bfloat16() if other and what == "dtype" else hidden
    chosen = torch.zeros(4, 1 if other and what == "k" else 2, dtype=torch.long)
    layer = layers[1 if other and what == "layer" else 0]
    with pytest.raises(zeropp.CommError, match="the ranks took different paths") as info:
        zeropp.moe.dispatch(hidden, chosen, 8, exchange=exchange, layer=layer)
    assert all(sentence in str(info.value) for sentence in sentences), str(info.value)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda d, c: d([1], torch.zeros(1, 1).long(), 4), TypeError, "hidden is a list, wanted a tensor"),
        (lambda d, c: d(torch.zeros(2, 4).double(), torch.zeros(2, 1).long(), 4), ValueError, "wanted rows"),
        (lambda d, c: d(torch.zeros(2, 4), torch.zeros(3, 1).long(), 4), ValueError, r"wanted int32 or int64 \(2, k\)"),
        (lambda d, c: d(torch.zeros(1, 4), torch.tensor([[4]]), 4), ValueError, r"chosen\[0\] is 4, wanted -1 or an expert 0 to 3"),
        (lambda d, c: d(torch.zeros(1, 4), torch.zeros(1, 1).long(), 2000), ValueError, "2000 experts of layer"),
        (lambda d, c: d(torch.zeros(1, 4), torch.zeros(1, 1).long(), 4, layer=9), ValueError, "layer 9, wanted one of the 1"),
        (lambda d, c: c(torch.zeros(1, 4), None), TypeError, "plan is a NoneType"),
        (
            lambda d, c: c(torch.zeros(3, 4), d(torch.zeros(1, 4), torch.zeros(1, 1).long(), 4)[1]), ValueError,
            "3 rows, wanted 1 as the dispatch returned",
        ),
        (
            lambda d, c: c(torch.zeros(1, 4), d(torch.zeros(1, 4), torch.zeros(1, 1).long(), 4)[1], torch.ones(1, 2)),
            ValueError, r"weights has shape \(1, 2\), wanted \(1, 1\)",
        ),
    ],
)  # fmt: skip
def test_misuse_is_refused(call: Any, kind: type[Exception], sentence: str) -> None:
    from zeropp import moe

    with pytest.raises(kind, match=sentence):
        call(moe.dispatch, moe.combine)


@pytest.mark.parametrize("case", ["uneven", "all_for_one", "one_without_tokens"])
@on_ranks(1, 2)
def test_products_in_memory_that_is_used_again(case: str, ranks: int) -> None:
    import torch.distributed as dist
    import zeropp
    from zeropp.moe.products import swiglu_experts

    layer = Layer(case, dist.get_rank(), ranks)
    exchange = zeropp.moe.Exchange(dist.group.WORLD)
    number = exchange.layer("products")
    leaves = layer.here()
    rows, plan = zeropp.moe.dispatch(leaves[0], layer.chosen[layer.rank], EXPERTS, exchange=exchange, layer=number)
    made = swiglu_experts(rows, plan.ends, leaves[2], leaves[3], exchange=exchange)
    y = zeropp.moe.combine(made, plan, leaves[1])
    grads = torch.autograd.grad(y, leaves, layer.grads[layer.rank])
    for mine, want in zip([y.detach(), *grads], layer.wanted(), strict=True):
        scale = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(mine.double(), want, rtol=BOUND, atol=BOUND * scale)
    with pytest.raises(ValueError, match=r"zeropp.moe.swiglu_experts: rows \(\d+, 24\)"):
        swiglu_experts(rows, plan.ends, leaves[3], leaves[2])


@pytest.mark.parametrize(("width", "dtype"), [(1024, torch.float32), (1001, torch.float32), (2050, torch.bfloat16)])
def test_large_rows_go_around_the_cache_in_several_threads(width: int, dtype: torch.dtype) -> None:
    from zeropp import moe

    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        x = torch.randn(2500, width, dtype=dtype, requires_grad=True)
        chosen, weights = torch.rand(2500, 6).topk(2, 1)[1], torch.rand(2500, 2)
        rows, plan = moe.dispatch(x, chosen, 6)
        order = torch.argsort(chosen.flatten(), stable=True)
        assert torch.equal(rows, x[order // 2])
        y = moe.combine(rows, plan, weights)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    finally:
        torch.set_num_threads(threads)
    factor = weights.sum(1, keepdim=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.float(), factor * x.detach().float(), rtol=2 * eps, atol=2 * eps)
    torch.testing.assert_close(grad.float(), factor.expand_as(grad), rtol=4 * eps, atol=4 * eps)
