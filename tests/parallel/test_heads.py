# SPDX-License-Identifier: Apache-2.0
"""The exchange of heads for tokens, and attention over it, against one process on the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import of_all_ranks, on_ranks

SHAPES = {  # heads of queries, of keys and values; tokens of each rank as a share of 31 or so
    "even": (4, 2, (8, 8)),
    "uneven": (6, 1, (13, 18)),
    "odd": (5, 5, (30, 1)),
    "nothing": (3, 3, (0, 7)),
    "large": (8, 2, (700, 601)),
}


def _lengths(like: tuple[int, int], ranks: int) -> tuple[int, ...]:
    return tuple(like[rank % 2] for rank in range(ranks))


@pytest.mark.parametrize("shape", list(SHAPES))
@on_ranks(2, 3, "2 hosts")
def test_heads_are_exchanged_there_and_back(shape: str) -> None:
    import torch
    import torch.distributed as dist
    import zeropp
    from zeropp.comm.heads import Cut, key_spans, query_spans, to_heads, to_tokens

    queries, keys, like = SHAPES[shape]
    ranks, me = dist.get_world_size(), dist.get_rank()
    cut = Cut(dist.group.WORLD, _lengths(like, ranks))
    spans = query_spans(queries, ranks)
    shared = key_spans(spans, queries // keys)
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, cut.tokens, heads, width).transpose(1, 2).to(dtype)
                   for heads, width in ((queries, 8), (keys, 8), (keys, 16)))  # fmt: skip
        mine = [one[:, :, cut.slice_of(me)].clone().requires_grad_() for one in (q, k, v)]
        before = zeropp.traffic()
        wholes = to_heads(cut, mine, (spans, shared, shared))
        for whole, of_rank, one in zip(wholes, (spans, shared, shared), (q, k, v), strict=True):
            assert torch.equal(whole, one[:, slice(*of_rank[me])])
        moved = _moved(before, zeropp.traffic())
        far = cut.tokens - cut.lengths[me]
        owned = (spans[me][1] - spans[me][0]) * 8 + (shared[me][1] - shared[me][0]) * (8 + 16)
        assert moved == 2 * far * owned * dtype.itemsize  # batch 2; no head is sent twice to one rank

        back = to_tokens(cut, wholes[0], spans)
        assert torch.equal(back, mine[0])
        wholes = to_heads(cut, mine, (spans, shared, shared))
        grads = [torch.randn(one.shape, generator=torch.Generator().manual_seed(me)).to(dtype) for one in wholes]
        torch.autograd.backward(wholes, grads)
        every = of_all_ranks(grads)
        for at, (one, of_rank) in enumerate(zip(mine, (spans, shared, shared), strict=True)):
            want = torch.zeros(one.shape)
            for r in range(ranks):
                want[:, slice(*of_rank[r])] += every[r][at][:, :, cut.slice_of(me)]
            assert torch.equal(one.grad, want.to(dtype))  # one rounding of a sum in fp32, in the order of the ranks


def _moved(before: object, after: object) -> int:
    def total(traffic: object) -> int:
        return sum(rows.get("all_to_all", {}).get("bytes", 0) for rows in traffic.values())  # type: ignore[attr-defined]

    return total(after) - total(before)


@pytest.mark.parametrize("shape", list(SHAPES))
@on_ranks(2, 3, devices=("sim", "sim-lazy"), backend="simulated")
def test_a_gpu_exchanges_the_same(shape: str) -> None:
    """Kernels pack and read, with the bits of the CPU; and the host waits for nothing."""
    import importlib

    import torch
    import torch.distributed as dist
    from zeropp.comm.heads import Cut, key_spans, query_spans, to_heads, to_tokens

    queries, keys, like = SHAPES[shape]
    ranks, me = dist.get_world_size(), dist.get_rank()
    cut = Cut(dist.group.WORLD, _lengths(like, ranks))
    spans = query_spans(queries, ranks)
    shared = key_spans(spans, queries // keys)
    sim: Any = importlib.import_module("sim")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        draw = torch.Generator("cpu").manual_seed(0)
        q, k, v = (
            torch.randn(2, cut.tokens, heads, width, generator=draw, device="cpu").transpose(1, 2).to(dtype)
            for heads, width in ((queries, 8), (keys, 8), (keys, 3))
        )
        mine = [one[:, :, cut.slice_of(me)].to("sim").requires_grad_() for one in (q, k, v)]
        waits: dict[str, int] = {}
        with sim.waits_of_the_host(waits):
            wholes = to_heads(cut, mine, (spans, shared, shared))
            torch.autograd.backward(wholes, [torch.full_like(one, 0.3 + me) for one in wholes])
            back = to_tokens(cut, wholes[0], spans)
        assert not waits
        for whole, of_rank, one in zip(wholes, (spans, shared, shared), (q, k, v), strict=True):
            assert torch.equal(whole.cpu(), one[:, slice(*of_rank[me])])
        assert torch.equal(back.cpu(), mine[0].cpu())
        for one, of_rank in zip(mine, (spans, shared, shared), strict=True):
            want = torch.zeros(one.shape, device="cpu")
            for r in range(ranks):
                want[:, slice(*of_rank[r])] += torch.tensor(0.3 + r, dtype=dtype, device="cpu").float()
            assert torch.equal(
                one.grad.cpu(), want.to(dtype)
            )  # one rounding of a sum in fp32, in the order of the ranks
