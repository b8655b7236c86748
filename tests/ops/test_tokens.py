# SPDX-License-Identifier: Apache-2.0
"""Random token dropping against loops over tokens (tests/reference/tokens.py). Rows are moved, so all is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import tokens as reference
from torch import Tensor
from zeropp import ops

QUIET = settings(deadline=None, max_examples=30)


@QUIET
@given(batch=st.integers(0, 4), seq=st.integers(1, 200), data=st.data(), seed=st.integers(0, 2**63 - 1),
       layer=st.integers(0, 2**63 - 1))  # fmt: skip
def test_a_sample_follows_its_seed_and_layer(batch: int, seq: int, data: st.DataObject, seed: int, layer: int) -> None:
    keep = data.draw(st.integers(1, seq))
    kept = ops.token_sample(batch, seq, keep, seed=seed, layer=layer)
    assert kept.tolist() == reference.sample(batch, seq, keep, seed, layer)
    assert kept.shape == (batch, keep) and bool((kept.diff(dim=1) > 0).all())
    for at in range(batch):
        assert torch.equal(kept[at:], ops.token_sample(batch - at, seq, keep, seed=seed, layer=layer, first=at))


def test_samples_are_even_and_draw_apart() -> None:
    kept = ops.token_sample(400, 40, 10, seed=1)
    stays = torch.bincount(kept.flatten(), minlength=40)
    # Binomial(400, 1/4): mean 100, standard deviation 8.7; five of them hold for all 40 but once in 40,000 times.
    assert int(stays.sum()) == 4000 and bool(((stays - 100).abs() < 44).all())
    pairs = torch.zeros(400, 40).scatter_(1, kept.long(), 1.0)
    together = pairs.T @ pairs  # two tokens: 10/40 9/39 of 400 is 23.1, standard deviation 4.7
    assert bool((together[~torch.eye(40, dtype=torch.bool)] - 23.1).abs().max() < 26)
    assert kept.unique(dim=0).shape[0] == 400
    others = [ops.token_sample(1, 500, 250, seed=s, layer=n) for s in range(4) for n in range(4)]
    assert torch.cat(others).unique(dim=0).shape[0] == 16
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(kept, ops.token_sample(400, 40, 10, seed=1))
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@QUIET
@given(batch=st.integers(1, 3), seq=st.integers(1, 60), width=st.integers(1, 80), data=st.data(),
       seed=st.integers(0, 99))  # fmt: skip
def test_moves_are_the_loop_over_tokens_forward_and_backward(
    dtype: torch.dtype, batch: int, seq: int, width: int, data: st.DataObject, seed: int
) -> None:
    keep = data.draw(st.integers(1, seq))
    torch.manual_seed(seed)
    kept = ops.token_sample(batch, seq, keep, seed=seed)
    full, part = torch.randn(batch, seq, width).to(dtype), torch.randn(batch, keep, width).to(dtype)
    mine, twins = [[t.clone().requires_grad_() for t in (full, part)] for _ in range(2)]
    results = [ops.token_gather(mine[0], kept), ops.token_scatter(*mine, kept)]
    wanted = [reference.gather(twins[0], kept), reference.scatter(*twins, kept)]
    for got, want in zip(results, wanted, strict=True):
        assert torch.equal(got, want)
        grad = torch.randn(want.shape).to(dtype)
        torch.autograd.backward(got, grad)
        torch.autograd.backward(want, grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, twins, strict=True))  # type: ignore[arg-type]


def test_there_and_back() -> None:
    x = torch.randn(2, 30, 7)
    kept = ops.token_sample(2, 30, 11, seed=0)
    assert torch.equal(ops.token_scatter(x, ops.token_gather(x, kept), kept), x)
    every = ops.token_sample(2, 30, 30, seed=0)
    assert every.tolist() == [list(range(30))] * 2 and torch.equal(ops.token_gather(x, every), x)
    ids = torch.arange(60).view(2, 30, 1)
    assert torch.equal(ops.token_gather(ids, kept)[..., 0] - 30 * torch.arange(2)[:, None], kept.long())
    assert ops.token_gather(x[:0], kept[:0]).shape == (0, 11, 7)


@pytest.mark.parametrize("threads", [1, 2])
def test_large_results_past_the_cache(threads: int) -> None:
    """Written past the cache, odd row lengths, strided and misaligned inputs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    memory = torch.randn(3 * 700 * 1531 + 1)
    full = memory[1:].view(3, 700, 1531)
    kept = ops.token_sample(3, 700, 600, seed=5)
    part = ops.token_gather(full, kept)
    at = kept.long()[:, :, None].expand(-1, -1, 1531)
    assert torch.equal(part, full.gather(1, at))
    assert torch.equal(ops.token_scatter(full, -part, kept), full.scatter(1, at, -part))
    turned = full.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(ops.token_gather(turned, kept), part)
    torch.set_num_threads(before)


X, KEPT = torch.zeros(2, 5, 3), torch.tensor([[0, 2], [1, 4]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: ops.token_sample(1, 5, 6, seed=0), ValueError, "token_sample: keep is 6, wanted at most seq, 5"),
        (lambda: ops.token_sample(1, 5, 0, seed=0), ValueError, "keep is 0, wanted 1 to"),
        (lambda: ops.token_sample(1, 2**31, 1, seed=0), ValueError, "seq is 2147483648, wanted 1 to 2147483647"),
        (lambda: ops.token_sample(1, 5, 2, seed=-1), ValueError, "seed is -1, wanted 0 to"),
        (lambda: ops.token_sample(1, 5, 2, seed=0.5), TypeError, "seed is 0.5, wanted a whole number"),  # type: ignore[arg-type]
        (lambda: ops.token_gather(X[0], KEPT), ValueError, r"full has shape \(5, 3\), wanted \(B, S, W\)"),
        (lambda: ops.token_gather(X, KEPT.long()), ValueError, r"kept is torch.int64 \(2, 2\), wanted torch.int32"),
        (lambda: ops.token_gather(X, KEPT[:1]), ValueError, r"kept is torch.int32 \(1, 2\), wanted torch.int32 \(2, K\)"),
        (lambda: ops.token_gather(X, KEPT + 1), ValueError, r"kept\[1\]\[1\] is 5, wanted more than 2 and less than 5"),
        (lambda: ops.token_gather(X, KEPT.flip(1)), ValueError, r"kept\[0\]\[1\] is 0, wanted more than 2"),
        (lambda: ops.token_gather(X, KEPT - 1), ValueError, r"kept\[0\]\[0\] is -1, wanted more than -1"),
        (lambda: ops.token_gather(X.to("meta"), KEPT), ValueError, "full is on meta, wanted cpu or cuda"),
        (lambda: ops.token_gather(X.to(torch.complex64), KEPT), ValueError, "full is torch dtype"),
        (lambda: ops.token_scatter(X, X, KEPT), ValueError, r"part is torch.float32 \(2, 5, 3\), wanted torch.float32 \(2, 2, 3\)"),
        (lambda: ops.token_scatter(X, X[:, :2].half(), KEPT), ValueError, "part is torch.float16"),
        (lambda: ops.token_scatter(X, "part", KEPT), TypeError, "part is a str"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_misuse_is_refused(call: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()


def test_torch_sees_the_operators() -> None:
    z, check = torch.ops.zeropp, torch.library.opcheck
    full, part = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 2, 3, requires_grad=True)
    none = torch.empty(0)
    check(z.token_sample_.default, (torch.zeros(2, 3, dtype=torch.int32), 5, 3, 1, 2, 4))
    check(z.token_gather.default, (full, KEPT, 5, 2, 3))
    check(z.token_scatter.default, (full, part, KEPT, 5, 2, 3))
    check(z.token_scatter.default, (none, part, KEPT, 5, 2, 3))
    check(z.token_scatter.default, (full, none, KEPT, 5, 2, 3))


def test_second_order() -> None:
    full, part = (torch.randn(2, n, 3, dtype=torch.double, requires_grad=True) for n in (5, 2))
    assert torch.autograd.gradgradcheck(lambda f, p: ops.token_scatter(f * f, p * p, KEPT) ** 2, (full, part))
    assert torch.autograd.gradgradcheck(lambda f: ops.token_gather(f * f, KEPT) ** 2, (full,))


def test_one_graph_under_compile() -> None:
    def layer(x: Tensor) -> Tensor:
        kept = ops.token_sample(2, 20, 8, seed=3, layer=1)
        return ops.token_scatter(x, ops.token_gather(x, kept).tanh(), kept)

    x, twin = torch.randn(2, 20, 4, requires_grad=True), None
    twin = x.detach().clone().requires_grad_()
    y, z = layer(x), torch.compile(layer, fullgraph=True, backend="aot_eager")(twin)
    assert torch.equal(y, z)
    y.square().sum().backward()
    z.square().sum().backward()
    assert x.grad is not None and twin.grad is not None and torch.equal(x.grad, twin.grad)
