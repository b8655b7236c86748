# SPDX-License-Identifier: Apache-2.0
"""A step by torch's own code, or a class that zeropp does not know, on this rank's shards: one tensor a piece of a parameter."""

from __future__ import annotations

import collections
import inspect
from typing import Any

import torch
from torch import optim

from zeropp.errors import CheckpointError
from zeropp.zero.engine import Engine, StepStrategy
from zeropp.zero.model_state import Unit
from zeropp.zero.step.custom import is_known, kind_of

_SHARED: dict[type, frozenset[str]] = {
    optim.NAdam: frozenset({"mu_product"}),
    optim.ASGD: frozenset({"eta", "mu"}),
}
"""States that are one number a parameter. Outside of torch's optimizer they stand once an element, so that any rank count reads them."""


class TorchStep(StepStrategy):
    """torch's optimizer over this rank's pieces, in the same groups. ``unit.grad_pool`` has the pieces of a unit."""

    def __init__(self, optimizer: optim.Optimizer, engine: Engine) -> None:
        self._whole = engine.stage == 0  # an unknown optimizer sees parameters in their shapes there
        self._known = is_known(optimizer)
        self._shared = _SHARED.get(kind_of(optimizer), frozenset())
        pieces: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        for unit in engine.trained:
            for index, piece in self._new_pieces(unit):
                pieces[unit.groups[index]].append(piece)
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": mine or [torch.zeros(0, device="cpu")],
            }
            for group, mine in zip(optimizer.param_groups, pieces, strict=True)
        ]
        self.inner = _twin(optimizer, groups)

    def _new_pieces(self, unit: Unit) -> list[tuple[int, torch.Tensor]]:
        """Make the pieces that are in a group, and that the optimizer has not yet."""
        found = []
        for index, first, elems in unit.pieces():
            if index not in unit.grad_pool and unit.groups[index] >= 0:
                flat = unit.own[first : first + elems].detach()
                unit.grad_pool[index] = unit.params[index].of(flat) if self._whole and not self._known else flat
                found.append((index, unit.grad_pool[index]))
        return found

    def adopt_unit(self, optimizer: Any, unit: Unit) -> None:
        for index, piece in self._new_pieces(unit):
            self.inner.param_groups[unit.groups[index]]["params"].append(piece)
            self._begin(piece)

    def add_group(self, optimizer: Any, group: dict[str, Any]) -> None:
        rates = {key: value for key, value in group.items() if key != "params"}
        self.inner.add_param_group({**rates, "params": [torch.zeros(0, device="cpu")]})

    def step(self, optimizer: Any, scale: float, units: list[Unit]) -> None:
        for mine, theirs in zip(optimizer.param_groups, self.inner.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key != "params"})
        for unit in units:
            self._set_gradients(optimizer._engine, unit, scale)
        self.inner.step()  # pieces without a gradient stay as they are
        for unit in units:
            if unit.master is not None:
                unit.shard.copy_(unit.master)
        self.inner.zero_grad(set_to_none=True)

    @staticmethod
    def _set_gradients(engine: Engine, unit: Unit, scale: float) -> None:
        gradients = engine.own_gradients(unit)
        for index, piece in unit.grad_pool.items():
            values = gradients[index]
            piece.grad = None if values is None else (values.to(piece.dtype) * scale).view(piece.shape)
            if unit.steps is not None and values is not None:
                unit.steps[index] += 1

    # -- states --------------------------------------------------------------------------------------------------------

    def states(self, unit: Unit) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for index, first, elems in unit.pieces():
            if index not in unit.grad_pool:
                continue
            for name, value in self.inner.state.get(unit.grad_pool[index], {}).items():
                shared = name in self._shared
                if isinstance(value, torch.Tensor) and name != "step" and (shared or value.numel() == elems):
                    whole = found.setdefault(
                        name, torch.zeros(unit.shard.numel(), dtype=value.dtype, device=unit.device)
                    )
                    whole[first : first + elems] = value if shared else value.reshape(-1)
        return found

    def states_in_place(self, unit: Unit) -> bool:
        return False

    def load_states(self, unit: Unit, values: dict[str, torch.Tensor]) -> None:
        assert unit.steps is not None
        for index, first, elems in unit.pieces():
            if index not in unit.grad_pool:
                continue
            piece, steps = unit.grad_pool[index], int(unit.steps[index])
            if not steps:
                self._begin(piece)
                continue
            missing = self._shared - values.keys()
            if missing:
                raise CheckpointError(
                    f"load: the state '{min(missing)}' of '{unit.params[index].names[0]}', which {type(self.inner).__name__} needs, is not "
                    "in the checkpoint: an older zeropp did not save it; load the weights alone: zeropp.load(path, model)"
                )
            mine = {
                name: one[first].clone()
                if name in self._shared
                else one[first : first + elems].clone().view(piece.shape)
                for name, one in values.items()
            }
            step = torch.tensor(float(steps), device="cpu") if self._known else steps
            self.inner.state[piece] = {"step": step, **mine}

    def write_state(self, unit: Unit, kind: str, index: int, first: int, values: torch.Tensor) -> None:
        held = self.inner.state[unit.grad_pool[index]][kind]
        held.copy_(values[0] if kind in self._shared else values.view(held.shape))

    def forget_states(self, unit: Unit) -> None:
        for piece in unit.grad_pool.values():
            self._begin(piece)

    def _begin(self, piece: torch.Tensor) -> None:
        """Put the state of a piece back to before its first step: most of torch's optimizers have none, Adagrad makes some at once."""
        self.inner.state.pop(piece, None)
        if not self._known:
            return
        group = next(g for g in self.inner.param_groups if any(one is piece for one in g["params"]))
        fresh = type(self.inner)([{**group, "params": [piece]}], **_defaults(self.inner))
        self.inner.state.update(fresh.state)

    def state_tensors(self) -> list[torch.Tensor]:
        return [value for states in self.inner.state.values() for value in states.values()]

    def replace_states(self, states: Any) -> Any:
        before, self.inner = self.inner, states
        return before

    def check_saved(self, engine: Engine) -> None:
        """Raise zeropp.CheckpointError for a state of an unknown optimizer that is not saved element by element, with the parameter."""
        if self._known:
            return
        found = (
            (unit.params[index].names[0], piece, name, value)
            for unit in engine.units
            for index, piece in unit.grad_pool.items()
            for name, value in self.inner.state.get(piece, {}).items()
        )
        for param, piece, name, value in found:
            if name != "step" and not (isinstance(value, torch.Tensor) and value.numel() == piece.numel()):
                size = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else repr(value)
                raise CheckpointError(
                    f"save: the state '{name}' ({size}) that {type(self.inner).__name__} has of '{param}' is not of "
                    f"the size of its parameter, {piece.numel()} elements, so it is not saved yet; save weights alone: zeropp.save(path, model)"
                )

    def planned_moments(self, held: int) -> int:
        return held


def _twin(optimizer: optim.Optimizer, groups: list[dict[str, Any]]) -> optim.Optimizer:
    """Return an optimizer over other tensors; of a class that zeropp does not know, with the same attributes and no states."""
    if is_known(optimizer):
        return kind_of(optimizer)(groups, **_defaults(optimizer))  # type: ignore[no-any-return]
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # they run once, around the step of all
        if name in twin.__dict__:
            twin.__dict__[name] = collections.OrderedDict()
    twin.param_groups, twin.state = groups, collections.defaultdict(dict)
    return twin  # type: ignore[no-any-return]


def _defaults(optimizer: optim.Optimizer) -> dict[str, Any]:
    accepted = inspect.signature(kind_of(optimizer)).parameters.keys() - {"foreach", "fused"}
    return {name: value for name, value in optimizer.defaults.items() if name in accepted}
