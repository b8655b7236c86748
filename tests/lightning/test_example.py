# SPDX-License-Identifier: Apache-2.0
"""examples/lightning_gpt.py: two processes by Lightning's own launcher; its file loads without zeropp."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed: pip install zeropp[lightning]")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lightning_gpt.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_trains(tmp_path):
    import os

    command = [
        sys.executable,
        str(EXAMPLE),
        "--steps",
        "40",
        "--width",
        "64",
        "--layers",
        "2",
        "--folder",
        str(tmp_path),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = ast.literal_eval(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["val_loss"] < 4.5, "less than the 5.5 of not knowing any byte"
    held = torch.load(tmp_path / "step=40.ckpt", weights_only=True)
    assert (
        all(value.numel() for value in held["state_dict"].values())
        and (tmp_path / "step=40.ckpt.zeropp" / "latest").exists()
    )
