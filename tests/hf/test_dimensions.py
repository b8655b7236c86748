# SPDX-License-Identifier: Apache-2.0
"""Trainer over four ranks that share matrices and sequences at once, against stock Trainer (DDP) with as many samples a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch_hf import launch

FP32 = 5e-6  # the same fp32 numbers, added up in another order
WAYS = ("tp 2 x dp 2", "tp 2 x sp 2")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of four ranks logged, by way."""
    for module in ("transformers", "accelerate", "peft"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install zeropp[hf]")
    folder = tmp_path_factory.mktemp("dimensions")
    done = launch(4, str(Path(__file__).with_name("cases.py")), str(folder), "shared_dimensions")
    files = [folder / f"shared_dimensions.{rank}.json" for rank in range(4)]
    assert all(file.exists() for file in files), done.stderr[-4000:]
    found = [json.loads(file.read_text()) for file in files]
    assert not any("error" in one for one in found), found[0].get("error")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_share_two_ways_train_and_evaluate_as_ranks_that_do_not(
    way: str, logs: list[dict[str, Any]]
) -> None:
    for found in logs:
        stock, ours = found["stock"], found[way]
        assert len(stock) == 4 and "eval_correct" in stock[-1]
        assert [sorted(row) for row in ours] == [sorted(row) for row in stock]
        assert max(abs(a[key] - b[key]) for a, b in zip(stock, ours, strict=True) for key in a) < FP32
