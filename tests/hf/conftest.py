# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this folder: all cases of cases.py in one launch of two ranks, because importing transformers takes longer
than the cases."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from launch_hf import launch  # noqa: E402


@pytest.fixture(scope="session")
def answer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Return answer(case) -> what each rank returned. The first call runs every selected case."""
    for module in ("transformers", "accelerate", "peft"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install zeropp[hf]")
    folder = tmp_path_factory.mktemp("hf")
    asked = dict.fromkeys(mark.args[0] for item in request.session.items for mark in item.iter_markers(name="hf_case"))
    done = launch(2, str(HERE / "cases.py"), str(folder), *asked) if asked else None

    def find(case: str) -> list[Any]:
        found = []
        for rank in range(2):
            path = folder / f"{case}.{rank}.json"
            assert path.exists() and done is not None, ((done and done.stderr) or "")[-4000:]
            found.append(json.loads(path.read_text()))
            assert "error" not in found[-1], found[-1]["error"]
        return found

    return find
