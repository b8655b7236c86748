# SPDX-License-Identifier: Apache-2.0
"""Which boxes of a whole tensor a rank holds as one parameter of its own, and where two such layouts meet.

Under tensor, expert and pipeline parallelism a rank's parameter is a part of the whole tensor that the model on one rank
has. The units of ZeRO lie over these local parameters and know nothing else; checkpoints have to know which part of the
whole tensor each one is. That part is a list of boxes (offset and size by dimension), because a packed weight that is cut
over ranks (gate and up in one matrix) leaves several boxes on each of them.

How a unit says what it holds: whoever cuts a parameter calls :func:`hold` before ``prepare``,

    hold(parameter, whole=(64, 1024, 512), offset=(16, 0, 0))   # experts 16 to 16 + parameter.shape[0] of 64

and ``prepare`` copies the answer to ``Entry.boxes`` of the unit's parameter. The name of the whole tensor is the
parameter's first name (``Entry.names``), so every rank that holds a part of one tensor has it under one name. A parameter
without :func:`hold` is the whole tensor. Equal boxes on two groups of ranks are copies, which a checkpoint has once;
boxes that overlap otherwise are refused by ``zeropp.save``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zeropp.errors import ConfigError

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box of the whole tensor, and where it lies in the local one."""

    offset: Dims
    size: Dims
    at: Dims


@dataclass(frozen=True)
class Boxes:
    """A local tensor as a part of the whole one."""

    whole: Dims
    """The shape of the whole tensor."""
    shape: Dims
    """The shape of the local one, which the boxes fill."""
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """True if the local tensor is the whole one."""
        return self == whole_of(self.whole)

    def taken(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of the boxes of a whole tensor as the local one."""
        local = whole.new_empty(self.shape)
        for box in self.boxes:
            local[slices(box.at, box.size)] = whole[slices(box.offset, box.size)]
        return local

    def index_in_whole(self, elem: int) -> Dims:
        """Return the index in the whole tensor of an element of the local one, which is counted in its order."""
        index: tuple[int, ...] = ()
        for size in reversed(self.shape):
            elem, at = divmod(elem, size)
            index = (at, *index)
        for box in self.boxes:
            inside = [i - at for i, at in zip(index, box.at, strict=True)]
            if all(0 <= i < n for i, n in zip(inside, box.size, strict=True)):
                return tuple(offset + i for offset, i in zip(box.offset, inside, strict=True))
        raise AssertionError("boxes fill the local tensor")


def slices(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a box."""
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))


def whole_of(shape: Sequence[int]) -> Boxes:
    """Return the boxes of a tensor that a rank has whole."""
    return one_box(shape, (0,) * len(shape), shape)


def one_box(whole: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Boxes:
    """Return the boxes of a local tensor that is one box of the whole one."""
    boxes = (Box(tuple(offset), tuple(size), (0,) * len(size)),) if math.prod(size) else ()
    return Boxes(tuple(whole), tuple(size), boxes)


def hold(parameter: torch.Tensor, whole: Sequence[int], offset: Sequence[int]) -> None:
    """Note that a parameter is a box of a larger tensor, of the parameter's own size. Before ``prepare``.

    Args:
        parameter: this rank's part.
        whole: the shape of the whole tensor.
        offset: where the part begins in it, by dimension.

    Raises:
        zeropp.ConfigError: the part does not lie within the whole tensor; or it is complex.
    """
    if not len(whole) == len(offset) == parameter.ndim:
        raise ConfigError(
            f"a part of shape {tuple(parameter.shape)} at {tuple(offset)} has another number of dimensions than its tensor of "
            f"shape {tuple(whole)}"
        )
    hold_boxes(parameter, one_box(whole, offset, parameter.shape))


def hold_boxes(parameter: torch.Tensor, part: Boxes) -> None:
    """Note which boxes of a larger tensor a parameter is; as :func:`hold`, for several boxes."""
    problem = problem_of(part)
    if parameter.is_complex():
        problem = "is complex, and parts of complex parameters are not supported"
    if problem:
        at = ", ".join(str(box.offset) for box in part.boxes)
        raise ConfigError(f"a part of shape {part.shape} at {at} of a tensor of shape {part.whole} {problem}")
    parameter._zeropp_boxes = part  # type: ignore[attr-defined]


def is_held(parameter: torch.Tensor) -> bool:
    """Return True if it was said which boxes a parameter is, also where they are the whole tensor."""
    return "_zeropp_boxes" in parameter.__dict__


def boxes_of(parameter: torch.Tensor) -> Boxes | None:
    """Return which boxes of its whole tensor a parameter is; None: all of it."""
    held: Boxes | None = parameter.__dict__.get("_zeropp_boxes")
    return None if held is None or held.is_whole else held


def problem_of(part: Boxes) -> str:
    """Return what is wrong with boxes, as the end of a sentence; an empty text if nothing is."""
    problem = next((found for box in part.boxes if (found := _problem_of_box(box, part))), "")
    if problem:
        return problem
    if sum(math.prod(box.size) for box in part.boxes) != part.numel:
        return "is not filled by its boxes"
    return "has boxes that overlap" if overlapping([(box.at, box.size) for box in part.boxes]) else ""


def _problem_of_box(box: Box, part: Boxes) -> str:
    if not len(box.offset) == len(box.size) == len(box.at) == len(part.whole) == len(part.shape):
        return "has boxes of another number of dimensions"
    if min((*box.offset, *box.at, *(n - 1 for n in box.size)), default=0) < 0:
        return "has a box with a negative offset or without elements"
    if not _within(box.offset, box.size, part.whole):
        return "reaches beyond the tensor"
    return "" if _within(box.at, box.size, part.shape) else "has a box beyond its own shape"


def _within(offset: Dims, size: Dims, shape: Dims) -> bool:
    return all(o + n <= whole for o, n, whole in zip(offset, size, shape, strict=True))


def overlapping(boxes: Sequence[tuple[Dims, Dims]]) -> bool:
    """True if any two of the boxes, each (offset, size), have an element in common."""
    ordered = sorted(boxes)
    for i, (offset, size) in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if size and other[0][0] >= offset[0] + size[0]:
                break  # and so do all that follow
            if intersection((offset, size), other) is not None:
                return True
    return False


def intersection(first: tuple[Dims, Dims], second: tuple[Dims, Dims]) -> tuple[Dims, Dims] | None:
    """Return the common box of two, each (offset, size); None if they have no element in common."""
    low = tuple(max(a, b) for a, b in zip(first[0], second[0], strict=True))
    ends = zip(first[0], first[1], second[0], second[1], strict=True)
    size = tuple(min(a + n, b + m) - o for (a, n, b, m), o in zip(ends, low, strict=True))
    return (low, size) if min(size, default=1) > 0 else None


def strides_of(shape: Sequence[int]) -> Dims:
    """Return the strides, in elements, of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def flat_at(shape: Sequence[int], index: Sequence[int]) -> int:
    """Return where an element lies in the flattened tensor."""
    return sum(i * s for i, s in zip(index, strides_of(shape), strict=True))


def flat_boxes(shape: Dims, begin: int, end: int) -> Iterator[tuple[Dims, Dims]]:
    """Yield boxes (offset, size) that together are elements ``begin`` to ``end`` of the flattened tensor, in order; each
    is contiguous. At most two for each dimension, less one."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the rows that are there from end to end
    if begin < first * row:
        for offset, size in flat_boxes(shape[1:], begin % row, min(end - (first - 1) * row, row)):
            yield (first - 1, *offset), (1, *size)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if first <= last and end % row:
        for offset, size in flat_boxes(shape[1:], 0, end % row):
            yield (last, *offset), (1, *size)


@dataclass(frozen=True)
class Copy:
    """A box that two ranges have in common: where it begins in the one local tensor and in the other."""

    source: Dims
    target: Dims
    size: Dims


def common(source: Boxes, begin: int, end: int, target: Boxes, low: int, high: int) -> Iterator[Copy]:
    """Yield what elements ``begin`` to ``end`` of one flattened local tensor have in common with elements ``low`` to
    ``high`` of another, which is a part of the same whole tensor.

    Each box lies within a contiguous box of both ranges.
    """
    sources, targets = list(_located(source, begin, end)), list(_located(target, low, high))
    for there, source_at in sources:
        for here, target_at in targets:
            box = intersection(there, here)
            if box is not None:
                offset, size = box
                yield Copy(_moved(offset, there[0], source_at), _moved(offset, here[0], target_at), size)


def _located(part: Boxes, begin: int, end: int) -> Iterator[tuple[tuple[Dims, Dims], Dims]]:
    """Yield (a box of the whole tensor, where it begins in the local one) for all of a flat range of the local one."""
    for flat in flat_boxes(part.shape, begin, end):
        for box in part.boxes:
            found = intersection(flat, (box.at, box.size))
            if found is not None:
                yield (_moved(found[0], box.at, box.offset), found[1]), found[0]


def _moved(index: Dims, origin: Dims, to: Dims) -> Dims:
    return tuple(i - o + t for i, o, t in zip(index, origin, to, strict=True))
