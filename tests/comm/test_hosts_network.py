# SPDX-License-Identifier: Apache-2.0
"""Hosts with networks of their own: two namespaces and a cable between them, which can be cut."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, Outcome, run_ranks
from netns import LossyHosts, TwoHosts, why_not

LOSS_TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with TwoHosts() as two:
        yield two


# -- what the ranks do ---------------------------------------------------------------------------------------------------------


def exchange(rank: int, ranks: int, links: list[str]) -> dict[str, Any]:
    """A sum over IPv4, one over IPv6 on a named interface, then sums for ever."""
    import torch.distributed as dist
    import zeropp

    dist.init_process_group("zeropp")
    answer: dict[str, Any] = {"4": _sum(rank, dist.group.WORLD)}
    answer["listening"] = sum(row.endswith(" 0A") for row in _connections())
    answer["traffic"] = sorted(zeropp.traffic())
    os.environ.update(ZEROPP_IFNAME=links[rank % 2] if ranks == 2 else links[rank // 2], ZEROPP_IP_FAMILY="6")
    before = _connections()
    answer["6"] = _sum(rank, dist.new_group(list(range(ranks))))
    answer["connections"] = [row for row in _connections() if row not in before]
    if ranks == 2:
        answer["cut"] = _sum_for_ever(dist)
    else:
        dist.barrier()
        dist.destroy_process_group()
    return answer


def _sum(rank: int, group: Any) -> list[float]:
    import torch
    import torch.distributed as dist

    x = torch.full((200_000,), float(rank + 1))
    dist.all_reduce(x, group=group)
    return x.unique().tolist()


def _sum_for_ever(dist: Any) -> dict[str, Any]:
    from datetime import timedelta

    import torch
    import zeropp

    group = dist.new_group([0, 1], timeout=timedelta(seconds=60.0))
    x = torch.zeros(1000)
    dist.all_reduce(x, group=group)
    Path(os.environ["ZEROPP_TEST_READY"]).joinpath(os.environ["RANK"]).touch()
    try:
        while True:
            dist.all_reduce(x, group=group)
            time.sleep(0.01)
    except zeropp.CommError as error:
        return {"text": str(error), "rank": error.rank, "at": time.time()}


def lose(rank: int, ranks: int, control: str) -> dict[str, Any]:
    """Sums while some packets are lost; then nothing arrives, here, there, on both sides. A new group each time.

    Nobody makes the network worse before both have the sum before it: a rank has its own sum while its packets are still on their
    way to the other.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    import zeropp

    dist.init_process_group("zeropp", timeout=timedelta(seconds=60))
    answer: dict[str, Any] = {"right": True}
    if rank == 0:
        LossyHosts.set(Path(control), "lose 0.03")
    for step in range(8):
        x = torch.full((100_000,), float(rank + step))
        dist.all_reduce(x)
        answer["right"] &= bool((x == 2 * step + 1).all())
    for how in ("lose 1 0", "lose 1 1", "lose 1"):
        LossyHosts.set(Path(control), "lose 0")
        group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
        small = torch.zeros(10)
        dist.all_reduce(small, group=group)
        group.comm.set_timeout(LOSS_TIMEOUT_S)
        _meet(Path(control), f"{how} summed", rank)
        began = time.monotonic()
        LossyHosts.set(Path(control), how)
        try:
            while time.monotonic() < began + 30:
                dist.all_reduce(small, group=group)
        except zeropp.CommError as error:
            answer[how] = {"text": str(error), "rank": error.rank, "seconds": time.monotonic() - began}
        _meet(Path(control), f"{how} seen", rank)  # both, before anybody mends it
    LossyHosts.set(Path(control), "lose 0")
    return answer


def _meet(beside: Path, what: str, rank: int) -> None:
    """Both ranks come here; by files, because the network may carry nothing."""
    mark = beside.with_name(f"{what.replace(' ', '-')}.{rank}")
    mark.touch()
    end = time.monotonic() + 60
    while not mark.with_suffix(f".{1 - rank}").exists():
        assert time.monotonic() < end, f"rank {1 - rank} did not come to {what!r}"
        time.sleep(0.02)


def _connections() -> list[str]:
    """This process's TCP sockets: local address and port in hexadecimal, and the state, 0A if it listens."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        path = Path(table)
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[9] in inodes:
                rows.append(f"{fields[1]} {fields[3]}")
    return rows


# -- tests ---------------------------------------------------------------------------------------------------------------------


def _check(outcome: Outcome, total: float) -> None:
    assert outcome.value["4"] == [total]
    assert outcome.value["6"] == [total]
    assert "network" in outcome.value["traffic"]
    assert outcome.value["listening"] <= (outcome.rank == 0), "only the store of rank 0 may listen once all have joined"
    # fd00:213:7::, as the kernel prints it: words of the machine's byte order.
    assert sum(row.startswith("130200FD") for row in outcome.value["connections"]) >= 4, outcome.value["connections"]


def test_two_networks_and_a_cut_cable(hosts: TwoHosts, tmp_path: Path) -> None:
    """IPv4, IPv6 on a named interface; then the cable is cut: each names the other, and its interface, long before the time is out."""
    at: list[float] = []

    def watch(processes: list[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + 150
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            if any(process.poll() is not None for process in processes):
                return
            time.sleep(0.1)
        at.append(time.time())
        hosts.cut()

    where = [hosts.command(rank) for rank in range(2)]
    env = {"MASTER_ADDR": hosts.addresses[0], "ZEROPP_TEST_READY": str(tmp_path)}
    try:
        outcomes = run_ranks(2, exchange, hosts.links, timeout=60, prefix=where, env=env, watch=watch)
    finally:
        hosts.mend()
    for outcome in outcomes:
        _check(outcome, 3.0)
        cut = outcome.value["cut"]
        assert cut["rank"] == 1 - outcome.rank, cut["text"]
        assert f'network interface "{hosts.links[outcome.rank]}" has had no link for' in cut["text"]
        assert cut["at"] - at[0] < 5.0


@pytest.mark.usefixtures("hosts")  # which says why there can be none
def test_lost_packets(tmp_path: Path) -> None:
    """Some: the sums are right. All, one way or both ways: each rank names the other when the time is out."""
    try:
        lossy = LossyHosts(tmp_path / "control").__enter__()
    except OSError as error:
        pytest.skip(f"no TUN devices here: {error}")
    try:
        where = [lossy.command(rank) for rank in range(2)]
        env = {"MASTER_ADDR": lossy.addresses[0]}
        outcomes = run_ranks(2, lose, str(lossy.control), timeout=100, prefix=where, env=env)
    finally:
        lossy.__exit__(None, None, None)
    for outcome in outcomes:
        assert outcome.value["right"]
        for how in ("lose 1 0", "lose 1 1", "lose 1"):
            seen = outcome.value[how]
            # One that still hears the other may hear its comm error, about itself, before its own time is out.
            hears = how == f"lose 1 {1 - outcome.rank}"
            assert seen["rank"] == 1 - outcome.rank or (hears and seen["rank"] == outcome.rank), (how, seen)
            assert "did not come to all_reduce(float32, 10 elements, sum)" in seen["text"], (how, seen)
            assert seen["seconds"] < LOSS_TIMEOUT_S + 5.0, (how, seen)


@pytest.mark.slow
def test_two_ranks_in_each_of_two_networks(hosts: TwoHosts) -> None:
    where = [hosts.command(rank // 2) for rank in range(4)]
    env = {"MASTER_ADDR": hosts.addresses[0]}
    for outcome in run_ranks(4, exchange, hosts.links, timeout=150, prefix=where, env=env):
        _check(outcome, 10.0)
        assert "shm" in outcome.value["traffic"]


@pytest.mark.slow
def test_two_agents_train_the_example(hosts: TwoHosts, tmp_path: Path) -> None:
    """torchrun with two nodes, an agent in each namespace, two ranks each, trains the demo's model."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    words += [f"--master-addr={hosts.addresses[0]}", "--master-port=29577"]
    script = [str(ROOT / "examples" / "train_gpt.py"), "--steps=4", "--backend=zeropp", f"--out={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            [*hosts.command(node), *words, f"--node-rank={node}", f"--local-addr={hosts.addresses[node]}", *script],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for node in range(2)
    ]
    outputs = []
    try:
        outputs += [agent.communicate(timeout=250)[0].decode(errors="replace") for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # which ends its ranks, too
                agent.wait(timeout=30)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 4, outputs[0]
