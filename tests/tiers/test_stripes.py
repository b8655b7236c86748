# SPDX-License-Identifier: Apache-2.0
"""Tiers whose files are striped over several folders: equal to memory bit for bit, shared out evenly, checked, and clear about
which folder failed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stripe_cases import CASES, ON_TWO_RANKS

ON_ONE_RANK = ("fp32", "a_fraction", "other_steps", "stored")
"""What is laid out in another way there; the others are slow."""
TABLE = [(2, case) for case in CASES] + [
    pytest.param((1, case), marks=() if case in ON_ONE_RANK else pytest.mark.slow)
    for case in CASES
    if case not in ON_TWO_RANKS
]
WORKER = "stripe_cases"  # for the fixture `outcomes`


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_case", TABLE, ids=lambda one: f"{one[1]}-{one[0]}")
def test_stripes(ranks_case: tuple[int, str], outcomes: Any) -> None:
    ranks, case = ranks_case
    outcomes(ranks, case).check()


FULL = """
import os, sys, torch, zeropp
kind, first, second = sys.argv[1:]
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(3)))
adam = torch.optim.AdamW(model.parameters())
config = zeropp.Config(stage=3, offload=zeropp.Offload(**{kind: "nvme"}, path=[first, second]))
try:
    zeropp.prepare(model, adam, config)
except zeropp.TierError as error:
    assert error.path.startswith(second) and second in str(error), error
    print(error.bytes_wanted, error.bytes_free)
assert not os.listdir(first) and not os.listdir(second)
"""

LIMIT_BYTES = 1 << 20


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=pytest.mark.slow) for one in ("params", "grads")] + ["optimizer"]
)
def test_a_full_second_disk_is_found_by_prepare(kind: str, tmp_path: Path) -> None:
    """12 MiB of parameters or gradients, 24 of states: in stripes of 2 MiB half of it on each disk."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    mount = f"mount -t tmpfs -o size={LIMIT_BYTES} none {second}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False).returncode:
        pytest.skip("needs unshare -rm, to mount a small file system")
    run = f'{mount} && exec "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", run, "sh", sys.executable, "-c", FULL, kind, str(first), str(second)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wanted, free = (int(one) for one in done.stdout.split())
    assert wanted == (12 if kind == "optimizer" else 6) << 20 and LIMIT_BYTES // 2 < free <= LIMIT_BYTES
