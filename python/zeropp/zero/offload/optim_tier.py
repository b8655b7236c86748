# SPDX-License-Identifier: Apache-2.0
"""Optimizer states on NVMe: ``Config(offload=Offload(optimizer="nvme", path=...))`` (ZeRO-Infinity, arXiv:2104.07857).

The fp32 master weights and the optimizer's moments of this rank's shards live in one scratch file; ``optimizer.step()`` streams
them through a few buffers (csrc/zero/offload/optim_file.h), so the memory they take does not grow with the model. Everything else
asks for them here, in pieces: checkpoints, ``gathered(write=True)``, ``zeropp.memory``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from zeropp import _C
from zeropp.comm.collective import Ranks
from zeropp.config import Tier
from zeropp.errors import Error
from zeropp.files.scratch import Scratch
from zeropp.zero.offload.storage import FileStorage, Traffic, disk_traffic, end_tier, io_shape, warn

if TYPE_CHECKING:
    from zeropp.zero.engine import Engine

BLOCK_ELEMS = 1 << 20
"""Elements of one piece on its way between the tier and somebody else: 4 MiB."""


class StateTier:
    """The optimizer states of one prepared model on this rank, in a scratch file. Construction is collective.

    Args:
        tier: kind "nvme"; ``path``, ``fraction`` and ``checksums`` count.
        moments: what the optimizer calls its moments, in the order of enum zpp_tier_kind; empty: it has none of that kind.

    Raises:
        zeropp.TierError: the folder cannot be used, or the disk has no room: path, bytes wanted, bytes free. On every
            rank; nothing is left behind.
    """

    def __init__(self, engine: Engine, tier: Tier, moments: tuple[str, ...], storage: FileStorage) -> None:
        self.fraction, self.storage = float(tier.fraction), storage
        self.kinds = ("master", *moments)
        self.checksums = tier.checksums
        ranks = Ranks(engine)
        scratch = Scratch(tier.folders, ranks)
        try:
            ranks.all_do(lambda: self._make(engine, scratch))
        except BaseException:
            scratch.remove()
            raise
        core = self.core
        storage.torn.append(lambda: bool(core.torn))
        storage.mends.append(core.mend)
        self.traffic: Traffic = Traffic(core.figures)
        self._number = disk_traffic.add(self.traffic.figures)
        self._end = weakref.finalize(self, end_tier, core.close, self._number, scratch, os.getpid())

    def _make(self, engine: Engine, scratch: Scratch) -> None:
        self.file = scratch.file("states")
        self.path = self.file.parts[0]
        bits = sum(1 << k for k, name in enumerate(self.kinds[1:]) if name)
        self.core = _C.Tier(
            *self.file.where, self.fraction, bits, 0, 0, *io_shape(scratch), self.checksums,
            engine.config.step_in_backward,
        )  # fmt: skip
        try:
            for unit in engine.units:
                if unit.trainable:
                    has_master = unit.dtype != torch.float32
                    slice_ = self.core.add(unit.shard.numel(), has_master)
                    unit.tiered = TieredStates(self, slice_, unit.shard.numel(), has_master, unit.index)
            self.core.seal()
        except BaseException:
            self.core.close()
            raise
        warn(self.core.take_warning())
        engine.core.set_tier(self.core)

    def close(self) -> None:
        """The model is gone: the scratch file, too."""
        self._end()

    # -- a step that failed ----------------------------------------------------------------------------------------------

    def require_whole(self) -> None:
        """Raises zeropp.Error if a step or a write failed half-way, and no checkpoint was loaded since."""
        self.storage.require_whole()

    # -- figures -----------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Bytes by kind in the ``file`` and ``held`` in memory, ``buffer_bytes``, ``reserved_bytes``, ``sums_bytes``; totals
        of ``read_bytes``, ``checked_bytes``, ``written_bytes``, ``steps``, ``step_ns``, ``waited_ns`` (for the file, inside steps);
        ``backend``."""
        seen: dict[str, Any] = self.core.figures()
        for where in ("file", "held"):
            seen[where] = {kind: size for kind, size in zip(self.kinds, seen[where], strict=True) if kind}
        return seen


class TieredStates:
    """The states of one unit's shard. ``kinds``: the moments that exist, none before the first step."""

    def __init__(self, tier: StateTier, slice_: int, elems: int, has_master: bool, index: int) -> None:
        self.tier, self.slice, self.elems, self.has_master, self.index = tier, slice_, elems, has_master, index
        self.kinds: tuple[str, ...] = ()

    def _place(self, kind: str) -> int:
        """Number in enum zpp_tier_kind."""
        if kind not in self.tier.kinds:
            has = ", ".join(map(repr, filter(None, self.tier.kinds)))
            raise Error(
                f"{kind!r}: with offload.optimizer='nvme' the file has no room for it, only for {has}; build the optimizer as the one whose "
                "states these are, before zeropp.prepare"
            )
        return self.tier.kinds.index(kind)

    def read(self, kind: str, first: int, elems: int) -> torch.Tensor:
        """A copy of some elements, fp32."""
        values = torch.empty(elems, dtype=torch.float32)
        self.tier.core.copy(self.slice, self._place(kind), first, elems, values.data_ptr(), False)
        return values

    def write(self, kind: str, first: int, values: torch.Tensor) -> None:
        """Elements from ``first`` on."""
        values = values.detach().reshape(-1).to(torch.float32).contiguous()
        if not values.numel():
            return
        try:
            self.tier.core.copy(self.slice, self._place(kind), first, values.numel(), values.data_ptr(), True)
        except Error as error:
            self.tier.storage.tear(str(error))  # a part of it may be written
            raise

    def update(self, kind: str, change: Callable[[int, torch.Tensor], bool]) -> None:
        """Piece after piece: ``change(first, values)`` may change the values in place and says whether it did."""
        for first in range(0, self.elems, BLOCK_ELEMS):
            values = self.read(kind, first, min(BLOCK_ELEMS, self.elems - first))
            if change(first, values):
                self.write(kind, first, values)

    def view(self, kind: str) -> StreamedValues:
        """All elements, to be read in pieces."""
        return StreamedValues(self, kind, 0, self.elems)


class StreamedValues:
    """Like a 1-D fp32 tensor to whoever writes it to a file: it has a shape, shards, and ``parts`` in place of data."""

    dtype = torch.float32

    def __init__(self, states: TieredStates, kind: str, first: int, elems: int) -> None:
        self._states, self._kind, self._first, self._elems = states, kind, first, elems
        self.shape = torch.Size([elems])

    def numel(self) -> int:
        return self._elems

    def element_size(self) -> int:
        return 4

    def is_floating_point(self) -> bool:
        return True

    def detach(self) -> StreamedValues:
        return self

    def __getitem__(self, part: slice) -> StreamedValues:
        first, last, _ = part.indices(self._elems)
        return StreamedValues(self._states, self._kind, self._first + first, max(0, last - first))

    def parts(self) -> Iterator[torch.Tensor]:
        """The elements in order, a few MiB at a time."""
        self._states.tier.require_whole()
        for done in range(0, self._elems, BLOCK_ELEMS):
            yield self._states.read(self._kind, self._first + done, min(BLOCK_ELEMS, self._elems - done))

    def tensor(self) -> torch.Tensor:
        """A copy of all elements."""
        self._states.tier.require_whole()
        return self._states.read(self._kind, self._first, self._elems)
