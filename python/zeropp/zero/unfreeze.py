# SPDX-License-Identifier: Apache-2.0
"""Gradual unfreezing: what was frozen when ``prepare`` saw it, and is trained later. docs/design/0034.

A unit that is frozen is *reserved*: it has addresses for gradients, and no memory behind them, no master and no
states. It is *unfrozen* when ``requires_grad`` of one of its parameters becomes True: where that is seen (stages 1 to
3), or before the next forward that builds a graph. All of it is local; where ranks unfreeze different parameters, the
next reduction or step raises an error that shows both sides.
"""

from __future__ import annotations

import functools
import operator
import weakref
from typing import Any

import torch
from torch import nn, optim

from zeropp import compat
from zeropp.compat import Named
from zeropp.config import Config, facts_of
from zeropp.errors import ConfigError, Error
from zeropp.zero.engine import Engine
from zeropp.zero.formulas import has_master
from zeropp.zero.model.arrivals import Arrivals
from zeropp.zero.model.parameter import Ref, is_dtensor, ref_of
from zeropp.zero.model.units import UnitPlan
from zeropp.zero.model_state import Unit
from zeropp.zero.step import custom

_wants_gradient = operator.attrgetter("requires_grad")
_UNFREEZING = {compat.UNFREEZING: Named(True, "unfreezing")}
_TRAINED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# -- when the model is prepared ----------------------------------------------------------------------------------------------


def facts_of_parameter(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return what a parameter that is trained, or will be, says to :mod:`zeropp.compat`."""
    short = str(dtype).removeprefix("torch.")
    return {compat.TRAINED_DTYPE: Named(short, f"parameter '{name}' in {short}")}


def why_frozen(plan: UnitPlan, config: Config, trains: bool) -> str:
    """Return why a unit that is frozen now must stay so, and the way out; empty: it may be unfrozen.

    Args:
        trains: the model has an optimizer, or something else in it is trainable.
    """
    facts = {**facts_of(config), **facts_of_parameter(plan.names[0][0], plan.dtype), **_UNFREEZING}
    if not trains:
        facts[compat.FROZEN_MODEL] = Named(True, "a model that was frozen and without an optimizer in prepare")
    return compat.clash(facts)


def _resolve_conj(parameter: torch.Tensor) -> None:
    """A gradient may be a view that says "conjugate me"; what follows reads memory."""
    with torch._C.DisableTorchFunctionSubclass():
        if parameter.grad is not None and parameter.grad.is_conj():
            parameter.grad = parameter.grad.resolve_conj()


def hook_unit(engine: Engine, unit: Unit) -> None:
    """See the gradients of a unit from now on. torch hooks only what requires grad; the hooks outlive that."""
    # On one rank gradients stay where autograd leaves them, unless something has to be done when they come.
    stays = engine.local_grads and engine.ranks == 1 and engine.accumulate == 1 and not engine.params.in_file
    stays = stays and not engine.config.step_in_backward
    adds = engine.local_grads  # in p.grad, from one backward to the next
    with torch._C.DisableTorchFunctionSubclass():
        if is_dtensor(unit.params[0].param):
            return _hook_dtensors(engine, unit, adds)
        for i, entry in enumerate(unit.params):
            wanted = entry.param.requires_grad
            entry.param.requires_grad_(True)
            handles = []
            if entry.is_complex:
                handles.append(entry.param.register_post_accumulate_grad_hook(_resolve_conj))
            if unit.grad_dtype != unit.dtype:
                entry.param.grad_dtype = unit.grad_dtype  # autograd casts what comes, and adds in it
            if not stays:
                handles.append(entry.param.register_post_accumulate_grad_hook(unit.core.grad_hook(i)))
            engine.hook_order.add(entry.param, handles, adds)
            entry.param.requires_grad_(wanted)


def _hook_dtensors(engine: Engine, unit: Unit, adds: bool) -> None:
    """Let the gradients of a unit of DTensors be settled before they are taken."""
    wanted = [entry.param.requires_grad for entry in unit.params]
    for entry in unit.params:
        entry.param.requires_grad_(True)
        if unit.grad_dtype != unit.dtype:
            entry.param.grad_dtype = unit.grad_dtype
    takes = [unit.core.grad_hook(i) for i in range(len(unit.params))]
    sums_in = engine.config.gradient_dtypes(unit.dtype)[1]
    arrivals = Arrivals([entry.param for entry in unit.params], sums_in, takes, adds)
    for i, entry in enumerate(unit.params):
        handle = entry.param.register_post_accumulate_grad_hook(functools.partial(arrivals.came, i))
        engine.hook_order.add(entry.param, [handle], False)
        entry.param.requires_grad_(wanted[i])
    engine.arrivals.append(arrivals)
    engine.core.set_arrived(functools.partial(_end_arrivals, weakref.ref(engine)))


def _end_arrivals(engine: weakref.ref[Engine]) -> None:
    found = engine()
    for arrivals in found.arrivals if found is not None else ():
        arrivals.end()


# -- later -------------------------------------------------------------------------------------------------------------------


class Unfreezing:
    """The reserved units of one engine, and parameters that are in no group of the optimizer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._watched: list[nn.Parameter] = []
        self._skips = False  # may something be frozen in a unit that is trained?
        self.renew()

    def renew(self) -> None:
        """Look again at which units are reserved and which parameters are in a group."""
        engine = self._engine()
        assert engine is not None
        self._watched = [
            entry.param
            for unit in engine.units
            if engine.config.stored_name is None  # refuse_training watches those
            for i, entry in enumerate(unit.params)
            if (unit.groups and unit.groups[i] < 0 if unit.trainable else unit.dtype in _TRAINED)
        ]
        self._hang()

    def _hang(self) -> None:
        engine = self._engine()
        if engine is not None and not engine.core.closed:
            engine.core.set_unfreeze_checks(self._look if self._watched else None, self._skip if self._skips else None)

    def note_frozen(self) -> None:
        """Note that a parameter was frozen after ``prepare``, or unfrozen beside one that is."""
        engine = self._engine()
        if not self._skips and engine is not None and not engine.config.step_in_backward:
            self._skips = True
            self._hang()

    def _skip(self) -> None:
        """When a backward begins, let reductions not wait for gradients of what is frozen, or all behind them would wait for its end.
        (A step inside the backward does wait: what is frozen may be read by then.)"""
        engine = self._engine()
        assert engine is not None
        with torch._C.DisableTorchFunctionSubclass():
            for unit in engine.units:
                for i, entry in enumerate(unit.params) if unit.trainable else ():
                    if not entry.param.requires_grad:
                        engine.core.skip(unit.index, i)

    def close(self) -> None:
        """Watch nothing any more: the model is gone."""
        self._watched = []

    def _unfrozen(self) -> list[Ref]:
        """Return the watched parameters that require grad. Costs 35 ns a parameter where none does."""
        with torch._C.DisableTorchFunctionSubclass():
            if not any(map(_wants_gradient, self._watched)):
                return []
            refs = [ref_of(one) for one in self._watched if one.requires_grad]
        return [ref for ref in refs if ref is not None]

    def _look(self) -> None:
        """Unfreeze units before a forward that builds a graph: at stage 0, and for parameters that were whole,
        ``requires_grad`` is not seen when it is set."""
        for ref in self._unfrozen():
            if not ref.unit.trainable:
                self.require_possible(ref.unit, ref.name)
                self.unfreeze(ref.unit)

    def require_possible(self, unit: Unit, name: str) -> None:
        """Raise zeropp.ConfigError where a parameter of a reserved unit cannot be unfrozen."""
        engine = self._engine()
        assert engine is not None
        engine.states.require_loaded()
        optimizer = None if engine.optimizer_ref is None else engine.optimizer_ref()
        reason = unit.stays_frozen
        if not reason and optimizer is not None:
            reason = compat.clash({**custom.facts_of(optimizer), **facts_of_parameter(name, unit.dtype), **_UNFREEZING})
        if reason:
            raise ConfigError(
                f"requires_grad of parameter '{name}' cannot become True after zeropp.prepare: it was frozen there, and {reason}"
            )

    def unfreeze(self, unit: Unit) -> None:
        """Give a unit memory for gradients, hooks, a master, and a place in the optimizer. Between two passes."""
        engine = self._engine()
        assert engine is not None
        if unit.trainable:
            return
        engine.states.require_loaded()
        self.note_frozen()
        engine.core.unfreeze(unit.index)
        unit.trainable = True
        engine.show_gradients(unit)
        with torch._C.DisableTorchFunctionSubclass():
            for entry in unit.params:
                entry.param.grad = None  # of a forward in which it was unfrozen, and that no step took
        hook_unit(engine, unit)
        unit.master_waits = has_master(unit.dtype, engine.config)
        optimizer = None if engine.optimizer_ref is None else engine.optimizer_ref()
        if optimizer is not None:
            adopt_unit(optimizer, engine, unit)
        self.renew()

    def unfreeze_trained(self, saved: Any) -> None:
        """Unfreeze the units that had states where a checkpoint was saved; ``saved``: its parameters."""
        engine = self._engine()
        assert engine is not None
        for unit in engine.units:
            if not unit.trainable and any(was_trained(saved[entry.names[0]]) for entry in unit.params):
                self.unfreeze(unit)

    def require_unfrozen(self) -> None:
        """Check, before a step, that what requires grad is reduced, and in a group.

        Raises:
            zeropp.Error: it was unfrozen inside a pass, and its gradient came. zeropp.ConfigError: it is in no group.
        """
        for ref in self._unfrozen():
            with torch._C.DisableTorchFunctionSubclass():
                came = ref.unit.params[ref.index].param.grad is not None
            if ref.unit.trainable:
                raise ConfigError(
                    f"optimizer.step: parameter '{ref.name}' requires grad, and is in no group of the optimizer; call "
                    "optimizer.add_param_group({'params': [...]}) first, or requires_grad_(False)"
                )
            if came:
                raise Error(
                    f"optimizer.step: parameter '{ref.name}' was unfrozen inside a forward, so its gradient was not reduced; set "
                    "requires_grad between two steps; optimizer.zero_grad() forgets this batch"
                )


def was_trained(saved: Any) -> bool:
    """True if this parameter of a checkpoint has states."""
    return bool(saved.get("steps", 0)) or any(kind for kind in saved["pieces"])


def add_group(optimizer: Any, engine: Engine, group: dict[str, Any]) -> None:
    """``optimizer.add_param_group`` of an adopted optimizer: parameters of the model that were frozen at ``prepare``.

    Raises:
        zeropp.ConfigError: not the model's parameters, or some that cannot be trained; the optimizer is as before.
    """
    engine.states.require_loaded()
    engine.schedule.require_ended("optimizer.add_param_group")
    engine.flush()
    optim.Optimizer.add_param_group(optimizer, group)  # torch's own checks, and its defaults
    try:
        refs = [_ref_in_group(engine, one) for one in optimizer.param_groups[-1]["params"]]
        for ref in refs:
            if not ref.unit.trainable:
                engine.unfreezing.require_possible(ref.unit, ref.name)
        compat.check(
            {**custom.facts_of(optimizer), "optimizer.add_param_group()": Named(True, "optimizer.add_param_group()")}
        )
        engine.strategy.check_group(optimizer.param_groups[-1])
        check_differentiable("optimizer.add_param_group:", optimizer.param_groups[-1])
    except BaseException:
        optimizer.param_groups.pop()
        raise
    join_group(optimizer, engine, refs)
    engine.unfreezing.renew()


def _ref_in_group(engine: Engine, parameter: torch.Tensor) -> Ref:
    ref = ref_of(parameter)
    if ref is None or ref.engine is not engine:
        raise ConfigError(
            f"optimizer.add_param_group: a parameter of shape {tuple(parameter.shape)} is not one of the model that this optimizer was "
            "prepared with; parameters of another model need an optimizer of their own"
        )
    return ref


# -- the optimizer's part ----------------------------------------------------------------------------------------------------


def check_differentiable(what: str, group: dict[str, Any]) -> None:
    """Raise zeropp.ConfigError for a group whose steps autograd is to follow."""
    if group.get("differentiable"):
        raise ConfigError(f"{what} differentiable=True, which zeropp does not implement; leave it out")


def group_of_params(optimizer: optim.Optimizer) -> dict[int, int]:
    return {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}


def take_unit(engine: Engine, unit: Unit, group_of: dict[int, int]) -> None:
    """Take a unit that is trained; those of its parameters that are frozen may be in no group, which is -1."""
    unit.make_master()
    unit.groups = [group_of.get(id(e.shown), -1) for e in unit.params]
    unit.steps = torch.zeros(len(unit.params), dtype=torch.int64, device="cpu")
    unit.state_name = engine.config.state_name


def adopt_unit(optimizer: optim.Optimizer, engine: Engine, unit: Unit) -> None:
    """Take a unit that was unfrozen, as :func:`adopt` takes those that are trained from the beginning."""
    take_unit(engine, unit, group_of_params(optimizer))
    engine.strategy.adopt_unit(optimizer, unit)


def join_group(optimizer: optim.Optimizer, engine: Engine, refs: list[Ref]) -> None:
    """Take the last group, which is new and has these parameters. Those of frozen units follow when they are unfrozen."""
    number = len(optimizer.param_groups) - 1
    trained = [ref for ref in refs if ref.unit.trainable]
    for ref in trained:
        ref.unit.groups[ref.index] = number
        ref.unit.bound = ()  # the kernel has a copy of the numbers
    engine.strategy.add_group(optimizer, optimizer.param_groups[number])
    for unit in {id(ref.unit): ref.unit for ref in trained}.values():
        engine.strategy.adopt_unit(optimizer, unit)
