# SPDX-License-Identifier: Apache-2.0
"""Activations on NVMe: equal to activations in memory bit for bit, written and read behind the computation, counted, and
an error where storage fails. And tiles of matrices and sequences, in the same launches of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from activation_cases import CASES, ON_TWO_RANKS

TABLE = [(1, case) for case in CASES] + [(2, case) for case in ON_TWO_RANKS]


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    """One launch a world size, of the cases that were asked for, when the first test asks."""
    asked = [
        i.callspec.params["ranks_case"] for i in request.session.items if getattr(i, "module", None) is request.module
    ]
    done: dict[int, Any] = {}

    def find(ranks: int, case: str) -> Any:
        if ranks not in done:
            done[ranks] = run_ranks("activation_cases", [c for r, c in asked if r == ranks], ranks=ranks)
        return done[ranks][case]

    return find


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_activations(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()
