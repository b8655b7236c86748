# SPDX-License-Identifier: Apache-2.0
"""The strategy for Lightning's Trainer, made once for each name that Lightning goes by."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zeropp.data.cutting import cut_to, length_of
from zeropp.errors import ConfigError
from zeropp.lightning.common import (
    load_shards,
    mesh_for,
    mesh_there,
    must_move,
    registered,
    remove_shards,
    sampler_of,
    save_shards,
    take_config,
)
from zeropp.lightning.parts import full_state, load_full_state, no_sync, partition, parts_of
from zeropp.zero.engine import engine_of
from zeropp.zero.model.accelerator import placed
from zeropp.zero.model.forward import cast_inputs
from zeropp.zero.model.init import construction
from zeropp.zero.step.optimizer import ZeroOptimizer, scaled_for

_AVERAGES = ("StochasticWeightAveraging", "WeightAveraging")  # they read every parameter, every step


@functools.cache
def make_strategy(package: str) -> Any:
    """Make the class for ``lightning.pytorch`` or ``pytorch_lightning``; registers its names there."""
    strategies: Any = importlib.import_module(f"{package}.strategies")
    redirection = importlib.import_module(f"{package}.strategies.strategy")._ForwardRedirection

    class ZeroppStrategy(strategies.DDPStrategy):  # launcher, ranks, samplers, reduce, broadcast and barrier are DDP's
        """Trains a LightningModule with ZeRO, in place: the module is not wrapped.

        Args:
            stage: what is partitioned; see :class:`zeropp.Config`. Not with ``config``.
            config: a :class:`zeropp.Config`, or what ``Config.from_json`` reads: a path, JSON text, a dict.
            tensor_parallel_size: ranks that share matrices, as in Lightning's ModelParallelStrategy. The module's ``configure_model`` cuts
                what it wants to over ``self.device_mesh["tensor_parallel"]``, with :func:`zeropp.parallel.tensor` or torch's
                ``parallelize_module``; the ranks of ``"data_parallel"`` have different batches.
            more: the other fields of ``zeropp.Config``, and the arguments of ``DDPStrategy``.
        """

        strategy_name = "zeropp"
        model: Any

        def __init__(
            self, stage: int | None = None, config: Any = None, tensor_parallel_size: int = 1, **more: Any
        ) -> None:
            self.zeropp_config = take_config(stage, config, more)
            self._tensor_ranks = tensor_parallel_size
            self._device_mesh: Any = None
            super().__init__(**more)
            if self._ddp_kwargs:
                raise ConfigError(f"ZeroppStrategy: unknown argument {next(iter(self._ddp_kwargs))!r}")
            self._forward_redirection = redirection()
            self._loaded_from: Any = None
            self._low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.zeropp_config.dtype_name or "")

        # -- ranks -------------------------------------------------------------------------------------------------------

        @property
        def device_mesh(self) -> Any:
            """All ranks, as ("data_parallel", "tensor_parallel"); there once the processes run."""
            return mesh_there("ZeroppStrategy", self._device_mesh)

        def setup_environment(self) -> None:
            super().setup_environment()
            self._device_mesh = mesh_for("ZeroppStrategy", self._tensor_ranks, self.world_size, self.root_device.type)
            if self._device_mesh is None:
                return
            self.lightning_module._device_mesh = (
                self._device_mesh
            )  # so that configure_model finds it, as with Lightning's own strategy

        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]:
            """Give ranks that share matrices one batch."""
            return sampler_of(self._device_mesh) or super().distributed_sampler_kwargs

        # -- model and optimizer -----------------------------------------------------------------------------------------

        def setup(self, trainer: Any) -> None:
            self._refuse_averages(trainer)
            self.accelerator.setup(trainer)
            module = self.lightning_module
            fitting = trainer.state.fn == "fit"
            if not parts_of(module):
                if fitting and self._layer_sync:
                    self.model = self._layer_sync.apply(self.model)
                self.model = self.precision_plugin.convert_module(self.model)
                self.model_to_device()
            if fitting:
                self.setup_optimizers(trainer)
            optimizers = [_plain(one) for one in self.optimizers] if fitting else []
            partition(module, optimizers, placed(self.zeropp_config, self.root_device), self._device_mesh)
            self.setup_precision_plugin()
            self.precision_plugin.clip_grad_by_norm = _clip_by_norm
            self.precision_plugin.clip_grad_by_value = _clip_by_value

        def _refuse_averages(self, trainer: Any) -> None:
            for callback in trainer.callbacks:
                names = {cls.__name__ for cls in type(callback).__mro__}
                for name in names & set(_AVERAGES):
                    raise ConfigError(f"{name} reads whole parameters every step, which is not supported under zeropp")

        def model_to_device(self) -> None:
            if must_move(self.lightning_module, self.root_device):
                super().model_to_device()

        @contextlib.contextmanager
        def model_sharded_context(self) -> Iterator[None]:
            """Modules made in ``configure_model`` are never whole in memory, unless they are cut there."""
            if parts_of(self.lightning_module) or self.zeropp_config.stage < 3 or self._device_mesh is not None:
                yield
                return
            with construction(from_rank_0=True):  # as everywhere in Lightning: ranks need no common seed
                yield

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            """Through the module's own call, so that all of the step counts as its forward; manual optimization steps inside of it."""
            module = self.lightning_module
            args = (cut_to(args[0], length_of(parts_of(module)[0])), *args[1:]) if args else args
            with self.precision_plugin.train_step_context():
                if module.automatic_optimization:
                    return self._forward_redirection(module, module, "training_step", *args, **kwargs)
                args, kwargs = cast_inputs(self._low, module, args, kwargs)
                return module.training_step(*args, **kwargs)

        def validation_step(self, *args: Any, **kwargs: Any) -> Any:
            with self.precision_plugin.val_step_context():
                return self._evaluated("validation_step", *args, **kwargs)

        def test_step(self, *args: Any, **kwargs: Any) -> Any:
            with self.precision_plugin.test_step_context():
                return self._evaluated("test_step", *args, **kwargs)

        def predict_step(self, *args: Any, **kwargs: Any) -> Any:
            with self.precision_plugin.predict_step_context():
                return self._evaluated("predict_step", *args, **kwargs)

        def _evaluated(self, step: str, *args: Any, **kwargs: Any) -> Any:
            return self._forward_redirection(self.lightning_module, self.lightning_module, step, *args, **kwargs)

        def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            """Scaled by the optimizer where the precision is fp16; manual optimization does not say which one, so it is asked here."""
            found = [_plain(one) for one in (self.optimizers if optimizer is None else [optimizer])]
            with scaled_for(found, closure_loss) as scaled:
                super().backward(scaled, optimizer, *args, **kwargs)
            return closure_loss

        def block_backward_sync(self) -> Any:
            """Stage 1 accumulates without communication; 2 and 3 reduce every micro-step, which keeps gradients split."""
            if self.zeropp_config.stage <= 1:
                return no_sync(self.lightning_module)
            return contextlib.nullcontext()

        def on_validation_start(self) -> None:
            """End a delayed update, so that the newest weights are validated."""
            self._flush()
            super().on_validation_start()

        def on_train_end(self) -> None:
            """End a delayed update, so that the fit ends with the last step's weights."""
            self._flush()
            super().on_train_end()

        def _flush(self) -> None:
            for optimizer in map(_plain, self.optimizers):
                if isinstance(optimizer, ZeroOptimizer):
                    optimizer.flush()

        # -- checkpoints -------------------------------------------------------------------------------------------------

        @property
        def restore_checkpoint_after_setup(self) -> bool:
            return True

        @property
        def lightning_restore_optimizer(self) -> bool:
            return True

        def lightning_module_state_dict(self) -> dict[str, Any]:
            """Whole, on rank 0; collective."""
            return full_state(self.lightning_module)

        def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
            """Split over the ranks: it lies beside the file, not in it."""
            return {}

        def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            filepath = self.broadcast(filepath)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            if "optimizer_states" in checkpoint:  # not with save_weights_only
                save_shards(filepath, self._pairs(), int(checkpoint["global_step"]))

        def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
            self._loaded_from = checkpoint_path
            found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
            return found

        def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
            load_full_state(self.lightning_module, checkpoint["state_dict"], strict)

        def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
            load_shards(self._loaded_from, self._pairs())

        def _pairs(self) -> list[tuple[Any, Any]]:
            """Return each part of the module with its optimizer; the part that no optimizer has comes last."""
            of = {id(one._engine): one for one in map(_plain, self.optimizers)}
            return [(part, of.get(id(engine_of(part)))) for part in parts_of(self.lightning_module)]

        def remove_checkpoint(self, filepath: Any) -> None:
            super().remove_checkpoint(filepath)
            if self.is_global_zero:
                remove_shards(filepath)

        # -- end -----------------------------------------------------------------------------------------------------------

        def teardown(self) -> None:
            """End the parts of the strategy; the module stays partitioned where it is."""
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()

        @classmethod
        def register_strategies(cls, strategy_registry: Any) -> None:
            for name, description, arguments in registered():
                strategy_registry.register(name, cls, description=description, override=True, **arguments)

    ZeroppStrategy.register_strategies(strategies.StrategyRegistry)
    return ZeroppStrategy


def _plain(optimizer: Any) -> Any:
    """Return the optimizer that Lightning wrapped."""
    return getattr(optimizer, "_optimizer", optimizer)


def _clip_by_norm(optimizer: Any, clip_val: float) -> None:
    _plain(optimizer).clip_grad_norm_(float(clip_val))


def _clip_by_value(optimizer: Any, clip_val: float) -> None:
    _plain(optimizer).clip_grad_value_(float(clip_val))
