# SPDX-License-Identifier: Apache-2.0
"""Scratch folders that leave nothing behind: one a job, with a folder for each rank in it; in each of several folders
where files are striped over disks.

``path/zeropp-scratch-<job>/rank-<n>/`` exists while its rank does. Every rank holds a shared lock (flock) on the job's
folder, which the kernel drops with the process, however it ends. A folder on which an exclusive lock can be had therefore
belongs to no process, and the next job that makes a scratch folder removes it. Making and removing happen under a lock on ``path``
itself, so that a folder is never seen between its making and its lock. One such lock is held at a time, so that jobs
may name the same folders in any order.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeropp.comm.collective import Ranks
from zeropp.files.disk import storage_errors

PREFIX = "zeropp-scratch-"
STRIPE_BYTES = 2 << 20
"""Of files over several folders; a multiple of 4096, at most ZPP_AIO_STRIPE_BYTES (csrc/aio/engine.h; docs/design/0009)."""


class Scratch:
    """This rank's folder of one job, in each of the folders given. Construction is collective.

    Args:
        path: any folder, made if it is not there; node-local ones are fine, ranks need not see each other's. Or several.

    Raises:
        zeropp.TierError: one cannot be made or locked, which is named. On every rank; nothing of the job is left in any.
    """

    def __init__(self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], ranks: Ranks) -> None:
        job = PREFIX + ranks.exchange(secrets.token_hex(6))[0]
        paths = [path] if isinstance(path, (str, os.PathLike)) else path
        self._places = [_Place(Path(one).absolute(), job, f"rank-{ranks.rank}") for one in paths]
        self.folders = tuple(place.folder for place in self._places)
        _, error = ranks.all_try(self._make)
        if error is not None:
            self.remove()
            raise error

    @property
    def folder(self) -> Path:
        """Return the first folder."""
        return self.folders[0]

    def _make(self) -> None:
        for place in self._places:
            place.make()

    def file(self, name: str, shared: bool = False) -> ScratchFile:
        """Return a file of this rank, or with ``shared`` of all ranks of the host."""
        return ScratchFile(tuple((folder.parent if shared else folder) / name for folder in self.folders))

    def remove(self) -> None:
        """Remove this rank's folders, and the job's with the last one. Never raises; twice is fine."""
        for place in self._places:
            place.remove()


@dataclass(frozen=True)
class ScratchFile:
    """A file, or the parts that it has in several folders."""

    parts: tuple[Path, ...]

    @property
    def folders(self) -> tuple[Path, ...]:
        """That an I/O engine stripes it over; none for one file."""
        return tuple(part.parent for part in self.parts) if len(self.parts) > 1 else ()

    @property
    def name(self) -> str:
        """Return the name that an engine with these folders uses."""
        return self.parts[0].name if self.folders else str(self.parts[0])

    @property
    def where(self) -> tuple[tuple[bytes, ...], bytes, int]:
        """Return the arguments for C: folders, name, bytes of a stripe."""
        return tuple(os.fsencode(folder) for folder in self.folders), os.fsencode(self.name), STRIPE_BYTES


class _Place:
    """The job's folder and this rank's, in one of the folders given."""

    def __init__(self, root: Path, job: str, rank: str) -> None:
        self._root, self._job, self.folder = root, root / job, root / job / rank
        self._lock = -1

    def make(self) -> None:
        with storage_errors(self.folder, 0):
            self._root.mkdir(parents=True, exist_ok=True)
            with _locked(self._root):
                remove_abandoned(self._root)
                self._job.mkdir(exist_ok=True)
                self._lock = os.open(self._job, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self.folder.mkdir()

    def remove(self) -> None:
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
    """Hold the lock on a folder; do nothing where this thread has it. The garbage collector may end an older model,
    and so remove its folder, anywhere."""
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
    """Remove abandoned folders, with the lock on ``root`` held."""
    for job in root.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(job)


def _remove_if_abandoned(job: Path) -> None:
    descriptor = os.open(job, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: a living process holds it
        shutil.rmtree(job, ignore_errors=True)
    finally:
        os.close(descriptor)
