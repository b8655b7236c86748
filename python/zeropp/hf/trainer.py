# SPDX-License-Identifier: Apache-2.0
"""Trainer over partitioned state: the methods that save, load, wrap or measure, and no others."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

import zeropp
from zeropp import checkpoint as checkpoints
from zeropp import zero
from zeropp.accelerate import ZeroppAccelerator, plain_optimizer
from zeropp.errors import CheckpointError, ConfigError
from zeropp.hf import sequences
from zeropp.hf.report import MemoryTable, Metrics

FOLDER = "zeropp"  # in each checkpoint-N: shards, optimizer state


class ZeroppTrainer:
    """Stands before a Trainer class; :func:`TrainerFor` puts it there. Without ``args.zeropp`` every method is upstream's."""

    _zeropp_sp = 1  # how many ranks share a sequence
    _zeropp_tp = 1  # how many ranks share each matrix
    _zeropp_handle: Any = None
    _zeropp_mesh: Any = None

    @property
    def _zeropp(self: Any) -> bool:
        return getattr(self.args, "zeropp_config", None) is not None

    # -- building ----------------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self: Any) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self._zeropp:
            self.accelerator.__class__ = ZeroppAccelerator  # the instance that Trainer configured, with other verbs
            self.accelerator.zeropp_config = self.args.zeropp_config
            self.accelerator.zeropp_before = functools.partial(sequences.cut_tensors, self)
            if self._zeropp_tp > 1:
                self.accelerator.zeropp_mesh = sequences.mesh_of(self)
            self._zeropp_metrics = Metrics()

    def _build_accelerator_args(self: Any, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        if self._zeropp and self.args.zeropp_config.dtype_name is not None:
            found["mixed_precision"] = "no"  # parameters compute in their own dtype; no autocast on top
        if self._zeropp and found.get("parallelism_config") is not None:
            self._zeropp_sp, self._zeropp_tp = sequences.sizes_of(found.pop("parallelism_config"), self.args)
        return found

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Do as upstream, for the slices that this rank has."""
        if self._zeropp:
            sequences.cut_tensors(self, self.model)
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def get_tp_size(self: Any) -> int:
        """Return how many ranks have one batch for their slices: tokens are counted once."""
        return self._zeropp_tp if self._zeropp else super().get_tp_size()  # type: ignore[misc, no-any-return]

    def _wrap_model(self: Any, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not self._zeropp:
            return super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
        if training and not any(isinstance(one, MemoryTable) for one in self.callback_handler.callbacks):
            self.add_callback(MemoryTable())
        return model

    def hyperparameter_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._zeropp:
            raise ConfigError("hyperparameter_search is not supported with --zeropp; start one run a trial")
        return super().hyperparameter_search(*args, **kwargs)  # type: ignore[misc]

    # -- steps -------------------------------------------------------------------------------------------------------------

    def _has_mixed_mesh_grads(self: Any, model: Any) -> bool:
        """Upstream reads p.grad, which a partitioned parameter does not have."""
        return False if self._zeropp else super()._has_mixed_mesh_grads(model)  # type: ignore[misc]

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Cut each batch to the step's length before the tokens are counted that the loss is divided by."""
        from zeropp.data.cutting import cut_to, length_of  # with the code that shards

        if self._zeropp and (length := length_of(self.model)) is not None:
            epoch_iterator = map(functools.partial(cut_to, length=length), epoch_iterator)
        if self._zeropp_sp > 1:
            epoch_iterator = map(functools.partial(sequences.part_of, self), epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]

    def get_total_train_batch_size(self: Any, args: Any) -> int:
        """Return the sequences of a step: ranks that share one count once."""
        return super().get_total_train_batch_size(args) // self._zeropp_sp  # type: ignore[misc, no-any-return]

    def _get_dataloader(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Give ranks that share a sequence the same batches."""
        with sequences.sharing(self):
            return super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a part of each sequence; the loss, the logits and the labels are then those of the whole one, on each rank."""
        plain = super().prediction_step  # type: ignore[misc]
        if self._zeropp_sp * self._zeropp_tp == 1:
            return plain(model, inputs, *args, **kwargs)
        return sequences.predict(self, inputs, functools.partial(plain, model), *args, **kwargs)

    def evaluation_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluation and prediction, of the newest weights: a delayed update ends first."""
        self._zeropp_flush()
        with sequences.sharing(self):
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def _finalize_training(self: Any, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """Publish the last step's weights before ``train`` returns."""
        self._zeropp_flush()
        return super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[misc]

    def _zeropp_flush(self: Any) -> None:
        optimizer = plain_optimizer(getattr(self, "optimizer", None))
        if self._zeropp and isinstance(optimizer, zero.step.optimizer.ZeroOptimizer):
            optimizer.flush()

    def log(self: Any, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._zeropp and "grad_norm" in logs:
            logs.update(self._zeropp_metrics.collect(self.model))
        super().log(logs, start_time)  # type: ignore[misc]

    # -- saving ------------------------------------------------------------------------------------------------------------

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Standard safetensors (or adapter files), whole; collective. Before training, what upstream does."""
        if not self._zeropp or not zero.prepare.is_prepared(self.model):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        state = zeropp.full_state_dict(
            self.model, rank_0_only=not self.args.save_on_each_node, only=_only_adapter(self.model)
        )
        self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if not self._zeropp:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        step = int(self.state.global_step)
        zeropp.save(Path(output_dir) / FOLDER, self.model, plain_optimizer(self.optimizer), step=step)
        if self.args.should_save:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's reminder to save the optimizer too
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))  # noqa: PTH118

    # -- loading -----------------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """Called before the model is prepared; a checkpoint of zeropp is loaded after, with the optimizer."""
        if self._zeropp and (Path(resume_from_checkpoint) / FOLDER).is_dir():
            return
        target = self.model if model is None else model
        if not self._zeropp or not zero.prepare.is_prepared(target):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        with zeropp.gathered(target, write=True):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if not self._zeropp or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        folder = Path(checkpoint)
        if not (folder / FOLDER).is_dir():
            if (folder / OPTIMIZER_NAME).exists():
                raise CheckpointError(
                    f"{folder}: its optimizer state was saved without --zeropp, and resuming from that is not supported; "
                    "load its weights with from_pretrained and start anew, or resume without --zeropp"
                )
            return
        with checkpoints.random_state.kept():
            zeropp.load(folder / FOLDER, self.model, plain_optimizer(self.optimizer))
        scheduler = torch.load(folder / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self: Any) -> None:
        if not self._zeropp or not zero.prepare.is_prepared(self.model):
            super()._load_best_model()  # type: ignore[misc]
            return
        best = Path(self.state.best_model_checkpoint)
        if (best / FOLDER).is_dir():
            with checkpoints.random_state.kept():
                zeropp.load(best / FOLDER, self.model)
            return
        with zeropp.gathered(self.model, write=True):
            super()._load_best_model()  # type: ignore[misc]


def _only_adapter(model: Any) -> Any:
    """For a PEFT model: which parameters its adapter files may hold (trained ones, and embeddings); None: all."""
    try:
        from peft import PeftModel
    except ImportError:
        return None
    if not isinstance(model, PeftModel):
        return None
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    kept = {id(p) for module in embeddings if module is not None for p in module.parameters()}
    names = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad or id(p) in kept}
    return names.__contains__


@functools.cache
def TrainerFor(base: type) -> Any:
    """Return ``base`` (Trainer or a subclass: SFTTrainer, ...) that trains with zeropp when its arguments say so.

    The same base gives the same class. Its arguments come from ``ArgumentsFor``.
    """
    if issubclass(base, ZeroppTrainer):
        return base
    return type(base.__name__, (ZeroppTrainer, base), {"__doc__": base.__doc__, "__module__": __name__})


Trainer: Any = TrainerFor(transformers.Trainer)
"""transformers.Trainer with ZeRO."""


def __getattr__(name: str) -> Any:
    if name == "Seq2SeqTrainer":  # transformers, too, loads it when it is asked for
        return TrainerFor(transformers.Seq2SeqTrainer)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
