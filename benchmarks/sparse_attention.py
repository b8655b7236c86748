# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention, forward and backward, against torch's dense attention without a mask.

Dense attention does 1 / density times the work, so 1 / density is what an equally good kernel would show. Time linear in
the number of blocks shows in the rows whose peer is ours with twice the blocks: 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import Run, alternate, timed
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

CLAIM = "Block-sparse attention: >= 2x dense attention at 25% of the blocks, sequence 4K; time linear in blocks."
NEEDS = ()
SEQ, HEADS, DIM = 4096, 4, 64


def exact_layout(blocks: int, density: float, block: int) -> Any:
    """Each row has as many blocks as the next: density times all, drawn at random."""
    import zeropp

    order = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)).argsort(1)
    return zeropp.ops.SparseLayout.from_mask(order.argsort(1) < round(blocks * density), block)


def step(attention: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> None:
    """Forward and backward; gradients are made anew, as in training with set_to_none."""
    for leaf in leaves:
        leaf.grad = None
    attention().backward(grad)


def contender(attend: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> Callable[[], None]:
    return lambda: step(lambda: attend(*leaves), leaves, grad)


def check(bench: Run) -> None:
    """Equal to torch's attention with the same mask, at a size that its mask allows; bound: tests/ops."""
    import zeropp

    leaves = [torch.randn(1, 2, 500, DIM, requires_grad=True) for _ in range(3)]
    layout = exact_layout(8, 0.5, 64)
    mine = zeropp.ops.sparse_attention(*leaves, layout)
    theirs = scaled_dot_product_attention(*leaves, attn_mask=layout.dense_mask(500))
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (mine, theirs)]
    off = max((a - b).abs().max().item() for a, b in zip((mine, *grads[0]), (theirs, *grads[1]), strict=True))
    bench.check(off < 1e-4, f"differs from masked dense attention by {off}")


def run(bench: Run) -> None:
    torch.manual_seed(0)
    check(bench)
    for threads in (2,) if bench.quick else (1, 2):
        torch.set_num_threads(threads)
        for block in (64,) if bench.quick else (16, 32, 64, 128):
            against_dense(bench, threads, block)
        for name in ("BigBird", "Longformer", "Fixed") if not bench.quick else ():
            against_dense(bench, threads, 64, name)


def leaves_of(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    shape = (1, HEADS, SEQ, DIM)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)], torch.randn(shape, dtype=dtype)


def against_dense(bench: Run, threads: int, block: int, pattern: str | None = None) -> None:
    """At 25% of the blocks, with an eighth and a half beside it; or a pattern of zeropp.nn."""
    import zeropp

    leaves, grad = leaves_of()
    unit = f"{threads} thread{'s' * (threads > 1)}"
    contenders: dict[str, Callable[[], Any]] = {
        "torch dense SDPA": contender(scaled_dot_product_attention, leaves, grad)
    }
    if pattern is None:
        layouts = {f"ours {d:.1%}": exact_layout(SEQ // block, d, block) for d in (0.125, 0.25, 0.5)}
        ours, case = "ours 25.0%", f"25% of blocks of {block}, {HEADS} heads, {SEQ} x {DIM}, {unit}"
    else:
        layout = getattr(zeropp.nn, pattern)(block=block).layout(HEADS, SEQ)
        ours, layouts = pattern, {pattern: layout}
        case = f"{pattern}, {layout.density:.1%} of blocks of {block}, {HEADS} heads, {SEQ} x {DIM}, {unit}"
    for name, layout in layouts.items():
        contenders[name] = contender(
            lambda q, k, v, layout=layout: zeropp.ops.sparse_attention(q, k, v, layout), leaves, grad
        )
    samples = alternate({name: timed(call) for name, call in contenders.items()}, rounds=3 if bench.quick else 7)
    bench.compare(case, samples, ours=ours, peers=["torch dense SDPA"], unit="ms")
    if pattern is None:
        for less, more in (("ours 12.5%", ours), (ours, "ours 50.0%")):  # linear: 2
            bench.compare(f"{case}: {less} against {more}", samples, ours=less, peers=[more], unit="ms")
