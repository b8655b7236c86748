# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp plot``: what its pictures show, and what it says of files that it cannot draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from zeropp.cli import main

plot = pytest.importorskip("zeropp.cli.plot")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def result(case: str, ratio: float, **more: Any) -> dict[str, Any]:
    return {"bench": "step", "case": case, "peer_name": "FSDP2", "ratio": ratio, **more}


def test_a_bar_a_case_and_the_newest_of_each(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl", result("a", 0.5), result("b", 2.0, ratio_low=1.5, ratio_high=2.5), result("a", 1.5)
    )
    (figure,) = plot.pictures(path).values()
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [1.5, 2.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a : FSDP2", "b : FSDP2"]


def test_cases_are_chosen_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "r.jsonl", result("stage 2", 0.5), result("stage 3", 30.0))
    (figure,) = plot.pictures(path, "stage 3").values()
    assert [text.get_text() for text in figure.axes[0].texts] == ["30"]
    assert main(["plot", str(path), "--case", "stage 4", "--out", str(tmp_path)]) == 2
    assert "no case contains 'stage 4'; there are stage 2, stage 3" in capsys.readouterr().err


def test_related_numbers_of_a_run_share_a_panel(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 3.0 - step, "disk_read_bytes": 10, "disk_written_bytes": 5, "memory_bytes": [1, 2]}
            for step in (1, 2)]  # fmt: skip
    (name,) = plot.pictures(write(tmp_path / "metrics.jsonl", *rows))
    assert name == f"{tmp_path.name}-metrics"
    figure = plot.pictures(tmp_path / "metrics.jsonl")[name]
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "bytes a step", "memory, bytes"]
    assert [len(axes.lines) for axes in figure.axes] == [1, 2, 2]
    assert list(figure.axes[0].lines[0].get_ydata()) == [2.0, 1.0]


def test_files_are_written_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "r.jsonl", result("a", 30.0))
    assert main(["plot", str(path), "--out", str(tmp_path / "pictures"), "--format", "svg"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'pictures' / 'step.svg'}\n"
    assert (tmp_path / "pictures" / "step.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rows; wanted one JSON object a line"),
        ("{", ":1: not JSON"),
        ("[1]", ":1: a list; wanted one object a line"),
        ('{"loss": 1}', "neither results of a benchmark"),
        ('{"step": 1, "name": "x"}', "without a number besides 'step'"),
    ],
)
def test_what_cannot_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(text)
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
