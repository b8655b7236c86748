# SPDX-License-Identifier: Apache-2.0
"""Sum of squares and count of non-finite elements, against float64 and against the order that norm.h states."""

from __future__ import annotations

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK, LANES = 4096, 32


def stated(x: torch.Tensor) -> float:
    """csrc/ops/norm/norm.h's order, additions one after the other."""
    squares = x.double().square()
    total = 0.0
    for block in squares.split(BLOCK):
        lanes = torch.zeros(LANES, dtype=torch.float64)
        for row in block.split(LANES):
            lanes[: len(row)] += row
        width = LANES // 2
        while width:
            lanes = lanes[:width] + lanes[width:]
            width //= 2
        total += lanes.item()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(deadline=None, max_examples=20)
@given(elems=st.integers(0, 9000), offset=st.integers(0, 17), seed=st.integers(0, 99))
def test_is_the_stated_sum(dtype: torch.dtype, elems: int, offset: int, seed: int) -> None:
    x = torch.randn(elems + offset, generator=torch.Generator().manual_seed(seed)).to(dtype)[offset:]
    sums, bad = zeropp.ops.norm_squares([x, x.clone()])
    assert sums.dtype == torch.float64 and bad.dtype == torch.int64
    assert sums.tolist() == [stated(x)] * 2 and bad.tolist() == [0, 0]
    torch.testing.assert_close(sums[0], x.double().square().sum(), rtol=1e-13, atol=0)


def test_counts_what_is_not_finite() -> None:
    x = torch.full((10_000,), 3e38)
    assert zeropp.ops.norm_squares([x])[0].isfinite().all(), "squares of finite elements fit"
    x[[5, 4096, 9999]] = torch.tensor([float("inf"), float("nan"), float("-inf")])
    sums, bad = zeropp.ops.norm_squares([x, torch.ones(3)])
    assert bad.tolist() == [3, 0] and not sums[0].isfinite() and sums[1] == 3


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_show(threads: int) -> None:
    x = torch.randn(1_000_003, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        sums, _ = zeropp.ops.norm_squares([x])
    finally:
        torch.set_num_threads(before)
    assert sums.item() == stated(x)


def test_no_tensors_give_no_sums() -> None:
    sums, bad = zeropp.ops.norm_squares([])
    assert sums.shape == bad.shape == (0,)
