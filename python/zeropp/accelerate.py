# SPDX-License-Identifier: Apache-2.0
"""An ``accelerate.Accelerator`` that prepares models with zeropp instead of wrapping them in DDP.

    from zeropp.accelerate import ZeroppAccelerator      # in place of: from accelerate import Accelerator
    accelerator = ZeroppAccelerator(zeropp={"stage": 3}, gradient_accumulation_steps=2)

Everything else of the loop stays.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend, InitProcessGroupKwargs, recursively_apply
from torch import nn

import zeropp
from zeropp import checkpoint, zero  # their modules are loaded when the first model is prepared
from zeropp.comm import default_group
from zeropp.errors import ConfigError

logger = logging.getLogger("zeropp")
FOLDER = "zeropp"  # in the folder of save_state: shards and optimizer state of the first model


def plain_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate wrapped."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _begin_group(handlers: Iterable[Any]) -> None:
    """On CPUs the ranks meet over zeropp, unless a handler names another backend, or another way to meet."""
    asked = next((one for one in handlers if isinstance(one, InitProcessGroupKwargs)), InitProcessGroupKwargs())
    if asked.backend in (None, InitProcessGroupKwargs.backend) and asked.init_method is None:
        default_group.begin(asked.timeout)


class _PreparedOptimizer(AcceleratedOptimizer):
    """The loss scale is the optimizer's own: schedulers ask here whether a step was skipped for it."""

    @property
    def step_was_skipped(self) -> bool:
        return bool(self.optimizer.overflow)

    def flush(self) -> None:
        """With ``Offload(delayed_update=)``, give the model the newest weights. Collective; call it before an evaluation, and after the last step."""
        self.optimizer.flush()


class ZeroppAccelerator(Accelerator):
    """Only the verbs that meet partitioned state differ; the distributed type stays what the machine gives.

    Args:
        zeropp: a :class:`zeropp.Config`, or what ``Config.from_json`` reads: a path, JSON text, a mapping; None: stage 3.
            Accelerate accumulates and the loop clips, so the configuration does neither. A precision in it is that of the
            parameters, and takes the place of ``mixed_precision``.
        more: the arguments of ``Accelerator``. On a machine without a GPU ``cpu=True`` is the default.
    """

    zeropp_config: zeropp.Config | None = None
    zeropp_shared: int = 1
    """How many ranks work on one batch, while a loader is prepared, or while what they have alike is gathered."""
    zeropp_mesh: Any = None
    """All ranks, with names, where some share matrices."""
    zeropp_before: Callable[[Any], Any] | None = None
    """Called with each model before it is partitioned."""
    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *, zeropp: Any = None, **more: Any) -> None:
        from zeropp.config import as_config  # loaded with the first configuration

        config = as_config(zeropp, "ZeroppAccelerator")
        for name, default, instead in (
            ("accumulate", 1, f"ZeroppAccelerator(gradient_accumulation_steps={config.accumulate})"),
            ("clip", None, "accelerator.clip_grad_norm_"),
        ):
            if getattr(config, name) != default:
                raise ConfigError(
                    f"{name}: {getattr(config, name)!r} in the configuration; with Accelerate that is {instead}"
                )
        low, mixed = config.dtype_name, more.get("mixed_precision")
        if low is not None:
            if str(mixed) not in ("None", "no", low):
                raise ConfigError(
                    f"precision is {low!r} in the configuration, and mixed_precision={mixed!r}; give one of them"
                )
            more["mixed_precision"] = "no"
        if not torch.accelerator.is_available():
            more.setdefault("cpu", True)
        if more.get("cpu"):
            _begin_group(more.get("kwargs_handlers") or ())
        super().__init__(**more)
        self.zeropp_config = config

    @property
    def num_processes(self) -> int:
        return self.state.num_processes // self.zeropp_shared  # type: ignore[no-any-return]

    @property
    def process_index(self) -> int:
        return self.state.process_index // self.zeropp_shared  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def sharing(self, ranks: int) -> Iterator[None]:
        """Inside the block, so many consecutive ranks count as one: loaders give them one batch, and ``gather`` takes it once."""
        before, self.zeropp_shared = self.zeropp_shared, ranks
        try:
            yield
        finally:
            self.zeropp_shared = before

    def gather(self, tensor: Any) -> Any:
        """Do as upstream; of ranks that share a batch the first one's."""
        found = super().gather(tensor)
        return found if self.zeropp_shared == 1 else recursively_apply(self._first_of_each, found)

    def _first_of_each(self, gathered: torch.Tensor) -> torch.Tensor:
        by_rank = gathered.view(self.state.num_processes, -1, *gathered.shape[1:])
        return by_rank[:: self.zeropp_shared].flatten(0, 1)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Do as upstream; models are partitioned in place, each with the optimizer among ``args`` that holds its parameters."""
        optimizers = [plain_optimizer(one) for one in args if isinstance(one, torch.optim.Optimizer)]
        for one in args:
            if isinstance(one, nn.Module):
                self._partition(one, _optimizer_of(one, optimizers))
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Do as upstream: autocast, but no wrapper; where Accelerate would compile the model, its repeated blocks are compiled, in place."""
        self._partition(model, None)
        plugin = self.state.dynamo_plugin
        backend, plugin.backend = plugin.backend, DynamoBackend.NO
        try:
            # evaluation_mode keeps what concerns the model alone (autocast), and leaves DDP out.
            prepared = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        finally:
            plugin.backend = backend
        if backend != DynamoBackend.NO:
            _compile_blocks(model, plugin.to_kwargs())
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Return the state as upstream; it is where its shards are."""
        if not isinstance(plain_optimizer(optimizer), zero.step.optimizer.ZeroOptimizer):
            raise ConfigError(
                "the optimizer was prepared without its model; give both to one accelerator.prepare(model, optimizer)"
            )
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        prepared.__class__ = _PreparedOptimizer
        return prepared

    def _partition(self, model: nn.Module, optimizer: Any) -> None:
        if not zero.prepare.is_prepared(model):
            config = zeropp.Config() if self.zeropp_config is None else self.zeropp_config
            if self.zeropp_before is not None:
                self.zeropp_before(model)
            placed = zero.model.accelerator.placed(config, self.device)
            zeropp.prepare(model, optimizer, placed, mesh=self.zeropp_mesh)
        elif optimizer is not None and not isinstance(optimizer, zero.step.optimizer.ZeroOptimizer):
            zero.prepare.attach(model, optimizer)
        from zeropp.nn.generation import gather_for_generation

        gather_for_generation(model)

    def _prepared_optimizers(self) -> list[Any]:
        found = [plain_optimizer(one) for one in self._optimizers]
        return [one for one in found if isinstance(one, zero.step.optimizer.ZeroOptimizer)]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Do as upstream; with fp16 the loss is scaled by the optimizer that will step on it."""
        with zero.step.optimizer.scaled_for(self._prepared_optimizers(), loss) as scaled:
            super().backward(scaled, **kwargs)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every element of the gradients of the model that owns ``parameters``, on every rank's shards."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = self._optimizer_for(parameters, "clip_grad_value_")
        if optimizer is None:
            super().clip_grad_value_(parameters, clip_value)
        else:
            optimizer.clip_grad_value_(float(clip_value))

    def _optimizer_for(self, parameters: list[Any], verb: str) -> Any:
        """Return the optimizer of the model that owns these parameters, or None where none of them is partitioned."""
        refs = [ref for ref in map(zero.model.parameter.ref_of, parameters) if ref is not None]
        if not refs:
            return None
        for optimizer in self._prepared_optimizers():
            if optimizer._engine is refs[0].engine:
                return optimizer
        raise ConfigError(f"{verb}: the model of these parameters has no optimizer that this accelerator prepared")

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Return the norm over all ranks' shards, as a tensor; gradients are scaled in the step."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = self._optimizer_for(parameters, "clip_grad_norm_")
        if optimizer is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return torch.as_tensor(optimizer.clip_grad_norm_(max_norm, norm_type=float(norm_type)))

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Stages 0 and 1 accumulate without communication; 2 and 3 reduce every micro-step, which keeps gradients split."""
        if zero.prepare.is_prepared(model) and zero.engine.engine_of(model).stage <= 1:
            with zeropp.no_sync(model):
                yield
        else:
            yield

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _partitioned_apart(self) -> Iterator[list[tuple[str, nn.Module, Any]]]:
        """Yield (folder, model, its optimizer) of each partitioned model; upstream's own lists lack them meanwhile."""
        models: list[Any] = self._models
        optimizers: list[Any] = self._optimizers
        of = {id(one._engine): one for one in self._prepared_optimizers()}
        ours = [one for one in models if zero.prepare.is_prepared(one)]
        self._models = [one for one in models if not zero.prepare.is_prepared(one)]
        self._optimizers = [
            one for one in optimizers if not isinstance(plain_optimizer(one), zero.step.optimizer.ZeroOptimizer)
        ]
        try:
            yield [
                (FOLDER if i == 0 else f"{FOLDER}_{i}", model, of.get(id(zero.engine.engine_of(model))))
                for i, model in enumerate(ours)
            ]
        finally:
            self._models, self._optimizers = models, optimizers

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> Any:
        """Save as upstream, but each partitioned model and its optimizer in a folder of their own (``zeropp``, ``zeropp_1``, ...), as
        shards. Hooks of ``register_save_state_pre_hook`` get the other models only."""
        with self._partitioned_apart() as ours:
            where = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
            for folder, model, optimizer in ours:
                zeropp.save(Path(where) / folder, model, optimizer, keep=1)
        return where

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        """Load what :meth:`save_state` wrote, on any number of ranks and at any stage."""
        found: list[Any] = []
        handle = self.register_load_state_pre_hook(lambda models, folder: found.append(folder))
        try:
            with self._partitioned_apart() as ours:
                super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
                for folder, model, optimizer in ours:
                    with checkpoint.random_state.kept():  # upstream restores it from its own files
                        zeropp.load(Path(found[0]) / folder, model, optimizer)
        finally:
            handle.remove()

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Whole values on the CPU, on every rank; collective."""
        plain = self.unwrap_model(model)
        return (
            zeropp.full_state_dict(plain) if zero.prepare.is_prepared(plain) else super().get_state_dict(model, unwrap)
        )


_compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _compile_blocks(model: nn.Module, how: dict[str, Any]) -> None:
    """Once a model: each repeated block is a graph without a break, between which parameters come and go."""
    if model in _compiled:
        return
    blocks = zero.model.units._repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"torch.compile: {type(model).__name__} has no repeated blocks (a ModuleList or Sequential with layers of one class), and a "
            "partitioned model is compiled block by block; leave compilation out"
        )
    for block in blocks:
        block.compile(**how)
    _compiled.add(model)
    logger.info("zeropp: torch.compile of %d blocks of %s in place of the whole", len(blocks), type(model).__name__)


def _optimizer_of(model: nn.Module, optimizers: list[Any]) -> Any:
    mine = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            return optimizer
    return None
