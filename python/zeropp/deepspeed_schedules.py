# SPDX-License-Identifier: Apache-2.0
"""The ``scheduler`` section of a DeepSpeed file: learning rates by step, as DeepSpeed 0.19 (lr_schedules.py) has them.

There a schedule is stepped after the optimizer, and its first step is number 0: updates 0 and 1 have the first rate, update
k >= 2 that of number k - 1. It is so here too, because the same file has to train the same way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zeropp.deepspeed_optimizers import section_of
from zeropp.errors import ConfigError

_Rule = Callable[[int, float], float]  # (number of the step, -1 before the first; the group's own rate) -> rate


class _Schedule(torch.optim.lr_scheduler.LambdaLR):
    """torch's own, with a rate in place of a factor; frameworks look at the name of the class."""

    def __init__(self, optimizer: Any, rule: _Rule) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 1.0  # LambdaLR multiplies it by the rate
        super().__init__(optimizer, [functools.partial(_rate, rule, rate) for rate in rates])


def _rate(rule: _Rule, rate: float, update: int) -> float:
    return rule(update - 1, rate)


class WarmupLR(_Schedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr``, and there it stays."""


class WarmupDecayLR(_Schedule):
    """The same, then down to 0 at ``total_num_steps``."""


class WarmupCosineLR(_Schedule):
    """The optimizer's own rate times a ratio: up to 1, then along a cosine to ``cos_min_ratio``."""


def build(section: Any, optimizer: Any) -> Any:
    """The schedule that the section asks for.

    Raises:
        zeropp.ConfigError: an unknown type or parameter, with its path.
    """
    kind, values = section_of(section, "scheduler")
    made = {"WarmupLR": _warmup, "WarmupDecayLR": _warmup, "WarmupCosineLR": _cosine}
    if kind not in made:
        raise ConfigError(
            f"scheduler.type: {kind!r} is not built yet; wanted one of {', '.join(sorted(made))}, or lr_scheduler= with any of torch's"
        )
    values.pop("last_batch_iteration", None)
    if kind != "WarmupLR" and "total_num_steps" not in values:
        raise ConfigError(f"scheduler.params.total_num_steps: missing in {section!r}; {kind} needs it")
    rule = made[kind](kind, values)
    if values:
        raise ConfigError(f"scheduler.params.{next(iter(values))}: unknown in {section!r}")
    return {"WarmupLR": WarmupLR, "WarmupDecayLR": WarmupDecayLR, "WarmupCosineLR": WarmupCosineLR}[kind](
        optimizer, rule
    )


def _rise(values: dict[str, Any]) -> tuple[int, Callable[[int], float]]:
    """(steps, share of the way up at a step before that)."""
    steps, shape = max(2, int(values.pop("warmup_num_steps", 1000))), values.pop("warmup_type", "log")
    if shape not in ("log", "linear"):
        raise ConfigError(f"scheduler.params.warmup_type: {shape!r} is not allowed; wanted 'log' or 'linear'")
    if shape == "log":
        return steps, lambda number: math.log(number + 1) / math.log(steps)
    return steps, lambda number: number / steps


def _warmup(kind: str, values: dict[str, Any]) -> _Rule:
    least = float(values.pop("warmup_min_lr", 0.0))
    most = values.pop("warmup_max_lr", None if kind == "WarmupLR" else 0.001)
    total = int(values.pop("total_num_steps")) if kind == "WarmupDecayLR" else None
    steps, rise = _rise(values)

    def rule(number: int, own: float) -> float:
        top = own if most is None else float(most)
        if number < 0:
            return least
        if number < steps:
            return least + (top - least) * rise(number)
        left = 1.0 if total is None else max(0.0, (total - number) / max(1.0, total - steps))
        return least + (top - least) * left

    return rule


def _cosine(kind: str, values: dict[str, Any]) -> _Rule:
    least, last = float(values.pop("warmup_min_ratio", 0.0)), float(values.pop("cos_min_ratio", 0.0001))
    total = int(values.pop("total_num_steps"))
    steps, rise = _rise(values)

    def rule(number: int, own: float) -> float:
        if number < 0:
            return 0.0
        if number < steps:
            return own * (least + (1.0 - least) * rise(number))
        progress = min(1.0, (number - steps + 1) / max(1, total - steps))
        return own * max(0.0, last + (1.0 - last) * (1.0 + math.cos(math.pi * progress)) / 2.0)

    return rule


def explain(section: Any) -> str:
    """What the section makes, in words; values that a Trainer fills may be "auto".

    Raises:
        zeropp.ConfigError: what ``zeropp.initialize`` would raise for it.
    """
    if isinstance(section, Mapping) and isinstance(section.get("params"), Mapping):
        given = {key: value for key, value in section["params"].items() if value != "auto"}
        if "total_num_steps" in section["params"]:
            given.setdefault("total_num_steps", 2)
        section = {**section, "params": given}
    made = build(section, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    return type(made).__name__


__all__ = ["WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "build", "explain"]
