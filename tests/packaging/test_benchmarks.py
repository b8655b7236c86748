# SPDX-License-Identifier: Apache-2.0
"""benchmarks/run.py where a peer lacks something: it is named with its package, other rows are measured, and the status says so."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """run.py and aio_bandwidth on 1 MiB, beside a fio that takes a millisecond and a DeepSpeed that is there; no compiler finds libaio."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("harness", "aio_peers", "aio_bandwidth", "aio_small")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import aio_bandwidth
    import aio_peers
    import harness

    spec = importlib.util.spec_from_file_location("benchmarks_run", BENCHMARKS / "run.py")
    assert spec is not None and spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    fio = tmp_path / "fio"
    fio.write_text("#!/bin/sh\n")
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CC", "false")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(aio_bandwidth, "QUICK_BYTES", 1 << 20)
    monkeypatch.setattr(aio_bandwidth, "fio", lambda *_: aio_peers.Cost(1e-3, 1e-3))
    deepspeed = types.ModuleType("deepspeed")
    deepspeed.__spec__ = importlib.util.spec_from_loader("deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    yield types.SimpleNamespace(main=run.main, harness=harness)
    for name in names:
        sys.modules.pop(name, None)


def test_other_rows_are_measured(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows"
    assert bench.main(["aio_bandwidth", "--quick", "--json", str(rows)]) == 2
    said = capsys.readouterr().err
    assert "not measured: all rows against DeepSpeed aio: peer DeepSpeed aio: libaio.h and libaio.so" in said
    assert "apt-get install libaio-dev" in said.splitlines()[-1]
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {row["peer_name"] for row in found} == {"fio io_uring", "fio libaio"}
    assert {row["case"] for row in found} >= {"read 1 MB locked", "mixed 1 MB pageable", "write 1 MB pageable CPU"}


def test_a_bench_of_that_peer_alone_names_the_package(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["aio_small", "--quick"]) == 2
    assert "apt-get install libaio-dev" in capsys.readouterr().err


def test_a_library_that_is_there(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libm.h").write_text("")
    monkeypatch.setenv("CFLAGS", f"-I{tmp_path}")
    assert not bench.harness.links("m")  # CC is "false"
    monkeypatch.delenv("CC")
    assert bench.harness.links("m")
    (tmp_path / "libm.h").unlink()
    assert not bench.harness.links("m")
