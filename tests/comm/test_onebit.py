# SPDX-License-Identifier: Apache-2.0
"""The compressed all-reduce through zeropp.comm against the paper's formula in float64, and its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
import zeropp.comm
from launch import run_ranks
from ranks import on_ranks
from reference import onebit

RANKS, CALLS = 3, 4
SHAPES = [(1000, 48), (4096, 4096), (5, 16), (0, 16)]


def inputs(rank: int, call: int, elems: int) -> torch.Tensor:
    return torch.randn(elems, generator=torch.Generator().manual_seed(100 * call + rank), device="cpu").mul_(rank + 1)


class Reference:
    """The computation of all ranks, in one process and in float64."""

    def __init__(self, elems: int, chunk_elems: int) -> None:
        share = -(-elems // RANKS)
        self.slice_elems = -(-share // 16) * 16
        self.chunk_elems = chunk_elems
        self.worker = [torch.zeros(elems, dtype=torch.float64) for _ in range(RANKS)]
        self.server = torch.zeros(elems, dtype=torch.float64)

    def mean(self, values: list[torch.Tensor]) -> torch.Tensor:
        out = torch.zeros(values[0].numel(), dtype=torch.float64)
        for begin in range(0, out.numel(), max(1, self.slice_elems)):
            part = slice(begin, begin + self.slice_elems)
            sent = []
            for rank, value in enumerate(values):
                to, self.worker[rank][part], _ = onebit.compress(value[part], self.worker[rank][part], self.chunk_elems)
                sent.append(to)
            out[part], self.server[part], _ = onebit.server(sent, self.server[part], self.chunk_elems)
        return out


def body(rank: int, ranks: int) -> dict[str, Any]:
    dist.init_process_group("zeropp")
    answer: dict[str, Any] = {"sentences": []}
    for elems, chunk in SHAPES:
        reducer = zeropp.comm.OneBitAllReduce(elems, chunk_elems=chunk)
        reference = Reference(elems, chunk)
        for call in range(CALLS):
            before = total()
            mine = inputs(rank, call, elems)
            wanted = reference.mean([inputs(r, call, elems) for r in range(ranks)])
            seen = reducer(mine)
            # Chunks' means and the mean over ranks round in fp32; values reach a few units, errors add up over calls.
            torch.testing.assert_close(seen.double(), wanted, rtol=0, atol=1e-5)
            each_way = (ranks - 1) * reducer.message_bytes
            own = 4 * -(-reducer.length(rank) // chunk) + -(-reducer.length(rank) // 8)
            assert total() - before == (ranks - 1) * (-(-own // 4) * 4) + each_way, (total() - before, each_way)
        torch.testing.assert_close(reducer.worker_error.double(), reference.worker[rank], rtol=0, atol=1e-5)
        part = slice(reducer.begin(rank), reducer.begin(rank) + reducer.length(rank))
        torch.testing.assert_close(reducer.server_error.double(), reference.server[part], rtol=0, atol=1e-5)
    reducer = zeropp.comm.OneBitAllReduce(96, chunk_elems=16)
    reducer.reduce(inputs(rank, 0, 96), gather=False)
    half = reducer.decode_slice_(torch.ones(reducer.length(rank)), scale=0.5, accumulate=True)
    whole = zeropp.comm.OneBitAllReduce(96, chunk_elems=16)(inputs(rank, 0, 96))
    assert torch.equal(half, 1 + 0.5 * whole[reducer.begin(rank) : reducer.begin(rank) + 32])
    for wrong in (
        lambda: reducer.decode_(torch.empty(96)),
        lambda: reducer.reduce(torch.empty(95)),
        lambda: reducer.reduce(torch.empty(96, dtype=torch.float64)),
        lambda: reducer.reduce(torch.empty(96, 2)[:, 0]),
        lambda: zeropp.comm.OneBitAllReduce(96, chunk_elems=17),
    ):
        try:
            wrong()
        except ValueError as error:
            answer["sentences"].append(str(error))
    answer["values"] = whole.tolist()
    return answer


@on_ranks(3, devices=("sim-lazy",), backend="zeropp")
def test_gpus_have_the_bits_of_the_cpu() -> None:
    """Errors, values and bytes of the kernels and of the messages that go through the host."""
    for (elems, chunk), dtype in zip(
        SHAPES, (torch.float32, torch.bfloat16, torch.float16, torch.float32), strict=True
    ):
        both = [
            zeropp.comm.OneBitAllReduce(elems, chunk_elems=chunk, device=device)
            for device in ("cpu", torch.get_default_device())
        ]
        for call in range(CALLS):
            sent = []
            for reducer in both:
                before = total()
                reducer.reduce(inputs(dist.get_rank(), call, elems).to(reducer.device, dtype))
                sent.append(total() - before)
            assert sent[0] == sent[1], sent
            if call % 2:
                for reducer in both:
                    reducer.scale_(0.25)
            there, here = (reducer.decode_(torch.empty(elems, device=reducer.device)).cpu() for reducer in both)
            assert torch.equal(there, here), (elems, dtype, call)
            for name in ("worker_error", "server_error"):
                assert torch.equal(getattr(both[0], name), getattr(both[1], name).cpu()), (elems, dtype, call, name)
    with pytest.raises(ValueError, match="comm: reduce of a tensor on cpu, wanted sim"):
        both[1].reduce(torch.empty(0, device="cpu"))


def total() -> int:
    from zeropp.comm import all_traffic

    return sum(row["bytes"] for link in all_traffic().values() for row in link.values())


def test_equals_the_paper_and_moves_its_bytes() -> None:
    outcomes = run_ranks(RANKS, body, timeout=100)
    assert all(outcome.code == 0 for outcome in outcomes), "\n".join(map(str, outcomes))
    first = outcomes[0].value
    assert all(outcome.value["values"] == first["values"] for outcome in outcomes), "every rank has the same bits"
    assert first["sentences"] == [
        "comm: only my own slice was reduced (gather=False); take it with decode_slice_",
        "comm: reduce of 95 elements, wanted 96",
        "comm: reduce of torch.float64 at one bit, wanted float32, bfloat16 or float16",
        "comm: reduce of a tensor of shape (96,) with strides (2,), wanted a contiguous one",
        "comm: chunk_elems is 17, wanted a multiple of 16, at least 16",
    ]
