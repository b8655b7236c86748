# SPDX-License-Identifier: Apache-2.0
"""Test ``doctor --device`` and the check of a GPU's first use on the simulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sim_build
from test_sim_torch import run

WHY_NOT = sim_build.why_no_torch_device()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can be built")


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    sim_build.torch_device()


def test_every_kernel_is_right() -> None:
    found = run("case_doctor.py", "doctor", "--device", "sim", "--json")
    report = json.loads(found["printed"])
    names = [one["name"] for one in report["devices"]["sim:0"]]
    assert [one for one in report["devices"]["sim:0"] if not one["passed"]] == []
    assert found["status"] == 0 and report["healthy"]
    assert report["gather"]["way"] == "copy" and report["gather"]["nccl"] == "NCCL 2.28.9 is found"
    assert {"memory and copies", "waits for counters", "memory at several addresses", "sparse_attention"} <= set(names)
    steps = [name for name in names if name.startswith("steps, ")]
    assert {"steps, stage 0", "steps, stage 3, all on the host", "steps, stage 3, all in files"} <= set(steps)
    assert len(names) == len(set(names)) == 28 + len(steps)


def test_a_step_that_differs_from_plain_torch_is_named() -> None:
    found = run("case_doctor.py", "--break", "step", "doctor", "--device", "sim:0", "--json")
    wrong = [one for one in json.loads(found["printed"])["devices"]["sim:0"] if not one["passed"]]
    assert found["status"] == 1 and wrong and all(one["name"].startswith("steps, ") for one in wrong)
    assert "other bits than in plain torch" in wrong[0]["why"] or "the loss of step" in wrong[0]["why"]
    assert "Offload(params='cpu', optimizer='cpu')" in wrong[0]["instead"]


def test_what_is_wrong_is_named_with_what_to_use_instead() -> None:
    found = run("case_doctor.py", "--break", "norm_squares", "doctor", "--device", "sim:0", "--quick", "--json")
    (wrong,) = [one for one in json.loads(found["printed"])["devices"]["sim:0"] if not one["passed"]]
    assert found["status"] == 1
    assert wrong["name"] == "norm_squares" and "other bits than the CPU's" in wrong["why"]
    assert "Offload(optimizer='cpu')" in wrong["instead"]


@pytest.mark.slow
def test_the_table_ends_with_what_failed() -> None:
    found = run("case_doctor.py", "--break", "norm_squares", "doctor", "--device", "sim", "--quick")
    assert found["status"] == 1 and found["printed"].endswith("1 of 22 checks failed\n")
    assert found["printed"].startswith("sim:0")


def test_the_first_use_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = run("case_first_use.py")
    assert found == {"auto": 0, "always": 1, "off": 0, "records": 1, "remembered": 0,
                     "broken": found["broken"], "wrong": found["wrong"]}  # fmt: skip
    assert found["broken"].startswith(
        "prepare: sim:0 fails the check of its first use: norm_squares (result 0 has other bits"
    )
    assert "ZEROPP_GPU_CHECK=off trains all the same" in found["broken"]
    assert found["wrong"] == "ZEROPP_GPU_CHECK=maybe is not allowed; wanted auto, always or off"
