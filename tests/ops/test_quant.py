# SPDX-License-Identifier: Apache-2.0
"""Block quantisation: the error bound over any data, scales and codes against the reference, formats, sums, misuse.

The bound. u = 2^-24, s the scale that was stored, L its levels (127, 7; asymmetric 127.5, 7.5), M = max |x| of a block,
first order in u.

    symmetric    code = round(x (1/s)): 1/s and the product are off by u each, |x / s| <= L (1 + u), so
                 |code - x/s| <= 1/2 + 2 L u; value = code s is off by u L s. Together s (1/2 + 3 L u); the header says
                 s (1/2 + 4 L u).
    asymmetric   x - mid is off by u |x - mid| <= u (L s + ...), then as above: s (1/2 + 4 L u). A code is clamped only
                 where rounding of half = (max - min) / 2 and of mid lets |x - mid| pass L s: by u L s + u M at most;
                 the value's addition is off by u (M + s). Together at most s (1/2 + 8 L u) + 6 u M.
    16-bit out   half an ulp of the value more: 2^-8 (bf16) or 2^-11 (fp16, 2^-25 where subnormal) of it
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import quantise as reference
from torch import Tensor
from zeropp.ops import Quantised

U = 2.0**-24
QUIET = settings(deadline=None, max_examples=60)
FORMATS = [(bits, asymmetric) for bits in (8, 4) for asymmetric in (False, True)]
BLOCKS = st.integers(1, 40).map(lambda k: 16 * k)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126)


def allowed(x: Tensor, q: Quantised) -> Tensor:
    """The bound, per element."""
    half = q.mids.numel() > 0
    levels = (127 if q.bits == 8 else 7) + 0.5 * half
    scales = q.scales.double().repeat_interleave(q.block_elems)[: x.numel()]
    if not half:
        return scales * (0.5 + 4 * levels * U)
    top = torch.cat([block.abs().max().expand(block.numel()) for block in reference.blocks(x, q.block_elems)])
    return scales * (0.5 + 8 * levels * U) + 6 * U * top


@pytest.mark.parametrize(("bits", "asymmetric"), FORMATS)
@QUIET
@given(data=st.data(), block=BLOCKS)
def test_error_bound_over_any_values(bits: int, asymmetric: bool, data: st.DataObject, block: int) -> None:
    """Subnormals, huge values, equal values, near-ties: whatever hypothesis finds."""
    few = data.draw(st.lists(FINITE, min_size=1, max_size=12))
    picks = data.draw(st.lists(st.sampled_from(few), min_size=1, max_size=100))
    check_bound(torch.tensor(picks), bits, asymmetric, block)


@pytest.mark.parametrize(("bits", "asymmetric"), FORMATS)
@QUIET
@given(elems=st.integers(1, 4097), seed=st.integers(0, 99), block=BLOCKS, shift=st.sampled_from([0.0, 3.0, -1e6]),
       exponent=st.integers(-140, 100), offset=st.integers(0, 17))  # fmt: skip
def test_error_bound_over_any_length(
    bits: int, asymmetric: bool, elems: int, seed: int, block: int, shift: float, exponent: int, offset: int
) -> None:
    x = (torch.randn(elems + offset, generator=torch.Generator().manual_seed(seed)) + shift).double() * 2.0**exponent
    check_bound(x.float()[offset:], bits, asymmetric, block)


def check_bound(x: Tensor, bits: int, asymmetric: bool, block: int) -> None:
    q = zeropp.ops.quantise(x, bits=bits, block_elems=block, asymmetric=asymmetric)
    error = (x.double() - q.dequantise().double()).abs()
    assert bool((error <= allowed(x, q) * (1 + 1e-9)).all()), (error - allowed(x, q)).max()
    for k, part in enumerate(reference.blocks(x, block)):
        scale, mid = reference.scale_and_mid(part, bits, asymmetric)
        top = part.abs().max().item()
        # asymmetric: max/2 - min/2 is a difference of fp32 numbers, exact but for one rounding; halving a subnormal
        # rounds too (2^-149); then one division
        assert q.scales[k].item() == pytest.approx(max(scale, 2.0**-126), rel=4 * U, abs=2.0**-149)
        if asymmetric:
            assert abs(q.mids[k].item() - mid) <= U * top + 2.0**-148


@pytest.mark.parametrize(("bits", "asymmetric"), FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@QUIET
@given(elems=st.integers(0, 1000), seed=st.integers(0, 99))
def test_16_bit_in_and_out(bits: int, asymmetric: bool, dtype: torch.dtype, elems: int, seed: int) -> None:
    """Reading is exact; writing rounds once: the same bits as through fp32."""
    x = torch.randn(elems, generator=torch.Generator().manual_seed(seed)).to(dtype)
    q = zeropp.ops.quantise(x, bits=bits, block_elems=48, asymmetric=asymmetric)
    wide = zeropp.ops.quantise(x.float(), bits=bits, block_elems=48, asymmetric=asymmetric)
    assert torch.equal(q.codes, wide.codes) and torch.equal(q.scales, wide.scales) and torch.equal(q.mids, wide.mids)
    assert torch.equal(q.dequantise(dtype), wide.dequantise().to(dtype))
    total = torch.randn(elems, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    want = (total.float() + wide.dequantise()).to(dtype)
    zeropp.ops.dequantise_(q, total, accumulate=True)
    assert torch.equal(total, want)


@pytest.mark.parametrize(("bits", "asymmetric"), FORMATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 2.0**127])
def test_what_is_not_finite_spoils_its_block_and_no_other(bits: int, asymmetric: bool, bad: float) -> None:
    x = torch.randn(100)
    x[37] = bad
    q = zeropp.ops.quantise(x, bits=bits, block_elems=32, asymmetric=asymmetric)
    assert q.scales.isnan().tolist() == [False, True, False, False]
    value = q.dequantise()
    assert bool(value[32:64].isnan().all()) and bool(value[:32].isfinite().all()) and bool(value[64:].isfinite().all())
    total = torch.zeros(100)
    zeropp.ops.quant_sum_([zeropp.ops.quantise(torch.randn(100), bits=bits, block_elems=32, asymmetric=asymmetric), q],
                          total)  # fmt: skip
    assert int(total.isnan().sum()) == 32, "an overflow on one rank must be seen in the sum"


def test_zeros_stay_zeros_and_extremes_are_kept() -> None:
    for bits, asymmetric in FORMATS:
        q = zeropp.ops.quantise(torch.zeros(33), bits=bits, block_elems=16, asymmetric=asymmetric)
        assert bool((q.dequantise() == 0).all())
    q = zeropp.ops.quantise(torch.tensor([2.0, -2.0, 0.0, 1.0]), bits=8)
    assert q.codes.tolist() == [127, -127, 0, 64]  # 63.5 rounds to even


def test_format_of_4_bits() -> None:
    """Element 2j in the low half, two's complement; a last odd element leaves the high half 0."""
    x = torch.tensor([7.0, -7.0, 1.0, -1.0, 3.0])
    q = zeropp.ops.quantise(x, bits=4)
    assert q.codes.tolist() == [0x97, 0xF1, 0x03]
    assert reference.unpack_nibbles(q.codes, 5).tolist() == x.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@QUIET
@given(elems=st.integers(0, 5000), ranks=st.integers(1, 5), flags=st.integers(0, 15), seed=st.integers(0, 99),
       block=BLOCKS, to_block=BLOCKS)  # fmt: skip
def test_sums_are_what_their_parts_say(
    dtype: torch.dtype, elems: int, ranks: int, flags: int, seed: int, block: int, to_block: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    spec = {"bits": 8 if flags & 1 else 4, "asymmetric": bool(flags & 2), "block_elems": block}
    sources = [zeropp.ops.quantise(torch.randn(elems, generator=rng), **spec) for _ in range(ranks)]
    want = torch.zeros(elems)
    for index, source in enumerate(sources):
        zeropp.ops.dequantise_(source, want, accumulate=index > 0)
    want *= 1 / ranks
    total = torch.empty(elems, dtype=dtype)
    zeropp.ops.quant_sum_(sources, total, factor=1 / ranks)
    assert torch.equal(total, want.to(dtype))
    to_spec = {"bits": 8 if flags & 4 else 4, "asymmetric": bool(flags & 8), "block_elems": to_block}
    to, again = Quantised.empty(elems, **to_spec), zeropp.ops.quantise(want, **to_spec)
    zeropp.ops.quant_reduce_(sources, to, factor=1 / ranks)
    assert torch.equal(to.codes, again.codes) and torch.equal(to.scales, again.scales)
    assert torch.equal(to.mids, again.mids)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_show(threads: int) -> None:
    x = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        q = zeropp.ops.quantise(x, bits=4, block_elems=128)
        value = q.dequantise()
    finally:
        torch.set_num_threads(before)
    parts = [zeropp.ops.quantise(part, bits=4, block_elems=128) for part in x.split(128 * 500)]
    assert torch.equal(q.codes, torch.cat([part.codes for part in parts]))
    assert torch.equal(value, torch.cat([part.dequantise() for part in parts]))


MISUSE: dict[str, tuple[Any, type[Exception], str]] = {
    "bits": (lambda x, q: zeropp.ops.quantise(x, bits=3), ValueError, "quantise: bits is 3, wanted 8 or 4"),
    "block": (
        lambda x, q: zeropp.ops.quantise(x, block_elems=100), ValueError,
        "block_elems is 100, wanted a multiple of 16, at least 16",
    ),
    "dtype": (
        lambda x, q: zeropp.ops.quantise_(x.double(), q), ValueError,
        "quantise_: src is float64, wanted float32, bfloat16 or float16",
    ),
    "strides": (lambda x, q: zeropp.ops.quantise_(x.repeat(2)[::2], q), ValueError, "src is not contiguous"),
    "elements": (
        lambda x, q: zeropp.ops.quantise_(x[:50], q), ValueError,
        "codes has 100 elements, wanted 50: 50 elements of 8 bits",
    ),
    "dst elements": (
        lambda x, q: zeropp.ops.dequantise_(q, x[:50]), ValueError, "dequantise_: codes has 100 elements, wanted 50",
    ),
    "dst over the codes": (
        lambda x, q: zeropp.ops.dequantise_(
            Quantised(codes=x.view(torch.int8)[:100], scales=q.scales, mids=q.mids, elems=100, bits=8, block_elems=256),
            x,
        ),
        ValueError, r"share memory",
    ),
    "grad": (lambda x, q: zeropp.ops.quantise(x.requires_grad_()), ValueError, "src requires grad"),
    "device": (lambda x, q: zeropp.ops.quantise(x.to("meta")), ValueError, "src is on meta, wanted cpu"),
    "no tensor": (lambda x, q: zeropp.ops.quantise([1.0]), TypeError, "src is a list, wanted a tensor"),
    "no Quantised": (lambda x, q: zeropp.ops.dequantise_(x, x), TypeError, "source is a Tensor, wanted a Quantised"),
    "no sources": (lambda x, q: zeropp.ops.quant_sum_([], x), ValueError, "sources is empty, wanted at least one"),
    "mixed sources": (
        lambda x, q: zeropp.ops.quant_sum_([q, zeropp.ops.quantise(x, bits=4)], x), ValueError,
        r"sources\[1\] has \(bits, block_elems, asymmetric\) \(4, 256, False\), wanted \(8, 256, False\)",
    ),
    "factor": (
        lambda x, q: zeropp.ops.quant_sum_([q], x, factor=math.inf), ValueError,
        "factor is inf, wanted a finite number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_refused_and_writes_nothing(case: str) -> None:
    call, kind, sentence = MISUSE[case]
    x, q = torch.ones(100), Quantised.empty(100)
    q.codes.fill_(1), q.scales.fill_(1)
    with pytest.raises(kind, match=sentence):
        call(x, q)
    assert bool((q.codes == 1).all()) and bool((q.scales == 1).all()) and bool((x == 1).all())


def test_torch_sees_the_operators() -> None:
    x, ops = torch.randn(101), torch.ops.zeropp
    for bits, asymmetric in FORMATS:
        q = zeropp.ops.quantise(x, bits=bits, block_elems=16, asymmetric=asymmetric)
        parts, to = (q.codes, q.scales, q.mids), Quantised.empty(101, bits=bits, block_elems=32, asymmetric=asymmetric)
        mids = [q.mids] if asymmetric else []
        torch.library.opcheck(ops.quantise_.default, (x, *parts, bits, 16))
        torch.library.opcheck(ops.dequantise_.default, (*parts, torch.empty(101).bfloat16(), bits, 16, False))
        torch.library.opcheck(ops.quant_sum_.default, ([q.codes], [q.scales], mids, torch.empty(101), bits, 16, 0.5))
        to_parts = (to.codes.zero_(), to.scales.zero_(), to.mids.zero_())
        torch.library.opcheck(
            ops.quant_reduce_.default, ([q.codes], [q.scales], mids, *to_parts, 101, bits, 16, bits, 32, 0.5)
        )


def test_one_graph_under_compile() -> None:
    def there_and_back(x: Tensor) -> Tensor:
        return zeropp.ops.quantise(x * 2, block_elems=64).dequantise() + 1

    x = torch.randn(200)
    assert torch.equal(torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x), there_and_back(x))
