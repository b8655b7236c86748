# SPDX-License-Identifier: Apache-2.0
"""examples/long_context.py, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one), "OMP_NUM_THREADS": "1"}


def test_it_learns_from_sequences_that_two_ranks_share():
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2",
        str(EXAMPLES / "long_context.py"), "--tokens", "255", "--steps", "8",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(one) for one in re.findall(r"loss (\S+) \(127 of 255 tokens", done.stdout)]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
