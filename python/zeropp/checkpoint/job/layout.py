# SPDX-License-Identifier: Apache-2.0
"""Who saves what: the parts of each parameter that the ranks of a job hold, and the group of ranks that writes each part.

Ranks with the same coordinates in the model dimensions are a group: ZeRO cuts their units over them. Several groups may
hold the same part: a norm that tensor parallelism does not cut, an embedding that two pipeline stages share. The group
with the lowest rank writes it, and so every copy is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zeropp.checkpoint.content import Parts, part_json, parts_of, problem_of_parts
from zeropp.comm.collective import job_of
from zeropp.errors import CheckpointError
from zeropp.zero.engine import Engine
from zeropp.zero.model.boxes import Boxes, is_held
from zeropp.zero.model.buffers import loose_tensors
from zeropp.zero.model_state import Entry, Unit


@dataclass
class Layout:
    """The parts of every parameter of a job. Equal on all ranks but for ``rank`` and ``firsts``."""

    rank: int
    firsts: list[int]
    """By unit: the first of the ranks that it is cut over, as the job numbers them."""
    parts: dict[str, Parts] = field(default_factory=dict)
    """By the first name of a parameter: the different parts that ranks hold."""
    writers: dict[str, list[int]] = field(default_factory=dict)
    """For each part: the first rank of the group that writes it."""
    buffers: dict[str, int] = field(default_factory=dict)
    """The rank that writes each buffer."""

    @property
    def describes(self) -> bool:
        """True on the first rank of any group."""
        return self.rank in self.firsts

    def is_first(self, unit: Unit) -> bool:
        """True on the first of the ranks that a unit is cut over."""
        return self.firsts[unit.index] == self.rank

    def is_cut(self, name: str) -> bool:
        """True if a manifest has to say what a parameter's parts are: there are several, or one that is no plain copy."""
        return len(self.parts[name]) > 1 or not self.parts[name][0].is_whole

    def part(self, entry: Entry) -> int:
        """Return the number of the part that this rank has of a parameter."""
        return self.parts[entry.names[0]].index(entry.held)

    def writes(self, unit: Unit, entry: Entry) -> bool:
        """True if the ranks that a unit is cut over write its part of a parameter."""
        return self.writers[entry.names[0]][self.part(entry)] == self.firsts[unit.index]


def layout_of(engine: Engine, model: nn.Module, what: str) -> Layout:
    """Return the layout of a job; collective over all its ranks. ``what`` begins messages.

    Raises:
        zeropp.CheckpointError: ranks hold parts of one parameter that overlap, that leave a gap, or that are of tensors of
            different shapes; names the parameter. On every rank.
    """
    refuse_unknown_parts(engine, what)
    job = job_of(engine)
    numbers = [job.rank] if job.comm is None else list(job.comm.job_ranks)
    firsts = [job.rank if unit.comm is None else numbers.index(unit.comm.job_ranks[0]) for unit in engine.units]
    layout = Layout(job.rank, firsts)
    for rank, one in enumerate(job.exchange(_held_here(engine, model, layout))):
        for name, described in one["parameters"].items():
            _add(layout, rank, name, parts_of(described)[0], what)
        for name in one["buffers"]:
            layout.buffers.setdefault(name, rank)
    for name, parts in layout.parts.items():
        if layout.is_cut(name):
            _require_whole(name, parts, layout.writers[name], what)
    return layout


def refuse_unknown_parts(engine: Engine, what: str) -> None:
    """Raise zeropp.CheckpointError for a parameter that differs between data ranks, if nobody said which part of the whole each has."""
    for unit, entry in entries_of(engine):
        if unit.ranks < engine.ranks and not is_held(entry.param):
            raise CheckpointError(
                f"{what}: '{entry.names[0]}' differs between ranks, and nothing says which part of the whole tensor this rank has, so one "
                "part would be kept and the others lost; call zeropp.zero.model.boxes.hold(parameter, whole, offset) before prepare"
            )


def _held_here(engine: Engine, model: nn.Module, layout: Layout) -> dict[str, Any]:
    """Return what the first rank of a group says of what the group holds."""
    own = ((unit, entry) for unit, entry in entries_of(engine) if layout.is_first(unit))
    return {
        "parameters": {entry.names[0]: _described(entry.held) for _, entry in own},
        "buffers": [name for name, _ in loose_tensors(model)] if layout.describes else [],
    }


def _require_whole(name: str, parts: Parts, writers: list[int], what: str) -> None:
    problem = problem_of_parts(parts)
    if problem:
        held = "; ".join(_words(part, rank) for part, rank in zip(parts, writers, strict=True))
        raise CheckpointError(
            f"{what}: '{name}' {problem} ({held}); give it the same parts on every rank that has it, which together are the "
            "whole tensor"
        )


def entries_of(engine: Engine) -> Iterator[tuple[Unit, Entry]]:
    """Yield every parameter of this rank, with its unit."""
    return ((unit, entry) for unit in engine.units for entry in unit.params)


def _described(part: Boxes) -> dict[str, Any]:
    whole = {"shape": list(part.whole)}
    return whole if part.is_whole else {**whole, "parts": [part_json(part)]}


def _add(layout: Layout, rank: int, name: str, part: Boxes, what: str) -> None:
    parts, writers = layout.parts.setdefault(name, []), layout.writers.setdefault(name, [])
    if parts and parts[0].whole != part.whole:
        raise CheckpointError(
            f"{what}: '{name}' has shape {list(parts[0].whole)} on rank {writers[0]} and {list(part.whole)} on rank {rank}; "
            "two parameters of one name are one tensor, so give one of them another name"
        )
    if part not in parts:
        parts.append(part)
        writers.append(rank)


def _words(part: Boxes, rank: int) -> str:
    boxes = ", ".join(f"{list(box.size)} at {list(box.offset)}" for box in part.boxes[:3])
    return f"rank {rank} holds {boxes or 'nothing'} of {list(part.whole)}"
