# SPDX-License-Identifier: Apache-2.0
"""save and load on several ranks. What each rank does stands in cases.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm import launch

CASES = Path(__file__).with_name("cases.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def run(ranks: int, case: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return launch(ranks, CASES, case, folder, *arguments, timeout=200, env=ENVIRONMENT)


def succeed(ranks: int, case: str, folder: Path, *arguments: str) -> None:
    done = run(ranks, case, folder, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_checkpoint_moves_to_more_ranks_and_another_stage(tmp_path):
    succeed(2, "save", tmp_path, "host_copy=off")
    succeed(3, "resume", tmp_path, "exact=False", "stage=2")


@pytest.mark.slow
def test_a_checkpoint_moves_between_ranks_stages_and_ways_of_holding(tmp_path):
    """Saved by two ranks that gather; loaded by the same, by one shared copy, by other stages, and by one and three
    ranks."""
    succeed(2, "save", tmp_path, "host_copy=off")
    succeed(2, "resume", tmp_path, "host_copy=off")
    succeed(2, "resume", tmp_path, "host_copy=auto")
    succeed(2, "resume", tmp_path, "stage=1")
    succeed(3, "resume", tmp_path, "exact=False", "stage=2")
    succeed(1, "resume", tmp_path, "exact=False", "stage=0")


def test_low_precision_keeps_its_master_weights(tmp_path):
    succeed(2, "save", tmp_path, "precision=bf16", "stage=2")
    succeed(2, "resume", tmp_path, "precision=bf16", "stage=3")


def test_what_one_rank_saved_alike_on_all(tmp_path):
    """Stage 0: rank 0's file alone holds the weights."""
    succeed(2, "save", tmp_path, "stage=0")
    succeed(2, "resume", tmp_path, "stage=3")


@pytest.mark.parametrize("case", ["damage", "full", "differs", "whole", "background", "background_full"])
def test_two_ranks(case, tmp_path):
    succeed(2, case, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_between_accumulated_backwards_begins_a_step(ranks, tmp_path):
    succeed(ranks, "within_a_step", tmp_path)


def test_a_rank_killed_in_save_leaves_the_checkpoint_before(tmp_path):
    run(2, "killed", tmp_path)
    facts, sentence = (tmp_path / "survivor.0").read_text().split("\n", 1)
    assert facts == "1 True ['latest', 'step-1']", (facts, sentence)
    assert "rank 1" in sentence


def test_a_rank_killed_in_a_background_save_is_noticed(tmp_path):
    run(2, "background_killed", tmp_path)
    facts, sentence = (tmp_path / "survivor.0").read_text().split("\n", 1)
    assert facts == "True ['latest', 'step-1']", (facts, sentence)
    assert "rank-00001.safetensors: rank 1 is gone and did not finish it" in sentence
