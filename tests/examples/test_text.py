# SPDX-License-Identifier: Apache-2.0
"""The text of the examples: split by file, the same batch for the same step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, PRESETS, learning_rate
from text import Text

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    for number in range(60):
        (tmp_path / f"file-{number}.txt").write_text(f"this is file {number}\n" * 2500)
    return tmp_path


def test_files_are_on_one_side_only_and_always_the_same(folder):
    text, again = Text(folder), Text(folder)
    assert torch.equal(text.train, again.train) and torch.equal(text.validation, again.validation)
    sides = [bytes(side.tolist()) for side in (text.train, text.validation)]
    for number in range(60):
        line = f"this is file {number}\n".encode()
        assert (line in sides[0]) != (line in sides[1]), number


def test_a_batch_depends_on_step_and_rank_only(folder):
    text = Text(folder)
    where = {"ranks": 2, "batch": 3, "context": 16, "device": CPU}
    inputs, targets = text.batch(5, rank=1, **where)
    assert inputs.shape == targets.shape == (3, 16) and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, text.batch(5, rank=1, **where)[0])
    assert not torch.equal(inputs, text.batch(5, rank=0, **where)[0])
    assert not torch.equal(inputs, text.batch(6, rank=1, **where)[0])


def test_every_rank_validates_its_own_windows(folder):
    text = Text(folder)
    parts = [text.validation_batches(rank=r, ranks=3, batch=4, context=32, device=CPU) for r in range(3)]
    assert len({len(part) for part in parts}) == 1 and parts[0]
    assert not torch.equal(parts[0][0][0], parts[1][0][0])


def test_the_standard_library_is_there_by_default():
    text = Text()
    assert len(text.train) > 4 << 20 and len(text.validation) > 1 << 17
    assert b"def " in bytes(text.train[:100000].tolist())


def test_presets_are_models_and_schedules():
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in GPT(preset.model).parameters()) for name, preset in PRESETS.items()}
    assert sizes["small"] < sizes["base"] < sizes["large"]
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert max(rates) == rates[4] == 1.0 and rates[0] == 0.2 and rates[-1] == pytest.approx(0.05, abs=0.01)
