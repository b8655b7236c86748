# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of GPUs: without one they are refused by name, and their code runs on the simulated GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sim_build
import torch

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("gpu_*.py") if path.stem != "gpu_overhead")
WHY_NOT = sim_build.why_no_torch_device()


def run(name: str, rows: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), name, "--quick", "--json", str(rows)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, **more})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_it_is_refused_by_name(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path / "rows")
    assert done.returncode == 2, done.stderr
    assert f"{name}: this machine has 0 GPUs" in done.stderr
    assert not (tmp_path / "rows").read_text()


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can be built")
@pytest.mark.parametrize("name", NAMES)
def test_its_code_runs_on_the_simulated_gpu(name: str, tmp_path: Path) -> None:
    sim_build.torch_device()  # before the time limit runs
    done = run(name, tmp_path / "rows", ZEROPP_BENCH_DEVICE="sim", SIM_IDLE_MS="100", PYTHONPATH=path())
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert found and all(row["bench"] == name and row["ours"] > 0 and row["peer"] > 0 for row in found)


def path() -> str:
    return os.pathsep.join(str(ROOT / folder) for folder in ("python", "tests/sim"))
