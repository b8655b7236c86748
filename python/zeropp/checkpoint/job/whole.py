# SPDX-License-Identifier: Apache-2.0
"""Whole tensors of a job whose ranks hold different parts of the model: each is put together from the shards of all ranks.

No rank gathers a unit for it. Pieces travel in rounds of a few megabytes, each one exchange over all ranks of the job, and
are copied to their boxes of the whole tensor. Where one rank alone wants the tensors, nothing goes to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeropp import _C
from zeropp.checkpoint.job.layout import Layout, entries_of, layout_of
from zeropp.comm.collective import broadcast, job_of
from zeropp.comm.group import BYTES, rows_of
from zeropp.zero.engine import Engine
from zeropp.zero.model.boxes import common, flat_at, strides_of, whole_of
from zeropp.zero.model.buffers import loose_tensors
from zeropp.zero.model_state import Entry, Unit

_ALL_TO_ALL = _C.COMM_COLLECTIVES["all_to_all"]
LEAST_ROUND_BYTES = 64 << 10

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


@dataclass(frozen=True)
class _Range:
    """Elements of a piece that travel in one round."""

    rank: int
    name: str
    part: int
    begin: int
    end: int


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

    def without_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield on meta all that :meth:`stream` yields, in its order."""
        for name, one in self.tensors.items():
            yield name, _shaped(self._empty(name, "meta"), one)
        for name, (shape, dtype) in self._buffers.items():
            yield name, torch.empty(shape, dtype=dtype, device="meta")

    def stream(
        self, round_bytes: int, only: Callable[[str], bool] | None, root: int | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor on the CPU) for all parameters, then for all buffers.

        Args:
            round_bytes: what travels at once.
            root: the one rank that gets the parameters; the others yield them on meta. None: all ranks get them. All get the
                buffers, which any rank may have.

        Memory: ``round_bytes``, and tensors of as many bytes in all or one larger tensor; without tensors ``round_bytes``.
        """
        wanted = [name for name, one in self.tensors.items() if only is None or any(map(only, one.names))]
        here = root is None or root == self._job.rank
        whole: dict[str, torch.Tensor] = {}
        for ranges, done in self._rounds(wanted, max(round_bytes, LEAST_ROUND_BYTES)):
            self._take(ranges, whole, root)
            for name in done:
                if name not in whole:  # without elements, or another rank's
                    whole[name] = self._empty(name, "cpu" if here else "meta")
                yield name, _shaped(whole.pop(name), self.tensors[name])
        yield from self._whole_buffers(only)

    def _whole_buffers(self, only: Callable[[str], bool] | None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (shape, dtype) in self._buffers.items():
            if only is None or only(name):
                mine = self._loose.get(name)
                own = None if mine is None else mine.detach().to("cpu", copy=True).contiguous()
                values = torch.empty(shape, dtype=dtype, device="cpu") if own is None else own
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

    def _rounds(self, names: list[str], round_bytes: int) -> Iterator[tuple[list[_Range], list[str]]]:
        """Yield (what travels in one round, the tensors that are whole after it), equal on all ranks. Small tensors share a round;
        a larger one has rounds of its own, so that no other one is begun before it is handed on."""
        ranges: list[_Range] = []
        done: list[str] = []
        sent = held = 0
        for name in names:
            if ranges and held + self.tensors[name].nbytes > round_bytes:
                yield ranges, done
                ranges, done, sent, held = [], [], 0, 0
            for one in self._ranges(name, round_bytes):
                if ranges and sent + self._bytes(one) > round_bytes:
                    yield ranges, done
                    ranges, done, sent = [], [], 0
                ranges.append(one)
                sent += self._bytes(one)
            done.append(name)
            held += self.tensors[name].nbytes
        yield ranges, done

    def _ranges(self, name: str, round_bytes: int) -> Iterator[_Range]:
        """Yield the pieces of a tensor, in turns of the ranks that have them, so that all of these have a part of each round."""
        one = self.tensors[name]
        every = [(rank, *piece) for rank, pieces in enumerate(one.pieces) for piece in pieces]
        most = max(1, round_bytes // max(1, len(every)) // one.dtype.itemsize)
        for first in range(0, max((end - begin for _, _, begin, end in every), default=0), most):
            for rank, part, begin, end in every:
                if begin + first < end:
                    yield _Range(rank, name, part, begin + first, min(begin + first + most, end))

    def _empty(self, name: str, device: str) -> torch.Tensor:
        one = self.tensors[name]
        return torch.empty(one.numel, dtype=one.dtype, device=device)

    def _bytes(self, one: _Range) -> int:
        return (one.end - one.begin) * self.tensors[one.name].dtype.itemsize

    def _take(self, ranges: list[_Range], whole: dict[str, torch.Tensor], root: int | None) -> None:
        """Exchange the values of one round, and put those that come here into their tensors."""
        me = self._job.rank
        receives = range(self._job.count) if root is None else [root]
        own = [one for one in ranges if one.rank == me]
        coming: list[list[_Range]] = [[] for _ in range(self._job.count)]
        if me in receives:
            for one in own:
                self._place(one, self._values(one), whole)
            for one in ranges:
                coming[one.rank].append(one)
            coming[me] = []
        if self._job.comm is not None:
            self._exchange_into(whole, own, [rank for rank in receives if rank != me], coming)

    def _exchange_into(
        self, whole: dict[str, torch.Tensor], own: list[_Range], to: list[int], coming: list[list[_Range]]
    ) -> None:
        """Give own ranges to some ranks, and place those that come from each rank."""
        mine = self._packed(own if to else [])
        counts = [sum(map(self._bytes, some)) for some in coming]
        data = torch.empty(sum(counts), dtype=torch.uint8, device="cpu")
        going = [(mine.data_ptr(), mine.numel()) if rank in to else (0, 0) for rank in range(self._job.count)]
        self._job.comm.exchange(_ALL_TO_ALL, BYTES, 0, rows_of(data, counts), going)
        in_order = [one for some in coming for one in some]
        for one, values in zip(in_order, data.split(list(map(self._bytes, in_order))), strict=bool(in_order)):
            self._place(one, values, whole)

    def _values(self, one: _Range) -> torch.Tensor:
        """Return the bytes of a range that this rank has."""
        return _shard_values(*self._own[one.name], one.begin, one.end).contiguous().view(torch.uint8)

    def _packed(self, own: list[_Range]) -> torch.Tensor:
        mine, at = torch.empty(sum(map(self._bytes, own)), dtype=torch.uint8, device="cpu"), 0
        for one in own:
            mine[at : at + self._bytes(one)] = self._values(one)
            at += self._bytes(one)
        return mine

    def _place(self, one: _Range, data: torch.Tensor, whole: dict[str, torch.Tensor]) -> None:
        """Copy the values of a range to their boxes of the whole tensor."""
        tensor, held = self.tensors[one.name], self._layout.parts[one.name][one.part]
        if one.name not in whole:
            whole[one.name] = self._empty(one.name, "cpu")
        flat, all_of_it = whole[one.name], whole_of(tensor.shape)
        if held == all_of_it:
            flat[one.begin : one.end].view(torch.uint8).copy_(data)
            return
        values = torch.empty(one.end - one.begin, dtype=tensor.dtype, device="cpu")
        values.view(torch.uint8).copy_(data)  # they lie at any address among the bytes of others
        for copy in common(held, one.begin, one.end, all_of_it, 0, tensor.numel):
            source = values.as_strided(copy.size, strides_of(held.shape), flat_at(held.shape, copy.source) - one.begin)
            at = flat_at(tensor.shape, copy.target)
            flat.as_strided(copy.size, strides_of(tensor.shape), at).copy_(source)


def _shaped(flat: torch.Tensor, one: _Tensor) -> torch.Tensor:
    return torch.view_as_complex(flat.view(*one.shape, 2)) if one.is_complex else flat.view(one.shape)


def _shard_values(unit: Unit, entry: Entry, begin: int, end: int) -> torch.Tensor:
    """Return elements of a local tensor out of this rank's shard, in the type of the parameters."""
    first = entry.offset_elems + begin - unit.begin_elems
    values: Any = unit.params_in.own_shard(unit)[first : first + end - begin]
    found: torch.Tensor = values.tensor() if hasattr(values, "tensor") else values.detach()
    return found.to("cpu", unit.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
