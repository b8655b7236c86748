# SPDX-License-Identifier: Apache-2.0
"""Cases of torch's own tests of FSDP2, re-expressed (worker/conformance_cases.py; the list: docs/conformance.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance_cases import OTHER, TABLE
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", OTHER)
def test_other_cases(case: str, outcomes: Any) -> None:
    for answer in outcomes[case].check():
        if case == "test_fully_shard_communication_count":
            evaluated, forward, backward, held_back = answer
            assert evaluated == forward == {"all_gather": 5}
            # What the last block saved is still whole when its backward begins.
            assert backward["reduce_scatter"] == 5 and 4 <= backward["all_gather"] <= 5
            assert "reduce_scatter" not in held_back
        if case == "test_fully_shard_training_memory":
            assert len(answer["seen"]) == 12 and answer["after forward"] <= 2 * answer["block"]
            assert min(answer["seen"]) > 0 and max(answer["seen"]) <= 2 * answer["block"] + 4 * 4096, answer
            # No unit is whole any more; the memory of two stays warm for the next step.
            assert answer["whole"] == [] and answer["after backward"] <= max(answer["seen"])
            assert answer["grads"] <= 6 * answer["block"] // 2 + 6 * 4096


def test_the_page_lists_them() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [case for case in (*TABLE, *OTHER) if f"`{case.partition(',')[0]}`" not in text]
    assert not missing
