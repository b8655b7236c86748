# SPDX-License-Identifier: Apache-2.0
"""A GPT with tied embeddings under every stage: equal to each other bit for bit, and to torch DDP within fp32
rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from stages_cases import CASES

EVERY_WORLD = ("clipped", "no_sync", "accumulate", "first norm")
TABLE = [(ranks, case) for ranks in (1, 2, 3, 4) for case in (CASES if ranks == 2 else EVERY_WORLD)]


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[Any]]) -> Any:
    """Launched when the first test of a world size asks."""
    wanted, done = selected("ranks_case"), {}

    def find(ranks: int, case: str) -> Any:
        if ranks not in done:
            done[ranks] = run_ranks("stages_cases", [c for r, c in wanted if r == ranks], ranks=ranks, limit_s=280)
        return done[ranks][case]

    return find


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_stages(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    answers = outcomes(ranks, case).check()
    if case == "clipped":
        assert all(a["last"] < 0.9 * a["first"] for a in answers), "it must learn, or equal losses show little"
