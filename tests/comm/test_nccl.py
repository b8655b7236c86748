# SPDX-License-Identifier: Apache-2.0
"""Collectives on CUDA tensors as torch.distributed calls them, without a GPU: CPU tensors stand for CUDA ones, the
simulated GPU (tests/sim) for driver and NCCL, threads for ranks. tests/c/test_comm_nccl.c has the rest.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, run_ranks

sys.path.insert(0, str(ROOT / "tests" / "sim"))
import sim_build

RANKS = 3
SOON = timedelta(seconds=20)


@pytest.fixture(scope="module")
def driver() -> str:
    return str(sim_build.driver())


# -- in a process of its own: the libraries are looked for once ----------------------------------------------------------------


class Streams:
    """A stream of the simulated GPU for each thread, as torch's current one."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL(os.environ["ZEROPP_CUDA_DRIVER"])
        self.context = ctypes.c_void_p()
        self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), 40)
        self.of_thread = threading.local()

    def open(self) -> None:
        """The context stays current in this thread, as torch leaves it."""
        stream = ctypes.c_void_p()
        self.driver.cuCtxPushCurrent_v2(self.context)
        assert self.driver.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
        self.of_thread.stream = stream

    def current(self, device: Any) -> int:
        return int(self.of_thread.stream.value)

    def synchronize(self) -> None:
        assert self.driver.cuStreamSynchronize(self.of_thread.stream) == 0


def as_if_on_gpus(body: Callable[[Any, int, Streams], Any]) -> list[Any]:
    """Return the results of `body(group, rank, streams)` on each of RANKS threads."""
    import torch.distributed as dist
    from zeropp.comm import cuda as comm_cuda
    from zeropp.comm import process_group

    streams = Streams()
    process_group._on_cpu = lambda tensor: False
    comm_cuda._current_stream = streams.current
    store = dist.HashStore()

    def rank_main(rank: int) -> Any:
        streams.open()
        group = process_group.ProcessGroup(store, rank, RANKS, SOON)
        try:
            return body(group, rank, streams)
        finally:
            group.shutdown()

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(rank_main, range(RANKS)))


def every_call(rank: int, ranks: int) -> list[Any]:
    return as_if_on_gpus(_every_call)


def _every_call(group: Any, rank: int, streams: Streams) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    found: dict[str, list[float]] = {}

    def note(name: str, work: Any, *tensors: torch.Tensor) -> None:
        work.wait(SOON)
        found[name] = torch.cat([tensor.flatten().float() for tensor in tensors]).tolist()

    def mine(elems: int = 2) -> torch.Tensor:
        return torch.full((elems,), float(rank + 1))

    def empty(elems: int) -> torch.Tensor:
        return torch.full((elems,), -1.0)

    x = mine()
    note("all_reduce", group.allreduce([x]), x)
    x = mine()
    note("product", group.allreduce([x], dist.ReduceOp.PRODUCT), x)
    x = mine()
    opts = dist.AllreduceOptions()
    opts.reduceOp = dist._make_nccl_premul_sum(2.0)
    opts.asyncOp = False
    group.allreduce([x], opts)  # blocking: torch's stream waits for it
    streams.synchronize()
    pairs = [(mine(3), mine(5).double())]
    note("coalesced", group.allreduce_coalesced(list(pairs[0])), *pairs[0])
    x = mine()
    to_1 = dist.ReduceOptions()
    to_1.rootRank = 1
    note("reduce", group.reduce([x], to_1), x)
    x = mine()
    note("broadcast", group.broadcast([x], 2), x)
    out = empty(2 * RANKS)
    note("all_gather", group.all_gather_single(out, mine()), out)
    outs = [empty(2) for _ in range(RANKS)]
    note("all_gather list", group.allgather([outs], [mine()]), *outs)
    out, second = empty(RANKS), empty(2 * RANKS)
    note("all_gather coalesced", group.allgather_into_tensor_coalesced([out, second], [mine(1), mine(2)]), out, second)
    out = empty(2)
    note("reduce_scatter", group.reduce_scatter_single(out, torch.arange(6.0) + rank), out)
    out = empty(RANKS)
    note("all_to_all", group.alltoall_base(out, torch.arange(3.0) + 10 * rank, [], []), out)
    outs = [empty(2) for _ in range(RANKS)]
    note("gather", group.gather([outs] if rank == 1 else [], [mine()], 1), *outs)
    out = empty(2)
    note(
        "scatter",
        group.scatter([out], [[torch.full((2,), 7.0 + r) for r in range(RANKS)]] if rank == 0 else [], 0),
        out,
    )
    out = empty(2)
    sent, came = group.send([mine()], (rank + 1) % RANKS), group.recv([out], (rank - 1) % RANKS)
    note("ring", came, out)
    sent.wait(SOON)
    assert sent.is_completed() and came.is_success() and came.source_rank() == (rank - 1) % RANKS
    group.barrier()
    return found


def another_call(rank: int, ranks: int) -> list[Any]:
    return as_if_on_gpus(_another_call)


def _another_call(group: Any, rank: int, streams: Streams) -> list[str]:
    """Rank 2 calls something else; calls on CPU tensors raise then, too."""
    import torch
    import zeropp

    x, said = torch.ones(4), []
    group.allreduce([x]).wait(SOON)
    for _ in range(2):
        try:
            work = group.broadcast([x], 0) if rank == 2 else group.allreduce([x])
            work.wait(SOON)
        except zeropp.CommError as error:
            said.append(str(error))
    try:
        group.comm.barrier()
    except zeropp.CommError as error:
        said.append(str(error))
    return said


# -- what must come of it ------------------------------------------------------------------------------------------------------


def run(body: Any, driver: str) -> list[Any]:
    env = {"ZEROPP_CUDA_DRIVER": driver, "ZEROPP_NCCL": driver}
    value: list[Any] = run_ranks(1, body, timeout=60, env=env)[0].value
    return value


def test_every_call(driver: str) -> None:
    for rank, found in enumerate(run(every_call, driver)):
        gathered = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
        assert found["all_reduce"] == [6.0, 6.0] and found["product"] == [6.0, 6.0]
        assert found["coalesced"] == [6.0] * 8
        assert found["reduce"] == ([6.0, 6.0] if rank == 1 else [rank + 1.0] * 2)
        assert found["broadcast"] == [3.0, 3.0]
        assert found["all_gather"] == found["all_gather list"] == gathered
        assert found["all_gather coalesced"] == [1.0, 2.0, 3.0, *gathered]
        assert found["reduce_scatter"] == [6.0 * rank + 3, 6.0 * rank + 6]
        assert found["all_to_all"] == [rank, 10.0 + rank, 20.0 + rank]
        assert found["gather"] == (gathered if rank == 1 else [-1.0] * 6)
        assert found["scatter"] == [7.0 + rank] * 2
        assert found["ring"] == [(rank - 1) % RANKS + 1.0] * 2


def test_a_rank_that_calls_something_else_is_named(driver: str) -> None:
    for said in run(another_call, driver):
        assert len(said) == 3 and len(set(said)) == 1, said
        assert "rank 0 is in all_reduce(float32, 4 elements, sum) on GPUs" in said[0], said
        assert "but rank 2 is in broadcast(float32, 4 elements, root 0) on GPUs" in said[0]


def test_cpu_and_cuda_tensors_do_not_mix() -> None:
    import torch
    from zeropp.comm.process_group import _check

    with pytest.raises(ValueError, match="a collective on meta, wanted cpu or cuda tensors"):
        _check(torch.empty(2, device="meta"))


def test_a_missing_nccl_says_what_to_do(tmp_path: Path) -> None:
    env = {"ZEROPP_NCCL": str(tmp_path / "libnccl.so.2")}
    assert "NCCL was not found" in run_ranks(1, version_or_why, env=env, timeout=60)[0].value


def version_or_why(rank: int, ranks: int) -> str:
    import zeropp
    from zeropp import _C

    try:
        return str(_C.nccl_version())
    except zeropp.NotBuiltError as error:
        return str(error)
