# SPDX-License-Identifier: Apache-2.0
"""docs/failure-modes.md names tests as pytest does, `file::function[case]`: each file is there, and each function and case in it."""

from __future__ import annotations

import ast
import functools
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


@functools.cache
def names(path: Path) -> tuple[set[str], set[str]]:
    """Return the functions and classes that a file defines, and its strings, without docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".c":
        return set(re.findall(r"^(?:static )?\w[\w ]*?\*?(\w+)\(", text, re.MULTILINE)), set()
    tree = ast.parse(text)
    defined, strings, prose = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.add(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            strings.add(node.value)
    return defined, strings


@pytest.mark.parametrize("what, why, tests", ROWS, ids=[row[0].strip()[:60] for row in ROWS])
def test_the_tests_are_there(what: str, why: str, tests: str) -> None:
    assert what.strip() and why.strip()
    found = re.findall(r"`(tests/[^`:]+)(?:::(\w+)(?:\[([^`]+)\])?)?`", tests)
    assert found and len(found) == tests.count("`tests/")
    for path, function, case in found:
        defined, strings = names(ROOT / path)
        assert not function or function in defined, (path, function)
        assert not case or case in strings, (path, case)
