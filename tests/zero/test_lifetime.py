# SPDX-License-Identifier: Apache-2.0
"""Models come and go: memory, files and mappings with them; evaluation, copies, generation, several models at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lifetime_cases import CASES, MANY_STEPS


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    return run_ranks("lifetime_cases", selected("case"), ranks=2, limit_s=280)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [c for c in CASES if c not in MANY_STEPS])
def test_lifetime(case: str, outcomes: Any) -> None:
    answers = outcomes[case].check()
    if case.startswith("without the model"):
        for answer in answers:
            assert "the model" in answer and "gone" in answer, answer


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", MANY_STEPS)
def test_two_thousand_steps_hold_what_five_hundred_held(case: str, run_ranks: Callable[..., Any]) -> None:
    # A rank that was forked shares pages with its parent, which would count as growth when they are written.
    run_ranks("lifetime_cases", [case], ranks=2, limit_s=280, cold=True)[case].check()
