# SPDX-License-Identifier: Apache-2.0
"""Gradients on NVMe: equal to gradients in memory bit for bit, read, changed, counted, and lost without harm when
storage fails."""

from __future__ import annotations

from typing import Any

import pytest
from gradient_cases import CASES

TABLE = [(ranks, case) for ranks in (1, 2) for case in CASES]
WORKER = "gradient_cases"  # for the fixture `outcomes`


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_gradients(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()
