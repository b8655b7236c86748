# SPDX-License-Identifier: Apache-2.0
"""Gradients on NVMe: equal to gradients in memory bit for bit, read, changed, counted, and lost without harm when
storage fails."""

from __future__ import annotations

from typing import Any

import pytest
from gradient_cases import CASES, ON_ONE_RANK

TABLE = [(1, case) for case in CASES] + [(2, case) for case in CASES if case not in ON_ONE_RANK]
WORKER = "gradient_cases"  # for the fixture `outcomes`


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_gradients(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()
