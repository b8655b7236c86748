# SPDX-License-Identifier: Apache-2.0
"""Policy, reference and reward model in one process, and optimizer states on disk between steps (worker/away_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from away_cases import CASES

SENTENCES = {
    "not prepared": "SGD is not an optimizer that zeropp.prepare adopted",
    "to": "to='disk' is not allowed; wanted one of 'device', 'cpu', 'nvme'",
    "path": "to='nvme' needs path=",
    "no path": "does not combine with offload_states.to='cpu'",
    "LAMB": "offload_states() does not combine with optimizer LAMB",
    "blocked": "file",
}


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    return run_ranks("away_cases", selected("case"), ranks=2, limit_s=200)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(one, marks=pytest.mark.slow) if one in ("AdamW, stage 3", "SGD bf16, stage 2") else one
        for one in CASES
    ],
)
def test_states_go_and_come_back(case: str, outcomes: Any) -> None:
    for told in outcomes[case].check():
        if case == "refusals":
            assert told.pop("files") == [["states", "states"], []], "gone with the model"
            assert {name for name, sentence in told.items() if SENTENCES[name] in sentence} == set(SENTENCES), told
            continue
        assert told["went"] == told["stayed"] and told["went"][-1] != told["went"][0]
        assert told["handed on"] == told["plain"]["handed on"] and told["handed on"][0] > 2
        assert told["moved"] == told["back"] and told["again"] == 0
        assert 0.9 * told["were"] < told["moved"] <= told["were"], "all but the padding of slices"
        assert told["held"] == [0, 0, told["moved"]] and told["storage"] == 0
        assert told["left"] == [] and told["as before"]
        for name in ("step", "save"):
            assert "on disk since zeropp.offload_states" in told[name], told
