# SPDX-License-Identifier: Apache-2.0
"""Test torch on the simulated GPU: hooks, memory, waits of the host, and a ZeRO-3 by hand without one of its waits.

Each case is a process of its own, because a process has one device of the kind PrivateUse1, and other tests must not
see it.
"""

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


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    """Build the device once, before any time limit of a case runs."""
    sim_build.torch_device()


def run(case: str, *arguments: str, code: int = 0) -> Any:
    """Return what a case prints, as JSON, on its last line. It must end with this code."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SIM_IDLE_MS": "5000"}  # no other process waits
    command = [sys.executable, str(HERE / case), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_hooks_run_on_the_backward_thread_and_on_the_stream_of_their_forward() -> None:
    found = run("case_hooks.py")
    side, seen = found["side"], found["seen"]
    for name in ("unpack", "tensor hook", "post-accumulate hook"):
        assert seen[name] == ["backward thread", 0], name
    for name in ("tensor hook of the side stream", "post-accumulate hook of the side stream"):
        assert seen[name] == ["backward thread", side], name
    assert seen["queue_callback"] == ["backward thread", 0]  # the caller's stream
    assert found["waits"] == {} and found["reasons"] == {"aten::item": 1}


def test_memory_is_reused_by_the_rules_of_cuda() -> None:
    found = run("case_memory.py")
    assert found["without record_stream"] == 7.0  # what the next owner wrote
    assert found["with record_stream"] == 1.0
    assert found["fresh is NaN"] and found["reused is NaN"]
    assert found["late copies"] == [0.0, 1.0]
    assert found["autocast"] == ["torch.bfloat16", "torch.float32"]
    assert not found["error"]


def test_norms_have_the_gradients_of_the_cpu() -> None:
    assert run("case_norms.py") == {"differs": [], "error": ""}


def test_a_program_that_ends_runs_nothing_more_and_waits_for_nothing() -> None:
    assert run("case_exit.py", code=1) == {"value": 0.0}


#: Wait left out: in how many of the 8 schedules the result is wrong. The memory that a gather takes was released
#: after the step, so the wait for it implies the one for the step.
WRONG = {
    "none": 0,
    "compute waits for gather": 6,
    "gather waits for released memory": 2,
    "reduce waits for gradient": 3,
    "gradient kept until it was read": 7,
    "step waits for reduce": 7,
    "gather waits for step": 0,
    "host reads after the copy": 7,
}
SAMPLE = ("none", "compute waits for gather", "gather waits for released memory")


@pytest.mark.parametrize(
    "wait", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in WRONG]
)
def test_a_wait_that_is_left_out_is_noticed(wait: str) -> None:
    found = run("case_waits.py", wait)
    assert len(found["wrong"]) == WRONG[wait], found["wrong"]
    assert not found["error"]


@pytest.mark.slow
def test_seeds_find_nothing_wrong_in_what_is_right() -> None:
    assert run("case_waits.py", "none", "50")["wrong"] == []


#: What makes the host wait in a training pass. Mixtral chooses experts on the host; checkpointing calls item().
MODELS = {
    "llama": set[str](),
    "llama checkpointed": {"aten::item"},
    "gpt2": set[str](),
    "mixtral": {"aten::nonzero", "aten::item"},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_models_of_transformers_have_the_gradients_of_the_cpu(model: str) -> None:
    pytest.importorskip("transformers")
    found = run("case_models.py", model)
    for row in found["rows"]:
        assert row["loss"] < 2e-6 and row["gradients"] < 1e-5, row
        assert set(row["waits"]) <= MODELS[model], row
    assert not found["error"]
