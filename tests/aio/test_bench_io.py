# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp bench-io``: finds settings, keeps them per device, leaves no file; engines use what it kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from zeropp.aio import Engine
from zeropp.cli import bench_io, main
from zeropp.files import io_settings


def nobodys_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_measures_keeps_and_cleans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bench_io, "FILE_BYTES", 16 << 20)
    monkeypatch.setattr(bench_io, "TIME_LIMIT_S", 1.0)
    folder = tmp_path / "disk"
    folder.mkdir()
    assert main(["bench-io", str(folder), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["depth"], seen["block_bytes"]) in bench_io.SETTINGS
    assert seen["of_limit"]["read"] > 0 and seen["of_limit"]["write"] > 0
    assert list(folder.iterdir()) == []
    kept = io_settings.measured(folder)
    assert kept is not None and (kept.depth, kept.block_bytes) == (seen["depth"], seen["block_bytes"])
    with Engine(paths=folder) as engine:
        assert (engine.figures()["depth"], engine.figures()["block_bytes"]) == (kept.depth, kept.block_bytes)
    io_settings.cache_file().write_text("no JSON")
    assert io_settings.measured(folder) is None
    for changed in ({"depth": "8"}, {"depth": 0}, {"block_bytes": 5000}, {"block_bytes": 1 << 31}):
        values = {"depth": 8, "block_bytes": 4096, "read_gb_s": 1.0, "write_gb_s": 1.0, **changed}
        io_settings.cache_file().write_text(json.dumps({io_settings.device_name(folder): values}))
        assert io_settings.measured(folder) is None, changed
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nobodys_home)
    assert io_settings.measured(folder) is None
    monkeypatch.setattr(bench_io, "measure", lambda _: (kept, seen["of_limit"], seen["rows"]))
    assert main(["bench-io", str(folder), "--json"]) == 0
    assert "XDG_CACHE_HOME=" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(bench_io, "measure", lambda _: (kept, seen["of_limit"], seen["rows"]))
    assert main(["bench-io", str(folder), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == seen and "not kept: " in told.err and "XDG_CACHE_HOME=" in told.err


def test_several_folders_each_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bench_io, "FILE_BYTES", 16 << 20)
    monkeypatch.setattr(bench_io, "TIME_LIMIT_S", 0.2)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    assert main(["bench-io", *map(str, folders), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert list(seen) == [*map(str, folders), "striped"] and all(seen[str(one)]["depth"] > 0 for one in folders)
    assert seen["striped"]["read_gb_s"] > 0 and seen["striped"]["write_gb_s"] > 0
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    assert main(["bench-io", str(folders[0]), str(folders[0] / ".." / "one")]) == 2
    assert "bench-io: " in (told := capsys.readouterr().err) and "each folder once" in told, told


def test_settings_of_several_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has in flight what it was measured with, in operations that suit all of them and a stripe."""
    names = {"a": "device a", "b": "device b", "c": "device c"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(io_settings, "device_name", lambda path: names[str(path)])
    mib = 1 << 20
    assert io_settings.shape(["a", "b"], 2 * mib) is None
    io_settings.store("a", io_settings.IoSettings(depth=8, block_bytes=4 * mib, read_gb_s=1.0, write_gb_s=1.0))
    assert io_settings.shape(["a"], 2 * mib) == (8, 4 * mib)
    assert io_settings.shape(["a", "a"], 2 * mib) == (32, 2 * mib)
    assert io_settings.shape(["a", "b"], 2 * mib) == (64, mib), "one that nobody measured has 32 of 1 MiB"
    io_settings.store("b", io_settings.IoSettings(depth=64, block_bytes=mib // 4, read_gb_s=1.0, write_gb_s=1.0))
    assert io_settings.shape(["b", "a"], 2 * mib) == (64 + 128, mib // 4)
    io_settings.store("c", io_settings.IoSettings(depth=1024, block_bytes=8 * mib, read_gb_s=1.0, write_gb_s=1.0))
    assert io_settings.shape(["a", "b", "c"], 2 * mib) == (1024, mib // 4), "the most that an engine takes"


def test_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-io", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
