# SPDX-License-Identifier: Apache-2.0
"""Block quantisation to 8 and 4 bits (ZeRO++, ZeroQuant); formula, error bound and format: csrc/ops/quant/quant.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.ops import checks

__all__ = ["Quantised", "dequantise_", "quant_reduce_", "quant_sum_", "quantise", "quantise_"]


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """An array of ``elems`` floats in blocks: what a quantised collective sends."""

    codes: Tensor
    """int8, one an element; or uint8, two an element (the even one in the low half)."""
    scales: Tensor
    """fp32, one a block; NaN for a block that held an infinity, a NaN or a magnitude of 2^127 and more."""
    mids: Tensor
    """fp32, one a block; without elements: symmetric."""
    elems: int
    """Number of elements."""
    bits: int
    """8 or 4."""
    block_elems: int
    """Elements a block, a multiple of 16."""

    @staticmethod
    def empty(
        elems: int, *, bits: int = 8, block_elems: int = 256, asymmetric: bool = False,
        device: torch.device | str = "cpu",
    ) -> Quantised:  # fmt: skip
        """Room for the result of quantise_, to be used again and again: fresh memory costs page faults."""
        name = "zeropp.ops.Quantised.empty"
        checks.check_whole(name, "elems", elems)
        if elems < 0:
            raise ValueError(f"{name}: elems is {elems}, wanted elems >= 0")
        _check_spec(name, bits, block_elems)
        blocks = _blocks(elems, block_elems)
        return Quantised(
            codes=torch.empty(_code_bytes(elems, bits), dtype=_code_dtype(bits), device=device),
            scales=torch.empty(blocks, device=device),
            mids=torch.empty(blocks if asymmetric else 0, device=device),
            elems=elems,
            bits=bits,
            block_elems=block_elems,
        )

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values, in a new tensor."""
        dst = torch.empty(self.elems, dtype=dtype, device=self.codes.device)
        dequantise_(self, dst)
        return dst


def quantise(src: Tensor, *, bits: int = 8, block_elems: int = 256, asymmetric: bool = False) -> Quantised:
    """Quantise a contiguous fp32, bf16 or fp16 tensor in blocks, into new memory.

    Per finite element the error is at most half a scale, up to rounding (the exact bound: csrc/ops/quant/quant.h).
    """
    name = "zeropp.ops.quantise"
    checks.check_tensor(name, "src", src, checks.BOTH)
    _check_spec(name, bits, block_elems)
    to = Quantised.empty(src.numel(), bits=bits, block_elems=block_elems, asymmetric=asymmetric, device=src.device)
    quantise_(src, to)
    return to


def quantise_(src: Tensor, to: Quantised) -> None:
    """Quantise into given memory: 5 bytes an element for fp32 to 8 bits.

    Raises:
        TypeError: no tensor.
        ValueError: wrong device, dtype, layout or number of elements; memory shared between src and the result; a
            tensor that requires grad while grad mode is on. Nothing was written.
    """
    name = "zeropp.ops.quantise_"
    checks.check_tensor(name, "src", src, checks.BOTH)
    written = _check_parts(name, "to", to)
    arguments = [src, *written, to.bits, to.block_elems]
    checks.call(name, torch.ops.zeropp.quantise_.default, arguments, written)


def dequantise_(source: Quantised, dst: Tensor, *, accumulate: bool = False) -> None:
    """Set ``dst = code * scale + mid``, or add it to dst: fp32 arithmetic, one rounding to dst's dtype.

    Raises:
        TypeError, ValueError: as ``quantise_``.
    """
    name = "zeropp.ops.dequantise_"
    parts = _check_parts(name, "source", source)
    numbers = [source.bits, source.block_elems, accumulate]
    checks.decode(name, torch.ops.zeropp.dequantise_.default, parts, dst, numbers)


def quant_sum_(sources: Sequence[Quantised], dst: Tensor, *, factor: float = 1.0) -> None:
    """Set ``dst = (sources[0] + sources[1] + ...) * factor``: summed in fp32 in that order, one rounding to dst's dtype.

    Raises:
        TypeError, ValueError: as ``quantise_``; also sources of different formats.
    """
    name = "zeropp.ops.quant_sum_"
    checks.check_tensor(name, "dst", dst, checks.BOTH)
    checks.check_numbers(name, {"factor": factor})
    first, lists = _check_sources(name, sources)
    arguments = [*lists, dst, first.bits, first.block_elems, factor]
    checks.call(name, torch.ops.zeropp.quant_sum_.default, arguments, [dst])


def quant_reduce_(sources: Sequence[Quantised], to: Quantised, *, factor: float = 1.0) -> None:
    """Sum as ``quant_sum_`` and quantise the sum in ``to``'s format, without memory in between: the middle step of qgZ.

    Raises:
        TypeError, ValueError: as ``quant_sum_``.
    """
    name = "zeropp.ops.quant_reduce_"
    checks.check_numbers(name, {"factor": factor})
    first, lists = _check_sources(name, sources)
    written = _check_parts(name, "to", to)
    arguments = [*lists, *written, to.elems, first.bits, first.block_elems, to.bits, to.block_elems, factor]
    checks.call(name, torch.ops.zeropp.quant_reduce_.default, arguments, written)


def _check_spec(name: str, bits: object, block_elems: object) -> None:
    checks.check_whole(name, "bits", bits)
    if bits not in (4, 8):
        raise ValueError(f"{name}: bits is {bits}, wanted 8 or 4")
    checks.check_blocks(name, "block_elems", block_elems)


def _check_parts(name: str, label: str, array: Quantised) -> list[Tensor]:
    if not isinstance(array, Quantised):
        raise TypeError(f"{name}: {label} is a {type(array).__name__}, wanted a Quantised")
    parts = [array.codes, array.scales, array.mids]
    if not checks.are_plain(parts):
        for part, tensor in zip(("codes", "scales", "mids"), parts, strict=True):
            checks.check_tensor(name, f"{label}.{part}", tensor, checks.BOTH)
    return parts


def _check_sources(name: str, sources: Sequence[Quantised]) -> tuple[Quantised, list[list[Tensor]]]:
    if not isinstance(sources, (list, tuple)):
        raise TypeError(f"{name}: sources is a {type(sources).__name__}, wanted a list of Quantised")
    if not sources:
        raise ValueError(f"{name}: sources is empty, wanted at least one Quantised")
    parts = [_check_parts(name, f"sources[{index}]", source) for index, source in enumerate(sources)]
    first = sources[0]
    for index, source in enumerate(sources):
        here = (source.bits, source.block_elems, source.mids.numel() > 0)
        wanted = (first.bits, first.block_elems, first.mids.numel() > 0)
        if here != wanted:
            raise ValueError(
                f"{name}: sources[{index}] has (bits, block_elems, asymmetric) {here}, wanted {wanted} as sources[0]"
            )
    mids = [part[2] for part in parts] if first.mids.numel() else []
    return first, [[part[0] for part in parts], [part[1] for part in parts], mids]


def _blocks(elems: int, block_elems: int) -> int:
    return (elems + block_elems - 1) // block_elems


def _code_bytes(elems: int, bits: int) -> int:
    return elems if bits == 8 else (elems + 1) // 2


def _code_dtype(bits: int) -> torch.dtype:
    return torch.int8 if bits == 8 else torch.uint8


def _fake_parts(
    name: str, codes: Tensor, scales: Tensor, mids: Tensor | None, elems: int, bits: int, block_elems: int
) -> None:
    _check_spec(name, bits, block_elems)
    blocks = _blocks(elems, block_elems)
    checks.fake_check(name, "codes", codes, (_code_dtype(bits),), _code_bytes(elems, bits))
    checks.fake_check(name, "scales", scales, checks.FP32, blocks)
    if mids is not None:
        checks.fake_check(name, "mids", mids, checks.FP32, blocks if mids.numel() else 0)


def _fake_quantise(src: Tensor, codes: Tensor, scales: Tensor, mids: Tensor, bits: int, block_elems: int) -> None:
    name = "zeropp.ops.quantise_"
    checks.fake_check(name, "src", src, checks.FLOATS)
    _fake_parts(name, codes, scales, mids, src.numel(), bits, block_elems)


def _fake_dequantise(
    codes: Tensor, scales: Tensor, mids: Tensor, dst: Tensor, bits: int, block_elems: int, accumulate: bool
) -> None:
    name = "zeropp.ops.dequantise_"
    checks.fake_check(name, "dst", dst, checks.FLOATS)
    _fake_parts(name, codes, scales, mids, dst.numel(), bits, block_elems)


def _fake_sources(
    name: str,
    codes: list[Tensor],
    scales: list[Tensor],
    mids: list[Tensor],
    elems: int,
    bits: int,
    block_elems: int,
) -> None:
    if not codes or len(scales) != len(codes) or len(mids) not in (0, len(codes)):
        raise ValueError(
            f"{name}: codes, scales and mids have {len(codes)}, {len(scales)} and {len(mids)} tensors, wanted as many "
            "of each, at least 1 (or no mids)"
        )
    for index in range(len(codes)):
        _fake_parts(name, codes[index], scales[index], mids[index] if mids else None, elems, bits, block_elems)


def _fake_sum(
    codes: list[Tensor],
    scales: list[Tensor],
    mids: list[Tensor],
    dst: Tensor,
    bits: int,
    block_elems: int,
    factor: float,
) -> None:
    name = "zeropp.ops.quant_sum_"
    checks.fake_check(name, "dst", dst, checks.FLOATS)
    _fake_sources(name, codes, scales, mids, dst.numel(), bits, block_elems)


def _fake_reduce(
    codes: list[Tensor],
    scales: list[Tensor],
    mids: list[Tensor],
    to_codes: Tensor,
    to_scales: Tensor,
    to_mids: Tensor,
    elems: int,
    bits: int,
    block_elems: int,
    to_bits: int,
    to_block_elems: int,
    factor: float,
) -> None:
    name = "zeropp.ops.quant_reduce_"
    _fake_sources(name, codes, scales, mids, elems, bits, block_elems)
    _fake_parts(name, to_codes, to_scales, to_mids, elems, to_bits, to_block_elems)


FAKES = {
    "quantise_": _fake_quantise,
    "dequantise_": _fake_dequantise,
    "quant_sum_": _fake_sum,
    "quant_reduce_": _fake_reduce,
}
