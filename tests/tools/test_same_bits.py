# SPDX-License-Identifier: Apache-2.0
"""scripts/same_bits.py finds one changed bit, and nothing where nothing changed; the other revision is a tree made up here."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import revision  # noqa: E402  (its folder is put on the path above)
import same_bits  # noqa: E402
import same_bits_cases as cases  # noqa: E402

#: zeropp of this tree, but for the lowest bit of one weight, and for a case that it refuses.
ANOTHER = """
__path__ = [{real!r}]
exec(compile(open({real!r} + "/__init__.py").read(), {real!r} + "/__init__.py", "exec"))
from zeropp.zero.prepare import prepare as _prepare

def prepare(model, optimizer, config):
    if config.stage == 1:
        raise ConfigError("Config.stage: 1 is not allowed")
    weight = next(model.parameters()).data
    weight.view(torch.int32)[0, 0] ^= 1
    return _prepare(model, optimizer, config)

import torch
from zeropp.errors import ConfigError
"""


def case(**values: str) -> cases.Case:
    return {axis: found[0] for axis, found in cases.AXES.items()} | {"world": "1 rank"} | values


@pytest.fixture
def another(tmp_path):
    package = tmp_path / "another" / "python" / "zeropp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(ANOTHER.format(real=str(ROOT / "python" / "zeropp")))
    return revision.Tree("another", tmp_path / "another")


def test_one_changed_bit_is_found(another, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ours = same_bits.Side(revision.Tree("ours", ROOT), tmp_path / "a")
    theirs = same_bits.Side(another, tmp_path / "b")
    usual, nvme, stage_1 = case(), case(place="nvme", step="in backward"), case(stage="1")
    refused = case(stage="0", step="in backward")
    jobs = [{"what": "train", "case": one} for one in (usual, nvme, stage_1)] + [{"what": "probe", "case": refused}]
    jobs[0]["keep"] = ours.kept(usual)
    first = ours.run("1 rank", jobs)
    again = ours.run("1 rank", [jobs[1], {"what": "load", "case": usual, "folder": ours.kept(usual)}])
    changed = theirs.run("1 rank", jobs)
    assert [one.status for one in first] == ["ran", "ran", "ran", "refused"], [one.said for one in first]
    assert not same_bits.difference(first[1], again[0])
    assert not same_bits.difference(first[0], again[1], ("figures after", "tensors after"))
    for index in (0, 1):
        assert same_bits.difference(first[index], changed[index]).startswith("rank 0: figures: number ")
        del first[index].ranks[0]["figures"], changed[index].ranks[0]["figures"]
        assert "tensors: " in same_bits.difference(first[index], changed[index])
    assert any(name.endswith("/exp_avg_sq") for name in first[0].ranks[0]["tensors"])
    assert "this tree: ran ''; REV: refused" in same_bits.difference(first[2], changed[2])
    assert not same_bits.difference(first[3], changed[3])


def test_a_failure_is_a_difference_and_ends_one_case_only(tmp_path):
    side = same_bits.Side(revision.Tree("ours", ROOT), tmp_path)
    lost = {"what": "load", "case": case(), "folder": str(tmp_path / "nothing")}
    outcomes = side.run("1 rank", [lost, {"what": "probe", "case": case()}])
    assert [one.status for one in outcomes] == ["failed", "accepted"]
    assert "CheckpointError" in same_bits.difference(outcomes[0], outcomes[0])


def test_every_value_meets_every_other():
    found = cases.cover(lambda one: True, lambda one: True)
    pairs = set().union(*map(cases.pairs_of, found))
    for a, b in itertools.combinations(cases.AXES, 2):
        for x, y in itertools.product(cases.AXES[a], cases.AXES[b]):
            assert (a, x, b, y) in pairs
    assert len({cases.name_of(one) for one in cases.core()}) == len(cases.core()) == 4 * 2 * 3 * 4 * 3


def test_a_revision_that_is_none_is_said():
    command = [sys.executable, str(ROOT / "scripts" / "same_bits.py"), "no-such-branch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "revision 'no-such-branch': git knows no such commit" in done.stderr
