# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp analyse``."""

from __future__ import annotations

from pathlib import Path

import pytest
from zeropp.cli import main
from zeropp.data import open_index

SOURCE = """
def rows():
    return [[1, 2, 3], [4], [5, 6]]

def last(sample):
    return sample[-1]

def broken():
    raise OSError("no such disk")
"""


def test_it_writes_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_to_analyse.py").write_text(SOURCE)
    more = ["--metric", "length=seqlen", "--metric", "last=mine_to_analyse:last"]
    assert main(["analyse", "mine_to_analyse:rows", "index", *more]) == 0
    out = capsys.readouterr().out
    assert "3 samples" in out and "least 1, median 2, most 3" in out and "least 3, median 4, most 6" in out
    assert open_index("index").values("last").tolist() == [3, 4, 6]
    for dataset, said in (("mine_to_analyse:broken", "OSError: no such disk"), ("mine_to_analyse:x", "AttributeError")):
        assert main(["analyse", dataset, "other"]) == 2
        assert said in capsys.readouterr().err
    assert main(["analyse", "mine_to_analyse:rows", "other", "--metric", "length"]) == 2
    assert "NAME=METRIC" in capsys.readouterr().err
