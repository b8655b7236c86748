# SPDX-License-Identifier: Apache-2.0
"""examples/slurm.sbatch, with stand-ins for srun and scontrol: two agents on this machine, each said to be a host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm.sbatch"
SCONTROL = '#!/bin/sh\n[ "$*" = "show hostnames cluster[1-2]" ] || exit 9\nprintf "127.0.0.1\\nelsewhere\\n"\n'
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
ZEROPP_HOST_ID=one "$@" & one=$!
ZEROPP_HOST_ID=two "$@" & two=$!
wait $one && wait $two
"""


def test_the_script_is_one():
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0


@pytest.mark.slow
def test_two_nodes_train(tmp_path):
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "RANKS": "1", "PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(one for one in sys.path if one), "SLURM_JOB_NODELIST": "cluster[1-2]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", SCRIPT, ROOT / "examples" / "quickstart.py"],
        capture_output=True, text=True, timeout=150, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("loss ") == 1  # rank 0 prints
    assert (tmp_path / "out" / "quickstart" / "latest").read_text() == "step-20\n"
