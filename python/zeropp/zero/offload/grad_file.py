# SPDX-License-Identifier: Apache-2.0
"""Gradients on NVMe: ``Config(offload=Offload(grads="nvme", path=...))`` at stages 2 and 3 (ZeRO-Infinity, arXiv:2104.07857).

This rank's reduced gradients live in one scratch file. Backward writes a unit's shard when its gradients are complete,
and from the second backward of a step on reads it ahead, adds to it and writes it again; the step reads it beside the
states (csrc/zero/offload/grad_file.c). Everything else asks for shards here: clipping by value, ``zeropp.get_full``,
``gathered(grads=True)``.
"""

from __future__ import annotations

import torch

from zeropp.comm.collective import Ranks
from zeropp.config import Tier
from zeropp.errors import Error, TierError
from zeropp.files.scratch import Scratch
from zeropp.zero.formulas import in_pages, split
from zeropp.zero.model_state import Bytes, GradStore, ModelState, Unit
from zeropp.zero.offload.storage import FileStore, io_shape, warn


class GradFile(FileStore, GradStore):
    """The file of this rank's gradients. Construction is collective, between seal and the first backward.

    Args:
        tier: kind "nvme"; ``path`` and ``checksums`` count (``fraction`` was given before seal).

    Raises:
        zeropp.TierError: the folder cannot be used, or the disk has no room: path, bytes wanted, bytes free. On every
            rank; nothing is left behind.
    """

    in_file = True

    def __init__(self, engine: ModelState, tier: Tier) -> None:
        self.fraction, self._zero = float(tier.fraction), engine.core
        self._ranks = Ranks(engine)
        self._asked_at = -1
        self.places = 1 if engine.config.offload.delayed_update is None else 2
        scratch = Scratch(tier.folders, self._ranks)
        self.file = scratch.file("grads")

        def work() -> None:
            warn(self._zero.open_grads(*self.file.where, True, *io_shape(scratch), tier.checksums))

        figures, close = self._zero.grads_figures, self._zero.close_grads
        self._open_in(scratch, figures, close, lambda: self._ranks.all_do(work))

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
        self._asked_at = -1

    def read(self, engine: ModelState, unit: Unit, address: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty(unit.shard_elems, dtype=dtype, device="cpu")
        self._zero.copy_grads(unit.index, 0, values.numel(), values.data_ptr(), False)
        return values

    def write(self, unit: Unit, values: torch.Tensor) -> None:
        self._zero.copy_grads(unit.index, 0, values.numel(), values.data_ptr(), True)

    def bytes_in_file(self, units: list[Unit]) -> int:
        """Return the bytes of the shards themselves, without what rounds them up to pages, in each of their places."""
        resident_bytes, offset, total = self.figures()["resident_bytes"], 0, 0
        held, others = ([unit for unit in units[::-1] if unit.held == held] for held in (True, False))
        for unit in (*held, *others):  # as csrc/zero/offload/grad_file.c lays them
            if unit.trainable:
                own = unit.shard_elems * unit.grad_dtype.itemsize
                for _ in range(self.places):
                    total += max(0, offset + own - max(offset, resident_bytes))
                    offset += in_pages(own)
        return total // self.places

    def second_bytes(self, engine: ModelState) -> int:
        return self.bytes_in_file(engine.units)

    def planned_bytes(self, engine: ModelState, paper: dict[str, int]) -> Bytes:
        in_memory, in_file = split(engine, paper, "grads", self.fraction)
        return {("cpu", "grads"): in_memory, ("nvme", "grads"): in_file}

    def held_bytes(self, engine: ModelState) -> Bytes:
        seen = self.figures()
        return {
            **super().held_bytes(engine),
            ("nvme", "grads"): self.bytes_in_file(engine.units),
            ("cpu", "tier_buffers"): seen["window_bytes"] + seen["memory_bytes"],
            ("cpu", "checksums"): seen["sums_bytes"],
        }
