# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention against whole matrices in float64 (tests/reference/sparse_attention.py), and its patterns.

Bounds, first order in u = 2^-24, with S keys and head dimension D. A score is a chain of D multiply-adds and a scale: off
by e_s = (D + 2) u scale sum_d |q_d k_d|, which the exponential turns into a relative error of p. So does the difference
from the maximum or log-sum-exp, and the exponential itself (2 ulp): p is off by a factor e_p = 2 max e_s + (2 max |s| + S
+ 16) u, the sum over S keys included. Then products: o by (e_p + S u) sum p |v|; dp and delta by D u; ds = p (dp - delta)
by p (e_p + (D + S + 8) u) (|dp| + |delta|) summed with magnitudes; dq, dk, dv a chain of S more. 16-bit tensors round what
is given, and o once more inside of delta: r = 2^-8 or 2^-11 of it.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import sparse_attention as reference
from torch import Tensor
from zeropp import nn, ops

U = 2.0**-24
QUIET = settings(deadline=None, max_examples=20)
ROUND = {torch.float32: U, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_qkv(
    batch: int, heads: int, seq: int, dim: int, dtype: torch.dtype, seed: int, group: int = 1
) -> list[Tensor]:
    """q, k, v and the gradient of the output; ``group`` heads of q to one of k and v."""
    draw = torch.Generator().manual_seed(seed)
    each = (heads, heads // group, heads // group, heads)
    return [torch.randn(batch, number, seq, dim, generator=draw).to(dtype) for number in each]


def check(
    layout: ops.SparseLayout, tensors: list[Tensor], *, causal: bool, scale: float, key_mask: Tensor | None,
    dropout: float = 0.0,
) -> None:  # fmt: skip
    """Forward and backward of every sample within the bound. Grouped heads: the reference repeats keys, and adds their gradients."""
    q, k, v, do = tensors
    batch, heads, seq, dim = q.shape
    group = heads // k.shape[1]
    mine = [t.clone().requires_grad_() for t in (q, k, v)]
    seed = torch.tensor([-7]) if dropout else None
    out = ops.sparse_attention(*mine, layout, causal=causal, scale=scale, key_mask=key_mask, dropout=dropout, seed=seed)
    out.backward(do)
    mask = layout.mask().expand(heads, -1, -1)

    def grouped(per_head: Tensor) -> Tensor:
        return per_head.unflatten(0, (-1, group)).sum(1)

    for b in range(batch):
        keys = None if key_mask is None else key_mask[b]
        visible = reference.seen(mask, layout.block, seq, causal=causal, keys=keys)
        keep = torch.ones(())
        if dropout:
            keep = torch.stack([reference.kept(-7, b * heads + h, seq, dropout) for h in range(heads)])
        wide = [t[b].repeat_interleave(group, 0) for t in (k, v)]
        want = reference.attend(q[b], *wide, do[b], visible, scale, keep)
        aq, ak, av, ado = (t.double().abs() for t in (q[b], *wide, do[b]))
        by_score = (dim + 2) * U * abs(scale) * (aq @ ak.transpose(1, 2)).max().item()
        e_p = 2 * by_score + (2 * want.s.abs().max().item() + seq + 16) * U
        r, tiny = ROUND[q.dtype], (seq + 4) * TINY[q.dtype]
        r_delta = r if q.dtype != torch.float32 else 0.0
        o_size = (keep * want.p) @ av
        delta_size = (ado * o_size).sum(2, keepdim=True)
        ds_off = want.p * (
            (e_p + (dim + seq + 8) * U) * (keep * (ado @ av.transpose(1, 2)) + delta_size) + 2 * r_delta * delta_size
        )
        ds_size = want.p * (want.dp - want.delta).abs()
        allowed = {
            "out": (out[b], want.o, (e_p + (seq + 2) * U) * o_size),
            "dq": (mine[0].grad[b], want.dq, abs(scale) * (ds_off + (seq + 4) * U * ds_size) @ ak),  # type: ignore[index]
            "dk": (mine[1].grad[b], grouped(want.dk),  # type: ignore[index]
                   grouped(abs(scale) * (ds_off + (heads * seq + 4) * U * ds_size).transpose(1, 2) @ aq)),
            "dv": (mine[2].grad[b], grouped(want.dv),  # type: ignore[index]
                   grouped((e_p + (heads * seq + 2) * U) * (keep * want.p).transpose(1, 2) @ ado)),
        }  # fmt: skip
        for label, (got, true, off) in allowed.items():
            bound = off + r * (true.abs() + off) + tiny
            worst = ((got.double() - true).abs() / bound).max().item()
            assert worst <= 1, f"{label} of sample {b} is off by {worst} times what rounding allows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@QUIET
@given(
    seq=st.integers(1, 150), dim=st.sampled_from([1, 8, 16, 24, 64, 80]), heads=st.integers(1, 3), batch=st.integers(1, 2),
    group=st.integers(1, 3),
    block=st.sampled_from([16, 32, 64, 128]), causal=st.booleans(), masked=st.booleans(), shared=st.booleans(),
    density=st.sampled_from([0.0, 0.3, 0.7, 1.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_layout_is_masked_dense_attention(
    dtype: torch.dtype, seq: int, dim: int, heads: int, batch: int, group: int, block: int, causal: bool, masked: bool,
    shared: bool, density: float, seed: int,
) -> None:  # fmt: skip
    heads *= group
    tensors = random_qkv(batch, heads, seq, dim, dtype, seed, group)
    draw = torch.Generator().manual_seed(seed)
    blocks = -(-seq // block)
    layout = ops.SparseLayout.from_mask(
        torch.rand(1 if shared else heads, blocks, blocks, generator=draw) < density, block
    )
    keys = torch.rand(batch, seq, generator=draw) < 0.7 if masked else None
    check(layout, tensors, causal=causal, scale=1.5 / math.sqrt(dim), key_mask=keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.1, 0.7])
def test_dropout_is_that_of_its_seed_in_both_passes(dtype: torch.dtype, dropout: float) -> None:
    """The reference draws by itself what the forward and the backward have to drop."""
    tensors = random_qkv(2, 4, 75, 24, dtype, 5, group=2)
    layout = ops.SparseLayout.from_mask(torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(1)) < 0.8, 32)
    check(layout, tensors, causal=True, scale=0.2, key_mask=None, dropout=dropout)


def test_dropout_keeps_its_rate_and_follows_torch() -> None:
    """Weights of 1/128 each, 2 million draws: the kept share is within five standard deviations, for its pairs too."""
    seq, heads, dropout = 128, 128, 0.3
    q = torch.zeros(1, heads, seq, seq)
    v = torch.eye(seq).expand(1, heads, seq, seq)
    layout = nn.Dense(block=64).layout(heads, seq)
    torch.manual_seed(3)
    kept = ops.sparse_attention(q, q, v, layout, dropout=dropout) != 0
    for draws in (kept, kept[..., 1:] & kept[..., :-1], kept[:, :, 1:] & kept[:, :, :-1], kept[:, 1:] & kept[:, :-1]):
        chance = 0.7 if draws is kept else 0.49
        off = abs(draws.double().mean().item() - chance)
        assert off < 5 * math.sqrt(chance * (1 - chance) / draws.numel()) + 1e-5  # a rate is a multiple of 1/65536
    torch.manual_seed(3)
    assert torch.equal(kept, ops.sparse_attention(q, q, v, layout, dropout=dropout) != 0)
    assert not torch.equal(kept, ops.sparse_attention(q, q, v, layout, dropout=dropout) != 0)
    plain = ops.sparse_attention(q, q, v, layout)
    assert torch.equal(plain, ops.sparse_attention(q, q, v, layout, dropout=0.0))


@pytest.mark.parametrize(("first", "queries"), [(99, 1), (0, 1), (37, 2), (5, 90), (64, 36)])
@pytest.mark.parametrize("causal", [False, True])
def test_few_queries_have_the_bits_of_all(first: int, queries: int, causal: bool) -> None:
    """Rows at their positions: forward and dq bit for bit; dk and dv as if the other rows had no gradient."""
    q, k, v, do = random_qkv(2, 4, 100, 24, torch.float32, 2, group=2)
    layout = ops.SparseLayout.from_mask(torch.rand(4, 7, 7, generator=torch.Generator().manual_seed(2)) < 0.6, 16)
    keys = torch.rand(2, 100, generator=torch.Generator().manual_seed(3)) < 0.8
    seed = torch.tensor([11])
    rows = slice(first, first + queries)
    silent = torch.zeros_like(do)
    silent[:, :, rows] = do[:, :, rows]

    def run(part: Tensor, grad: Tensor, **where: int) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (part, k, v)]
        out = ops.sparse_attention(*leaves, layout, causal=causal, key_mask=keys, dropout=0.2, seed=seed, **where)
        out.backward(grad)
        return [out.detach(), *(t.grad for t in leaves)]  # type: ignore[misc]

    whole = run(q, silent)
    part = run(q[:, :, rows], do[:, :, rows], first=first)
    assert torch.equal(part[0], whole[0][:, :, rows]) and torch.equal(part[1], whole[1][:, :, rows])
    assert torch.equal(part[2], whole[2]) and torch.equal(part[3], whole[3])
    if first + queries == 100:
        assert torch.equal(run(q[:, :, rows], do[:, :, rows])[0], part[0]), "the last ones need no `first`"


def test_grouped_heads_are_repeated_keys() -> None:
    """Output and dq bit for bit: a head computes what it does with keys of its own."""
    q, k, v, do = random_qkv(1, 6, 90, 16, torch.float32, 4, group=3)
    layout = nn.BigBird(block=16, per_head=True).layout(6, 90)
    wide = [t.repeat_interleave(3, 1) for t in (k, v)]
    results = []
    for keys in ([k, v], wide):
        leaves = [t.clone().requires_grad_() for t in (q, *keys)]
        out = ops.sparse_attention(*leaves, layout)
        out.backward(do)
        results.append([out.detach(), leaves[0].grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))  # type: ignore[arg-type]


PATTERNS = [
    nn.Dense(block=16),
    nn.Local(block=16, window=3),
    nn.Local(block=16, window=5, causal=True),
    nn.Longformer(block=16, window=3, global_blocks=(0, 3, 99)),
    nn.BigBird(block=16, window=3, random=2, per_head=True),
    nn.BigBird(block=16, window=1, random=1, causal=True, seed=3),
    nn.Fixed(block=16, window=2, patterns=2),
    nn.Fixed(block=16, window=4, global_last=2, global_rows=True),
    nn.Variable(block=16, windows=(1, 3), global_blocks=(2,), random=1, per_head=True),
    nn.Variable(block=16, windows=(2,), causal=True),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_every_pattern_is_masked_dense_attention(pattern: nn.Pattern) -> None:
    tensors = random_qkv(1, 2, 135, 16, torch.float32, 1)
    layout = pattern.layout(2, 135)
    check(layout, tensors, causal=pattern.causal, scale=0.25, key_mask=None)
    module = nn.SparseAttention(pattern)
    q, k, v, _ = tensors
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=layout.dense_mask(135, causal=pattern.causal)
    )
    assert torch.allclose(module(q, k, v), dense, rtol=1e-4, atol=1e-5)  # torch's own rounding, too


def rows(mask: Tensor) -> list[str]:
    return ["".join("x" if at else "." for at in row) for row in mask.tolist()]


def test_patterns_are_as_drawn() -> None:
    assert rows(nn.Local(window=3).mask(1, 4)[0]) == ["xx..", "xxx.", ".xxx", "..xx"]
    assert rows(nn.Local(window=3, causal=True).mask(1, 4)[0]) == ["x...", "xx..", ".xx.", "..xx"]
    assert rows(nn.Longformer(global_blocks=(1,)).mask(1, 5)[0]) == ["xx...", "xxxxx", ".xxx.", ".xxxx", ".x.xx"]
    fixed = nn.Fixed(window=3, patterns=2).mask(2, 7)
    assert rows(fixed[0]) == ["xxx..xx", "xxx..xx", "xxx..xx", "..xxxxx", "..xxxxx", "..xxxxx", "..x..xx"]
    assert rows(fixed[1]) == ["xxx.x.x", "xxx.x.x", "xxx.x.x", ".x.xxxx", ".x.xxxx", ".x.xxxx", ".x..x.x"]
    wide = nn.Fixed(window=2, global_rows=True).mask(1, 4)[0]
    assert rows(wide) == ["xx.x", "xxxx", ".xxx", "xxxx"]
    variable = nn.Variable(windows=(1, 2), global_blocks=(0,), causal=True).mask(1, 5)[0]
    assert rows(variable) == ["x....", "xx...", "xxx..", "x..x.", "x..xx"]


@pytest.mark.parametrize("causal", [False, True])
def test_random_blocks_follow_their_seed_and_their_number(causal: bool) -> None:
    def draw(seed: int, count: int = 2) -> Tensor:
        return nn.BigBird(window=1, global_first=0, random=count, seed=seed, per_head=True, causal=causal).mask(3, 30)

    assert torch.equal(draw(5), draw(5)) and not torch.equal(draw(5), draw(6))
    assert not torch.equal(draw(5)[0], draw(5)[1]), "heads draw apart"
    room = torch.arange(30) if causal else torch.full((30,), 29)
    assert torch.equal(draw(5).sum(2), (1 + room.clamp(max=2)).expand(3, 30))
    pinned = nn.BigBird(window=1, global_first=0, random=1, seed=1).mask(1, 6)[0]  # on every machine and version
    assert rows(pinned) == ["xx....", "xx....", "..x.x.", "x..x..", "...xx.", "....xx"]


def test_a_layout_is_its_mask() -> None:
    mask = torch.rand(3, 7, 7) < 0.4
    layout = ops.SparseLayout.from_mask(mask, 32)
    assert torch.equal(layout.mask(), mask)
    assert layout.heads == 3 and layout.blocks == 7 and layout.columns.numel() == int(mask.sum())
    assert abs(layout.density - mask.double().mean().item()) < 1e-12
    assert layout.dense_mask(200).shape == (3, 200, 200)
    pattern = nn.BigBird(block=32)
    assert pattern.layout(4, 200) is pattern.layout(8, 224) and pattern.layout(4, 200) is not pattern.layout(4, 225)


def test_threads_do_not_show() -> None:
    """By heads and by blocks, one, two or three threads: the same bits. One head and three threads go by blocks."""
    for heads, dtype in ((1, torch.float32), (2, torch.float32), (2, torch.bfloat16)):
        q, k, v, do = random_qkv(1, 2 * heads, 300, 24, dtype, 0, group=2)
        layout = ops.SparseLayout.from_mask(torch.rand(10, 10) < 0.6, 32)
        seed = torch.tensor([heads])
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out = ops.sparse_attention(*leaves, layout, causal=heads == 2, dropout=0.25, seed=seed)
            out.backward(do)
            results.append([out.detach(), *(t.grad for t in leaves)])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))  # type: ignore[arg-type]


PROGRAM = """
import hashlib, torch, zeropp
torch.manual_seed(0)
total = []
for dtype in (torch.float32, torch.bfloat16):
    q, k, v, do = (torch.randn(1, n, 90, 20).to(dtype).requires_grad_() for n in (2, 1, 1, 2))
    layout = zeropp.ops.SparseLayout.from_mask(torch.rand(2, 6, 6) < 0.6, 16)
    keys = torch.rand(1, 90) < 0.8
    out = zeropp.ops.sparse_attention(q, k, v, layout, causal=True, key_mask=keys, dropout=0.1)
    out.backward(do.detach())
    total += [t.detach().float().numpy().tobytes() for t in (out, q.grad, k.grad, v.grad)]
digest = hashlib.sha256(b"".join(total)).hexdigest()
"""


def result_hash() -> str:
    global_state = {"__name__": "program"}
    exec(PROGRAM, global_state)
    return str(global_state["digest"])


@pytest.mark.parametrize("level", ["scalar", "avx2", "avx512", "neon"])
def test_cpu_levels_give_the_same_bits(level: str) -> None:
    """The whole path, with ZEROPP_CPU; tests/c/test_sparse_attention.c compares the versions' kernels."""
    if level not in {name for _, name, usable in zeropp._C.kernels() if usable}:
        pytest.skip(f"{level}: this machine lacks it")
    environment = {**os.environ, "ZEROPP_CPU": level}
    done = subprocess.run(
        [sys.executable, "-c", f"{PROGRAM}\nprint(digest, zeropp._C.cpu_level())"],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [result_hash(), level]


def test_what_sees_nothing_is_zero_and_nan_stays() -> None:
    q, k, v, do = (t.requires_grad_() for t in random_qkv(1, 1, 40, 16, torch.float32, 0))
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    layout = ops.SparseLayout.from_mask(mask, 16)
    out = ops.sparse_attention(q, k, v, layout)
    assert not out[0, 0, 16:32].any() and bool(out[0, 0, :16].all())
    out.backward(do.detach())
    assert q.grad is not None and not q.grad[0, 0, 16:32].any() and bool(q.grad.isfinite().all())
    hidden = ops.sparse_attention(q, k, v, layout, key_mask=torch.zeros(1, 40, dtype=torch.bool))
    assert not hidden.any()
    wrong = k.detach().clone()
    wrong[0, 0, 5, 3] = float("nan")
    seen = ops.sparse_attention(q, wrong, v, ops.SparseLayout.from_mask(torch.eye(3), 16))
    assert bool(seen[0, 0, :16].isnan().all()) and bool(seen[0, 0, 16:].isfinite().all())


def test_large_scores_do_not_overflow() -> None:
    q, k, v, _ = random_qkv(1, 1, 64, 16, torch.float32, 3)
    layout = nn.Dense(block=16).layout(1, 64)
    out = ops.sparse_attention(q * 1e4, k * 1e4, v, layout)  # scores of 1e9: all weight on one key
    best = (q[0, 0].double() @ k[0, 0].double().T).argmax(1)
    assert torch.equal(out[0, 0], v[0, 0, best])


def test_misaligned_and_strided_tensors() -> None:
    q, k, v, _ = random_qkv(1, 2, 50, 16, torch.float32, 4)
    layout = nn.Dense(block=16).layout(2, 50)
    want = ops.sparse_attention(q, k, v, layout)
    memory = torch.zeros(q.numel() + 1)
    memory[1:] = q.flatten()
    assert torch.equal(ops.sparse_attention(memory[1:].view_as(q), k, v, layout), want)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(ops.sparse_attention(*strided, layout), want)
    empty = torch.zeros(0, 2, 50, 16, requires_grad=True)
    none = ops.sparse_attention(empty, empty, empty, layout)
    none.sum().backward()
    assert none.shape == empty.shape


X = torch.zeros(1, 2, 50, 16)
LAYOUT = nn.Dense(block=16).layout(2, 50)


def broken(starts: list[list[int]], columns: list[int]) -> ops.SparseLayout:
    return ops.SparseLayout(torch.tensor(starts, dtype=torch.int32), torch.tensor(columns, dtype=torch.int32), 32)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: ops.sparse_attention(X[0], X[0], X[0], LAYOUT), ValueError, r"q is torch.float32 \(2, 50, 16\), wanted"),
        (lambda: ops.sparse_attention(X, X[:, :1], X, LAYOUT), ValueError, r"v is torch.float32 \(1, 2, 50, 16\)"),
        (lambda: ops.sparse_attention(X, X[..., :8], X, LAYOUT), ValueError, r"k is torch.float32 \(1, 2, 50, 8\)"),
        (lambda: ops.sparse_attention(X[:, :1], X, X, LAYOUT), ValueError, "q has 1 heads of 50 positions and k 2 of 50"),
        (lambda: ops.sparse_attention(X, *[X[:, :, :20]] * 2, LAYOUT), ValueError, "q has 2 heads of 50 positions and k 2 of 20"),
        (lambda: ops.sparse_attention(X, X, X, LAYOUT, first=1), ValueError, "first is 1, wanted 0 to 0"),
        (lambda: ops.sparse_attention(X, X, X, LAYOUT, dropout=1.0), ValueError, "dropout is 1, wanted at least 0 and less"),
        (lambda: ops.sparse_attention(X, X, X, LAYOUT, dropout=0.5, seed=torch.zeros(1)), ValueError, "seed is float32, wanted"),
        (lambda: ops.sparse_attention(X, X, X, LAYOUT, dropout=0.5, seed=torch.zeros(2).long()), ValueError, "seed has 2 numbers"),
        (lambda: ops.sparse_attention(X, X, X.bfloat16(), LAYOUT), ValueError, "v is torch.bfloat16"),
        (lambda: ops.sparse_attention(X.int(), X.int(), X.int(), LAYOUT), ValueError, "q is int32, wanted float32"),
        (lambda: ops.sparse_attention(X.to("meta"), X, X, LAYOUT), ValueError, "q is on meta, wanted cpu"),
        (lambda: ops.sparse_attention(X, X, X, "all"), TypeError, "layout is a str, wanted"),  # type: ignore[arg-type]
        (lambda: ops.sparse_attention(X[:, :, :16], *[X[:, :, :16]] * 2, LAYOUT), ValueError, "starts has 5 numbers, wanted 2"),
        (lambda: ops.sparse_attention(X, X, X, ops.SparseLayout.from_mask(torch.ones(3, 4, 4), 16)), ValueError,
         "the layout has 3 heads of 4 blocks, wanted 1 or 2 heads of 4"),
        (lambda: ops.sparse_attention(X, X, X, LAYOUT, scale=math.inf), ValueError, "scale is inf, wanted a finite"),
        (lambda: ops.sparse_attention(X, X, X, LAYOUT, scale="1"), TypeError, "scale is '1', wanted a number"),  # type: ignore[arg-type]
        (lambda: ops.sparse_attention(X, X, X, LAYOUT, key_mask=torch.ones(1, 50)), ValueError,
         r"key_mask is torch.float32 \(1, 50\), wanted torch.bool \(1, 50\)"),
        (lambda: ops.sparse_attention(*[torch.zeros(1, 1, 16, 513)] * 3, LAYOUT), ValueError, "dim is 513, wanted 1 to 512"),
        (lambda: ops.sparse_attention(X, X, X, broken([[0, 1, 0]], [0])), ValueError, r"starts\[2\] is 0 after 1"),
        (lambda: ops.sparse_attention(X, X, X, broken([[1, 1, 1]], [0])), ValueError, r"starts\[0\] is 1 after 0"),
        (lambda: ops.sparse_attention(X, X, X, broken([[0, 1, 1]], [0, 1])), ValueError, "starts end with 1, wanted 2"),
        (lambda: ops.sparse_attention(X, X, X, broken([[0, 1, 2]], [0, 2])), ValueError, r"columns\[1\] is 2, wanted"),
        (lambda: ops.sparse_attention(X, X, X, broken([[0, 2, 2]], [1, 0])), ValueError, r"columns\[1\] is 0, wanted more than 1"),
        (lambda: ops.SparseLayout.from_mask(torch.ones(2, 3), 16), ValueError, r"mask has shape \(1, 2, 3\), wanted"),
        (lambda: ops.SparseLayout.from_mask(torch.ones(2, 2), 48), ValueError, "block is 48, wanted 16, 32, 64 or 128"),
        (lambda: ops.SparseLayout(torch.zeros(1, 2), torch.zeros(0).int(), 16), ValueError, "starts is torch.float32"),
        (lambda: nn.Local(block=8), ValueError, "zeropp.nn.Local: block is 8, wanted"),
        (lambda: nn.Local(window=0), ValueError, "window is 0, wanted a whole number of at least 1"),
        (lambda: nn.Fixed(window=2, patterns=3), ValueError, "3 patterns of 1 global blocks do not fit a window of 2"),
        (lambda: nn.Variable(windows=()), ValueError, "windows is empty"),
        (lambda: nn.Longformer(global_blocks=(-1,)), ValueError, r"global_blocks is \(-1,\), wanted a tuple"),
        (lambda: nn.Local().layout(0, 5), ValueError, "heads is 0 and seq 5"),
        (lambda: nn.SparseAttention("local"), TypeError, "pattern is a str"),  # type: ignore[arg-type]
        (lambda: nn.SparseAttention(nn.Local())(X[0], X, X), ValueError, r"q has shape \(2, 50, 16\)"),
    ],
)  # fmt: skip
def test_misuse_is_refused(call: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()


def test_torch_sees_the_operators() -> None:
    z, check_op = torch.ops.zeropp, torch.library.opcheck
    q, k, v, do = (t.requires_grad_() for t in random_qkv(2, 4, 40, 16, torch.float32, 0, group=2))
    for keys, drop in ((torch.empty(0, dtype=torch.bool), 0.0), (torch.rand(2, 40) < 0.5, 0.5)):
        seed = torch.ones(1 if drop else 0, dtype=torch.int64)
        rest = (keys, LAYOUT_40.starts, LAYOUT_40.columns, seed, 4, 2, 40, 0, 40, 16, 16, 0.25, True, drop)
        check_op(z.sparse_attention.default, (q, k, v, *rest))
        out, lse = z.sparse_attention.default(q.detach(), k.detach(), v.detach(), *rest)
        plain = [t.detach() for t in (do, q, k, v)]
        check_op(z.sparse_attention_backward.default, (*plain, out.view_as(q), lse, *rest))


LAYOUT_40 = nn.Local(block=16).layout(2, 40)


def test_one_graph_under_compile() -> None:
    module = nn.SparseAttention(nn.BigBird(block=16))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for seq in (100, 130, 150):  # the second length makes sizes symbolic
        leaves = [t.requires_grad_() for t in random_qkv(1, 2, seq, 16, torch.float32, seq)[:3]]
        twins = [t.detach().clone().requires_grad_() for t in leaves]
        y, z = module(*leaves), compiled(*twins)
        assert torch.equal(y, z)
        y.square().sum().backward()
        z.square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, twins, strict=True))  # type: ignore[arg-type]


def test_dropout_is_in_the_graph() -> None:
    q, k, v, _ = random_qkv(1, 2, 70, 16, torch.float32, 1)
    layout = nn.Local(block=16).layout(2, 70)
    compiled = torch.compile(
        lambda: ops.sparse_attention(q, k, v, layout, dropout=0.5), fullgraph=True, backend="aot_eager"
    )
    results = []
    for call in (compiled, lambda: ops.sparse_attention(q, k, v, layout, dropout=0.5)):
        torch.manual_seed(2)
        results.append(call())
    assert torch.equal(*results)


def test_a_module_shows_its_pattern() -> None:
    assert zeropp.nn is nn and repr(nn.SparseAttention(nn.Local())).startswith("SparseAttention(Local(block=64")
