# SPDX-License-Identifier: Apache-2.0
"""Everything that saving does to the file system goes through ``disk``: one object, few operations.

So a test can put another one in its place that fails at any operation, or that keeps a log from which every state is
made that a power cut could leave (tests/checkpoint/crash.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from zeropp.errors import TierError

DIRECT_BYTES = 4096
"""Offset, length and address of a write past the page cache are multiples of this."""


class Disk:
    """The operations. What they change is durable only after ``sync`` (a file's bytes) or ``sync_folder`` (names)."""

    def make_folder(self, path: Path) -> None:
        """Make one folder, unless it is there."""
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> int:
        """Make an empty file; return its descriptor. Writes go past the page cache where the file system allows it."""
        return _open_direct(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)

    def take_over(self, spare: Path, path: Path, size_bytes: int) -> int | None:
        """Give an old file a new name, to be overwritten in its blocks on the disk. Return its descriptor, or None,
        with nothing done, where there is no such file, or where it could still be read because it is open elsewhere or
        has another name."""
        try:
            descriptor = _open_direct(spare, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            if status.st_nlink != 1 or not _is_ours_alone(descriptor):
                os.close(descriptor)
                return None
            if status.st_size > size_bytes:
                os.ftruncate(descriptor, size_bytes)
            spare.rename(path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        """Blocks for a whole file, so that a full disk is found before anything is written. Nothing where the file
        system cannot."""
        libc = ctypes.CDLL(None, use_errno=True)
        if size_bytes and libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) != 0:
            number = ctypes.get_errno()
            if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.ESPIPE):
                raise OSError(number, os.strerror(number))

    def write(self, descriptor: int, data: memoryview, offset_bytes: int) -> None:
        """Write all of ``data``; what does not fit the rules of direct writes goes through the page cache."""
        tail = len(data) % DIRECT_BYTES
        if (
            tail and len(data) > tail and offset_bytes % DIRECT_BYTES == 0
        ):  # the end of a file: all but its last page directly
            self.write(descriptor, data[:-tail], offset_bytes)
            data, offset_bytes = data[-tail:], offset_bytes + len(data) - tail
            self._write_cached(descriptor, data, offset_bytes)
            return
        if tail or offset_bytes % DIRECT_BYTES:
            self._through_cache(descriptor)
        refused = False
        while len(data):
            try:
                done = os.pwrite(descriptor, data, offset_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL or refused:
                    raise
                # Other threads write to this descriptor, too: the first one has changed it for all of them.
                self._through_cache(descriptor)
                refused = True
                continue
            data, offset_bytes = data[done:], offset_bytes + done
            if done % DIRECT_BYTES:  # the kernel stopped in the middle, as a full disk makes it
                self._through_cache(descriptor)

    @staticmethod
    def _write_cached(descriptor: int, data: memoryview, offset_bytes: int) -> None:
        """Write by a descriptor of its own: blocks before it, which other threads still write, stay direct."""
        other = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            while len(data):
                done = os.pwrite(other, data, offset_bytes)
                data, offset_bytes = data[done:], offset_bytes + done
        finally:
            os.close(other)

    @staticmethod
    def _through_cache(descriptor: int) -> None:
        """Write through the page cache from now on."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def sync(self, descriptor: int) -> None:
        """Wait until the file's bytes are on the disk."""
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Rename in one step; a file (not a folder) that has the new name is replaced."""
        old.rename(new)

    def exchange(self, first: Path, second: Path) -> bool:
        """Swap two names in one step (Linux's renameat2); False, and nothing done, where the file system cannot."""
        at_cwd, exchange = -100, 2
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "renameat2"):
            return False
        if libc.renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0:
            return True
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOSYS):
            return False
        raise OSError(number, os.strerror(number), str(second))

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with all in it, or a file; do nothing where there is none."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return os.open(path, flags, 0o666)


def _is_ours_alone(descriptor: int) -> bool:
    """True if nothing else has this file open or mapped. The kernel grants a lease for writing then, and only then; on
    file systems that grant none return False."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # not SIGIO, of which a process dies
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


disk = Disk()
"""The one in use."""


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, durably: else a power cut could take all that is put in it."""
    for one in (*reversed(path.parents), path):
        if one.is_dir():
            continue
        try:
            disk.make_folder(one)  # another process may have made it since the look
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(one)) from None
        disk.sync_folder(one.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a small file atomically: after any crash a reader sees the old text or the new."""
    new = path.with_name(path.name + ".new")
    data = text.encode()
    with storage_errors(path, len(data)):
        descriptor = disk.create(new)
        try:
            disk.write(descriptor, memoryview(data), 0)
            disk.sync(descriptor)
        finally:
            os.close(descriptor)
        disk.rename(new, path)
        disk.sync_folder(path.parent)


def replace_folder(new: Path, final: Path) -> Path | None:
    """``new`` takes the name ``final``, durably. Where what had that name is now, to be removed; None: there was none.

    In one step where the file system can exchange two names. Where it cannot, the old folder has the name that
    ``aside(final)`` gives between two renames, and readers look there.
    """
    with storage_errors(final, 0):
        if not final.exists():
            disk.rename(new, final)
            disk.sync_folder(final.parent)
            return None
        old = new
        if not disk.exchange(new, final):
            old = aside(final)
            disk.rename(final, old)
            disk.rename(new, final)
        disk.sync_folder(final.parent)
        return old


def aside(final: Path) -> Path:
    """Return the name of a folder while another takes its place, on file systems that cannot exchange names."""
    return final.with_name(f".{final.name}.old")


@contextlib.contextmanager
def storage_errors(path: Path, wanted_bytes: int) -> Iterator[None]:
    """Turn an OSError inside into a TierError with path, bytes wanted and bytes free. ``wanted_bytes`` 0: not counted."""
    try:
        yield
    except TierError:
        raise
    except OSError as error:
        raise _tier_error(path, wanted_bytes, error) from error


def _tier_error(path: Path, wanted_bytes: int, error: OSError) -> TierError:
    free = None
    with contextlib.suppress(OSError):
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        free = shutil.disk_usage(existing).free
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    known = [f"{wanted_bytes} bytes wanted"] if wanted_bytes else []
    if free is not None and (wanted_bytes or full):
        known.append(f"{free} free" if wanted_bytes else f"{free} bytes free")
    sizes = f" ({', '.join(known)})" if known else ""
    way_out = "free some space, or choose another folder" if full else "choose a folder that can be written"
    return TierError(
        f"{path}: cannot be written: {error.strerror or error}{sizes}; {way_out}",
        path=str(path), bytes_wanted=wanted_bytes or None, bytes_free=free, errno=error.errno,
    )  # fmt: skip
