# SPDX-License-Identifier: Apache-2.0
"""Activations of a simulated GPU in page-locked memory: the same bits in every schedule, no wait of the host, and wrong without a wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import sim_build  # noqa: E402

WHY_NOT = sim_build.why_no_torch_device()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can be built")

EACH = tuple(map(str, range(8)))  # computation, copies down, copies up: each is lazy or not


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    sim_build.torch_device()


def outcome(*arguments: str, **more: str) -> dict[str, Any]:
    """Return what case_activations.py printed; an error of a step, as where gradients are not finite, is wrong in itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SIM_IDLE_MS": "100", **more}
    environment.pop("SIM_LAZY", None)
    command = [sys.executable, str(HERE / "case_activations.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    if "were not finite" in done.stderr:
        return {"wrong": ["not finite"]}
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_schedule_has_the_same_bits_and_the_host_waits_for_nothing() -> None:
    found = outcome("plain", *EACH, "7:1")
    assert (found["wrong"], found["error"], found["waits"]) == ([], "", {})
    figures = found["figures"]
    assert 0 < figures["waiting_peak_bytes"] <= 1 << 15  # of the device's memory
    assert figures["file_bytes"] > 3 * figures["waiting_peak_bytes"]  # when the backward begins
    assert figures["left"]["file_bytes"] == figures["left"]["ahead_bytes"] == 0  # the graphs are gone
    assert figures["memory"]["pinned"]["activations"]["held"] >= figures["file_peak_bytes"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow)
        for case in ("nothing waits", "checkpointed", "two streams", "two streams, nothing waits")
    ]
    + ["a stream for each micro-batch", "wanted elsewhere"],
)
def test_each_way_to_train(case: str) -> None:
    found = outcome(case, "0", "7", "1", "2", "4")
    assert (found["wrong"], found["error"]) == ([], "")


@pytest.mark.parametrize("case", ["a file", pytest.param("a file, checkpointed", marks=pytest.mark.slow)])
def test_a_file(case: str) -> None:
    found = outcome(case, "0", "3", "1", "2")
    assert (found["wrong"], found["error"]) == ([], "")
    figures = found["figures"]
    assert figures["read_bytes"] > 0 and figures["memory"]["nvme"]["activations"]["held"] == 0
    assert figures["memory"]["device"]["activations"]["held"] <= 1 << 15


def test_no_page_locked_memory_left() -> None:
    found = outcome("no room", "0")
    assert "there is no page-locked memory of the host for 65536 bytes more" in found["said"]
    assert "this rank page-locked 65536 bytes for activations and 0 for parameters and gradients" in found["said"]
    assert "Tier('cpu', fraction=0.5)" in found["said"]


def test_one_hardware_queue() -> None:
    found = outcome("nothing waits", "0", "7", SIM_ONE_QUEUE="1")
    assert (found["wrong"], found["error"]) == ([], "")


#: By name: who waits for whom, and a case and schedules of which one is wrong without it.
WAITS = {
    "a copy down waits for the computation": ("down,compute", "plain", "1"),
    "memory that went down is freed after the copy": ("compute,down", "plain", "2"),
    "a copy up waits for the last use of its memory": ("up,compute", "reads the loss", "1"),
    "a copy up waits for the copy down": ("up,down", "wanted elsewhere", "2"),
    "a copy down waits for copies up from its place": ("down,up", "a stream for each micro-batch", "4"),
    "the computation waits for the copy up": ("compute,up", "plain", "4"),
    "a file is written after the copy down": ("host,down", "a file", "2"),
    "a copy down to a file waits for the computation": ("down,compute", "a file", "1"),
}


@pytest.mark.parametrize(
    "name", [name if at < 4 else pytest.param(name, marks=pytest.mark.slow) for at, name in enumerate(WAITS)]
)
def test_it_is_wrong_without_one_of_its_waits(name: str) -> None:
    without, case, schedule = WAITS[name]
    assert outcome(case, f"without={without}", schedule)["wrong"]
