# SPDX-License-Identifier: Apache-2.0
"""The pipeline example, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pipeline_gpt.py"


def test_the_loss_falls() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--steps", "20"], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    losses = [float(one) for one in re.findall(r"loss ([0-9.]+) nats", done.stdout)]
    assert done.returncode == 0 and len(losses) == 2, done.stdout + done.stderr
    assert losses[1] < losses[0] < 5.0, losses
