# SPDX-License-Identifier: Apache-2.0
"""What ranks of a mesh hold while they export a model, in bytes of the process, and an export that storage ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import scratch
from memory import Peak, resident_bytes
from ranks import of_all_ranks, on_ranks
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel
from zeropp.files import disk as files
from zeropp.files import safefile

LAYERS, WIDTH = 8, 2944  # malloc maps what is larger than 32 MiB by itself, so that what is free is not counted
TENSOR_BYTES = 4 * WIDTH * WIDTH
RING_BYTES = safefile.RING_BLOCKS * safefile.BLOCK_BYTES
ROUND_BYTES, BUCKET_BYTES = 4 << 20, 64 << 20
SLACK_BYTES = 12 << 20


def _model(kind: str) -> tuple[Any, list[torch.Tensor]]:
    """Return a prepared model whose ranks hold different parts, and the values of the whole."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    corners = [one.weight[:2, -2:].detach().clone() for one in plain]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(kind,))
    if kind == "tp":
        zeropp.parallel.tensor(plain, mesh["tp"], {str(i): ColwiseParallel() for i in range(LAYERS)})
    else:
        half = LAYERS // 2
        first = dist.get_rank() * half
        names = {str(i): plain[i] for i in range(first, first + half)}
        plain = zeropp.parallel.Chunks([_Stage(names)])
    config = zeropp.Config(stage=3, host_copy="off")
    return zeropp.prepare(plain, None, config, mesh=mesh)[0], corners


class _Stage(nn.Module):
    """Some layers, under the names that they have in the whole model."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


@on_ranks(2, alone=True)
@pytest.mark.parametrize("kind", ["tp", "pp"])
def test_no_rank_holds_more_than_a_tensor(kind: str) -> None:
    """Rank 0 writes files of several tensors and holds one of them; rank 1 holds its part of what is on its way."""
    model, corners = _model(kind)
    with scratch() as path:
        zeropp.export(model, path)  # warm code and allocator
        before = resident_bytes()
        with Peak() as peak:
            zeropp.export(model, path)
        grown, first = peak.bytes - before, dist.get_rank() == 0
        wanted = ROUND_BYTES + SLACK_BYTES + (TENSOR_BYTES + RING_BYTES if first else 0)
        assert grown < wanted, f"{grown} bytes, {grown / TENSOR_BYTES:.1f} tensors"
        with safe_open(Path(path) / "model.safetensors", "pt") as file:
            for i, corner in enumerate(corners):
                assert torch.equal(file.get_slice(f"{i}.weight")[:2, -2:], corner), i
        before = resident_bytes()
        with Peak() as peak:
            found = zeropp.full_state_dict(model, rank_0_only=True)
        assert len(found) == (LAYERS if first else 0)
        grown = peak.bytes - before
        assert first or grown < BUCKET_BYTES + SLACK_BYTES, grown / TENSOR_BYTES


@on_ranks(2)
@pytest.mark.parametrize("kind", ["tp", "dp"])
def test_full_storage_ends_an_export_on_every_rank(kind: str) -> None:
    """Rank 0 fails in the middle of a file whose tensors still travel: both raise its sentence, and both go on together."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(kind,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    if kind == "tp":
        zeropp.parallel.tensor(model, mesh["tp"], {"0": ColwiseParallel()})
    model, _ = zeropp.prepare(model, None, zeropp.Config(stage=3), mesh=mesh)
    with scratch() as path:
        before, files.disk = files.disk, _Full() if dist.get_rank() == 0 else files.disk
        try:
            with pytest.raises(zeropp.TierError, match=r"model\.safetensors.*No space left"):
                zeropp.export(model, path)
        finally:
            files.disk = before
        assert of_all_ranks(len(zeropp.full_state_dict(model))) == [4, 4]
        zeropp.export(model, path)
        dist.barrier()
        with safe_open(Path(path) / "model.safetensors", "pt") as file:
            assert sorted(file.keys()) == ["0.bias", "0.weight", "1.bias", "1.weight"]


class _Full(files.Disk):
    """A disk without space."""

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        raise OSError(28, "No space left on device")
