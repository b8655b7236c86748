# SPDX-License-Identifier: Apache-2.0
"""Parameters on NVMe: equal to parameters in memory bit for bit, streamed, saved, loaded, counted, and whole or refused
after storage failed."""

from __future__ import annotations

from typing import Any

import pytest
from params_cases import CASES

TABLE = [(ranks, case) for ranks in (1, 2) for case in CASES]
WORKER = "params_cases"  # for the fixture `outcomes`


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_params(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()
