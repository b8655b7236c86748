# SPDX-License-Identifier: Apache-2.0
"""More than 2^31 elements in one tensor: numbers of elements and offsets are 64 bits wide everywhere.

Tensors are zeros that were never touched, which take no memory until they are written, but for their first and last elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from zeropp import ops

ELEMS = 2**31 + 100
HOST_BYTES_WANTED = 16 << 30
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    if free < HOST_BYTES_WANTED:
        pytest.skip(f"{free >> 30} GiB of memory are free, {HOST_BYTES_WANTED >> 30} wanted")
    yield


def ends(dtype: torch.dtype, first: float, last: float, elems: int = ELEMS) -> Tensor:
    x = torch.zeros(elems, dtype=dtype)
    x[0], x[-1] = first, last
    return x


def test_norm() -> None:
    x = ends(torch.bfloat16, 3.0, 4.0)
    sums, bad = ops.norm_squares([x])
    assert sums.tolist() == [25.0] and bad.tolist() == [0]
    x[-1] = float("inf")
    assert ops.norm_squares([x])[1].tolist() == [1]


@pytest.mark.parametrize("bits", [8, 4])
def test_quantise(bits: int) -> None:
    x = ends(torch.bfloat16, -1.0, 2.0)
    q = ops.quantise(x, bits=bits, block_elems=256)
    y = torch.zeros(ELEMS, dtype=torch.bfloat16)
    ops.dequantise_(q, y)
    assert (y[0], y[-1]) == (-1.0, 2.0) and not y[1:300].any() and not y[-300:-1].any()


def test_fp8() -> None:
    q = ops.fp8_quantise(ends(torch.bfloat16, -1.0, 2.0))
    y = torch.zeros(ELEMS, dtype=torch.bfloat16)
    ops.fp8_dequantise_(q, y)
    assert (y[0], y[-1]) == (-1.0, 2.0) and not y[1:300].any() and not y[-300:-1].any()


def test_a_step() -> None:
    p, g = ends(torch.float32, 1.0, 1.0), ends(torch.bfloat16, 2.0, -2.0)
    ops.sgd_step_([p], [g], step=1, lr=0.25)
    assert (p[0], p[-1]) == (0.5, 1.5) and not p[1:300].any() and not p[-300:-1].any()


def test_rows_of_experts() -> None:
    """Each token to the buffer and back; the last rows lie beyond 2^31 elements."""
    width, tokens = 4096, 2**19 + 3
    x = ends(torch.bfloat16, 1.0, 2.0, tokens * width).view(tokens, width)
    plan = ops.moe_plan(torch.zeros(tokens, 1, dtype=torch.int32), 2)
    y = ops.moe_combine(ops.moe_dispatch(x, plan), plan)
    assert (y[0, 0], y[-1, -1]) == (1.0, 2.0) and not y[-1, :-1].any() and not y[0, 1:].any()
