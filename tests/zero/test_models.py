# SPDX-License-Identifier: Apache-2.0
"""More ways of building and driving a model: equal to DDP, or refused with a sentence (worker/models_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from models_cases import TABLE
from parity_cases import STEPS


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    return run_ranks("models_cases", selected("case"), ranks=2, limit_s=280)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", TABLE)
def test_equal_to_ddp(case: str, outcomes: Any) -> None:
    first, second = outcomes[case].check()
    assert len(first["losses"]) == STEPS and first["losses"] != second["losses"]


READS = "reads its values outside of the model's forward and backward; use `with zeropp.gathered(parameter):`"
SENTENCES = {
    "complex": "prepare: parameter 'weight' has dtype torch.complex32, which is not supported",
    "requires_grad": "requires_grad of parameter '1.weight' cannot become True after zeropp.prepare: it was frozen there",
    **dict.fromkeys(("half", "to", "pickle", "torch.save", "deepcopy"), READS),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["refusals", "conversions", "parameters that are not contiguous", "torch.func.grad"])
def test_other_cases(case: str, outcomes: Any) -> None:
    for told in outcomes[case].check():
        if case == "refusals":
            assert told.keys() == SENTENCES.keys()
            assert all(SENTENCES[name] in sentence for name, sentence in told.items()), told
        if case == "conversions":
            replaced, *refused = told
            assert (
                "the data of parameter '0.weight' was replaced after zeropp.prepare (model.to, half, cuda" in replaced
            )
            assert all("p.data of parameter '0.weight' cannot be replaced" in sentence for sentence in refused), told
