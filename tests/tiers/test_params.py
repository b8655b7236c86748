# SPDX-License-Identifier: Apache-2.0
"""Parameters on NVMe: equal to parameters in memory bit for bit, streamed, saved, loaded, counted, and whole or refused
after storage failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from params_cases import CASES

TABLE = [(ranks, case) for ranks in (1, 2) for case in CASES]


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    """One launch a world size, of the cases that were asked for, when the first test asks."""
    asked = [
        i.callspec.params["ranks_case"] for i in request.session.items if getattr(i, "module", None) is request.module
    ]
    done: dict[int, Any] = {}

    def find(ranks: int, case: str) -> Any:
        if ranks not in done:
            done[ranks] = run_ranks("params_cases", [c for r, c in asked if r == ranks], ranks=ranks)
        return done[ranks][case]

    return find


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_params(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()
