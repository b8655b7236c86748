# SPDX-License-Identifier: Apache-2.0
"""docs/errors.md says of every status what the library does."""

from __future__ import annotations

import re
from pathlib import Path

import zeropp

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"


def test_the_page_lists_every_status_as_it_is() -> None:
    rows = re.findall(r"^\| ([A-Z_]+) \| ([^|]+) \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    page = [(name, meaning, exception.strip("`").replace("none", "")) for name, meaning, exception in rows]
    table = [(name, meaning, exception) for name, _, meaning, exception in zeropp._C.status_table()]
    assert page == table


def test_every_exception_exists() -> None:
    for _, _, _, exception in zeropp._C.status_table():
        module, _, name = exception.rpartition(".")
        where = zeropp.errors if module == "zeropp" else __builtins__
        known = where if isinstance(where, dict) else vars(where)
        assert not exception or name in known, exception
