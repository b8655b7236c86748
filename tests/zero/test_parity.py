# SPDX-License-Identifier: Apache-2.0
"""Models that broke a design of ZeRO-3 once: five steps equal to torch DDP, bit for bit, in three modes
(worker/parity_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from parity_cases import STEPS, TABLE


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    return run_ranks("parity_cases", selected("case"), ranks=2, limit_s=280)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", TABLE)
def test_equal_to_ddp(case: str, outcomes: Any) -> None:
    first, second = outcomes[case].check()
    assert len(first["losses"]) == STEPS
    assert first["losses"] != second["losses"], "the ranks must see different batches, or the test shows nothing"
    # Gathered, really: each rank read the other's slices, and the other's gradients.
    for answer in (first, second):
        assert sum(link["all_gather"]["bytes"] for link in answer["traffic"].values()) > 0
        assert sum(link["reduce_scatter"]["bytes"] for link in answer["traffic"].values()) > 0
