# SPDX-License-Identifier: Apache-2.0
"""Measure what ``import zeropp`` costs beyond ``import torch``, and ``import zeropp.hf`` beyond ``from transformers import Trainer``,
in fresh processes, beside DeepSpeed's import.

Each sample is a process of its own that imports torch (or Trainer) first and then, timed, the module in question;
contenders alternate. The promise is less than 50 ms; files are in the page cache, and compiled to
bytecode (the warm-up round sees to both).
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from harness import PYTHON, BenchError, Need, Run, alternate

CLAIM = "import zeropp costs less than 50 ms beyond import torch"
NEEDS = (
    Need("DeepSpeed", module="deepspeed"),
    Need("transformers", module="transformers", install="pip install -e .[hf]", peer=False),
    Need("accelerate", module="accelerate", install="pip install -e .[hf]", peer=False),
)

PROMISE_MS = 50.0

#: What a script runs before its first step, by contender; torch is there already.
STATEMENTS = {
    "zeropp": "import zeropp",
    "zeropp ready": "import zeropp; zeropp.prepare, zeropp.Config, zeropp.save",
    "DeepSpeed": "import deepspeed",
    "FSDP2": "from torch.distributed.fsdp import fully_shard",
}

#: The same under Hugging Face's Trainer, which is there already.
UNDER_TRAINER = {
    "zeropp.hf": "from zeropp.hf import Trainer, TrainingArguments",
    "DeepSpeed": "import deepspeed",
}

TEMPLATE = """
import time
{before}
start = time.perf_counter_ns()
{statement}
print("elapsed_ns", time.perf_counter_ns() - start)
"""


def import_ms(statement: str, before: str = "import torch") -> float:
    """Milliseconds that ``statement`` takes in a process of its own, after ``before``."""
    path = os.pathsep.join([str(PYTHON), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", TEMPLATE.format(statement=statement, before=before)],
        env={**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("elapsed_ns "):
            return int(line.split()[1]) / 1e6
    raise BenchError(f"{statement!r} did not run: {done.stderr[-2000:]}")


def run(bench: Run) -> None:
    rounds = 5 if bench.quick else 15
    contenders = {name: partial(import_ms, text) for name, text in STATEMENTS.items()}
    samples = alternate(contenders, rounds=rounds, ours=["zeropp", "zeropp ready"])
    extra = {"promised_ms": PROMISE_MS}
    peers = ["DeepSpeed", "FSDP2"]
    bench.compare("import beyond torch", samples, ours="zeropp", peers=peers, unit="ms", extra=extra)
    bench.compare("import with prepare", samples, ours="zeropp ready", peers=peers, unit="ms")
    before = "from transformers import Trainer"
    contenders = {name: partial(import_ms, text, before) for name, text in UNDER_TRAINER.items()}
    samples = alternate(contenders, rounds=3 if bench.quick else 15, ours=["zeropp.hf"])
    bench.compare("import under Trainer", samples, ours="zeropp.hf", peers=["DeepSpeed"], unit="ms", extra=extra)
