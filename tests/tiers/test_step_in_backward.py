# SPDX-License-Identifier: Apache-2.0
"""Steps inside the backward: the bits of the step after it, in every stage and tier; gradients that come and go; fewer bytes; what is
refused in between, and what fails."""

from __future__ import annotations

from typing import Any

import pytest
import zeropp
from step_in_backward_cases import CASES, ON_ONE_RANK
from zeropp import Config, Offload

TABLE = [(1, case) for case in CASES] + [(2, case) for case in CASES if case not in ON_ONE_RANK]
WORKER = "step_in_backward_cases"  # for the fixture `outcomes`


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_backward_step(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"step_in_backward": 1}, "step_in_backward: 1 is not allowed; wanted True or False"),
        ({"clip": 1.0}, "does not combine with Config.clip=1.0: clipping needs the norm of all gradients"),
        ({"precision": "fp16"}, "does not combine with Config.precision='fp16'"),
        ({"stage": 0}, "does not combine with Config.stage=0"),
        (
            {"offload": Offload(optimizer="cpu", delayed_update=3)},
            "does not combine with Config.offload.delayed_update=3",
        ),
        (
            {"offload": Offload(grads="nvme", path="/tmp")},
            "Config.offload.grads.kind='nvme' and Config.accumulate=1: a gradient lives until its unit is stepped",
        ),
        ({"offload": Offload(grads="nvme", path="/tmp")}, "say how many with accumulate="),
    ],
)
def test_what_cannot_step_in_backward_is_said(more: dict[str, Any], said: str) -> None:
    with pytest.raises(zeropp.ConfigError) as caught:
        Config(**{"stage": 2, "step_in_backward": True, **more})
    assert said in str(caught.value)


@pytest.mark.timeout(300)
def test_between_hosts(run_ranks: Any) -> None:
    cases = ("fp32", "bf16", "gradients_come_and_go", "not_finite", "a_disk_that_fails")
    for outcome in run_ranks("step_in_backward_hosts_cases", cases, ranks=2).values():
        outcome.check()


def test_json_has_the_same_key() -> None:
    assert Config.from_json({"stage": 2, "step_in_backward": True}).step_in_backward
