# SPDX-License-Identifier: Apache-2.0
"""The exchange of rows on 1 to 4 ranks, with one expert layer around it, against a loop over tokens in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_layer import BOUND, CASES, EPS, EXPERTS, Layer
from ranks import of_all_ranks, on_cpu_only, on_ranks


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


@pytest.mark.parametrize("kinds", [["float32", "bfloat16"], ["bfloat16", "float32"]])
@on_ranks(1, 2, "2 hosts", devices=("cpu", "sim-lazy"))
def test_experts_may_make_rows_of_another_type(kinds: list[str]) -> None:
    """As under autocast. All values are small whole numbers, which both types have."""
    import torch.distributed as dist
    import zeropp

    of_tokens, of_rows = (getattr(torch, kind) for kind in kinds)
    exchange = zeropp.moe.Exchange(dist.group.WORLD)
    number = exchange.layer("types")
    x = (torch.arange(40.0).view(5, 8) % 7 + dist.get_rank()).to(of_tokens).requires_grad_()
    chosen = torch.tensor([[0, 1], [2, 0], [3, 3], [1, -1], [2, 3]])
    weights = torch.tensor([[1.0, 2.0], [3.0, 1.0], [2.0, 2.0], [1.0, 5.0], [0.0, 1.0]], requires_grad=True)
    rows, plan = zeropp.moe.dispatch(x, chosen, 4, exchange=exchange, layer=number)
    y = zeropp.moe.combine(rows.to(of_rows) * 2, plan, weights)
    assert (rows.dtype, y.dtype) == (of_tokens, of_rows)
    used = (chosen >= 0).float()
    factor = 2 * (weights.detach() * used).sum(1, keepdim=True)
    assert torch.equal(y.float(), factor * x.detach().float())
    by_x, by_weights = torch.autograd.grad(y, [x, weights], torch.ones_like(y))
    assert (by_x.dtype, by_weights.dtype) == (of_tokens, torch.float32)
    assert torch.equal(by_x.float(), factor.expand(5, 8))
    assert torch.equal(by_weights, used * 2 * x.detach().float().sum(1, keepdim=True))


@on_ranks(1, 2)
def test_without_gradients_nothing_but_a_mode_meets_operators(ranks: int) -> None:
    """A call without gradients has the bits of one with them, also under a mode, which sees the operators."""
    import torch.distributed as dist
    import zeropp
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    layer, rank = Layer("uneven", dist.get_rank(), ranks), dist.get_rank()
    exchange = zeropp.moe.Exchange(dist.group.WORLD)
    number = exchange.layer("watched")
    ours = {"zeropp::moe_rows_dispatch", "zeropp::moe_rows_combine"}

    def run(x: torch.Tensor) -> torch.Tensor:
        rows, plan = zeropp.moe.dispatch(x, layer.chosen[rank], EXPERTS, exchange=exchange, layer=number)
        y: torch.Tensor = zeropp.moe.combine(rows, plan, layer.weights[rank])
        return y.detach()

    wanted = run(layer.x[rank].clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(run(layer.x[rank]), wanted)
        with Watch():
            assert torch.equal(run(layer.x[rank]), wanted)
    assert ours <= set(seen)


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
            lambda d, c: c(torch.zeros(1, 6), d(torch.zeros(1, 4), torch.zeros(1, 1).long(), 4)[1]), ValueError,
            "rows of width 6, wanted 4 as the dispatch returned",
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

    on_cpu_only("experts on GPUs take torch's products")
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
