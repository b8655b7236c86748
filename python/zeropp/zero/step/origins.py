# SPDX-License-Identifier: Apache-2.0
"""Whose gradient was not finite: the ranks that had it so before the sum, in words (csrc/zero/origin.h)."""

from __future__ import annotations

from collections.abc import Iterable

LAST = 63
"""The bit of this rank stands for all ranks above, too."""


def describe(bad: Iterable[tuple[str, int]], ranks: int) -> list[str]:
    """Parameters with the ranks whose gradients were not finite, of (name, bits) of one shard each; in the order of the shards."""
    found: dict[str, int] = {}
    for name, bits in bad:
        found[name] = found.get(name, 0) | bits
    return [f"'{name}' ({_where(bits, ranks)})" for name, bits in found.items()]


def _where(bits: int, ranks: int) -> str:
    numbers = [rank for rank in range(LAST + 1) if bits >> rank & 1]
    if not numbers:
        return "finite on each rank, but not their sum"
    names = [f"rank {rank}{' or above' if rank == LAST and ranks > LAST + 1 else ''}" for rank in numbers]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{listed}{' before the sum' if ranks > 1 else ''}"
