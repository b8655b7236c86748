# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's default group under Trainer and Accelerator on CPUs: zeropp's, unless the user names another backend."""

from __future__ import annotations

from datetime import timedelta

import pytest
from launch_hf import launch

pytest.importorskip("transformers", reason="transformers is not installed: pip install zeropp[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zeropp[hf]")

from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from zeropp.accelerate import ZeroppAccelerator
from zeropp.comm import default_group
from zeropp.hf import TrainingArguments


class Begun(Exception):
    """The group would be made here."""


@pytest.fixture(autouse=True)
def begun(monkeypatch):
    def begin(timeout: timedelta) -> None:
        raise Begun(timeout.total_seconds())

    monkeypatch.setattr(default_group, "begin", begin)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def trainer(tmp_path, **more):
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **more)


def test_trainer(tmp_path):
    with pytest.raises(Begun, match=r"1800\.0"):
        trainer(tmp_path, zeropp={"stage": 3})
    with pytest.raises(Begun, match=r"77\.0"):
        trainer(tmp_path, zeropp='{"stage": 1}', ddp_backend="zeropp", ddp_timeout=77)
    assert trainer(tmp_path).ddp_backend is None, "not without zeropp"
    with pytest.raises(ValueError, match="has not been initialized"):  # Accelerate's answer where there is one rank
        trainer(tmp_path, zeropp={"stage": 3}, ddp_backend="gloo")


def test_accelerator():
    with pytest.raises(Begun, match=r"600\.0"):
        ZeroppAccelerator(cpu=True)
    with pytest.raises(Begun, match=r"77\.0"):
        ZeroppAccelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=77))])
    with pytest.raises(ValueError, match="has not been initialized"):
        ZeroppAccelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])


SCRIPT = """
import os, sys
import torch.distributed as dist
from zeropp.hf import TrainingArguments
TrainingArguments(output_dir=sys.argv[1], use_cpu=True, report_to=[], zeropp={"stage": 3})
said = [None] * 2
dist.all_gather_object(said, dist.get_backend())
os.write(1, f"{said}\\n".encode())
"""


def test_two_ranks_meet_over_zeropp_and_leave_without_a_word(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = launch(2, str(script), str(tmp_path), limit_s=100)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["['zeropp', 'zeropp']"] * 2
