# SPDX-License-Identifier: Apache-2.0
"""Two launches of one benchmark, of two revisions, take turns: only one of them runs at any time (``run.py --against``).

Both go through the same contenders in the same order, and take the same turn one after the other, so that the two times of a ratio are
milliseconds apart; what one does between turns, such as preparing the next case, happens while its twin waits. The order is A B, B A,
A B, ...: what a turn leaves behind for the next one, in caches or on a disk, meets both sides alike. A twin is the process at the same
place of the other launch: its rank, or the parent. They pass one byte to and fro through a socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SIDE_VARIABLE = "ZEROPP_BENCH_SIDE"
"""``first`` or ``second`` in a pair of launches, each of which measures zeropp of one revision and no peers; not set otherwise."""
FOLDER_VARIABLE = "ZEROPP_BENCH_TURNS"
"""Folder of the sockets of a pair of launches; not set where launches do not alternate."""
LAUNCH_VARIABLE = "ZEROPP_BENCH_LAUNCH"
"""Which launch of the parent a rank belongs to."""
PYTHON_VARIABLE = "ZEROPP_BENCH_PYTHON"
"""Folder of the Python package that is measured; the tree's own where it is not set."""

LIMIT_S = 1800.0
"""For the longest turn of a twin, and for its start."""


def alone() -> bool:
    """True where our own side is measured alone, without peers."""
    return SIDE_VARIABLE in os.environ


def first() -> bool:
    """True on the side that begins."""
    return os.environ[SIDE_VARIABLE] == "first"


class Twins:
    """The connection of this process to its twin."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._ended = False
        self._within = False
        self._launches = self._turns = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Take a turn. The twin may run after every second one, so that each side takes two in a row."""
        if not alone() or self._within or not os.environ.get(FOLDER_VARIABLE):
            yield
            return
        if self._socket is None:
            self._meet(Path(os.environ[FOLDER_VARIABLE]))
        self._within = True
        yield
        self._within = False
        self._turns += 1
        if (self._turns % 2 == 1) == first():
            self._give()
            self._wait()

    @contextlib.contextmanager
    def launching(self) -> Iterator[dict[str, str]]:
        """Let the twin launch its ranks as well, because the ranks of both take turns; yield the variables that they need.

        Ranks that are launched within a turn belong to it, and take no turns of their own.
        """
        self._launches += 1
        if not alone():
            yield {}
        elif self._within:
            yield {FOLDER_VARIABLE: ""}
        else:
            gives = self._socket is not None and threading.current_thread() is threading.main_thread()
            if gives:
                self._give()
            yield {LAUNCH_VARIABLE: str(self._launches)}
            if gives:
                self._wait()

    def _meet(self, folder: Path) -> None:
        """Find the twin. The first side has the first turn."""
        place = folder / f"{os.environ.get(LAUNCH_VARIABLE, 'parent')}-{os.environ.get('RANK', 'parent')}"
        deadline = time.monotonic() + LIMIT_S
        if first():
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(place))
                listener.listen(1)
                listener.settimeout(LIMIT_S)
                self._socket, _ = listener.accept()
            self._socket.settimeout(LIMIT_S)
            return
        while self._socket is None:
            candidate = socket.socket(socket.AF_UNIX)
            try:
                candidate.connect(str(place))
                self._socket = candidate
            except OSError:
                candidate.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        self._socket.settimeout(LIMIT_S)
        self._wait()

    def _give(self) -> None:
        """Let the twin run, unless it has ended."""
        assert self._socket is not None
        try:
            self._socket.sendall(b"t")
        except (BrokenPipeError, ConnectionResetError):
            self._ended = True

    def _wait(self) -> None:
        """Wait until the twin lets this process run, or has ended."""
        assert self._socket is not None
        if not self._ended:
            try:
                self._ended = not self._socket.recv(1)
            except ConnectionResetError:
                self._ended = True


TWINS = Twins()
"""This process has one twin at most."""
