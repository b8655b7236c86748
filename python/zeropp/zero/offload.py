# SPDX-License-Identifier: Apache-2.0
"""Optimizer states on NVMe: ``Config(offload=Offload(optimizer="nvme", path=...))`` (ZeRO-Infinity, arXiv:2104.07857).

The fp32 master weights and Adam's moments of this rank's slices live in one scratch file; ``optimizer.step()`` streams
them through a few buffers (csrc/zero/tier.h), so the memory they take does not grow with the model. Everything else
asks for them here, in pieces: checkpoints, ``gathered(write=True)``, ``zeropp.memory``.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from zeropp import _C
from zeropp.config import Tier
from zeropp.errors import Error, TierError
from zeropp.zero.agree import Ranks
from zeropp.zero.scratch import Scratch

if TYPE_CHECKING:
    from zeropp.zero.engine import Engine

#: enum zpp_tier_kind
KINDS = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
BLOCK_ELEMS = 1 << 20
"""Elements of one piece on its way between the tier and somebody else: 4 MiB."""


class StateTier:
    """The optimizer states of one prepared model on this rank, in a scratch file. Construction is collective.

    Args:
        tier: kind "nvme"; ``path`` and ``fraction`` count.
        amsgrad: some parameter group keeps the running maximum too.

    Raises:
        zeropp.TierError: the folder cannot be used, or the disk has no room: path, bytes wanted, bytes free. On every
            rank; nothing is left behind.
    """

    def __init__(self, engine: Engine, tier: Tier, amsgrad: bool) -> None:
        assert tier.path is not None
        self.fraction, self.amsgrad = float(tier.fraction), amsgrad
        self._ranks = Ranks(engine)
        self._unloaded: set[int] = set()
        self._indices = [unit.index for unit in engine.units if unit.trainable]
        self._failure = ""
        self._steps = 0
        scratch = Scratch(tier.path, self._ranks)
        try:
            self._ranks.all_do(lambda: self._make(engine, scratch))
        except BaseException:
            scratch.remove()
            raise
        self._end = weakref.finalize(self, _end, self.core, scratch, os.getpid())

    def _make(self, engine: Engine, scratch: Scratch) -> None:
        from zeropp.io_settings import measured

        known = measured(scratch.folder)
        depth, block_bytes = (0, 0) if known is None else (known.depth, known.block_bytes)
        self.path = scratch.folder / "states"
        self.core = _C.Tier(os.fsencode(self.path), self.fraction, self.amsgrad, 0, 0, depth, block_bytes)
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
        self._warn()
        engine.core.set_tier(self.core)

    def _warn(self) -> None:
        warning = self.core.take_warning()
        if warning:
            logging.getLogger("zeropp.aio").warning(warning)

    def close(self) -> None:
        """The model is gone: the scratch file, too."""
        self._end()

    # -- a step that failed ----------------------------------------------------------------------------------------------

    def agree(self, error: BaseException | None) -> None:
        """Collective, after every step: it succeeded on all ranks, or raises on all of them.

        Where some slices were stepped and others not, here or elsewhere, everything but a load is refused from then on.
        A rank that was interrupted after its step raises alone: nothing is torn.
        """
        steps = self.core.figures()["steps"]
        state = "torn" if self.core.torn else "stepped" if steps != self._steps else "unchanged"
        self._steps = steps
        mine = {"state": state, "kind": "" if error is None else type(error).__name__, "said": str(error)}
        every = self._ranks.exchange(mine)
        states = {one["state"] for one in every}
        failed = [(rank, one) for rank, one in enumerate(every) if one["kind"]]
        if failed and states not in ({"stepped"}, {"unchanged"}):
            self._tear(f"rank {failed[0][0]}: {failed[0][1]['said']}")
        if error is not None:
            raise error
        if failed and states != {"stepped"}:
            rank, one = failed[0]
            kind = TierError if one["kind"] == TierError.__name__ else Error
            raise kind(f"rank {rank}: {one['said'] or one['kind']}")

    def _tear(self, reason: str) -> None:
        self._unloaded = set(self._indices)
        self._failure = reason

    def require_whole(self) -> None:
        """Raises zeropp.Error if a step or a write failed half-way, and no checkpoint was loaded since."""
        if self._unloaded:
            raise Error(
                "weights and optimizer states are torn by a step that failed half-way; zeropp.load(path, model, "
                f"optimizer) brings back the last checkpoint. It failed by: {self._failure}"
            )

    def loaded(self, index: int) -> None:
        """All states of that unit were loaded."""
        self._unloaded.discard(index)
        if not self._unloaded:
            self.core.mend()

    # -- figures -----------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Bytes by kind in the ``file`` and ``held`` in memory, ``buffer_bytes``, ``reserved_bytes``; totals of
        ``read_bytes``, ``written_bytes``, ``steps``, ``step_ns``, ``waited_ns`` (for the file, inside steps);
        ``backend``."""
        seen: dict[str, Any] = self.core.figures()
        for where in ("file", "held"):
            seen[where] = dict(zip(KINDS, seen[where], strict=True))
        return seen


def _end(core: Any, scratch: Scratch, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves its parent's files alone
        core.close()
        scratch.remove()


class TieredStates:
    """The states of one unit's slice. ``kinds``: the moments that exist, none before the first step."""

    def __init__(self, tier: StateTier, slice_: int, elems: int, has_master: bool, index: int) -> None:
        self.tier, self.slice, self.elems, self.has_master, self.index = tier, slice_, elems, has_master, index
        self.kinds: tuple[str, ...] = ()

    def read(self, kind: str, first: int, elems: int) -> torch.Tensor:
        """A copy of some elements, fp32."""
        values = torch.empty(elems, dtype=torch.float32)
        self.tier.core.copy(self.slice, KINDS.index(kind), first, elems, values.data_ptr(), False)
        return values

    def write(self, kind: str, first: int, values: torch.Tensor) -> None:
        """Elements from ``first`` on."""
        values = values.detach().reshape(-1).to(torch.float32).contiguous()
        if not values.numel():
            return
        try:
            self.tier.core.copy(self.slice, KINDS.index(kind), first, values.numel(), values.data_ptr(), True)
        except Error as error:
            self.tier._tear(str(error))  # a part of it may be written
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
    """Like a 1-D fp32 tensor to whoever writes it to a file: it has a shape, slices, and ``parts`` in place of data."""

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
