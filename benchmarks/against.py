# SPDX-License-Identifier: Apache-2.0
"""``run.py NAME... --against REV``: this tree and another revision, in the place of ours and the peer.

REV is built beside the tree (scripts/revision.py). Both run this tree's definition of the benchmark, each with its own zeropp, and only our
own contenders: peers need not be installed. Launches go in pairs that take turns (turns.py), so that the two figures of a ratio are
milliseconds apart. A row's ratio is the median over all turns of several pairs, because where memory happens to lie differs from launch to
launch. Which side begins changes from pair to pair.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import HERE, ROOT, BenchError, Better, Own, Row, Run, gain, quartiles, run_group
from turns import FOLDER_VARIABLE, PYTHON_VARIABLE, SIDE_VARIABLE

sys.path.insert(0, str(ROOT / "scripts"))

import revision

PAIRS, QUICK_PAIRS = 6, 2
"""Even: each side begins as often."""
LAUNCH_S = 3600.0
BAR = 0.99
"""A refactoring keeps every row above."""


def run(names: Sequence[str], rev: str, quick: bool, report: Callable[[Row | Own], None]) -> None:
    """Report a row for every case of these benchmarks.

    Raises:
        revision.RevisionError: REV does not exist, or one of both does not build.
        BenchError: a launch failed.
    """
    theirs, ours = revision.checkout(rev), revision.this_tree()
    count = QUICK_PAIRS if quick else PAIRS
    for name in names:
        bench = Run(name, quick=quick, report=report)
        pairs = []
        for index in range(count):
            bench.log(f"pair {index + 1} of {count}, against REV {theirs.name}")
            pairs.append(launch_pair(name, ours.python, theirs.python, quick, ours_first=index % 2 == 0))
        rows, alone = combine(name, pairs, f"REV {theirs.name}")
        for row in rows:
            report(row)
        for case, side in alone:
            bench.log(f"{case}: measured {side} only")
        slow = [f"{row.case} ({row.ratio:.3f})" for row in rows if row.ratio < BAR]
        bench.log(f"{len(rows)} rows, {len(slow)} below {BAR}{': ' if slow else ''}{', '.join(slow)}")


def launch_pair(name: str, ours: Path, theirs: Path, quick: bool, ours_first: bool) -> tuple[list[Own], list[Own]]:
    """Run the benchmark with both packages at once, in turns; what each of them measured."""
    failed: list[BaseException] = []

    def check() -> None:
        if failed:
            raise BenchError("the other launch failed")

    def launch(side: str, python: Path) -> list[Own]:
        rows = folder / f"{side}.jsonl"
        command = [sys.executable, str(HERE / "run.py"), name, "--json", str(rows), *(["--quick"] if quick else [])]
        environment = {SIDE_VARIABLE: side, FOLDER_VARIABLE: str(folder), PYTHON_VARIABLE: str(python)}
        what = f"{name} with {python}"
        try:
            run_group(command, {**os.environ, **environment}, LAUNCH_S, what, meanwhile=check)
        except BaseException as error:
            failed.append(error)
            raise
        return read(rows)

    with tempfile.TemporaryDirectory(prefix="zeropp-bench-") as made, ThreadPoolExecutor(2) as workers:
        folder = Path(made)
        order = (ours, theirs) if ours_first else (theirs, ours)
        started = [
            workers.submit(launch, side, python) for side, python in zip(("first", "second"), order, strict=True)
        ]
        found = [one.result() if one.exception() is None else [] for one in started]
    if failed:
        raise failed[0]
    return (found[0], found[1]) if ours_first else (found[1], found[0])


def read(path: Path) -> list[Own]:
    """Parse the rows that a launch with ``--json`` left."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Own(**{**json.loads(line), "samples": tuple(json.loads(line)["samples"])}) for line in lines]


def combine(
    name: str, pairs: Iterable[tuple[Sequence[Own], Sequence[Own]]], peer_name: str
) -> tuple[list[Row], list[tuple[str, str]]]:
    """Match rows by their case. Returns the rows, and the cases that one side alone has, each with that side."""
    both: dict[str, list[tuple[Own, Own]]] = {}
    alone: dict[str, str] = {}
    for ours, theirs in pairs:
        mine, other = ({row.case: row for row in rows} for rows in (ours, theirs))
        for case in {**mine, **other}:
            if case in mine and case in other:
                both.setdefault(case, []).append((mine[case], other[case]))
            else:
                alone[case] = "in this tree" if case in mine else f"in {peer_name}"
    return [row_of(name, case, found, peer_name) for case, found in both.items()], sorted(alone.items())


def row_of(name: str, case: str, found: Sequence[tuple[Own, Own]], peer_name: str) -> Row:
    """One row from all turns of a case, in all launches."""
    better, unit = found[0][0].better, found[0][0].unit
    for mine, other in found:
        if len(mine.samples) != len(other.samples):
            raise BenchError(f"{name}: {case}: {len(mine.samples)} turns, and {len(other.samples)} of {peer_name}")
    ours, theirs = ([value for pair in found for value in pair[which].samples] for which in (0, 1))
    low, ratio, high = ratios(ours, theirs, better)
    return Row(
        bench=name, case=case, peer_name=peer_name, unit=unit, rounds=len(ours),
        ours=statistics.median(ours), peer=statistics.median(theirs),
        ratio=ratio, ratio_low=low, ratio_high=high,
        extra={"launches": len(found)},
    )  # fmt: skip


def ratios(ours: Sequence[float], theirs: Sequence[float], better: Better) -> tuple[float, float, float]:
    """How many times better ours is: the quartiles of the ratios of turns that followed each other.

    A figure that is a difference, such as an overhead, can be lost in noise and below 0. Then the quartiles of both are compared, and half
    of the spread stands for what is smaller than that.
    """
    if min(*ours, *theirs) > 0:
        return quartiles([gain(mine, other, better) for mine, other in zip(ours, theirs, strict=True)])
    mine, other = quartiles(ours), quartiles(theirs)
    floor = max(mine[2] - mine[0], other[2] - other[0]) / 2
    low, middle, high = (
        gain(max(a, floor), max(b, floor), better)
        for a, b in zip(
            reversed(mine) if better == "lower" else mine, other if better == "lower" else reversed(other), strict=True
        )
    )
    return low, middle, high
