# SPDX-License-Identifier: Apache-2.0
"""Test the simulated GPU by torch's FSDP2, unmodified, on two ranks: right in every schedule, wrong without a wait.

So the simulation is neither too lenient nor stricter than CUDA.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import fsdp2_model  # noqa: E402
import sim_build  # noqa: E402

WHY_NOT = sim_build.why_no_torch_device()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can be built")

RANKS = 2
LIMIT_S = 280.0
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
    codes = run(commands, environment, folder)
    assert codes == [0] * RANKS, "\n".join((folder / f"{rank}.err").read_text() for rank in range(RANKS))
    found = [json.loads((folder / f"{rank}.out").read_text().splitlines()[-1]) for rank in range(RANKS)]
    assert sabotage != "none" or not any(each["error"] for each in found)
    wanted = fsdp2_model.reference(RANKS)
    return [
        lazy for i, lazy in enumerate(schedules) if any(far(found[r]["losses"][i], wanted[r]) for r in range(RANKS))
    ]


def run(commands: list[list[str]], environment: dict[str, str], folder: Path) -> list[int]:
    """Return the exit code of each rank. A rank waits without a limit for one that failed, and so it is killed."""
    deadline = time.monotonic() + LIMIT_S
    with contextlib.ExitStack() as stack:
        ranks = []
        for i, command in enumerate(commands):
            out, err = (stack.enter_context((folder / f"{i}.{name}").open("w")) for name in ("out", "err"))
            ranks.append(stack.enter_context(subprocess.Popen(command, stdout=out, stderr=err, env=environment)))
            stack.callback(ranks[-1].kill)
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            assert time.monotonic() < deadline, f"the ranks did not end within {LIMIT_S} s"
            time.sleep(0.05)
    return [rank.returncode for rank in ranks]


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
