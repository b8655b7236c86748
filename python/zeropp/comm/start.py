# SPDX-License-Identifier: Apache-2.0
"""A store that lives as long as the group that is made in it.

Where rank 0 hosts the job's store, the store goes with rank 0's group. A rank that makes its group anew may reach the old
one, which rank 0 is about to take down: torch would meet there, and fail, now or at the first ``new_group``. So the ranks meet
(rendezvous.py) in the store that each found before torch hears of it, and a rank whose store goes meanwhile looks for the next.

    rank 0   makes a store, where its own is gone, writes a random word into it, and meets
    rank r   reads the word, and meets. The store goes: if the word is that of the last group here, or none, it was the old
             store, and rank 0 is late; any other word says that rank 0 came for this group, and is gone: an error, unless
             it is soon there again

torchrun's agent keeps its store for all groups: there, nothing of this is needed.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from zeropp.comm.address import Place, listens_within
from zeropp.comm.rendezvous import PatientStore, Reminder, Rendezvous
from zeropp.errors import CommError, CommTimeoutError
from zeropp.wording import seconds

__all__ = ["find_store"]

_log = logging.getLogger("zeropp")

GROUP = "default"  # what torch is making; it has no name yet
PAUSE_S = 0.05
GRACE_S = 3.0
"""So long may rank 0 be gone after it came: this rank's process may be new, and have met the group before it."""

_last_word: dict[str, str] = {}
"""What rank 0 wrote when the last group was made, by the store's place."""


def find_store(place: Place, timeout: timedelta) -> TCPStore:
    """The store in which all ranks of this start are; rank 0 makes it. Collective.

    Raises:
        zeropp.CommTimeoutError: not all ranks came in time; those that are missing are named.
        zeropp.CommError: rank 0 came and went.
    """
    end = time.monotonic() + timeout.total_seconds()
    while True:
        store = _connect(place, end, timeout)
        if place.ranks == 1:
            return store
        left_s = _left_s(end)
        with PatientStore(store, left_s, GROUP) as patient:
            patient.prefix = "zeropp start/"
            rendezvous = Rendezvous(patient, place.rank, place.ranks, left_s, GROUP)
            try:
                rendezvous.keys()
                return store
            except CommError:
                raise
            except RuntimeError as error:  # torch's DistError and its kin: the store is gone
                _judge(error, rendezvous, place)
            finally:
                _last_word[str(place)] = rendezvous.host or _last_word.get(str(place), "")
        _log.info("comm: rank %d met in a store at %s that rank 0 took down; it looks for the next", place.rank, place)
        del store, patient, rendezvous
        time.sleep(PAUSE_S)


def _connect(place: Place, end: float, timeout: timedelta) -> TCPStore:
    """torch would wait for all ranks in here, with no word of who is missing, and try a dead address for several time-outs."""
    limit_s = timeout.total_seconds()
    absent = (
        f"rank 0 of {place.ranks} ranks, which hosts the job's store at {place}, and nobody listens there; did rank 0 start? Look at its "
        "log: it may have ended before this point; are MASTER_ADDR and MASTER_PORT right?"
    )
    reminder = Reminder(f"rank {place.rank}", limit_s)
    while True:
        if place.rank and not listens_within(place, _left_s(end), lambda: reminder.tell(lambda: absent)):
            raise CommTimeoutError(
                f"comm: rank {place.rank} waited {seconds(limit_s)}, its time-out, for {absent}", rank=0
            )
        try:
            return TCPStore(
                place.host,
                place.port,
                place.ranks,
                is_master=place.rank == 0,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
                use_libuv=place.libuv,
            )
        except RuntimeError:
            if place.rank == 0 or time.monotonic() >= end:
                raise  # it could not make the store, and torch says why
        time.sleep(PAUSE_S)  # the store went while torch said hello to it


def _judge(error: RuntimeError, rendezvous: Rendezvous, place: Place) -> None:
    """Raise unless the store that is gone was the one of the group before."""
    came = rendezvous.host not in ("", _last_word.get(str(place), ""))
    if place.rank == 0 or (came and not listens_within(place, GRACE_S)):
        raise CommError(
            f'comm: the store of group "{GROUP}" at {place} is gone, and with it rank 0, which had come: {str(error).splitlines()[0]}',
            rank=0,
        ) from error


def _left_s(end: float) -> float:
    return max(0.001, end - time.monotonic())
