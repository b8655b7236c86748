# SPDX-License-Identifier: Apache-2.0
"""Trainer with ``ParallelismConfig(sp_size=, tp_size=)``: ranks that share each sequence, or each matrix, in training and in
evaluation, on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import zeropp
from zeropp import zero
from zeropp.errors import ConfigError


def sizes_of(parallelism: Any, arguments: Any) -> tuple[int, int]:
    """Return how many ranks share a sequence, and how many share each matrix.

    Raises:
        zeropp.ConfigError: context parallelism, or ranks of the job that are no multiple of these.
    """
    if parallelism.cp_size > 1:
        raise ConfigError(
            f"ParallelismConfig.cp_size: {parallelism.cp_size}; context parallelism is torch's own (torch.distributed.tensor.experimental."
            "context_parallel), which runs on CUDA alone and not inside of Trainer with zeropp; wanted sp_size, which shares sequences up to the "
            "number of heads of queries, on any device"
        )
    sequences, tensors = int(parallelism.sp_size), int(parallelism.tp_size)
    for name, ranks in (("sp_size", sequences), ("sp_size x tp_size", sequences * tensors)):
        if arguments.world_size % ranks:
            raise ConfigError(
                f"ParallelismConfig.{name}: {ranks}, of a job of {arguments.world_size} ranks; wanted a divisor of these"
            )
    if sequences > 1 and not arguments.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices: False, with ParallelismConfig.sp_size above 1; wanted True: a rank has a part of a sequence, "
            "whose tokens count as much as those of the other parts"
        )
    return sequences, tensors


def cut_tensors(trainer: Any, model: Any) -> Any:
    """Cut a model's matrices over the ranks of tp, once, before it has an optimizer and before it is prepared. Return the model."""
    if trainer._zeropp_tp == 1 or zero.prepare.is_prepared(model):
        return model
    if not any(map(zero.model.parameter.is_dtensor, model.parameters())):
        if trainer.optimizer is not None:
            raise ConfigError(
                "ParallelismConfig.tp_size: the trainer was given an optimizer, whose parameters are those of the whole model; leave optimizers= "
                "out, or override create_optimizer"
            )
        zeropp.parallel.tensor(model, mesh_of(trainer)["tp"])
    return model


def mesh_of(trainer: Any) -> Any:
    """Return the mesh of all ranks; those of one matrix are neighbours, then those of one sequence. Collective the first time."""
    if trainer._zeropp_mesh is None:
        sequences, tensors = trainer._zeropp_sp, trainer._zeropp_tp
        shape = (trainer.args.world_size // (sequences * tensors), sequences, tensors)
        trainer._zeropp_mesh = init_device_mesh(
            trainer.args.device.type, shape, mesh_dim_names=("dp_replicate", "sp", "tp")
        )
    return trainer._zeropp_mesh


@contextlib.contextmanager
def sharing(trainer: Any) -> Iterator[None]:
    """Count the ranks that share a batch as one, in loaders and in what is gathered."""
    ranks = trainer._zeropp_sp * trainer._zeropp_tp
    if ranks == 1:
        yield
        return
    with trainer.accelerator.sharing(ranks):
        yield


def _handle_of(trainer: Any) -> Any:
    """Return the handle of the trainer's model, made at the first batch."""
    handle = trainer._zeropp_handle
    if handle is None or handle.model is not trainer.model:
        if handle is not None:
            handle.remove()
        handle = trainer._zeropp_handle = zeropp.parallel.ulysses(trainer.model, mesh_of(trainer)["sp"])
    return handle


def part_of(trainer: Any, batch: Any) -> Any:
    """Return this rank's part of a batch; Trainer counts the tokens of all parts, and divides the loss by them."""
    part = _handle_of(trainer).shard(batch)
    part.pop("num_items_in_batch", None)
    return part


def predict(trainer: Any, inputs: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Return the loss, logits and labels of whole sequences."""
    if trainer._zeropp_sp == 1:
        with trainer.accelerator.sharing(1):  # the tokens of every rank are counted, and divided by tp
            return plain(inputs, *args, **kwargs)  # type: ignore[no-any-return]
    handle = _handle_of(trainer)
    part = part_of(trainer, inputs)
    with trainer.accelerator.sharing(1):  # the tokens of every part are counted
        loss, logits, labels = plain(part, *args, **kwargs)
    if loss is not None:
        loss = handle.gather(loss.float().reshape(1, 1)).mean()
    own = part["input_ids"].shape[1]

    def whole(one: Any) -> Any:
        if isinstance(one, (tuple, list)):
            return type(one)(whole(inner) for inner in one)
        is_part = isinstance(one, torch.Tensor) and one.dim() >= 2 and one.shape[1] == own
        return handle.gather(one) if is_part else one

    return loss, whole(logits), None if labels is None else inputs["labels"]
