# SPDX-License-Identifier: Apache-2.0
"""docs/failure-modes.md names tests: each file is there, and each case in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    line.split("|")[1:4]
    for line in (ROOT / "docs" / "failure-modes.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and "tests/" in line
]


def test_there_are_some() -> None:
    assert len(ROWS) > 30


@pytest.mark.parametrize("what, why, tests", ROWS, ids=[row[0].strip()[:60] for row in ROWS])
def test_the_tests_are_there(what: str, why: str, tests: str) -> None:
    assert what.strip() and why.strip()
    found = re.findall(r"`(tests/[^`]+)`([^;`]*)", tests)
    assert found
    for path, names in found:
        text = (ROOT / path).read_text(encoding="utf-8")
        wanted = names.strip().strip(",").strip()
        if wanted in text:  # one name, which may have commas in it
            continue
        for name in wanted.split(", "):
            assert name.strip() in text, (path, name)
