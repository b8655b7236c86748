# SPDX-License-Identifier: Apache-2.0
"""Block quantisation to 8-bit floats; formula, error bound and formats: csrc/ops/quant/fp8.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.ops import checks

__all__ = ["Fp8", "fp8_dequantise_", "fp8_quantise", "fp8_quantise_"]

FORMATS = ("e4m3", "e5m2")
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_UINT8 = (torch.uint8,)


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """An array of floats as 8-bit ones with a scale for each block: ``value = code * scale``."""

    codes: Tensor
    """torch.float8_e4m3fn or torch.float8_e5m2, one dimension."""
    scales: Tensor
    """fp32, one a block; NaN for a block that held an infinity or a NaN."""
    format: str
    """``"e4m3"`` (finer) or ``"e5m2"`` (further)."""
    block_elems: int
    """Elements a block, a multiple of 16."""

    @staticmethod
    def empty(elems: int, *, format: str = "e4m3", block_elems: int = 256, device: torch.device | str = "cpu") -> Fp8:
        """Room for the result of ``fp8_quantise_``, to be used again and again: fresh memory costs page faults."""
        name = "zeropp.ops.Fp8.empty"
        checks.check_whole(name, "elems", elems)
        if elems < 0:
            raise ValueError(f"{name}: elems is {elems}, wanted elems >= 0")
        _check_format(name, format, block_elems)
        codes = torch.empty(elems, dtype=torch.uint8, device=device).view(_DTYPES[format])
        scales = torch.empty(-(-elems // block_elems), device=device)
        return Fp8(codes=codes, scales=scales, format=format, block_elems=block_elems)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values, in a new tensor."""
        dst = torch.empty(self.codes.numel(), dtype=dtype, device=self.codes.device)
        fp8_dequantise_(self, dst)
        return dst


def fp8_quantise(src: Tensor, *, format: str = "e4m3", block_elems: int = 256) -> Fp8:
    """Quantise a contiguous fp32, bf16 or fp16 tensor in blocks, into new memory.

    An element is off by at most 1/16 (e4m3) or 1/8 (e5m2) of itself, or, where that is more, by 2^-10 or 2^-17 of its
    block's scale (csrc/ops/quant/fp8.h). ``block_elems`` of at least the number of elements makes one scale of all.
    """
    name = "zeropp.ops.fp8_quantise"
    checks.check_tensor(name, "src", src, checks.BOTH)
    _check_format(name, format, block_elems)
    to = Fp8.empty(src.numel(), format=format, block_elems=block_elems, device=src.device)
    fp8_quantise_(src, to)
    return to


def fp8_quantise_(src: Tensor, to: Fp8) -> None:
    """Quantise into given memory: 5 bytes an element for fp32.

    Raises:
        TypeError: no tensor, or no Fp8.
        ValueError: wrong device, dtype, layout or number of elements; memory shared between src and the result; a
            tensor that requires grad while grad mode is on. Nothing was written.
    """
    name = "zeropp.ops.fp8_quantise_"
    checks.check_tensor(name, "src", src, checks.BOTH)
    written = _check_parts(name, "to", to)
    arguments = [src, *written, FORMATS.index(to.format), to.block_elems]
    checks.call(name, torch.ops.zeropp.fp8_quantise_.default, arguments, [to.codes, to.scales])


def fp8_dequantise_(source: Fp8, dst: Tensor, *, accumulate: bool = False) -> None:
    """Set ``dst = code * scale``, or ``dst += code * scale``: fp32 arithmetic, one rounding to dst's dtype.

    Raises:
        TypeError, ValueError: as ``fp8_quantise_``.
    """
    name = "zeropp.ops.fp8_dequantise_"
    parts = _check_parts(name, "source", source)
    numbers = [FORMATS.index(source.format), source.block_elems, accumulate]
    checks.decode(name, torch.ops.zeropp.fp8_dequantise_.default, parts, dst, numbers)


def _check_format(name: str, format: object, block_elems: object) -> None:
    if format not in FORMATS:
        raise ValueError(f"{name}: format is {format!r}, wanted 'e4m3' or 'e5m2'")
    checks.check_blocks(name, "block_elems", block_elems)


def _check_parts(name: str, label: str, parts: Fp8) -> list[Tensor]:
    """Codes as bytes, and scales."""
    if not isinstance(parts, Fp8):
        raise TypeError(f"{name}: {label} is a {type(parts).__name__}, wanted a zeropp.ops.Fp8")
    _check_format(name, parts.format, parts.block_elems)
    checks.check_tensor(name, f"{label}.codes", parts.codes, checks.BOTH)
    checks.check_tensor(name, f"{label}.scales", parts.scales, checks.BOTH)
    wanted = _DTYPES[parts.format]
    if parts.codes.dtype not in (wanted, torch.uint8):
        raise ValueError(f"{name}: {label}.codes is {parts.codes.dtype}, wanted {wanted} as its format")
    return [parts.codes.view(torch.uint8), parts.scales]


# --- what torch has to know ------------------------------------------------------------------------------------------
def _fake_quantise(src: Tensor, codes: Tensor, scales: Tensor, format: int, block_elems: int) -> None:
    name = "zeropp.ops.fp8_quantise_"
    checks.fake_check(name, "src", src, checks.FLOATS)
    _fake_parts(name, codes, scales, src, block_elems)


def _fake_dequantise(
    codes: Tensor, scales: Tensor, dst: Tensor, format: int, block_elems: int, accumulate: bool
) -> None:
    name = "zeropp.ops.fp8_dequantise_"
    checks.fake_check(name, "dst", dst, checks.FLOATS)
    _fake_parts(name, codes, scales, dst, block_elems)


def _fake_parts(name: str, codes: Tensor, scales: Tensor, floats: Tensor, block_elems: int) -> None:
    checks.check_blocks(name, "block_elems", block_elems)
    checks.fake_check(name, "codes", codes, _UINT8, floats.numel())
    checks.fake_check(name, "scales", scales, checks.FP32, -(-floats.numel() // block_elems))


FAKES = {"fp8_quantise_": _fake_quantise, "fp8_dequantise_": _fake_dequantise}
