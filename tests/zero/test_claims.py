# SPDX-License-Identifier: Apache-2.0
"""Bytes held and bytes moved equal the paper's formulas (worker/claims_cases.py measures)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from claims_cases import CASES
from training import STAGES

WORLDS = (2, 4)


@pytest.fixture(scope="module")
def measured(run_ranks: Callable[..., Any]) -> Callable[[int], dict[str, Any]]:
    done: dict[int, Any] = {}

    def find(ranks: int) -> dict[str, Any]:
        if ranks not in done:
            done[ranks] = run_ranks("claims_cases", CASES, ranks=ranks)
        return done[ranks]

    return find


def _states(precision: str, stage: int, ranks: int) -> float:
    """Bytes a parameter: 2 + 2 + K=12 in bf16 (4 master, 8 moments), 4 + 4 + 8 in fp32."""
    param, grad, rest = (2, 2, 12) if precision == "bf16" else (4, 4, 8)
    return {
        0: param + grad + rest,
        1: param + grad + rest / ranks,
        2: param + (grad + rest) / ranks,
        3: (param + grad + rest) / ranks,
    }[stage]


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_held(stage: str, precision: str, ranks: int, measured: Any) -> None:
    for answer in measured(ranks)["held"].check():
        found = answer[f"{precision}, {stage}"]
        formula = _states(precision, int(stage[6]), ranks)
        assert found["planned"] == pytest.approx(formula, rel=1e-6)
        # Parameters begin at 64 bytes and slices at 64 bytes or a page; buckets end at a page. `padding` is what the
        # layout says; the rest is one page for each unit and kind (6 units here, at most 5 kinds).
        most = formula * (1 + found["padding"]) + 6 * 5 * 4096 / found["real"]
        assert formula <= found["held"] <= most, found
        assert found["padding"] < 0.05


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_on_the_wire(stage: str, ranks: int, measured: Any) -> None:
    """A rank reads, with f = (N-1)/N: 2 f Psi in stages 0 to 2, 3 f Psi in stage 3, f Psi where a host has one
    copy."""
    for answer in measured(ranks)["wire"].check():
        found, four = answer[f"{stage}, 1 micro-steps"], answer[f"{stage}, 4 micro-steps"]
        share = found["psi"] * (ranks - 1) // ranks
        gathers, scatters, reduces = {
            "stage 0": (0, 0, 2), "stage 1": (1, 1, 0), "stage 2": (1, 1, 0), "stage 3": (0, 1, 0),
            "stage 3, gathering": (2, 1, 0), "stage 3, gathering ahead": (2, 1, 0),
        }[stage]  # fmt: skip
        # The tied matrix is needed at both ends of the forward, so it is gathered once more than the formula says. A
        # step begins with a vote of 8 bytes, and each unit's norm with its worst element and the rank of that is 24.
        tied = found["tied"] * (ranks - 1) // ranks
        gathered = gathers * share + (tied if gathers == 2 else 0)
        small = (8 + (0 if stage == "stage 0" else 24 * found["units"])) * (ranks - 1)
        assert 0 < found["tied"] < 0.1 * found["psi"]
        assert found["moved"]["all_gather"] == gathered + small
        assert found["moved"]["reduce_scatter"] == scatters * share
        assert found["moved"]["all_reduce"] == reduces * share
        # Four micro-steps a step: gradients and, where parameters stay whole, parameters travel once for all four.
        assert four["moved"]["all_gather"] == gathered * (4 if gathers == 2 else 1) + small
        assert four["moved"]["reduce_scatter"] == scatters * share
        assert four["moved"]["all_reduce"] == reduces * share
