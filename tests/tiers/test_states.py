# SPDX-License-Identifier: Apache-2.0
"""Optimizer states on NVMe: equal to states in memory bit for bit, saved, loaded, counted, and whole or refused after
storage failed."""

from __future__ import annotations

from typing import Any

import pytest
from state_cases import CASES

TABLE = [(ranks, case) for ranks in (1, 2) for case in CASES]
WORKER = "state_cases"  # for the fixture `outcomes`


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_states(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()
