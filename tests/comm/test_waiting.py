# SPDX-License-Identifier: Apache-2.0
"""The cost of a wait for a late rank: it spins for a bounded time, then it sleeps (csrc/comm/futex_counter.c)."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
from launch import run_ranks

LATE_S = 0.4
#: Processor time of all threads of a rank that waits. One that spins takes LATE_S, where it has a core; one that sleeps takes some
#: hundredths of that, however busy the machine is.
MOST_S = 0.15


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def wait_for_a_late_rank(rank: int, ranks: int) -> dict[str, float]:
    """Processor seconds of each kind of wait. The last rank comes late to all of them; before each, all meet."""
    import torch
    import torch.distributed as dist
    import zeropp

    torch.set_num_threads(1)
    dist.init_process_group("zeropp")
    door, late = zeropp.comm.Communicator(), ranks - 1
    small, large = torch.ones(16), torch.ones(300_000)

    def message(tensor: Any) -> None:
        if rank == late:
            for other in range(late):
                dist.send(tensor, other)
        else:
            dist.recv(tensor, late)

    calls: dict[str, Callable[[], object]] = {
        "direct": lambda: door.all_reduce(small),
        "staged": lambda: door.all_reduce(large),
        "dist": lambda: dist.all_reduce(small),
        "later": lambda: dist.all_reduce(small, async_op=True).wait(),
        "barrier": dist.barrier,
        "message": lambda: message(small),
    }
    used = {}
    for name, call in calls.items():
        call()  # once, so that threads and connections are there
        dist.barrier()
        if rank == late:
            time.sleep(LATE_S)
        before = _processor_s()
        call()
        used[name] = _processor_s() - before
    dist.barrier()
    dist.destroy_process_group()
    return used


@pytest.mark.parametrize("hosts", ["aa", "aaa", "ab"])
def test_a_wait_sleeps(hosts: str) -> None:
    """Ranks of one host, more of them than cores perhaps, and of two."""
    env = [{"ZEROPP_HOST_ID": host} for host in hosts]
    for outcome in run_ranks(len(hosts), wait_for_a_late_rank, env_of=env)[:-1]:
        spent = {name: seconds for name, seconds in outcome.value.items() if seconds > MOST_S}
        assert not spent, f"rank {outcome.rank} of hosts {hosts!r} computed while it waited {LATE_S} s: {spent}"
