# SPDX-License-Identifier: Apache-2.0
"""Muon on shards; the cases are in worker/muon_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zeropp
from muon_cases import CASES


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    return run_ranks("muon_cases", selected("case"), ranks=2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_muon(case: str, outcomes: Any) -> None:
    outcomes[case].check()


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        (
            {},
            r"group 0 has a parameter of shape \(3,\) and torch.float32, wanted real matrices; put the others in a group with use_muon=False",
        ),
        ({"use_muon": False, "ns_steps": 0}, "ns_steps is 0, wanted a whole number from 1 to 99"),
        ({"use_muon": False, "adjust_lr_fn": "best"}, "adjust_lr_fn is 'best', wanted None, 'original'"),
        ({"use_muon": False, "lr": -1.0}, "lr is -1.0, wanted lr >= 0"),
    ],
)
def test_what_cannot_be_is_refused(keywords: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        zeropp.optim.Muon([torch.nn.Parameter(torch.zeros(3))], **keywords)


def test_outside_of_prepare_it_says_where_it_works() -> None:
    optimizer = zeropp.optim.Muon([torch.nn.Parameter(torch.zeros(3, 3))])
    with pytest.raises(zeropp.Error, match=r"works inside zeropp\.prepare only"):
        optimizer.step()
