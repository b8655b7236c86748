# SPDX-License-Identifier: Apache-2.0
"""Gradients on NVMe: ``Config(offload=Offload(grads="nvme", path=...))`` at stages 2 and 3 (ZeRO-Infinity, arXiv:2104.07857).

This rank's reduced gradients live in one scratch file. Backward writes a unit's shard when its gradients are complete,
and from the second backward of a step on reads it ahead, adds to it and writes it again; the step reads it beside the
states (csrc/zero/offload/grad_file.h). Everything else asks for shards here: clipping by value, ``zeropp.get_full``,
``gathered(grads=True)``.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from zeropp.comm.collective import Ranks
from zeropp.config import Tier
from zeropp.errors import Error, TierError
from zeropp.files.scratch import Scratch
from zeropp.zero.offload.storage import Traffic, disk_traffic, end_tier, io_shape, warn

if TYPE_CHECKING:
    from zeropp.zero.engine import Engine, Unit

PAGE_BYTES = 4096


class GradsTier:
    """The file of this rank's gradients. Construction is collective, between seal and the first backward.

    Args:
        tier: kind "nvme"; ``path`` and ``checksums`` count (``fraction`` was given before seal).

    Raises:
        zeropp.TierError: the folder cannot be used, or the disk has no room: path, bytes wanted, bytes free. On every
            rank; nothing is left behind.
    """

    def __init__(self, engine: Engine, tier: Tier) -> None:
        self.fraction, self._zero = float(tier.fraction), engine.core
        self._ranks = Ranks(engine)
        self._asked_at, self._checksums = -1, tier.checksums
        self.places = 1 if engine.config.offload.delayed_update is None else 2
        scratch = Scratch(tier.folders, self._ranks)
        self.file = scratch.file("grads")
        self.path = self.file.parts[0]
        try:
            self._ranks.all_do(lambda: self._open(scratch))
        except BaseException:
            self._zero.close_grads()
            scratch.remove()
            raise
        self.traffic: Traffic = Traffic(self._zero.grads_figures)
        self._number = disk_traffic.add(self.traffic.figures)
        self._end = weakref.finalize(self, end_tier, self._zero.close_grads, self._number, scratch, os.getpid())

    def _open(self, scratch: Scratch) -> None:
        warn(self._zero.open_grads(*self.file.where, True, *io_shape(scratch), self._checksums))

    def close(self) -> None:
        """The model is gone: the scratch file, too."""
        self._end()

    def require_whole(self) -> None:
        """Collective, before a norm or a step: on every rank what backward wrote has reached the file.

        Raises:
            zeropp.TierError: a read or a write failed in backward, here or on another rank, which is named; the
                gradients of this step are lost, and nothing else: ``optimizer.zero_grad()``, and go on.
        """
        if self._asked_at == self._zero.backwards:
            return
        failure: Error | None = None
        try:
            self._zero.settle_grads()
        except Error as error:
            failure = error
        said = self._ranks.exchange("" if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, one in enumerate(said):
            if one:
                raise TierError(f"rank {rank}: {one}")
        self._asked_at = self._zero.backwards

    def forget(self) -> None:
        """All gradients were cleared."""
        self._asked_at = -1

    def read(self, unit: Unit, dtype: torch.dtype) -> torch.Tensor:
        """A copy of this rank's shard of the gradient."""
        values = torch.empty(unit.shard_elems, dtype=dtype)
        self._zero.copy_grads(unit.index, 0, values.numel(), values.data_ptr(), False)
        return values

    def write(self, unit: Unit, values: torch.Tensor) -> None:
        """This rank's shard, whole."""
        self._zero.copy_grads(unit.index, 0, values.numel(), values.data_ptr(), True)

    def bytes_in_file(self, units: list[Unit]) -> int:
        """Of the shards themselves, without what rounds them up to pages; with delayed updates, in each of their two places."""
        cut, offset, total = self.figures()["cut_bytes"], 0, 0
        for unit in reversed(units):  # as csrc/zero/offload/grad_file.c lays them
            if unit.trainable:
                own = unit.shard_elems * unit.grad_dtype.itemsize
                for _ in range(self.places):
                    total += max(0, offset + own - max(offset, cut))
                    offset += -(-own // PAGE_BYTES) * PAGE_BYTES
        return total // self.places

    def figures(self) -> dict[str, Any]:
        """``mapping_bytes`` of all shards, ``cut_bytes`` of them held in memory; ``entered_bytes`` now and at their peak;
        ``memory_bytes`` they take, ``window_bytes`` of the step's buffers; totals of ``read_bytes``, ``written_bytes``,
        ``loads``, ``load_wait_ns`` (writes included), ``step_wait_ns``; ``backend``."""
        seen: dict[str, Any] = self._zero.grads_figures()
        return seen
