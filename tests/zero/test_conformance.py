# SPDX-License-Identifier: Apache-2.0
"""Cases of torch's own tests of FSDP2, re-expressed (worker/conformance_cases.py; the list: docs/conformance.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance_cases import TABLE
from parity_cases import STEPS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    return run_ranks("conformance_cases", selected("case"), ranks=2, limit_s=280)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", TABLE)
def test_equal_to_ddp(case: str, outcomes: Any) -> None:
    first, second = outcomes[case].check()
    assert len(first["losses"]) == STEPS and first["losses"] != second["losses"]


def test_the_page_lists_them() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{case.partition(',')[0]}`" in text for case in TABLE)
