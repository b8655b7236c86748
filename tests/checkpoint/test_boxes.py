# SPDX-License-Identifier: Apache-2.0
"""Boxes of whole tensors: what a flat range is made of, and what two layouts have in common."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zeropp.errors import ConfigError
from zeropp.zero.model import boxes
from zeropp.zero.model.boxes import Box, Boxes

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def ranges(draw, shape):
    numel = math.prod(shape)
    begin = draw(st.integers(0, numel))
    return begin, draw(st.integers(begin, numel))


@st.composite
def parts(draw, whole):
    """Rows of one dimension, from two places of it: what a packed weight leaves on a rank."""
    if not whole or min(whole) < 2:
        return boxes.whole_of(whole)
    dim = draw(st.integers(0, len(whole) - 1))
    cuts = sorted(draw(st.lists(st.integers(0, whole[dim]), min_size=4, max_size=4)))
    found, at = [], 0
    for low, high in ((cuts[0], cuts[1]), (cuts[2], cuts[3])):
        if high > low:
            offset = tuple(low if d == dim else 0 for d in range(len(whole)))
            size = tuple(high - low if d == dim else n for d, n in enumerate(whole))
            found.append(Box(offset, size, tuple(at if d == dim else 0 for d in range(len(whole)))))
            at += high - low
    shape = tuple(at if d == dim else n for d, n in enumerate(whole))
    return Boxes(whole, shape, tuple(found))


@settings(max_examples=200, deadline=None)
@given(st.data(), shapes)
def test_a_flat_range_is_few_contiguous_boxes(data, shape):
    begin, end = data.draw(ranges(shape))
    values = torch.arange(math.prod(shape)).view(shape)
    found = []
    for offset, size in boxes.flat_boxes(shape, begin, end):
        part = values[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        assert part.is_contiguous() and part.numel()
        assert part.reshape(-1)[0] == boxes.flat_at(shape, offset)
        found += part.reshape(-1).tolist()
    assert found == list(range(begin, end))
    assert len(list(boxes.flat_boxes(shape, begin, end))) <= max(1, 2 * len(shape) - 1)


def of(part: Boxes, whole: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a part."""
    local = torch.full(part.shape, -1, dtype=whole.dtype)
    for box in part.boxes:
        there = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        local[tuple(slice(a, a + n) for a, n in zip(box.at, box.size, strict=True))] = whole[there]
    return local


@settings(max_examples=300, deadline=None)
@given(st.data(), shapes)
def test_what_two_parts_have_in_common_is_copied_once(data, whole):
    source, target = data.draw(parts(whole)), data.draw(parts(whole))
    begin, end = data.draw(ranges(source.shape))
    low, high = data.draw(ranges(target.shape))
    assert not boxes.problem_of(source) and not boxes.problem_of(target)
    values = torch.arange(math.prod(whole)).view(whole)
    have, want = of(source, values), of(target, values)
    given_elems = set(have.reshape(-1)[begin:end].tolist())
    wanted = want.reshape(-1)[low:high].tolist()
    got: list[int] = []
    for one in boxes.common(source, begin, end, target, low, high):
        there = have[tuple(slice(o, o + n) for o, n in zip(one.source, one.size, strict=True))]
        here = want[tuple(slice(o, o + n) for o, n in zip(one.target, one.size, strict=True))]
        assert torch.equal(there, here)
        got += here.reshape(-1).tolist()
    assert sorted(got) == sorted(given_elems & set(wanted))


@pytest.mark.parametrize(
    "whole, offset, size, says",
    [
        ((4, 3), (3, 0), (2, 3), "a part of shape (2, 3) at (3, 0) of a tensor of shape (4, 3) reaches beyond the tensor"),
        ((4, 3), (-1, 0), (2, 3), "has a box with a negative offset"),
        ((4, 3), (0,), (2, 3), "has another number of dimensions"),
    ],
)  # fmt: skip
def test_a_part_that_does_not_fit_is_refused(whole, offset, size, says):
    with pytest.raises(ConfigError) as raised:
        boxes.hold(torch.nn.Parameter(torch.zeros(size)), whole, offset)
    assert says in str(raised.value)


def test_a_parameter_says_what_it_holds():
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    assert boxes.boxes_of(parameter) is None
    boxes.hold(parameter, (2, 3), (0, 0))
    assert boxes.boxes_of(parameter) is None
    boxes.hold(parameter, (6, 3), (4, 0))
    assert boxes.boxes_of(parameter) == Boxes((6, 3), (2, 3), (Box((4, 0), (2, 3), (0, 0)),))
