# SPDX-License-Identifier: Apache-2.0
"""The element-wise updates that are made in C (csrc/ops/optim/optim.h): which optimizers they are, what torch calls their moments,
and their rates in the order of a segment's fields."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import optim

from zeropp.optim import Lion
from zeropp.zero.engine import StepStrategy
from zeropp.zero.model_state import Unit
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


def _adam(group: Group) -> Rates:
    beta1, beta2 = group["betas"]
    moments = FIRST | SECOND | (MAX if group.get("amsgrad", False) else 0)
    return (ADAM, float(group["lr"]), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]),
            bool(group.get("decoupled_weight_decay", False)), bool(group.get("maximize", False)), moments)  # fmt: skip


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
