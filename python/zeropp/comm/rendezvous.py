# SPDX-License-Identifier: Apache-2.0
"""Which ranks are there now: the keys under which the ranks of one start meet, in a store that may hold older starts.

torchrun gives a restarted script the same store again, with all keys of the start before, and perhaps another number of
ranks. So nothing that stands in the store may be believed unless it answers something that was said by this process:

    rank r   writes hello/r = a random nonce of its own, and waits for an announcement that has this nonce in place r
    rank 0   writes host = its own nonce: it has come; reads all hellos, writes announcement = a new random name and the nonces; anew whenever a hello changes
    rank r   writes name/seen/r, and waits for name/go
    rank 0   writes name/go once all have seen it

An announcement of an older start has older nonces, and no rank of this start follows it; an older hello that rank 0
took is replaced by its rank's, and then the announcement is, too. No name has a go before every nonce in it was found
to be of a process that waits. About six store operations a rank, a few milliseconds.
"""

from __future__ import annotations

import functools
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from zeropp.errors import CommError, CommTimeoutError, ranks_named, seconds

_log = logging.getLogger("zeropp")

TELL_AFTER_S = 10.0
"""Then a log line says who is absent; the next one comes after twice that time, and so on."""
LONGEST_PAUSE_S = 0.02
LIMIT_S = 60.0
"""A rank waits so long for the others in :func:`all_come`."""
_GONE = -(1 << 30)


class Reminder:
    """Log lines of one long wait, at growing intervals: elapsed time, limit, what is waited for."""

    def __init__(self, who: str, limit_s: float) -> None:
        self.who, self.limit_s = who, limit_s
        self._began, self._next_s = time.monotonic(), TELL_AFTER_S

    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    def tell(self, absent: Callable[[], str]) -> None:
        """Log a line if one is due. ``absent`` says what is missing, and where to look."""
        waited_s = self.waited_s()
        if waited_s < self._next_s:
            return
        self._next_s = 2 * waited_s
        _log.warning(
            "comm: %s has waited %s of at most %s for %s", self.who, seconds(waited_s), seconds(self.limit_s), absent()
        )


def rendezvous(store: Any, rank: int, ranks: int, timeout: timedelta, name: str) -> str:
    """Return a prefix for keys in `store` that all ranks of this start have, and no other process. Collective.

    Raises:
        zeropp.CommTimeoutError: not all came in time; those that are missing are named.
        zeropp.CommError: the store is gone.
    """
    try:
        return Rendezvous(store, rank, ranks, timeout.total_seconds(), name).keys()
    except CommError:
        raise
    except RuntimeError as error:  # torch's DistError and its kin
        raise CommError(f'comm: the store of group "{name}" fails: {str(error).splitlines()[0]}') from error


class Rendezvous:
    """One rank's part in it; :meth:`keys` is :func:`rendezvous`, but raises what the store raises."""

    host: str = ""
    """The nonce of the rank 0 that was there last, as far as this rank has read it."""

    def __init__(self, store: Any, rank: int, ranks: int, timeout_s: float, name: str) -> None:
        self.store, self.rank, self.ranks, self.name = store, rank, ranks, name
        self.timeout_s = timeout_s
        self.reminder = Reminder(f'rank {rank} of group "{name}"', timeout_s)
        self.nonce = f"{ranks} {secrets.token_hex(16)}"

    def keys(self) -> str:
        if self.ranks == 1:
            return f"zeropp/{secrets.token_hex(16)}"
        if self.rank == 0:
            self.host = self.nonce
            self.store.set("zeropp/host", self.nonce)
            return self._until(self._gather)
        self.store.set(f"zeropp/hello/{self.rank}", self.nonce)
        return self._until(self._follow)

    def _until(self, look: Callable[[], str | None]) -> str:
        while True:
            keys = look()
            if keys is not None:
                return keys
            waited = self.reminder.waited_s()
            if waited > self.timeout_s:
                raise CommTimeoutError(
                    f'comm: rank {self.rank} of group "{self.name}" waited {seconds(waited)}, its time-out, for {self._absent()}',
                    rank=self.failed_rank,
                )
            self.reminder.tell(self._absent)
            time.sleep(min(LONGEST_PAUSE_S, max(0.0005, waited / 20)))

    # -- rank 0 -----------------------------------------------------------------------------------------------------------

    announced: tuple[str, list[str]] | None = None
    missing: tuple[int, ...] = ()

    def _gather(self) -> str | None:
        nonces = [self.nonce, *(self._nonce_of(rank) for rank in range(1, self.ranks))]
        self.missing = tuple(rank for rank, nonce in enumerate(nonces) if not nonce)
        if self.missing:
            return None
        if self.announced is None or self.announced[1] != nonces:
            self.announced = f"zeropp/{secrets.token_hex(16)}", nonces
            self.store.set("zeropp/announcement", json.dumps(self.announced))
        keys = self.announced[0]
        if not self.store.check([f"{keys}/seen/{rank}" for rank in range(1, self.ranks)]):
            return None
        self.store.set(f"{keys}/go", "1")
        return keys

    def _nonce_of(self, rank: int) -> str:
        """Return a rank's nonce, or ""; a nonce for a group of another size is of another start."""
        key = f"zeropp/hello/{rank}"
        nonce = self.store.get(key).decode() if self.store.check([key]) else ""
        return nonce if nonce.startswith(f"{self.ranks} ") else ""

    # -- the others -------------------------------------------------------------------------------------------------------

    seen: str = ""

    def _follow(self) -> str | None:
        self._look_for_host()
        if self.seen and self.store.check([f"{self.seen}/go"]):
            return self.seen
        if not self.store.check(["zeropp/announcement"]):
            return None
        keys, nonces = json.loads(self.store.get("zeropp/announcement"))
        if keys != self.seen and len(nonces) == self.ranks and nonces[self.rank] == self.nonce:
            self.seen, self.host = keys, nonces[0]
            self.store.set(f"{keys}/seen/{self.rank}", "1")
        return None

    looks: int = 0

    def _look_for_host(self) -> None:
        """Read rank 0's nonce, often at first, then seldom: it changes where rank 0 comes anew to a store that
        outlived its group."""
        self.looks += 1
        if self.seen or (self.host and self.looks % 16):
            return
        if self.store.check(["zeropp/host"]):
            self.host = self.store.get("zeropp/host").decode()

    failed_rank: int | None = None
    """The first of those that :meth:`_absent` named."""

    def _absent(self) -> str:
        """Say which ranks are missing, of how many, and where to look."""
        if self.rank == 0 and not self.missing:
            return self._absent_after_all_came()
        if self.rank and self.seen:
            return f"the others of {self.ranks} ranks, whom rank 0 still waits for; look at rank 0's log"
        missing = self._missing_here() if self.rank else list(self.missing)
        self.failed_rank = missing[0]
        return f"{ranks_named(missing)} of {self.ranks} ranks; did every rank start? {_hint(missing, self.ranks)}"

    def _absent_after_all_came(self) -> str:
        """Name, on rank 0, the ranks that wrote their nonces and did not read the announcement."""
        assert self.announced is not None
        late = [r for r in range(1, self.ranks) if not self.store.check([f"{self.announced[0]}/seen/{r}"])]
        self.failed_rank = late[0] if late else None
        return f"{ranks_named(late)} of {self.ranks} ranks, which said hello and went away; look at {logs(late)}"

    def _missing_here(self) -> list[int]:
        """Return the ranks without a nonce, on another rank than 0. Rank 0 announces all when all have one; so it is missing itself
        if no other rank is."""
        missing = [] if self.host else [0]
        missing += [r for r in range(1, self.ranks) if r != self.rank and not self._nonce_of(r)]
        return missing or [0]


def logs(ranks: list[int]) -> str:
    """Name the output to read."""
    return "its log" if len(ranks) == 1 else "their logs"


def _hint(missing: list[int], ranks: int) -> str:
    if dist.is_initialized():  # it is a group of some ranks: torch numbers them anew
        return f"Look at {logs(missing)}; every rank of the group must make it (torch.distributed.new_group)"
    ended = "it may have ended" if len(missing) == 1 else "they may have ended"
    return f"Look at {logs(missing)}: {ended} before this point; is WORLD_SIZE={ranks} right?"


Question = tuple["Future[Any]", str, tuple[Any, ...]]


class PatientStore:
    """``set``, ``get``, ``check`` and ``add`` of `store`, asked by a thread that ends with the block. One caller at a time.

    Raises:
        zeropp.CommTimeoutError: no answer in time. The thread is left to its question; it holds up no exit.
    """

    def __init__(self, store: Any, timeout_s: float, name: str) -> None:
        self.prefix = ""
        """What stands before every key."""
        self._store, self._timeout_s, self._name = store, timeout_s, name
        self._questions: SimpleQueue[Question | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="zeropp store", daemon=True)
        self._answers = True

    def __enter__(self) -> PatientStore:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._questions.put(None)
        if self._answers:
            self._thread.join()

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            answer, what, arguments = question
            try:
                answer.set_result(getattr(self._store, what)(*arguments))
            except BaseException as error:  # it is the asking thread's
                answer.set_exception(error)
            del question, answer, arguments

    def _ask(self, what: str, *arguments: Any) -> Any:
        answer: Future[Any] = Future()
        self._answers = False  # also where Ctrl-C ends the wait
        self._questions.put((answer, what, arguments))
        try:
            seen = answer.exception(self._timeout_s or None)
        except FutureTimeoutError:
            raise CommTimeoutError(
                f'comm: the store in which the ranks of group "{self._name}" meet has not answered for {seconds(self._timeout_s)}; its '
                "process is stopped, or its machine is not to be reached"
            ) from None
        self._answers = True
        if seen is not None:
            raise seen
        return answer.result()

    def set(self, key: str, value: Any) -> None:
        self._ask("set", self.prefix + key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._ask("get", self.prefix + key)
        return value

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", [self.prefix + key for key in keys]))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", self.prefix + key, amount))


def all_come(key: str, what: str) -> bool:
    """Return True if every rank of the default group called this with the same key, False on all of them where one did not in time.

    ``tensor.cpu()`` of a model in shards looks like something that one rank may do alone, and it is a collective. So each rank
    counts itself in, and the collective begins only when all have. A rank that has waited long enough takes the count below zero
    in the same step in which it looks whether the others have come; a rank that comes later finds the count there.

    Args:
        key: fresh for each time, and the same on every rank.
        what: for the log.

    Raises:
        zeropp.CommTimeoutError: the store does not answer.
    """
    ranks = dist.get_world_size()
    reminder = Reminder(f"rank {dist.get_rank()}", LIMIT_S)
    with PatientStore(dist.distributed_c10d._get_default_store(), LIMIT_S, "default") as store:
        here = store.add(key, 1)
        while 0 < here < ranks:
            waited = reminder.waited_s()
            if waited > LIMIT_S:
                return store.add(key, _GONE) == ranks + _GONE  # all came in this very moment
            absent = ranks - here
            reminder.tell(functools.partial("{} more of {} ranks to {}".format, absent, ranks, what))
            time.sleep(min(0.02, 0.0005 + waited / 20))
            here = store.add(key, 0)
        return here > 0
