# SPDX-License-Identifier: Apache-2.0
"""Files of tensors that are on an accelerator: the same bytes as from the host, copied block by block."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from checkpoint.models import group
from launch import run_ranks
from ranks import of_all_ranks, on_ranks, simulated
from torch import nn
from zeropp.files import safefile


@on_ranks(1, devices=("sim", "sim-lazy"))
def test_tensors_of_a_device_go_to_files_and_come_back() -> None:
    safefile.BLOCK_BYTES = 4096  # several blocks, the last one shorter
    values = {"a": torch.arange(5003.0), "b": torch.arange(3000).to(torch.bfloat16), "none": torch.empty(0)}
    assert {one.device.type for one in values.values()} == {"sim"}
    with tempfile.TemporaryDirectory() as folder:
        path, other, image = Path(folder) / "device", Path(folder) / "host", Path(folder) / "image"
        pieces = [safefile.piece_of(name, one) for name, one in values.items()]
        entry = safefile.write_pieces(path, pieces, {"format": "pt"})
        safefile.verify(path, entry)
        safefile.write_pieces(
            other, [safefile.piece_of(name, one.cpu()) for name, one in values.items()], {"format": "pt"}
        )
        assert path.read_bytes() == other.read_bytes()
        memory, size_bytes = safefile.image_of(pieces, {"format": "pt"}, None)
        image.write_bytes(memory[:size_bytes])
        assert image.read_bytes() == other.read_bytes()

        file, back = safefile.TensorFile(path), {name: torch.empty_like(one) for name, one in values.items()}
        with safefile.Fills() as fills:
            for name, one in back.items():
                file.fill(fills, name, 0, one)
        for name, one in back.items():
            assert one.device.type == "sim"
            assert torch.equal(one.cpu(), values[name].cpu()), name


def _trained(device: str, seed: int, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
        inputs = torch.randn(4, 8).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(device=device, **options))
    for _ in range(2):
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _all_of(model: nn.Module) -> dict[str, torch.Tensor]:
    values = {name: one.cpu() for name, one in zeropp.full_state_dict(model).items()}
    for name, parameter in model.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            state = zeropp.get_full(parameter, kind)
            assert state is not None
            values[f"{name}/{kind}"] = state.cpu()
    return values


@on_ranks(1, 2, devices=("sim",))
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("shards", ["host", "stage 3", "stage 1", "stage 0"])
def test_checkpoints_go_from_a_device_to_the_cpu_and_back(precision: str | None, shards: str) -> None:
    """The shards are on the device, or on the host beside it."""
    folder = of_all_ranks(tempfile.mkdtemp())[0]
    there: dict[str, Any] = {"offload": zeropp.Offload(params="cpu", optimizer="cpu")}
    if shards != "host":
        there = {"offload": zeropp.Offload(), "stage": int(shards[-1])}
    where = {"sim": {**there, "precision": precision}, "cpu": {"precision": precision}}
    for source, target in (("sim", "cpu"), ("cpu", "sim"), ("sim", "sim")):
        model, optimizer = _trained(source, 1, **where[source])
        zeropp.save(folder, model, optimizer, step=1)
        other, other_optimizer = _trained(target, 2, **where[target])
        wanted = _all_of(model)
        assert any(not torch.equal(one, wanted[name]) for name, one in _all_of(other).items())
        zeropp.load(folder, other, other_optimizer)
        found = _all_of(other)
        assert found.keys() == wanted.keys()
        for name, one in found.items():
            assert torch.equal(one, wanted[name]), (source, name)
    shutil.rmtree(folder, ignore_errors=True)


def _save(rank: int, ranks: int, path: str, device: str) -> None:
    if device == "sim":
        importlib.import_module("sim")
    with group(ranks):
        model, optimizer = _trained(device, 1)
        zeropp.save(Path(path) / "checkpoint", model, optimizer, step=1)
        values = _all_of(model)
    if rank == 0:
        torch.save(values, Path(path) / "values.pt")


def _load(rank: int, ranks: int, path: str, device: str) -> None:
    if device == "sim":
        importlib.import_module("sim")
    with group(ranks):
        model, optimizer = _trained(device, 2)
        zeropp.load(Path(path) / "checkpoint", model, optimizer)
        found = _all_of(model)
    wanted = torch.load(Path(path) / "values.pt")
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        assert torch.equal(one, wanted[name]), name


@pytest.mark.parametrize("source, target", [("sim", "sim"), ("sim", "cpu"), ("cpu", "sim")])
@pytest.mark.parametrize("ranks, later", [(2, 1), (1, 2)])
def test_another_number_of_ranks_loads_it(tmp_path: Path, source: str, target: str, ranks: int, later: int) -> None:
    """Shards are on the device on both sides, or on the CPU on one."""
    simulated("sim")
    run_ranks(ranks, _save, str(tmp_path), source)
    run_ranks(later, _load, str(tmp_path), target)
