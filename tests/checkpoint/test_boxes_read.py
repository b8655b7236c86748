# SPDX-License-Identifier: Apache-2.0
"""What a rank of a mesh reads of a checkpoint and of an export, in bytes, and a checkpoint after a rank was killed in the next save."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from checkpoint import crash
from checkpoint.models import group
from launch import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from zeropp.checkpoint import offline, sources
from zeropp.files import disk, safefile

ROWS, WIDTH, LR = 256, 4096, 1e-3
WHOLE_BYTES = 2 * ROWS * WIDTH * 4
SLACK_BYTES = 1 << 17  # headers, biases, and rows of which a part is wanted


def _model(seed: int) -> nn.Sequential:
    """A matrix that is cut by rows, and one that is cut by columns."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(ROWS, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, ROWS))


def _prepared(shape: list[int], stage: int, seed: int) -> tuple[Any, Any, Any]:
    """Return (model, optimizer, mesh) over a mesh of dp, sp and tp."""
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "sp", "tp"))
    model = _model(seed)
    if shape[2] > 1:
        zeropp.parallel.tensor(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    config = zeropp.Config(stage=stage, host_copy="off")
    return *zeropp.prepare(model, optimizer, config, mesh=mesh), mesh


def _step(model: Any, optimizer: Any, at: int) -> None:
    """Take a step on the one batch that all ranks have."""
    inputs = torch.randn(4, ROWS, generator=torch.Generator().manual_seed(at))
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _wanted(steps: int) -> dict[str, torch.Tensor]:
    model = _model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    for at in range(steps):
        _step(model, optimizer, at)
    return model.state_dict()


def _check(found: dict[str, torch.Tensor], steps: int) -> None:
    for name, values in _wanted(steps).items():
        assert (found[name] - values).abs().max() < 2e-6, name  # fp32; sums in another order


def save(rank: int, ranks: int, path: str, shape: list[int], stage: int, killed: int | None) -> None:
    with group(ranks):
        model, optimizer, _ = _prepared(shape, stage, 0)
        _step(model, optimizer, 0)
        zeropp.save(path, model, optimizer, step=1)
        zeropp.export(model, Path(path) / "exported")
        if killed is None:
            return
        _step(model, optimizer, 1)
        if rank == killed:
            disk.disk = crash.deadly(2)
        with pytest.raises(zeropp.CommError, match=f"rank {killed}"):
            zeropp.save(path, model, optimizer, step=2)


def _counted() -> list[int]:
    """Return a list with the bytes that this process reads of checkpoints and of safetensors files from now on."""
    read: list[int] = []
    add, flat, box = safefile.Fills.add, safefile.TensorFile.flat, sources._Safetensors.box

    def counted_add(self: Any, place: Path, descriptor: int, offset: int, values: torch.Tensor) -> None:
        read.append(values.numel() * values.element_size())
        add(self, place, descriptor, offset, values)

    def counting(method: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            values = method(self, *args)
            read.append(values.numel() * values.element_size())
            return values

        return call

    safefile.Fills.add = counted_add  # type: ignore[method-assign]
    safefile.TensorFile.flat = counting(flat)  # type: ignore[method-assign]
    sources._Safetensors.box = counting(box)  # type: ignore[method-assign]
    sources._Safetensors.flat = counting(sources._Safetensors.flat)  # type: ignore[method-assign]
    sources._Safetensors.whole = counting(sources._Safetensors.whole)  # type: ignore[method-assign]
    return read


def load(rank: int, ranks: int, path: str, shape: list[int], stage: int, part: int) -> None:
    """Load, and read no more than a part of the parameters, and of the moments what this rank steps."""
    with group(ranks):
        model, optimizer, _ = _prepared(shape, stage, 7)
        read = _counted()
        zeropp.load(path, model, optimizer)
        assert WHOLE_BYTES / part < sum(read) < 3.1 * WHOLE_BYTES / part + SLACK_BYTES, sum(read) * part / WHOLE_BYTES
        _check(zeropp.full_state_dict(model), 1)
        _step(model, optimizer, 1)
        _check(zeropp.full_state_dict(model), 2)
        read.clear()
        zeropp.load_full_state_dict(model, Path(path) / "exported")
        assert sum(read) < 1.1 * WHOLE_BYTES / part + SLACK_BYTES, sum(read) * part / WHOLE_BYTES
        _check(zeropp.full_state_dict(model), 1)


@pytest.mark.parametrize(
    "saved, stage, killed, read, read_stage",
    [
        ([1, 2, 2], 3, 3, [2, 1, 2], 3),
        pytest.param([2, 1, 2], 2, 0, [2, 1, 1], 3, marks=pytest.mark.slow),
        pytest.param([1, 2, 1], 3, None, [1, 1, 4], 3, marks=pytest.mark.slow),
        pytest.param([1, 1, 2], 1, 1, [1, 4, 1], 3, marks=pytest.mark.slow),
    ],
)
def test_a_rank_reads_its_boxes_also_after_a_kill(
    tmp_path: Path, saved: list[int], stage: int, killed: int | None, read: list[int], read_stage: int
) -> None:
    """Sizes are those of dp, sp and tp; at stage 3 each rank holds one part in as many as there are ranks."""
    ranks = saved[0] * saved[1] * saved[2]
    outcomes = run_ranks(ranks, save, str(tmp_path), saved, stage, killed, timeout=150, check=killed is None)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == (-signal.SIGKILL if rank == killed else 0), str(outcome)
    assert all(one.wrong is None for one in offline.verify(tmp_path))
    _check(offline.whole_state(tmp_path, None), 1)
    ranks = read[0] * read[1] * read[2]
    run_ranks(ranks, load, str(tmp_path), read, read_stage, ranks, timeout=150)
