# SPDX-License-Identifier: Apache-2.0
"""Memory that was freed, back to the system. glibc keeps what is below 32 MiB a piece; and a hole that an aligned tensor left is too
small for the next one of its size, so that the heap grows with what was ever allocated."""

from __future__ import annotations

import ctypes

TRIM_EVERY_BYTES = 32 << 20


class Holes:
    """Counts what is freed; after `TRIM_EVERY_BYTES` its pages are given back."""

    def __init__(self) -> None:
        self._freed_bytes = 0

    def freed(self, size_bytes: int) -> None:
        self._freed_bytes += size_bytes
        if self._freed_bytes >= TRIM_EVERY_BYTES:
            self._freed_bytes = 0
            give_back()


def give_back() -> None:
    """glibc's own call, where there is a glibc: all arenas, whole pages."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
