# SPDX-License-Identifier: Apache-2.0
"""get_full, get_local, set_full, set_local and local_range on two ranks (worker/values_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from values_cases import CASES

SENTENCES = {
    "not prepared": "Parameter of shape (2, 3) is not a parameter of a model that zeropp.prepare was given",
    "shape": "set_full: values of shape (2,) for '0.weight' of shape (5, 7)",
    "no gradient": "'0.weight' has no gradient to replace; call backward first",
    "no state": "'0.weight' has no 'exp_avg' yet: states exist from the first optimizer.step() on",
    "part": "set_local: 1000 elements for '0.weight', of which this rank has",
    "kind": "'0.weight' has no 'momentum'; it has 'value', 'grad', 'exp_avg', 'exp_avg_sq'",
}


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    return run_ranks("values_cases", selected("case"), ranks=2, limit_s=200)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_values(case: str, outcomes: Any) -> None:
    for told in outcomes[case].check():
        if case == "without a piece":
            assert "'weight' has no 'exp_avg'; it has 'value', 'grad', 'momentum_buffer'" in told
        if case == "refusals":
            assert {name for name, sentence in told.items() if SENTENCES[name] in sentence} == set(SENTENCES), told
