# SPDX-License-Identifier: Apache-2.0
"""Modules whose parameters are other ones on other ranks, such as the experts that this rank has.

Of N data ranks, ``parts`` hold different parameters of such a module; the N / parts ranks that hold the same ones are
a *group*: they partition them at stages 0 to 3 and add their gradients (csrc/zero/group.h). ``Config(experts=)`` stands
on this:

    prepare_over(None, model, optimizer, config, [Spread(name="experts of layer 3", modules=(layer.experts,), parts=4)])

A checkpoint has to know which part of a whole tensor each parameter is: tell it by ``boxes.hold`` before ``prepare``.
Otherwise what saves, loads or gathers whole values raises an error that names the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeropp.comm.job import JobRanks, sub_communicator
from zeropp.errors import ConfigError
from zeropp.zero.model.init import is_sharded
from zeropp.zero.model.part import Division
from zeropp.zero.model.units import UnitPlan


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Modules with parameters of the same names, shapes and types on every data rank, and of other values on ranks of
    other parts."""

    name: str
    """For messages, such as ``experts of model.layers.3``."""
    modules: tuple[nn.Module, ...]
    """Each is a unit of its own, with all that lies in it; none lies in another."""
    parts: int
    """How many parts there are; a divisor of the number of data ranks. Rank r holds part ``r % parts``, so neighbours
    hold different ones."""
    divisor: float = 0.0
    """A gradient is the sum over the ranks of a part, divided by this; 0: by the number of all data ranks. For experts
    that is right: each of them has seen the tokens of all ranks of its exchange already, so the mean over the batches of
    all data ranks needs their number, and not the number of ranks of a part."""


@dataclass(frozen=True)
class Group:
    """The ranks that hold one part, or all data ranks (number 0), as the façade needs them for a unit."""

    index: int
    """The number that the core gave it."""
    comm: Any
    """``_C.Comm`` over its ranks; None: this rank alone."""
    rank: int
    ranks: int
    members: tuple[int, ...]
    """The data ranks that it has, in the order of shards."""
    divisor: float
    """A gradient is the sum over the ranks of the group, divided by this."""


def all_data_ranks(comm: Any) -> Group:
    """Return group 0."""
    ranks = 1 if comm is None else comm.ranks
    return Group(0, comm, 0 if comm is None else comm.rank, ranks, tuple(range(ranks)), ranks)


def spreads_of(division: Division) -> list[Spread]:
    """Return the spreads of the parts of parameters, which go last in a list: one for each number of parts."""
    several = len(division.counts) > 1
    return [
        Spread(
            name=f"the model's experts{f' on {parts} ranks' if several else ''}",
            modules=(),
            parts=parts,
            divisor=division.divisor,
        )
        for parts in division.counts
    ]


def modules_of(spreads: Sequence[Spread]) -> list[nn.Module]:
    """Return the modules of all spreads."""
    return [module for spread in spreads for module in spread.modules]


def check_spreads(spreads: Sequence[Spread], model: nn.Module, comm: Any) -> None:
    """Raise zeropp.ConfigError for parts that do not divide the data ranks, and for modules that cannot be spread."""
    inside, ranks = set(model.modules()), all_data_ranks(comm).ranks
    for spread in spreads:
        if spread.parts < 1 or ranks % spread.parts:
            fits = [n for n in range(1, ranks + 1) if ranks % n == 0]
            raise ConfigError(
                f"prepare: {spread.name} in {spread.parts} parts on {ranks} data ranks; wanted a divisor of {ranks}: "
                f"{', '.join(map(str, fits))}"
            )
        for module in spread.modules:
            name = next((name for name, p in module.named_parameters() if is_sharded(p) or p.is_meta), None)
            if module not in inside:
                raise ConfigError(f"prepare: {spread.name} has a {type(module).__name__} that is not in the model")
            if name is not None:
                raise ConfigError(
                    f"prepare: parameter '{name}' of {spread.name} has no values of this rank's own yet (it is on meta, or was built in "
                    "shards); give it values before prepare"
                )


def mark_plans(plans: Iterable[UnitPlan], spreads: Sequence[Spread]) -> None:
    """Note in each plan which spread its parameters are of: ``plan.spread``, counted from 1. Parts of parameters are of the one without
    modules that has as many parts."""
    of = {p: at for at, spread in enumerate(spreads, 1) for module in spread.modules for p in module.parameters()}
    of_parts = {spread.parts: at for at, spread in enumerate(spreads, 1) if not spread.modules}
    for plan in plans:
        found = {of_parts[plan.parted]} if plan.parted else {of.get(p, 0) for p in plan.params}
        if len(found) > 1:
            raise ConfigError(
                f"prepare: unit {plan.name} has parameters of {spreads[max(found) - 1].name} and others; a parameter of a module whose "
                "parameters differ between ranks cannot be shared with a module outside"
            )
        plan.spread = found.pop() if found else 0


def mark_tiers(plans: Iterable[UnitPlan], division: Division | None) -> None:
    """Note in each plan where its states are, beside those of a division's parameters: ``plan.held``, ``plan.on_host``."""
    if division is None:
        return
    for plan in plans:
        plan.held, plan.on_host = division.is_held(plan.params), division.on_host(plan.params)


def make_groups(core: Any, ranks: JobRanks, spreads: Sequence[Spread]) -> list[Group]:
    """Add the groups to the core, before its units. Return them by the numbers of :func:`mark_plans`, all data ranks first. Collective."""
    groups = [all_data_ranks(ranks.data)]
    for spread in spreads:
        if ranks.data is None or spread.parts == 1:
            groups.append(groups[0])
            continue
        part_of = [rank % spread.parts for rank in range(ranks.data.ranks)]
        # The core compares the parts of all ranks first: only ranks of one part meet next.
        index = core.add_group(spread.name, part_of, float(spread.divisor))
        members = [rank for rank, part in enumerate(part_of) if part == part_of[ranks.data.rank]]
        comm = sub_communicator([ranks.data.job_ranks[rank] for rank in members])
        if comm is not None:
            core.set_group_comm(index, comm)
        divisor = spread.divisor or ranks.data.ranks
        groups.append(Group(index, comm, members.index(ranks.data.rank), len(members), tuple(members), divisor))
    return groups
