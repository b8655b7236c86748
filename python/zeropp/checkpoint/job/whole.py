# SPDX-License-Identifier: Apache-2.0
"""Whole tensors of a job whose ranks hold different parts of the model: each is put together from the shards of all ranks.

No rank gathers a unit for it. Every rank gives what it has of a bucket of parameters, one exchange over all ranks of the
job brings the pieces, and each is copied to its boxes of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeropp.checkpoint.job.layout import Layout, entries_of, layout_of
from zeropp.comm.collective import all_gather, broadcast, job_of
from zeropp.zero.engine import Engine
from zeropp.zero.model.boxes import common, flat_at, strides_of, whole_of
from zeropp.zero.model.buffers import loose_tensors
from zeropp.zero.model_state import Entry, Unit

Piece = tuple[int, int, int]
"""Part of the parameter, first element of its flattened local tensor, last + 1."""


@dataclass
class _Tensor:
    """One whole tensor of the job."""

    names: list[str]
    shape: tuple[int, ...]
    dtype: torch.dtype  # of its numbers
    is_complex: bool
    pieces: list[list[Piece]]  # by rank

    @property
    def numel(self) -> int:
        return math.prod(self.shape) * (2 if self.is_complex else 1)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class JobState:
    """All parameters and buffers of a job. Construction and :meth:`stream` are collective over all its ranks."""

    def __init__(self, engine: Engine, model: nn.Module, what: str) -> None:
        self._engine, self._job = engine, job_of(engine)
        self._layout: Layout = layout_of(engine, model, what)
        self._own = {entry.names[0]: (unit, entry) for unit, entry in entries_of(engine)}
        self._loose = dict(loose_tensors(model))
        every = self._job.exchange(
            {
                "parameters": dict(self._own_pieces()),
                "buffers": {name: [list(t.shape), _name(t.dtype)] for name, t in self._loose.items()},
            }
        )
        self.tensors: dict[str, _Tensor] = {}
        self._buffers: dict[str, tuple[list[int], torch.dtype]] = {}
        for rank, one in enumerate(every):
            for name, described in one["parameters"].items():
                self._add(rank, name, described)
            for name, (shape, dtype) in one["buffers"].items():
                self._buffers.setdefault(name, (shape, getattr(torch, dtype)))

    def sizes(self) -> list[tuple[str, int]]:
        """Return (name, bytes) of all that :meth:`stream` yields, in its order."""
        buffers = [(name, math.prod(shape) * dtype.itemsize) for name, (shape, dtype) in self._buffers.items()]
        return [*((name, one.nbytes) for name, one in self.tensors.items()), *buffers]

    def stream(self, bucket_bytes: int, only: Callable[[str], bool] | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor on the CPU) for all parameters, then for all buffers."""
        wanted = [name for name, one in self.tensors.items() if only is None or any(map(only, one.names))]
        bucket: list[str] = []
        held = 0
        for name in wanted:
            if bucket and held + self.tensors[name].nbytes > bucket_bytes:
                yield from self._assembled(bucket)
                bucket, held = [], 0
            bucket.append(name)
            held += self.tensors[name].nbytes
        yield from self._assembled(bucket)
        for name, (shape, dtype) in self._buffers.items():
            if only is None or only(name):
                mine = self._loose.get(name)
                values = torch.empty(shape, dtype=dtype, device="cpu") if mine is None else mine.detach().clone()
                values = values.cpu().contiguous()
                broadcast(self._job.comm, values, self._layout.buffers[name])
                yield name, values

    def _own_pieces(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield (name, what this rank says of a parameter, with its piece where it is to give it)."""
        layout = self._layout
        for unit in self._engine.units:
            gives = self._engine.stage > 0 or layout.is_first(unit)
            found = {index: (first, elems) for index, first, elems in unit.pieces()}
            for index, entry in enumerate(unit.params):
                pieces = []
                if gives and index in found and layout.writes(unit, entry):
                    begin = unit.begin_elems + found[index][0] - entry.offset_elems
                    pieces.append((layout.part(entry), begin, begin + found[index][1]))
                shape = list(entry.held.whole)
                yield entry.names[0], [entry.names, shape, _name(unit.dtype), entry.is_complex, pieces]

    def _add(self, rank: int, name: str, described: list[Any]) -> None:
        names, shape, dtype, is_complex, pieces = described
        if name not in self.tensors:
            ranks: list[list[Piece]] = [[] for _ in range(self._job.count)]
            self.tensors[name] = _Tensor(names, tuple(shape), getattr(torch, dtype), is_complex, ranks)
        self.tensors[name].pieces[rank] = [(part, begin, end) for part, begin, end in pieces]

    def _assembled(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of one bucket, whose pieces travel together, as bytes."""
        if not names:
            return
        lengths = [sum(self._bytes(name, rank) for name in names) for rank in range(self._job.count)]
        mine = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        at = 0
        for name in names:
            for piece in self.tensors[name].pieces[self._job.rank]:
                values = _shard_values(*self._own[name], piece).contiguous().view(torch.uint8)
                mine[at : at + values.numel()] = values
                at += values.numel()
        every = torch.empty(len(lengths) * mine.numel(), dtype=torch.uint8, device="cpu")
        all_gather(self._job.comm, every, mine)
        places = [rank * mine.numel() for rank in range(len(lengths))]
        for name in names:
            yield name, self._whole(name, every, places)

    def _bytes(self, name: str, rank: int) -> int:
        one = self.tensors[name]
        return sum(end - begin for _, begin, end in one.pieces[rank]) * one.dtype.itemsize

    def _whole(self, name: str, every: torch.Tensor, places: list[int]) -> torch.Tensor:
        """Return one tensor; ``places``: where the rest of each rank's bytes begins, moved on by what is read."""
        one = self.tensors[name]
        shape = (*one.shape, 2) if one.is_complex else one.shape
        whole, flat = whole_of(one.shape), torch.empty(one.numel, dtype=one.dtype, device="cpu")
        for rank, pieces in enumerate(one.pieces):
            for part, begin, end in pieces:
                size = (end - begin) * one.dtype.itemsize
                values = every[places[rank] : places[rank] + size].clone().view(one.dtype)
                places[rank] += size
                held = self._layout.parts[name][part]
                if held == whole:
                    flat[begin:end] = values
                    continue
                for copy in common(held, begin, end, whole, 0, one.numel):
                    source = values.as_strided(
                        copy.size, strides_of(held.shape), flat_at(held.shape, copy.source) - begin
                    )
                    flat.as_strided(copy.size, strides_of(one.shape), flat_at(one.shape, copy.target)).copy_(source)
        return torch.view_as_complex(flat.view(shape)) if one.is_complex else flat.view(shape)


def _shard_values(unit: Unit, entry: Entry, piece: Piece) -> torch.Tensor:
    """Return a piece out of this rank's shard, in the type of the parameters."""
    _, begin, end = piece
    first = entry.offset_elems + begin - unit.begin_elems
    values: Any = unit.params_in.own_shard(unit)[first : first + end - begin]
    found: torch.Tensor = values.tensor() if hasattr(values, "tensor") else values.detach()
    return found.to("cpu", unit.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
