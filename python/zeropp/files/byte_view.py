# SPDX-License-Identifier: Apache-2.0
"""The bytes of a tensor as what files and sockets take; numpy, which torch's own way needs, is no requirement."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["byte_view"]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Writable view of the bytes of a contiguous tensor in host memory. It does not keep the tensor alive."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    room = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return memoryview(room).cast("B")
