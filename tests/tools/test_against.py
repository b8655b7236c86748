# SPDX-License-Identifier: Apache-2.0
"""benchmarks/run.py --against: two launches take turns, their rows are matched by case, and ratios above 1 mean that this tree is better."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import against  # noqa: E402  (its folder is put on the path above)
from harness import Own  # noqa: E402

#: Launches a rank between two measurements of its own, as benchmarks may. Each turn is noted where both sides write; so is what a side does
#: between two turns.
BENCH = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
from harness import alternate
from turns import TWINS

def note(what):
    with open({log!r}, "a") as log:
        log.write(os.environ["ZEROPP_BENCH_SIDE"] + " " + what + "\\n")
    time.sleep(0.01)
    return 1.0

def measured(where):
    found = alternate({{"ours": lambda: note(where), "peer": None}}, rounds=2, warmup=1, ours=["ours"])
    assert found == {{"ours": [1.0, 1.0]}}

if len(sys.argv) > 1:
    measured("rank")
else:
    measured("before")
    note("set-up")
    with TWINS.launching() as variables:
        if os.fork() == 0:
            os.environ.update(variables, RANK="0")
            os.execv(sys.executable, [sys.executable, __file__, "rank"])
        assert os.wait()[1] == 0
    measured("after")
"""


def test_launches_take_turns(tmp_path):
    log, script = tmp_path / "log", tmp_path / "bench.py"
    script.write_text(BENCH.format(benchmarks=str(ROOT / "benchmarks"), log=str(log)))
    sides = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "ZEROPP_BENCH_SIDE": side, "ZEROPP_BENCH_TURNS": str(tmp_path)},
        )
        for side in ("second", "first")
    ]
    assert [one.wait(timeout=60) for one in sides] == [0, 0]
    lines = [line.split() for line in log.read_text().splitlines()]
    order = {where: [side for side, what in lines if what == where] for where in ("before", "rank", "after")}
    assert order["before"] == order["rank"] == ["first", "second", "second", "first", "first", "second"]
    assert [set(order["after"][i : i + 2]) for i in (0, 2, 4)] == [{"first", "second"}] * 3
    # nobody prepares the next case while the twin is at its turn
    assert {side for side, what in lines[6:8]} == {"first", "second"} and {what for _, what in lines[6:8]} == {"set-up"}


def own(case: str, *samples: float, better: str = "lower") -> Own:
    return Own(case=case, unit="ms", better=better, samples=samples)  # type: ignore[arg-type]


def test_rows_are_matched_by_case():
    first = (
        [own("a", 1.0, 2.0, 4.0), own("b", 8.0, better="higher"), own("c", 1.0)],
        [own("b", 4.0, better="higher"), own("a", 2.0, 4.0, 8.0)],
    )
    second = ([own("a", 3.0)], [own("a", 3.0), own("d", 1.0)])
    rows, alone = against.combine("bench", [first, second], "REV abc")
    assert [(row.case, row.ratio, row.rounds) for row in rows] == [("a", 2.0, 4), ("b", 2.0, 1)]
    assert rows[0].ours == 2.5 and rows[0].peer == 3.5 and rows[0].peer_name == "REV abc"
    assert alone == [("c", "in this tree"), ("d", "in REV abc")]


def test_an_overhead_lost_in_noise_has_a_ratio():
    low, ratio, high = against.ratios([-1.0, 0.0, 1.0], [-1.0, 1.0, 3.0], "lower")
    assert ratio == 1.0 and low <= ratio <= high


@pytest.mark.parametrize("words", [["--against", "no-such-branch", "quantise"], ["--against"]])
def test_a_wrong_revision_is_said(words):
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no-such-branch" in done.stderr or "expected one argument" in done.stderr
