# SPDX-License-Identifier: Apache-2.0
"""examples/ray_train.py: two workers of a local Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_train.py"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install zeropp[ray]")
def test_the_example_trains(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    command = [sys.executable, EXAMPLE, "--folder", tmp_path, "--steps", 20, "--width", 64, "--layers", 2]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["last"] < found["first"] - 0.5
    assert (tmp_path / "checkpoint" / "latest").exists()
