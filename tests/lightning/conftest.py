# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this folder: all cases of cases.py in one launch of two ranks, because importing Lightning takes longer
than the cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm

HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one),
}  # fmt: skip


@pytest.fixture(scope="session")
def launch() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return launch(2, script, argument, ...) -> the finished process."""

    def run(ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
        return warm.launch(ranks, *command, env=ENVIRONMENT, timeout=280, kind="lightning")

    return run


@pytest.fixture(scope="session")
def answer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, launch: Any
) -> Callable[[str], list[Any]]:
    """Return answer(case) -> what each rank returned. The first call runs every selected case."""
    pytest.importorskip("lightning", reason="lightning is not installed: pip install zeropp[lightning]")
    folder = tmp_path_factory.mktemp("lightning")
    asked = dict.fromkeys(
        mark.args[0] for item in request.session.items for mark in item.iter_markers(name="lightning_case")
    )
    done = launch(2, str(HERE / "cases.py"), str(folder), *asked)

    def find(case: str) -> list[Any]:
        found = []
        for rank in range(2):
            path = folder / f"{case}.{rank}.json"
            assert path.exists(), done.stderr[-4000:]
            found.append(json.loads(path.read_text()))
            assert "error" not in found[-1], found[-1]["error"]
        return found

    return find
