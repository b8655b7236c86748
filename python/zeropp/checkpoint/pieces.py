# SPDX-License-Identifier: Apache-2.0
"""Read any part of a parameter from the files of a checkpoint, however it was cut when it was saved.

Each file holds flat ranges (pieces) of local tensors, and the manifest says which boxes of the whole tensor each local
tensor is. Where the reader holds the same boxes, ranges meet ranges and go straight from the file into memory. Otherwise
both are cut into boxes, and what they have in common is read run by run: close runs in one read of at most
``COVER_BYTES``, of which at least half is wanted or whose runs are shorter than a page.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeropp.checkpoint.content import part_of_piece, parts_of
from zeropp.checkpoint.manifest import SCALES
from zeropp.checkpoint.plain import from_plain
from zeropp.errors import CheckpointError
from zeropp.files import safefile
from zeropp.ops import moments_decode_, moments_scales
from zeropp.zero.model.boxes import Boxes, Copy, Dims, common, flat_at, strides_of

COVER_BYTES = 256 << 10
PAGE_BYTES = 4096
BLOCK_ELEMS = 1 << 20
"""Elements that are in memory at once where values are passed on block by block."""

Saved = Mapping[str, Any]
"""What the manifest says of one parameter."""


class Files:
    """The ranks' files of one checkpoint, opened when first read."""

    def __init__(self, folder: Path, content: Mapping[str, Any]) -> None:
        self._names = [folder / name for name in content["files"]]
        self._open: dict[int, safefile.TensorFile] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def tensors(self, rank: int) -> safefile.TensorFile:
        if rank not in self._open:
            self._open[rank] = self._stack.enter_context(contextlib.closing(safefile.TensorFile(self._names[rank])))
        return self._open[rank]

    def plain(self, rank: int, value: Any) -> Any:
        """Data that may refer to tensors of that rank's file."""
        file = self.tensors(rank)

        class Named(dict[str, torch.Tensor]):
            def __missing__(self, name: str) -> torch.Tensor:
                return file.tensor(name)

        return from_plain(value, Named())

    def dtype(self, name: str, kind: str, saved: Saved) -> torch.dtype | None:
        """Return the type of a parameter or of a state of it in the files; None where nothing was saved."""
        pieces = saved["pieces"].get(kind)
        return self.tensors(pieces[0][0]).dtype(_key(name, kind)) if pieces else None

    def read(
        self, name: str, kind: str, held: Boxes, begin: int, end: int, saved: Saved
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, values) of what was saved of elements ``begin`` to ``end`` of a flattened local tensor, in
        blocks; ``held`` says which boxes of the whole the local tensor is."""
        if not saved["pieces"].get(kind):
            return
        dtype = self.dtype(name, kind, saved)
        for low in range(begin, end, BLOCK_ELEMS):
            block = torch.empty(min(BLOCK_ELEMS, end - low), dtype=dtype, device="cpu")
            with safefile.Fills() as fills:
                self.fill(fills, name, kind, held, low, block, saved)
            yield low, block

    def fill(
        self, fills: safefile.Fills, name: str, kind: str, held: Boxes, begin: int, values: torch.Tensor, saved: Saved
    ) -> None:
        """Read elements from ``begin`` on of a flattened local tensor of a parameter or a state of it into contiguous
        memory; read straight there where the types agree. What nobody saved is left as it is."""
        key, parts, end = _key(name, kind), parts_of(saved), begin + values.numel()
        for piece in saved["pieces"].get(kind, ()):
            rank, first, last = piece[:3]
            part = parts[part_of_piece(piece)]
            source = _Range(self.tensors(rank), key, kind, first, part.shape)
            source.check(last)
            if part == held:
                low, high = max(begin, first), min(end, last)
                if low < high:
                    source.fill(fills, low, values[low - begin : high - begin])
                continue
            for copy in common(part, first, last, held, begin, end):
                at = values.storage_offset() + flat_at(held.shape, copy.target) - begin
                _fill_box(fills, source, copy, values.as_strided(copy.size, strides_of(held.shape), at))


@dataclass(frozen=True)
class _Range:
    """A piece of a file, and what it is a range of."""

    file: safefile.TensorFile
    key: str
    kind: str
    first: int
    shape: Dims

    def check(self, last: int) -> None:
        """Raise zeropp.CheckpointError unless the file has as many elements of the piece as the manifest says."""
        found = math.prod(self.file.shape(self.key))
        if found != last - self.first:
            raise CheckpointError(
                f"{self.file.path}: '{self.key}' has {found} elements, and the manifest says {last - self.first}"
            )

    def flat(self, low: int, high: int) -> torch.Tensor:
        """Return elements ``low`` to ``high`` of the flattened local tensor; 8-bit moments in fp32."""
        if self.is_codes:
            return _decoded(self, low, high)
        return self.file.flat(self.key, low - self.first, high - self.first)

    def fill(self, fills: safefile.Fills, low: int, target: torch.Tensor) -> None:
        """Read elements from ``low`` on into contiguous memory: straight there where the types agree."""
        if target.dtype == self.file.dtype(self.key) and not self.is_codes:
            self.file.fill(fills, self.key, low - self.first, target)
        else:
            target.copy_(self.flat(low, low + target.numel()))

    @property
    def is_codes(self) -> bool:
        """True if these are moments in 8 bits."""
        return bool(self.kind) and self.file.dtype(self.key) == torch.uint8


def _fill_box(fills: safefile.Fills, source: _Range, copy: Copy, target: torch.Tensor) -> None:
    """Read a box: where its elements are close together in one read, else each half for itself."""
    low = flat_at(source.shape, copy.source)
    high = 1 + flat_at(source.shape, tuple(o + n - 1 for o, n in zip(copy.source, copy.size, strict=True)))
    wanted, width = math.prod(copy.size), source.file.dtype(source.key).itemsize
    if high - low == wanted and target.is_contiguous() and wanted <= BLOCK_ELEMS:
        source.fill(fills, low, target.view(-1))
        return
    close = high - low <= 2 * wanted or _run(source.shape, copy.size) * width < PAGE_BYTES
    if wanted == 1 or (close and (high - low) * width <= COVER_BYTES):
        target.copy_(source.flat(low, high).as_strided(copy.size, strides_of(source.shape)))
        return
    for half, part in _halves(copy, target):
        _fill_box(fills, source, half, part)


def _halves(copy: Copy, target: torch.Tensor) -> Iterator[tuple[Copy, torch.Tensor]]:
    """Yield both halves of a box of several elements, cut at its first dimension of more than one."""
    dim = next(d for d, n in enumerate(copy.size) if n > 1)
    middle = copy.size[dim] // 2
    for low, high in ((0, middle), (middle, copy.size[dim])):
        size = tuple(high - low if d == dim else n for d, n in enumerate(copy.size))
        moved = [tuple(o + low if d == dim else o for d, o in enumerate(at)) for at in (copy.source, copy.target)]
        yield Copy(moved[0], moved[1], size), target.narrow(dim, low, high - low)


def _run(shape: Dims, size: Dims) -> int:
    """Return how many elements of a box follow each other without a gap."""
    run = 1
    for whole, part in zip(reversed(shape), reversed(size), strict=True):
        run *= part
        if part != whole:
            break
    return run


def _key(name: str, kind: str) -> str:
    return f"{name}/{kind}" if kind else name


def _decoded(source: _Range, low: int, high: int) -> torch.Tensor:
    """Return, in fp32, elements ``low`` to ``high`` of an 8-bit moment."""
    first, values = source.first, torch.empty(high - low, device="cpu")
    skipped = moments_scales(low - first + 1, first) - 1
    scales = source.file.flat(source.key + SCALES, skipped, skipped + moments_scales(high - low, low))
    codes = source.file.flat(source.key, low - first, high - first)
    moments_decode_(codes, scales, values, moment=source.kind, first=low)
    return values
