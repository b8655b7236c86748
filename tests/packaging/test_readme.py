# SPDX-License-Identifier: Apache-2.0
"""README.md shows the ratios that benchmarks/results holds, and the design notes are numbered without gaps."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_ratios_are_the_stored_ones() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    written = runpy.run_path(str(ROOT / "scripts" / "readme_ratios.py"))["written"]
    assert page == written(page), "benchmarks/results has other figures: run scripts/readme_ratios.py"


def test_the_figure_shows_the_stored_ratios(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = runpy.run_path(str(ROOT / "scripts" / "readme_ratios.py"))["draw"](tmp_path)
    stored, now = (
        re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text()) for path in (ROOT / "docs/step.svg", drawn)
    )
    assert "stage 3 25M 2 ranks : FSDP2" in now
    assert stored == now, "benchmarks/results has other figures: run scripts/readme_ratios.py"


def test_design_notes_have_every_number() -> None:
    notes = sorted((ROOT / "docs" / "design").glob("*.md"))
    assert [int(note.name[:4]) for note in notes] == list(range(1, len(notes) + 1))
    for note in notes:
        title = note.read_text(encoding="utf-8").splitlines()[0]
        assert re.match(rf"# {int(note.name[:4])}\. \S", title), (note.name, title)
