# SPDX-License-Identifier: Apache-2.0
"""Freed memory, given back to the system; and the bytes of a tensor.

glibc keeps freed memory of less than 32 MiB a piece. The hole that an aligned tensor leaves is too small for the next one of
its size, so the heap would grow with what was ever allocated.
"""

from __future__ import annotations

import ctypes

import torch

TRIM_EVERY_BYTES = 32 << 20


class HeapTrim:
    """Counts what is freed; after `TRIM_EVERY_BYTES` its pages are given back."""

    def __init__(self) -> None:
        self._freed_bytes = 0

    def freed(self, size_bytes: int) -> None:
        self._freed_bytes += size_bytes
        if self._freed_bytes >= TRIM_EVERY_BYTES:
            self._freed_bytes = 0
            give_back()


def give_back() -> None:
    """Give back whole pages of all arenas, by glibc's own call, where there is a glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Writable view of the bytes of a contiguous tensor in host memory. It does not keep the tensor alive."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    memory = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")
