# SPDX-License-Identifier: Apache-2.0
"""Trainer with ``ParallelismConfig(sp_size=)``: ranks that share each sequence, in training and in evaluation, on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import zeropp
from zeropp.errors import ConfigError


def ranks_of(parallelism: Any, arguments: Any) -> int:
    """Return how many ranks share a sequence.

    Raises:
        zeropp.ConfigError: other dimensions are asked for, or the ranks of the job are no multiple of these.
    """
    for name in ("tp_size", "cp_size"):
        if getattr(parallelism, name) > 1:
            raise ConfigError(
                f"ParallelismConfig.{name}: {getattr(parallelism, name)}; with zeropp in Trainer sp_size alone may be above 1"
            )
    ranks = int(parallelism.sp_size)
    if arguments.world_size % ranks:
        raise ConfigError(
            f"ParallelismConfig.sp_size: {ranks}, of a job of {arguments.world_size} ranks; wanted a divisor of these"
        )
    if ranks > 1 and not arguments.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices: False, with ParallelismConfig.sp_size above 1; wanted True: a rank has a part of a sequence, "
            "whose tokens count as much as those of the other parts"
        )
    return ranks


@contextlib.contextmanager
def sharing(trainer: Any) -> Iterator[None]:
    """Count the ranks that share a sequence as one, in loaders and in what is gathered."""
    if trainer._zeropp_sp == 1:
        yield
        return
    with trainer.accelerator.sharing(trainer._zeropp_sp):
        yield


def _handle_of(trainer: Any) -> Any:
    """Return the handle of the trainer's model, made at the first batch."""
    handle = trainer._zeropp_handle
    if handle is None or handle.model is not trainer.model:
        if handle is not None:
            handle.remove()
        world, ranks = trainer.args.world_size, trainer._zeropp_sp
        mesh = init_device_mesh(
            trainer.args.device.type, (world // ranks, ranks), mesh_dim_names=("dp_replicate", "sp")
        )
        handle = trainer._zeropp_handle = zeropp.parallel.ulysses(trainer.model, mesh["sp"])
    return handle


def part_of(trainer: Any, batch: Any) -> Any:
    """Return this rank's part of a batch; Trainer counts the tokens of all parts, and divides the loss by them."""
    part = _handle_of(trainer).shard(batch)
    part.pop("num_items_in_batch", None)
    return part


def predict(trainer: Any, inputs: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Return the loss, logits and labels of whole sequences."""
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
