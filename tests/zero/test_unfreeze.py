# SPDX-License-Identifier: Apache-2.0
"""Gradual unfreezing of what was frozen at prepare (worker/unfreeze_cases.py), its refusals and its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from unfreeze_cases import OTHER, PARITY, TWINS

ALONE = "on one rank only"  # its ranks do not talk to each other any more


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    wanted = selected("case")
    found = run_ranks("unfreeze_cases", [case for case in wanted if case != ALONE], ranks=2, limit_s=200)
    return found | (run_ranks("unfreeze_cases", [ALONE], ranks=2) if ALONE in wanted else {})


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", PARITY)
def test_equal_to_torch(case: str, outcomes: Any) -> None:
    outcomes[case].check()


#: Beside others that go the same ways.
RARE = (
    "sums in bf16",
    "sums in fp32",
    "few buckets",
    "Lion",
    "clipped in the step",
    "accumulate, stage 1",
    "no masters",
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] if one in RARE else []) for one in TWINS])
def test_equal_to_what_was_frozen_after_prepare(case: str, outcomes: Any) -> None:
    outcomes[case].check()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "ranks, cases",
    [
        (1, ["stage 0, added", "stage 3, all", "bf16", "accumulate"]),
        pytest.param(3, ["bf16", "LAMB"], marks=pytest.mark.slow),
    ],
)
def test_on_other_numbers_of_ranks(ranks: int, cases: list[str], run_ranks: Callable[..., Any]) -> None:
    for outcome in run_ranks("unfreeze_cases", cases, ranks=ranks).values():
        outcome.check()


@pytest.mark.timeout(200)
def test_over_hosts(run_ranks: Callable[..., Any]) -> None:
    for outcome in run_ranks("unfreeze_hosts_cases", ["stage 0", "stage 2", "stage 3, bf16"], ranks=2).values():
        outcome.check()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", OTHER)
def test_other_cases(case: str, outcomes: Any) -> None:
    for answer in outcomes[case].check():
        if case == "memory":
            for found in answer:  # while it sleeps a parameter costs nothing, and then what it always does
                for kind in ("params", "grads", "master", "optimizer"):
                    said, held = found["said"][kind], found["held"][kind]
                    assert said == pytest.approx(held, rel=0.03, abs=1024), (kind, found)
        if case == "added groups in checkpoints":
            assert "with the groups that optimizer.add_param_group had added by then" in answer[0]
            assert "'blocks.2.into.weight' was trained there, and is frozen here: " in answer[1]
            assert (
                "Config.offload.optimizer.kind: 'nvme' does not combine with unfreezing: files are laid out in prepare; leave the parameter trainable"
                in answer[1]
            )
        if case == "few buckets, frozen after":
            assert 0 < answer["peak"] <= answer["said"]
        if case == ALONE:
            assert "the gradient of module 'blocks.2'" in answer and "rank 1" in answer
        if case == "refusals":
            check_refusals(answer)


def check_refusals(told: dict[str, str]) -> None:
    reasons = {
        "states on nvme": "Config.offload.optimizer.kind: 'nvme' does not combine with unfreezing: files are laid out in prepare",
        "parameters on nvme": "Config.offload.params.kind: 'nvme' does not combine with unfreezing: files are laid out in prepare",
        "step in backward": "Config.step_in_backward: True does not combine with unfreezing: the units of the step are laid out in prepare",
        "one bit": "optimizer OneBitAdam does not combine with unfreezing: its states are laid out in prepare",
    }
    begin = "ConfigError: requires_grad of parameter '{}' cannot become True after zeropp.prepare: it was frozen there, and "
    end = "; leave the parameter trainable until prepare, and freeze it after"
    for name, reason in reasons.items():
        for case in (name, f"{name}, added"):
            assert told[case] == begin.format("norm.weight") + reason + end, told[case]
    assert (
        told["whole"]
        == begin.format("head.weight")
        + "a model that was frozen and without an optimizer in prepare does not combine with unfreezing: nothing in it is made to be trained"
        + end
    )
    assert (
        told["float16"].startswith(begin.format("0.weight") + "Precision.param: ")
        and "float16 needs a loss scale" in told["float16"]
    )
    assert (
        "a parameter of shape (2, 2) is not one of the model that this optimizer was prepared with" in told["foreign"]
    )
    assert "a parameter of shape (8,) for Muon, wanted real matrices" in told["muon"]
    assert "some parameters appear in more than one parameter group" in told["twice"]
    for stage in (0, 3):
        assert "parameter 'norm.weight' requires grad, and is in no group" in told[f"no group, stage {stage}"]
        assert "optimizer.add_param_group({'params': [...]})" in told[f"no group, stage {stage}"]
    assert "parameter 'blocks.1.into.weight' was unfrozen inside a forward" in told["inside"]
