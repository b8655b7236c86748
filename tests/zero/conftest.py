# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this folder; worker/ holds what the ranks run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "worker"))

from launch_cases import Outcome, once

Run = Callable[..., dict[str, Outcome]]


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return run_ranks(module, cases, ranks, limit_s) -> {case: Outcome}; `module` is worker/MODULE.py with a table
    CASES."""

    def run(
        module: str, cases: Iterable[str], ranks: int, limit_s: float = 120.0, cold: bool = False
    ) -> dict[str, Outcome]:
        left, outcomes = list(cases), {}
        while left:
            found = once(module, left, ranks, limit_s, tmp_path_factory.mktemp(module) / "run", cold)
            outcomes.update(found)
            left = [case for case in left if case not in outcomes]
        return outcomes

    return run


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """Return selected("case") -> the values of that parameter in the selected tests of this module."""

    def find(name: str) -> list[Any]:
        values: dict[Any, None] = {}
        for item in request.session.items:
            if getattr(item, "module", None) is request.module and name in getattr(item, "callspec", _NoParams).params:
                values.setdefault(item.callspec.params[name])
        return list(values)

    return find


class _NoParams:
    params: dict[str, Any] = {}  # noqa: RUF012
