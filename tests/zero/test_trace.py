# SPDX-License-Identifier: Apache-2.0
"""zeropp.trace on two ranks (worker/trace_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from trace_cases import CASES


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    return run_ranks("trace_cases", selected("case"), ranks=2, limit_s=200)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_trace(case: str, outcomes: Any) -> None:
    for told in outcomes[case].check():
        if case == "refusals":
            assert "one is being taken already in this process" in told[0]
            assert told[1] == "trace: /no/such is no folder; make it first"
