# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp doctor`` on real ranks: healthy, one that is slow, one that dies, one that does not answer; and preflight."""

from __future__ import annotations

import json
from typing import Any

import doctor_bodies
import pytest
import zeropp
from launch import run_ranks
from zeropp.cli import main


def report_of(out: str) -> dict[str, Any]:
    """The line of JSON that rank 0 printed."""
    return json.loads(next(line for line in out.splitlines() if line.startswith("{")))


def test_healthy_ranks() -> None:
    outcomes = run_ranks(3, doctor_bodies.doctor, -1, "--json", "--factor", "1000")
    assert [outcome.value for outcome in outcomes] == [0, 0, 0]
    report = report_of(outcomes[0].out)
    assert report["healthy"] and report["faults"] == []
    assert [pair["ranks"] for pair in report["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for times in (report["whole"], *(pair["seconds"] for pair in report["pairs"])):
        assert list(times) == ["8", "8192", "1048576", "16777216"]
        assert all(0 < seconds < 60 for seconds in times.values())
    assert all(one["copy_gb_per_s"] > 0 and one["matmul_gflops"] > 0 for one in report["alone"])
    assert outcomes[1].out == "" and outcomes[2].out == ""


def test_a_slow_rank_is_named() -> None:
    outcomes = run_ranks(3, doctor_bodies.doctor, 1, "--factor", "8")
    assert [outcome.value for outcome in outcomes] == [1, 1, 1], outcomes[0]
    assert "slow: rank 1: " in outcomes[0].out
    assert "with every partner" in outcomes[0].out and "healthy" not in outcomes[0].out


def test_a_dead_rank_is_named_at_once() -> None:
    outcomes = run_ranks(3, doctor_bodies.doctor_with_one_that, "dies", "--json", check=False)
    assert [outcome.code for outcome in outcomes] == [0, 7, 0]
    report = report_of(outcomes[0].out)
    assert not report["healthy"]
    assert (report["faults"][0]["kind"], report["faults"][0]["ranks"]) == ("dead rank", [1])


def test_a_rank_that_does_not_answer_is_named_in_time() -> None:
    outcomes = run_ranks(3, doctor_bodies.doctor_with_one_that, "sleeps", "--timeout", "2", check=False)
    assert [outcome.value for outcome in outcomes] == [1, None, 1]
    assert "dead: rank 1: " in outcomes[0].out


def test_preflight_warns_of_the_slow_rank_and_trains() -> None:
    lines = run_ranks(3, doctor_bodies.prepares)[0].value
    assert any("preflight: slow: rank 2" in line for line in lines), lines


def test_preflight_takes_true_or_false() -> None:
    with pytest.raises(zeropp.ConfigError, match=r"Config\.preflight: 1 is not allowed; wanted True or False"):
        zeropp.Config(preflight=1)


def test_without_ranks_it_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["doctor"]) == 2
    assert "torchrun" in capsys.readouterr().err
