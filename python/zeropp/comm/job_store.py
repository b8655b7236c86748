# SPDX-License-Identifier: Apache-2.0
"""The store of a job: whether it can be at its address, and one that lives as long as the group that is made in it.

**The address.** ``MASTER_ADDR`` and ``MASTER_PORT`` are tried before torch connects, which would wait for its whole timeout, half an
hour by default, whatever the address. Each of these shows that the address is wrong, if it lasts for :data:`PATIENCE_S` seconds:

    rank 0, which hosts the store   the address is not this machine's, and a connection to it does not come back either
    under torchrun                  nothing listens there: torchrun's agent makes the store before it starts the ranks
    the other ranks                 the name means no machine, or no route leads there

Where rank 0 hosts the store, a port that does not listen *yet* shows nothing: rank 0 may be late, and is waited for as long as any rank.

**The store.** Where rank 0 hosts it, the store goes with rank 0's group. A rank that makes its group anew may reach the old
one, which rank 0 is about to take down: torch would meet there, and fail, now or at the first ``new_group``. So the ranks meet
(rendezvous.py) in the store that each found before torch gets it, and a rank whose store goes meanwhile looks for the next.

    rank 0   makes a store, where its own is gone, writes a nonce into it, and meets
    rank r   reads the nonce, and meets. The store goes: if the nonce is that of the last group here, or none, it was the old
             store, and rank 0 is late; any other nonce says that rank 0 came for this group, and is gone: an error, unless
             it is soon there again

torchrun's agent keeps its store for all groups: there, none of this is needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

from torch._C._distributed_c10d import TCPStore

from zeropp.comm.rendezvous import PatientStore, Reminder, Rendezvous
from zeropp.errors import CommError, CommTimeoutError, seconds

__all__ = ["Place", "check", "find_store", "listens_within", "place_of"]

_log = logging.getLogger("zeropp")

PATIENCE_S = 4.0
PAUSE_S = 0.1
_LONGEST_KNOCK_S = 10.0
RETRY_S = 0.05
GROUP = "default"  # what torch is making; it has no name yet
GRACE_S = 3.0
"""So long may rank 0 be gone after it came: this rank's process may be new, and have met the group before it."""

_last_nonce: dict[str, str] = {}
"""What rank 0 wrote when the last group was made, by the store's place."""


@dataclass(frozen=True)
class Place:
    """The address at which the store of a job should be."""

    host: str
    port: int
    rank: int
    exists: bool
    """True if another process made it already (torchrun's agent)."""
    ranks: int = 0
    """The number of ranks; 0: not told."""
    libuv: bool = True
    """torch's choice of server."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def check(place: Place) -> None:
    """Raise if the store cannot be there.

    Raises:
        zeropp.CommError: with the address, and what the operating system says of it.
    """
    hosts = place.rank == 0 and not place.exists
    began = time.monotonic()
    while True:
        left_s = PATIENCE_S - (time.monotonic() - began)
        reason = _comes_back(place, left_s) if hosts else _knock(place.host, place.port, left_s)
        if reason is None or (isinstance(reason, ConnectionRefusedError) and not place.exists and not hosts):
            return
        if time.monotonic() - began >= PATIENCE_S:
            raise CommError(_message(place, reason))
        time.sleep(PAUSE_S)


def _knock(host: str, port: int, patience_s: float) -> OSError | None:
    """Return why nothing listens there; None: a connection was accepted."""
    try:
        socket.create_connection((host, port), timeout=max(PAUSE_S, patience_s)).close()
    except OSError as error:
        return error
    return None


def _comes_back(place: Place, patience_s: float) -> OSError | None:
    """Return why the address does not lead to this machine. None: it is one of its own, or what is sent to it is sent back here (NAT).
    The store's port is touched in the second case only: a store of the process's own may be listening there still."""
    try:
        families = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return error
    for family, _, _, _, address in families:
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((address[0], 0, *address[2:]))
            return None
    try:
        with socket.create_server(("", place.port)):
            return _knock(place.host, place.port, patience_s)
    except OSError as error:
        return error


def listens_within(place: Place, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Return True if something listens there, now or within so many seconds. ``meanwhile`` is called after each try."""
    end = time.monotonic() + seconds
    while _knock(place.host, place.port, min(_LONGEST_KNOCK_S, end - time.monotonic())) is not None:
        if time.monotonic() > end:
            return False
        meanwhile()
        time.sleep(PAUSE_S)
    return True


def _message(place: Place, reason: OSError) -> str:
    said = "no answer" if isinstance(reason, TimeoutError) else reason.strerror or str(reason)
    way_out = (
        "torchrun's agent made it there, so the machine or its network is gone"
        if place.exists
        else "set MASTER_ADDR to an address of rank 0's machine that all ranks reach, and MASTER_PORT to a free port of it"
    )
    doing = "cannot host" if place.rank == 0 and not place.exists else "does not reach"
    return f"comm: rank {place.rank} {doing} the job's store at {place} within {PATIENCE_S:g} s: {said}; {way_out}"


def place_of(scheme: str, url: str) -> Place | None:
    """Return where torch's handler of a URL looks for the store, or None where something is missing, of which torch says what."""
    return _from_environment(url) if scheme == "env" else _from_url(url)


def _from_environment(url: str) -> Place | None:
    query = parse_qs(urlparse(url).query)
    rank = query.get("rank", [os.environ.get("RANK", "")])[0]
    ranks = query.get("world_size", [os.environ.get("WORLD_SIZE", "")])[0]
    return _place(os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), rank, ranks, query)


def _from_url(url: str) -> Place | None:
    parts = urlparse(url)
    query = parse_qs(parts.query)
    port = None if parts.port is None else str(parts.port)
    return _place(parts.hostname, port, query.get("rank", [""])[0], query.get("world_size", [""])[0], query)


def _place(host: str | None, port: str | None, rank: str, ranks: str, query: dict[str, list[str]]) -> Place | None:
    if not host or not port or not port.isdecimal() or int(port) >= 1 << 16 or not rank.isdecimal():
        return None
    exists = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    libuv = query.get("use_libuv", [os.environ.get("USE_LIBUV", "1")])[0] == "1"
    return Place(host, int(port), int(rank), exists, int(ranks) if ranks.isdecimal() else 0, libuv)


# -- the store ----------------------------------------------------------------------------------------------------------


def find_store(place: Place, timeout: timedelta) -> TCPStore:
    """Return the store in which all ranks of this start are; rank 0 makes it. Collective.

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
            except RuntimeError as error:  # torch's DistError and others: the store is gone
                _judge(error, rendezvous, place)
            finally:
                _last_nonce[str(place)] = rendezvous.host or _last_nonce.get(str(place), "")
        _log.info("comm: rank %d met in a store at %s that rank 0 took down; it looks for the next", place.rank, place)
        del store, patient, rendezvous
        time.sleep(RETRY_S)


def _connect(place: Place, end: float, timeout: timedelta) -> TCPStore:
    """Connect to the store. torch would wait here for all ranks and name none of them, and try a dead address for
    several timeouts."""
    limit_s = timeout.total_seconds()
    absent = (
        f"rank 0 of {place.ranks} ranks, which hosts the job's store at {place}, and nothing listens there; did rank 0 start? Look at its "
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
        time.sleep(RETRY_S)  # the store went while torch said hello to it


def _judge(error: RuntimeError, rendezvous: Rendezvous, place: Place) -> None:
    """Raise unless the store that is gone was the one of the group before."""
    came = rendezvous.host not in ("", _last_nonce.get(str(place), ""))
    if place.rank == 0 or (came and not listens_within(place, GRACE_S)):
        raise CommError(
            f'comm: the store of group "{GROUP}" at {place} is gone, and with it rank 0, which had come: {str(error).splitlines()[0]}',
            rank=0,
        ) from error


def _left_s(end: float) -> float:
    return max(0.001, end - time.monotonic())
