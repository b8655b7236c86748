# SPDX-License-Identifier: Apache-2.0
"""Buffers follow rank 0, as under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from buffers_cases import CASES

SAYS = {
    "other count": ["prepare: rank 1's model differs from rank 0's: buffer", "'more' (2,)"],
    "SyncBatchNorm": ["'norm' is a SyncBatchNorm, which torch trains on GPUs alone", "sync_buffers=True"],
}


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    return run_ranks("buffers_cases", selected("case"), ranks=2)


@pytest.mark.parametrize("case", CASES)
def test_buffers(case: str, outcomes: Any) -> None:
    for answer in outcomes[case].check():
        assert all(part in answer for part in SAYS.get(case, [])), answer


def test_over_hosts(run_ranks: Callable[..., Any]) -> None:
    for outcome in run_ranks("buffers_hosts_cases", ["stage 0", "gathered"], ranks=2).values():
        outcome.check()


def test_a_rank_that_goes_another_way(run_ranks: Callable[..., Any]) -> None:
    """An error at once, with both sides; not a wait for the time-out."""
    for answer in run_ranks("buffers_diverge_cases", ["diverge"], ranks=2, limit_s=60.0)["diverge"].check():
        assert (
            "the model's buffers at the start of a forward" in answer and "the reduction of the gradient of" in answer
        ), answer
