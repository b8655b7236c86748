# SPDX-License-Identifier: Apache-2.0
"""States that live in files, seen together: a step over them succeeds on every rank, or raises on every rank; and where
one stopped half-way, nothing but a load goes on. And the bytes that went to and from the disk."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zeropp.aio import warn_once
from zeropp.comm.collective import job_of
from zeropp.errors import Error, TierError
from zeropp.files import io_settings
from zeropp.files.scratch import STRIPE_BYTES, Scratch, ScratchFile
from zeropp.zero.model_state import ModelState


class Storage:
    """The outcome of steps over states in memory: this rank alone knows it, and nothing is ever half-way."""

    can_fail = False
    """True if a step can fail in the middle, so that ranks have to compare its outcome."""
    is_inconsistent = False
    """True if a step or a write failed half-way, on any rank, and no checkpoint was loaded since."""

    def raise_on_all(self, error: BaseException | None) -> None:
        """Return if a step succeeded on all ranks; else raise, on all of them. Collective, after every step."""
        if error is not None:
            raise error

    def mark_inconsistent(self, reason: str) -> None:
        """Note that a part of the states was written and another not."""
        raise NotImplementedError

    def require_whole(self) -> None:
        """Raise zeropp.Error if a step or a write failed half-way, and no checkpoint was loaded since."""

    def loaded(self, index: int) -> None:
        """Note that all states of that unit were loaded."""


class FileStorage(Storage):
    """The common part of the tiers of one engine. Every rank has one as soon as one kind of state is in a file.

    Args:
        trainable: indices of the units that are stepped.
    """

    can_fail = True

    def __init__(self, engine: ModelState, trainable: list[int]) -> None:
        self._ranks = job_of(engine)
        self._core = engine.core
        self._trainable = trainable
        self._unloaded: set[int] = set()
        self._failure = ""
        self._steps = 0
        self.checks: list[Callable[[], bool]] = [lambda: bool(self._core.step_state()[1])]
        self.after_recovery: list[Callable[[], None]] = [self._core.params_recovered]

    def raise_on_all(self, error: BaseException | None) -> None:
        """Return if a step succeeded on all ranks; else raise, on all of them. Collective, after every step.

        Where some shards were stepped and others not, here or elsewhere, everything but a load is refused from then on.
        A rank that was interrupted after its step raises alone: nothing is inconsistent.
        """
        mine = {"state": self._state(), "kind": "" if error is None else type(error).__name__, "said": str(error)}
        every = self._ranks.exchange(mine)
        states = {one["state"] for one in every}
        failed = [(rank, one) for rank, one in enumerate(every) if one["kind"]]
        if failed and states not in ({"stepped"}, {"unchanged"}):
            self.mark_inconsistent(f"rank {failed[0][0]}: {failed[0][1]['said']}")
        if error is not None:
            raise error
        if failed and states != {"stepped"}:
            rank, one = failed[0]
            kind = TierError if one["kind"] == TierError.__name__ else Error
            raise kind(f"rank {rank}: {one['said'] or one['kind']}")

    def _state(self) -> str:
        """Return what the step since the last call made of this rank's states."""
        before, self._steps = self._steps, self._core.step_state()[0]
        if any(check() for check in self.checks):
            return "inconsistent"
        return "stepped" if self._steps != before else "unchanged"

    def mark_inconsistent(self, reason: str) -> None:
        self._unloaded = set(self._trainable)
        self._failure = reason

    @property
    def is_inconsistent(self) -> bool:  # type: ignore[override]
        return bool(self._unloaded)

    def require_whole(self) -> None:
        if self._unloaded:
            raise Error(
                "weights and optimizer states are inconsistent, because a step failed half-way; zeropp.load(path, model, "
                f"optimizer) brings back the last checkpoint. It failed by: {self._failure}"
            )

    def loaded(self, index: int) -> None:
        self._unloaded.discard(index)
        if not self._unloaded:
            for recovered in self.after_recovery:
                recovered()


class Traffic:
    """The counts of one tier for :class:`DiskTraffic`."""

    def __init__(self, figures: Callable[[], dict[str, Any]]) -> None:
        self._figures = figures
        self._beside: tuple[Callable[[], dict[str, int]] | None] | None = None

    def stepped_beside(self, delayed: Callable[[], dict[str, int]] | None) -> None:
        """Steps run in a thread of their own from now on: this rank waits for ``delayed()["waited_ns"]``, not for the file. None:
        another tier counts that."""
        self._beside = (delayed,)

    def figures(self) -> dict[str, Any]:
        seen = self._figures()
        if self._beside is None:
            return seen
        waited = 0 if self._beside[0] is None else self._beside[0]()["waited_ns"]
        return {**seen, "waited_ns": waited, "step_wait_ns": 0}


class DiskTraffic:
    """Bytes that this process's tiers read and wrote, and how long it waited for them; those that are closed included. Any
    thread."""

    WAITS = ("load_wait_ns", "step_wait_ns", "waited_ns")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Callable[[], dict[str, Any]]] = {}
        self._closed = {"read": 0, "write": 0, "wait": 0}
        self._number = 0

    def add(self, figures: Callable[[], dict[str, Any]]) -> int:
        """Count what ``figures()`` says under ``read_bytes``, ``written_bytes`` and `WAITS`, until :meth:`close`."""
        with self._lock:
            self._number += 1
            self._open[self._number] = figures
            return self._number

    def close(self, number: int) -> None:
        """Ask a last time."""
        with self._lock:
            self._add(self._closed, self._open.pop(number)())

    def _add(self, totals: dict[str, int], seen: dict[str, Any]) -> None:
        totals["read"] += seen["read_bytes"]
        totals["write"] += seen["written_bytes"]
        totals["wait"] += sum(seen.get(name, 0) for name in self.WAITS)

    def totals(self) -> dict[str, int] | None:
        """Return ``{"read": bytes, "write": bytes, "wait": ns}`` so far; None where there never was a tier."""
        with self._lock:
            if not self._number:
                return None
            totals = dict(self._closed)
            for figures in self._open.values():
                self._add(totals, figures())
        return totals


disk_traffic = DiskTraffic()


def io_shape(scratch: Scratch) -> tuple[int, int]:
    """Return depth and bytes of a block that ``bench-io`` found best for the scratch folder's disk, or disks; 0, 0:
    not measured."""
    return io_settings.shape(scratch.folders, STRIPE_BYTES) or (0, 0)


def warn(warning: str) -> None:
    """Log the warning of an I/O engine, if there is one."""
    if warning:
        warn_once(warning)


class StreamedValues:
    """Values that code which writes them to a file can use as a 1-D tensor: they have a shape, slices, and ``parts`` in place of data.

    Args:
        read: ``read(first, elems)`` returns a copy of some elements.
    """

    BLOCK_BYTES = 4 << 20

    def __init__(
        self, read: Callable[[int, int], torch.Tensor], storage: Storage, dtype: torch.dtype, elems: int, first: int = 0
    ) -> None:
        self._read, self._storage, self.dtype = read, storage, dtype
        self._elems, self._first = elems, first
        self.shape = torch.Size([elems])

    def numel(self) -> int:
        return self._elems

    def detach(self) -> StreamedValues:
        return self

    def __getitem__(self, part: slice) -> StreamedValues:
        first, last, _ = part.indices(self._elems)
        return StreamedValues(self._read, self._storage, self.dtype, max(0, last - first), self._first + first)

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield copies of the elements in order, a few MiB at a time."""
        self._storage.require_whole()
        step = self.BLOCK_BYTES // self.dtype.itemsize
        for done in range(0, self._elems, step):
            yield self._read(self._first + done, min(step, self._elems - done))

    def tensor(self) -> torch.Tensor:
        """Return a copy of all elements."""
        self._storage.require_whole()
        return self._read(self._first, self._elems)


class FileStore:
    """The common part of the stores in scratch files: the folder, the counted traffic, the end."""

    file: ScratchFile

    def _open_in(
        self,
        scratch: Scratch,
        figures: Callable[[], dict[str, Any]],
        close: Callable[[], object],
        work: Callable[[], object],
    ) -> None:
        """Run ``work``, which opens the file and is collective; where it fails, leave nothing behind."""
        try:
            work()
        except BaseException:
            close()
            scratch.remove()
            raise
        self._figures, self.path = figures, self.file.parts[0]
        self.traffic: Traffic = Traffic(figures)
        number = disk_traffic.add(self.traffic.figures)
        self._end = weakref.finalize(self, end_store, close, number, scratch, os.getpid())

    def close(self) -> None:
        """Remove the scratch file: the model is gone."""
        self._end()

    def figures(self) -> dict[str, Any]:
        """Return what the core counts of the file; names as in ``zeropp.memory`` and the core's header."""
        return self._figures()


def end_store(close: Callable[[], object], number: int, scratch: Scratch, owner: int) -> None:
    """Close the file of a model that is gone: its traffic is kept, its folder removed."""
    if os.getpid() == owner:  # a forked child leaves its parent's files alone
        disk_traffic.close(number)
        close()
        scratch.remove()
