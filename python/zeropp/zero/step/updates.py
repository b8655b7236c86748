# SPDX-License-Identifier: Apache-2.0
"""AdamW, Adam, Lion, Adagrad and SGD on shards: what torch calls their moments, their rates, and the two ways of a step.

Kernels in C (csrc/ops/optim/optim.h) step shards wherever these lie. Only where the moments of Lion, Adagrad and SGD are in bf16 or
8 bits do our operators step them, one call a unit and parameter group. The moments lie where Adam's do (moments.py), and so do the
random bits: of the parameter's number, its step and the place in it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from zeropp.ops import adagrad_step_, lion_step_, sgd_step_
from zeropp.optim import Lion
from zeropp.zero.engine import Engine, StepStrategy
from zeropp.zero.model_state import Unit
from zeropp.zero.step import moments
from zeropp.zero.step.custom import kind_of

ADAM, LION, ADAGRAD, SGD, NESTEROV = range(5)
"""Which update C makes: ``enum zpp_optimizer`` (csrc/ops/optim/optim.h), and Nesterov's form of SGD"""
FIRST, SECOND, MAX = 1, 2, 4
"""Bits of the moments: those that csrc calls exp_avg, exp_avg_sq and max_exp_avg_sq."""

Rates = tuple[int, float, float, float, float, float, bool, bool, int]
"""(update, lr, beta1, beta2, eps, weight_decay, decoupled_decay, maximize, bits of the moments)"""
Group = dict[str, Any]


@dataclass(frozen=True)
class Update:
    """One row of the table.

    Args:
        states: what torch calls the three moments; empty: there is none.
        rates: of a parameter group.
    """

    states: tuple[str, str, str]
    rates: Callable[[Group], Rates]

    def names(self, bits: int) -> tuple[str, ...]:
        """Return three names of moments, empty for those that the update lacks."""
        return tuple(name if bits >> k & 1 else "" for k, name in enumerate(self.states))

    @property
    def state(self) -> str:
        """Return the name of the first moment that there is."""
        return next(filter(None, self.states))


def _adam(group: Group) -> Rates:
    beta1, beta2 = group["betas"]
    bits = FIRST | SECOND | (MAX if group.get("amsgrad", False) else 0)
    return (ADAM, float(group["lr"]), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]),
            bool(group.get("decoupled_weight_decay", False)), bool(group.get("maximize", False)), bits)  # fmt: skip


def _lion(group: Group) -> Rates:
    beta1, beta2 = group["betas"]
    return (LION, float(group["lr"]), float(beta1), float(beta2), 0.0, float(group["weight_decay"]), False,
            bool(group["maximize"]), FIRST)  # fmt: skip


def _adagrad(group: Group) -> Rates:
    begin = float(group["initial_accumulator_value"])
    return (ADAGRAD, float(group["lr"]), float(group["lr_decay"]), begin, float(group["eps"]),
            float(group["weight_decay"]), False, bool(group["maximize"]), SECOND)  # fmt: skip


def _sgd(group: Group) -> Rates:
    momentum = float(group["momentum"])
    return (NESTEROV if group["nesterov"] else SGD, float(group["lr"]), momentum, float(group["dampening"]), 0.0,
            float(group["weight_decay"]), False, bool(group["maximize"]), FIRST if momentum else 0)  # fmt: skip


ADAMS = Update(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), _adam)
UPDATES: dict[type, Update] = {
    optim.AdamW: ADAMS,
    optim.Adam: ADAMS,
    Lion: Update(("exp_avg", "", ""), _lion),
    optim.Adagrad: Update(("", "sum", ""), _adagrad),
    optim.SGD: Update(("momentum_buffer", "", ""), _sgd),
}


def moments_of(optimizer: optim.Optimizer | None) -> tuple[str, ...]:
    """Return three names, "" for none: what a file must have room for. Without an optimizer, what Adam wants."""
    if optimizer is None:
        return ADAMS.names(FIRST | SECOND)
    update = UPDATES.get(kind_of(optimizer))
    if update is None:
        return ()
    return update.names(functools.reduce(operator.or_, (update.rates(group)[-1] for group in optimizer.param_groups)))


def least_moments(optimizer: optim.Optimizer) -> int:
    """Return how many moments every parameter has from the first step on."""
    return min(2, sum(map(bool, moments_of(optimizer))))


class KernelStep(StepStrategy):
    """A step of AdamW, Adam, Lion, Adagrad or SGD by the kernels in C, wherever the shards live."""

    in_c = True

    def __init__(self, update: Update, least: int) -> None:
        self._update, self._least = update, least

    def groups(self, optimizer: Any) -> list[tuple[Any, ...]]:
        rates = [self._update.rates(group) for group in optimizer.param_groups]
        for unit in optimizer._engine.trained:
            bits = functools.reduce(operator.or_, (rates[number][-1] for number in set(unit.groups) - {-1}), 0)
            names = self._update.names(bits)
            if unit.bound != names:  # moments exist from the first step on, or from a checkpoint
                unit.states_in.bind(unit, names)
                unit.bound = names
        return list(rates)

    def step(self, optimizer: Any, scale: float, units: list[Unit]) -> None:
        optimizer._engine.core.adam_step(self.groups(optimizer), scale)

    def planned_moments(self, held: int) -> int:
        return max(self._least, held)


# -- by operators -------------------------------------------------------------------------------------------------------

OPERATORS: dict[type, Callable[..., Any]] = {optim.SGD: sgd_step_, optim.Adagrad: adagrad_step_, Lion: lion_step_}


class OperatorStep(StepStrategy):
    """A step of Lion, Adagrad or SGD by our operators."""

    def __init__(self, least: int) -> None:
        self._least = least

    def step(self, optimizer: Any, scale: float, units: list[Unit]) -> None:
        kind = next(kind for kind in OPERATORS if isinstance(optimizer, kind))
        for unit in units:
            _make(optimizer, unit, UPDATES[kind].state)
            _step_unit(optimizer, optimizer._engine, unit, kind, scale)

    def planned_moments(self, held: int) -> int:
        return max(self._least, held)


def _make(optimizer: optim.Optimizer, unit: Unit, name: str) -> None:
    """Make the state, unless an earlier step or a checkpoint did."""
    if name in unit.state:
        return
    moments.make(unit, name)
    for index, part, _, _ in moments.spans(unit):
        if unit.groups[index] < 0:
            continue
        initial = float(optimizer.param_groups[unit.groups[index]].get("initial_accumulator_value", 0.0))
        if initial:
            moments.put(unit, name, index, torch.full((part.stop - part.start,), initial, device=unit.device))


def _rates(kind: type, group: dict[str, Any]) -> dict[str, Any]:
    rates: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}
    rates["maximize"] = bool(group["maximize"])
    if kind is Lion:
        return {**rates, "beta1": float(group["betas"][0]), "beta2": float(group["betas"][1])}
    if kind is optim.Adagrad:
        return {**rates, "lr_decay": float(group["lr_decay"]), "eps": float(group["eps"])}
    return {**rates, "momentum": float(group["momentum"]), "dampening": float(group["dampening"]),
            "nesterov": bool(group["nesterov"])}  # fmt: skip


def _step_unit(optimizer: optim.Optimizer, engine: Engine, unit: Unit, kind: type, scale: float) -> None:
    name = UPDATES[kind].state
    assert unit.steps is not None
    groups: dict[int, dict[str, list[Any]]] = {}
    keys = ("params", "grads", "codes", "scales", "param_outs", "step", "streams", "firsts")
    gradients = engine.own_gradients(unit)
    for index, part, begin, scales in moments.spans(unit):
        gradient = gradients[index]
        if gradient is None or unit.groups[index] < 0:
            continue
        unit.steps[index] += 1
        into = groups.setdefault(unit.groups[index], {key: [] for key in keys})
        into["params"].append(unit.own[part].detach())
        into["grads"].append(gradient)
        into["codes"].append(unit.state[name][part])
        if unit.scales:
            into["scales"].append(unit.scales[name][scales])
        if unit.master is not None:
            into["param_outs"].append(unit.shard[part])
        into["step"].append(int(unit.steps[index]))
        into["streams"].append(unit.first_param + index)
        into["firsts"].append(begin)
    for number, lists in groups.items():
        rates = _rates(kind, optimizer.param_groups[number])
        params, grads, codes = (lists.pop(key) for key in keys[:3])
        with torch.no_grad():
            _call(OPERATORS[kind], params, grads, codes, {**rates, "grad_scale": scale, **lists})


def _call(step: Any, params: list[Tensor], grads: list[Tensor], codes: list[Tensor], more: dict[str, Any]) -> None:
    if step is sgd_step_ and not more["momentum"]:  # of this group; another has momentum
        more = {key: value for key, value in more.items() if key not in ("scales", "streams", "firsts")}
        step(params, grads, **more)
    else:
        step(params, grads, codes, **more)
