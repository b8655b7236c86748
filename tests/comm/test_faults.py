# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, stop, leave, diverge or are interrupted: every survivor names the rank, soon."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from launch import Outcome, run_ranks, survivors

# -- what the ranks do (in processes of their own) ---------------------------------------------------------------------------


def _start(timeout_s: float = 60.0) -> tuple[Any, Any]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    import zeropp  # noqa: F401

    dist.init_process_group("zeropp", timeout=timedelta(seconds=timeout_s))
    return torch, dist


def _until_error(dist: Any, call: Any, grace_s: float = 0.0) -> dict[str, Any]:
    """Call until it raises; what and when."""
    import zeropp

    print("ready", flush=True)
    try:
        while True:
            call()
    except zeropp.CommError as error:
        at = time.time()
        again = ""
        try:
            dist.barrier()
        except zeropp.CommError as second:
            again = str(second)
        time.sleep(grace_s)
        return {"kind": type(error).__name__, "text": str(error), "rank": error.rank, "at": at, "again": again}


def reduce_for_ever(rank: int, ranks: int, elems: int, timeout_s: float) -> dict[str, Any]:
    torch, dist = _start(timeout_s)
    tensor = torch.zeros(elems)
    return _until_error(dist, lambda: dist.all_reduce(tensor))


def train_for_ever(rank: int, ranks: int) -> dict[str, Any]:
    torch, dist = _start()
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))

    def step() -> None:
        try:
            net(torch.ones(4, 64)).sum().backward()
        except RuntimeError as error:  # DDP wraps what a future holds
            import zeropp

            raise error if isinstance(error, zeropp.CommError) else zeropp.CommError(str(error), rank=None) from error

    return _until_error(dist, step)


def children_hold_sockets(rank: int, ranks: int) -> dict[str, Any]:
    torch, dist = _start()
    if rank == 1 and os.fork() == 0:
        time.sleep(20)  # a DataLoader worker that outlives its rank
        os._exit(0)
    tensor = torch.zeros(10)
    return _until_error(dist, lambda: dist.all_reduce(tensor))


def one_returns(rank: int, ranks: int) -> dict[str, Any] | None:
    _torch, dist = _start()
    dist.barrier()
    if rank == 1:
        return None  # ends without destroy_process_group
    return _until_error(dist, dist.barrier)


def one_raises(rank: int, ranks: int) -> dict[str, Any]:
    _torch, dist = _start()
    dist.barrier()
    if rank == 1:
        raise ValueError("a bug in the user's script")
    return _until_error(dist, dist.barrier)


def one_exits_after_its_part(rank: int, ranks: int) -> list[float]:
    """Rank 0 is needed no more; that it is gone must not hurt the last collective."""
    torch, dist = _start()
    tensor = torch.ones(3)
    if rank == ranks - 1:
        time.sleep(1.5)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(2.0)
        work.wait()
    else:
        dist.all_reduce(tensor)
    return tensor.tolist()


def diverge(rank: int, ranks: int, how: str) -> dict[str, Any]:
    torch, dist = _start()
    tensor = torch.zeros(16)

    def step() -> None:
        if how == "collective":
            dist.broadcast(tensor, src=0) if rank == 1 else dist.all_reduce(tensor)
        elif how == "shape":
            dist.all_reduce(torch.zeros(17 if rank == 1 else 16))
        elif how == "dtype":
            dist.all_reduce(torch.zeros(16, dtype=torch.bfloat16 if rank == 1 else torch.float32))
        elif how == "operation":
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)
        elif how == "root":
            dist.broadcast(tensor, src=rank % 2)
        elif how == "large":
            dist.all_reduce(torch.zeros(100_000 if rank == 1 else 100_001))
        else:
            dist.all_reduce(tensor, async_op=True).wait() if rank else dist.barrier()

    return _until_error(dist, step, grace_s=0.5)


def interrupted(rank: int, ranks: int) -> dict[str, Any]:
    torch, dist = _start()
    dist.barrier()
    if rank == 1:
        print("ready", flush=True)
        time.sleep(3)
        return _until_error(dist, dist.barrier)
    print("ready", flush=True)
    start = time.time()
    try:
        dist.all_reduce(torch.zeros(3))
    except KeyboardInterrupt:
        return {"kind": "KeyboardInterrupt", "seconds": time.time() - start}
    return {"kind": "none"}


def late_rank_is_logged(rank: int, ranks: int) -> float:
    _torch, dist = _start()
    dist.barrier()
    if rank == 1:
        time.sleep(11.5)
    start = time.time()
    dist.barrier()
    return time.time() - start


# -- what must come of it ---------------------------------------------------------------------------------------------------


def _when_ready(processes: list[subprocess.Popen[bytes]], seconds: float = 150.0) -> None:
    """All ranks wrote "ready" a while ago."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done = 0
        for process in processes:
            path = f"/proc/{process.pid}/fd/1"
            try:
                with open(path, "rb") as out:  # noqa: PTH123
                    done += b"ready" in out.read()
            except OSError:
                done += 1
        if done == len(processes):
            break
        time.sleep(0.05)
    time.sleep(0.3)


class _Signal:
    """Sends a signal to a rank once all are in their loop; remembers when."""

    def __init__(self, rank: int, number: signal.Signals) -> None:
        self.rank, self.number, self.at = rank, number, 0.0

    def __call__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        _when_ready(processes)
        self.at = time.time()
        processes[self.rank].send_signal(self.number)


def _values_of_survivors(outcomes: list[Outcome], victim: int) -> list[dict[str, Any]]:
    return [outcome.value for outcome in survivors(outcomes, victim)]


@pytest.mark.parametrize(("elems", "victim"), [(4, 0), (4, 2), (3_000_000, 1)])
def test_killed_rank_is_named_by_all_within_seconds(elems: int, victim: int) -> None:
    kill, shared = _Signal(victim, signal.SIGKILL), set(Path("/dev/shm").iterdir())
    outcomes = run_ranks(3, reduce_for_ever, elems, 60.0, timeout=90, watch=kill, check=False)
    assert outcomes[victim].code == -signal.SIGKILL
    values = _values_of_survivors(outcomes, victim)
    for value in values:
        assert value["rank"] == victim
        assert f"rank {victim} (process " in value["text"] and "died" in value["text"]
        assert value["at"] - kill.at < 5.0
        assert value["again"] == value["text"] == values[0]["text"]  # one comm error, for all, for ever
    left = set(Path("/dev/shm").iterdir()) - shared
    assert not [name for name in left if "zeropp" in name.name or "zpp" in name.name]


def test_killed_rank_with_a_child_that_holds_its_sockets() -> None:
    kill = _Signal(1, signal.SIGKILL)
    outcomes = run_ranks(2, children_hold_sockets, timeout=90, watch=kill, check=False)
    (value,) = _values_of_survivors(outcomes, 1)
    assert value["rank"] == 1 and "died" in value["text"] and value["at"] - kill.at < 5.0


def test_killed_rank_in_ddp() -> None:
    kill = _Signal(0, signal.SIGKILL)
    outcomes = run_ranks(2, train_for_ever, timeout=90, watch=kill, check=False)
    (value,) = _values_of_survivors(outcomes, 0)
    assert "rank 0 (process " in value["text"] and value["at"] - kill.at < 5.0


def test_stopped_rank_is_named_after_the_timeout() -> None:
    stop = _Signal(1, signal.SIGSTOP)
    outcomes = run_ranks(3, reduce_for_ever, 4, 3.0, timeout=20, watch=stop, check=False)
    assert outcomes[1].code == -signal.SIGKILL  # by run_ranks, at the end
    for value in _values_of_survivors(outcomes, 1):
        assert value["kind"] == "CommTimeoutError" and value["rank"] == 1
        assert (
            "rank 1 of group" in value["text"]
            and "did not come to all_reduce(float32, 4 elements, sum)" in value["text"]
        )
        assert re.search(" (Timed out|closed|timeout) ", value["text"])  # as torch's tests ask
        assert 2.0 < value["at"] - stop.at < 8.0


@pytest.mark.parametrize("body", [one_returns, one_raises])
def test_rank_that_ends_is_named(body: Any) -> None:
    outcomes = run_ranks(3, body, timeout=60, check=False)
    for value in _values_of_survivors(outcomes, 1):
        assert value["rank"] == 1 and "rank 1 left the group" in value["text"] and "barrier() #" in value["text"]


def test_rank_that_ends_after_its_part_hurts_nobody() -> None:
    for outcome in run_ranks(3, one_exits_after_its_part, timeout=60):
        assert outcome.value == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("how", "here", "there"),
    [
        ("collective", "all_reduce(float32, 16 elements, sum) #1", "broadcast(float32, 16 elements, root 0) #1"),
        ("shape", "all_reduce(float32, 16 elements, sum) #1", "all_reduce(float32, 17 elements, sum) #1"),
        ("dtype", "all_reduce(float32, 16 elements, sum) #1", "all_reduce(bfloat16, 16 elements, sum) #1"),
        ("operation", "all_reduce(float32, 16 elements, sum) #1", "all_reduce(float32, 16 elements, max) #1"),
        ("root", "broadcast(float32, 16 elements, root 0) #1", "broadcast(float32, 16 elements, root 1) #1"),
        ("large", "all_reduce(float32, 100001 elements, sum) #1", "all_reduce(float32, 100000 elements, sum) #1"),
        ("async", "barrier() #1", "all_reduce(float32, 16 elements, sum) #1"),
    ],
)
def test_divergence_shows_both_sides_on_every_rank(how: str, here: str, there: str) -> None:
    for outcome in run_ranks(3, diverge, how, timeout=60):
        assert f"rank 0 is in {here} but rank 1 is in {there}" in outcome.value["text"]
        assert outcome.value["rank"] == 1


def test_ctrl_c_ends_a_wait_and_tells_the_peers() -> None:
    outcomes = run_ranks(2, interrupted, timeout=60, watch=_Signal(0, signal.SIGINT))
    assert outcomes[0].value["kind"] == "KeyboardInterrupt" and outcomes[0].value["seconds"] < 3.0
    assert "rank 0 was interrupted in all_reduce(float32, 3 elements, sum) #2" in outcomes[1].value["text"]


@pytest.mark.slow
def test_late_rank_is_waited_for_and_logged() -> None:
    outcomes = run_ranks(3, late_rank_is_logged, timeout=60)
    for rank in (0, 2):
        assert "has waited 10 s in barrier() #2 for rank 1" in outcomes[rank].err
    assert outcomes[1].err.count("has waited") == 0
