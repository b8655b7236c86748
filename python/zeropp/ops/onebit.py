# SPDX-License-Identifier: Apache-2.0
"""One-bit compression with error feedback (1-bit Adam, 1-bit LAMB); formula and format: csrc/ops/onebit/onebit.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.ops import checks

__all__ = ["OneBit", "onebit_compress_", "onebit_decode_", "onebit_reduce_"]


@dataclass(frozen=True, kw_only=True)
class OneBit:
    """An array of ``elems`` floats as signs and scales: what a one-bit collective sends."""

    bits: Tensor
    """uint8; element i is bit i % 8 of byte i / 8, 1 for +scale."""
    scales: Tensor
    """fp32, one a chunk; NaN for a chunk whose sum of magnitudes was not finite."""
    elems: int
    """Number of elements."""
    chunk_elems: int
    """Elements a chunk, a multiple of 16."""

    @staticmethod
    def empty(elems: int, *, chunk_elems: int = 4096, device: torch.device | str = "cpu") -> OneBit:
        """Room for a result, to be used again and again."""
        name = "zeropp.ops.OneBit.empty"
        checks.check_whole(name, "elems", elems)
        if elems < 0:
            raise ValueError(f"{name}: elems is {elems}, wanted elems >= 0")
        checks.check_blocks(name, "chunk_elems", chunk_elems)
        return OneBit(
            bits=torch.empty(_bytes(elems), dtype=torch.uint8, device=device),
            scales=torch.empty(_chunks(elems, chunk_elems), device=device),
            elems=elems,
            chunk_elems=chunk_elems,
        )

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values, in a new tensor."""
        dst = torch.empty(self.elems, dtype=dtype, device=self.bits.device)
        onebit_decode_(self, dst)
        return dst


def onebit_compress_(src: Tensor, error: Tensor, to: OneBit) -> None:
    """Worker side: compress ``src + error``, and keep in ``error`` what was lost. 12 1/8 bytes an element in fp32.

    Args:
        src: fp32, bf16 or fp16; read.
        error: fp32, as many elements; zeros before the first call, updated in place.
        to: receives signs and scales.

    Raises:
        TypeError: no tensor, or no OneBit.
        ValueError: wrong device, dtype, layout or number of elements; tensors that share memory; a tensor that requires
            grad while grad mode is on. Nothing was written.
    """
    name = "zeropp.ops.onebit_compress_"
    checks.check_tensor(name, "src", src, checks.BOTH)
    checks.check_tensor(name, "error", error, checks.BOTH)
    written = [error, *_check_parts(name, "to", to)]
    checks.call(name, torch.ops.zeropp.onebit_compress_.default, [src, *written, to.chunk_elems], written)


def onebit_decode_(source: OneBit, dst: Tensor, *, accumulate: bool = False) -> None:
    """Set ``dst = scale`` where the bit is 1 and ``-scale`` where it is 0, or add it: fp32 arithmetic, one rounding to dst's dtype.

    Raises:
        TypeError, ValueError: as ``onebit_compress_``.
    """
    name = "zeropp.ops.onebit_decode_"
    parts = _check_parts(name, "source", source)
    numbers = [source.chunk_elems, accumulate]
    checks.decode(name, torch.ops.zeropp.onebit_decode_.default, parts, dst, numbers)


def onebit_reduce_(sources: Sequence[OneBit], error: Tensor, to: OneBit, *, factor: float = 1.0) -> None:
    """Server side: compress ``(sources[0] + sources[1] + ...) * factor + error``, and keep in ``error`` what was lost.

    Raises:
        TypeError, ValueError: as ``onebit_compress_``; also sources with other chunks than ``to``.
    """
    name = "zeropp.ops.onebit_reduce_"
    if not isinstance(sources, (list, tuple)):
        raise TypeError(f"{name}: sources is a {type(sources).__name__}, wanted a list of OneBit")
    checks.check_numbers(name, {"factor": factor})
    checks.check_tensor(name, "error", error, checks.BOTH)
    written = [error, *_check_parts(name, "to", to)]
    parts = [_check_parts(name, f"sources[{index}]", source) for index, source in enumerate(sources)]
    for index, source in enumerate(sources):
        if source.chunk_elems != to.chunk_elems:
            raise ValueError(
                f"{name}: sources[{index}] has chunks of {source.chunk_elems}, wanted {to.chunk_elems} as to has"
            )
    arguments = [[part[0] for part in parts], [part[1] for part in parts], *written, to.chunk_elems, factor]
    checks.call(name, torch.ops.zeropp.onebit_reduce_.default, arguments, written)


def _check_parts(name: str, label: str, array: OneBit) -> list[Tensor]:
    if not isinstance(array, OneBit):
        raise TypeError(f"{name}: {label} is a {type(array).__name__}, wanted a OneBit")
    parts = [array.bits, array.scales]
    if not checks.are_plain(parts):
        checks.check_tensor(name, f"{label}.bits", array.bits, checks.BOTH)
        checks.check_tensor(name, f"{label}.scales", array.scales, checks.BOTH)
    return parts


def _bytes(elems: int) -> int:
    return (elems + 7) // 8


def _chunks(elems: int, chunk_elems: int) -> int:
    return (elems + chunk_elems - 1) // chunk_elems


def _fake_parts(name: str, bits: Tensor, scales: Tensor, elems: int, chunk_elems: int) -> None:
    checks.check_blocks(name, "chunk_elems", chunk_elems)
    checks.fake_check(name, "bits", bits, (torch.uint8,), _bytes(elems))
    checks.fake_check(name, "scales", scales, checks.FP32, _chunks(elems, chunk_elems))


def _fake_compress(src: Tensor, error: Tensor, bits: Tensor, scales: Tensor, chunk_elems: int) -> None:
    name = "zeropp.ops.onebit_compress_"
    checks.fake_check(name, "src", src, checks.FLOATS)
    checks.fake_check(name, "error", error, checks.FP32, src.numel())
    _fake_parts(name, bits, scales, src.numel(), chunk_elems)


def _fake_decode(bits: Tensor, scales: Tensor, dst: Tensor, chunk_elems: int, accumulate: bool) -> None:
    name = "zeropp.ops.onebit_decode_"
    checks.fake_check(name, "dst", dst, checks.FLOATS)
    _fake_parts(name, bits, scales, dst.numel(), chunk_elems)


def _fake_reduce(
    bits: list[Tensor],
    scales: list[Tensor],
    error: Tensor,
    to_bits: Tensor,
    to_scales: Tensor,
    chunk_elems: int,
    factor: float,
) -> None:
    name = "zeropp.ops.onebit_reduce_"
    checks.fake_check(name, "error", error, checks.FP32)
    if not bits or len(bits) != len(scales):
        raise ValueError(f"{name}: bits and scales have {len(bits)} and {len(scales)} tensors, wanted as many of each")
    for source_bits, source_scales in zip(bits, scales, strict=True):
        _fake_parts(name, source_bits, source_scales, error.numel(), chunk_elems)
    _fake_parts(name, to_bits, to_scales, error.numel(), chunk_elems)


FAKES = {"onebit_compress_": _fake_compress, "onebit_decode_": _fake_decode, "onebit_reduce_": _fake_reduce}
