# SPDX-License-Identifier: Apache-2.0
"""``deepspeed.checkpointing``: activations that are computed again in backward, by torch.utils.checkpoint.

DeepSpeed splits the kept inputs between the ranks of one model-parallel group. There is no such group here, so each rank keeps all of
its own, as there with a group of one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _checkpoint

from zeropp.config.reading import read_json
from zeropp.deepspeed.names.accelerator import get_accelerator
from zeropp.deepspeed.names.later import not_built


@dataclass
class _Settings:
    """Settings of :func:`configure` that have an effect without model parallelism."""

    configured: bool = False
    on_cpu: bool = False
    synchronize: bool = False


_now = _Settings()
_KEYS = {  # of the file's section, and the argument that says the same
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}


def configure(mpu_: Any, deepspeed_config: Any = None, **given: Any) -> None:
    """Takes the arguments that DeepSpeed's function has, and the section ``activation_checkpointing`` of a file below them.

    Raises:
        zeropp.ConfigError: model parallelism, or timing of every call (``profile``).
    """
    if mpu_ is not None:
        raise not_built("checkpointing under model parallelism (mpu_)", "give None")
    settings = dict.fromkeys(_KEYS.values())
    if deepspeed_config is not None:
        section = read_json(deepspeed_config).get("activation_checkpointing", {})
        settings |= {_KEYS[key]: value for key, value in section.items() if key in _KEYS}
    for name, value in given.items():
        if name not in settings:
            raise TypeError(
                f"deepspeed.checkpointing.configure: unknown argument {name!r}; known are {', '.join(settings)}"
            )
        settings[name] = value if value is not None else settings[name]
    if settings["profile"]:
        raise not_built("timing of checkpointed parts (profile)", "leave it out, and use torch.profiler")
    if settings["contiguous_checkpointing"] and not (settings["partition_activations"] and settings["num_checkpoints"]):
        raise ValueError("contiguous_checkpointing needs partition_activations=True and num_checkpoints")
    _now.configured, _now.on_cpu = True, bool(settings["checkpoint_in_cpu"])
    _now.synchronize = bool(settings["synchronize"])


def is_configured() -> bool:
    return _now.configured


def reset() -> None:
    """Nothing is kept from one forward to the next."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Nothing to split: the group that would share the activations has one rank."""


def set_num_layers(nlayers: int) -> None:
    """It sizes a buffer of DeepSpeed's, and torch has none."""


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The function's result; what lies inside of it is computed again in backward. With ``checkpoint_in_cpu`` its inputs wait in host
    memory."""
    if _now.synchronize:
        get_accelerator().synchronize()
    keeps: Any = contextlib.nullcontext()
    away = _now.on_cpu and get_accelerator()._name != "cpu"
    if away:
        keeps = torch.autograd.graph.save_on_cpu(pin_memory=True)
    with keeps:
        kwargs.setdefault("use_reentrant", away)  # the other kind keeps inputs where save_on_cpu does not see them
        made = _checkpoint(function, *args, **kwargs)
    if _now.synchronize:
        get_accelerator().synchronize()
    return made


def non_reentrant_checkpoint(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args)


__all__ = [
    "checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset", "set_num_layers",
]  # fmt: skip
