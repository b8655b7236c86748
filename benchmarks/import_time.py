# SPDX-License-Identifier: Apache-2.0
"""What ``import zeropp`` costs beyond ``import torch``, in fresh processes, beside DeepSpeed's import.

Each sample is a process of its own that imports torch first and then, timed, the module in question; contenders
alternate. The promise is less than 50 ms; files are in the page cache (the warm-up round puts them there).
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from harness import ROOT, BenchError, Need, Run, alternate

CLAIM = "import zeropp costs less than 50 ms beyond import torch"
NEEDS = (Need("DeepSpeed", module="deepspeed"),)

PROMISE_MS = 50.0

#: What a script runs before its first step, by contender; torch is there already.
STATEMENTS = {
    "zeropp": "import zeropp",
    "zeropp ready": "import zeropp; zeropp.prepare, zeropp.Config, zeropp.save",
    "DeepSpeed": "import deepspeed",
    "FSDP2": "from torch.distributed.fsdp import fully_shard",
}

TEMPLATE = """
import time, torch
start = time.perf_counter_ns()
{statement}
print("elapsed_ns", time.perf_counter_ns() - start)
"""


def import_ms(statement: str) -> float:
    """Milliseconds that ``statement`` takes in a process of its own, after ``import torch``."""
    path = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", TEMPLATE.format(statement=statement)],
        env={**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("elapsed_ns "):
            return int(line.split()[1]) / 1e6
    raise BenchError(f"{statement!r} did not run: {done.stderr[-2000:]}")


def run(bench: Run) -> None:
    rounds = 5 if bench.quick else 15
    samples = alternate({name: partial(import_ms, text) for name, text in STATEMENTS.items()}, rounds=rounds)
    extra = {"promised_ms": PROMISE_MS}
    peers = ["DeepSpeed", "FSDP2"]
    bench.compare("import beyond torch", samples, ours="zeropp", peers=peers, unit="ms", extra=extra)
    bench.compare("import with prepare", samples, ours="zeropp ready", peers=peers, unit="ms")
