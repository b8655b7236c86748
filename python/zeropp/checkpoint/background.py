# SPDX-License-Identifier: Apache-2.0
"""Saving beside the training: what :func:`zeropp.save` does with ``background=True`` after the copy to host memory.

Each rank has its whole file in memory and writes it in a thread of its own. The threads use no collective, since the
training does: each leaves a small file with its checksums in ``.step-7.parts``, rank 0's thread waits for all of them
and commits. While a rank writes it holds a lock on its file, which the kernel takes away from a process that dies: a
lock that is free with no sums beside it is a rank that is gone. So rank 0's wait ends, whatever happens.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeropp.checkpoint.content import part_name
from zeropp.comm.collective import Ranks
from zeropp.errors import CheckpointError, TierError
from zeropp.files import safefile
from zeropp.files.disk import storage_errors, write_text
from zeropp.zero.engine import Engine

POLL_S = 0.02
GRACE_S = 1.0
"""How long sums may take to become visible after the lock of their file was released (network file systems)."""


class Saving:
    """A save that goes on in the background; from ``zeropp.save(..., background=True)``.

    The next save and load of the model wait for it, and so does the end of the process; each raises an error
    that was not reported yet.
    """

    path: Path
    """The folder of the checkpoint. Exists when the save is done."""

    def __init__(self, path: Path, ranks: Ranks, work: Callable[[], None]) -> None:
        self.path = path
        self._ranks = ranks
        self._error: BaseException | None = None
        self._told = False
        self._settled = False
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"zeropp-save-{path.name}")
        _unsettled.append(self)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised by the next call
            self._error = error

    def done(self) -> bool:
        """True if this rank has nothing left to do. Not collective. On rank 0 the checkpoint is then committed, or the
        save failed; ``wait`` says which."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete and durable; collective.

        Returns:
            The folder.

        Raises:
            zeropp.TierError: storage failed; on every rank, naming the rank whose file it was.
            zeropp.CheckpointError: a rank did not finish its file. What was loadable before stays loadable.
        """
        if not self._settled:
            self._thread.join()
            _, error = self._ranks.all_try(self._raise)
            self._settle()
            self._error = error
        self._told = True
        if self._error is not None:
            raise self._error
        return self.path

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _settle(self) -> None:
        self._settled = True
        if self in _unsettled:
            _unsettled.remove(self)

    def end(self) -> BaseException | None:
        """Wait for this rank's part alone, and return an error that was not reported yet."""
        self._thread.join()
        self._settle()
        return None if self._told else self._error


_unsettled: list[Saving] = []
_newest: weakref.WeakKeyDictionary[Engine, Saving] = weakref.WeakKeyDictionary()
_images: weakref.WeakKeyDictionary[Engine, mmap.mmap] = weakref.WeakKeyDictionary()


def finish(engine: Engine) -> None:
    """Wait for a save of this model that still goes on; collective. Raises its failure, once."""
    saving = _newest.pop(engine, None)
    if saving is not None and not saving._settled:
        saving.wait()


def let_end(root: Path) -> None:
    """Wait until no save of this process writes into a folder of checkpoints, whose ever it is. Not collective."""
    for saving in list(_unsettled):
        if os.path.realpath(saving.path.parent) == os.path.realpath(root):
            saving._thread.join()


@atexit.register
def _at_exit() -> None:
    """Wait for all saves at the end of the process; raise the first error."""
    errors = [error for saving in list(_unsettled) if (error := saving.end()) is not None]
    if errors:
        raise errors[0]


class RankFile:
    """This rank's file, from the copy in memory to the disk."""

    def __init__(
        self,
        engine: Engine,
        rank: int,
        partial: Path,
        parts: Path,
        pieces: list[safefile.Piece],
        about: dict[str, str],
        spare: Path | None = None,
    ) -> None:
        self.rank = rank
        self.path = partial / part_name(rank)
        self.sums = sums_of(parts, rank)
        self._image, self._bytes = safefile.image_of(pieces, about, _images.pop(engine, None))
        _images[engine] = self._image
        with storage_errors(self.path, self._bytes):
            self._descriptor = safefile.create(self.path, self._bytes, spare)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise TierError(
                f"{self.path}: cannot be locked: {error.strerror}; the file system has no locks, without which a rank "
                "that dies goes unnoticed: save with background=False there",
                path=str(self.path), errno=error.errno,
            ) from error  # fmt: skip

    def write(self) -> dict[str, Any]:
        """Write and sync; what the manifest holds of the file. Leaves the same, or the error, for rank 0."""
        try:
            with storage_errors(self.path, self._bytes):
                blocks = safefile.image_blocks(self._image, self._bytes)
                entry = safefile.write_blocks(self._descriptor, self._bytes, blocks)
            if self.rank:
                write_text(self.sums, json.dumps({"file": entry}))
        except BaseException as error:
            with contextlib.suppress(Exception):  # rank 0 will see that the lock is free
                if self.rank:
                    write_text(self.sums, json.dumps({"kind": type(error).__name__, "said": str(error)}))
            raise
        finally:
            self.close()
        return entry

    def close(self) -> None:
        """Rank 0 sees from now on that this rank is done, or gone."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def start(engine: Engine, path: Path, ranks: Ranks, work: Callable[[], None]) -> Saving:
    """Run ``work`` in a thread, as the save that the next call waits for."""
    saving = Saving(path, ranks, work)
    _newest[engine] = saving
    return saving


def sums_of(parts: Path, rank: int) -> Path:
    """Return the path to which a rank writes the sums of its file."""
    return parts / f"rank-{rank:05d}.json"


def collect(partial: Path, parts: Path, count: int) -> list[dict[str, Any]]:
    """On rank 0: the entries of the other ranks' files, when no rank writes any more.

    Raises:
        zeropp.TierError, zeropp.CheckpointError: a rank failed or is gone.
    """
    entries, errors = [], []
    for rank in range(1, count):
        try:
            entries.append(_await_entry(partial, parts, rank))
        except (TierError, CheckpointError) as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return entries


def _await_entry(partial: Path, parts: Path, rank: int) -> dict[str, Any]:
    sums = sums_of(parts, rank)
    free_since: float | None = None
    while not sums.exists():
        now = time.monotonic()
        if free_since is None and _is_free(partial / part_name(rank)):
            free_since = now
        if free_since is not None and now - free_since > GRACE_S:
            raise CheckpointError(
                f"{partial / part_name(rank)}: rank {rank} is gone and did not finish it; the checkpoint is not "
                "committed, the one before it stays"
            )
        time.sleep(POLL_S)
    left: dict[str, Any] = json.loads(sums.read_text(encoding="utf-8"))
    if "said" in left:
        raise (TierError if left["kind"] == "TierError" else CheckpointError)(f"rank {rank}: {left['said']}")
    entry: dict[str, Any] = left["file"]
    return entry


def _is_free(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
