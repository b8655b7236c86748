# SPDX-License-Identifier: Apache-2.0
"""Test the simulated GPU by torch's FSDP2, unmodified, on two ranks: right in every schedule, wrong without a wait.

So the simulation is neither too lenient nor stricter than CUDA.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import fsdp2_model  # noqa: E402
import sim_build  # noqa: E402

WHY_NOT = sim_build.why_no_torch_device()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can be built")

RANKS = 2
ALL_LAZY = 0xFF
SCHEDULES = (0, ALL_LAZY, 0b1, 0b11111110, 0b10, 0b100, 0b1000)
#: Sums in another order, and torch's CPU kernels for another layout.
TOLERANCE = 2e-6


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    sim_build.torch_device()


def wrong_in(sabotage: str, schedules: tuple[int, ...], folder: Path) -> list[int]:
    """Return the schedules in which the losses of a rank are not those of the CPU."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SIM_IDLE_MS": "100"}
    commands = [
        [
            sys.executable,
            str(HERE / "case_fsdp2.py"),
            str(rank),
            str(RANKS),
            str(folder),
            sabotage,
            *map(str, schedules),
        ]
        for rank in range(RANKS)
    ]
    ranks = [subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) for command in commands]
    outputs = [rank.communicate(timeout=280) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(error for _, error in outputs)
    found = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    assert sabotage != "none" or not any(each["error"] for each in found)
    wanted = fsdp2_model.reference(RANKS)
    return [
        lazy for i, lazy in enumerate(schedules) if any(far(found[r]["losses"][i], wanted[r]) for r in range(RANKS))
    ]


def far(found: list[float], wanted: list[float]) -> bool:
    return any(math.isnan(a) or abs(a - b) > TOLERANCE for a, b in zip(found, wanted, strict=True))


def test_it_is_right(tmp_path: Path) -> None:
    assert wrong_in("none", SCHEDULES[:3], tmp_path) == []


@pytest.mark.slow
def test_it_is_right_in_all_schedules(tmp_path: Path) -> None:
    assert wrong_in("none", SCHEDULES, tmp_path) == []


SABOTAGES = (
    "copy-out before all-gather",
    "reduce-scatter before copy-in",
    "all-gather before copy-out",
    "step before reductions",
)


@pytest.mark.parametrize(
    "sabotage", [SABOTAGES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SABOTAGES[1:])]
)
def test_it_is_wrong_without_one_of_its_waits(sabotage: str, tmp_path: Path) -> None:
    assert wrong_in(sabotage, SCHEDULES[:3], tmp_path)
