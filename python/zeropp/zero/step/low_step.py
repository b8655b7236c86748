# SPDX-License-Identifier: Apache-2.0
"""Lion, Adagrad and SGD on shards whose state is in bf16 or 8 bits: our operators, one call a unit and parameter group.

In fp32 C steps them as it steps Adam (updates.py). States lie where Adam's do (moments.py), so checkpoints, values and
bytes know them; so do random bits: of the parameter's number, its step and the place in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, optim

from zeropp.ops import adagrad_step_, lion_step_, sgd_step_
from zeropp.optim import Lion
from zeropp.zero.engine import Engine, StepStrategy
from zeropp.zero.model_state import Unit
from zeropp.zero.step import moments

STATES: dict[type, str] = {optim.SGD: "momentum_buffer", optim.Adagrad: "sum", Lion: "exp_avg"}
"""Which optimizers, and what torch calls their state."""


class OperatorStep(StepStrategy):
    """A step of Lion, Adagrad or SGD by our operators."""

    def __init__(self, least: int) -> None:
        self._least = least

    def step(self, optimizer: Any, scale: float, units: list[Unit]) -> None:
        kind = next(kind for kind in STATES if isinstance(optimizer, kind))
        for unit in units:
            _make(optimizer, unit, STATES[kind])
            _step_unit(optimizer, optimizer._engine, unit, kind, scale)

    def planned_moments(self, held: int) -> int:
        return max(self._least, held)


def _make(optimizer: optim.Optimizer, unit: Unit, name: str) -> None:
    """The state, unless it is there: from an earlier step, or from a checkpoint."""
    if name in unit.state:
        return
    moments.make(unit, name)
    for index, part, _, _ in moments.spans(unit):
        if unit.groups[index] < 0:
            continue
        initial = float(optimizer.param_groups[unit.groups[index]].get("initial_accumulator_value", 0.0))
        if initial:
            moments.put(unit, name, index, torch.full((part.stop - part.start,), initial))


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
    name, operator = STATES[kind], {Lion: lion_step_, optim.Adagrad: adagrad_step_}.get(kind, sgd_step_)
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
            _call(operator, params, grads, codes, {**rates, "grad_scale": scale, **lists})


def _call(operator: Any, params: list[Tensor], grads: list[Tensor], codes: list[Tensor], more: dict[str, Any]) -> None:
    if operator is sgd_step_ and not more["momentum"]:  # of this group; another has momentum
        more = {key: value for key, value in more.items() if key not in ("scales", "streams", "firsts")}
        operator(params, grads, **more)
    else:
        operator(params, grads, codes, **more)
