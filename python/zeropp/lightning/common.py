# SPDX-License-Identifier: Apache-2.0
"""Shared parts of both strategies: configurations by name, loading and saving beside the consolidated file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeropp
from zeropp.checkpoint import random_state
from zeropp.config import Config, as_config
from zeropp.errors import CheckpointError, ConfigError

SUFFIX = ".zeropp"  # beside name.ckpt: the ranks' shards and the optimizer's state
SWAP_FOLDER = "zeropp-swap"


def registered() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name, description, arguments of the strategy)."""
    yield "zeropp", "zeropp, ZeRO stage 3", {"stage": 3}
    for stage in (1, 2, 3):
        yield f"zeropp_stage_{stage}", f"zeropp, ZeRO stage {stage}", {"stage": stage}
        kinds = ("optimizer", "params") if stage == 3 else ("optimizer",)
        offload = {kind: {"kind": "cpu"} for kind in kinds}
        yield (
            f"zeropp_stage_{stage}_offload",
            f"zeropp, ZeRO stage {stage}, {' and '.join(kinds)} in host memory",
            {"config": {"stage": stage, "offload": offload}},
        )
    offload = {kind: {"kind": "nvme", "path": SWAP_FOLDER} for kind in ("optimizer", "params")}
    yield "zeropp_infinity", "zeropp, ZeRO stage 3, everything on disk", {"config": {"stage": 3, "offload": offload}}


def mesh_for(strategy: str, ranks: Any, world_size: int, device: str) -> Any:
    """Return the mesh of all ranks, ("data_parallel", "tensor_parallel"), or None where no ranks share matrices."""
    if ranks == 1:
        return None
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1 or world_size % ranks:
        raise ConfigError(
            f"{strategy}: tensor_parallel_size {ranks!r}, of a job of {world_size} ranks; wanted a divisor of these"
        )
    return init_device_mesh(device, (world_size // ranks, ranks), mesh_dim_names=("data_parallel", "tensor_parallel"))


def mesh_there(strategy: str, mesh: Any) -> Any:
    """Return the mesh that :func:`mesh_for` made."""
    if mesh is None:
        raise ConfigError(
            f"{strategy}.device_mesh: there is none; it is made with the processes, where tensor_parallel_size is above 1"
        )
    return mesh


def sampler_of(mesh: Any) -> dict[str, Any]:
    """Return what gives ranks that share matrices one batch; nothing where no ranks share matrices (``mesh`` is None)."""
    if mesh is None:
        return {}
    data = mesh["data_parallel"]
    return {"num_replicas": data.size(), "rank": data.get_local_rank()}


def take_config(stage: int | None, config: Any, arguments: dict[str, Any]) -> Config:
    """Return the configuration among a strategy's arguments; what belongs to it is removed from ``arguments``."""
    fields = {name: arguments.pop(name) for name in list(arguments) if name in Config.__dataclass_fields__}
    if stage is not None:
        fields["stage"] = stage
    return config_from(config, fields)


def config_from(config: Any, keywords: Mapping[str, Any]) -> Config:
    """Return one configuration from ``config`` (Config, path, JSON text or mapping) or from keywords, not both."""
    if config is not None and keywords:
        raise ConfigError(f"give config, or keywords of zeropp.Config such as {next(iter(keywords))!r}; not both")
    found = Config(**keywords) if config is None else as_config(config, "ZeroppStrategy")
    for name, default, instead in (("accumulate", 1, "accumulate_grad_batches"), ("clip", None, "gradient_clip_val")):
        value = getattr(found, name)
        if value != default:
            raise ConfigError(
                f"{name}: {value!r} in the configuration; Lightning does that itself: Trainer({instead}=...)"
            )
    return found


def must_move(module: nn.Module, device: torch.device) -> bool:
    """True if any of it is on another device, and a framework has to move it. What is partitioned or was built in shards refuses
    ``module.to``, even to its own device; ``zeropp.prepare`` brings a module to an accelerator, unit by unit."""
    return device.type == "cpu" and any(one.device != device for one in (*module.parameters(), *module.buffers()))


def shards(path: Any, name: str = "") -> Path:
    """Return the folder beside a consolidated file; with a name that of one among several models."""
    return Path(f"{path}{SUFFIX}") / name


def save_shards(path: Any, models: list[tuple[nn.Module, Any]], step: int, names: list[str] | None = None) -> None:
    """Collective: the newest state only, of (model, its optimizer)."""
    for (model, optimizer), name in zip(models, names or _names(models), strict=True):
        zeropp.save(shards(path, name), model, optimizer, step=step, keep=1)


def load_shards(path: Any, models: list[tuple[nn.Module, Any]], names: list[str] | None = None) -> None:
    """Collective: weights and the optimizers' states, exactly."""
    for (model, optimizer), name in zip(models, names or _names(models), strict=True):
        _load(path, name, model, optimizer)


def _names(models: list[tuple[nn.Module, Any]]) -> list[str]:
    return [""] if len(models) == 1 else [str(index) for index in range(len(models))]


def _load(path: Any, name: str, model: nn.Module, optimizer: Any) -> None:
    folder = shards(path, name)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: not there, so {path} was saved without zeropp, and resuming the optimizer from that is not supported; "
            "load its weights (load_from_checkpoint) and start anew"
        )
    with random_state.kept():
        zeropp.load(folder, model, optimizer)


def remove_shards(path: Any) -> None:
    shutil.rmtree(shards(path), ignore_errors=True)
