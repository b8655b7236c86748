# SPDX-License-Identifier: Apache-2.0
"""Optimizer states on NVMe: ``Config(offload=Offload(optimizer="nvme", path=...))`` (ZeRO-Infinity, arXiv:2104.07857).

The fp32 master weights and the optimizer's moments of this rank's shards live in one scratch file; ``optimizer.step()`` streams
them through a few buffers (csrc/zero/offload/optim_file.h), so the memory they take does not grow with the model. Everything else
asks for them here, in pieces: checkpoints, ``gathered(write=True)``, ``zeropp.memory``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from zeropp import _C
from zeropp.comm.collective import Ranks
from zeropp.config import Tier
from zeropp.errors import ConfigError, Error
from zeropp.files.scratch import Scratch
from zeropp.zero.engine import Engine
from zeropp.zero.formulas import split
from zeropp.zero.model_state import Bytes, ModelState, StateStore, Unit
from zeropp.zero.offload.storage import FileStorage, FileStore, StreamedValues, io_shape, warn

BLOCK_ELEMS = 1 << 20
"""Elements of one piece on its way between the file and its user: 4 MiB."""


class OptimFile(FileStore, StateStore):
    """The optimizer states of one prepared model on this rank, in a scratch file. Construction is collective.

    Args:
        tier: kind "nvme"; ``path``, ``fraction`` and ``checksums`` count.
        moments: what the optimizer calls its moments, in the order of enum zpp_optim_file_kind; empty: it has none.

    Raises:
        zeropp.TierError: the folder cannot be used, or the disk has no room: path, bytes wanted, bytes free. On every
            rank; nothing is left behind.
    """

    in_file = True

    def __init__(self, engine: Engine, tier: Tier, moments: tuple[str, ...], storage: FileStorage) -> None:
        self.fraction, self.storage = float(tier.fraction), storage
        self.kinds = ("master", *moments)
        ranks = Ranks(engine)
        scratch = Scratch(tier.folders, ranks)
        self.file = scratch.file("states")
        self._shards: dict[int, tuple[int, bool]] = {}
        """By unit: its number in the file, and whether it has a master."""
        self._moments: dict[int, tuple[str, ...]] = {}
        """By unit: the moments that exist, none before the first step."""
        bits = sum(1 << k for k, name in enumerate(moments) if name)
        made: list[_C.OptimFile] = []

        def make() -> None:
            inside = engine.config.step_in_backward
            made.append(
                _C.OptimFile(*self.file.where, self.fraction, bits, 0, 0, *io_shape(scratch), tier.checksums, inside)
            )
            self.core = made[0]
            self._lay_out(engine)

        def close() -> None:
            for core in made:
                core.close()

        self._open_in(scratch, lambda: made[0].figures(), close, lambda: ranks.all_do(make))
        storage.checks.append(lambda: bool(made[0].inconsistent))
        storage.after_recovery.append(made[0].recovered)

    def _lay_out(self, engine: Engine) -> None:
        for held in (True, False):
            for unit in (unit for unit in engine.trained if unit.held == held):
                has_master = unit.dtype != torch.float32
                self._shards[unit.index] = self.core.add(unit.shard.numel(), has_master), has_master
                self._moments[unit.index] = ()
                unit.states_in = self
            if held:
                self.core.hold()
        self.core.seal()
        warn(self.core.take_warning())
        engine.core.set_optim_file(self.core)

    def figures(self) -> dict[str, Any]:
        """Return bytes by kind in the ``file`` and ``held`` in memory, ``buffer_bytes``, ``reserved_bytes``, ``sums_bytes``; totals
        of ``read_bytes``, ``checked_bytes``, ``written_bytes``, ``steps``, ``step_ns``, ``waited_ns`` (for the file, inside steps);
        ``backend``."""
        seen = super().figures()
        for where in ("file", "held"):
            seen[where] = {kind: size for kind, size in zip(self.kinds, seen[where], strict=True) if kind}
        return seen

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _copy(self, unit: Unit, kind: str, first: int, values: torch.Tensor, write: bool) -> None:
        if kind not in self.kinds:
            has = ", ".join(map(repr, filter(None, self.kinds)))
            raise Error(
                f"{kind!r}: with offload.optimizer='nvme' the file has no room for it, only for {has}; build the optimizer as the one whose "
                "states these are, before zeropp.prepare"
            )
        number = self._shards[unit.index][0]
        self.core.copy(number, self.kinds.index(kind), first, values.numel(), values.data_ptr(), write)

    def _read(self, unit: Unit, kind: str, first: int, elems: int) -> torch.Tensor:
        values = torch.empty(elems, dtype=torch.float32, device="cpu")
        self._copy(unit, kind, first, values, False)
        return values

    def _write(self, unit: Unit, kind: str, first: int, values: torch.Tensor) -> None:
        values = values.detach().reshape(-1).to("cpu", torch.float32).contiguous()
        if not values.numel():
            return
        try:
            self._copy(unit, kind, first, values, True)
        except Error as error:
            self.storage.mark_inconsistent(str(error))  # a part of it may be written
            raise

    def _view(self, unit: Unit, kind: str) -> torch.Tensor:
        """Return all elements, to be read in pieces."""
        read = functools.partial(self._read, unit, kind)
        return cast(torch.Tensor, StreamedValues(read, self.storage, torch.float32, unit.shard.numel()))

    # -- masters -------------------------------------------------------------------------------------------------------

    def own(self, unit: Unit) -> torch.Tensor:
        self.storage.require_whole()
        return self._view(unit, "master") if self._shards[unit.index][1] else super().own(unit)

    def has_master(self, unit: Unit) -> bool:
        return self._shards[unit.index][1] or super().has_master(unit)

    def keep_master(self, unit: Unit, values: torch.Tensor) -> None:
        for first in range(0, values.numel(), BLOCK_ELEMS):
            self.write_master(unit, first, values[first : first + BLOCK_ELEMS])

    def write_master(self, unit: Unit, first: int, values: torch.Tensor) -> None:
        if self._shards[unit.index][1]:
            self._write(unit, "master", first, values)
        else:
            super().write_master(unit, first, values)

    def update_master(self, unit: Unit, change: Callable[[int, torch.Tensor], bool]) -> None:
        if not self._shards[unit.index][1]:
            super().update_master(unit, change)
            return
        for first in range(0, unit.shard.numel(), BLOCK_ELEMS):
            values = self._read(unit, "master", first, min(BLOCK_ELEMS, unit.shard.numel() - first))
            if change(first, values):
                self._write(unit, "master", first, values)

    # -- moments -------------------------------------------------------------------------------------------------------

    def states(self, unit: Unit) -> dict[str, torch.Tensor]:
        return {kind: self._view(unit, kind) for kind in self._moments[unit.index]}

    def count(self, unit: Unit) -> int:
        return len(self._moments[unit.index])

    def in_place(self, unit: Unit) -> bool:
        return False

    def load(self, unit: Unit, values: dict[str, torch.Tensor]) -> None:
        for name, one in values.items():
            self._write(unit, name, 0, one)
        self._moments[unit.index] = tuple(values)

    def write(self, unit: Unit, kind: str, index: int, first: int, values: torch.Tensor) -> None:
        self._write(unit, kind, first, values)

    def bind(self, unit: Unit, names: tuple[str, ...]) -> None:
        assert unit.steps is not None
        wanted = tuple(filter(None, names))
        for name in wanted:
            if name not in self.kinds:
                switch = "momentum" if name == "momentum_buffer" else "amsgrad"
                raise ConfigError(
                    f"optimizer.step: {switch} was switched on after zeropp.prepare; with offload.optimizer='nvme' the file "
                    f"has no room for its states; build the optimizer with {switch}"
                )
        unit.core.set_states_in_file(self._shards[unit.index][0], unit.steps.data_ptr(), unit.groups)
        self._moments[unit.index] = wanted

    def check_capacity(self, optimizer: torch.optim.Optimizer, moments: tuple[str, ...]) -> None:
        lacks = [one for one in moments if one and one not in self.kinds]
        if lacks:
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} keeps {', '.join(map(repr, lacks))}, for which the file of offload.optimizer='nvme' has no "
                "room: it was laid out without an optimizer, for Adam's; give prepare the model and the optimizer together"
            )

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def planned_moments(self, least: int) -> int:
        return sum(map(bool, self.kinds[1:]))

    def planned_bytes(self, engine: ModelState, paper: dict[str, int]) -> Bytes:
        found: Bytes = {}
        for kind in ("master", "optimizer"):
            found["cpu", kind], found["nvme", kind] = split(engine, paper, kind, self.fraction)
        return found

    def held_bytes(self, engine: ModelState) -> Bytes:
        """Return the bytes in memory and in the file. Moments count once they exist."""
        seen = self.figures()
        found: Bytes = {("cpu", "tier_buffers"): seen["buffer_bytes"], ("cpu", "checksums"): seen["sums_bytes"]}
        for tier, sizes in (("cpu", seen["held"]), ("nvme", seen["file"])):
            moments = sum(size for kind, size in sizes.items() if kind != "master")
            found[tier, "master"] = sizes["master"]
            found[tier, "optimizer"] = moments if any(self._moments.values()) else 0
        return found
