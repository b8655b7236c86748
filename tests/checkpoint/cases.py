# SPDX-License-Identifier: Apache-2.0
"""Cases that the ranks of test_ranks.py run, under torchrun: cases.py CASE FOLDER."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import zeropp
from models import make, train
from zeropp.errors import CheckpointError, CommError, TierError

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])


def note(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.{RANK}").write_text(text)


def case_save(folder: Path, **config) -> None:
    """Four steps, a checkpoint, and what comes after it, for the other cases to compare with."""
    model, optimizer, scheduler = make(**config)
    train(model, optimizer, scheduler, 0, 4)
    zeropp.save(folder / "ckpt", model, optimizer, step=4, scheduler=scheduler, extra={"who": 0})
    whole = zeropp.full_state_dict(model)
    torch.save(whole, folder / f"whole.{RANK}.pt")
    losses = train(model, optimizer, scheduler, 4, 7)
    note(folder, "losses", repr(losses))


def case_resume(folder: Path, exact: bool = True, **config) -> None:
    """The checkpoint gives the weights that were saved; and, on as many ranks as saved it, the same run bit for
    bit."""
    model, optimizer, scheduler = make(**config)
    found = zeropp.load(folder / "ckpt", model, optimizer, scheduler=scheduler)
    assert found["step"] == 4 and found["extra"] == {"who": 0} and not found["damaged"]
    whole = torch.load(folder / "whole.0.pt")
    ours = zeropp.full_state_dict(model)
    assert list(whole) == list(ours)
    for name, values in ours.items():
        assert torch.equal(values, whole[name]), name
    losses = train(model, optimizer, scheduler, 4, 7)
    wanted = eval((folder / f"losses.{RANK if exact else 0}").read_text())
    assert found["random_restored"] == exact
    if exact:
        assert losses == wanted, (losses, wanted)


def case_within_a_step(folder: Path) -> None:
    """Loaded after the first of two backwards: its gradients belong to no step, and two more make the next one."""
    nvme = zeropp.Offload(grads="nvme", path=folder)
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


def case_damage(folder: Path) -> None:
    """A byte of rank 1's file: every rank passes over it, and every rank refuses it when it is named."""
    model, optimizer, scheduler = make()
    zeropp.save(folder / "ckpt", model, optimizer, step=1)
    train(model, optimizer, scheduler, 0, 1)
    zeropp.save(folder / "ckpt", model, optimizer, step=2)
    path = folder / "ckpt" / "step-2" / "rank-00001.safetensors"
    if RANK == 0:
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


def case_full(folder: Path) -> None:
    """Rank 1 has no room: neither rank commits, both say whose file it was, the checkpoint before stays."""
    model, optimizer, scheduler = make()
    zeropp.save(folder / "ckpt", model, optimizer, step=1)
    train(model, optimizer, scheduler, 0, 1)
    if RANK == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        zeropp.save(folder / "ckpt", model, optimizer, step=2)
    except TierError as error:
        assert "rank-00001.safetensors: cannot be written: File too large" in str(error), error
        assert (RANK == 1) != str(error).startswith("rank 1: "), error
    else:
        raise AssertionError("a save without room went through")
    dist.barrier()
    assert sorted(one.name for one in (folder / "ckpt").iterdir() if one.name != ".writer") == ["latest", "step-1"]
    assert zeropp.load(folder / "ckpt", model, optimizer)["step"] == 1


def case_differs(folder: Path) -> None:
    """Ranks that save different steps, or refuse different data, all raise."""
    model, optimizer, _ = make()
    try:
        zeropp.save(folder / "ckpt", model, optimizer, step=5 + RANK)
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


def case_killed(folder: Path) -> None:
    """Rank 1 dies while it writes its file: rank 0 raises within seconds, and the checkpoint before stays."""
    model, optimizer, _ = make()
    zeropp.save(folder / "ckpt", model, optimizer, step=1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the survivors; this one has to tell first
    if RANK == 1:
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        zeropp.save(folder / "ckpt", model, optimizer, step=2)
    except CommError as error:
        took = time.monotonic() - begun
        names = sorted(one.name for one in (folder / "ckpt").iterdir() if one.name != ".writer")
        note(folder, "survivor", f"{error.rank} {took < 5} {names}\n{error}")
    os._exit(0)


def case_background(folder: Path, **config) -> None:
    """The ranks train on while their files are written; what is loaded are the values at the save."""
    model, optimizer, scheduler = make(**config)
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
    assert sorted(one.name for one in (folder / "ckpt").iterdir() if one.name != ".writer") == [
        "latest",
        "step-2",
        "step-4",
    ]


def case_background_full(folder: Path) -> None:
    """Rank 1 has no room while it trains on: every rank raises at the next save, once, and nothing is left."""
    model, optimizer, scheduler = make()
    zeropp.save(folder / "ckpt", model, optimizer, step=1)
    if RANK == 1:
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
    if RANK == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert sorted(one.name for one in (folder / "ckpt").iterdir() if one.name != ".writer") == ["latest", "step-1"]
    zeropp.save(folder / "ckpt", model, optimizer, step=3, background=True).wait()
    assert zeropp.load(folder / "ckpt", model, optimizer)["step"] == 3


def case_background_killed(folder: Path) -> None:
    """Rank 1 dies in the middle of its file: rank 0's end of the process says so, within seconds."""
    model, optimizer, _ = make()
    zeropp.save(folder / "ckpt", model, optimizer, step=1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if RANK == 1:
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    saving = zeropp.save(folder / "ckpt", model, optimizer, step=2, background=True)
    begun = time.monotonic()
    error = saving.end()  # what the end of the process does
    names = sorted(one.name for one in (folder / "ckpt").iterdir() if one.name != ".writer")
    note(folder, "survivor", f"{time.monotonic() - begun < 10} {names}\n{error}")
    os._exit(0)


def case_whole(folder: Path) -> None:
    """Whole values in and out, with every way of holding a unit."""
    from models import Model

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
        assert (zeropp.full_state_dict(model, rank_0_only=True) == {}) == (RANK > 0)
        zeropp.export(model, folder / "export", file_bytes=3000)
        other, _, _ = make(**config)
        zeropp.load_full_state_dict(other, folder / "export")
        for name, values in zeropp.full_state_dict(other).items():
            assert torch.equal(values, wanted[name].to(values.dtype)), (config, name)
        dist.barrier()
    try:  # a file that one rank does not see: an error on every rank, and nobody waits
        zeropp.load_full_state_dict(other, folder / ("absent.bin" if RANK == 1 else "export"))
    except CheckpointError as error:
        assert "absent.bin: cannot be mapped" in str(error), error
    else:
        raise AssertionError("a file that is not there was loaded")


def case_writes(folder: Path) -> None:
    """A job whose first checkpoint stays half written until the file "go" is there; it lives until "end" is."""
    from zeropp.files import disk

    def wait_for(name: str) -> None:
        while not (folder / name).exists():
            time.sleep(0.01)

    class Slow(disk.Disk):
        def write(self, *arguments) -> None:
            wait_for("go")
            super().write(*arguments)

    disk.disk = Slow()
    model, optimizer, scheduler = make()
    saving = zeropp.save(folder / "ckpt", model, optimizer, step=1, background=True)
    note(folder, "writing", str(os.getpid()))
    saving.wait()
    note(folder, "trains", "")
    train(model, optimizer, scheduler, 0, 1)
    wait_for("end")
    assert zeropp.save(folder / "ckpt", model, optimizer).name == "step-2"


def case_groups(folder: Path) -> None:
    """Two groups of ranks, each with a model of its own, save into one folder; then each into its own."""
    from zeropp.comm import communicator
    from zeropp.zero import prepare

    pair = dist.new_group([0, 1])
    sub = None if RANK == 2 else communicator(pair)
    prepare._communicator = lambda: sub
    model, optimizer, _ = make()
    dist.barrier()
    begun = time.monotonic()
    try:
        zeropp.save(folder / "ckpt", model, optimizer, step=2, background=RANK < 2).wait()
    except CheckpointError as error:
        note(folder, "groups", f"{time.monotonic() - begun}\n{error}")
    dist.barrier()
    begun = time.monotonic()
    where = zeropp.save(folder / ("a" if RANK < 2 else "b"), model, optimizer, step=3)
    assert zeropp.load(where, model, optimizer)["step"] == 3
    assert time.monotonic() - begun < 1.9, "a group waited in vain"


if __name__ == "__main__":
    torch.set_num_threads(1)
    if RANKS > 1:
        dist.init_process_group("zeropp")
    keywords = {}
    for argument in sys.argv[3:]:
        key, value = argument.split("=")
        keywords[key] = {"True": True, "False": False}.get(value, int(value) if value.isdigit() else value)
    globals()[f"case_{sys.argv[1]}"](Path(sys.argv[2]), **keywords)
    if dist.is_initialized():
        dist.destroy_process_group()
