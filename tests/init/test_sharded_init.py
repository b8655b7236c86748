# SPDX-License-Identifier: Apache-2.0
"""sharded_init: the values of plain construction, 1/N of the memory, and clear refusals. The cases are in
cases.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from warm import launch
from zeropp.zero.model.init import is_sharded, sharded_init

CASES = Path(__file__).with_name("cases.py")
PACKAGE = os.pathsep.join(sys.path)  # the ranks import what this process imports
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PACKAGE}


def run(case: str, ranks: int) -> None:
    done = launch(ranks, CASES, case, "--group", timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_are_those_of_plain_construction(ranks):
    run("values", ranks)


@pytest.mark.parametrize("case", ["held", "refuses", "seeds", "raises", "memory", "prepared"])
def test_two_ranks(case):
    run(case, 2)


def test_one_process_without_a_group_changes_nothing():
    torch.manual_seed(0)
    plain = nn.Linear(5, 7)
    torch.manual_seed(0)
    with sharded_init():
        ours = nn.Linear(5, 7)
    assert type(ours.weight) is nn.Parameter and not is_sharded(ours.weight)
    assert torch.equal(plain.weight, ours.weight) and torch.equal(plain.bias, ours.bias)
