# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the checkpoint benchmarks: one model with AdamW's states, kept by zeropp and by torch's distributed
checkpoint (DCP) in the same folder of the same disk."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import zeropp
from torch import nn


def trained(parameters: int) -> tuple[nn.Module, Any]:
    """A prepared model of about that many fp32 parameters, after one step of AdamW: 12 bytes a parameter."""
    width = 1024
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(max(1, parameters // width**2))))
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.randn(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return everything that both save, as views."""
    engine, found = optimizer._engine, {}
    for unit in engine.units:
        kinds = {"": unit.own, **{k: v for k, v in engine.optimizer_state(unit).items() if k != "step"}}
        for index, first, elems in unit.pieces():
            for kind, values in kinds.items():
                name = unit.params[index].names[0]
                found[f"{name}/{kind}" if kind else name] = values.detach()[first : first + elems]
    return found


def size_of(state: dict[str, torch.Tensor]) -> int:
    """Bytes."""
    return sum(value.numel() * value.element_size() for value in state.values())


def dcp_save(state: dict[str, torch.Tensor], folder: Path) -> None:
    """DCP as it comes: one file a rank, fsync of the file, no checksum."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)


def dcp_load(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Into the tensors given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(dict(state), checkpoint_id=folder, no_dist=True)


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def clear(folder: Path) -> None:
    """Remove a folder, and let the disk come to rest."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
