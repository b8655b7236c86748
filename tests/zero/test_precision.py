# SPDX-License-Identifier: Apache-2.0
"""Types by purpose: gradients that add up, travel and stay in types of their own, computation under autocast. The references
stand in worker/precision_cases.py. ("gradients: reduce fp32", "gradients: reduce bf16" and "steps with them" are torch's
test_reduce_dtype and test_grad_acc_with_reduce_dtype, "clamped" is its test_clamp_reduce_dtype.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from precision_cases import CASES

ALONE = (
    "gradients: reduce fp32",
    "gradients: autocast, reduce bf16",
    "with tiers",
    "autocast is torch's",
    "master bf16",
)
SLOW = ("gradients: fp16, reduce bf16", "gradients: autocast", "master bf16 converges")
ON_HOSTS = ("gradients: reduce fp32", "gradients: accumulate fp32")
TABLE = [(2, case) for case in CASES] + [(1, case) for case in ALONE]


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[Any]]) -> Any:
    wanted, done = selected("ranks_case"), {}

    def find(ranks: int, case: str) -> Any:
        if ranks not in done:
            done[ranks] = run_ranks("precision_cases", [c for r, c in wanted if r == ranks], ranks=ranks)
        return done[ranks][case]

    return find


@pytest.mark.parametrize(
    "ranks_case",
    [pytest.param(one, marks=pytest.mark.slow) if one[1] in SLOW else one for one in TABLE],
    ids=[f"{case}-{ranks}" for ranks, case in TABLE],
)
def test_precision(ranks_case: tuple[int, str], outcomes: Any) -> None:
    outcomes(*ranks_case).check()


def test_precision_between_hosts(run_ranks: Callable[..., Any]) -> None:
    for outcome in run_ranks("precision_hosts_cases", ON_HOSTS, ranks=2).values():
        outcome.check()
