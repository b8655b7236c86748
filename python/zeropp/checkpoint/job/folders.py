# SPDX-License-Identifier: Apache-2.0
"""Several groups of ranks of one job that save: two pipeline stages, each with its own data-parallel ranks.

A group knows its own parameters only, so two groups that save into one folder would leave the checkpoint of the last one, which is a
part of the model, without an error. The lock of folder_writer.py stops the second group. It writes to the store that
all ranks of the job share, and the first group looks there before it commits. A group that is not the whole job therefore waits,
before it commits, until all ranks of the job have begun a save; not for long, because groups may save at different times.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeropp.errors import CheckpointError
from zeropp.files import folder_writer
from zeropp.files.folder_writer import FolderTakenError, Hold

WAIT_S = 2.0
"""How long a group waits for the saves of the others."""
POLL_S = 0.02

_saves = 0  # of groups that are not the whole job, whose first rank is this process


class Group:
    """The ranks that save together, as the whole job numbers them. Its methods are for its first rank."""

    def __init__(self, members: list[int]) -> None:
        self.members = tuple(members)
        self.is_job = len(members) == _job_ranks()
        self._hold: Hold | None = None
        self._round = 0

    def take(self, folder: Path, user: Any) -> None:
        """Become the writer of the folder; tell the group of this job that is the writer already.

        Raises:
            CheckpointError: another job, or another group of this job, writes there.
        """
        global _saves
        job = _job()
        try:
            self._hold = folder_writer.take(folder, user, job, self.members)
        except FolderTakenError as error:
            other = error.record
            if job is None or other is None or other.job != job:
                raise
            said = (
                f"save: {_named(self.members)} and {_named(other.ranks)} of one job save into {folder}, and each group holds a part of the "
                f"parameters, so that either checkpoint would be a part of the model; save each group into a folder of its own. {other} "
                f"writes there for {_named(other.ranks)}. Nothing in the folder was changed"
            )
            _store().set(_refusal(other.hold), said)
            raise CheckpointError(said) from None
        finally:
            if not self.is_job:
                _saves += 1
                self._round = _saves
                _store().add(self._count(), len(self.members))
        self._require_alone()

    def settle(self) -> None:
        """Wait, before the commit, until all groups of the job have counted themselves, or until the time is up.

        Raises:
            CheckpointError: another group of this job wanted to write into the folder meanwhile.
        """
        until = time.monotonic() + WAIT_S
        while not self.is_job and _store().add(self._count(), 0) < _job_ranks() and time.monotonic() < until:
            time.sleep(POLL_S)
        self._require_alone()

    def _require_alone(self) -> None:
        assert self._hold is not None
        if self.is_job:
            return
        key = _refusal(self._hold.record.hold)
        if _store().check([key]):
            said = _store().get(key).decode()
            with contextlib.suppress(RuntimeError, NotImplementedError):  # told once, where the store can forget
                _store().delete_key(key)
            raise CheckpointError(said)

    def _count(self) -> str:
        return f"zeropp/saves/{self._round}"


def rank_in_job() -> int:
    """This process, as the whole job numbers it."""
    return dist.get_rank() if dist.is_initialized() else 0


def _job_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _job() -> str | None:
    """Equal for all ranks of a job, and of this job alone."""
    if _job_ranks() == 1:
        return None
    return str(_store().compare_set("zeropp/job", "", uuid.uuid4().hex).decode())


def _refusal(hold: str) -> str:
    return f"zeropp/refused/{hold}"


def _named(ranks: tuple[int, ...]) -> str:
    few = ", ".join(str(rank) for rank in ranks[:8])
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {few}{', ...' if len(ranks) > 8 else ''}"
