# SPDX-License-Identifier: Apache-2.0
"""The whole model as a stream of flat buffers: for those who send weights on, such as a trainer that hands its policy to
an inference engine after every step. One broadcast or copy a buffer, instead of one a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from zeropp.checkpoint.full_state import BUCKET_BYTES, named_full_tensors


@dataclass(frozen=True)
class PackedTensors:
    """Tensors of one dtype, one after the other in one buffer."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    flat: torch.Tensor
    """1-D, on the CPU; belongs to the receiver."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, a view of the buffer in the tensor's shape)."""
        first = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            yield name, self.flat[first : first + shape.numel()].view(shape)
            first += shape.numel()


def packed_full_tensors(
    model: nn.Module, bucket_bytes: int = BUCKET_BYTES, *, only: Callable[[str], bool] | None = None
) -> Iterator[PackedTensors]:
    """Yield the tensors of ``named_full_tensors``, packed; collective, so every rank iterates to the end.

    Args:
        bucket_bytes: a buffer is handed out before it grows beyond this; one tensor may be larger.
        only: tells by name which are wanted; the same on every rank. None: all.

    Memory: one buffer, the tensors that it is made from, and what ``named_full_tensors`` takes.
    """
    held: list[tuple[str, torch.Tensor]] = []
    held_bytes = 0
    for name, tensor in named_full_tensors(model, bucket_bytes, only=only):
        if held and (held[0][1].dtype != tensor.dtype or held_bytes + tensor.nbytes > bucket_bytes):
            yield _pack(held)
            held, held_bytes = [], 0
        held.append((name, tensor))
        held_bytes += tensor.nbytes
    if held:
        yield _pack(held)


def _pack(held: list[tuple[str, torch.Tensor]]) -> PackedTensors:
    flat = torch.cat([tensor.reshape(-1) for _, tensor in held])
    return PackedTensors(tuple(name for name, _ in held), tuple(tensor.shape for _, tensor in held), flat)
