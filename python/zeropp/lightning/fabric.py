# SPDX-License-Identifier: Apache-2.0
"""The strategy for Lightning Fabric, made once for each name that it goes by."""

from __future__ import annotations

import contextlib
import functools
import importlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zeropp.errors import ConfigError
from zeropp.lightning.common import (
    load_shards,
    mesh_for,
    mesh_there,
    must_move,
    registered,
    sampler_of,
    save_shards,
    take_config,
)
from zeropp.lightning.parts import full_state, load_full_state, no_sync, partition, parts_of
from zeropp.zero.engine import engine_of
from zeropp.zero.model.accelerator import placed
from zeropp.zero.model.init import construction
from zeropp.zero.step.optimizer import ZeroOptimizer, scaled_for


class _NoSync:
    """``fabric.no_backward_sync(model)``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> Any:
        return no_sync(module) if enabled else contextlib.nullcontext()


@functools.cache
def make_fabric_strategy(package: str) -> Any:
    """Make the class for ``lightning.fabric`` or ``lightning_fabric``; registers its names there."""
    strategies: Any = importlib.import_module(f"{package}.strategies")

    class ZeroppFabricStrategy(strategies.DDPStrategy):
        """``Fabric(strategy="zeropp")``: ``fabric.setup(model, optimizer)`` partitions both, in place.

        Args:
            stage: what is partitioned; see :class:`zeropp.Config`. Not with ``config``.
            config: a :class:`zeropp.Config`, or what ``Config.from_json`` reads: a path, JSON text, a dict.
            tensor_parallel_size: ranks that share matrices. Cut the model over ``fabric.strategy.device_mesh["tensor_parallel"]``, with
                :func:`zeropp.parallel.tensor` or torch's ``parallelize_module``, before its optimizer is built; the ranks of
                ``"data_parallel"`` have different batches.
            more: the other fields of ``zeropp.Config``, and the arguments of ``DDPStrategy``.
        """

        def __init__(
            self, stage: int | None = None, config: Any = None, tensor_parallel_size: int = 1, **more: Any
        ) -> None:
            self.zeropp_config = take_config(stage, config, more)
            super().__init__(**more)
            if self._ddp_kwargs:
                raise ConfigError(f"ZeroppFabricStrategy: unknown argument {next(iter(self._ddp_kwargs))!r}")
            self._device_mesh: Any = None
            self._tensor_ranks = tensor_parallel_size
            self._backward_sync_control = _NoSync()
            self._prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()

        @property
        def device_mesh(self) -> Any:
            """All ranks, as ("data_parallel", "tensor_parallel"); there once the processes run."""
            return mesh_there("ZeroppFabricStrategy", self._device_mesh)

        def setup_environment(self) -> None:
            super().setup_environment()
            self._device_mesh = mesh_for(
                "ZeroppFabricStrategy", self._tensor_ranks, self.world_size, self.root_device.type
            )

        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]:
            """Give ranks that share matrices one batch."""
            return sampler_of(self._device_mesh) or super().distributed_sampler_kwargs

        def module_to_device(self, module: nn.Module) -> None:
            if must_move(module, self.root_device):
                module.to(self.root_device)

        @contextlib.contextmanager
        def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
            """Serve ``with fabric.init_module():`` at stage 3: modules are never whole in memory, unless they are cut."""
            with contextlib.ExitStack() as stack:
                stack.enter_context(super().module_init_context(empty_init))
                if self.zeropp_config.stage == 3 and self._device_mesh is None:
                    stack.enter_context(construction(from_rank_0=True))
                yield

        def setup_module(self, module: nn.Module) -> nn.Module:
            partition(module, [], placed(self.zeropp_config, self.root_device), self._device_mesh)
            self._prepared.add(module)
            return module

        def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
            partition(module, optimizers, placed(self.zeropp_config, self.root_device), self._device_mesh)
            self._prepared.add(module)
            return module, optimizers, scheduler

        def setup_optimizer(self, optimizer: Any) -> Any:
            if not isinstance(optimizer, ZeroOptimizer):
                raise ConfigError(
                    "fabric.setup_optimizers(optimizer): give model and optimizer to one fabric.setup(model, optimizer)"
                )
            return optimizer

        def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
            """Scaled where the precision is fp16. ``fabric.backward(loss, model=...)`` says which model, where several are."""
            models = list(self._prepared) if module is None else [module]
            found = [engine_of(part).optimizer_ref for one in models for part in parts_of(one)]
            with scaled_for([ref() for ref in found if ref is not None and ref() is not None], tensor) as scaled:
                super().backward(scaled, module, *args, **kwargs)

        def clip_gradients_norm(
            self,
            module: nn.Module,
            optimizer: Any,
            max_norm: float,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = True,
        ) -> torch.Tensor:
            norm = optimizer.clip_grad_norm_(float(max_norm), float(norm_type), error_if_nonfinite)
            return torch.as_tensor(norm)

        def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
            optimizer.clip_grad_value_(float(clip_val))

        def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
            """Whole, on rank 0; collective."""
            return full_state(module)

        def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
            """Split over the ranks: it lies beside the file, not in it."""
            return {}

        def load_module_state_dict(self, module: nn.Module, state_dict: Any, strict: bool = True) -> None:
            load_full_state(module, state_dict, strict)

        def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
            path = self.broadcast(path)
            super().save_checkpoint(path, state, storage_options, filter)
            pairs = _pairs(state)
            if pairs:
                save_shards(path, list(pairs.values()), 0, _folders(pairs))

        def load_checkpoint(
            self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
        ) -> dict[str, Any]:
            pairs = _pairs(state)
            held = {id(optimizer) for _, optimizer in pairs.values()}
            rest = {k: v for k, v in state.items() if id(v) not in held} if isinstance(state, Mapping) else state
            left: dict[str, Any] = super().load_checkpoint(path, rest, strict, weights_only)
            if pairs:
                load_shards(path, list(pairs.values()), _folders(pairs))
            if isinstance(state, dict):
                state.update(rest)
                left = {k: v for k, v in left.items() if k not in state}
            return left

        @classmethod
        def register_strategies(cls, strategy_registry: Any) -> None:
            for name, description, arguments in registered():
                strategy_registry.register(name, cls, description=description, override=True, **arguments)

    ZeroppFabricStrategy.register_strategies(strategies.STRATEGY_REGISTRY)
    return ZeroppFabricStrategy


def _pairs(state: Any) -> dict[str, tuple[nn.Module, Any]]:
    """Among the values of a state: each optimizer's key, its model (or the part of a module that it has), and itself."""
    values = state if isinstance(state, Mapping) else {}
    models = [part for one in values.values() if isinstance(one, nn.Module) for part in parts_of(one)]
    optimizers = {str(key): one for key, one in values.items() if isinstance(one, ZeroOptimizer)}
    of = {id(engine_of(model)): model for model in models}
    for optimizer in optimizers.values():
        if id(optimizer._engine) not in of:
            raise ConfigError("the state has an optimizer without its model; put both in it")
    return {key: (of[id(one._engine)], one) for key, one in optimizers.items()}


def _folders(pairs: Mapping[str, Any]) -> list[str]:
    """Return a folder for each optimizer, by its key where there are several."""
    return [""] if len(pairs) == 1 else list(pairs)
