# SPDX-License-Identifier: Apache-2.0
"""The device on which a model computes, and what does not go together with a GPU yet (docs/design/0038-training-on-gpus.md)."""

from __future__ import annotations

import dataclasses
import os

import torch
from torch import nn

from zeropp.comm.job import JobRanks
from zeropp.config import Config, Experts
from zeropp.config.experts import kinds_on
from zeropp.errors import ConfigError
from zeropp.zero.formulas import tier_of
from zeropp.zero.model_state import CPU, shards_on_device

_MOST_RANKS = 64  # ZPP_STREAM_SUM_SOURCES of csrc/comm/stream_sum.h


def device_of(model: nn.Module, config: Config) -> torch.device:
    """Return the device on which units are whole, with its index: ``config.device``, else the one where the model has parameters, else
    this rank's GPU, else the CPU."""
    if config.device is not None:
        return _indexed(torch.device(config.device))
    for parameter in model.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return _indexed(parameter.device)
    return _indexed(torch.device("cuda")) if torch.cuda.is_available() else CPU


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")) if device.type == "cuda" else 0)


def placed(config: Config, device: torch.device) -> Config:
    """Return the configuration for a model that a framework trains on ``device``.

    Raises:
        zeropp.ConfigError: the configuration names another device.
    """
    if config.device is None:
        return dataclasses.replace(config, device=device)
    if _indexed(torch.device(config.device)) != _indexed(device):
        raise ConfigError(
            f"Config(device={str(config.device)!r}): the framework trains on {device}; leave the device out of the configuration, or "
            "choose it there"
        )
    return config


def check_parameter_device(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    """Raise zeropp.ConfigError for a parameter that cannot come to the device."""
    found = parameter.device
    if found.type in ("cpu", "meta") or found == device:
        return
    raise ConfigError(
        f"prepare: parameter '{name}' is on {found}, and the model is to compute on {device}; move the model there, or give "
        f"zeropp.Config(device='{found}')"
    )


def check_accelerator(config: Config, device: torch.device, ranks: JobRanks | None, steps: bool = True) -> None:
    """Raise zeropp.ConfigError for an option that does not work with a model on a GPU yet, or with one on the CPU. ``ranks``: None where
    they are not known; ``steps``: there is an optimizer."""
    there = device.type != "cpu" and shards_on_device(config, device)
    _check_gather(config, there)
    if device.type == "cpu":
        return
    if ranks is not None and ranks.all is not None:
        _check_hosts(config, device, ranks, there)
    if there:
        _check_gradients(config, device)
    else:
        _check_offload(config, device, steps)


def _check_gather(config: Config, there: bool) -> None:
    if config.comm.gather != "auto" and not there:
        raise ConfigError(
            f"prepare: Config.comm.gather {config.comm.gather!r} says how GPUs exchange the shards that they hold, and here the shards are "
            "in memory of the CPU; leave it at 'auto', or keep them on GPUs"
        )


def _check_hosts(config: Config, device: torch.device, ranks: JobRanks, there: bool) -> None:
    """Look at the hosts of the ranks that partition the model. Ranks with other slices or stages may be anywhere."""
    hosts = 1 if ranks.data is None else ranks.data.hosts
    if not there:
        if hosts > 1:
            _check_host_shards(config, device, ranks)
    elif hosts > 1 or (config.comm.gather == "nccl" and ranks.data is not None):
        _check_nccl(config, device, ranks, "over several hosts" if hosts > 1 else "with Comm(gather='nccl')")
    shared = isinstance(config.experts, Experts) and config.experts.shared_by is not None
    if shared and ranks.all.hosts > 1:
        _refuse(
            device,
            f"Experts(shared_by=) in a job of {ranks.all.hosts} hosts is",
            "use a mesh without tp and leave it out, or use one host",
        )


def _one_host(ranks: JobRanks) -> str:
    """Return where the ranks that partition the model have to be, in words."""
    return (
        "one host" if ranks.job is None else "a mesh whose data dimensions lie within a host (pp or tp crosses hosts)"
    )


def _check_host_shards(config: Config, device: torch.device, ranks: JobRanks) -> None:
    """Raise zeropp.ConfigError for what does not work yet with shards on the hosts of GPUs of several hosts."""
    others = {
        "a mesh of several dimensions": ranks.job is not None and ranks.job is not ranks.data,
        "Config.experts": config.experts is not None,
        "Comm(secondary_shard='host')": bool(config.comm.secondary_shard),
        "Precision(stored=)": config.stored_name is not None,
        "Offload(params='nvme')": tier_of(config, "params").kind == "nvme",
    }
    for option, given in others.items():
        if given:
            _refuse(
                device, f"{option} with shards on the hosts of several hosts is",
                f"leave it out, use {_one_host(ranks)}, or keep shards on the GPUs (leave Offload out)",
            )  # fmt: skip


def check_experts(config: Config, device: torch.device, ranks: int) -> None:
    """Raise zeropp.ConfigError for tiers of experts alone that a model on a GPU does not have yet. ``config``: as it was given; ``ranks``:
    that partition the model."""
    own = config.experts.offload if isinstance(config.experts, Experts) else None
    if own is None or device.type == "cpu" or not shards_on_device(config, device):
        return
    on_disk, on_host = kinds_on(own, "nvme"), kinds_on(own, "cpu")
    if on_disk:
        rest = "optimizer='cpu'" if config.stage < 3 else "params='cpu', optimizer='cpu'"
        _refuse(
            device, f"Experts(offload=Offload({on_disk[0]}='nvme')) beside shards there is",
            f"keep the rest on the host with Config(offload=Offload({rest})), or the experts there with "
            "Experts(offload=Offload(optimizer='cpu'))",
        )  # fmt: skip
    if "params" in on_host and (config.stage < 3 or ranks == 1):
        what = f"stage {config.stage}" if config.stage < 3 else "one rank"
        _refuse(
            device, f"Experts(offload=Offload(params='cpu')) with {what}, which keeps parameters whole there, is",
            "use stage 3 on two ranks or more, or leave params out",
        )  # fmt: skip


def _check_nccl(config: Config, device: torch.device, ranks: JobRanks, where: str) -> None:
    """Raise zeropp.ConfigError for what does not work yet where NCCL moves the shards."""
    others = {
        "Experts(offload=)": isinstance(config.experts, Experts) and config.experts.offload is not None,
        "Config.experts in a mesh of several dimensions": config.experts is not None
        and ranks.job is not None
        and ranks.job is not ranks.data,
        "Comm(secondary_shard='host')": bool(config.comm.secondary_shard),
    }
    for option, given in others.items():
        if given:
            instead = f"leave it out, or use {_one_host(ranks)}, where GPUs map each other's memory"
            _refuse(device, f"{option} {where} is", instead)
    if ranks.data.ranks > _MOST_RANKS:
        what = f"a model that {ranks.data.ranks} ranks partition {where} is"
        _refuse(device, what, f"use at most {_MOST_RANKS} ranks")


def _check_gradients(config: Config, device: torch.device) -> None:
    if tier_of(config, "grads").kind == "nvme":
        whole = "" if config.stage < 3 else "params='cpu', "
        _refuse(
            device, "gradients on NVMe beside shards there are",
            f"keep the states on the host, as in Offload({whole}optimizer='cpu', grads='nvme'), or the gradients on the device",
        )  # fmt: skip


def _check_offload(config: Config, device: torch.device, steps: bool) -> None:
    params, states = tier_of(config, "params").kind, tier_of(config, "optimizer").kind
    if states == "device" and steps and config.stored_name is None:
        _refuse(
            device, f"an optimizer that steps there beside parameters on {params!r} is",
            "keep both on the host, as in Offload(params='cpu', optimizer='cpu'), or neither",
        )  # fmt: skip
    if config.stage == 3 and params == "device":
        _refuse(
            device, f"shards of parameters on {params!r} beside states on {states!r} are",
            "keep both on the host, as in Offload(params='cpu', optimizer='cpu'), or neither",
        )  # fmt: skip


def _refuse(device: torch.device, what: str, instead: str) -> None:
    raise ConfigError(f"prepare: the model computes on {device}, where {what} not supported yet; {instead}")
