# SPDX-License-Identifier: Apache-2.0
"""Fixtures that start ranks for the tests of this folder, as tests/zero does, from cases in worker/."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ZERO_WORKER = Path(__file__).parents[1] / "zero" / "worker"
WORKER = Path(__file__).parent / "worker"
for folder in (ZERO_WORKER, WORKER):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from launch_cases import Outcome, once  # noqa: E402

Run = Callable[..., dict[str, Outcome]]


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return run_ranks(module, cases, ranks) -> {case: Outcome}; `module` is worker/MODULE.py with a table CASES."""

    def run(module: str, cases: Iterable[str], ranks: int, limit_s: float = 240.0) -> dict[str, Outcome]:
        left, outcomes = list(cases), {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(WORKER), prepend=":")
            while left:
                found = once(module, left, ranks, limit_s, tmp_path_factory.mktemp(module) / "run")
                outcomes.update(found)
                left = [case for case in left if case not in outcomes]
        return outcomes

    return run


@pytest.fixture(scope="module")
def outcomes(run_ranks: Run, request: pytest.FixtureRequest) -> Callable[[int, str], Outcome]:
    """Return outcomes(ranks, case) of worker/WORKER.py, a name in the test's module. The first test of a world size launches the
    ranks, with all selected cases."""
    own = [
        i.callspec.params
        for i in request.session.items
        if getattr(i, "module", None) is request.module and hasattr(i, "callspec")
    ]
    asked = [params["ranks_case"] for params in own if "ranks_case" in params]
    done: dict[int, dict[str, Outcome]] = {}

    def find(ranks: int, case: str) -> Outcome:
        if ranks not in done:
            done[ranks] = run_ranks(request.module.WORKER, [c for r, c in asked if r == ranks], ranks=ranks)
        return done[ranks][case]

    return find
