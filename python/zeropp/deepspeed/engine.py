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
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropp.config import Config
from zeropp.config.reading import read_json
from zeropp.deepspeed import schedules
from zeropp.deepspeed.dimensions import Dimensions, replace, take
from zeropp.deepspeed.efficiency import DataEfficiency, for_model, take_rates
from zeropp.deepspeed.facts import ThroughputTimer, logger
from zeropp.deepspeed.optimizers import build
from zeropp.errors import ConfigError, Error, what_it_is
from zeropp.zero.access import no_sync
from zeropp.zero.engine import engine_of
from zeropp.zero.model.forward import cast_inputs
from zeropp.zero.model.units import plan_units
from zeropp.zero.prepare import attach, is_prepared, prepare

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
"""One loss may be of several models: each engine learns which backwards were divided for it."""


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
    mpu: Any = None,
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
        mpu: the groups that ``UlyssesSPAttentionHF.register_with_transformers`` returned.

    Returns:
        (engine, optimizer, loader or None, scheduler or None)

    Raises:
        zeropp.ConfigError: for every key that is not supported, with its path.
    """
    model = _module(model)
    given = _configuration(args, config, config_params)
    keys = _keys_of(given)
    whole = dict(keys)
    optimizer_section, scheduler_section = keys.pop("optimizer", None), keys.pop("scheduler", None)
    rates, dimensions = take_rates(keys, lr_scheduler or scheduler_section), take(keys, model, mpu)
    sums, refuses_unused, every = _sums(keys), _refuses_unused(keys), _steps_per_print(keys)
    settings = given if isinstance(given, Config) else Config.from_json(keys, ranks=dimensions.batches)
    client = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    model_parameters = replace(client, model_parameters, dimensions.cut(model))
    optimizer = client or _make_optimizer(optimizer, model, model_parameters, optimizer_section)
    # The engine accumulates, so that a caller may end a step early (set_gradient_accumulation_boundary).
    alone = dataclasses.replace(for_model(model, settings), accumulate=1)
    evaluates = optimizer is None and settings.stage == 0 and not is_prepared(model)
    if not evaluates:
        optimizer = _prepare(model, optimizer, alone, dimensions)
    micro = _micro_batch(keys, settings.accumulate, dimensions)
    scheduler = _make_scheduler(lr_scheduler, optimizer, scheduler_section)
    engine = (engine_class or Engine)(model, optimizer, scheduler, settings, micro, whole)
    engine._set_dimensions(dimensions)
    if evaluates:
        engine._evaluate_with(alone)
    engine._print_every, engine.collate_fn, engine.training_data = every, collate_fn, training_data
    engine._factor, engine._refuses_unused = float(engine.world_size) if sums else 1.0, refuses_unused
    engine.client_optimizer = client
    engine._take_rates(rates)
    loader = None if training_data is None else engine.deepspeed_io(training_data, collate_fn=collate_fn)
    engine.training_dataloader = loader
    return engine, optimizer, loader, engine.lr_scheduler


def _module(model: Any) -> nn.Module:
    """Return the model, or refuse what is none."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize: model is {what_it_is(model)}; give the torch.nn.Module to train")
    return model


def _configuration(args: Any, config: Any, config_params: Any) -> Any:
    """Return the configuration as it was given, from the first of the three arguments that has one."""
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None)
    if given is None:
        raise ConfigError("initialize: no configuration; give config=, a path, a dict, or args.deepspeed_config")
    return given


def _keys_of(given: Any) -> dict[str, Any]:
    """Return the keys of a file, JSON text or mapping; a Config has none."""
    return {} if isinstance(given, Config) else dict(read_json(given))


def _make_optimizer(make: Any, model: nn.Module, parameters: Any, section: Any) -> Any:
    """Return the optimizer that a function makes, or else the file's section; None where the file has none."""
    if parameters is None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return make(parameters) if callable(make) else build(section, parameters)


def _prepare(model: nn.Module, optimizer: Any, settings: Config, dimensions: Dimensions) -> Any:
    """Prepare the model, or give a prepared one this optimizer in place of an earlier engine's. Return the optimizer."""
    if is_prepared(model):
        _check_again(model, settings)
        if optimizer is not None:
            attach(model, optimizer)
            return optimizer
    return prepare(model, optimizer, settings, mesh=dimensions.mesh)[1]


def _make_scheduler(given: Any, optimizer: Any, section: Any) -> Any:
    """Return the scheduler that was given or that a function makes, or else the file's; None without any."""
    if callable(given) and not hasattr(given, "step"):
        return given(optimizer)
    if given is None and section is not None and optimizer is not None:
        return schedules.build(section, optimizer)
    return given


def _steps_per_print(keys: dict[str, Any]) -> int | None:
    """Taken out of the file: this engine does it, by a line of the logger "DeepSpeed" every so many steps."""
    every = keys.pop("steps_per_print", None)
    if every in (None, "auto") or every == float("inf"):
        return None
    if isinstance(every, bool) or not isinstance(every, (int, float)) or every < 1 or every != int(every):
        raise ConfigError(f"steps_per_print: {every!r} is not allowed; wanted a whole number of steps, or leave it out")
    return int(every)


def _sums(keys: dict[str, Any]) -> bool:
    """Take the key out of the file. Return True if gradients are summed over the ranks, and not averaged."""
    if keys.get("gradient_allreduce_op") != "sum":
        return False
    del keys["gradient_allreduce_op"]
    return True


def _refuses_unused(keys: dict[str, Any]) -> bool:
    """Take the key out of the file. Return True if a step is an error where a trained parameter has no gradient."""
    section = keys.get("zero_optimization")
    if not isinstance(section, Mapping) or section.get("ignore_unused_parameters") is not False:
        return False
    keys["zero_optimization"] = {key: value for key, value in section.items() if key != "ignore_unused_parameters"}
    return True


def _micro_batch(keys: Mapping[str, Any], accumulate: int, dimensions: Dimensions) -> int | None:
    micro, train = keys.get("train_micro_batch_size_per_gpu"), keys.get("train_batch_size")
    if isinstance(micro, int):
        return micro
    ranks = dimensions.batches or (dist.get_world_size() if dist.is_initialized() else 1)
    return train // (accumulate * ranks) if isinstance(train, int) else None


def _check_again(model: nn.Module, settings: Config) -> None:
    """Check that a model keeps the configuration that it was prepared with (by an engine without an optimizer)."""
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


class UnusedParameterError(Error, AssertionError):
    """A trained parameter had no part in a step. DeepSpeed's tests and scripts wait for an AssertionError."""


class Engine(DataEfficiency):
    """The engine that ``deepspeed.initialize`` returns: the model, its optimizer and its schedule, stepped together.

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
        self._last: bool | None = None  # what set_gradient_accumulation_boundary said last
        self.optimizer, self.lr_scheduler, self.zeropp_config = optimizer, scheduler, config
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self._micro_batch = micro_batch
        self._norm: float | torch.Tensor | None = None
        self._applied = self.is_compiled = False
        self._print_every: int | None = None
        self._factor, self._refuses_unused = 1.0, False
        self._later: Config | None = None  # what the module will be prepared with, once that matters
        self._divided = self._counted = self._scaled = 0  # backwards: of this step, until the last one, from scale()
        self.client_optimizer = self.training_data = self.training_dataloader = self.collate_fn = None
        self.losses: Any = None
        self._begin_facts()
        _engines.add(self)

    def _set_dimensions(self, dimensions: Dimensions) -> None:
        """Take what the file and the model say of other dimensions; count batches by it."""
        dimensions.attach(self.module)
        self._take_mesh(dimensions.mesh)
        self.tput_timer = ThroughputTimer(self.train_batch_size())

    @property
    def basic_optimizer(self) -> Any:
        """There the optimizer inside of ZeRO's; here both are one object."""
        return self.optimizer

    # -- a model that is only evaluated ------------------------------------------------------------------------------------

    def _evaluate_with(self, settings: Config) -> None:
        """Convert the module, and give all ranks rank 0's values. It is partitioned when gradients or a checkpoint of this engine are
        asked for. Until then another engine may take it for training, at its stage (TRL does)."""
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.dtype_name or "")
        if low is not None:  # for good, as in DeepSpeed: a later training starts from the rounded values
            for plan in plan_units(self.module, settings.units, low):
                for parameter in plan.params:
                    parameter.data = parameter.data.to(plan.dtype)
            cast = functools.partial(cast_inputs, low)
            self.module.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)
        if self.world_size > 1:
            for one in (*self.module.parameters(), *self.module.buffers()):
                dist.broadcast(one.detach(), 0)
        self._later = settings

    def _prepare_now(self) -> None:
        settings, self._later = self._later, None
        if settings is not None and not is_prepared(self.module):
            prepare(self.module, None, settings)

    # -- steps -------------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            if self._later is not None:
                self._prepare_now()
            args, kwargs = self._arguments(args, kwargs)
            self.tput_timer.start()
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """``loss`` is that of one micro-batch; the mean over the accumulated ones is taken here, unless ``scale_wrt_gas`` is false:
        then the caller has divided it. Returns the loss that was differentiated, before fp16 scales it."""
        accumulate = self.zeropp_config.accumulate if scale_wrt_gas else 1
        part = loss / accumulate if accumulate > 1 else loss
        scaled = part * self._factor if self._factor != 1.0 else part
        waits = not self.is_gradient_accumulation_boundary() and self.zeropp_config.stage <= 1
        before = [(one, one._backwards()) for one in _engines]
        with no_sync(self.module) if waits else contextlib.nullcontext():
            if self.optimizer is None:
                scaled.backward(retain_graph=retain_graph)
            else:
                self.optimizer.backward(scaled, retain_graph=retain_graph)  # scales the loss in fp16
        for one, count in before:
            one._divided += one._backwards() - count
        return part

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """For ``engine.scale(loss).backward()``, in place of :meth:`backward`: the loss times the scale of fp16."""
        if self.optimizer is None:
            raise ConfigError("engine.scale: " + _NO_OPTIMIZER)
        self._scaled += 1
        factor = self.optimizer.loss_scale
        return loss if factor == 1.0 else loss.float() * factor

    def _backwards(self) -> int:
        return int(engine_of(self.module).core.backwards) if is_prepared(self.module) else 0

    def _divide_others(self) -> None:
        """As there, ``loss.backward()`` by the caller is a micro-batch like any other: its gradients count for one part of
        ``gradient_accumulation_steps``."""
        engine = engine_of(self.module)
        others = self._backwards() - self._counted - self._divided
        if others and engine.scaler.enabled and self._scaled == others:
            engine.scaler.backwards += others
        accumulate = self.zeropp_config.accumulate
        if others <= 0 or accumulate == self._factor == 1:
            return
        if self._divided or engine.schedule.in_backward:
            raise Error(
                f"engine.step: {others} of {others + self._divided} backwards of this step were loss.backward(), whose gradients are not divided by "
                f"gradient_accumulation_steps {accumulate}; call engine.backward(loss) in all of them"
            )
        for gradient in self.optimizer._held_gradients(changes=True):
            gradient.mul_(self._factor / accumulate)
        engine.norm = None

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """After every micro-batch; updates at the last one of ``gradient_accumulation_steps``. ``lr_kwargs`` go to the schedule."""
        if self.optimizer is None:
            raise ConfigError("engine.step: " + _NO_OPTIMIZER)
        last = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._applied = False
        if last:
            self._divide_others()
            self._update(dict(lr_kwargs or {}))
        self.tput_timer.stop(global_step=last)

    def _require_all_used(self) -> None:
        engine = engine_of(self.module)
        engine.core.collect_grads()
        for unit in engine.units:
            for entry, gradient in zip(unit.params, _has_gradients(engine, unit), strict=True):
                if entry.param.requires_grad and unit.trainable and not gradient:
                    raise UnusedParameterError(
                        f"engine.step: parameter '{entry.names[0]}' had no part in the losses of this step, and the file says "
                        '"ignore_unused_parameters": false; use it, freeze it, or take that key out'
                    )

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        if self._refuses_unused:
            self._require_all_used()
        self.optimizer.step()
        self._counted, self._divided, self._scaled = self._backwards(), 0, 0
        self._applied = not self.optimizer.overflow
        self.skipped_steps += not self._applied
        measured = engine_of(self.module).norm
        if self._applied:  # a step that is skipped has no norm: the last one stands
            self._norm = None if measured is None else measured[0]
        self.optimizer.zero_grad()
        self.global_steps += 1
        self.global_samples += self.train_batch_size() or 0
        if self.lr_scheduler is not None and self._applied:
            self.lr_scheduler.step(**lr_kwargs)
        if self._print_every is not None and self.global_steps % self._print_every == 0 and self.global_rank == 0:
            logger.info("step=%d, skipped=%d, lr=%s", self.global_steps, self.skipped_steps, self.get_lr())

    def was_step_applied(self) -> bool:
        """True if the latest :meth:`step` changed parameters: not between boundaries, nor where fp16 skipped it."""
        return self._applied

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.zeropp_config.accumulate == 0 if self._last is None else self._last

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the micro-batch at hand, and those after it, are the last one of their step, whatever the counting says."""
        self._last = bool(is_boundary)

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Backward has reduced them already, except inside of ``no_sync``.

        Raises:
            zeropp.Error: gradients wait for a backward outside of ``no_sync``.
        """
        if self.is_gradient_accumulation_boundary() and engine_of(self.module).core.grads_pending():
            raise Error(
                "engine.allreduce_gradients: gradients of the last backward were accumulated inside no_sync, and the next backward outside "
                "reduces them; run the last backward of a step outside of no_sync"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate without communication."""
        self._prepare_now()
        with no_sync(self.module):
            yield

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Refuse what is not host memory; without an accelerator all states are there already. To disk: :func:`zeropp.offload_states`."""
        where = str(getattr(device, "value", device))
        if where not in ("cpu", "none"):
            raise ConfigError(f'offload_states: device {where!r} is not allowed; wanted "cpu"')

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undoes :meth:`offload_states`."""

    def empty_partition_cache(self) -> None:
        """Units are released as soon as they are used: no copy of them waits."""

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Any = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
        **kwargs: Any,
    ) -> None:
        """Call ``module.compile``. A ``schedule`` is of DeepCompile, which is refused, as is compiled autograd."""
        if schedule is not None or compiled_autograd_enabled:
            name = "schedule" if schedule is not None else "compiled_autograd_enabled"
            raise ConfigError(f"engine.compile: {name} is not supported by zeropp; leave it out")
        self.module.compile(backend=backend, **(compile_kwargs or {}), **kwargs)
        self.is_compiled = True

    def destroy(self) -> None:
        """Do nothing: nothing is held beyond the model and the optimizer."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step, before clipping."""
        return None if self._norm is None else float(self._norm)

    # -- facts -------------------------------------------------------------------------------------------------------------

    def steps_per_print(self) -> int | None:
        return self._print_every

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """More or fewer micro-batches a step, from the next one on; a micro-batch keeps its size.

        Raises:
            ValueError: not a multiple of the micro-batch times the ranks.
        """
        each = (self._micro_batch or 0) * self.batches
        if each == 0 or train_batch_size < 1 or train_batch_size % each:
            raise ValueError(
                f"set_train_batch_size: {train_batch_size} is not allowed; wanted a multiple of {each}, the micro-batch {self._micro_batch} times "
                f"{self.batches} ranks"
            )
        self.zeropp_config = dataclasses.replace(self.zeropp_config, accumulate=train_batch_size // each)
        self.tput_timer.batch_size = train_batch_size

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the micro-batch size for :meth:`deepspeed_io` and the counting from now on; the number of micro-batches a step stays."""
        self._micro_batch = int(micro_batch_size)
        self.tput_timer.batch_size = self.train_batch_size() or 1

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return a loader of this rank's micro-batches; in the order of the dataset for the routes "eval" and "predict"."""
        size, streams = self._loader_size(dataset, batch_size), self.is_iterable_style_dataset(dataset)
        shuffle = route == "train" and not streams
        common = {
            "dataset": dataset, "collate_fn": collate_fn or self.collate_fn,
            "pin_memory": pin_memory and torch.accelerator.is_available(),
        }  # fmt: skip
        if shuffle and data_sampler is None and self._efficiency.curriculum is not None:
            return self._curriculum_loader(self._efficiency.curriculum, size, num_local_io_workers, **common)
        if data_sampler is None and not streams:
            data_sampler = self._sampler(dataset, shuffle)
        drop = self.config.get("dataloader_drop_last", False) is True
        return torch.utils.data.DataLoader(
            batch_size=size, shuffle=shuffle and data_sampler is None, sampler=data_sampler, drop_last=drop,
            num_workers=num_local_io_workers or 0, **common,
        )  # fmt: skip

    def _loader_size(self, dataset: Any, batch_size: int | None) -> int:
        """Return the samples of a micro-batch; refuse what is no dataset, or a file that does not say it."""
        if not (self.is_iterable_style_dataset(dataset) or self.is_map_style_dataset(dataset)):
            raise ValueError(
                f"training_data: {type(dataset).__name__} is not a dataset of torch; wanted __getitem__ and __len__, or an IterableDataset"
            )
        size = batch_size or self._micro_batch
        if size is None:
            raise ConfigError(
                "training_data needs train_micro_batch_size_per_gpu, or train_batch_size, in the configuration"
            )
        return size

    def _sampler(self, dataset: Any, shuffle: bool) -> Any:
        """Return what gives this rank its part of a dataset; None for one rank, which takes all of it."""
        copies, place = self._data_place()
        if copies == 1:
            return None
        return torch.utils.data.DistributedSampler(dataset, copies, place, shuffle=shuffle)


def _has_gradients(engine: Any, unit: Any) -> list[bool]:
    if engine.local_grads:
        with torch._C.DisableTorchFunctionSubclass():
            return [entry.param.grad is not None for entry in unit.params]
    found = engine.gradient_shard(unit)
    return [False] * len(unit.params) if found is None else found[1]


_NO_OPTIMIZER = 'there is no optimizer; give optimizer=, or "optimizer" in the configuration'
