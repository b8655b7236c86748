# SPDX-License-Identifier: Apache-2.0
"""Saving beside the training, on one rank: what is saved, what waits, and where a failure is raised."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
import zeropp
from checkpoint import crash
from checkpoint.models import make, train
from zeropp.checkpoint import background
from zeropp.errors import TierError
from zeropp.files import disk as files

HERE = Path(__file__).parent


@pytest.fixture
def use(monkeypatch):
    return lambda disk: monkeypatch.setattr(files, "disk", disk) or disk


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_training_goes_on_while_the_disk_stands_still(tmp_path, use):
    """Nothing is written before the training has gone three steps further; what is loaded is the state at the save."""
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, 0, 2)
    at_save = zeropp.full_state_dict(model)
    disk = use(crash.gated())
    done = zeropp.save(tmp_path, model, optimizer, step=2, scheduler=scheduler, extra={"n": [1]}, background=True)
    wanted = train(model, optimizer, scheduler, 2, 5)
    assert not done.done() and not (tmp_path / "step-2").exists()
    disk.open.set()
    assert done.wait() == done.path == tmp_path / "step-2" and done.done()
    found = zeropp.load(tmp_path, model, optimizer, scheduler=scheduler)
    assert found["step"] == 2 and found["extra"] == {"n": [1]} and same(zeropp.full_state_dict(model), at_save)
    assert train(model, optimizer, scheduler, 2, 5) == wanted


def test_the_files_are_those_of_a_save_in_the_foreground(tmp_path):
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, 0, 1)
    zeropp.save(tmp_path / "a", model, optimizer, step=1, scheduler=scheduler)
    zeropp.save(tmp_path / "b", model, optimizer, step=1, scheduler=scheduler, background=True).wait()
    for name in ("rank-00000.safetensors", "manifest.json"):
        assert (tmp_path / "a" / "step-1" / name).read_bytes() == (tmp_path / "b" / "step-1" / name).read_bytes()


def test_one_copy_in_memory_whatever_the_number_of_saves(tmp_path, use):
    """The next save waits for the one before it, and uses its memory again."""
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, 0, 1)
    engine = optimizer._engine
    zeropp.save(tmp_path, model, optimizer, step=1, background=True).wait()
    room = background._images[engine]
    disk = use(crash.gated())
    zeropp.save(tmp_path, model, optimizer, step=2, background=True)
    threading.Timer(0.2, disk.open.set).start()
    zeropp.save(tmp_path, model, optimizer, step=3, background=True).wait()
    assert background._images[engine] is room and disk.open.is_set()
    assert sorted(one.name for one in tmp_path.iterdir() if one.name != ".writer") == [
        "latest",
        "step-1",
        "step-2",
        "step-3",
    ]


@pytest.mark.parametrize("who", ["wait", "save", "load"])
def test_a_failure_is_raised_by_the_next_call_and_once(tmp_path, use, who):
    model, optimizer, _ = make()
    zeropp.save(tmp_path, model, optimizer, step=1)
    whole = files.disk
    use(crash.failing(5, errno.ENOSPC))  # the folders and the file are made before the training goes on
    done = zeropp.save(tmp_path, model, optimizer, step=2, background=True)
    calls = {
        "wait": done.wait,
        "save": lambda: zeropp.save(tmp_path, model, optimizer, step=3),
        "load": lambda: zeropp.load(tmp_path, model, optimizer),
    }
    with pytest.raises(TierError, match=r"step-2.partial.*: cannot be written: No space left on device"):
        calls[who]()
    use(whole)
    assert sorted(one.name for one in tmp_path.iterdir() if one.name != ".writer") == ["latest", "step-1"]
    assert zeropp.load(tmp_path, model, optimizer)["step"] == 1
    zeropp.save(tmp_path, model, optimizer, step=3)
    with pytest.raises(TierError):  # who asks this save again hears it again
        done.wait()


def run_script(body: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = f"import sys; sys.path[:0] = [{str(HERE)!r}]\nfrom models import make\nimport zeropp\n" + textwrap.dedent(
        body
    )
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def test_the_end_of_the_process_waits(tmp_path):
    done = run_script("m, o, _ = make(); zeropp.save(sys.argv[1], m, o, step=7, background=True)", tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["latest", "step-7"]
    model, optimizer, _ = make()
    assert zeropp.load(tmp_path, model, optimizer)["step"] == 7


def test_the_end_of_the_process_says_what_was_lost(tmp_path):
    done = run_script(
        """
        import crash
        from zeropp.files import disk
        m, o, _ = make()
        zeropp.save(sys.argv[1], m, o, step=1)
        disk.disk = crash.failing(5, 28)
        zeropp.save(sys.argv[1], m, o, step=2, background=True)
        """,
        tmp_path,
    )
    assert "zeropp.errors.TierError: " in done.stderr and "No space left on device" in done.stderr
    assert sorted(one.name for one in tmp_path.iterdir() if one.name != ".writer") == ["latest", "step-1"]
