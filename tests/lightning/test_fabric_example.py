# SPDX-License-Identifier: Apache-2.0
"""examples/fabric_loop.py: trains under Fabric's own launcher, saves, and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install zeropp[lightning]")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fabric_loop.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}


def run(folder, steps, *more):
    command = [sys.executable, EXAMPLE, "--folder", folder, "--steps", steps, "--width", 64, "--layers", 2, *more]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=150, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_the_example_goes_on(tmp_path):
    rows = run(tmp_path, 10)
    assert run(tmp_path, 20, "--resume")[-1]["loss"] < rows[-1]["loss"]


@pytest.mark.slow
def test_the_example_trains(tmp_path):
    rows = run(tmp_path, 20)
    assert rows[-1]["step"] == 20 and rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert (tmp_path / "last.ckpt").exists()
