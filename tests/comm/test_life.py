# SPDX-License-Identifier: Apache-2.0
"""Communicators come and go: nothing is left behind, other backends lend their store, forked children are harmless."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks


def _held() -> dict[str, Any]:
    """Return the kernel objects that this process holds."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "zeropp" in line]
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "mappings": len([line for line in maps if "memfd" in line]),
    }


def _held_at_rest() -> dict[str, Any]:
    """A thread that was joined may stand in /proc/self/task for a moment longer: the kernel wakes who waits for it before it is gone."""
    seen = _held()
    for _ in range(100):
        time.sleep(0.05)
        before, seen = seen, _held()
        if seen == before:
            break
    return seen


def come_and_go(rank: int, ranks: int, cycles: int) -> dict[str, Any]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from zeropp import comm

    dist.init_process_group("gloo")
    store = dist.PrefixStore("life", dist.distributed_c10d._get_default_store())
    before: dict[str, Any] = {}
    for cycle in range(cycles):
        group = comm.create(store, rank, ranks, timedelta(seconds=60), "life")
        group.barrier()
        if cycle % 10 == 0:  # the parts that are made when they are first used
            tensor = torch.full((200_000,), 1.0)
            work = group.submit(2, 0, 0, 0, tensor.data_ptr(), 0, tensor.numel(), tensor)
            work.wait()
            assert float(tensor[-1]) == ranks
            region = group.region_create("per_rank", 10_000)
            assert region.base(1 - rank) != region.base(rank)
            block = group.alloc(100_000)
            assert block.bytes == 100_000
            small = torch.zeros(4)
            if rank == 0:
                group.send(small.data_ptr(), 16, 1, 0, small).wait()
            else:
                group.recv(small.data_ptr(), 16, 0, 0, small).wait()
            del region, block, work
        group.barrier()
        comm.close(group)
        if cycle == 10:
            before = _held_at_rest()
    after = _held_at_rest()
    dist.barrier()
    dist.destroy_process_group()
    return {"before": before, "after": after}


@pytest.mark.parametrize("cycles", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_is_left_behind(cycles: int) -> None:
    shm_before = set(Path("/dev/shm").iterdir())
    for outcome in run_ranks(2, come_and_go, cycles, timeout=280):
        assert outcome.value["after"]["mappings"] == 0
        assert outcome.value["after"] == outcome.value["before"]
    left = {path.name for path in set(Path("/dev/shm").iterdir()) - shm_before}
    assert not [name for name in left if "zeropp" in name or "zpp" in name]


def over_gloo(rank: int, ranks: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import zeropp
    from zeropp.comm import Communicator, communicator

    dist.init_process_group("gloo")
    core = communicator()
    assert communicator() is core and communicator(dist.group.WORLD) is core
    part = dist.new_group([0, 1])
    if rank < 2:
        assert communicator(part) is not core and communicator(part).ranks == 2
    door = Communicator()
    tensor = torch.full((5,), float(rank))
    door.all_reduce(tensor, "max")
    refused = []
    for wrong in (torch.ones(4, 4).t(), torch.ones(3, device="meta")):
        try:
            door.all_reduce(wrong)
        except ValueError as error:
            refused.append(str(error))
    kept = door.empty(1000)  # outlives the group
    kept.fill_(7)
    dist.destroy_process_group()
    zeropp.comm.close(core)
    try:
        core.barrier()
    except zeropp.Error as error:
        refused.append(str(error))
    try:
        communicator()
    except zeropp.Error as error:
        refused.append(str(error))
    return {
        "tensor": tensor.tolist(),
        "refused": refused,
        "kept": float(kept.sum()),
        "traffic": zeropp.traffic()["shm"]["all_reduce"],
    }


def test_communicator_over_any_backend() -> None:
    for outcome in run_ranks(3, over_gloo, timeout=120):
        assert outcome.value["tensor"] == [2.0] * 5
        assert outcome.value["kept"] == 7000.0
        assert outcome.value["traffic"] == {"bytes": 2 * 20, "calls": 1}  # counted on after the end
        contiguous, meta, closed, no_group = outcome.value["refused"]
        assert "strides (1, 4), wanted a contiguous one" in contiguous and "on meta, wanted cpu" in meta
        assert "closed" in closed and "init_process_group" in no_group


def again_and_again(rank: int, ranks: int, doors: list[str]) -> dict[str, Any]:
    """Rank 0's store goes with its group: the others are there before it has gone, while none is there, or at any time."""
    import torch
    import torch.distributed as dist
    import zeropp  # noqa: F401

    kept = []
    for repeat, door in enumerate(doors):
        where = {"init_method": f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", "rank": rank, "world_size": ranks}
        dist.init_process_group("zeropp", **(where if "tcp" in door else {}))
        tensor = torch.ones(3) * repeat
        dist.all_reduce(tensor)
        assert tensor.tolist() == [ranks * repeat] * 3
        part = dist.new_group([0, 1])  # torch asks its store
        if rank < 2:
            dist.all_reduce(tensor, group=part)
        dist.barrier()
        if rank == 0 and "kept" in door:
            kept.append(dist.distributed_c10d._get_default_store())  # so the next group's is the same one
        if rank == 0 and "lags" in door:
            time.sleep(0.4)  # the others meet in the old store
        dist.destroy_process_group()
        del part
        if rank == 0 and "pauses" in door:
            time.sleep(0.4)  # the others find none
    return {"repeats": repeat + 1, **_after_failures(rank, ranks)}


def _after_failures(rank: int, ranks: int) -> dict[str, Any]:
    """No memory for an arena; a group that one rank ends, and a new one in the same process."""
    import torch
    import torch.distributed as dist
    import zeropp

    answer: dict[str, Any] = {}
    dist.init_process_group("zeropp")
    try:
        zeropp.comm.empty(1 << 50)
    except MemoryError as error:
        answer["memory"] = str(error)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # the group does not mind
    assert dist.group.WORLD is not None
    if rank == 1:
        dist.group.WORLD.abort()
    try:
        dist.all_reduce(tensor)
    except zeropp.CommError as error:
        answer["aborted"] = str(error)
    dist.destroy_process_group()
    dist.init_process_group("zeropp")
    dist.all_reduce(tensor)
    answer["sum"] = tensor.tolist()
    dist.barrier()
    dist.destroy_process_group()
    return answer


DOORS = ["env lags", "env pauses", "tcp lags", "tcp", "env", "env kept", "env lags", "tcp kept lags", *(["env"] * 8)]


def test_init_and_destroy_again_also_after_failures() -> None:
    for outcome in run_ranks(3, again_and_again, DOORS, timeout=120):
        assert outcome.value["repeats"] == len(DOORS)
        assert "comm: no memory for 4503" in outcome.value["memory"], outcome.value["memory"]
        assert "torch.distributed asked for it" in outcome.value["aborted"] and "rank 1" in outcome.value["aborted"]
        assert outcome.value["sum"] == [9.0] * 3


def come_and_die(rank: int, ranks: int) -> dict[str, Any]:
    """A group; then rank 0 comes for the next, and dies before rank 2 has come. Rank 2 comes when nobody is there."""
    from datetime import timedelta

    import torch.distributed as dist
    import zeropp

    dist.init_process_group("zeropp")
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 2:
        time.sleep(2.0)
    began = time.monotonic()
    try:
        dist.init_process_group("zeropp", timeout=timedelta(seconds=30 if rank == 1 else 2))
    except zeropp.CommError as error:
        return {"text": str(error), "rank": error.rank, "seconds": time.monotonic() - began}
    return {}


def test_rank_0_comes_and_dies() -> None:
    outcomes = run_ranks(3, come_and_die, timeout=60, check=False)
    there, late = outcomes[1].value, outcomes[2].value
    assert outcomes[0].code == -signal.SIGKILL
    assert there["rank"] == 0 and "is gone, and with it rank 0, which had come" in there["text"], there
    assert there["seconds"] < 1.0 + 5.0
    assert (
        late["rank"] == 0
        and "rank 2 waited 2 s, its time-out, for rank 0 of 3 ranks, which hosts the job's store at 127.0.0.1"
        in late["text"]
    ), late
    assert late["seconds"] < 2.0 + 5.0


def loader_children(rank: int, ranks: int) -> float:
    import torch
    import torch.distributed as dist
    import zeropp  # noqa: F401
    from torch.utils.data import DataLoader

    dist.init_process_group("zeropp")
    total = torch.zeros(1)
    dist.all_reduce(total, async_op=True).wait()  # the progress thread exists before the forks
    for _ in range(2):
        for batch in DataLoader(list(range(20)), batch_size=5, num_workers=2, multiprocessing_context="fork"):
            value = batch.sum().float().reshape(1)
            dist.all_reduce(value)
            total += value
    dist.barrier()
    dist.destroy_process_group()
    return float(total)


def test_forked_loader_workers_do_not_disturb() -> None:
    assert [outcome.value for outcome in run_ranks(2, loader_children, timeout=120)] == [760.0, 760.0]


def large_tensors(rank: int, ranks: int) -> dict[str, float]:
    """Far more than /dev/shm has, from an arena and from elsewhere."""
    import shutil

    import torch
    import torch.distributed as dist
    import zeropp

    dist.init_process_group("zeropp")
    door = zeropp.comm.Communicator()
    sums = []
    for tensor in (door.empty(2_000_000), torch.empty(2_000_000)):
        tensor.fill_(rank + 1.0)
        sums += door.all_reduce(tensor).unique().tolist()
    room = shutil.disk_usage("/dev/shm").total
    dist.barrier()
    dist.destroy_process_group()
    return {"room": room, "first": sums[0], "second": sums[1], "sums": len(sums)}


@pytest.mark.slow
def test_a_small_dev_shm_is_no_limit() -> None:
    """As containers have it: each rank sees a /dev/shm of 64 KB."""
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "sh"]
    try:
        subprocess.run([*small, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespaces here: {error}")
    for outcome in run_ranks(2, large_tensors, prefix=[small] * 2, timeout=120):
        assert outcome.value == {"room": 65536, "first": 3.0, "second": 3.0, "sums": 2}
