# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend: every subject of conformance.py on 1 to 5 ranks."""

from __future__ import annotations

from functools import cache

import conformance
import pytest
from launch import run_ranks


@cache
def outcomes(ranks: int) -> list[dict[str, str]]:
    """One launch a world size, whatever is asked about it."""
    return [outcome.value for outcome in run_ranks(ranks, conformance.run_all, timeout=280)]


@pytest.mark.parametrize("name", conformance.SUBJECTS)
@pytest.mark.parametrize(
    "ranks",
    [
        2,
        3,
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.slow),
        pytest.param(5, marks=pytest.mark.slow),
    ],
)
def test_conformance(ranks: int, name: str) -> None:
    for rank, outcome in enumerate(outcomes(ranks)):
        assert outcome[name] == "ok", f"rank {rank}: {outcome[name]}"
