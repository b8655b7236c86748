# SPDX-License-Identifier: Apache-2.0
"""Optimizers' states in bf16 and 8 bits through prepare, every stage, checkpoints and values; what the ranks do stands in
worker/low_states_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zeropp
from low_states_cases import CASES

TABLE = [(ranks, case) for ranks in (1, 2) for case in (CASES if ranks == 2 else ("every stage int8",))]


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[Any]]) -> Any:
    wanted, done = selected("ranks_case"), {}

    def find(ranks: int, case: str) -> Any:
        if ranks not in done:
            done[ranks] = run_ranks("low_states_cases", [c for r, c in wanted if r == ranks], ranks=ranks)
        return done[ranks][case]

    return find


@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_low_states(ranks_case: tuple[int, str], outcomes: Any) -> None:
    for answer in outcomes(*ranks_case).check():
        if ranks_case[1] == "converges":
            for state in ("bf16", "int8"):
                assert abs(answer[state] - answer["fp32"]) < 0.03 * answer["fp32"], answer
        if ranks_case[1] == "bytes held":
            # Two moments; in 8 bits 2 and a scale of 4 bytes for each block that a parameter's slice has a part of.
            assert answer["fp32"] == 8.0 and answer["bf16"] == 4.0, answer
            assert 2 + 2 * 4 / 256 <= answer["int8"] < 2.1, answer


def test_refusals() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(zeropp.ConfigError, match=r"Precision.state: 'bf16' does not combine with SGD without"):
        config = zeropp.Config(precision=zeropp.Precision(state="bf16"))
        zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    for optimizer in (torch.optim.RMSprop, zeropp.optim.OneBitAdam, zeropp.optim.OneBitLamb):
        with pytest.raises(
            zeropp.ConfigError, match=f"Precision.state: 'int8' does not combine with optimizer {optimizer.__name__}"
        ):
            config = zeropp.Config(stage=1, precision=zeropp.Precision(state="int8"))
            zeropp.prepare(model, optimizer(model.parameters(), lr=0.1), config)
    for kind in ("optimizer", "params", "grads"):
        offload = zeropp.Offload(**{kind: zeropp.Tier("nvme", path="/tmp")})
        with pytest.raises(zeropp.ConfigError, match=f"Precision.state: 'bf16' does not combine with .*offload.{kind}"):
            zeropp.Config(precision=zeropp.Precision(state="bf16"), offload=offload)
