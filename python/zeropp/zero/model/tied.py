# SPDX-License-Identifier: Apache-2.0
"""Parameters that several stages of a pipeline hold, such as an embedding that is the head as well.

Each stage has the parameter in a unit of its own. Such units have one length on all stages, so the data rank with
number d has the same shard of it on each of them. The stages' gradients, each of which is reduced over the data ranks of
its stage, are added shard by shard in the order of stages, before anything reads them. So all stages step with the same
bits from equal values, and the copies stay equal. The first stage counts the parameter in the norm, and writes it to
checkpoints.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeropp.comm.collective import add_up, broadcast, exchange
from zeropp.comm.job import JobRanks, sub_communicator
from zeropp.errors import ConfigError, Error
from zeropp.files.heap_trim import byte_view
from zeropp.zero.model.init import is_sharded, own_shard
from zeropp.zero.model.parameter import is_dtensor, local_of
from zeropp.zero.model.units import UnitPlan
from zeropp.zero.model_state import Unit


@dataclass(frozen=True)
class Tie:
    """A parameter of this rank that other stages hold as well."""

    param: nn.Parameter
    names: tuple[str, ...]
    """All that it has in the whole model, the one of the first stage first."""
    stages: tuple[int, ...]
    """The ranks of the pipeline that hold it."""
    ranks: tuple[int, ...]
    """The ranks of the job that hold the same part of it, one for each stage."""


@dataclass
class _Held:
    """A parameter as some stages describe it."""

    names: list[str]
    by_stage: dict[int, dict[str, Any]]
    said: bool = False  # a stage said that it is tied, and did not only use its name


def find_ties(model: nn.Module, ranks: JobRanks, stage: int, line: Sequence[int]) -> list[Tie]:
    """Return the parameters of this rank that other stages hold as well, in one order on all ranks. Collective over the job.

    Args:
        model: the chunks of this rank.
        ranks: those of the job.
        stage: this rank's number in the pipeline.
        line: the ranks of the job that differ from this one in their stage alone, in the order of stages.

    Raises:
        zeropp.ConfigError: on every rank, a name under which stages have different things: shapes, types, values.
    """
    own = _own_names(model)
    speaks = ranks.data is None or ranks.data.rank == 0
    told = [[names, said, _described(p)] for p, (names, said) in own.items()] if speaks else []
    every = _merged(exchange(ranks.all, [stage, told]))
    found = [one for one in every if len(one.by_stage) > 1]
    for held in found:
        _require_one_kind(held)
    _require_a_cut(found, len(every))
    ties = list(_of_this_rank(found, own, line))
    guessed = {one.names[0] for one in found if not one.said}
    if guessed:
        _require_one_value(ranks, line, [tie for tie in ties if tie.names[0] in guessed], speaks)
    return ties


def _require_a_cut(found: list[_Held], params: int) -> None:
    """Raise where stages have all ``params`` parameters in common, and none of these was said to be tied."""
    if found and len(found) == params and not any(one.said for one in found):
        raise ConfigError(
            f"prepare: parameter '{found[0].names[0]}' is on ranks 0 and 1 of the pipeline, and so is every other one, so no stage has a part "
            "of the model; cut it with zeropp.parallel.cut, or give each rank its stages in zeropp.parallel.Chunks([...])"
        )


def _of_this_rank(found: list[_Held], own: Mapping[nn.Parameter, Any], line: Sequence[int]) -> Iterator[Tie]:
    param_of = {name: p for p, (names, _) in own.items() for name in names}
    for held in found:
        param = next((param_of[name] for name in held.names if name in param_of), None)
        if param is not None:
            stages = tuple(sorted(held.by_stage))
            yield Tie(param, tuple(held.names), stages, tuple(line[one] for one in stages))


def _own_names(model: nn.Module) -> dict[nn.Parameter, tuple[list[str], bool]]:
    """Return the names of each parameter in the whole model, and whether the model said that it is tied."""
    groups: list[list[str]] = getattr(model, "_zeropp_tied", [])
    aliases = {name: group for group in groups for name in group}
    own: dict[nn.Parameter, tuple[list[str], bool]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names, said = own.get(parameter, ([], False))
        names += [one for one in aliases.get(name, [name]) if one not in names]
        own[parameter] = (names, said or name in aliases)
    return own


def _described(parameter: torch.Tensor) -> dict[str, Any]:
    placed = str(parameter._spec.placements) if is_dtensor(parameter) else "whole"  # type: ignore[attr-defined]
    return {
        "shape": list(parameter.shape), "dtype": str(parameter.dtype), "placements": placed,
        "requires_grad": parameter.requires_grad, "has values": not (parameter.is_meta or is_sharded(parameter)),
    }  # fmt: skip


def _merged(every: list[Any]) -> list[_Held]:
    """Return the parameters of the job; those with a name in common are one."""
    known: dict[str, _Held] = {}
    for stage, told in sorted(every, key=lambda one: int(one[0])):
        for names, said, described in told:
            held = next((known[name] for name in names if name in known), None) or _Held([], {})
            held.names += [name for name in names if name not in held.names]
            held.said |= said
            if held.by_stage.setdefault(stage, described) != described:  # two slices of one stage
                held.by_stage[stage] = {**described, "placements": "several"}
            known |= dict.fromkeys(names, held)
    return list({id(held): held for held in known.values()}.values())


def _require_one_kind(held: _Held) -> None:
    first, *others = held.by_stage.items()
    for stage, described in others:
        key = next((key for key, value in described.items() if value != first[1][key]), None)
        if key is not None:
            raise ConfigError(
                f"prepare: parameter '{held.names[0]}' is on ranks {first[0]} and {stage} of the pipeline, so it is one parameter, and its "
                f"{key} is {first[1][key]} on the one and {described[key]} on the other; make it the same on both, or, if they are two "
                "parameters, give each chunk the names of the whole model, as zeropp.parallel.cut and zeropp.parallel.Chunks([...]) do"
            )


def _require_one_value(ranks: JobRanks, line: Sequence[int], ties: list[Tie], speaks: bool) -> None:
    """Refuse parameters that have one name by chance: what is tied begins with equal values."""
    digests = {tie.names[0]: [list(tie.stages), _digest(tie.param)] for tie in ties} if speaks else {}
    seen: dict[tuple[int, str], Any] = {}
    for first, told in exchange(ranks.all, [line[0], digests]):
        for name, (stages, digest) in told.items():
            if digest and seen.setdefault((first, name), digest) == digest:
                continue
            why = "has other values on each" if digest else "has no values yet that would tell whether it is one"
            raise ConfigError(
                f"prepare: parameter '{name}' is on ranks {stages[0]} and {stages[1]} of the pipeline and {why}; if they are two parameters, "
                "give each chunk the names of the whole model, as zeropp.parallel.cut and zeropp.parallel.Chunks([...]) do; if it is one, "
                f"say so with zeropp.parallel.Chunks([...], tied=[('{name}',)])"
            )


def _digest(parameter: nn.Parameter) -> str:
    """Return a digest of a parameter's values; an empty text: it has none."""
    if parameter.is_meta or is_sharded(parameter):
        return ""
    return hashlib.sha256(byte_view(local_of(parameter.detach()).contiguous().view(-1).cpu())).hexdigest()


def mark_plans(plans: Iterable[UnitPlan], ties: Sequence[Tie]) -> None:
    """Give plans of tied parameters the names of the whole model. Each is alone in its plan, so that all stages place it alike."""
    tie_of = {tie.param: tie for tie in ties}
    for plan in plans:
        tie = tie_of.get(plan.params[0])
        if tie is not None:
            plan.names, plan.alone = [list(tie.names)], True


def _take_first(comm: Any, parameter: nn.Parameter) -> None:
    """Take the values that the first stage has: of what was built in shards this rank's, which are the same part on all stages."""
    values = own_shard(parameter) if is_sharded(parameter) else local_of(parameter.detach())
    taken = values.contiguous()
    broadcast(comm, taken)
    if taken.data_ptr() != values.data_ptr():
        values.copy_(taken)


class Ties:
    """The tied parameters of an engine whose units are not filled yet. Construction is collective over the stages that hold them, which
    take the first one's values.
    """

    def __init__(self, engine: Any, ties: Sequence[Tie]) -> None:
        self._engine: Callable[[], Any] = weakref.ref(engine)  # which owns this
        self._units: dict[tuple[int, ...], list[tuple[Unit, Tie]]] = {}
        self._summed: str | None = None
        unit_of = {entry.param: unit for unit in engine.units for entry in unit.params}
        for tie in ties:
            unit = unit_of[tie.param]
            unit.tied = tie.stages
            self._units.setdefault(tie.ranks, []).append((unit, tie))
        self._comms = {ranks: sub_communicator(list(ranks)) for ranks in self._units}
        for ranks, tied in self._units.items():
            for unit, tie in tied:
                _take_first(self._comms[ranks], tie.param)
                if self._comms[ranks].rank > 0:
                    unit.core.set_copy()  # counted on the first stage
        if ties:
            engine.core.set_settled(self._sum)

    def cleared(self) -> None:
        """Note that there are no gradients any more."""
        self._summed = None

    def require_cleared(self) -> None:
        """Raise zeropp.Error where gradients would be added to some that hold those of all stages already."""
        if self._summed is not None:
            raise Error(
                f"pipeline: a step of the schedule begins, and the gradient of '{self._summed}', which stages share, was added over them "
                "and not cleared; call optimizer.step() and optimizer.zero_grad() first, or take the mean over several steps of the "
                "schedule with Config(accumulate=k)"
            )

    def _sum(self) -> None:
        """Add the gradients of all stages. Collective over those that hold a parameter."""
        for ranks, tied in self._units.items():
            trained = [(unit, tie) for unit, tie in tied if unit.trainable]
            gradients = [self._gradient(unit) for unit, _ in trained]
            self._require_alike(self._comms[ranks], trained, gradients)
            for (unit, tie), gradient in zip(trained, gradients, strict=True):
                if gradient is not None and gradient.numel():
                    self._summed = tie.names[0]
                    add_up(self._comms[ranks], gradient)
                    if not unit.local:
                        self._engine().grads.write(unit, gradient)

    def _gradient(self, unit: Unit) -> torch.Tensor | None:
        """Return this rank's part of a gradient, which may be empty; None: there is no gradient. Of a shard, all of it."""
        if unit.local:
            return self._engine().own_gradients(unit)[0]  # type: ignore[no-any-return]
        found = self._engine().gradient_shard(unit)
        if found is None or not found[1][0]:
            return None
        shard: torch.Tensor = found[0]
        return shard if any(True for _ in unit.pieces()) else shard[:0]

    def _require_alike(self, comm: Any, tied: list[tuple[Unit, Tie]], gradients: list[torch.Tensor | None]) -> None:
        """Refuse what would let the copies come to differ."""
        mine = [[gradient is not None, self._rates(unit)] for (unit, _), gradient in zip(tied, gradients, strict=True)]
        every = exchange(comm, mine)
        for at, (_, tie) in enumerate(tied):
            for stage, told in zip(tie.stages, every, strict=True):
                if told[at] == every[0][at]:
                    continue
                (has, rates), (first_has, first_rates) = told[at], every[0][at]
                what = f"{_has(first_has)} on rank {tie.stages[0]} of the pipeline, and {_has(has)} on rank {stage}"
                if has == first_has:
                    key = next(key for key in {**rates, **first_rates} if rates.get(key) != first_rates.get(key))
                    what = (
                        f"is stepped with {key}={first_rates.get(key)} on rank {tie.stages[0]} of the pipeline, and with "
                        f"{key}={rates.get(key)} on rank {stage}"
                    )
                raise Error(
                    f"pipeline: parameter '{tie.names[0]}' {what}; its copies would differ: treat it alike on both"
                )

    def _rates(self, unit: Unit) -> dict[str, str]:
        found = self._engine().optimizer_ref
        optimizer = None if found is None else found()
        if optimizer is None or not unit.groups:
            return {}
        group = optimizer.param_groups[unit.groups[0]]
        return {key: str(value) for key, value in group.items() if key != "params"}


def _has(gradient: bool) -> str:
    return "has a gradient" if gradient else "has no gradient"


def require_untied(units: Iterable[Unit], what: str) -> None:
    """Raise zeropp.ConfigError where some of the ranks that hold a tied parameter would write it, and others would not."""
    for unit in units:
        if unit.tied:
            raise ConfigError(
                f"{what}: parameter '{unit.params[0].names[0]}' is tied over ranks {' and '.join(map(str, unit.tied))} of the pipeline, and the "
                "others' copies would keep their values; write it with zeropp.load_full_state_dict on all ranks"
            )
