# SPDX-License-Identifier: Apache-2.0
"""Ranks meet in a store that holds what earlier starts left there (rendezvous.py). Ranks are threads here."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from zeropp.comm.job_store import Place, find_store
from zeropp.comm.rendezvous import rendezvous
from zeropp.errors import CommTimeoutError

LIMIT = timedelta(seconds=20)


@pytest.fixture
def store():
    return dist.HashStore()


def all_meet(store, ranks, limit=LIMIT, delays=None) -> list[Future]:
    def one(rank):
        time.sleep(delays[rank] if delays else 0)
        return rendezvous(store, rank, ranks, limit, "test")

    with ThreadPoolExecutor(ranks) as threads:
        return [threads.submit(one, rank) for rank in range(ranks)]


def common(futures) -> str:
    found = {one.result() for one in futures}
    assert len(found) == 1
    return found.pop()


def test_the_same_ranks_again_and_again_get_new_keys(store):
    assert len({common(all_meet(store, 3)) for _ in range(10)}) == 10


def test_another_number_of_ranks_in_the_same_store(store):
    """Ranks come and go as under torchrun: 3, then 2, then 4, in one store."""
    assert len({common(all_meet(store, ranks)) for ranks in (3, 2, 4, 1, 2, 3)}) == 6


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_died_while_meeting_are_not_met(store, seed):
    """Their hellos stand in the store, of the size that comes now; rank 0 may have announced them already. The ranks come at any
    time."""
    chance = random.Random(seed)
    nonces = [f"3 {rank}" for rank in range(3)]
    for rank in chance.sample((1, 2), chance.randrange(1, 3)):
        store.set(f"zeropp/hello/{rank}", nonces[rank])
    if chance.random() < 0.5:
        store.set("zeropp/announcement", json.dumps(["zeropp/old", nonces]))
        store.set("zeropp/old/go", "1")
    keys = common(all_meet(store, 3, delays=[chance.random() * 0.1 for _ in range(3)]))
    assert keys != "zeropp/old"


def test_who_is_absent_is_named(store):
    with ThreadPoolExecutor(2) as threads:
        here = [threads.submit(rendezvous, store, rank, 4, timedelta(seconds=0.3), "some") for rank in (0, 2)]
    with pytest.raises(
        CommTimeoutError,
        match=r'rank 0 of group "some" waited 0.3\d* s, its time-out, for ranks 1 and 3 of 4 ranks; did every rank start\? '
        r"Look at their logs: they may have ended before this point; is WORLD_SIZE=4 right\?",
    ):
        here[0].result()
    with pytest.raises(CommTimeoutError, match=r'rank 2 of group "some" waited .* for ranks 1 and 3 of 4 ranks; did'):
        here[1].result()
    with pytest.raises(CommTimeoutError, match=r'rank 2 of group "some" .* for ranks 0, 1 and 3 of 4 ranks; did every'):
        rendezvous(dist.HashStore(), 2, 4, timedelta(seconds=0.1), "some")


def test_a_long_wait_is_told_again_and_again(store, caplog, monkeypatch):
    """After 10 s, 20 s, 40 s, ...: elapsed time, limit, who is missing of how many, and where to look."""
    monkeypatch.setattr("zeropp.comm.rendezvous.TELL_AFTER_S", 0.1)
    with pytest.raises(CommTimeoutError):
        rendezvous(store, 0, 2, timedelta(seconds=1.0), "some")
    told = [record.getMessage() for record in caplog.records]
    assert 3 <= len(told) <= 4, told  # at 0.1, 0.2, 0.4 and 0.8 s
    said = r'comm: rank 0 of group "some" has waited 0.1\d* s of at most 1 s for rank 1 of 2 ranks; did every rank start\? '
    assert re.match(said + r"Look at its log: it may have ended before this point; is WORLD_SIZE=2 right\?", told[0])


def test_a_long_wait_for_the_store_of_rank_0_is_told(caplog, monkeypatch):
    monkeypatch.setattr("zeropp.comm.rendezvous.TELL_AFTER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    limit = timedelta(seconds=0.5)
    with pytest.raises(
        CommTimeoutError, match=r"rank 1 waited 0.5 s, its time-out, for rank 0 of 2 ranks, which hosts the job's store"
    ):
        find_store(Place("127.0.0.1", port, 1, False, 2), limit)
    told = [record.getMessage() for record in caplog.records]
    assert 1 <= len(told) <= 3, told
    assert re.match(
        r"comm: rank 1 has waited 0.\d+ s of at most 0.5 s for rank 0 of 2 ranks, which hosts the job's store at 127",
        told[0],
    )
    assert told[0].endswith(
        "Look at its log: it may have ended before this point; are MASTER_ADDR and MASTER_PORT right?"
    )


def test_one_that_said_hello_and_died_is_named(store):
    store.set("zeropp/hello/1", "2 dead")
    with pytest.raises(
        CommTimeoutError, match="for rank 1 of 2 ranks, which said hello and went away; look at its log"
    ):
        rendezvous(store, 0, 2, timedelta(seconds=0.2), "some")


def test_groups_side_by_side_do_not_mix():
    """A store each (torch prefixes them), at the same time."""
    base, found = dist.HashStore(), []
    groups = [dist.PrefixStore(f"group {i}", base) for i in range(3)]
    threads = [threading.Thread(target=lambda g=g: found.append(common(all_meet(g, 2)))) for g in groups]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(set(found)) == 3
