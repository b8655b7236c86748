# SPDX-License-Identifier: Apache-2.0
"""A gradient that is not finite is one rank's fault before it is everybody's: the error names that rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from origin_cases import PLACES

SAYS = {
    "one": "'blocks.1.weight' (rank 1 before the sum)",
    "two": "'blocks.1.weight' (rank 0 and rank 1 before the sum)",
    "none": "'blocks.1.weight' (finite on each rank, but not their sum)",
}
OF_TWO = [f"one, {place}" for place in PLACES] + [
    "two, stage 1",
    "two, gathered",
    "none, stage 1",
    "none, stage 3",
    "early",
]
OF_THREE = [
    "one, stage 0",
    "one, stage 1",
    "one, stage 2",
    "one, gathered",
    "two, stage 0",
    "two, stage 3",
    "none, gathered",
]
TABLE = [(2, case) for case in OF_TWO] + [(3, case) for case in OF_THREE]


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[Any]]) -> Any:
    wanted = selected("ranks_case")
    return {
        ranks: run_ranks("origin_cases", [case for count, case in wanted if count == ranks], ranks=ranks)
        for ranks in {count for count, _ in wanted}
    }


@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_who_had_it(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    answers = outcomes[ranks][case].check()
    says = SAYS[case.split(", ", maxsplit=1)[0]] if case != "early" else SAYS["one"]
    for rank, answer in enumerate(answers):
        if case == "early" and says not in answer:  # a rank without a slice of it hears of the other's failure
            assert rank > 0, answer
            continue
        assert says in answer, f"rank {rank}: {answer}"


def test_over_hosts(run_ranks: Callable[..., Any]) -> None:
    cases = ["one, stage 0", "one, stage 2", "two, stage 1", "two, gathered", "none, stage 3"]
    for case, outcome in run_ranks("origin_hosts_cases", cases, ranks=2).items():
        assert all(SAYS[case.split(", ", maxsplit=1)[0]] in answer for answer in outcome.check()), case
