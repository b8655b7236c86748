# SPDX-License-Identifier: Apache-2.0
"""Check that the job's store is at ``MASTER_ADDR`` and ``MASTER_PORT``, before torch connects to it. torch would wait for its
whole timeout, half an hour by default, whatever the address.

What shows that an address is wrong, each for :data:`PATIENCE_S` seconds on end:

    rank 0, which hosts the store   the address is not this machine's, and a connection to it does not come back either
    under torchrun                  nobody listens: its agent made the store before it started the ranks
    the other ranks                 the name means no machine, or no way leads there

That nobody listens *yet* shows nothing where rank 0 hosts the store: it may be late, and is waited for as long as any rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs, urlparse

from zeropp.errors import CommError

PATIENCE_S = 4.0
PAUSE_S = 0.1
_LONGEST_KNOCK_S = 10.0


@dataclass(frozen=True)
class Place:
    """The address at which the store of a job should be."""

    host: str
    port: int
    rank: int
    exists: bool
    """Somebody else made it already (torchrun's agent)."""
    ranks: int = 0
    """How many there are; 0: nobody said."""
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
    """None: somebody listens there."""
    try:
        socket.create_connection((host, port), timeout=max(PAUSE_S, patience_s)).close()
    except OSError as error:
        return error
    return None


def _comes_back(place: Place, patience_s: float) -> OSError | None:
    """None: the address is one of this machine's own, or what is sent to it is sent back here (NAT). The store's port is
    touched in the second case only: a store of the process's own may be listening there still."""
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
    """Somebody listens there, now or soon. ``meanwhile`` is called at each try."""
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
