# SPDX-License-Identifier: Apache-2.0
"""A wrong address of the store, and a store that goes while ranks meet in it: errors within seconds, at every door."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from launch import run_ranks
from warm import free_port
from zeropp.comm import job_store, rendezvous
from zeropp.comm.job_store import Place
from zeropp.errors import CommError, CommTimeoutError

SOON_S = 5.0

# -- what the ranks do (in processes of their own) ---------------------------------------------------------------------------


def knock(rank: int, ranks: int, address: str) -> dict[str, Any]:
    """Another door a rank; each is rank 0 or 1 of a job of its own whose address is wrong."""
    os.environ.update({"MASTER_ADDR": address, "RANK": str(rank % 2), "WORLD_SIZE": "2"})
    if rank == 2:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # so nobody else will make the store
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    import torch
    import torch.distributed as dist
    import zeropp

    doors: list[Callable[[], Any]] = [
        lambda: dist.init_process_group("zeropp"),
        lambda: zeropp.prepare(torch.nn.Linear(2, 2)),
        lambda: dist.init_process_group("cpu:zeropp"),
    ]
    began = time.monotonic()
    try:
        doors[rank]()
    except zeropp.CommError as error:
        return {"text": str(error), "seconds": time.monotonic() - began}
    return {"text": "nothing was refused", "seconds": 0.0}


def meet_in_a_store_that_goes(rank: int, ranks: int, how: str) -> dict[str, Any] | None:
    """Rank 0 has the store, and goes, or stops, while rank 1 waits for it to come."""
    from datetime import timedelta

    import torch.distributed as dist
    from zeropp import comm

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, ranks, rank == 0, timedelta(seconds=60))
    if rank == 0:
        store.set("pid", str(os.getpid()))
        store.wait(["here"])
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    pid = int(store.get("pid"))
    store.set("here", "1")
    began = time.monotonic()
    try:
        comm.create(store, rank, ranks, timedelta(seconds=2.0 if how == "stops" else 60.0), "some")
    except CommError as error:
        seconds = time.monotonic() - began
        with contextlib.suppress(ProcessLookupError):  # where it is gone by itself
            os.kill(pid, signal.SIGKILL)
        return {"text": str(error), "seconds": seconds}
    return None


# -- what must come of it ----------------------------------------------------------------------------------------------------


def test_every_door_says_within_seconds_that_the_address_is_wrong() -> None:
    address = "no-such-machine.invalid"
    for outcome in run_ranks(3, knock, address, timeout=60):
        text = outcome.value["text"]
        where = "127.0.0.1" if outcome.rank == 2 else address
        verb = "does not reach" if outcome.rank else "cannot host"
        assert f"comm: rank {outcome.rank % 2} {verb} the job's store at {where}:" in text, str(outcome)
        assert ("torchrun's agent" if outcome.rank == 2 else "set MASTER_ADDR") in text
        assert outcome.value["seconds"] < SOON_S, str(outcome)


@pytest.mark.parametrize("how", ["dies", "stops"])
def test_a_store_that_goes_while_ranks_meet(how: str) -> None:
    outcomes = run_ranks(2, meet_in_a_store_that_goes, how, timeout=20, check=False)
    assert outcomes[1].code == 0, str(outcomes[1])
    assert "store" in outcomes[1].value["text"]
    assert outcomes[1].value["seconds"] < SOON_S


@pytest.mark.parametrize("answers", [True, False])
def test_ranks_are_counted_only_where_the_store_answers(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    class Store:
        def add(self, key: str, amount: int) -> int:
            if not answers:
                time.sleep(1.0)
            return 2

    monkeypatch.setattr(rendezvous, "LIMIT_S", 30.0 if answers else 0.2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    if answers:
        assert rendezvous.all_come("key", "read a parameter")
        return
    with pytest.raises(CommTimeoutError, match=r"has not answered for 0\.2 s"):
        rendezvous.all_come("key", "read a parameter")


@pytest.fixture
def listener() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_what_shows_that_an_address_is_wrong(listener: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "PATIENCE_S", 0.5)
    closed = free_port()
    wrong = {
        "under torchrun nobody listens": (Place("127.0.0.1", closed, 1, True), "Connection refused"),
        "no way leads there": (Place("255.255.255.255", closed, 1, False), ""),
        "rank 0 has another address": (Place("192.0.2.1", free_port(), 0, False), ""),
    }
    right = {
        "somebody listens": Place("127.0.0.1", listener, 1, True),
        "rank 0 may be late": Place("127.0.0.1", closed, 1, False),
        "rank 0 makes it": Place("127.0.0.1", closed, 0, False),
        "rank 0 has it already": Place("127.0.0.1", listener, 0, False),
    }
    with ThreadPoolExecutor(len(wrong)) as threads:
        asked = {case: (threads.submit(job_store.check, place), said) for case, (place, said) in wrong.items()}
    for case, (answer, said) in asked.items():
        error = answer.exception()
        assert isinstance(error, CommError) and said in str(error), (case, error)
    for place in right.values():
        job_store.check(place)


def test_other_backends_meet_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """zeropp does not check the address for gloo; torch itself reports what is missing."""
    import torch.distributed as dist

    monkeypatch.setattr(job_store, "check", lambda place: pytest.fail(f"asked about {place}"))
    port = str(free_port())
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo")
    dist.destroy_process_group()
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match="MASTER_PORT expected"):
        dist.init_process_group("zeropp")
