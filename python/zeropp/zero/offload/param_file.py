# SPDX-License-Identifier: Apache-2.0
"""Parameters on NVMe: ``Config(offload=Offload(params="nvme", path=...))`` at stage 3 (ZeRO-Infinity, arXiv:2104.07857).

The model's own values live in one scratch file a host; a unit is read when it is needed, ahead of need along the order
of the last pass, and its memory given back when it is not (csrc/zero/offload/unit_file.h). Over several hosts each rank has a file of
its own, with its shards, which are gathered as those in memory are (csrc/zero/placement/nvme_net.c). Everything else
asks for shards here: construction, checkpoints, ``zeropp.memory``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import torch

from zeropp.comm.collective import Ranks
from zeropp.config import Tier
from zeropp.errors import ConfigError
from zeropp.files.scratch import Scratch
from zeropp.zero.model_state import Bytes, ModelState, ParamStore, Unit
from zeropp.zero.offload.storage import FileStorage, FileStore, StreamedValues, io_shape, warn


class ParamFile(FileStore, ParamStore):
    """The file of one prepared model's parameters. Construction is collective, between seal and the first use.

    Args:
        tier: kind "nvme"; ``path``, ``fraction`` and ``checksums`` count.

    Raises:
        zeropp.TierError: the folder cannot be used, or the disk has no room: path, bytes wanted, bytes free. On every
            rank; nothing is left behind.
    """

    in_file = True

    copy_each_host = False
    """True if each of several hosts has a whole copy of the parameters; False: each rank has a file with its shards."""

    def __init__(self, engine: ModelState, tier: Tier, storage: FileStorage) -> None:
        self.fraction, self.storage, self._zero = float(tier.fraction), storage, engine.core
        self.in_memory, self._checksums = tier.kind != "nvme", tier.checksums
        several_hosts = engine.comm is not None and engine.comm.hosts > 1
        self._on_device = engine.offloads  # units are whole there: each rank copies them up from what the host read
        self._owners = engine.ranks if several_hosts and not self.copy_each_host else 0  # of a file each
        self.shared = not self._owners
        """True if the file, and what is read from it, is one for all ranks of the host."""
        here = engine.comm.host_ranks if several_hosts and self.copy_each_host else range(engine.ranks)
        self.ranks, self._writer = len(here), here[0]
        """How many ranks have one copy of the parameters together, and which of them fills a copy that they share."""
        self._figures = self._zero.params_figures
        if self.in_memory:  # the coordinator's, and there is no file
            return
        ranks = Ranks(engine)
        scratch = Scratch(tier.folders, ranks)
        # Hosts may have one folder in common, and a copy in it each; it stays until the last rank leaves.
        self.file = scratch.file(f"params-{here[0]}" if here[0] else "params", shared=self.shared)
        makes = self._owners > 0 or self.writes(engine.rank)

        def work() -> None:
            if self.shared:
                self._check_same_folders(ranks, here)
            ranks.all_do(lambda: self._open(scratch, True) if makes else None)
            ranks.all_do(lambda: None if makes else self._join(scratch))

        self._open_in(scratch, self._zero.params_figures, self._zero.close_params, work)

    def _check_same_folders(self, ranks: Ranks, here: Sequence[int]) -> None:
        """Check that the ranks of a host have the same folders in the same order: a stripe is found by the place of
        its folder."""
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
        if not self.in_memory:
            super().close()

    def shares(self, unit: Unit) -> bool:
        return self.shared and not self._on_device

    def writes(self, rank: int) -> bool:
        return rank == self._writer

    def own_shard(self, unit: Unit) -> torch.Tensor:
        self.require_exact("shards of exact parameters are asked for")
        read = functools.partial(self._read, unit)
        return cast(torch.Tensor, StreamedValues(read, self.storage, unit.dtype, unit.shard.numel()))

    def _read(self, unit: Unit, first: int, elems: int) -> torch.Tensor:
        values = torch.empty(elems, dtype=unit.dtype, device="cpu")
        if elems:
            self._zero.copy_params(unit.index, unit.begin_elems + first, elems, values.data_ptr(), False)
        return values

    def write(self, unit: Unit, first: int, values: torch.Tensor) -> None:
        values = values.detach().reshape(-1).to("cpu", unit.dtype).contiguous()
        if not values.numel():
            return
        try:
            self._zero.copy_params(unit.index, unit.begin_elems + first, values.numel(), values.data_ptr(), True)
        except BaseException as error:
            self.storage.mark_inconsistent(str(error))  # a part of it may be written
            raise

    def planned_bytes(self, engine: ModelState, paper: dict[str, int]) -> Bytes:
        units = [unit for unit in engine.units if unit.in_file]
        found: Bytes = {("cpu", "params"): paper["params"]}
        if not self.in_memory:
            found["nvme", "params"] = 0
        for ranks in {unit.ranks for unit in units}:
            same = [unit for unit in units if unit.ranks == ranks]
            whole, moving = _values_bytes(same), [unit for unit in same if not unit.held]
            in_memory, in_file = self._planned(moving, _values_bytes(moving))
            in_memory += whole - _values_bytes(moving)
            sharers = self._sharers(ranks, engine.ranks)
            found["cpu", "params"] += round(in_memory / sharers - whole / ranks)
            if not self.in_memory:
                found["nvme", "params"] += round(in_file / sharers)
        return found

    def _sharers(self, ranks: int, every: int) -> float:
        """Return how many ranks have one copy together of a unit that so many of every rank partition."""
        return self.ranks * ranks / every

    def _planned(self, units: list[Unit], whole_bytes: int) -> tuple[float, float]:
        """Return (bytes in memory, bytes in the file) of the parameters, of all ranks that have one copy together."""
        return whole_bytes * (1 - self.fraction), whole_bytes * self.fraction

    def held_bytes(self, engine: ModelState) -> Bytes:
        seen = self.figures()
        qcopies = int(seen["qcopies_held_bytes"]) // self.ranks
        found: Bytes = {
            ("cpu", "params"): engine.core.memory()["params"] + qcopies,
            ("cpu", "tier_buffers"): seen["window_bytes"] + seen["staging_bytes"],
        }
        if not self.in_memory:
            found["nvme", "params"] = self._own_bytes_in_file(engine, engine.units)
            found["cpu", "checksums"] = seen["sums_bytes"]
        return found

    def bytes_in_file(self, units: list[Unit]) -> int:
        """Return the bytes of the parameters themselves, without what rounds them up, of `ranks` ranks together."""
        resident_end, total = self.resident_end(), 0
        for unit in (unit for unit in units if unit.in_file):
            if self._owners:  # every rank has as much in its file
                begin = self._shard_address(unit)
                end = begin + unit.shard_elems * unit.dtype.itemsize
                total += self._owners * max(0, end - max(begin, resident_end))
                continue
            for entry in unit.params:
                begin = self.address_of(unit) + entry.offset_elems * unit.dtype.itemsize
                end = begin + entry.numel * unit.dtype.itemsize
                total += max(0, end - max(begin, resident_end))
        return total

    def resident_end(self) -> int:
        """Return the address in the mapping below which parameters stay in memory."""
        seen = self.figures()
        return int(seen["mapping_address"]) + int(seen["resident_bytes"])

    def resident_elems(self, unit: Unit) -> int:
        resident = self.resident_end() - self._shard_address(unit)
        return int(min(max(0, resident) // unit.dtype.itemsize, unit.shard.numel()))

    def address_of(self, unit: Unit) -> int:
        """Return the address of a whole unit in the mapping, which is not where it is computed with on a GPU."""
        return self._shard_address(unit) - unit.begin_elems * unit.dtype.itemsize

    @staticmethod
    def _shard_address(unit: Unit) -> int:
        """Return the address of this rank's shard in the mapping of the file that has it."""
        return int(unit.core.layout()["shard"])

    def second_bytes(self, engine: ModelState) -> int:
        """Return this rank's part of the second copies in the file, where a delayed update writes the parameters."""
        return self._own_bytes_in_file(engine, [unit for unit in engine.units if unit.trainable])

    def _own_bytes_in_file(self, engine: ModelState, units: list[Unit]) -> int:
        """Return this rank's part of :meth:`bytes_in_file`."""
        counts = {unit.ranks for unit in units}
        return sum(
            int(self.bytes_in_file([u for u in units if u.ranks == ranks]) / self._sharers(ranks, engine.ranks))
            for ranks in counts
        )


def _values_bytes(units: list[Unit]) -> int:
    """Return the bytes of all parameters of these units, whole."""
    return sum(entry.numel * unit.dtype.itemsize for unit in units for entry in unit.params)
