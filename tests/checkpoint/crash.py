# SPDX-License-Identifier: Apache-2.0
"""Disks for tests: one that fails or kills at an operation, one that waits, and one that keeps a log from which every
state is made that a power cut could leave.

After a power cut a disk holds what was synced, and of the rest anything: each folder has a prefix of the changes of
its names since it was synced, each file a mix of its blocks' old and new bytes, or zeros, or is shorter. A process
that is killed leaves more than that (the page cache survives), so this covers it.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

from zeropp.files.disk import Disk

OPERATIONS = (
    "make_folder", "create", "take_over", "reserve", "write", "sync", "rename", "exchange", "remove_tree", "sync_folder",
)  # fmt: skip


def _wrapped(before):
    """Return a class of disks that call ``before(disk, operation)`` first."""

    def method(name):
        def call(self, *args):
            before(self, name)
            return getattr(Disk, name)(self, *args)

        return call

    return {name: method(name) for name in OPERATIONS}


def failing(at: int, errno: int) -> Disk:
    """Return a disk that refuses operation ``at`` and all writes after it; ``remove_tree`` works, as on a full disk."""

    def before(disk, name):
        disk.count += 1
        if disk.count > at and (name != "remove_tree" or disk.count == at + 1):
            raise OSError(errno, os.strerror(errno))

    disk = type("Failing", (Disk,), _wrapped(before))()
    disk.count = 0
    return disk


def deadly(at: int) -> Disk:
    """Return a disk that kills the process by SIGKILL before operation ``at``."""

    def before(disk, name):
        if disk.count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        disk.count += 1

    disk = type("Deadly", (Disk,), _wrapped(before))()
    disk.count = 0
    return disk


def gated() -> Disk:
    """Return a disk whose writes wait until ``open`` is set."""

    def before(disk, name):
        if name == "write":
            assert disk.open.wait(60)

    disk = type("Gated", (Disk,), _wrapped(before))()
    disk.open = threading.Event()
    return disk


class File:
    def __init__(self) -> None:
        self.durable = b""
        self.now = bytearray()
        self.dirty: list[tuple[int, int]] = []

    def after_a_cut(self, chance: random.Random) -> bytes:
        kind = chance.randrange(4)
        if kind == 0 or not self.dirty:
            return bytes(self.durable)
        if kind == 1:
            return bytes(self.now)
        content = bytearray(self.now)
        for begin, end in self.dirty:
            fate = chance.randrange(3)
            if fate:
                old = self.durable[begin:end] if fate == 1 else b""
                content[begin:end] = old.ljust(end - begin, b"\0")
        return bytes(content[: chance.choice([len(content), chance.randrange(len(content) + 1)])])


class Folder:
    def __init__(self) -> None:
        self.durable: dict[str, object] = {}
        self.pending: list[tuple] = []
        self.now: dict[str, object] = {}

    def change(self, *operation) -> None:
        self.pending.append(operation)
        _apply(self.now, operation)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.now), []

    def after_a_cut(self, chance: random.Random) -> dict[str, object]:
        names = dict(self.durable)
        for operation in self.pending[: chance.randrange(len(self.pending) + 1)]:
            _apply(names, operation)
        return names


def _apply(names: dict[str, object], operation: tuple) -> None:
    kind, first, second = operation
    if kind == "set":
        names[first] = second
    elif kind == "remove":
        names.pop(first)
    elif kind == "rename":
        names[second] = names.pop(first)
    else:
        names[first], names[second] = names[second], names[first]


class Recording(Disk):
    """A disk that works on the real one below ``root``, and keeps a log."""

    def __init__(self, root: Path) -> None:
        self.root, self.log, self._lock = root, [], threading.Lock()
        self._paths: dict[int, str] = {}

    def _note(self, *entry) -> None:
        with self._lock:
            self.log.append(entry)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def make_folder(self, path):
        super().make_folder(path)
        self._note("make_folder", self._name(path))

    def create(self, path):
        descriptor = super().create(path)
        self._paths[descriptor] = self._name(path)
        self._note("create", self._name(path))
        return descriptor

    def take_over(self, spare, path, size_bytes):
        descriptor = super().take_over(spare, path, size_bytes)
        if descriptor is not None:
            self._paths[descriptor] = self._name(path)
            self._note("take_over", self._name(spare), self._name(path), size_bytes)
        return descriptor

    def reserve(self, descriptor, size_bytes):
        super().reserve(descriptor, size_bytes)
        self._note("reserve", self._paths[descriptor], size_bytes)

    def write(self, descriptor, data, offset_bytes):
        self._note("write", self._paths[descriptor], bytes(data), offset_bytes)
        super().write(descriptor, data, offset_bytes)

    def sync(self, descriptor):
        super().sync(descriptor)
        self._note("sync", self._paths[descriptor])

    def rename(self, old, new):
        super().rename(old, new)
        self._note("rename", self._name(old), self._name(new))

    def exchange(self, first, second):
        done = self.can_exchange and super().exchange(first, second)
        if done:
            self._note("exchange", self._name(first), self._name(second))
        return done

    can_exchange = True

    def remove_tree(self, path):
        if path.exists():
            self._note("remove_tree", self._name(path))
        super().remove_tree(path)

    def sync_folder(self, path):
        super().sync_folder(path)
        self._note("sync_folder", self._name(path))


class Machine:
    """A machine that follows a log, and can lose its power at any entry."""

    def __init__(self) -> None:
        self.top = Folder()

    def _find(self, path: str):
        node = self.top
        for part in Path(path).parts:
            node = node.now[part]
        return node

    def _parent(self, path: str) -> tuple[Folder, str]:
        return self._find(str(Path(path).parent)), Path(path).name

    def follow(self, entry: tuple) -> None:
        kind, path, *rest = entry
        if kind == "make_folder":
            parent, name = self._parent(path)
            if name not in parent.now:
                parent.change("set", name, Folder())
        elif kind == "create":
            parent, name = self._parent(path)
            parent.change("set", name, File())
        elif kind == "take_over":
            (old, old_name), (new, new_name) = self._parent(path), self._parent(rest[0])
            file = old.now[old_name]
            old.change("remove", old_name, None)
            new.change("set", new_name, file)
            del file.now[rest[1] :]
        elif kind == "reserve":
            file = self._find(path)
            if rest[0] > len(file.now):
                file.dirty.append((len(file.now), rest[0]))
                file.now.extend(bytes(rest[0] - len(file.now)))
        elif kind == "write":
            file, (data, offset) = self._find(path), rest
            file.now[offset : offset + len(data)] = data
            file.dirty.append((offset, offset + len(data)))
        elif kind == "sync":
            file = self._find(path)
            file.durable, file.dirty = bytes(file.now), []
        elif kind == "sync_folder":
            self._find(path).sync()
        elif kind == "remove_tree":
            parent, name = self._parent(path)
            parent.change("remove", name, None)
        else:
            parent, name = self._parent(path)
            parent.change(kind, name, Path(rest[0]).name)

    def lose_power(self, into: Path, chance: random.Random) -> None:
        """Return what is on the disk after a loss of power."""
        self._write(self.top, into, chance)

    def _write(self, node, path: Path, chance: random.Random) -> None:
        if isinstance(node, File):
            path.write_bytes(node.after_a_cut(chance))
            return
        path.mkdir()
        for name, child in node.after_a_cut(chance).items():
            self._write(child, path / name, chance)
