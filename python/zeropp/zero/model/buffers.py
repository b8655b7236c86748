# SPDX-License-Identifier: Apache-2.0
"""Buffers follow rank 0, as under DistributedDataParallel: BatchNorm's running statistics, and whatever else modules register.

Every rank's forward changes them by its own batch, so that the ranks would evaluate with different statistics. At the start of a forward
all ranks take rank 0's, where the forward before it built a graph outside of ``no_sync``: DDP's rule, to the bit. One message holds all of
them (csrc/zero/exchange.c).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from zeropp.comm.collective import broadcast
from zeropp.errors import ConfigError
from zeropp.zero.model.parameter import ref_of

Place = tuple[dict[str, torch.Tensor | None], str]


class Buffers:
    """Places of the buffers of a model. Called before a forward; holds modules' dicts of buffers, not the modules."""

    def __init__(self, model: nn.Module) -> None:
        self.places: list[Place] = []
        self.like: list[tuple[torch.Size, torch.dtype]] = []
        self.sizes: list[int] = []
        for place, buffer in _buffers_of(model):
            if _can_travel(buffer) and buffer.numel():
                self.places.append(place)
                self.like.append((buffer.shape, buffer.dtype))
                self.sizes.append(buffer.numel() * buffer.element_size())

    def __call__(self) -> tuple[list[int], Callable[[], None] | None]:
        """The address of each, and what to do when rank 0's values are there. A buffer that changed its shape or type since
        ``prepare`` (a table of positions that grew) is each rank's own."""
        addresses, copies = [], []
        for (buffers, name), like in zip(self.places, self.like, strict=True):
            buffer = buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != like or not _can_travel(buffer):
                addresses.append(0)
                continue
            if not buffer.is_cpu or not buffer.is_contiguous() or buffer.is_conj() or buffer.is_neg():
                copy = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu").copy_(buffer.detach())
                copies.append((buffer, copy))
                buffer = copy
            addresses.append(buffer.data_ptr())
        return addresses, functools.partial(_take_back, copies) if copies else None


def _take_back(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffer for buffer, _ in copies)):
        for buffer, copy in copies:
            buffer.copy_(copy)


def _buffers_of(model: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    seen: set[int] = set()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield (module._buffers, name), buffer


def _can_travel(buffer: torch.Tensor) -> bool:
    return not buffer.is_meta and buffer.layout == torch.strided and type(buffer) in (torch.Tensor, nn.Buffer)


def descriptions(model: nn.Module) -> list[bytes]:
    """Return a line for each buffer, for a comparison of the ranks."""
    return [f"'{name}' {tuple(one.shape)} {one.dtype}".encode() for name, one in model.named_buffers()]


def hand_over(model: nn.Module, comm: Any) -> None:
    """Give all ranks rank 0's buffers, as DDP does when it is built. Collective; nothing without a communicator."""
    if comm is None:
        return
    for _, buffer in model.named_buffers():
        values = buffer.detach().contiguous()
        if values.numel():
            broadcast(comm, values)
            if values.data_ptr() != buffer.data_ptr():
                buffer.data.copy_(values)


def follow(model: nn.Module, core: Any) -> None:
    """Let buffers follow rank 0 from now on; collective. Do nothing where the model has none."""
    buffers = Buffers(model)
    if buffers.places:
        core.set_buffers(buffers, buffers.sizes)


def explain_sync_batch_norm(model: nn.Module) -> None:
    """Raise for a SyncBatchNorm that is to train on a CPU, which torch refuses without a way out."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.register_forward_pre_hook(functools.partial(_refuse_on_cpu, name))


def _refuse_on_cpu(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    on_cpu = bool(inputs) and isinstance(inputs[0], torch.Tensor) and inputs[0].device.type == "cpu"
    if module.training and on_cpu and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"'{name}' is a SyncBatchNorm, which torch trains on GPUs alone, and its input is on the CPU; leave out convert_sync_batchnorm (with "
            "Config(sync_buffers=True) all ranks have rank 0's running statistics), use GroupNorm, or call module.eval() to keep its statistics"
        )


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that belong to a state dict, each under its first name."""
    return ((name, tensor) for name, tensor in loose_tensors(model) if not isinstance(tensor, nn.Parameter))


def loose_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a state dict that are in no unit, each under its first name: persistent buffers, ignored parameters."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in loose_in(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{path}.{name}" if path else name), tensor


def loose_in(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of this module alone, not of its children, that are in a state dict and in no unit."""
    for name, parameter in module._parameters.items():
        if parameter is not None and ref_of(parameter) is None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
