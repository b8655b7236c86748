# SPDX-License-Identifier: Apache-2.0
"""float64 and complex128 are trained in float64: reduced, measured, stepped and kept in it (worker/float64_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from float64_cases import CASES

KEYS = {
    "reduce": "Precision.reduce: 'bf16'",
    "state": "Precision.state: 'int8'",
    "comm": "Config.comm.grads: 'int8'",
    "disk": "Config.offload.optimizer.kind: 'nvme'",
    "delayed": "Config.offload.delayed_update: 1",
    "lion": "optimizer Lion",
    "lamb": "optimizer LAMB",
}
FEW = {
    1: ("AdamW, stage 3", "Adam, amsgrad, gathering", "mixed, stage 0", "accumulate, stage 2", "clips values", "kept", "counted"),
    3: ("AdamW, stage 2", "no_sync, stage 1", "accumulate, stage 2"),  # a third of a sum, too, is no float32
}  # fmt: skip
TABLE = [(ranks, case) for ranks in (1, 2, 3) for case in FEW.get(ranks, CASES)]


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any]) -> Callable[[int], Any]:
    found: dict[int, Any] = {}

    def of(ranks: int) -> Any:
        if ranks not in found:
            found[ranks] = run_ranks("float64_cases", FEW.get(ranks, CASES), ranks=ranks, limit_s=200)
        return found[ranks]

    return of


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks, case", TABLE)
def test_float64(ranks: int, case: str, outcomes: Callable[[int], Any]) -> None:
    for told in outcomes(ranks)[case].check():
        if case == "refusals":
            for name, sentence in told.items():
                assert f"{KEYS[name]} does not combine with parameter 'weight' in float64: " in sentence, told
        if case == "counted":
            assert told["planned"] == pytest.approx(32 / ranks)
            assert told["held"]["master"] == told["estimated"]["master"] == 0
            assert told["held"] == pytest.approx(told["estimated"], rel=0.03, abs=1024)
