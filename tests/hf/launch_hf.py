# SPDX-License-Identifier: Apache-2.0
"""Run a script on several ranks, offline: with torchrun, or from a process that has imported transformers."""

from __future__ import annotations

import os
import subprocess
import sys

import warm

ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one),
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def launch(ranks: int, *command: str, limit_s: int = 250) -> subprocess.CompletedProcess[str]:
    return warm.launch(ranks, *command, env=ENVIRONMENT, timeout=limit_s, kind="hf")


def torchrun(ranks: int, *command: str, limit_s: int = 250) -> subprocess.CompletedProcess[str]:
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *agent, *command], capture_output=True, text=True, timeout=limit_s, env=ENVIRONMENT
    )
