# SPDX-License-Identifier: Apache-2.0
"""Reading a tensor never ends the process: views of weights that a hook kept are read after the release
(worker/strays_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from strays_cases import CASES

HOSTS = ("host copy", "nvme")
ALONE = ("nvme", "others, nvme")


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    return run_ranks("strays_cases", selected("case"), ranks=2)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: Any) -> None:
    outcomes[case].check()


def test_two_hosts(run_ranks: Callable[..., Any]) -> None:
    for outcome in run_ranks("strays_hosts_cases", HOSTS, ranks=2).values():
        outcome.check()


def test_one_rank(run_ranks: Callable[..., Any]) -> None:
    for outcome in run_ranks("strays_cases", ALONE, ranks=1).values():
        outcome.check()
