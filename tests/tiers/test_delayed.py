# SPDX-License-Identifier: Apache-2.0
"""Updates that run beside the next pass: equal to their definition, to each other in every stage and tier, hidden behind a pass,
flushed where all of the training is wanted, resumable, and heard of when they fail."""

from __future__ import annotations

from typing import Any

import pytest
import zeropp
from delayed_cases import CASES, ON_ONE_RANK, ON_TWO_RANKS
from zeropp import Config, Offload

TABLE = [(1, case) for case in CASES if case not in ON_TWO_RANKS]
TABLE += [(2, case) for case in CASES if case not in ON_ONE_RANK]
WORKER = "delayed_cases"  # for the fixture `outcomes`
HOSTS_CASES = ("equal_everywhere", "in_eight_bits", "memory_of_files", "a_disk_that_fails", "a_full_disk_of_parameters")
HOSTS_SLOW = (
    "equals_its_definition",
    "parts_in_files",
    "shards_of_whole_pages",
    "checkpoints",
    "gradients_that_cannot_be_read",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_delayed(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Offload(delayed_update=True),
            "Offload.delayed_update: True is not allowed; wanted a whole number >= 0",
        ),
        (lambda: Offload(delayed_update=-1), "Offload.delayed_update: -1 is not allowed"),
        (
            lambda: Config(offload=Offload(delayed_update=3)),
            "does not combine with Config.offload.optimizer.kind='device'",
        ),
        (
            lambda: Config(stage=0, offload=Offload(optimizer="cpu", delayed_update=3)),
            "'cpu' does not combine with Config.stage=0",
        ),
        (
            lambda: Config(offload=Offload(params="nvme", path="/tmp", delayed_update=3)),
            "does not combine with Config.offload.optimizer.kind='device'",
        ),
    ],
)
def test_what_cannot_be_delayed_is_said(make: Any, said: str) -> None:
    with pytest.raises(zeropp.ConfigError) as caught:
        make()
    assert said in str(caught.value)


@pytest.mark.timeout(300)
def test_between_hosts(run_ranks: Any) -> None:
    for outcome in run_ranks("delayed_hosts_cases", HOSTS_CASES, ranks=2).values():
        outcome.check()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_rest_between_hosts(run_ranks: Any) -> None:
    for outcome in run_ranks("delayed_hosts_cases", HOSTS_SLOW, ranks=2).values():
        outcome.check()


def test_json_has_the_same_key() -> None:
    config = Config.from_json({"stage": 2, "offload": {"optimizer": "cpu", "delayed_update": 40}})
    assert config.offload.delayed_update == 40
