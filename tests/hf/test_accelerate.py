# SPDX-License-Identifier: Apache-2.0
"""Refusals of ZeroppAccelerator, in one process; the loop itself is in test_trainer.py and its example here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launch_hf import launch

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zeropp[hf]")

import zeropp
from zeropp.accelerate import ZeroppAccelerator

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        ({"accumulate": 2}, {}, r"ZeroppAccelerator\(gradient_accumulation_steps=2\)"),
        ({"zero_optimization": {"stage": 1}}, {}, "clip: 1.0 .* accelerator.clip_grad_norm_"),
        ({"precision": "bf16"}, {"mixed_precision": "fp16"}, "give one of them"),
        ({"stge": 1}, {}, "did you mean 'stage'"),
    ],
)
def test_what_cannot_be_says_why(config, more, said):
    with pytest.raises(zeropp.ConfigError, match=said):
        ZeroppAccelerator(zeropp=config, **more)


def test_fp16_backward_step_and_an_optimizer_without_its_model():
    accelerator = ZeroppAccelerator(zeropp={"stage": 2, "precision": "fp16", "loss_scale": 64})
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(zeropp.ConfigError, match=r"give both to one accelerator.prepare\(model, optimizer\)"):
        accelerator.prepare(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert model.weight.dtype == torch.float16
    before = model.bias.detach().float().clone()
    accelerator.backward(model(torch.zeros(2, 4)).sum())
    assert float(accelerator.clip_grad_norm_(model.parameters(), 100.0)) == pytest.approx(8**0.5)
    accelerator.clip_grad_value_(model.parameters(), 0.25)
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert torch.allclose(before - model.bias.float(), torch.full((2,), 0.125), atol=1e-3)
    accelerator.free_memory()


@pytest.mark.slow
def test_the_example_trains_and_goes_on(tmp_path):
    script = str(ROOT / "examples" / "accelerate_loop.py")
    done = launch(2, script, "--folder", str(tmp_path), "--steps", "20", "--width", "64", "--layers", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows[-1]["step"] == 20 and rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert (tmp_path / "state" / "zeropp" / "latest").exists() and (tmp_path / "model.safetensors").exists()
