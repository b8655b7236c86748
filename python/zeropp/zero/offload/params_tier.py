# SPDX-License-Identifier: Apache-2.0
"""Parameters on NVMe: ``Config(offload=Offload(params="nvme", path=...))`` at stage 3 (ZeRO-Infinity, arXiv:2104.07857).

The model's own values live in one scratch file a host; a unit is read when it is needed, ahead of need along the order
of the last pass, and its memory given back when it is not (csrc/zero/offload/unit_file.h). Over several hosts each rank has a file of
its own, with its shards, which are gathered as those in memory are (csrc/zero/rank_file.h). Everything else asks for shards
here: construction, checkpoints, ``zeropp.memory``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeropp.comm.collective import Ranks
from zeropp.config import Tier
from zeropp.errors import ConfigError
from zeropp.files.scratch import Scratch
from zeropp.zero.offload import stored
from zeropp.zero.offload.storage import FileStorage, Traffic, disk_traffic, end_tier, io_shape, warn

if TYPE_CHECKING:
    from zeropp.zero.engine import Engine, Unit


class ParamsTier:
    """The file of one prepared model's parameters. Construction is collective, between seal and the first use.

    Args:
        tier: kind "nvme"; ``path``, ``fraction`` and ``checksums`` count.

    Raises:
        zeropp.TierError: the folder cannot be used, or the disk has no room: path, bytes wanted, bytes free. On every
            rank; nothing is left behind.
    """

    def __init__(self, engine: Engine, tier: Tier, storage: FileStorage, low: set[nn.Parameter]) -> None:
        self.fraction, self.storage, self._zero = float(tier.fraction), storage, engine.core
        self.stored, self.low, self._checksums = engine.stored, low, tier.checksums
        self.in_memory = tier.kind != "nvme"
        apart = engine.comm is not None and engine.comm.hosts > 1
        self._owners = engine.ranks if apart and self.stored is None else 0  # of a file each
        self.shared = not self._owners
        """Is the file, and what is read from it, one for all ranks of the host?"""
        here = engine.comm.host_ranks if apart and self.stored is not None else range(engine.ranks)
        self.ranks, self.writes = len(here), engine.rank == here[0]
        """How many ranks have one copy of the parameters together; of a copy that they share: does this one write it?"""
        if self.in_memory:  # the coordinator's, and there is no file
            return
        ranks = Ranks(engine)
        scratch = Scratch(tier.folders, ranks)
        # Hosts may have one folder in common, and a copy in it each; it stays until the last rank leaves.
        self.file = scratch.file(f"params-{here[0]}" if here[0] else "params", shared=self.shared)
        self.path = self.file.parts[0]
        makes = self._owners > 0 or self.writes
        try:
            if self.shared:
                self._check_same_folders(ranks, here)
            ranks.all_do(lambda: self._open(scratch, True) if makes else None)
            ranks.all_do(lambda: None if makes else self._join(scratch))
        except BaseException:
            self._zero.close_params()
            scratch.remove()
            raise
        self.traffic: Traffic = Traffic(self._zero.params_figures)
        self._number = disk_traffic.add(self.traffic.figures)
        self._end = weakref.finalize(self, end_tier, self._zero.close_params, self._number, scratch, os.getpid())

    def _check_same_folders(self, ranks: Ranks, here: Sequence[int]) -> None:
        """A stripe is found by the place of its folder among the others. Whether one folder is the same, its file tells."""
        mine = [str(part.parent.parent.resolve()) for part in self.file.parts]
        others = ranks.exchange(mine)

        def check() -> None:
            for rank in here:
                other = others[rank]
                if other != mine and (len(other) > 1 or self.file.folders):
                    raise ConfigError(
                        f"Config.offload.params.path: rank {rank} has {', '.join(other)}, and rank {ranks.rank} {', '.join(mine)}; "
                        "parameters are read by all ranks of a host, so give them the same folders in the same order"
                    )

        ranks.all_do(check)

    def _open(self, scratch: Scratch, make: bool) -> None:
        warn(self._zero.open_params(*self.file.where, make, *io_shape(scratch), self._checksums))

    def _join(self, scratch: Scratch) -> None:
        for part in self.file.parts:
            if not part.exists():  # a write would make one of this rank's own
                raise ConfigError(
                    f"Config.offload.params.path: rank 0 of this host has no file under {part.parent.parent}; parameters are read by "
                    "all ranks of a host, so give them the same folder"
                )
        self._open(scratch, False)

    def close(self) -> None:
        """The model is gone: the scratch file, too."""
        if not self.in_memory:
            self._end()

    def shard_of(self, unit: Unit) -> FiledSlice:
        """This rank's own shard of a unit."""
        if self.stored is not None:
            stored.refuse("slices of exact parameters are asked for", self.stored)
        return FiledSlice(self, unit.index, unit.begin_elems, unit.shard.numel(), unit.dtype)

    def write(self, unit: Unit, first: int, values: torch.Tensor) -> None:
        """Elements of this rank's shard from ``first`` on; inside ``engine.write_shards()``."""
        values = values.detach().reshape(-1).to(unit.dtype).contiguous()
        if not values.numel():
            return
        try:
            self._zero.copy_params(unit.index, unit.begin_elems + first, values.numel(), values.data_ptr(), True)
        except BaseException as error:
            self.storage.tear(str(error))  # a part of it may be written
            raise

    def figures(self) -> dict[str, Any]:
        """``mapping_bytes`` of all these units, ``cut_bytes`` of them held in memory; ``entered_bytes`` now and at their
        peak; ``window_bytes`` of the step's buffers; totals of ``read_bytes``, ``written_bytes``, ``loads``,
        ``load_wait_ns``, ``step_wait_ns``; ``backend``."""
        seen: dict[str, Any] = self._zero.params_figures()
        return seen

    def planned_bytes(self, units: list[Unit]) -> tuple[float, float]:
        """(in memory, in the file) of the parameters, as they are kept there; of `ranks` ranks together."""
        units = [unit for unit in units if unit.filed]
        if self.stored is None:
            values = sum(e.numel * u.dtype.itemsize for u in units for e in u.params)
            return values * (1 - self.fraction), values * self.fraction
        cut = self._cut_address()
        values = sum(e.numel * u.dtype.itemsize for u in units if u.whole.data_ptr() < cut for e in u.params)
        kept = [unit for unit in units if unit.whole.data_ptr() >= cut]
        images = stored.kept_bytes(kept, self.low, stored.BITS[self.stored])
        in_file = 0.0 if self.in_memory else images * self.fraction
        return values + images - in_file, in_file

    def images_held_bytes(self) -> int:
        """Of parameters in fewer bits, in memory; of `ranks` ranks together."""
        return int(self.figures()["images_held_bytes"])

    def bytes_in_file(self, units: list[Unit]) -> int:
        """Of the parameters themselves, without what rounds them up; of `ranks` ranks together."""
        if self.stored is not None:
            return int(self.figures()["images_bytes"]) - self.images_held_bytes()
        cut, total = self._cut_address(), 0
        for unit in units:
            if not unit.filed:
                continue
            if self._owners:  # every rank has as much in its file
                begin = self._shard_address(unit)
                end = begin + unit.shard_elems * unit.dtype.itemsize
                total += self._owners * max(0, end - max(begin, cut))
                continue
            for entry in unit.params:
                begin = unit.whole.data_ptr() + entry.offset_elems * unit.dtype.itemsize
                end = begin + entry.numel * unit.dtype.itemsize
                total += max(0, end - max(begin, cut))
        return total

    def _cut_address(self) -> int:
        """In the home: what lies before it is held in memory."""
        seen = self.figures()
        return int(seen["mapping_address"]) + int(seen["cut_bytes"])

    def held_elems(self, unit: Unit) -> int:
        """Of this rank's shard, its first ones, which are in memory for good."""
        held = self._cut_address() - self._shard_address(unit)
        return int(min(max(0, held) // unit.dtype.itemsize, unit.shard.numel()))

    @staticmethod
    def _shard_address(unit: Unit) -> int:
        """In the home of the file that has it."""
        return int(unit.core.layout()["shard"])

    def second_bytes(self, units: list[Unit]) -> int:
        """In the file besides, of `ranks` ranks together: where a delayed update writes those parameters."""
        return self.bytes_in_file([unit for unit in units if unit.trainable])


class FiledSlice:
    """Like a 1-D tensor to whoever writes it to a file: it has a shape, shards, and ``parts`` in place of data."""

    BLOCK_BYTES = 4 << 20

    def __init__(self, tier: ParamsTier, index: int, first: int, elems: int, dtype: torch.dtype) -> None:
        self._tier, self._index, self._first, self._elems, self.dtype = tier, index, first, elems, dtype
        self.shape = torch.Size([elems])

    def numel(self) -> int:
        return self._elems

    def element_size(self) -> int:
        return self.dtype.itemsize

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def detach(self) -> FiledSlice:
        return self

    def __getitem__(self, part: slice) -> FiledSlice:
        first, last, _ = part.indices(self._elems)
        return FiledSlice(self._tier, self._index, self._first + first, max(0, last - first), self.dtype)

    def _read(self, first: int, elems: int) -> torch.Tensor:
        values = torch.empty(elems, dtype=self.dtype)
        if elems:
            self._tier._zero.copy_params(self._index, self._first + first, elems, values.data_ptr(), False)
        return values

    def parts(self) -> Iterator[torch.Tensor]:
        """The elements in order, a few MiB at a time."""
        self._tier.storage.require_whole()
        step = self.BLOCK_BYTES // self.dtype.itemsize
        for done in range(0, self._elems, step):
            yield self._read(done, min(step, self._elems - done))

    def tensor(self) -> torch.Tensor:
        """A copy of all elements."""
        self._tier.storage.require_whole()
        return self._read(0, self._elems)
