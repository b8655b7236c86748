# SPDX-License-Identifier: Apache-2.0
"""The ``scheduler`` section of a DeepSpeed file: learning rates by step, as DeepSpeed 0.19 (lr_schedules.py) has them.

There a schedule is stepped after the optimizer, and its first step is number 0. A warm-up gives updates 0 and 1 the first
rate, and update k >= 2 that of number k - 1; a cycle and a range test give update k their k-th rate. It is so here too,
because the same file has to train the same way.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zeropp.config import nearest, wrong
from zeropp.deepspeed.optimizers import section_of
from zeropp.errors import ConfigError

_Rule = Callable[[int, float, int], float]
"""(number of the step, -1 before the first; the group's own rate; the group's index) -> rate"""


class _Schedule(torch.optim.lr_scheduler.LambdaLR):
    """torch's own, with a rate in place of a factor; frameworks look at the name of the class.

    Args:
        optimizer: whose groups' rates are set.
        positional: what DeepSpeed's constructor takes, in its order (``_ORDER``).
        values: the same by name, as in ``params`` of the section.
    """

    _kind = ""
    _ORDER: tuple[str, ...] = ()

    def __init__(self, optimizer: Any, *positional: Any, **values: Any) -> None:
        if len(positional) > len(self._ORDER):
            raise TypeError(f"{self._kind}: {len(positional)} values for {', '.join(self._ORDER)}")
        for name, value in zip(self._ORDER, positional, strict=False):
            if name in values:
                raise TypeError(f"{self._kind}: {name} is given twice, {value!r} and {values[name]!r}")
            values[name] = value
        given = _Parameters(self._kind, values, len(optimizer.param_groups))
        if given.take("last_batch_iteration", -1) != -1:
            raise ConfigError("scheduler.params.last_batch_iteration: a checkpoint says where to go on; leave it out")
        rules = _RULES[self._kind](given)
        given.end()
        self._begin(optimizer, *rules)

    def _begin(self, optimizer: Any, rule: _Rule) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 1.0  # LambdaLR multiplies it by the rate
        super().__init__(optimizer, [functools.partial(_rate, rule, rate, index) for index, rate in enumerate(rates)])


_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")


def _rate(rule: _Rule, rate: float, index: int, update: int) -> float:
    return rule(update - 1, rate, index)


class WarmupLR(_Schedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr``, and there it stays."""

    _kind = "WarmupLR"
    _ORDER: tuple[str, ...] = _WARMUP


class WarmupDecayLR(WarmupLR):
    """Warm up as WarmupLR, then fall to 0 at ``total_num_steps``."""

    _kind = "WarmupDecayLR"
    _ORDER = ("total_num_steps", *_WARMUP)


class WarmupCosineLR(_Schedule):
    """The optimizer's own rate times a ratio: up to 1, then along a cosine to ``cos_min_ratio``."""

    _kind = "WarmupCosineLR"
    _ORDER = (
        "total_num_steps",
        "warmup_min_ratio",
        "warmup_num_steps",
        "cos_min_ratio",
        "warmup_type",
        "last_batch_iteration",
    )


class LRRangeTest(_Schedule):
    """Up from ``lr_range_test_min_lr`` without end, to see where training diverges (Smith 2018, section 4.1)."""

    _kind = "LRRangeTest"
    _ORDER = (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
        "last_batch_iteration",
    )


class OneCycle(_Schedule):
    """From ``cycle_min_lr`` up to ``cycle_max_lr`` and back, then down by ``decay_lr_rate`` (Smith 2018). The first of Adam's betas
    goes the other way; the second is 0.99, as there, whatever the optimizer said."""

    _kind = "OneCycle"
    _ORDER = (
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size", "cycle_first_stair_count",
        "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate",
        "last_batch_iteration",
    )  # fmt: skip

    def _begin(self, optimizer: Any, rule: _Rule, momentum: _Rule | None = None) -> None:
        self._momentum = momentum if "betas" in optimizer.defaults else None
        if momentum is not None and self._momentum is None:
            what = f"scheduler.params.cycle_momentum changes nothing: {type(optimizer).__name__} has no betas"
            warnings.warn(what, stacklevel=5)
        super()._begin(optimizer, rule)

    def step(self, *args: Any) -> None:
        super().step(*args)
        if self._momentum is not None:
            for index, group in enumerate(self.optimizer.param_groups):
                group["betas"] = (self._momentum(self.last_epoch - 1, 0.0, index), 0.99)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "_momentum"}


class _Parameters:
    """``params`` of the section, taken one by one; what is left at the end is unknown."""

    def __init__(self, kind: str, values: dict[str, Any], groups: int) -> None:
        self.kind, self._left, self._groups = kind, values, groups
        self._known: list[str] = []

    def take(self, name: str, default: Any = ...) -> Any:
        self._known.append(name)
        if default is ... and name not in self._left:
            raise ConfigError(f"scheduler.params.{name}: missing in {self._left!r}; {self.kind} needs it")
        return self._left.pop(name, default)

    def number(self, name: str, default: Any = ..., least: float = -math.inf) -> float:
        return _number(name, self.take(name, default), least)

    def each(self, name: str, default: Any = ...) -> list[float]:
        """Return a number for each group of the optimizer: the given one, or those of the given list."""
        given = self.take(name, default)
        if not isinstance(given, (list, tuple)):
            return [_number(name, given)] * self._groups
        if len(given) != self._groups:
            raise wrong(f"scheduler.params.{name}", given, f"a number, or {self._groups}: one a parameter group")
        return [_number(name, one) for one in given]

    def own_or_each(self, name: str, default: float | None) -> list[float] | None:
        """Return a value for each group; None: the rates that the groups have."""
        return None if self._left.get(name, default) is None else self.each(name, default)

    def switch(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise wrong(f"scheduler.params.{name}", value, "true or false")
        return value

    def end(self) -> None:
        for name, value in self._left.items():
            raise ConfigError(
                f"scheduler.params.{name}: unknown (value {value!r}){nearest(name, self._known)}; {self.kind} has "
                + ", ".join(sorted(self._known))
            )


def _number(name: str, value: Any, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
        raise wrong(f"scheduler.params.{name}", value, "a number" if least == -math.inf else f"a number >= {least:g}")
    return float(value)


def build(section: Any, optimizer: Any) -> Any:
    """Return the schedule that the section asks for.

    Raises:
        zeropp.ConfigError: an unknown type or parameter, or a value that cannot be, with its path.
    """
    kind, values = section_of(section, "scheduler")
    if kind not in _MADE:
        raise ConfigError(
            f"scheduler.type: {kind!r} is unknown{nearest(kind, _MADE)}; wanted one of {', '.join(_MADE)}, or lr_scheduler= with any of "
            "torch's"
        )
    return _MADE[kind](optimizer, **values)


def _rise(given: _Parameters) -> tuple[int, Callable[[int], float]]:
    """Return (steps, share of the way up at a step before that)."""
    steps, shape = max(2, int(given.number("warmup_num_steps", 1000))), given.take("warmup_type", "log")
    if shape not in ("log", "linear"):
        raise wrong("scheduler.params.warmup_type", shape, "'log' or 'linear'")
    if shape == "log":
        return steps, lambda number: math.log(number + 1) / math.log(steps)
    return steps, lambda number: number / steps


def _warmup(given: _Parameters) -> tuple[_Rule]:
    decays = given.kind == "WarmupDecayLR"
    least = given.each("warmup_min_lr", 0.0)
    most = given.own_or_each("warmup_max_lr", 0.001 if decays else None)
    total = int(given.number("total_num_steps")) if decays else None
    steps, rise = _rise(given)

    def rule(number: int, own: float, index: int) -> float:
        low, top = least[index], own if most is None else most[index]
        if number < 0:
            return low
        if number < steps:
            return low + (top - low) * rise(number)
        left = 1.0 if total is None else max(0.0, (total - number) / max(1.0, total - steps))
        return low + (top - low) * left

    return (rule,)


def _cosine(given: _Parameters) -> tuple[_Rule]:
    least, last = given.number("warmup_min_ratio", 0.0), given.number("cos_min_ratio", 0.0001)
    total = int(given.number("total_num_steps"))
    steps, rise = _rise(given)

    def rule(number: int, own: float, index: int) -> float:
        if number < 0:
            return 0.0
        if number < steps:
            return own * (least + (1.0 - least) * rise(number))
        progress = min(1.0, (number - steps + 1) / max(1, total - steps))
        return own * max(0.0, last + (1.0 - last) * (1.0 + math.cos(math.pi * progress)) / 2.0)

    return (rule,)


def _range_test(given: _Parameters) -> tuple[_Rule]:
    least, slope = given.each("lr_range_test_min_lr", 1e-3), given.number("lr_range_test_step_rate", 1.0)
    steps, stairs = given.number("lr_range_test_step_size", 2000, 1), given.switch("lr_range_test_staircase", False)

    def rule(number: int, own: float, index: int) -> float:
        passed = (number + 1) / steps
        return least[index] * (1 + slope * (math.floor(passed) if stairs else passed))

    return (rule,)


def _cycle(given: _Parameters) -> tuple[_Rule, _Rule | None]:
    low, high = given.each("cycle_min_lr"), given.each("cycle_max_lr")
    up = given.number("cycle_first_step_size", 2000, 1)
    second = given.take("cycle_second_step_size", None)
    down = up if second is None else _number("cycle_second_step_size", second, 0)
    stairs = int(given.number("cycle_first_stair_count", 0, 0))
    more = given.take("cycle_second_stair_count", None)
    stairs_down = stairs if more is None else int(_number("cycle_second_stair_count", more, 0))
    each, total = given.number("decay_step_size", 0, 0), up + down
    decay = given.number("decay_lr_rate", 0.0)
    cycles, least, most = (
        given.switch("cycle_momentum", True),
        given.each("cycle_min_mom", 0.8),
        given.each("cycle_max_mom", 0.9),
    )
    growth = given.number("decay_mom_rate", 0.0)

    def height(number: int) -> float:
        """Share of the way up."""
        at = (number + 1) % total
        done, of, steps = (at, up, stairs) if at <= up else (total - at, down, stairs_down)
        return math.floor(done * steps / of) / steps if steps else done / of

    def after(number: int, rate: float) -> float:
        """Return what divides rates, or multiplies momenta, once the cycle is over."""
        return 1 + rate * (number - total + 1) / each if each else 1.0

    def rule(number: int, own: float, index: int) -> float:
        if number < total:
            return low[index] + (high[index] - low[index]) * height(number)
        return low[index] / after(number, decay)

    def momentum(number: int, own: float, index: int) -> float:
        if number < 0:
            return least[index]
        if number < total:
            return most[index] - (most[index] - least[index]) * height(number)
        return most[index] * after(number, growth)

    return rule, momentum if cycles else None


_RULES: dict[str, Callable[[_Parameters], Any]] = {
    "WarmupLR": _warmup, "WarmupDecayLR": _warmup, "WarmupCosineLR": _cosine, "OneCycle": _cycle, "LRRangeTest": _range_test,
}  # fmt: skip
_MADE: dict[str, type[_Schedule]] = {
    one._kind: one for one in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def explain(section: Any) -> str:
    """Return what the section makes, in words; values that a Trainer fills may be "auto".

    Raises:
        zeropp.ConfigError: what ``zeropp.initialize`` would raise for it.
    """
    if isinstance(section, Mapping) and isinstance(section.get("params"), Mapping):
        given = {key: value for key, value in section["params"].items() if value != "auto"}
        if "total_num_steps" in section["params"]:
            given.setdefault("total_num_steps", 2)
        section = {**section, "params": given}
    made = build(section, torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    return type(made).__name__


__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "build", "explain"]
