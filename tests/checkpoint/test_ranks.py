# SPDX-License-Identifier: Apache-2.0
"""save and load on several ranks."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from checkpoint.models import Model, group, make, train
from disk import scratch
from launch import run_ranks
from ranks import on_ranks, shards_tier, taking_the_device
from zeropp.errors import CheckpointError, CommError, TierError


def names_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if one.name != ".writer")


# -- jobs that follow each other on the same folder ------------------------------------------------------


def save(rank: int, ranks: int, path: str, config: dict[str, Any]) -> None:
    """Four steps, a checkpoint, and what comes after it, for the other cases to compare with."""
    with group(ranks):
        folder = Path(path)
        model, optimizer, scheduler = make(**config)
        assert next(model.parameters()).device.type == torch.get_default_device().type
        train(model, optimizer, scheduler, 0, 4)
        zeropp.save(folder / "ckpt", model, optimizer, step=4, scheduler=scheduler, extra={"who": 0})
        whole = zeropp.full_state_dict(model)
        torch.save(whole, folder / f"whole.{rank}.pt")
        losses = train(model, optimizer, scheduler, 4, 7)
        (folder / f"losses.{rank}").write_text(json.dumps(losses))


def resume(rank: int, ranks: int, path: str, exact: bool, config: dict[str, Any]) -> None:
    """The checkpoint gives the weights that were saved; and, on as many ranks as saved it, the same run bit for
    bit."""
    with group(ranks):
        folder = Path(path)
        model, optimizer, scheduler = make(**config)
        found = zeropp.load(folder / "ckpt", model, optimizer, scheduler=scheduler)
        assert found["step"] == 4 and found["extra"] == {"who": 0} and not found["damaged"]
        whole = torch.load(folder / "whole.0.pt")
        ours = zeropp.full_state_dict(model)
        assert list(whole) == list(ours)
        for name, values in ours.items():
            assert torch.equal(values, whole[name]), name
        losses = train(model, optimizer, scheduler, 4, 7)
        wanted = json.loads((folder / f"losses.{rank if exact else 0}").read_text())
        assert found["random_restored"] == exact
        if exact:
            assert losses == wanted, (losses, wanted)


def jobs(folder: Path, saved: dict[str, Any], *resumed: tuple[int, dict[str, Any]]) -> None:
    """Save on two ranks, and resume on each of the numbers of ranks; on two, bit for bit."""
    run_ranks(2, save, str(folder), saved, timeout=200, env=taking_the_device())
    for ranks, config in resumed:
        run_ranks(ranks, resume, str(folder), ranks == 2, config, timeout=200, env=taking_the_device())


def test_a_checkpoint_moves_to_more_ranks_and_another_stage(tmp_path):
    jobs(tmp_path, {"host_copy": "off"}, (3, {"stage": 2}))


def test_a_state_of_one_number_a_parameter_moves_to_more_ranks(tmp_path):
    """NAdam's product of momenta, also where a rank has no part, or one element, of a parameter."""
    jobs(
        tmp_path,
        {"kind": "nadam", "host_copy": "off"},
        (2, {"kind": "nadam", "host_copy": "off"}),
        (3, {"kind": "nadam", "stage": 2}),
    )


@pytest.mark.slow
def test_a_checkpoint_moves_between_ranks_stages_and_ways_of_holding(tmp_path):
    """Saved by two ranks that gather; loaded by the same, by one shared copy, by other stages, and by one and three
    ranks."""
    jobs(
        tmp_path,
        {"host_copy": "off"},
        (2, {"host_copy": "off"}),
        (2, {"host_copy": "auto"}),
        (2, {"stage": 1}),
        (3, {"stage": 2}),
        (1, {"stage": 0}),
    )


def test_low_precision_keeps_its_master_weights(tmp_path):
    jobs(tmp_path, {"precision": "bf16", "stage": 2}, (2, {"precision": "bf16", "stage": 3}))


def test_what_one_rank_saved_alike_on_all(tmp_path):
    """Stage 0: rank 0's file alone holds the weights."""
    jobs(tmp_path, {"stage": 0}, (2, {"stage": 3}))


# -- a rank that is killed -------------------------------------------------------------------------------


def killed(rank: int, ranks: int, path: str) -> None:
    """Rank 1 dies while it writes its file: rank 0 raises within seconds, and the checkpoint before stays."""
    with group(ranks):
        folder = Path(path)
        model, optimizer, _ = make()
        zeropp.save(folder / "ckpt", model, optimizer, step=1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the survivors; this one has to tell first
        if rank == 1:
            os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        try:
            zeropp.save(folder / "ckpt", model, optimizer, step=2)
        except CommError as error:
            took = time.monotonic() - begun
            names = names_in(folder / "ckpt")
            (folder / f"survivor.{rank}").write_text(f"{error.rank} {took < 5} {names}\n{error}")
        os._exit(0)


def test_a_rank_killed_in_save_leaves_the_checkpoint_before(tmp_path):
    run_ranks(2, killed, str(tmp_path), check=False, env=taking_the_device())
    facts, sentence = (tmp_path / "survivor.0").read_text().split("\n", 1)
    assert facts == "1 True ['latest', 'step-1']", (facts, sentence)
    assert "rank 1" in sentence


def background_killed(rank: int, ranks: int, path: str) -> None:
    """Rank 1 dies in the middle of its file: rank 0's end of the process says so, within seconds."""
    with group(ranks):
        folder = Path(path)
        model, optimizer, _ = make()
        zeropp.save(folder / "ckpt", model, optimizer, step=1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        saving = zeropp.save(folder / "ckpt", model, optimizer, step=2, background=True)
        begun = time.monotonic()
        error = saving.end()  # what the end of the process does
        names = names_in(folder / "ckpt")
        (folder / f"survivor.{rank}").write_text(f"{time.monotonic() - begun < 10} {names}\n{error}")
        os._exit(0)


def test_a_rank_killed_in_a_background_save_is_noticed(tmp_path):
    run_ranks(2, background_killed, str(tmp_path), check=False, env=taking_the_device())
    facts, sentence = (tmp_path / "survivor.0").read_text().split("\n", 1)
    assert facts == "True ['latest', 'step-1']", (facts, sentence)
    assert "rank-00001.safetensors: rank 1 is gone and did not finish it" in sentence


# -- one job ---------------------------------------------------------------------------------------------


@on_ranks(1, 2, backend="zeropp")
def test_a_load_between_accumulated_backwards_begins_a_step() -> None:
    """Loaded after the first of two backwards: its gradients belong to no step, and two more make the next one."""
    with scratch() as path:
        folder = Path(path)
        nvme = zeropp.Offload(grads="nvme", path=folder, optimizer="device" if shards_tier() == "cpu" else "cpu")
        for config in ({"stage": 0}, {"stage": 1}, {"stage": 3}, {"stage": 2, "offload": nvme}):
            model, optimizer, scheduler = make(accumulate=2, **config)
            train(model, optimizer, scheduler, 0, 4)
            zeropp.save(folder / "ckpt", model, optimizer, step=4, scheduler=scheduler)
            wanted = train(model, optimizer, scheduler, 4, 8)
            train(model, optimizer, scheduler, 20, 21)
            zeropp.load(folder / "ckpt", model, optimizer, scheduler=scheduler)
            losses = train(model, optimizer, scheduler, 4, 8)
            assert losses == wanted, (config, losses, wanted)
            del model, optimizer, scheduler


@on_ranks(2, backend="zeropp")
def test_damage() -> None:
    """A byte of rank 1's file: every rank passes over it, and every rank refuses it when it is named."""
    with scratch() as path:
        folder = Path(path)
        model, optimizer, scheduler = make()
        zeropp.save(folder / "ckpt", model, optimizer, step=1)
        train(model, optimizer, scheduler, 0, 1)
        zeropp.save(folder / "ckpt", model, optimizer, step=2)
        path = folder / "ckpt" / "step-2" / "rank-00001.safetensors"
        if dist.get_rank() == 0:
            data = bytearray(path.read_bytes())
            data[1234] ^= 1
            path.write_bytes(data)
        dist.barrier()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert zeropp.load(folder / "ckpt", model, optimizer)["step"] == 1
        assert any("rank-00001.safetensors: damaged between offset 0 and" in str(one.message) for one in said)
        try:
            zeropp.load(folder / "ckpt" / "step-2", model, optimizer)
        except CheckpointError as error:
            assert "rank-00001.safetensors: damaged between offset 0 and" in str(error), error
        else:
            raise AssertionError("a damaged checkpoint was loaded")


@on_ranks(2, backend="zeropp", alone=True)
def test_full() -> None:
    """Rank 1 has no room: neither rank commits, both say whose file it was, the checkpoint before stays."""
    with scratch() as path:
        folder = Path(path)
        model, optimizer, scheduler = make()
        zeropp.save(folder / "ckpt", model, optimizer, step=1)
        train(model, optimizer, scheduler, 0, 1)
        if dist.get_rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            zeropp.save(folder / "ckpt", model, optimizer, step=2)
        except TierError as error:
            assert "rank-00001.safetensors: cannot be written: File too large" in str(error), error
            assert (dist.get_rank() == 1) != str(error).startswith("rank 1: "), error
        else:
            raise AssertionError("a save without room went through")
        dist.barrier()
        assert names_in(folder / "ckpt") == ["latest", "step-1"]
        assert zeropp.load(folder / "ckpt", model, optimizer)["step"] == 1


@on_ranks(2, backend="zeropp")
def test_differs() -> None:
    """Ranks that save different steps, or refuse different data, all raise."""
    with scratch() as path:
        folder = Path(path)
        model, optimizer, _ = make()
        try:
            zeropp.save(folder / "ckpt", model, optimizer, step=5 + dist.get_rank())
        except CheckpointError as error:
            assert "rank 1 saves to" in str(error) and "step 6, rank 0 to" in str(error), error
        else:
            raise AssertionError("different steps went unnoticed")
        try:
            zeropp.save(folder / "ckpt", model, optimizer, step=5, extra=len)
        except CheckpointError as error:
            assert "extra: a builtin_function_or_method cannot be saved without pickle" in str(error), error
        else:
            raise AssertionError("data that needs pickle was saved")
        dist.barrier()  # rank 0 has cleaned up
        assert not list((folder / "ckpt").glob("*step*"))


@on_ranks(2, backend="zeropp")
def test_whole() -> None:
    """Whole values in and out, with every way of holding a unit."""
    with scratch() as path:
        folder = Path(path)
        torch.manual_seed(9)
        plain = Model()
        for config in (
            {"host_copy": "off"},
            {"host_copy": "auto"},
            {"stage": 2},
            {"stage": 1},
            {"stage": 0},
            {"precision": "bf16"},
        ):
            model, _, _ = make(**config)
            zeropp.load_full_state_dict(model, plain.state_dict())
            wanted = plain.state_dict()
            for name, values in zeropp.full_state_dict(model).items():
                assert torch.equal(values, wanted[name].to(values.dtype)), (config, name)
            assert (zeropp.full_state_dict(model, rank_0_only=True) == {}) == (dist.get_rank() > 0)
            zeropp.export(model, folder / "export", file_bytes=3000)
            other, _, _ = make(**config)
            zeropp.load_full_state_dict(other, folder / "export")
            for name, values in zeropp.full_state_dict(other).items():
                assert torch.equal(values, wanted[name].to(values.dtype)), (config, name)
            dist.barrier()
        try:  # a file that one rank does not see: an error on every rank, without a wait
            zeropp.load_full_state_dict(other, folder / ("absent.bin" if dist.get_rank() == 1 else "export"))
        except CheckpointError as error:
            assert "absent.bin: cannot be mapped" in str(error), error
        else:
            raise AssertionError("a file that is not there was loaded")


@on_ranks(2, backend="zeropp")
def test_background() -> None:
    """The ranks train on while their files are written; what is loaded are the values at the save."""
    with scratch() as path:
        folder = Path(path)
        model, optimizer, scheduler = make()
        train(model, optimizer, scheduler, 0, 2)
        whole = zeropp.full_state_dict(model)
        done = zeropp.save(folder / "ckpt", model, optimizer, step=2, scheduler=scheduler, background=True)
        train(model, optimizer, scheduler, 2, 4)
        later = zeropp.full_state_dict(model)
        second = zeropp.save(folder / "ckpt", model, optimizer, step=4, scheduler=scheduler, background=True, keep=2)
        assert done.done() and done.wait() == folder / "ckpt" / "step-2"  # the second save waited for the first
        losses = train(model, optimizer, scheduler, 4, 6)
        found = zeropp.load(folder / "ckpt", model, optimizer, scheduler=scheduler)  # waits for the second
        assert (
            found["step"] == 4
            and second.done()
            and all(torch.equal(v, later[k]) for k, v in zeropp.full_state_dict(model).items())
        )
        assert train(model, optimizer, scheduler, 4, 6) == losses
        zeropp.load(folder / "ckpt" / "step-2", model, optimizer)
        assert all(torch.equal(v, whole[k]) for k, v in zeropp.full_state_dict(model).items())
        dist.barrier()
        assert names_in(folder / "ckpt") == [
            "latest",
            "step-2",
            "step-4",
        ]


@on_ranks(2, backend="zeropp", alone=True)
def test_background_full() -> None:
    """Rank 1 has no room while it trains on: every rank raises at the next save, once, and nothing is left."""
    with scratch() as path:
        folder = Path(path)
        model, optimizer, scheduler = make()
        zeropp.save(folder / "ckpt", model, optimizer, step=1)
        if dist.get_rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        zeropp.save(folder / "ckpt", model, optimizer, step=2, background=True)
        train(model, optimizer, scheduler, 0, 1)
        try:
            zeropp.save(folder / "ckpt", model, optimizer, step=3, background=True)
        except TierError as error:
            assert "rank-00001.safetensors: cannot be written: File too large" in str(error), error
        else:
            raise AssertionError("a save that failed in the background went unnoticed")
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert names_in(folder / "ckpt") == ["latest", "step-1"]
        zeropp.save(folder / "ckpt", model, optimizer, step=3, background=True).wait()
        assert zeropp.load(folder / "ckpt", model, optimizer)["step"] == 3
