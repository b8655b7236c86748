# SPDX-License-Identifier: Apache-2.0
"""Lion, SGD and Adagrad with states, parameters and gradients on NVMe: bit for bit as in memory; what is saved, counted, refused."""

from __future__ import annotations

from typing import Any

import pytest
from update_cases import CASES, ON_ONE_RANK

TABLE = [(1, case) for case in ON_ONE_RANK] + [(2, case) for case in CASES]
SLOW = ("equal_everywhere",)
WORKER = "update_cases"  # for the fixture `outcomes`


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "ranks_case",
    [pytest.param(one, marks=pytest.mark.slow) if one[1] in SLOW else one for one in TABLE],
    ids=[f"{case}-{ranks}" for ranks, case in TABLE],
)
def test_updates(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()
