# SPDX-License-Identifier: Apache-2.0
"""Scratch folders that leave nothing behind: one a job, with a folder for each rank in it.

``path/zeropp-scratch-<job>/rank-<n>/`` exists while its rank does. Every rank holds a shared lock (flock) on the job's
folder, which the kernel drops with the process, however it ends. So a folder on which an exclusive lock can be had
belongs to nobody: whoever makes a scratch folder next removes it. Making and removing happen under a lock on ``path``
itself, so that a folder is never seen between its making and its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from zeropp.zero.agree import Ranks
from zeropp.zero.disk import storage_errors

PREFIX = "zeropp-scratch-"


class Scratch:
    """This rank's folder of one job. Construction is collective.

    Args:
        path: any folder, made if it is not there; node-local ones are fine, ranks need not see each other's.

    Raises:
        zeropp.TierError: it cannot be made or locked. On every rank.
    """

    def __init__(self, path: str | os.PathLike[str], ranks: Ranks) -> None:
        self._root = Path(path).absolute()
        self._job = self._root / (PREFIX + ranks.exchange(secrets.token_hex(6))[0])
        self.folder = self._job / f"rank-{ranks.rank}"
        self._lock = -1
        _, error = ranks.all_try(self._make)
        if error is not None:
            self.remove()
            raise error

    def _make(self) -> None:
        with storage_errors(self.folder, 0):
            self._root.mkdir(parents=True, exist_ok=True)
            with _locked(self._root):
                remove_abandoned(self._root)
                self._job.mkdir(exist_ok=True)
                self._lock = os.open(self._job, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self.folder.mkdir()

    def remove(self) -> None:
        """Remove this rank's folder, and the job's with the last one. Never raises; twice is fine."""
        if self._lock < 0:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1
        with contextlib.suppress(OSError), _locked(self._root):
            _remove_if_abandoned(self._job)


_held = threading.local()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """This thread's already: nothing. The garbage collector may end an older model, and so remove its folder, anywhere."""
    mine: set[str] = _held.__dict__.setdefault("folders", set())
    if str(folder) in mine:
        yield
        return
    mine.add(str(folder))
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
    finally:
        mine.discard(str(folder))


def tidy(root: Path) -> None:
    """Remove what jobs that were killed left in ``root``, and nothing of those that run. Nothing where there is no such folder."""
    if root.is_dir():
        with _locked(root):
            remove_abandoned(root)


def remove_abandoned(root: Path) -> None:
    """The same, with the lock on ``root`` held."""
    for job in root.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(job)


def _remove_if_abandoned(job: Path) -> None:
    descriptor = os.open(job, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody lives there
        shutil.rmtree(job, ignore_errors=True)
    finally:
        os.close(descriptor)
