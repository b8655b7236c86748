# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints has one writer: two jobs, two groups of ranks of one job, what a dead job leaves, and what one
process may do in turn."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import zeropp
from checkpoint import crash
from checkpoint.models import group, make, train
from launch import run_ranks
from zeropp.checkpoint import background as behind
from zeropp.comm import communicator, job
from zeropp.errors import CheckpointError
from zeropp.files import disk as files
from zeropp.files import folder_writer


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


def writes(rank: int, ranks: int, path: str) -> None:
    """A job whose first checkpoint stays half written until the file "go" is there; it lives until "end" is."""
    with group(ranks):
        folder = Path(path)

        class Slow(files.Disk):
            def write(self, *arguments) -> None:
                wait_for(folder / "go")
                super().write(*arguments)

        files.disk = Slow()
        model, optimizer, scheduler = make()
        saving = zeropp.save(folder / "ckpt", model, optimizer, step=1, background=True)
        (folder / f"writing.{rank}").write_text(str(os.getpid()))
        saving.wait()
        (folder / f"trains.{rank}").touch()
        train(model, optimizer, scheduler, 0, 1)
        wait_for(folder / "end")
        assert zeropp.save(folder / "ckpt", model, optimizer).name == "step-2"


def test_a_second_job_is_refused_and_the_first_goes_on(tmp_path):
    """While the two ranks of the first job write in the background, and while they only train."""
    done = []
    job = threading.Thread(target=lambda: done.extend(run_ranks(2, writes, str(tmp_path), timeout=100, check=False)))
    job.start()
    model, optimizer, _ = make()
    root = tmp_path / "ckpt"
    wait_for(tmp_path / "writing.0")
    pid = (tmp_path / "writing.0").read_text()
    sentence = rf"ckpt has a writer already: process {pid} on host {socket.gethostname()}, started 20\d\d-\d\d-\d\d .* UTC; .*end that job"
    try:
        before = sorted(root.rglob("*"))
        assert root / ".step-1.partial" in before
        for background in (False, True):
            with pytest.raises(CheckpointError, match=sentence):
                zeropp.save(root, model, optimizer, step=1, background=background)
        assert sorted(root.rglob("*")) == before
        (tmp_path / "go").touch()
        wait_for(tmp_path / "trains.0")
        with pytest.raises(CheckpointError, match=sentence):
            zeropp.save(root, model, optimizer, step=3)
        assert zeropp.load(root, model, optimizer)["step"] == 1  # readers need no lock
    finally:
        (tmp_path / "go").touch()
        (tmp_path / "end").touch()
        job.join()
    assert [one.code for one in done] == [0, 0], "\n".join(map(str, done))
    zeropp.save(root, model, optimizer, step=3)
    assert sorted(one.name for one in root.iterdir()) == [".writer", "latest", "step-1", "step-2", "step-3"]


def groups(rank: int, ranks: int, path: str) -> None:
    """Two groups of ranks, each with a model of its own, save into one folder; then each into its own."""
    with group(ranks):
        folder = Path(path)
        pair = dist.new_group([0, 1])
        sub = None if rank == 2 else communicator(pair)
        job.world = lambda: job.JobRanks(sub)  # as if the two groups were jobs of their own
        model, optimizer, _ = make()
        dist.barrier()
        begun = time.monotonic()
        try:
            zeropp.save(folder / "ckpt", model, optimizer, step=2, background=rank < 2).wait()
        except CheckpointError as error:
            (folder / f"groups.{rank}").write_text(f"{time.monotonic() - begun}\n{error}")
        dist.barrier()
        folder_writer.RECORD_WAIT_S = 20.0  # so that a slow disk is not taken for a wait of one group for the other
        begun = time.monotonic()
        where = zeropp.save(folder / ("a" if rank < 2 else "b"), model, optimizer, step=3)
        assert zeropp.load(where, model, optimizer)["step"] == 3
        assert time.monotonic() - begun < 15, "a group waited for the record of the other one"


def test_two_groups_of_one_job_hear_of_each_other(tmp_path):
    """Ranks 0 and 1, and rank 2 alone: all raise, within seconds, and the checkpoint before stays."""
    model, optimizer, _ = make()
    zeropp.save(tmp_path / "ckpt", model, optimizer, step=1)
    folder_writer.leave_all()
    run_ranks(3, groups, str(tmp_path), timeout=100)
    for rank in range(3):
        took, said = (tmp_path / f"groups.{rank}").read_text().split("\n", 1)
        assert float(took) < 8, took
        assert "ranks 0, 1" in said and "rank 2 " in said and "folder of its own" in said, said
    names = sorted(one.name for one in (tmp_path / "ckpt").iterdir() if one.name != ".writer")
    assert names == ["latest", "step-1"]
    assert zeropp.load(tmp_path / "ckpt", model, optimizer)["step"] == 1


def forked(work) -> int:
    """A process that runs ``work``."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return child


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def test_what_a_killed_job_leaves_is_no_obstacle(tmp_path):
    """Not even where a process that it had forked lives on, as the workers of a DataLoader do for a while."""
    model, optimizer, _ = make()

    def work() -> None:
        zeropp.save(tmp_path, model, optimizer, step=1)
        (tmp_path / "worker").write_text(str(forked(lambda: time.sleep(100))))
        (tmp_path / "saved").touch()
        time.sleep(100)

    job = forked(work)
    try:
        wait_for(tmp_path / "saved")
        with pytest.raises(CheckpointError, match=f"process {job} on host"):
            zeropp.save(tmp_path, model, optimizer)
        end(job)
        assert json.loads((tmp_path / ".writer").read_text())["pid"] == job
        assert zeropp.save(tmp_path, model, optimizer).name == "step-2"
        assert json.loads((tmp_path / ".writer").read_text())["pid"] == os.getpid()
    finally:
        end(job)
        end(int((tmp_path / "worker").read_text()))


def record(**changes) -> bytes:
    here = {
        "host": "elsewhere", "pid": os.getpid(), "started": "2026-01-01 00:00:00 UTC", "place": folder_writer._place(),
        "born": folder_writer._born(os.getpid()), "hold": "1", "job": None, "ranks": [0], "beat": "000000000000",
    }  # fmt: skip
    return json.dumps({**here, **changes}).encode()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'["a"]', record(), record(born=1), record(place="another boot"), record(ranks=3)],
    ids=["empty", "torn", "list", "unlocked", "number_used_again", "other_host", "odd"],
)
def test_a_stale_file_is_taken_over(tmp_path, content, monkeypatch):
    monkeypatch.setattr(folder_writer, "WATCH_S", 0.2)
    model, optimizer, _ = make()
    (tmp_path / ".writer").write_bytes(content)
    zeropp.save(tmp_path, model, optimizer, step=1)
    assert json.loads((tmp_path / ".writer").read_text())["host"] == socket.gethostname()


def test_a_job_of_another_host_that_no_lock_reaches(tmp_path, monkeypatch):
    """The record of a living writer changes."""
    monkeypatch.setattr(folder_writer, "WATCH_S", 20.0)
    monkeypatch.setattr(folder_writer, "BEAT_S", 0.1)
    model, optimizer, _ = make()
    (tmp_path / ".writer").write_bytes(record(place="another boot", pid=7))
    descriptor = os.open(tmp_path / ".writer", os.O_WRONLY)
    ended = threading.Event()

    def beat() -> None:
        count = 0
        while not ended.wait(0.02):
            count += 1
            os.pwrite(descriptor, record(place="another boot", pid=7, beat=f"{count:012}"), 0)

    other = threading.Thread(target=beat)
    other.start()
    try:
        with pytest.raises(CheckpointError, match=r"process 7 on host elsewhere, started 2026-01-01"):
            zeropp.save(tmp_path, model, optimizer)
    finally:
        ended.set()
        other.join()
        os.close(descriptor)
    monkeypatch.setattr(folder_writer, "WATCH_S", 0.2)
    zeropp.save(tmp_path, model, optimizer)
    first = (tmp_path / ".writer").read_bytes()
    until = time.monotonic() + 10
    while (tmp_path / ".writer").read_bytes() == first:  # and so does ours
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """The record alone decides: the process with that number and start lives, or not."""

    def flock(*_) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    model, optimizer, _ = make()
    (tmp_path / ".writer").write_bytes(record())
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on host elsewhere"):
        zeropp.save(tmp_path, model, optimizer)
    (tmp_path / ".writer").write_bytes(record(born=1))
    zeropp.save(tmp_path, model, optimizer)


def test_a_user_that_a_collection_ends_waits_for_nobody(tmp_path):
    """A garbage collection ends a model in any thread, also in one that the owner of the guard waits for: a new thread's start did."""
    user = object()
    folder_writer.take(tmp_path, user)
    with folder_writer._guard:
        collected = threading.Thread(target=folder_writer.leave, args=(user,), daemon=True)
        collected.start()
        collected.join(10)
        assert not collected.is_alive(), "leave waits for a lock"
        assert (tmp_path / folder_writer.FILE).exists()
    folder_writer.leave(object())
    assert not (tmp_path / folder_writer.FILE).exists(), "the next one that has the guard lets the folder go"


def test_models_of_one_process_save_in_turn(tmp_path, monkeypatch):
    """The second waits for what the first writes in the background; who is gone, or saves elsewhere, leaves the folder."""
    one, one_optimizer, _ = make()
    two, two_optimizer, _ = make()
    disk = crash.gated()
    monkeypatch.setattr(files, "disk", disk)
    saving = zeropp.save(tmp_path / "a", one, one_optimizer, step=1, background=True)
    threading.Timer(0.2, disk.open.set).start()
    zeropp.save(tmp_path / "a", two, two_optimizer, step=2)
    assert saving.done() and disk.open.is_set()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [".writer", "latest", "step-1", "step-2"]
    zeropp.save(tmp_path / "b", one, one_optimizer, step=1)
    assert (tmp_path / "a" / ".writer").exists() and (tmp_path / "b" / ".writer").exists()
    zeropp.save(tmp_path / "b", two, two_optimizer, step=2)
    assert not (tmp_path / "a" / ".writer").exists()
    behind._newest.clear()
    del one, two, one_optimizer, two_optimizer, saving
    gc.collect()
    assert not (tmp_path / "b" / ".writer").exists() and not folder_writer._held
