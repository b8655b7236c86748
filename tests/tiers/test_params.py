# SPDX-License-Identifier: Apache-2.0
"""Parameters on NVMe: equal to parameters in memory bit for bit, streamed, saved, loaded, counted, and whole or refused
after storage failed."""

from __future__ import annotations

from typing import Any

import pytest
from params_cases import CASES

ALONE = "under_a_limit_that_memory_exceeds"  # in a process where no other case has left free memory
TABLE = [(ranks, case) for ranks in (1, 2) for case in CASES if case != ALONE]
WORKER = "params_cases"  # for the fixture `outcomes`


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_params(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()


@pytest.mark.timeout(200)
def test_under_a_limit_that_memory_exceeds(run_ranks: Any) -> None:
    run_ranks(WORKER, [ALONE], ranks=1)[ALONE].check()
