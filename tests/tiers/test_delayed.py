# SPDX-License-Identifier: Apache-2.0
"""Updates that run beside the next pass: equal to their definition, to each other in every stage and tier, hidden behind a pass,
flushed where all of the training is wanted, resumable, and heard of when they fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import zeropp
from delayed_cases import CASES, ON_ONE_RANK, ON_TWO_RANKS
from zeropp import Config, Offload
from zeropp.zero.prepare import _check_hosts

TABLE = [(1, case) for case in CASES if case not in ON_TWO_RANKS]
TABLE += [(2, case) for case in CASES if case not in ON_ONE_RANK]
WORKER = "delayed_cases"  # for the fixture `outcomes`


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
        (lambda: Config(offload=Offload(delayed_update=3)), "None with offload.optimizer on 'device'"),
        (lambda: Config(stage=0, offload=Offload(optimizer="cpu", delayed_update=3)), "'device' at stage 0"),
        (
            lambda: Config(offload=Offload(params="nvme", path="/tmp", delayed_update=3)),
            "None with offload.optimizer on 'device'",
        ),
    ],
)
def test_what_cannot_be_delayed_is_said(make: Any, said: str) -> None:
    with pytest.raises(zeropp.ConfigError) as caught:
        make()
    assert said in str(caught.value)


def test_over_hosts_it_is_refused() -> None:
    config = Config(stage=2, offload=Offload(optimizer="cpu", delayed_update=3))
    with pytest.raises(zeropp.ConfigError, match="delayed_update: 3 on 2 hosts is not implemented yet"):
        _check_hosts(config, SimpleNamespace(hosts=2))


def test_json_has_the_same_key() -> None:
    config = Config.from_json({"stage": 2, "offload": {"optimizer": "cpu", "delayed_update": 40}})
    assert config.offload.delayed_update == 40
