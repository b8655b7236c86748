# SPDX-License-Identifier: Apache-2.0
"""One writer a folder: the lock that ``zeropp.save`` holds on a folder of checkpoints.

Rank 0's process locks ``ckpt/.writer`` (``flock``) at its first save there, and keeps the lock until the model is gone, saves into
another folder, or the process ends. The kernel takes the lock away from a process that dies, so what a dead job leaves is a file that
is not locked, and the next job takes it over. The file says who holds it: host, process, start, and a number that grows every few
seconds. That number decides where a lock does not reach, as on a network file system whose locks are each host's own: a job that
finds the record of another host on a file that it could lock watches the number, and takes the folder over if it stands still.

Readers need no lock.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from zeropp.errors import CheckpointError
from zeropp.files.disk import storage_errors

FILE = ".writer"
BEAT_S = 5.0
"""The holder changes its record this often."""
WATCH_S = 15.0
"""A record of another host that does not change for so long is one of a job that is gone."""
RECORD_WAIT_S = 2.0
"""How long a file may be locked and empty: its holder is about to write its record."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Record:
    """Who writes into a folder; the content of the file."""

    host: str
    pid: int
    started: str
    """When the process began, in UTC."""
    place: str
    """Equal where process numbers mean the same: the boot of the machine and the namespace of its processes."""
    born: int
    """When the process began, in the kernel's ticks: with the number it names one process."""
    hold: str
    """Of this taking of the lock alone."""
    job: str | None = None
    """Equal for all ranks of one job; None: a job of one rank."""
    ranks: tuple[int, ...] = (0,)
    """The ranks of the job that save together."""

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, started {self.started}"


class FolderTakenError(CheckpointError):
    """Another process writes into the folder."""

    def __init__(self, folder: Path, record: Record | None) -> None:
        self.record = record
        who = "a process that did not say which" if record is None else str(record)
        super().__init__(
            f"save: {folder} has a writer already: {who}; a folder of checkpoints has one writer, so end that job, or save to another "
            "folder. Nothing in the folder was changed"
        )


@dataclass
class Hold:
    """A folder that this process writes into."""

    path: Path
    descriptor: int
    record: Record
    users: set[Any] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)

    def stands(self) -> bool:
        """True if the locked file still has its name."""
        return _has_name(self.descriptor, self.path)

    def beat(self) -> None:
        """Change the record, until the hold ends."""
        count = 0
        while not self.ended.wait(BEAT_S):
            count += 1
            with contextlib.suppress(OSError), _guarded():  # the next save finds a folder that is gone
                if not self.ended.is_set():
                    _write(self.descriptor, self.record, count)


_guard = threading.Lock()
_held: dict[str, Hold] = {}
_leaving: deque[Any] = deque()
"""Users that leave. A garbage collection may end a user in any thread, also in one that the owner of `_guard` waits for, so that
:func:`leave` never waits for `_guard`: its holder releases these."""


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    try:
        with _guard:
            yield
    finally:
        _let_leavers_go()


def _let_leavers_go() -> None:
    while _leaving and _guard.acquire(blocking=False):
        try:
            while _leaving:
                _drop(_leaving.popleft())
        finally:
            _guard.release()


def take(folder: Path, user: Any, job: str | None = None, ranks: tuple[int, ...] = (0,)) -> Hold:
    """Become the writer of a folder that exists, for ``user``, which leaves any other folder. Again and again is once.

    Raises:
        FolderTakenError: another process is the writer.
        zeropp.TierError: the folder cannot be written to.
    """
    name = os.path.realpath(folder)
    with _guarded():
        hold = _held.get(name)
        if hold is not None and not hold.stands():
            _let_go(name, hold)
            hold = None
        if fresh := hold is None:
            hold = _held[name] = _acquire(folder, job, ranks)
        hold.users.add(user)
        _drop(user, but=name)
    if fresh:  # outside of the guard: `start` waits for the thread, in which a garbage collection may run
        threading.Thread(target=hold.beat, name="zeropp-writer", daemon=True).start()
    return hold


def leave(user: Any) -> None:
    """End the hold of ``user``, which writes no more. This never waits."""
    _leaving.append(user)
    _let_leavers_go()


@atexit.register
def leave_all() -> None:
    """Give up all holds, at the end of the process."""
    with _guarded():
        for name, hold in list(_held.items()):
            _let_go(name, hold)


def _drop(user: Any, but: str | None = None) -> None:
    for name, hold in list(_held.items()):
        if name != but and user in hold.users:
            hold.users.remove(user)
            if not hold.users:
                _let_go(name, hold)


def _let_go(name: str, hold: Hold) -> None:
    _held.pop(name, None)
    hold.ended.set()
    with contextlib.suppress(OSError):
        if hold.stands():
            hold.path.unlink()
    os.close(hold.descriptor)


def _in_child() -> None:
    """Give up all holds in a forked process: it is not the writer, and must not keep the lock of one that dies."""
    global _guard
    _guard = threading.Lock()
    _leaving.clear()
    for hold in _held.values():
        hold.ended.set()
        with contextlib.suppress(OSError):
            os.close(hold.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_in_child)


# -- taking ------------------------------------------------------------------------------------------------------------


def _acquire(folder: Path, job: str | None, ranks: tuple[int, ...]) -> Hold:
    attempts = _Attempts(folder)
    while True:
        with storage_errors(attempts.path, 0):
            descriptor, writable = _open(attempts.path)
        try:
            if attempts.may_begin(descriptor, writable):
                return _begin(attempts.path, descriptor, job, ranks)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


class _Attempts:
    """Attempts to become the writer of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.path = folder, folder / FILE
        self._empty_until = time.monotonic() + RECORD_WAIT_S
        self._gone: str | None = None
        """The hold of another host whose record stands still."""

    def may_begin(self, descriptor: int, writable: bool) -> bool:
        """Return True if the open file is locked for this process, or needs no lock; False: open it again.

        Raises:
            FolderTakenError: another process is the writer.
        """
        locked, found = _lock(descriptor), _read(descriptor)
        if not _has_name(descriptor, self.path):  # its holder has just released it
            return False
        if locked is False and found is None and time.monotonic() < self._empty_until:
            time.sleep(0.02)
            return False
        if _is_in_use(found, locked):
            raise FolderTakenError(self._folder, found)
        if locked is False or not writable:
            # A child that outlived the holder keeps the lock, or another user left the file: a new one takes its place.
            with storage_errors(self.path, 0):
                self.path.unlink(missing_ok=True)
            return False
        if found is None or found.place == _place() or found.hold == self._gone:
            return True
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        if not _stands_still(self.path, found):
            raise FolderTakenError(self._folder, found)
        self._gone = found.hold
        return False


def _begin(path: Path, descriptor: int, job: str | None, ranks: tuple[int, ...]) -> Hold:
    pid = os.getpid()
    born = _born(pid) or 0
    record = Record(socket.gethostname(), pid, _started(born), _place(), born, uuid.uuid4().hex, job, ranks)
    with storage_errors(path, 0):
        os.ftruncate(descriptor, 0)
        _write(descriptor, record, 0)
    return Hold(path, descriptor, record)


def _open(path: Path) -> tuple[int, bool]:
    """Return the descriptor, and whether it can be written to."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), True
    except PermissionError:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
        except FileNotFoundError:
            pass
        raise


def _lock(descriptor: int) -> bool | None:
    """True if this process holds the lock now; None: the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        return False
    return True


def _is_in_use(found: Record | None, locked: bool | None) -> bool:
    """True if another process writes here, as far as this host can tell at once."""
    if found is None:
        return locked is False
    if found.place != _place():
        return locked is False
    return locked is not True and _born(found.pid) == found.born


def _stands_still(path: Path, found: Record) -> bool:
    """Watch the record of another host. The file is opened anew for each look: that is when a network file system asks its server."""
    first = _look(path)
    until = time.monotonic() + WATCH_S
    while time.monotonic() < until:
        time.sleep(min(BEAT_S / 5, WATCH_S / 10))
        now = _look(path)
        if now != first:
            return not now  # it left, or it lives
    return True


def _look(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# -- the file ----------------------------------------------------------------------------------------------------------


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        named, opened = path.stat(), os.fstat(descriptor)
    except OSError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _write(descriptor: int, record: Record, beat: int) -> None:
    text = json.dumps({**asdict(record), "beat": f"{beat:012}"})  # of one length, so that no reader sees a mix of two
    os.pwrite(descriptor, text.encode(), 0)
    os.fdatasync(descriptor)


def _read(descriptor: int) -> Record | None:
    try:
        content = json.loads(os.pread(descriptor, 1 << 16, 0))
        values = {one.name: content[one.name] for one in fields(Record)}
        return Record(**{**values, "ranks": tuple(values["ranks"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


# -- processes ---------------------------------------------------------------------------------------------------------


def _place() -> str:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    return socket.gethostname()


def _born(pid: int) -> int | None:
    """When a process of this host began, in ticks since the boot; None: there is no such process, or it ended."""
    try:
        state, *rest = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None
    return None if state in "ZX" else int(rest[18])


def _started(born: int) -> str:
    up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    began = time.time() - up_s + born / os.sysconf("SC_CLK_TCK")
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began))
