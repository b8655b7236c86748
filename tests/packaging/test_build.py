# SPDX-License-Identifier: Apache-2.0
"""setup.py compiles again only what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("setuptools", reason="setup.py needs it")
ROOT = Path(__file__).resolve().parents[2]


def test_every_object_has_a_record_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X_cuda.c and X_cuda.cu once shared the file that says how each was made, so both were compiled at every build."""
    monkeypatch.syspath_prepend(str(ROOT))
    import setup

    builder: Any = setup.Builder(tmp_path)
    records: list[Path] = []

    def make(target: Path, command: list[str], name: str) -> Path:
        records.append(target.with_suffix(".cmd"))
        assert str(target.with_suffix(".d")) in command
        return target

    monkeypatch.setattr(builder, "make", make)
    for source in setup.c_sources():
        builder.c_objects(source)
    for source in sorted(setup.CSRC.rglob("*_cuda.cu")):
        builder.fatbin("nvcc", ["-gencode=one"], source)
    assert records and len(set(records)) == len(records)
