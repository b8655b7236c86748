# SPDX-License-Identifier: Apache-2.0
"""The memory that files on NVMe need on this side: what a step streams its states, parameters and gradients through, and the
shards of gradients that stay in memory for the next backward.

``zeropp.estimate`` asks before there is a model, ``zeropp.memory`` afterwards: one arithmetic for both. The sizes are those of
csrc/zero/offload/optim_file.c (buffers), csrc/zero/offload/unit_file_step.c (windows) and csrc/zero/offload/grad_file.c (gradients).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeropp import _C
from zeropp.config import Offload, Tier

_WINDOWS = 4
"""ZPP_FILED_WINDOWS of csrc/zero/offload/unit_file.h."""
_WINDOW_ELEMS = 512 << 10
"""WINDOW_ELEMS of csrc/zero/offload/unit_file_step.c: of a step over states in memory."""
_SLICES_BYTES = 32 << 20
"""LEAST_BOUND_BYTES of csrc/zero/offload/grad_file.c."""
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Slice:
    """What this rank updates of one trainable unit."""

    elems: int
    param_bytes: int
    """Of an element of the parameters."""
    grad_bytes: int
    """Of an element of the gradients that add up and stay."""
    master: bool
    """True if the unit has an fp32 master copy."""
    filed: bool
    """True if the unit's parameters live on NVMe."""

    @property
    def grad_slice_bytes(self) -> int:
        """As it lies in its file."""
        return -(-self.elems * self.grad_bytes // _PAGE_BYTES) * _PAGE_BYTES


def tier_buffers(shards: Sequence[Slice], offload: Offload, moments: int, *, inside: bool) -> int:
    """Bytes of a rank, at most.

    Args:
        shards: of all trainable units.
        moments: tensors of states that the optimizer keeps for each parameter, without the master.
        inside: True with ``Config(step_in_backward=True)``: units are stepped where they are gathered, without windows.
    """
    total, window_elems = 0, _WINDOW_ELEMS
    if _is_on_disk(offload.optimizer):
        fraction = _share(offload.optimizer)
        pairs = [(one.elems, one.master) for one in shards]
        total, record_elems = _C.optim_file_plan(pairs, fraction, (1 << moments) - 1, inside)
        window_elems = max(record_elems, _WINDOW_ELEMS if fraction < 1 else 0)
    grads = shards if _is_on_disk(offload.grads) else []
    total += _shards_in_memory(grads, _share(offload.grads))
    if not inside:
        total += _windows([(one.elems, one.param_bytes) for one in shards if one.filed], window_elems)
        total += _windows([(one.elems, one.grad_bytes) for one in grads], window_elems)
    return total


def _is_on_disk(tier: Tier | str) -> bool:
    return isinstance(tier, Tier) and tier.kind == "nvme"


def _share(tier: Tier | str) -> float:
    return float(tier.fraction) if isinstance(tier, Tier) else 0.0


def _windows(sizes: Sequence[tuple[int, int]], window_elems: int) -> int:
    """Of (elements, bytes of one) that are stepped in a file."""
    elems = min(sum(elems for elems, _ in sizes), _WINDOWS * window_elems)
    return elems * max((size for _, size in sizes), default=0)


def _shards_in_memory(grads: Sequence[Slice], fraction: float) -> int:
    """As many whole shards as there is room for: those under way, then those that wait for the next backward."""
    sizes = [one.grad_slice_bytes for one in grads]
    room, held = max(_SLICES_BYTES, 2 * max(sizes, default=0)), 0
    for size in sizes:
        if held + size > room:
            break
        held += size
    return min(held, round(fraction * sum(sizes)))
