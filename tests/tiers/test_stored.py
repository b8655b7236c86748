# SPDX-License-Identifier: Apache-2.0
"""Weights of linear layers in 8 and 4 bits on NVMe and in memory, for inference: rounded as stated, everything else exact, bytes
counted, and training refused."""

from __future__ import annotations

from typing import Any

import pytest
import zeropp
from stored_cases import CASES, SLOW
from zeropp import Config, Precision

TABLE = [(ranks, case) for ranks in (1, 2) for case in CASES if case not in SLOW]
WORKER = "stored_cases"  # for the fixture `outcomes`
HOSTS_CASES = (
    "rounds_as_stated",
    "bytes_are_counted",
    "a_fraction",
    "writes_text",
    "a_read_that_fails",
    "texts_of_other_lengths",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_stored(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_transformers(ranks: int, run_ranks: Any) -> None:
    for outcome in run_ranks(WORKER, SLOW, ranks=ranks).values():
        outcome.check()


@pytest.mark.timeout(300)
def test_between_hosts(run_ranks: Any) -> None:
    for outcome in run_ranks("stored_hosts_cases", HOSTS_CASES, ranks=2).values():
        outcome.check()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Precision(stored="int3"), "Precision.stored: 'int3' is not allowed; wanted one of 'int8', 'int4'"),
        (
            lambda: Config(precision=Precision(stored="int8")),
            "does not combine with Config.offload.params.kind='device'",
        ),
    ],
)
def test_what_cannot_be_stored_is_said(make: Any, said: str) -> None:
    with pytest.raises(zeropp.ConfigError) as caught:
        make()
    assert said in str(caught.value)
