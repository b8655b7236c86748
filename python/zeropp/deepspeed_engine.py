# SPDX-License-Identifier: Apache-2.0
"""``zeropp.initialize``: DeepSpeed's engine over :func:`zeropp.prepare`, for scripts that are written for it.

    engine, optimizer, loader, scheduler = zeropp.initialize(model=model, config="ds_config.json")
    for batch in loader:
        engine.backward(engine(batch))
        engine.step()

One call of ``step`` a micro-batch, as there; accumulation, clipping, the optimizer and the schedule come from the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeropp
from zeropp import deepspeed_schedules
from zeropp.config import Config, _read_json
from zeropp.deepspeed_optimizers import build
from zeropp.errors import ConfigError
from zeropp.wording import what_it_is
from zeropp.zero.agree import Ranks
from zeropp.zero.engine import engine_of
from zeropp.zero.prepare import _cast_inputs, is_prepared
from zeropp.zero.units import plan_units

LATEST = "latest"
logger = logging.getLogger("DeepSpeed")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    config_params: Any = None,
    *,
    engine_class: type[Engine] | None = None,
) -> tuple[Engine, Any, Any, Any]:
    """DeepSpeed's ``initialize``, with its names and its order of results.

    Args:
        args: a namespace whose ``deepspeed_config`` names the file, where ``config`` is not given.
        model: any module; partitioned in place.
        optimizer: a torch optimizer, or a function of the parameters that makes one; None: what the file says.
        model_parameters: parameters, or groups of them, for the optimizer that is made here; None: all that are trained.
        training_data: a dataset; gives a loader of micro-batches, split over the ranks.
        lr_scheduler: a scheduler, or a function of the optimizer that makes one; None: what the file says.
        dist_init_required: True or None starts a process group where none runs; False leaves that to :func:`zeropp.prepare`.
        collate_fn: for the loader.
        config: a path, JSON text or mapping, DeepSpeed's or zeropp's; or a :class:`zeropp.Config`. ``config_params`` is its old name.
        engine_class: a subclass of :class:`Engine` to return; None: that one.

    Returns:
        (engine, optimizer, loader or None, scheduler or None)

    Raises:
        zeropp.ConfigError: for every key that is not supported, with its path.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize: model is {what_it_is(model)}; give the torch.nn.Module to train")
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None)
    if given is None:
        raise ConfigError("initialize: no configuration; give config=, a path, a dict, or args.deepspeed_config")
    keys = {} if isinstance(given, Config) else dict(_read_json(given))
    sections = {name: keys.pop(name, None) for name in ("optimizer", "scheduler")}
    micro, every = keys.get("train_micro_batch_size_per_gpu"), _steps_per_print(keys)
    settings = given if isinstance(given, Config) else Config.from_json(keys)
    if optimizer is None or not isinstance(optimizer, torch.optim.Optimizer):
        parameters = (
            [p for p in model.parameters() if p.requires_grad] if model_parameters is None else model_parameters
        )
        optimizer = optimizer(parameters) if callable(optimizer) else build(sections["optimizer"], parameters)
    # The engine accumulates, so that a caller may end a step early (set_gradient_accumulation_boundary).
    alone = dataclasses.replace(settings, accumulate=1)
    if is_prepared(model):
        _check_again(model, alone)
    evaluates = optimizer is None and settings.stage == 0 and not is_prepared(model)
    if not evaluates:
        _, optimizer = zeropp.prepare(model, optimizer, alone)
    if callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        lr_scheduler = lr_scheduler(optimizer)
    elif lr_scheduler is None and sections["scheduler"] is not None and optimizer is not None:
        lr_scheduler = deepspeed_schedules.build(sections["scheduler"], optimizer)
    micro = micro if isinstance(micro, int) else _micro_batch(keys, settings.accumulate)
    engine = (engine_class or Engine)(model, optimizer, lr_scheduler, settings, micro, keys)
    if evaluates:
        engine._evaluate_with(alone)
    engine.steps_per_print = every
    loader = None if training_data is None else engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, optimizer, loader, lr_scheduler


def _steps_per_print(keys: dict[str, Any]) -> int | None:
    """Taken out of the file: this engine does it, by a line of the logger "DeepSpeed" every so many steps."""
    every = keys.pop("steps_per_print", None)
    if every in (None, "auto") or every == float("inf"):
        return None
    if isinstance(every, bool) or not isinstance(every, (int, float)) or every < 1 or every != int(every):
        raise ConfigError(f"steps_per_print: {every!r} is not allowed; wanted a whole number of steps, or leave it out")
    return int(every)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _micro_batch(keys: Mapping[str, Any], accumulate: int) -> int | None:
    train = keys.get("train_batch_size")
    return train // (accumulate * _ranks()) if isinstance(train, int) else None


def _check_again(model: nn.Module, settings: Config) -> None:
    """A model keeps the configuration that it was prepared with (by an engine without an optimizer)."""
    there = engine_of(model).config
    for name in ("stage", "precision", "loss_scale", "comm", "clip", "units"):
        was, wanted = getattr(there, name), getattr(settings, name)
        if was != wanted:
            raise ConfigError(
                f"initialize: this model was initialized before with {name} {was!r}, and keeps it; now {wanted!r} is wanted. Give both calls "
                "the same configuration"
            )
    for name in ("params", "grads", "optimizer", "activations"):
        was, wanted = (getattr(getattr(one.offload, name), "kind", "device") for one in (there, settings))
        if "nvme" in (was, wanted) and was != wanted:
            raise ConfigError(
                f"initialize: this model was initialized before with {name} on {was!r}, and keeps that; now {wanted!r} is wanted. Give both "
                "calls the same configuration"
            )


class Engine(nn.Module):
    """What ``deepspeed.initialize`` returns: the model, its optimizer and its schedule, stepped together.

    Attributes that it has not are the model's. ``module`` is the model itself, the object that was given.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any,
        config: Config,
        micro_batch: int | None,
        keys: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.module = model
        self.config = keys
        """The file, as it was read."""
        self._last: bool | None = None  # what set_gradient_accumulation_boundary said of this micro-batch
        self.optimizer, self.lr_scheduler, self.zeropp_config = optimizer, scheduler, config
        self.global_steps = self.micro_steps = self.skipped_steps = 0
        self._micro_batch = micro_batch
        self._norm: float | None = None
        self.steps_per_print: int | None = None
        self._later: Config | None = None  # what the module will be prepared with, once that matters
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = _ranks()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    # -- a model that is only evaluated ------------------------------------------------------------------------------------

    def _evaluate_with(self, settings: Config) -> None:
        """Nothing is partitioned at stage 0 without an optimizer, so the module stays as it is, with rank 0's values, until somebody
        wants gradients or a checkpoint of this engine: another engine may take it for training, at its stage (TRL does)."""
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.dtype_name or "")
        if low is not None:  # for good, as there: who trains it later starts from the rounded values
            for plan in plan_units(self.module, settings.units, low):
                for parameter in plan.params:
                    parameter.data = parameter.data.to(plan.dtype)
            cast = functools.partial(_cast_inputs, low)
            self.module.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)
        if self.world_size > 1:
            for one in (*self.module.parameters(), *self.module.buffers()):
                dist.broadcast(one.detach(), 0)
        self._later = settings

    def _prepare_now(self) -> None:
        settings, self._later = self._later, None
        if settings is not None and not is_prepared(self.module):
            zeropp.prepare(self.module, None, settings)

    # -- steps -------------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._later is not None and self.training and torch.is_grad_enabled():
            self._prepare_now()
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """``loss`` is that of one micro-batch; the mean over the accumulated ones is taken here, unless ``scale_wrt_gas`` is false:
        then the caller has divided it."""
        accumulate = self.zeropp_config.accumulate if scale_wrt_gas else 1
        part = loss / accumulate if accumulate > 1 else loss
        waits = not self.is_gradient_accumulation_boundary() and self.zeropp_config.stage <= 1
        with zeropp.no_sync(self.module) if waits else contextlib.nullcontext():
            if self.optimizer is None:
                part.backward(retain_graph=retain_graph)
            else:
                self.optimizer.backward(part, retain_graph=retain_graph)  # scales the loss in fp16
        return loss

    def step(self) -> None:
        """After every micro-batch; updates at the last one of ``gradient_accumulation_steps``."""
        if self.optimizer is None:
            raise ConfigError(
                'engine.step: there is no optimizer; give optimizer=, or "optimizer" in the configuration'
            )
        last, self._last = self.is_gradient_accumulation_boundary(), None
        self.micro_steps += 1
        if not last:
            return
        self.optimizer.step()
        self.skipped_steps += bool(self.optimizer.overflow)
        measured = engine_of(self.module).norm
        if not self.optimizer.overflow:  # a step that is skipped has no norm: the last one stands
            self._norm = None if measured is None else measured[0]
        self.optimizer.zero_grad()
        self.global_steps += 1
        if self.lr_scheduler is not None and not self.optimizer.overflow:
            self.lr_scheduler.step()
        if self.steps_per_print is not None and self.global_steps % self.steps_per_print == 0 and self.global_rank == 0:
            logger.info("step=%d, skipped=%d, lr=%s", self.global_steps, self.skipped_steps, self.get_lr())

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.zeropp_config.accumulate == 0 if self._last is None else self._last

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Whether the micro-batch at hand is the last one of its step, whatever the counting says."""
        self._last = bool(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate without communication."""
        self._prepare_now()
        with zeropp.no_sync(self.module):
            yield

    def offload_states(
        self, include: Any = None, device: str = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """As there, to host memory; without an accelerator all states are there already. To disk: :func:`zeropp.offload_states`."""
        if str(device) != "cpu":
            raise ConfigError(f'offload_states: device {device!r} is not allowed; wanted "cpu"')

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undoes :meth:`offload_states`."""

    def compile(self, backend: Any = "inductor", compile_kwargs: Any = None, **kwargs: Any) -> None:
        self.module.compile(backend=backend, **(compile_kwargs or {}), **kwargs)

    def destroy(self) -> None:
        """Nothing is held beyond the model and the optimizer."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)

    def get_global_grad_norm(self) -> float | None:
        """Of the last step, before clipping."""
        return self._norm

    # -- facts -------------------------------------------------------------------------------------------------------------

    def gradient_accumulation_steps(self) -> int:
        return self.zeropp_config.accumulate

    def train_micro_batch_size_per_gpu(self) -> int | None:
        return self._micro_batch

    def train_batch_size(self) -> int | None:
        return (
            None if self._micro_batch is None else self._micro_batch * self.zeropp_config.accumulate * self.world_size
        )

    def gradient_clipping(self) -> float:
        return self.zeropp_config.clip or 0.0

    def zero_optimization_stage(self) -> int:
        return self.zeropp_config.stage

    def bfloat16_enabled(self) -> bool:
        return self.zeropp_config.dtype_name == "bf16"

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, collate_fn: Callable[..., Any] | None = None
    ) -> Any:
        """A loader of this rank's micro-batches."""
        size = batch_size or self._micro_batch
        if size is None:
            raise ConfigError(
                "training_data needs train_micro_batch_size_per_gpu, or train_batch_size, in the configuration"
            )
        sampler: Any = None
        if self.world_size > 1:
            sampler = torch.utils.data.DistributedSampler(dataset, self.world_size, self.global_rank)
        drop = self.config.get("dataloader_drop_last", False) is True
        return torch.utils.data.DataLoader(
            dataset, size, shuffle=sampler is None, sampler=sampler, collate_fn=collate_fn, drop_last=drop
        )

    # -- whole weights -----------------------------------------------------------------------------------------------------

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Always possible; it costs rank 0 the whole model in host memory."""
        return True

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Whole, on rank 0, None elsewhere; collective. (Frameworks call it by this name.)"""
        self._prepare_now()
        trained = {n for n, p in self.module.named_parameters(remove_duplicate=False) if p.requires_grad}
        only = trained.__contains__ if exclude_frozen_parameters else None
        found = zeropp.full_state_dict(self.module, rank_0_only=True, only=only)
        return found if self.global_rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """``save_dir/tag`` in zeropp's format (docs/checkpoint-format.md), and ``save_dir/latest`` names it; collective."""
        self._prepare_now()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        mine = {"global_steps": self.global_steps, "micro_steps": self.micro_steps, "client": dict(client_state or {})}
        scheduler = self.lr_scheduler
        folder = Path(save_dir) / tag
        zeropp.save(
            folder, self.module, self.optimizer, step=self.global_steps, scheduler=scheduler, extra=mine, keep=1
        )
        if save_latest:
            Ranks(engine_of(self.module)).only_rank_0(lambda: _point(Path(save_dir), tag))
        return True

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """The folder that was loaded and the client state; ``(None, {})`` with a warning where ``latest`` is not there. Collective.
        Every parameter is in the checkpoint, frozen ones too, so ``load_module_strict`` has nothing to decide."""
        self._prepare_now()
        if tag is None:
            tag = Ranks(engine_of(self.module)).only_rank_0(lambda: _pointed(Path(load_dir)))
            if tag is None:
                warnings.warn(f"load_checkpoint: no file {Path(load_dir) / LATEST}; nothing was loaded", stacklevel=2)
                return None, {}
        optimizer = self.optimizer if load_optimizer_states and not load_module_only else None
        scheduler = self.lr_scheduler if load_lr_scheduler_states and not load_module_only else None
        found = zeropp.load(Path(load_dir) / tag, self.module, optimizer, scheduler=scheduler)
        mine = found["extra"]
        if not load_module_only:
            self.global_steps, self.micro_steps = mine["global_steps"], mine["micro_steps"]
        return str(Path(load_dir) / tag), mine["client"]

    def save_16bit_model(self, save_dir: Any, save_filename: str = "model.safetensors") -> bool:
        """The whole model for others, as safetensors in the parameters' own type; collective."""
        if save_filename != "model.safetensors":
            raise ConfigError(f"save_16bit_model: {save_filename!r}: the file is model.safetensors; leave the name out")
        self._prepare_now()
        zeropp.export(self.module, save_dir)
        return True


def _point(folder: Path, tag: str) -> None:
    new = folder / f".{LATEST}.new"
    new.write_text(f"{tag}\n", encoding="utf-8")
    new.replace(folder / LATEST)


def _pointed(folder: Path) -> str | None:
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
