# SPDX-License-Identifier: Apache-2.0
"""examples/hf_causal_lm.py: trains, and leaves files that need no zeropp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch_hf import torchrun

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install zeropp[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zeropp[hf]")

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_trains(tmp_path):
    config = tmp_path / "zeropp.json"
    config.write_text('{"stage": 3}')
    given = ("--output_dir", str(tmp_path / "out"), "--zeropp", str(config), "--use_cpu", "--save_steps", "10",
             "--logging_steps", "5", "--learning_rate", "2e-3", "--report_to", "none", "--max_steps", "20",
             "--lr_scheduler_type", "constant", "--width", "64", "--layers", "2")  # fmt: skip
    done = torchrun(2, str(ROOT / "examples" / "hf_causal_lm.py"), *given)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("zeropp: stage 3, 2 ranks") == 1, "the table, once"
    state = tmp_path / "out" / "checkpoint-20" / "trainer_state.json"
    through = [row["loss"] for row in json.loads(state.read_text())["log_history"] if "loss" in row]
    assert through[-1] < through[0] - 0.5
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.hidden_size == 64
