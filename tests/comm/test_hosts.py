# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts: this one under several names (``ZEROPP_HOST_ID``), over the loopback interface."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from launch import Outcome, run_ranks

# -- what the ranks do (in processes of their own) ---------------------------------------------------------------------------


def _start(hosts: str, timeout_s: float = 60.0) -> tuple[Any, Any]:
    from datetime import timedelta

    os.environ["ZEROPP_HOST_ID"] = hosts[int(os.environ["RANK"])]
    import torch
    import torch.distributed as dist
    import zeropp  # noqa: F401

    dist.init_process_group("zeropp", timeout=timedelta(seconds=timeout_s))
    return torch, dist


def everything(rank: int, ranks: int, placements: list[str]) -> list[dict[str, Any]]:
    """One answer a placement that this rank is in: the first makes the world, the others groups of its lowest ranks."""
    torch, dist = _start(placements[0])
    answers = [_all_kinds(torch, dist, dist.group.WORLD)]
    for hosts in placements[1:]:
        if rank < len(hosts):
            os.environ["ZEROPP_HOST_ID"] = hosts[rank]
        group = dist.new_group(list(range(len(hosts))))
        if rank < len(hosts):
            answers.append(_all_kinds(torch, dist, group))
    dist.barrier()
    dist.destroy_process_group()
    return answers


def _all_kinds(torch: Any, dist: Any, group: Any) -> dict[str, Any]:
    import zeropp

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    zeropp.traffic(reset=True)
    answer: dict[str, Any] = {"rank": rank}
    ones = torch.full((5000,), float(rank + 1))
    dist.all_reduce(ones, group=group)
    answer["all_reduce"] = ones.unique().tolist()
    half = torch.full((7,), rank + 1, dtype=torch.bfloat16)
    dist.all_reduce(half, op=dist.ReduceOp.AVG, group=group)
    answer["avg"] = half.unique().tolist()
    gathered = torch.empty(ranks, 3)
    dist.all_gather_into_tensor(gathered, torch.full((3,), float(rank)), group=group)
    answer["all_gather"] = gathered[:, 0].tolist()
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * ranks), group=group)
    answer["reduce_scatter"] = part.tolist()
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    answer["objects"] = [entry["rank"] for entry in objects]
    to = [torch.empty(1 + r % 2) for r in range(ranks)]
    dist.all_to_all(to, [torch.full((1 + rank % 2,), float(10 * rank + r)) for r in range(ranks)], group=group)
    answer["all_to_all"] = [t[0].item() for t in to]
    if rank == 0:
        got = torch.empty(4)
        answer["from"] = sorted(dist.recv(got, group=group) for _ in range(ranks - 1))
    else:
        dist.send(torch.full((4,), float(rank)), 0, group=group)
    dist.barrier(group=group)
    answer["links"] = sorted(zeropp.traffic())
    return answer


def reduce_for_ever(rank: int, ranks: int, hosts: str, timeout_s: float) -> dict[str, Any]:
    torch, dist = _start(hosts, timeout_s)
    import zeropp

    tensor = torch.zeros(100_000)
    dist.barrier()
    Path(os.environ["ZEROPP_TEST_READY"]).joinpath(str(rank)).touch()
    try:
        while True:
            dist.all_reduce(tensor)
    except zeropp.CommError as error:
        return {"text": str(error), "rank": error.rank, "at": time.time()}


def prepares(rank: int, ranks: int, hosts: str) -> str:
    torch, _dist = _start(hosts)
    import zeropp

    try:
        zeropp.prepare(torch.nn.Linear(4, 4), None, zeropp.Config(stage=3))
    except zeropp.NotBuiltError as error:
        return str(error)
    return "prepared"


# -- tests ---------------------------------------------------------------------------------------------------------------------


def test_torch_distributed() -> None:
    placements = ["aabb", "aab", "ab"]
    for outcome in run_ranks(4, everything, placements, timeout=240):
        assert len(outcome.value) == sum(outcome.rank < len(hosts) for hosts in placements)
        for hosts, value in zip(placements, outcome.value, strict=False):
            rank, ranks = value["rank"], len(hosts)
            assert value["all_reduce"] == [ranks * (ranks + 1) / 2]
            assert value["avg"] == [(ranks + 1) / 2]
            assert value["all_gather"] == list(range(ranks))
            assert value["reduce_scatter"] == [2.0 * rank * ranks, (2.0 * rank + 1) * ranks]
            assert value["objects"] == list(range(ranks))
            assert value["all_to_all"] == [10.0 * r + rank for r in range(ranks)]
            assert value.get("from", list(range(1, ranks))) == list(range(1, ranks))
            assert "network" in value["links"]


def test_training_says_that_it_is_not_there_yet() -> None:
    for outcome in run_ranks(2, prepares, "ab", timeout=100):
        assert "2 hosts, and training over several hosts is not implemented yet" in outcome.value


def _signal_when_ready(ready: Path, ranks: int, victim: int, number: int, at: list[float]) -> Any:
    def watch(processes: list[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + 150
        while len(list(ready.iterdir())) < ranks and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)
        at.append(time.time())
        processes[victim].send_signal(number)

    return watch


def _survivors(outcomes: list[Outcome], victim: int) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.rank != victim]


@pytest.mark.parametrize("hosts", [pytest.param("ab", marks=pytest.mark.slow), "abab"])
def test_killed_rank_is_named_within_5_s(hosts: str, tmp_path: Path) -> None:
    at: list[float] = []
    ranks, victim = len(hosts), len(hosts) - 1
    watch = _signal_when_ready(tmp_path, ranks, victim, signal.SIGKILL, at)
    env = {"ZEROPP_TEST_READY": str(tmp_path)}
    outcomes = run_ranks(ranks, reduce_for_ever, hosts, 60.0, timeout=60, check=False, env=env, watch=watch)
    for outcome in _survivors(outcomes, victim):
        assert outcome.value is not None, str(outcome)
        assert outcome.value["rank"] == victim, str(outcome)
        assert "died" in outcome.value["text"]
        assert outcome.value["at"] - at[0] < 5.0


@pytest.mark.slow
def test_stopped_rank_is_named_at_the_time_out(tmp_path: Path) -> None:
    at: list[float] = []
    watch = _signal_when_ready(tmp_path, 2, 1, signal.SIGSTOP, at)
    env = {"ZEROPP_TEST_READY": str(tmp_path)}
    outcomes = run_ranks(2, reduce_for_ever, "ab", 5.0, timeout=20, check=False, env=env, watch=watch)
    assert outcomes[0].value["rank"] == 1
    assert "did not come to all_reduce(float32, 100000 elements, sum)" in outcomes[0].value["text"]
