# SPDX-License-Identifier: Apache-2.0
"""Check that another revision computes the same bits: ``python scripts/same_bits.py REV [--quick] [--jobs N]``

REV is built beside the tree (revision.py). Both train the GPT of tests/zero for 20 steps in the same cases (same_bits_cases.py): every stage
x {memory, NVMe} x {step after, in the backward, delayed} x {fp32, bf16, states in bf16 and int8} x {1 rank, 2 ranks, 2 hosts}, and every
pair of these with an optimizer, accumulation, clipping and communication of another kind. Losses, parameters, and what a checkpoint holds of
the optimizer must be equal bit for bit; a combination that one refuses, both must refuse; and a sample of checkpoints must load in the
other revision, which then goes on with the same bits. ``--quick`` trains only the pairs.

One line a case, and a summary. Exit status: 0 the same, 1 different, 2 no such revision, or it does not build.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "tests")]

import revision  # noqa: E402  (its folder is put on the path above)
import same_bits_cases as cases  # noqa: E402
import warm  # noqa: E402

WORKER = Path(__file__).with_name("same_bits_worker.py")
LAUNCH_S = 1800.0
"""A launch of many cases; each has a limit of its own in the worker."""
COVERS = 4
"""Choices of cases that have every pair, where time is no matter."""
SHOWN = 3
"""Tensors that a line names."""

Job = dict[str, Any]
Record = dict[str, Any]


@dataclass
class Outcome:
    """The answers of all ranks to a job."""

    ranks: list[Record]

    @property
    def status(self) -> str:
        """ran, refused, accepted or failed; of ranks that disagree, "failed"."""
        found = {record["status"] for record in self.ranks}
        return found.pop() if len(found) == 1 else "failed"

    @property
    def said(self) -> str:
        """The sentence of an error; the first failure's, if there is one."""
        ordered = sorted(self.ranks, key=lambda record: record["status"] != "failed")
        return str(ordered[0].get("said", ""))


def difference(
    ours: Outcome, theirs: Outcome, keys: Sequence[str] = ("figures", "tensors", "figures after", "tensors after")
) -> str:
    """Return what differs first, or an empty string. The sentences of errors are not compared."""
    for who, outcome in (("this tree", ours), ("REV", theirs)):
        if outcome.status == "failed":
            return f"{who} failed: {outcome.said.strip()[-1500:]}"
    if ours.status != theirs.status:
        return f"this tree: {ours.status} {ours.said!r}; REV: {theirs.status} {theirs.said!r}"
    if len(ours.ranks) != len(theirs.ranks):
        return f"this tree has {len(ours.ranks)} ranks, REV {len(theirs.ranks)}"
    found = (
        _difference(ours.ranks[rank], theirs.ranks[rank], key) for key in keys for rank in range(len(ours.ranks))
    )  # what came first in the training is named first
    return next((f"rank {index % len(ours.ranks)}: {text}" for index, text in enumerate(found) if text), "")


def _difference(ours: Record, theirs: Record, key: str) -> str:
    mine, other = ours.get(key), theirs.get(key)
    if mine == other:
        return ""
    if isinstance(mine, list) and isinstance(other, list):
        if len(mine) != len(other):
            return f"{key}: {len(mine)} and {len(other)} of them"
        at = next(i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
        return f"{key}: number {at} is {mine[at]}, and {other[at]} in REV"
    mine, other = mine or {}, other or {}
    names = [name for name in {**mine, **other} if mine.get(name) != other.get(name)]
    lacking = [name for name in names if name not in mine or name not in other]
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return (
        f"{key}: {len(names)} of {len({**mine, **other})} differ ({len(lacking)} are there on one side only): {shown}"
    )


class Side:
    """One tree, and the ranks that run jobs with its zeropp."""

    def __init__(self, tree: revision.Tree, folder: Path) -> None:
        self.tree, self.folder = tree, folder
        python = os.pathsep.join([str(tree.python), str(WORKER.parent)])
        self.env = {**os.environ, "PYTHONPATH": python, "OMP_NUM_THREADS": "1"}
        self.env.pop("ZEROPP_HOST_ID", None)

    def kept(self, case: cases.Case) -> str:
        """Return the folder of the checkpoint of a case."""
        return str(self.folder / "checkpoints" / cases.name_of(case).replace(", ", "_").replace(" ", "-"))

    def run(self, world: str, jobs: Sequence[Job]) -> list[Outcome]:
        """Run jobs on the ranks of a world. A job that ends its ranks fails alone: fresh ranks take those after it."""
        done: list[Outcome] = []
        while len(done) < len(jobs):
            done += self.launch(world, jobs[len(done) :])
        return done

    def launch(self, world: str, jobs: Sequence[Job]) -> list[Outcome]:
        """Run jobs until all are done or one fails; at least one has an outcome."""
        ranks = cases.RANKS[world]
        with tempfile.TemporaryDirectory(prefix=f"{world.replace(' ', '-')}-", dir=self.folder) as name:
            folder = Path(name)
            (folder / "scratch").mkdir()
            order = {"jobs": jobs, "out": name, "scratch": str(folder / "scratch"), "hosts": world == "2 hosts"}
            (folder / "order.json").write_text(json.dumps(order))
            try:
                done = warm.launch(ranks, WORKER, folder / "order.json", env=self.env, timeout=LAUNCH_S)
                log = done.stdout + done.stderr
            except subprocess.TimeoutExpired as error:
                log = f"not finished after {LAUNCH_S:.0f} s\n{error.stderr}"
            rows = [answers(folder / f"{rank}.jsonl") for rank in range(ranks)]
        if not any(rows):
            raise revision.RevisionError(f"{self.tree.name}: the ranks of {world} do not start:\n{log[-3000:]}")
        return outcomes(rows, log)


def answers(path: Path) -> dict[int, Record]:
    """Return the records of a rank by job; empty where a job was begun and not ended."""
    found: dict[int, Record] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        if "begun" in record:
            found[record["begun"]] = {}
        else:
            found[record.pop("job")] = record
    return found


def outcomes(rows: Sequence[dict[int, Record]], log: str) -> list[Outcome]:
    """Return the outcomes of the jobs that some rank has begun; where a rank gave no answer, the log says why."""
    lost = {"status": "failed", "said": f"a rank ended: {log[-3000:]}"}
    begun = 1 + max(index for row in rows for index in row)
    return [Outcome([row.get(index) or lost for row in rows]) for index in range(begun)]


@contextlib.contextmanager
def sides(rev: str, cache: Path = revision.CACHE) -> Iterator[tuple[Side, Side]]:
    """This tree and the other, each with a folder for its files, which goes away."""
    other, ours = revision.checkout(rev, cache), revision.this_tree()
    with tempfile.TemporaryDirectory(prefix=".same-bits-", dir=cache) as name:
        pair = []
        for which, tree in (("ours", ours), ("theirs", revision.Tree(f"REV {other.name}", other.folder))):
            folder = Path(name, which)
            folder.mkdir()
            pair.append(Side(tree, folder))
        yield pair[0], pair[1]


def chosen(ours: Side, quick: bool) -> list[Job]:
    """Return the jobs of all worlds: what Config says of every combination, and the cases that are trained."""
    (planned,) = ours.run("1 rank", [{"what": "plan", "covers": 1 if quick else COVERS}])
    if planned.status != "planned":
        raise revision.RevisionError(f"this tree: the cases cannot be chosen:\n{planned.said}")
    answer = planned.ranks[0]
    usual = [case for case in cases.core() if not quick and cases.name_of(case) not in answer["refused"]]
    trained = {cases.name_of(case): case for case in (*usual, *answer["cover"])}
    jobs: list[Job] = [{"what": "probe", "case": case} for case in cases.core() if cases.name_of(case) not in trained]
    return jobs + [{"what": "train", "case": case} for case in trained.values()]


class Report:
    """Prints a line a case and counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def line(self, what: str, case: cases.Case, differs: str, status: str) -> None:
        verdict = (
            "DIFFERS" if differs else {"refused": "refused alike", "accepted": "accepted alike"}.get(status, "same")
        )
        self.counts[f"{what}: {verdict}"] += 1
        self.counts["DIFFERS" if differs else "alike"] += 1
        print(f"{verdict:14} {what:6} {cases.name_of(case)}{': ' if differs else ''}{differs}", flush=True)

    def summary(self, seconds: float, rev: str) -> int:
        parts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()) if ":" in what)
        print(f"this tree against {rev}: {parts or 'nothing compared'}; {seconds:.0f} s")
        return 1 if self.counts["DIFFERS"] or not self.counts["alike"] else 0


class World:
    """The jobs of one number of ranks, on both sides."""

    def __init__(self, name: str, jobs: Sequence[Job], sides: tuple[Side, Side], quick: bool) -> None:
        self.name, self.sides = name, sides
        self.jobs = [job for job in jobs if job["case"]["world"] == name]
        trained = [job["case"] for job in self.jobs if job["what"] == "train"]
        self.crossing = cases.sample(trained, ("stage", "step") if quick else ("stage", "place", "step", "types"))

    def train(self, side: Side) -> list[Outcome]:
        """Run all jobs of one side, which keeps the checkpoints that the other one loads."""
        keeps = [{"keep": side.kept(job["case"])} if job["case"] in self.crossing else {} for job in self.jobs]
        return side.run(self.name, [{**job, **more} for job, more in zip(self.jobs, keeps, strict=True)])

    def load(self, side: Side, ran: Sequence[cases.Case]) -> list[Outcome]:
        """Load the checkpoints of the other side."""
        (other,) = (one for one in self.sides if one is not side)
        return side.run(self.name, [{"what": "load", "case": case, "folder": other.kept(case)} for case in ran])


def compare(sides: tuple[Side, Side], jobs: Sequence[Job], quick: bool, at_once: int, report: Report) -> None:
    """Run all worlds on both sides, then load checkpoints crosswise."""
    names = sorted({job["case"]["world"] for job in jobs}, key=list(cases.RANKS).index)
    worlds = [World(name, jobs, sides, quick) for name in names]
    with ThreadPoolExecutor(at_once) as workers:
        trained = [[workers.submit(world.train, side) for side in sides] for world in worlds]
        loaded = []
        for world, training in zip(worlds, trained, strict=True):
            found = list(zip(world.jobs, *(one.result() for one in training), strict=True))
            for job, mine, other in found:
                report.line(job["what"], job["case"], difference(mine, other), mine.status)
            ran = [
                (job["case"], mine, other)
                for job, mine, other in found
                if job["case"] in world.crossing and mine.status == other.status == "ran"
            ]
            crossed = [case for case, *_ in ran]
            loaded.append((ran, [workers.submit(world.load, side, crossed) for side in sides]))
        for ran, loading in loaded:
            for (case, mine, other), here, there in zip(ran, *(one.result() for one in loading), strict=True):
                after = ("figures after", "tensors after")
                differs = difference(here, other, after) or difference(mine, there, after)
                report.line("load", case, differs, here.status)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/same_bits.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rev", metavar="REV", help="commit, branch or tag to compare this tree with")
    parser.add_argument("--quick", action="store_true", help="every value in pairs with every other: under 2 minutes")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), metavar="N", help="launches at once"
    )
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: wanted at least 1")
    if shutil.which("git") is None:
        parser.error("git is not installed")
    report = Report()
    try:
        with sides(options.rev) as (ours, theirs):
            started = time.monotonic()
            compare((ours, theirs), chosen(ours, options.quick), options.quick, options.jobs, report)
            return report.summary(time.monotonic() - started, theirs.tree.name)
    except revision.RevisionError as error:
        print(f"scripts/same_bits.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
