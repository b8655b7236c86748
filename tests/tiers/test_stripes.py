# SPDX-License-Identifier: Apache-2.0
"""Tiers whose files are striped over several folders: equal to memory bit for bit, shared out evenly, checked, and clear about
which folder failed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import change, scratch
from ranks import on_ranks
from training import Recipe, batch, gpt, ours, same, train
from zeropp import Offload, Tier
from zeropp.files import scratch as scratch_module
from zeropp.zero.engine import engine_of
from zeropp.zero.offload import activations
from zeropp.zero.offload import offload_states as away_module
from zeropp.zero.offload.param_file import ParamFile

STRIPE = 64 << 10
KINDS = ("params", "grads", "optimizer", "activations")


@contextlib.contextmanager
def folders(count: int, other_file_system: bool = False) -> Iterator[list[str]]:
    """Yield folders for all ranks, with stripes so small that small files have many. The last folder may be in memory. All must be
    empty at the end."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(scratch_module, "STRIPE_BYTES", STRIPE)
        for module in (activations, away_module):
            patch.setattr(module, "STRIPE_BYTES", STRIPE)
        paths = []
        for index in range(count):
            if other_file_system and index == count - 1 and os.access("/dev/shm", os.W_OK):
                patch.setattr(tempfile, "tempdir", "/dev/shm")
            paths.append(stack.enter_context(scratch()))
        yield paths


def nvme(paths: list[str], **more: Any) -> dict[str, Any]:
    return {"stage": 3, "offload": Offload(**dict.fromkeys(KINDS[:3], "nvme"), path=paths, **more)}


def prepared(width: int = 48, **config: Any) -> tuple[Any, Any]:
    model = gpt(width=width)
    return zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), zeropp.Config(**config))


def tiers_of(model: Any) -> dict[str, Any]:
    engine = engine_of(model)
    found = {"params": engine.params, "grads": engine.grads, "optimizer": engine.states,
             "activations": engine.activations}  # fmt: skip
    return {name: tier for name, tier in found.items() if hasattr(tier, "file")}


def check_shares(model: Any, count: int) -> None:
    """Each file has a part in every folder; they differ by a stripe at most."""
    dist.barrier()
    for name, tier in tiers_of(model).items():
        parts = tier.file.parts
        sizes = [part.stat().st_size for part in parts]
        assert len({part.parent for part in parts}) == count, parts
        assert max(sizes) - min(sizes) <= STRIPE < max(sizes), (name, sizes)


def equal_to_memory(recipe: Recipe, **config: Any) -> None:
    """Losses, norms and parameters with all four kinds in files, over two folders and over three, one of them on a file system
    of its own."""
    wanted = ours(recipe, stage=3, **config)
    for count in (2, 3):
        with folders(count, other_file_system=count == 3) as paths, pytest.MonkeyPatch.context() as patch:
            patch.setattr(activations, "MIN_BYTES", 1 << 12)
            tiers = Offload(**dict.fromkeys(KINDS, "nvme"), path=paths)
            same(f"{count} folders", ours(recipe, stage=3, offload=tiers, **config), wanted)


@on_ranks(1, 2)
def test_fp32() -> None:
    equal_to_memory(Recipe(steps=3, clip=0.5, micro=2))


@on_ranks(pytest.param(1, marks=pytest.mark.slow), 2)
def test_bf16() -> None:
    equal_to_memory(Recipe(steps=3, clip=0.5, micro=2), precision="bf16")


@on_ranks(1, 2)
def test_a_fraction() -> None:
    wanted = ours(Recipe(steps=3), stage=3)
    with folders(3) as paths:
        some = [Tier("nvme", path=paths, fraction=part) for part in (0.6, 0.5, 0.7)]
        tiers = Offload(params=some[0], grads=some[1], optimizer=some[2])
        same("parts of all", ours(Recipe(steps=3), stage=3, offload=tiers), wanted)


@on_ranks(1, 2)
def test_other_steps() -> None:
    """The step inside the backward, and the delayed one."""
    with folders(2) as paths:
        backward_step = {"stage": 3, "step_in_backward": True}
        wanted = train(*prepared(**backward_step), 0, 3)
        tiers = Offload(params="nvme", optimizer="nvme", path=paths)
        assert train(*prepared(**backward_step, offload=tiers), 0, 3) == wanted
        wanted = train(*prepared(stage=3, offload=Offload(optimizer="cpu", delayed_update=1)), 0, 4)
        assert train(*prepared(**nvme(paths, delayed_update=1)), 0, 4) == wanted


@on_ranks(pytest.param(1, marks=pytest.mark.slow), 2)
def test_equal_shares() -> None:
    """Check what lies in each folder, what is reported of it, and that a checkpoint of a striped run goes on as one of memory."""
    with folders(3) as paths:
        wanted = train(*prepared(128, stage=3), 0, 4)
        one = prepared(128, **nvme(paths[:1]))
        model, optimizer = prepared(128, **nvme(paths))
        assert zeropp.memory(model, optimizer)["nvme"] == zeropp.memory(*one)["nvme"]
        del one
        assert train(model, optimizer, 0, 2) == wanted[:2]
        check_shares(model, 3)
        zeropp.save(Path(paths[0]) / "ckpt", model, optimizer, step=2)
        del model, optimizer
        again = prepared(128, **nvme(paths[:2]))
        zeropp.load(Path(paths[0]) / "ckpt", *again)
        assert train(*again, 2, 4) == wanted[2:]
        del again


@on_ranks(pytest.param(1, marks=pytest.mark.slow), 2)
def test_shares_of_activations() -> None:
    with folders(2) as paths:
        model = gpt(width=64)
        config = zeropp.Config(stage=1, offload=Offload(activations="nvme", path=paths))
        model, _ = zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), config)
        loss = model(*batch(0, rows=64))
        tiers_of(model)["activations"]._io.flush()
        check_shares(model, 2)
        loss.backward()
        del model, loss


@on_ranks(1, 2)
def test_stored() -> None:
    """Weights kept in 8 bits, for inference."""
    with folders(2) as paths:
        seen = []
        for offload in (Offload(params="cpu"), Offload(params="nvme", path=paths)):
            precision = zeropp.Precision(stored="int8")
            model, _ = zeropp.prepare(gpt(width=128).eval(), None, zeropp.Config(precision=precision, offload=offload))
            with torch.no_grad():
                seen.append(model(*batch(0)).item())
            del model
        assert seen[0] == seen[1]


@on_ranks(pytest.param(1, marks=pytest.mark.slow), 2)
def test_checksums() -> None:
    """A byte that a disk changed is found in its part; of the parameters, by a rank that did not write it."""
    with folders(2) as paths:
        plain = train(*prepared(128, stage=3), 0, 2)
        model, optimizer = prepared(128, **nvme(paths, checksums=True))
        assert train(model, optimizer, 0, 1) == plain[:1]
        assert engine_of(model).params.figures()["checked_bytes"] > 0
        dist.barrier()
        second = tiers_of(model)["params"].file.parts[1]
        if dist.get_rank() == 0:
            change(second, second.stat().st_size // 2)
        dist.barrier()
        with pytest.raises(zeropp.TierError, match="does not hold what was written") as caught:
            model(*batch(1))
        assert caught.value.path == str(second) and caught.value.offset_bytes < second.stat().st_size
        del caught, model, optimizer

        model, optimizer = prepared(128, **nvme(paths, checksums=True))
        train(model, optimizer, 0, 1)
        states = tiers_of(model)["optimizer"].file.parts[1]
        if dist.get_rank() == dist.get_world_size() - 1:
            change(states, states.stat().st_size // 2)
        dist.barrier()
        with pytest.raises(zeropp.TierError, match="does not hold what was written") as caught:
            train(model, optimizer, 1, 2)
        if dist.get_rank() == dist.get_world_size() - 1:
            assert caught.value.path == str(states)
        else:
            assert str(states.name) in str(caught.value)
        del caught, model, optimizer


@on_ranks(pytest.param(1, marks=pytest.mark.slow), 2)
def test_a_part_that_lost_its_end() -> None:
    """The part is named, and the place in it."""
    with folders(2) as paths:
        model, optimizer = prepared(128, **nvme(paths))
        train(model, optimizer, 0, 1)
        second = tiers_of(model)["params"].file.parts[1]
        size = second.stat().st_size
        dist.barrier()
        if dist.get_rank() == 0:
            os.truncate(second, size // 2 // 4096 * 4096)
        dist.barrier()
        with pytest.raises(zeropp.TierError, match="ended during a read") as caught:
            model(*batch(1))
        assert caught.value.path == str(second)
        assert size // 2 - STRIPE <= caught.value.offset_bytes < size
        del caught, model, optimizer


@on_ranks(pytest.param(1, marks=pytest.mark.slow), 2)
def test_a_folder_that_cannot_be_made() -> None:
    """It is named, on the rank that wanted it; nothing is left in the first one."""
    with folders(1) as paths:
        blocked = Path(paths[0]) / "file"
        if dist.get_rank() == 0:
            blocked.write_text("not a folder")
        dist.barrier()
        for kind in KINDS:
            tier = Offload(**{kind: Tier("nvme", path=[paths[0], str(blocked / "below")])})  # type: ignore[arg-type]
            with pytest.raises(zeropp.TierError, match=r"below.*Not a directory") as caught:
                prepared(stage=3, offload=tier)
            assert "below" in str(caught.value.path)
            del caught
            dist.barrier()
            assert [one.name for one in Path(paths[0]).iterdir()] == ["file"]


@on_ranks(pytest.param(1, marks=pytest.mark.slow), 2)
def test_construction() -> None:
    """Slices wait in all folders for prepare, and nothing of them is left."""
    with folders(2) as paths:
        wanted = {name: value.clone() for name, value in gpt(width=256).named_parameters()}
        with zeropp.sharded_init(path=paths, window_bytes=1):
            model = gpt(width=256)
            shares = [0, 0]
            for line in Path("/proc/self/maps").read_text().splitlines():
                for index, path in enumerate(paths):
                    if path in line:
                        first, last = (int(one, 16) for one in line.split()[0].split("-"))
                        shares[index] += last - first
        assert min(shares) > 0.5 * max(shares) > 0, shares
        adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, adam = zeropp.prepare(model, adam, zeropp.Config(**nvme(paths)))
        found = zeropp.full_state_dict(model)
        assert all(torch.equal(found[name], value.detach()) for name, value in wanted.items())
        twice = pytest.raises(zeropp.ConfigError, match=r"sharded_init\.path: .* each folder once")
        with twice, zeropp.sharded_init(path=[paths[0], paths[0]]):
            pass
        del model, adam


@on_ranks(pytest.param(1, marks=pytest.mark.slow), 2)
def test_away() -> None:
    """offload_states over two folders."""
    with folders(2) as paths:
        model, optimizer = prepared(stage=2)
        wanted = train(model, optimizer, 0, 3)
        model, optimizer = prepared(stage=2)
        seen = train(model, optimizer, 0, 2)
        assert zeropp.offload_states(optimizer=optimizer, to="nvme", path=paths) > 0
        files = [sum(one.stat().st_size for one in Path(path).rglob("states")) for path in paths]
        assert min(files) > 0
        dist.barrier()
        zeropp.offload_states(optimizer=optimizer, to="cpu")
        assert seen + train(model, optimizer, 2, 3) == wanted
        del model, optimizer


@on_ranks(2)
def test_folders_in_another_order() -> None:
    """Ranks of a host that would look for a stripe in different folders raise."""
    with folders(2) as paths:
        mine = paths if dist.get_rank() == 0 else paths[::-1]
        with pytest.raises(zeropp.ConfigError, match="the same folders in the same order"):
            prepared(**nvme(mine))
        mine = paths if dist.get_rank() == 0 else paths[:1]
        with pytest.raises(zeropp.ConfigError, match="the same folders in the same order"):
            prepared(**nvme(mine))


@on_ranks(2)
def test_a_folder_that_other_ranks_see_otherwise() -> None:
    """One name, and behind it another disk, as in a container of its own: a write would make a part of one rank's own there."""
    with folders(2) as paths, pytest.MonkeyPatch.context() as patch:
        made = ParamFile._open

        def open_and_hide(self: ParamFile, scratch: Any, make: bool) -> None:
            made(self, scratch, make)
            self.file.parts[1].unlink()

        patch.setattr(ParamFile, "_open", open_and_hide)
        with pytest.raises(zeropp.ConfigError, match=f"rank 0 of this host has no file under {paths[1]}"):
            prepared(**nvme(paths))


"""What is laid out in another way there; the others are slow."""


FULL = """
import os, sys, torch, zeropp
kind, first, second = sys.argv[1:]
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(3)))
adam = torch.optim.AdamW(model.parameters())
config = zeropp.Config(stage=3, offload=zeropp.Offload(**{kind: "nvme"}, path=[first, second]))
try:
    zeropp.prepare(model, adam, config)
except zeropp.TierError as error:
    assert error.path.startswith(second) and second in str(error), error
    print(error.bytes_wanted, error.bytes_free)
assert not os.listdir(first) and not os.listdir(second)
"""
LIMIT_BYTES = 1 << 20


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=pytest.mark.slow) for one in ("params", "grads")] + ["optimizer"]
)
def test_a_full_second_disk_is_found_by_prepare(kind: str, tmp_path: Path) -> None:
    """12 MiB of parameters or gradients, 24 of states: in stripes of 2 MiB half of it on each disk."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    mount = f"mount -t tmpfs -o size={LIMIT_BYTES} none {second}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False).returncode:
        pytest.skip("needs unshare -rm, to mount a small file system")
    run = f'{mount} && exec "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", run, "sh", sys.executable, "-c", FULL, kind, str(first), str(second)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wanted, free = (int(one) for one in done.stdout.split())
    assert wanted == (12 if kind == "optimizer" else 6) << 20 and LIMIT_BYTES // 2 < free <= LIMIT_BYTES
