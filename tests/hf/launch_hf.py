# SPDX-License-Identifier: Apache-2.0
"""Runs a script on several ranks, offline."""

from __future__ import annotations

import os
import subprocess
import sys

ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one),
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def launch(ranks: int, *command: str, limit_s: int = 250) -> subprocess.CompletedProcess[str]:
    """torchrun, with this tree's zeropp."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *torchrun, *command], capture_output=True, text=True, timeout=limit_s, env=ENVIRONMENT
    )
