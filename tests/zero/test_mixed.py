# SPDX-License-Identifier: Apache-2.0
"""Several prepared models in one backward (worker/mixed_cases.py): ranks that go through them in another order neither wait for
each other for ever nor mix them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mixed_cases import CASES

ON_FOUR_RANKS = ("2 models, crossed", "3 models, crossed", "few buckets, crossed")


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    return run_ranks("mixed_cases", selected("case"), ranks=2)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_torch(case: str, outcomes: Any) -> None:
    outcomes[case].check()


def test_on_four_ranks(run_ranks: Callable[..., Any]) -> None:
    for outcome in run_ranks("mixed_cases", ON_FOUR_RANKS, ranks=4).values():
        outcome.check()


def test_over_hosts(run_ranks: Callable[..., Any]) -> None:
    """There, gathers and sums are collectives of one group: a crossed order is an error at once, that says so."""
    for outcome in run_ranks("mixed_hosts_cases", ["same order", "crossed"], ranks=2).values():
        outcome.check()
