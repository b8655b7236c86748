# SPDX-License-Identifier: Apache-2.0
"""Random token dropping around a layer, forward and backward, against torch's index operations.

Sampling, gathering and scattering: all that random-LTD adds to a layer. torch draws with rand, topk and sort, and moves
with gather and scatter, whose index must be as large as what is moved. Results are small enough for the allocator to
keep (24 MB): fresh pages of larger ones cost both sides several times the move.
"""

from __future__ import annotations

import torch
from harness import Run, alternate, timed
from torch import Tensor

CLAIM = "Random token dropping: >= 2x torch's index operations, forward and backward."
NEEDS = ()
BATCH, SEQ, WIDTH = 4, 2048, 768


def ours(x: Tensor, keep: int) -> Tensor:
    import zeropp

    kept = zeropp.ops.token_sample(BATCH, SEQ, keep, seed=1)
    return zeropp.ops.token_scatter(x, zeropp.ops.token_gather(x, kept), kept)


def theirs(x: Tensor, keep: int) -> Tensor:
    kept = torch.rand(BATCH, SEQ).topk(keep, dim=1, sorted=False).indices.sort(1).values
    at = kept[:, :, None].expand(-1, -1, WIDTH)
    return x.scatter(1, at, x.gather(1, at))


def step(layer: object, x: Tensor, keep: int, grad: Tensor) -> None:
    x.grad = None
    layer(x, keep).backward(grad)  # type: ignore[operator]


def run(bench: Run) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(BATCH, SEQ, WIDTH, requires_grad=True), torch.randn(BATCH, SEQ, WIDTH)
    for layer in (ours, theirs):
        bench.check(torch.equal(layer(x, 100), x), "what was gathered does not come back to its place")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for keep in (SEQ // 2,) if bench.quick else (SEQ // 4, SEQ // 2, SEQ - SEQ // 8):
            contenders = {
                "ours": timed(lambda keep=keep: step(ours, x, keep, grad)),
                "torch index": timed(lambda keep=keep: step(theirs, x, keep, grad)),
            }
            samples = alternate(contenders, rounds=5 if bench.quick else 15)
            case = f"{keep} of {SEQ} tokens, {BATCH} x {WIDTH}, {threads} thread{'s' * (threads > 1)}"
            bench.compare(case, samples, ours="ours", peers=["torch index"], unit="ms")
