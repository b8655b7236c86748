# SPDX-License-Identifier: Apache-2.0
"""ZeRO++ (qwZ, qgZ) in ZeRO-2 and ZeRO-3: the bits, the bytes, the losses; see worker/plusplus_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import zeropp
from plusplus_cases import CASES, DEMO

QUICK = [case for case in CASES if not case.startswith("demo model")]
TABLE = [(ranks, case) for ranks in (2, 3) for case in (QUICK if ranks == 2 else ("int8 int4 bf16", "bytes"))]


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[Any]]) -> Any:
    wanted, done = selected("ranks_case"), {}

    def find(ranks: int, case: str) -> Any:
        if ranks not in done:
            done[ranks] = run_ranks("plusplus_cases", [c for r, c in wanted if r == ranks], ranks=ranks, limit_s=280)
        return done[ranks][case]

    return find


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks_case", TABLE, ids=[f"{case}-{ranks}" for ranks, case in TABLE])
def test_plusplus(ranks_case: tuple[int, str], outcomes: Any) -> None:
    answers = outcomes(*ranks_case).check()
    for answer in answers:
        if ranks_case[1] == "bytes":
            exact = answer["exact"]
            for seen in answer.values():
                assert seen["reduced"] == seen["wanted"]
                # Twice a step and unit of the shards; the rest (small units, votes) is the same whatever the form.
                assert exact["gathered"] - seen["gathered"] == exact["shards"] - seen["shards"]
        if ranks_case[1] == "converges":
            assert answer["exact"] < 0.9 * answer["first"], "it must learn, or equal losses show little"
            assert abs(answer["int8 int8"] / answer["exact"] - 1) < 0.02, answer
            assert abs(answer["int8 int4"] / answer["exact"] - 1) < 0.05, answer


def test_what_cannot_work() -> None:
    with pytest.raises(
        zeropp.ConfigError, match=r"Config\.comm\.grads: 'int8' does not combine with Config\.stage=1: .* use stage 2"
    ):
        zeropp.Config(stage=1, comm=zeropp.Comm(grads="int8"))
    with pytest.raises(zeropp.ConfigError, match="gathered at stage 3 only"):
        zeropp.Config(stage=2, comm=zeropp.Comm(params="int8"))
    with pytest.raises(zeropp.ConfigError, match="2 is not allowed; wanted 'host', or 0 for none"):
        zeropp.Config(comm=zeropp.Comm(secondary_shard=2))
    with pytest.raises(zeropp.ConfigError, match=r"'int4' does not combine with Config\.offload\.params\.kind='nvme'"):
        zeropp.Config(comm=zeropp.Comm(params="int4"), offload=zeropp.Offload(params="nvme", path="/tmp"))
    for block in (24, 8192):
        with pytest.raises(zeropp.ConfigError, match="a multiple of 16, at most 4096"):
            zeropp.Comm(block_elems=block)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_demo_model_ends_within_half_a_percent(run_ranks: Callable[..., Any]) -> None:
    found = run_ranks("plusplus_cases", [f"demo model, {how}" for how in DEMO], ranks=2, limit_s=1400)
    losses = {how: found[f"demo model, {how}"].check()[0] for how in DEMO}
    for loss in losses.values():
        assert loss == pytest.approx(losses["exact"], rel=0.005), losses
