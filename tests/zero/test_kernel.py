# SPDX-License-Identifier: Apache-2.0
"""zeropp.estimate, zeropp.memory and the kernel agree on what a rank holds, whatever lives on NVMe (worker/kernel_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kernel_cases import SETTINGS

ORDINARY = ("nothing on nvme", "gathering", "all", "half of all", "optimizer, stage 1")
CASES = [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
SLACK_BYTES = 16 << 20
"""Of a process: what was allocated in small pieces, stacks of threads, free pieces that malloc keeps."""


def close(told: float, kernel: float) -> bool:
    return abs(told - kernel) <= 0.05 * kernel + SLACK_BYTES


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    # A rank that was forked shares pages with its parent, which the kernel's figures would count as growth later.
    return run_ranks("kernel_cases", selected("case"), ranks=2, cold=True, limit_s=300)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_agrees(case: str, outcomes: Any) -> None:
    """The estimate with the most that the kernel saw in a step, zeropp.memory with the kernel's figure at each moment."""
    for found in outcomes[case].check():
        said, most = sum(found["said"].values()), found["most"]
        assert close(said, most), (said, most, found)
        for moment, (grown, held) in found["seen"].items():
            assert close(held, grown), (moment, held, grown, found)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_buffers_are_planned(case: str, outcomes: Any) -> None:
    for found in outcomes[case].check():
        if "tier_buffers" not in found["kinds"]:
            assert "tier_buffers" not in found["said"]
            continue
        buffers = found["kinds"]["tier_buffers"]
        assert found["said"]["tier_buffers"] == buffers["planned"]
        assert buffers["held"] == pytest.approx(buffers["planned"], rel=0.03, abs=1 << 20), found
