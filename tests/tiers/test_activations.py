# SPDX-License-Identifier: Apache-2.0
"""Activations on NVMe: equal to activations in memory bit for bit, written and read behind the computation, counted, and
an error where storage fails. And tiles of matrices and sequences, and activations that ranks share out, in the same launches
of ranks."""

from __future__ import annotations

from typing import Any

import pytest
from activation_cases import ON_ONE_RANK, ON_TWO_RANKS

TABLE = [(1, case) for case in ON_ONE_RANK] + [(2, case) for case in ON_TWO_RANKS]
WORKER = "activation_cases"  # for the fixture `outcomes`


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_activations(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()
