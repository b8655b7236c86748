# SPDX-License-Identifier: Apache-2.0
"""One-bit compression: error feedback sums to the truth, the reference, numpy's bits, formats, misuse.

Rounding. u = 2^-24. c = x + error is off by u |c|, error' = c - value by u |error'|; values are sent exactly. So after
any number of steps, per element,

    | sum of values + last error - sum of x |  <=  u * sum over steps of (|c| + |error'|)

The scale is a mean of fp32 magnitudes: at most 256 additions in a lane and 4 in the tree of a block, each u relative to
a sum of positive terms, and one rounding of the quotient: 262 u relative.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import onebit as reference
from torch import Tensor
from zeropp.ops import OneBit

U = 2.0**-24
QUIET = settings(deadline=None, max_examples=40)
CHUNKS = st.sampled_from([16, 48, 256, 4096, 4112, 1 << 20])


def draw(elems: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(elems, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@QUIET
@given(elems=st.integers(0, 9000), chunk=CHUNKS, seed=st.integers(0, 99), offset=st.integers(0, 17))
def test_one_step_follows_the_reference(dtype: torch.dtype, elems: int, chunk: int, seed: int, offset: int) -> None:
    x = draw(elems + offset, seed).to(dtype)[offset:]
    error = draw(elems + offset, seed + 1, 0.1)[offset:]
    before, to = error.clone(), OneBit.empty(elems, chunk_elems=chunk)
    zeropp.ops.onebit_compress_(x, error, to)
    value, _, c = reference.compress(x, before, chunk)
    c32 = x.float() + before
    assert torch.equal(torch.from_numpy(np.packbits((c32 >= 0).numpy(), bitorder="little")), to.bits)
    got = to.decode()
    unsure = c.abs() <= U * c.abs().max() if elems else c.abs() > 0  # the sign of a sum that rounds to zero
    assert bool((((got.double() - value).abs() <= 263 * U * value.abs()) | unsure).all())
    assert torch.equal(error, c32 - got)


@QUIET
@given(elems=st.integers(1, 2000), chunk=CHUNKS, seed=st.integers(0, 99), steps=st.integers(1, 30),
       wild=st.lists(st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100), max_size=5))  # fmt: skip
def test_error_feedback_sums_to_the_truth(elems: int, chunk: int, seed: int, steps: int, wild: list[float]) -> None:
    error, to = torch.zeros(elems), OneBit.empty(elems, chunk_elems=chunk)
    sent, truth, allowed = (torch.zeros(elems, dtype=torch.float64) for _ in range(3))
    for t in range(steps):
        x = draw(elems, seed + t)
        x[: len(wild)] = torch.tensor(wild[:elems])
        c = x + error
        zeropp.ops.onebit_compress_(x, error, to)
        sent += to.decode()
        truth += x
        allowed += U * (c.abs().double() + error.abs().double())
    # the sums of this test itself are in double: 2^-52 a step
    slack = 2.0**-50 * steps * (truth.abs() + sent.abs() + allowed / U)
    assert bool(((sent + error - truth).abs() <= allowed + slack).all())


@QUIET
@given(elems=st.integers(1, 5000), chunk=CHUNKS, ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_workers_and_server_together_lose_nothing(elems: int, chunk: int, ranks: int, seed: int) -> None:
    """The received values and the errors of worker and server add up to the mean gradient summed over steps."""
    errors = [torch.zeros(elems) for _ in range(ranks)]
    sources = [OneBit.empty(elems, chunk_elems=chunk) for _ in range(ranks)]
    owed, to = torch.zeros(elems), OneBit.empty(elems, chunk_elems=chunk)
    received, truth, allowed = (torch.zeros(elems, dtype=torch.float64) for _ in range(3))
    for t in range(5):
        mean, magnitudes = torch.zeros(elems), torch.zeros(elems, dtype=torch.float64)
        for rank in range(ranks):
            x = draw(elems, 1000 * seed + 10 * t + rank)
            c = x + errors[rank]
            zeropp.ops.onebit_compress_(x, errors[rank], sources[rank])
            zeropp.ops.onebit_decode_(sources[rank], mean, accumulate=rank > 0)
            truth += x.double() / ranks
            allowed += U * (c.abs().double() + errors[rank].abs().double()) / ranks
            magnitudes += sources[rank].decode().abs().double()
        mean *= 1 / ranks
        plain_owed, plain = owed.clone(), OneBit.empty(elems, chunk_elems=chunk)
        zeropp.ops.onebit_compress_(mean, plain_owed, plain)
        before = owed.clone()
        zeropp.ops.onebit_reduce_(sources, owed, to, factor=1 / ranks)
        assert torch.equal(to.bits, plain.bits) and torch.equal(to.scales, plain.scales)
        assert torch.equal(owed, plain_owed), "fused differs from decode, add, compress"
        received += to.decode()
        # additions of `ranks` values, the factor and its rounding, then c and the error
        allowed += U * (ranks + 2) * magnitudes / ranks + U * ((mean + before).abs().double() + owed.abs().double())
    still = owed.double() + sum(error.double() for error in errors) / ranks
    assert bool(((received + still - truth).abs() <= allowed * 1.001 + 1e-12).all())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3e38])
def test_an_overflow_is_seen_and_leaves_the_error(bad: float) -> None:
    x, error, to = torch.ones(100), torch.full((100,), 0.5), OneBit.empty(100, chunk_elems=32)
    x[40:42] = bad  # two of 3e38 overflow their chunk's sum
    before = error.clone()
    zeropp.ops.onebit_compress_(x, error, to)
    assert to.scales.isnan().tolist() == [False, True, False, False]
    assert torch.equal(error[32:64], before[32:64]) and bool((to.decode()[32:64].isnan()).all())
    owed, out = torch.zeros(100), OneBit.empty(100, chunk_elems=32)
    zeropp.ops.onebit_reduce_([to, to], owed, out, factor=0.5)
    assert out.scales.isnan().tolist() == [False, True, False, False]
    assert bool((owed[32:64] == 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_out_rounds_once(dtype: torch.dtype) -> None:
    x, to = draw(1001, 3), OneBit.empty(1001, chunk_elems=64)
    zeropp.ops.onebit_compress_(x, torch.zeros(1001), to)
    assert torch.equal(to.decode(dtype), to.decode().to(dtype))
    total = draw(1001, 4).to(dtype)
    want = (total.float() + to.decode()).to(dtype)
    zeropp.ops.onebit_decode_(to, total, accumulate=True)
    assert torch.equal(total, want)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_show(threads: int) -> None:
    x, error, to = draw(300_001, 0), draw(300_001, 1, 0.1), OneBit.empty(300_001, chunk_elems=4096)
    want_error, parts = error.clone(), []
    for a, e in zip(x.split(40 * 4096), want_error.split(40 * 4096), strict=True):
        parts.append(OneBit.empty(a.numel()))
        zeropp.ops.onebit_compress_(a, e, parts[-1])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        zeropp.ops.onebit_compress_(x, error, to)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(error, want_error) and torch.equal(to.bits, torch.cat([part.bits for part in parts]))
    assert torch.equal(to.scales, torch.cat([part.scales for part in parts]))


MISUSE: dict[str, tuple[Any, type[Exception], str]] = {
    "chunk": (
        lambda x, e, o: OneBit.empty(100, chunk_elems=20), ValueError,
        "chunk_elems is 20, wanted a multiple of 16, at least 16",
    ),
    "dtype": (
        lambda x, e, o: zeropp.ops.onebit_compress_(x.double(), e, o), ValueError,
        "onebit_compress_: src is float64, wanted float32, bfloat16 or float16",
    ),
    "error dtype": (
        lambda x, e, o: zeropp.ops.onebit_compress_(x, e.half(), o), ValueError, "error is float16, wanted float32",
    ),
    "error elements": (
        lambda x, e, o: zeropp.ops.onebit_compress_(x, e[:99], o), ValueError,
        "error has 99 elements, wanted 100: as many as src has",
    ),
    "room": (
        lambda x, e, o: zeropp.ops.onebit_compress_(x, e, OneBit.empty(50)), ValueError,
        "bits has 7 elements, wanted 13: 100 elements, 8 a byte",
    ),
    "error is the source": (
        lambda x, e, o: zeropp.ops.onebit_compress_(x, x, o), ValueError, r"error\[0\] and src\[0\] share memory",
    ),
    "grad": (lambda x, e, o: zeropp.ops.onebit_compress_(x.requires_grad_(), e, o), ValueError, "src requires grad"),
    "no OneBit": (lambda x, e, o: zeropp.ops.onebit_decode_(x, x), TypeError, "source is a Tensor, wanted a OneBit"),
    "no sources": (
        lambda x, e, o: zeropp.ops.onebit_reduce_([], e, o), ValueError, "wanted as many of each, at least 1",
    ),
    "other chunks": (
        lambda x, e, o: zeropp.ops.onebit_reduce_([OneBit.empty(100, chunk_elems=16)], e, o), ValueError,
        r"sources\[0\] has chunks of 16, wanted 4096 as to has",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_refused_and_writes_nothing(case: str) -> None:
    call, kind, sentence = MISUSE[case]
    x, error, to = torch.ones(100), torch.ones(100), OneBit.empty(100)
    to.bits.fill_(1), to.scales.fill_(1)
    with pytest.raises(kind, match=sentence):
        call(x, error, to)
    assert all(bool((tensor == 1).all()) for tensor in (x, error, to.bits, to.scales))


def test_torch_sees_the_operators() -> None:
    x, error, ops = torch.randn(101), torch.zeros(101), torch.ops.zeropp
    o, to = OneBit.empty(101, chunk_elems=16), OneBit.empty(101, chunk_elems=16)
    zeropp.ops.onebit_compress_(x, error, o)
    to.bits.zero_(), to.scales.zero_()
    torch.library.opcheck(ops.onebit_compress_.default, (x, error, o.bits, o.scales, 16))
    torch.library.opcheck(ops.onebit_decode_.default, (o.bits, o.scales, torch.empty(101).bfloat16(), 16, False))
    torch.library.opcheck(
        ops.onebit_reduce_.default, ([o.bits], [o.scales], torch.zeros(101), to.bits, to.scales, 16, 0.5)
    )


def test_one_graph_under_compile() -> None:
    def there_and_back(x: Tensor, error: Tensor) -> Tensor:
        to = OneBit.empty(200, chunk_elems=64)
        zeropp.ops.onebit_compress_(x * 2, error, to)
        return to.decode() + 1

    x, error, twin = torch.randn(200), torch.zeros(200), torch.zeros(200)
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, error), there_and_back(x, twin)) and torch.equal(error, twin)
