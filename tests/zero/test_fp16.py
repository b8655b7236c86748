# SPDX-License-Identifier: Apache-2.0
"""fp16 with a dynamic loss scale: the same scales, skipped steps and bits as torch.amp.GradScaler; and clipping by
value. What each rank does stands in worker/fp16_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fp16_cases import CASES

TABLE = [(2, case) for case in CASES] + [(1, case) for case in ("every stage", "accumulates", "clips values")]
SENTENCES = {
    "a scale that cannot go down": "are not finite at loss scale 64, which is fixed; weights and optimizer state are",
    "a loss that was not scaled": "call optimizer.backward(loss) in place of loss.backward()",
}


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[Any]]) -> Any:
    wanted, done = selected("ranks_case"), {}

    def find(ranks: int, case: str) -> Any:
        if ranks not in done:
            done[ranks] = run_ranks("fp16_cases", [c for r, c in wanted if r == ranks], ranks=ranks)
        return done[ranks][case]

    return find


@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_fp16(ranks_case: tuple[int, str], outcomes: Any) -> None:
    answers = outcomes(*ranks_case).check()
    if ranks_case[1] in SENTENCES:
        assert all(SENTENCES[ranks_case[1]] in answer for answer in answers), answers
