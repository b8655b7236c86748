# SPDX-License-Identifier: Apache-2.0
"""Implementations of the names of deepspeed that use the engine: initialize, process groups, optimizers, parameters. tree.py says
which name leads where; helpers.py has the small things beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import zeropp
from zeropp.checkpoint import random_state, values
from zeropp.config.reading import read_json
from zeropp.deepspeed.dimensions import is_sequences
from zeropp.deepspeed.engine import Engine
from zeropp.deepspeed.engine import initialize as _initialize
from zeropp.deepspeed.names import zero
from zeropp.deepspeed.names.comm import init_distributed
from zeropp.deepspeed.names.finder import VERSION
from zeropp.deepspeed.names.later import not_built as _not_built
from zeropp.deepspeed.names.logs import logger
from zeropp.deepspeed.pipeline import PipelineModule, PipelineSteps
from zeropp.errors import ConfigError

# -- deepspeed ------------------------------------------------------------------------------------------------------------


class DeepSpeedOptimizer:
    """In isinstance checks only: the optimizer that comes back is the one given, adopted in place."""


class DeepSpeedEngine(Engine):
    """:class:`zeropp.deepspeed.engine.Engine`, with what TRL reaches into."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        model = self.module
        zero.mark(model)
        if self.zeropp_config.stage < 3:
            return
        for module in model.modules():
            module.__dict__.setdefault("ds_external_parameters", list)
        if self.optimizer is not None:
            # TRL takes DeepSpeed's hooks off before it generates, and puts them back; zeropp's triggers stay.
            self.optimizer.parameter_offload = SimpleNamespace(
                module=model, forward_hooks=[], backward_hooks=[], _register_deepspeed_module=lambda module: None
            )

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Always possible, so only a file that says no means no: then frameworks save no whole weights."""
        section = self.config.get("zero_optimization", {})
        names = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
        return not any(section.get(name) is False for name in names)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        """As there, random states are left alone (Trainer and Accelerate restore their own), and the client state is None where there
        is no checkpoint."""
        with random_state.kept():
            folder, client_state = super().load_checkpoint(*args, **kwargs)
        return folder, None if folder is None else client_state

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """As there, by the name that scripts read it under."""
        return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)


class PipelineEngine(PipelineSteps, DeepSpeedEngine):
    """The engine of a PipelineModule: ``train_batch`` and ``eval_batch``."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: Any = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, Any, Any, Any]:
    """``deepspeed.initialize``."""
    if not (mpu is None or is_sequences(mpu) or _splits_nothing(mpu)):
        raise _not_built(
            "model parallelism (mpu, mesh_param)",
            'give "sequence_parallel_size" or "tensor_parallel" in the configuration, or cut the model and call zeropp.prepare(mesh=)',
        )
    if mesh_param is not None:
        config = _with_mesh(config if config is not None else config_params, mesh_param)
    zero.end_open_contexts()
    logger.info("DeepSpeed info: version=%s, answered by zeropp %s", VERSION, zeropp.__version__)
    if dist_init_required is not False:
        init_distributed(
            distributed_port=distributed_port
        )  # one process alone, too: frameworks reduce over it afterwards
    engine, *others = _initialize(
        args, model, optimizer, model_parameters, training_data, lr_scheduler, dist_init_required, collate_fn, _nested(config), config_params,
        engine_class=PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine, mpu=mpu,
    )  # fmt: skip
    engine.mpu = mpu
    return engine, *others


def _with_mesh(config: Any, mesh_param: Any) -> dict[str, Any]:
    """Return the keys of a file, with the ranks that share a sequence: the second of (data, sequence)."""
    keys = dict(read_json(config))
    if not isinstance(mesh_param, (tuple, list)) or len(mesh_param) != 2:
        raise ConfigError(f"initialize: mesh_param is {mesh_param!r}; wanted (data, sequence), two numbers of ranks")
    said = keys.setdefault("sequence_parallel_size", int(mesh_param[1]))
    if said != mesh_param[1]:
        raise ConfigError(
            f"initialize: mesh_param is {mesh_param!r}, and sequence_parallel_size {said}; wanted one number of ranks that share a sequence"
        )
    return keys


def _splits_nothing(mpu: Any) -> bool:
    """Return True if a script's groups of ranks are one group of data parallelism: every rank has the whole model."""
    sizes = [getattr(mpu, f"get_{name}_world_size", None) for name in ("tensor_model_parallel", "model_parallel")]
    copies = getattr(mpu, "get_data_parallel_world_size", None)
    whole = [size() == 1 for size in sizes if size is not None]
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return bool(whole) and all(whole) and (copies is None or copies() == ranks)


def _nested(config: Any) -> Any:
    """TRL gives the engine of a reference model keys such as ``"zero_optimization.reduce_bucket_size"``: keys of that section, in
    elements, and sometimes with a fraction."""
    if not isinstance(config, dict) or not any("." in name for name in config):
        return config
    nested = {name: dict(value) if isinstance(value, dict) else value for name, value in config.items()}
    for name in [name for name in nested if "." in name]:
        section, _, key = name.partition(".")
        value = nested.pop(name)
        nested.setdefault(section, {})[key] = (
            int(value) if isinstance(value, float) and key.endswith("_size") else value
        )
    return nested


def add_config_arguments(parser: Any) -> Any:
    """``--deepspeed``, ``--deepspeed_config FILE`` and their like."""
    group = parser.add_argument_group("DeepSpeed", "answered by zeropp")
    group.add_argument("--deepspeed", default=False, action="store_true")
    group.add_argument("--deepspeed_config", default=None, type=str)
    return parser


# -- deepspeed.zero --------------------------------------------------------------------------------------------------------


def _wrapper(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """zero.Init wraps torch's constructors there; nothing is wrapped here."""
    return function


# -- deepspeed.utils -------------------------------------------------------------------------------------------------------


def _values() -> dict[str, Any]:
    """``safe_get_full_grad`` and its relatives: the functions of checkpoint/values.py by their names there."""
    found: dict[str, Any] = {}
    for where, get, put in (
        ("full", values.get_full, values.set_full),
        ("local", values.get_local, values.set_local),
    ):
        for name, kind in (("fp32_param", "value"), ("grad", "grad")):
            found[f"safe_get_{where}_{name}"] = functools.partial(get, kind=kind)
            found[f"safe_set_{where}_{name}"] = functools.partial(put, kind=kind)
        found[f"safe_get_{where}_optimizer_state"] = _state_getter(get)
        found[f"safe_set_{where}_optimizer_state"] = _state_setter(put)
    return found


def _state_getter(get: Callable[..., Any]) -> Callable[..., Any]:
    return lambda parameter, optim_state_key: get(parameter, optim_state_key)


def _state_setter(put: Callable[..., Any]) -> Callable[..., Any]:
    return lambda parameter, value, optim_state_key: put(parameter, value, optim_state_key)


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Copies that do not share one large storage."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(one, device) for one in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    return item


__zeropp__ = zeropp.__version__
globals().update(_values())
