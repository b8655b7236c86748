# SPDX-License-Identifier: Apache-2.0
"""examples/pr_moe.py: the teacher learns, and the student begins where it ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pr_moe.py"


@pytest.mark.slow
def test_the_example_trains_a_pyramid_and_its_student() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    given = ["--steps", "40", "--student-steps", "21", "--experts", "2", "4", "4", "--layers", "2"]
    done = subprocess.run(
        [sys.executable, *command, *given],
        capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    losses = {
        (who, int(step)): float(loss) for who, step, loss in re.findall(r"(\w+) step (\d+): loss ([\d.]+)", done.stdout)
    }
    assert losses["teacher", 39] < losses["teacher", 0] - 1
    assert losses["student", 0] < losses["teacher", 0] - 1, "it has the teacher's values"
    assert len(re.findall(r"blocks.\d.moe.experts: shares", done.stdout)) == 3
