# SPDX-License-Identifier: Apache-2.0
"""Complex parameters: held as pairs of numbers, trained as torch trains them (worker/complex_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from complex_cases import CASES

SENTENCES = {
    "value": "clip_grad_value_ clamps elements, and has no meaning for complex parameters, such as 'gain'",
    "norm": "clip_grad_norm_: norm_type 1.0 has no meaning for complex parameters",
    "muon": "torch.complex64, wanted real matrices",
}


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any]) -> Callable[[int], Any]:
    found: dict[int, Any] = {}

    def of(ranks: int) -> Any:
        if ranks not in found:
            found[ranks] = run_ranks("complex_cases", CASES, ranks=ranks, limit_s=200)
        return found[ranks]

    return of


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_complex(ranks: int, case: str, outcomes: Callable[[int], Any]) -> None:
    for told in outcomes(ranks)[case].check():
        if case == "refusals":
            assert {name for name, sentence in told.items() if SENTENCES[name] in sentence} == set(SENTENCES), told
