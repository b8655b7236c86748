# SPDX-License-Identifier: Apache-2.0
"""8-bit floats: every code, the reference, torch's own conversion, and the error bound over any data.

The bound. u = 2^-24, s the scale that was stored, y = x (1/s) as computed, off by 2 u |x / s|. The nearest code is within
2^-4 |y| (e4m3; e5m2 2^-3 |y|) where normal, 2^-10 (2^-17) where not. s may be short by u, so y may pass the greatest code by
3 u and is held to it. value = code s is off by u |value|, where that is subnormal by 2^-150. Together, to first order,
max(2^-4 |x|, 2^-10 s) + 3.5 u |x|: the header says 4 u |x|. 16-bit out: half an ulp of the value more.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import fp8 as reference
from torch import Tensor
from zeropp import ops

U = 2.0**-24
QUIET = settings(deadline=None, max_examples=40)
FORMATS = ["e4m3", "e5m2"]
BLOCKS = st.integers(1, 20).map(lambda k: 16 * k)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROUND = {torch.float32: (0.0, 0.0), torch.bfloat16: (2.0**-8, 2.0**-134), torch.float16: (2.0**-11, 2.0**-25)}


def allowed(x: Tensor, q: ops.Fp8) -> Tensor:
    relative, least = (2.0**-4, 2.0**-10) if q.format == "e4m3" else (2.0**-3, 2.0**-17)
    scales = q.scales.double().repeat_interleave(q.block_elems)[: x.numel()]
    return torch.maximum(x.double().abs() * relative, scales * least) + 4 * U * x.double().abs() + 2.0**-149


def check(x: Tensor, form: str, block: int) -> None:
    q = ops.fp8_quantise(x, format=form, block_elems=block)
    y = q.dequantise()
    assert bool(((y.double() - x.double()).abs() <= allowed(x, q)).all())
    codes, scales = reference.quantise(x, form, block)
    assert q.codes.view(torch.uint8).tolist() == codes and torch.equal(q.scales, scales)


@pytest.mark.parametrize("form", FORMATS)
def test_every_code_means_what_the_paper_says(form: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for scale in (1.0, 0.37):
        q = ops.Fp8(codes=codes, scales=torch.full((16,), scale), format=form, block_elems=16)
        want = torch.tensor([reference.value(code, form) for code in range(256)]) * scale
        assert torch.equal(q.dequantise().nan_to_num(nan=-1.5), want.nan_to_num(nan=-1.5))
    torchs = codes.view(torch.float8_e4m3fn if form == "e4m3" else torch.float8_e5m2).float()
    ours = ops.Fp8(codes=codes, scales=torch.ones(16), format=form, block_elems=16).dequantise()
    assert torch.equal(ours.nan_to_num(nan=-1.5), torchs.nan_to_num(nan=-1.5))


@pytest.mark.parametrize("form", FORMATS)
def test_codes_are_torchs_over_the_whole_range(form: str) -> None:
    """Scale 1 (a block that holds the greatest): every sign, exponent, tie and near-tie, against torch's conversion."""
    steps = (
        torch.arange(0, 1 << 16, dtype=torch.int32) << 15
    )  # upper half of the bits of positive floats, ties included
    x = steps.view(torch.float32)
    near = torch.cat([x, (steps + 1).view(torch.float32), (steps - 1).clamp(min=0).view(torch.float32)])
    x = near[near <= reference.GREATEST[form]]
    x = torch.cat([x, -x, x[:5]])
    x = torch.cat([torch.tensor([reference.GREATEST[form]]), x])
    q = ops.fp8_quantise(x, format=form, block_elems=16 * -(-x.numel() // 16))
    assert q.scales.tolist() == [1.0]
    assert torch.equal(q.codes.view(torch.uint8), x.to(q.codes.dtype).view(torch.uint8))


@pytest.mark.parametrize("form", FORMATS)
@QUIET
@given(data=st.data(), block=BLOCKS)
def test_error_bound_over_any_values(form: str, data: st.DataObject, block: int) -> None:
    few = data.draw(st.lists(FINITE, min_size=1, max_size=12))
    check(torch.tensor(data.draw(st.lists(st.sampled_from(few), min_size=1, max_size=80))), form, block)


@pytest.mark.parametrize("form", FORMATS)
@QUIET
@given(elems=st.integers(0, 700), seed=st.integers(0, 99), block=BLOCKS, exponent=st.integers(-145, 100),
       offset=st.integers(0, 17))  # fmt: skip
def test_error_bound_over_any_length(form: str, elems: int, seed: int, block: int, exponent: int, offset: int) -> None:
    x = torch.randn(elems + offset, generator=torch.Generator().manual_seed(seed)).double() * 2.0**exponent
    check(x.float()[offset:], form, block)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@QUIET
@given(elems=st.integers(1, 4097), seed=st.integers(0, 99), block=BLOCKS)
def test_every_kind_in_and_out(form: str, dtype: torch.dtype, elems: int, seed: int, block: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(elems, generator=draw).to(dtype)
    q = ops.fp8_quantise(x, format=form, block_elems=block)
    wide = ops.fp8_quantise(x.float(), format=form, block_elems=block)
    assert torch.equal(q.codes.view(torch.uint8), wide.codes.view(torch.uint8)) and torch.equal(q.scales, wide.scales)
    y = q.dequantise(dtype)
    assert torch.equal(y, q.dequantise().to(dtype))
    off, tiny = ROUND[dtype]
    assert bool(((y.double() - x.double()).abs() <= allowed(x, q) + off * y.double().abs() + tiny).all())
    before = torch.randn(elems, generator=draw).to(dtype)
    total = before.clone()
    ops.fp8_dequantise_(q, total, accumulate=True)
    assert torch.equal(total, (before.float() + q.dequantise()).to(dtype))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 17, 33])
def test_what_is_not_finite_is_not_hidden(form: str, bad: float, at: int) -> None:
    x = torch.ones(34)
    x[at] = bad
    y = ops.fp8_quantise(x, format=form, block_elems=16).dequantise()
    block = torch.arange(34) // 16 == at // 16
    assert bool(y[block].isnan().all()) and bool((y[~block] == 1).all())


def test_threads_do_not_show() -> None:
    x, before = torch.randn(300_001), torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        q = ops.fp8_quantise(x, block_elems=48)
        results.append((q.codes.view(torch.uint8), q.scales, q.dequantise()))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


ROOM = ops.Fp8.empty(40, block_elems=16)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: ops.fp8_quantise(torch.zeros(40), format="e3m4"), ValueError, "format is 'e3m4', wanted 'e4m3' or"),
        (lambda: ops.fp8_quantise(torch.zeros(40), block_elems=24), ValueError, "block_elems is 24, wanted a multiple"),
        (lambda: ops.fp8_quantise(torch.zeros(40).double()), ValueError, "src is float64, wanted float32"),
        (lambda: ops.fp8_quantise(torch.zeros(8, 5).t()), ValueError, "src is not contiguous"),
        (lambda: ops.fp8_quantise([0.0]), TypeError, "src is a list"),  # type: ignore[arg-type]
        (lambda: ops.fp8_quantise(torch.zeros(40, requires_grad=True)), ValueError, "src requires grad"),
        (lambda: ops.fp8_quantise_(torch.zeros(41), ROOM), ValueError, "codes has 40 elements, wanted 41"),
        (lambda: ops.fp8_quantise_(torch.zeros(40), torch.zeros(40)), TypeError, "to is a Tensor, wanted a zeropp.ops.Fp8"),  # type: ignore[arg-type]
        (lambda: ops.fp8_quantise_(ROOM.scales, ops.Fp8.empty(3, block_elems=16)), None, ""),
        (lambda: ops.fp8_dequantise_(ROOM, torch.zeros(39)), ValueError, "codes has 40 elements, wanted 39"),
        (lambda: ops.fp8_dequantise_(ops.Fp8(codes=ROOM.codes, scales=ROOM.scales[:2], format="e4m3", block_elems=16),
                                     torch.zeros(40)), ValueError, "scales has 2 elements, wanted 3"),
        (lambda: ops.fp8_dequantise_(ops.Fp8(codes=ROOM.codes, scales=ROOM.scales, format="e5m2", block_elems=16),
                                     torch.zeros(40)), ValueError, "source.codes is torch.float8_e4m3fn, wanted"),
        (lambda: ops.fp8_dequantise_(ops.Fp8(codes=ROOM.codes, scales=ROOM.scales, format="e4m3", block_elems=16),
                                     ROOM.scales), ValueError, "wanted 3"),
        (lambda: ops.Fp8.empty(-1), ValueError, "elems is -1"),
    ],
)  # fmt: skip
def test_misuse_is_refused(call: Any, kind: type[Exception] | None, sentence: str) -> None:
    if kind is None:
        call()
        return
    with pytest.raises(kind, match=sentence):
        call()


def test_shared_memory_is_refused() -> None:
    memory = torch.zeros(40, dtype=torch.float32)
    shared = ops.Fp8(codes=memory.view(torch.uint8)[:40], scales=torch.zeros(3), format="e4m3", block_elems=16)
    with pytest.raises(ValueError, match="share memory"):
        ops.fp8_quantise_(memory, shared)


def test_torch_sees_the_operators() -> None:
    z, check_op = torch.ops.zeropp, torch.library.opcheck
    codes, scales = torch.zeros(40, dtype=torch.uint8), torch.zeros(3)
    for form in (0, 1):
        check_op(z.fp8_quantise_.default, (torch.randn(40), codes, scales, form, 16))
        check_op(z.fp8_dequantise_.default, (codes, scales, torch.zeros(40), form, 16, True))


def test_one_graph_under_compile() -> None:
    def there_and_back(x: Tensor) -> Tensor:
        return ops.fp8_quantise(x, block_elems=16).dequantise() + 1

    x = torch.randn(100)
    assert torch.equal(torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x), there_and_back(x))
