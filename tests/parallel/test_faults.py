# SPDX-License-Identifier: Apache-2.0
"""What fails on one stage of a pipeline, a disk or NCCL: all ranks of the job hear of it."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import full_disk, scratch
from launch import run_ranks
from pipelines import CLIP, Run, mesh_of
from rank import use_of_the_environment
from ranks import of_all_ranks, on_ranks, simulated
from tiny import sentence
from zeropp.zero.engine import engine_of
from zeropp.zero.offload import optim_file


@on_ranks(2)
def test_a_disk_that_fails_on_one_stage() -> None:
    """The states of the second stage have no room: both stages raise an error, with its rank."""
    with scratch() as folder, full_disk(optim_file, 1, 1 << 14):
        offload = zeropp.Offload(optimizer=zeropp.Tier("nvme", path=folder))
        told = of_all_ranks(sentence(lambda: Run(mesh_of(2, 1), "1F1B", stage=2, offload=offload), zeropp.TierError))
    assert 'states": 32768 bytes at offset 0' in told[1] and folder in told[1], told
    assert "rank 1: aio: cannot reserve" in told[0], told


@on_ranks(4)
def test_a_step_that_fails_on_one_stage() -> None:
    """A file of rank 2, on the second stage, loses its end between two steps: all ranks raise its error in the same step, and none
    steps or saves what is left. The checkpoint brings back values with which all stages train on as if nothing had happened."""
    rank = dist.get_rank()
    wanted, norms = Run(mesh_of(2, 2), "1F1B", stage=2).train(4)
    with scratch() as folder:
        run = Run(mesh_of(2, 2), "1F1B", stage=2, offload=zeropp.Offload(optimizer=zeropp.Tier("nvme", path=folder)))
        assert run.train(2)[1] == norms[:2]
        saved = Path(folder) / "checkpoint"
        zeropp.save(saved, run.chunks, run.optimizer, step=2)
        states: Path = engine_of(run.chunks).states.file.parts[0]
        whole_bytes = states.stat().st_size
        if rank == 2:
            os.truncate(states, whole_bytes // 2)
        run.forward_backward(2)
        assert run.optimizer.clip_grad_norm_(CLIP) == norms[2]
        told = of_all_ranks(sentence(run.optimizer.step, zeropp.TierError))
        assert str(of_all_ranks(str(states))[2]) in told[2], told
        assert {one.replace("rank 2: ", "", 1) for one in told} == {told[2]}, told
        if rank == 2:
            os.truncate(states, whole_bytes)
        run.optimizer.zero_grad()
        run.forward_backward(2)
        save = functools.partial(zeropp.save, saved, run.chunks, run.optimizer, step=3)
        for refused in (run.optimizer.step, save):
            told = of_all_ranks(sentence(refused, zeropp.Error))
            assert all("a step failed half-way" in one and "rank 2: " in one for one in told), told
        run.optimizer.zero_grad()
        assert zeropp.load(saved, run.chunks, run.optimizer)["step"] == 2
        for step in (2, 3):
            run.forward_backward(step)
            assert run.optimizer.clip_grad_norm_(CLIP) == norms[step]
            run.optimizer.step()
            run.optimizer.zero_grad()
        found = zeropp.full_state_dict(run.chunks)
        assert all(torch.equal(values, wanted[name]) for name, values in found.items())
        del run, refused, save


def without_nccl(rank: int, ranks: int) -> str:
    """The host of the second stage has no NCCL. Nobody ends before all have heard of it."""
    use_of_the_environment()
    dist.init_process_group("gloo")
    options = {"stage": 2, "comm": zeropp.Comm(gather="nccl")}
    said = sentence(lambda: Run(mesh_of(2, ranks // 2), "1F1B", **options), zeropp.NotBuiltError)
    dist.barrier()
    return said


@pytest.mark.slow
def test_a_host_without_nccl() -> None:
    environment = {**simulated("sim"), "ZEROPP_TEST_DEVICE": "sim"}
    second = {"ZEROPP_HOST_ID": "b", "ZEROPP_NCCL": "/missing/libnccl.so"}
    of_rank = [{"ZEROPP_HOST_ID": "a"}] * 2 + [second] * 2
    said = [one.value for one in run_ranks(4, without_nccl, env=environment, env_of=of_rank, timeout=240)]
    assert all("comm: NCCL was not found (/missing/libnccl.so" in one for one in said), said
    assert all("NotBuiltError: rank 2: " in one for one in said[:2]), said
