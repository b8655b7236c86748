# SPDX-License-Identifier: Apache-2.0
"""``zeropp.Efficiency``: which of a batch's tokens, layers and attention scores a training step computes, step by step.

Every choice is a pure function of the seed, the step, the micro-step, the layer and a sample's place in the global batch, so that
nothing has to be stored or sent, and a run continues alike on any number of ranks. docs/efficiency.md describes the techniques.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zeropp.config.attention import check_attention
from zeropp.config.values import MOST_NUMBER, finite, instance, refuses_unknown, whole, wrong
from zeropp.errors import ConfigError, shown


@refuses_unknown
@dataclass(frozen=True)
class Growth:
    """A number that goes from ``start`` at step 0 to ``end`` at step ``steps``, and stays there.

    At step t it is start + (end - start) (t / steps)^(1 / root). Whole numbers are rounded down to a multiple of ``multiple``, but
    never below the first multiple that is at least ``start``. Fractions (``start`` or ``end`` is a float) are not rounded.
    This is the ``fixed_root`` schedule of DeepSpeed's curriculum learning (Li et al. 2022, section 3). :meth:`at` gives steps of values.
    """

    start: float
    end: float
    steps: int = 0
    """Optimizer steps until ``end``; must be given."""
    root: float = 1
    """1: linear. 2: the square root of the step, which grows faster at first."""
    multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("start", "end", "root"):
            if not finite(getattr(self, name)):
                raise wrong(f"Growth.{name}", getattr(self, name), "a finite number")
        if self.root <= 0:
            raise wrong("Growth.root", self.root, "a number above 0; 1 is linear")
        whole("Growth.steps", self.steps, 1, "optimizer steps until the end is reached")
        whole("Growth.multiple", self.multiple, 1, "the value is a multiple of it")
        if self.multiple > 1 and not self.counts:
            raise wrong("Growth.multiple", self.multiple, "1 where start or end is a fraction")
        self._check_end()

    def _check_end(self) -> None:
        if self.counts and self.end % self.multiple:
            near = int(self.end // self.multiple * self.multiple)
            raise wrong("Growth.end", self.end, f"a multiple of {self.multiple}, or it is never reached: {near} or {near + self.multiple}")  # fmt: skip

    @property
    def counts(self) -> bool:
        """True if the values are whole numbers."""
        return isinstance(self.start, int) and isinstance(self.end, int)

    @property
    def shrinks(self) -> bool:
        """True if the last value is below the first."""
        return self.end < self.start

    def __call__(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        if step >= self.steps:
            return self.end
        value: float = self.start + (self.end - self.start) * (step / self.steps) ** (1.0 / self.root)
        if not self.counts:
            return value
        rounded = math.floor(value) // self.multiple * self.multiple
        bounds = (-(-self.start // self.multiple) * self.multiple, self.end)
        return int(min(max(rounded, min(bounds)), max(bounds)))

    @staticmethod
    def at(values: Mapping[int, float]) -> Steps:
        """Return a schedule of steps: from each step on its value. Step 0 must have one.

        Raises:
            zeropp.ConfigError: no value for step 0, or a step or a value that is no number.
        """
        if not isinstance(values, Mapping) or not values or 0 not in values:
            raise wrong("Growth.at", values, "a mapping of steps to values that has step 0, such as {0: 64, 5000: 512}")
        return Steps(tuple(sorted(values.items())))


@dataclass(frozen=True)
class Steps:
    """A schedule of steps of values, which :meth:`Growth.at` makes."""

    values: tuple[tuple[int, float], ...]
    """(first step, value from it on), by step."""

    def __post_init__(self) -> None:
        for step, value in self.values:
            whole("Growth.at", step, 0, "the first step of a value")
            if not finite(value):
                raise wrong(f"Growth.at[{step}]", value, "a finite number")

    @property
    def shrinks(self) -> bool:
        """True if a value is below the one before it."""
        return any(later < value for (_, value), (_, later) in zip(self.values, self.values[1:], strict=False))

    def __call__(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        return next(value for first, value in reversed(self.values) if first <= step)


Schedule = Growth | Steps | Callable[[int], float]
"""What may stand where a value changes with the step. A function gets the step, counted from 0, and must be pure: equal on all ranks."""


def check_schedule(path: str, value: Any, least: float, *, may_shrink: bool = False) -> None:
    """Refuse what is no schedule, shrinks, or begins below ``least``; a function is checked when it is called."""
    if not callable(value) or isinstance(value, type):
        raise wrong(
            path, value, "a zeropp.Growth(start, end, steps=...), zeropp.Growth.at({...}), or a function of the step"
        )
    if not isinstance(value, (Growth, Steps)):
        return
    if value.shrinks and not may_shrink:
        raise wrong(path, value, "a schedule that never shrinks: an end that is at least the start")
    values = (value.start, value.end) if isinstance(value, Growth) else tuple(one for _, one in value.values)
    if min(values) < least:
        raise wrong(path, value, f"values of at least {least:g}")


def last_value(schedule: Any) -> float | None:
    """Return the largest value that a schedule reaches; None: it is a function."""
    if isinstance(schedule, Steps):
        return max(value for _, value in schedule.values)
    return getattr(schedule, "end", None)


def count_at(path: str, schedule: Schedule, step: int, least: int = 1) -> int:
    """Return a schedule's whole number at a step.

    Raises:
        zeropp.ConfigError: a user's function returned something else; the path, the step and the value are named.
    """
    value: Any = schedule(step)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_NUMBER:
        raise ConfigError(f"{path}: {shown(value)} at step {step} is not allowed; wanted a whole number >= {least}")
    return value


def share_at(path: str, schedule: Schedule, step: int) -> float:
    """Return a schedule's fraction at a step, above 0 and at most 1; raise zeropp.ConfigError for another value."""
    value: Any = schedule(step)
    if not finite(value) or not 0 < value <= 1:
        raise ConfigError(
            f"{path}: {shown(value)} at step {step} is not allowed; wanted a number above 0 and at most 1"
        )
    return float(value)


@refuses_unknown
@dataclass(frozen=True, kw_only=True)
class TokenDrop:
    """Random layer-token dropping (Yao et al. 2022): some layers work on a random part of each sample's tokens."""

    keep: Schedule
    """Tokens of each sample that such a layer keeps: whole numbers. From the sequence's length on, nothing is dropped."""

    layers: tuple[int, ...] | None = None
    """Numbers of the layers that drop tokens, from 0; None: all but the first and the last."""

    def __post_init__(self) -> None:
        check_schedule("TokenDrop.keep", self.keep, 1)
        if self.layers is not None:
            if isinstance(self.layers, (str, int)) or not self.layers:
                raise wrong("TokenDrop.layers", self.layers, "numbers of layers, such as (1, 2, 3), or None")
            for layer in self.layers:
                whole("TokenDrop.layers", layer, 0, "the number of a layer")
            object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))


@refuses_unknown
@dataclass(frozen=True, kw_only=True)
class LayerDrop:
    """Progressive layer dropping (Zhang and He 2020): a step leaves out random layers.

    Layer l of L is kept with probability 1 - (l / L) (1 - theta(t)), where theta(t) = (1 - theta) exp(-gamma t) + theta.
    """

    theta: float = 0.5
    """What theta(t) approaches, 0 to 1."""

    gamma: float = 0.001
    """How fast: about 100 / (number of steps) in the paper."""

    keep: Schedule | None = None
    """Values of theta(t) in place of the formula, above 0 and at most 1: a schedule that rises drops fewer and fewer layers (RaPTr,
    Panigrahi et al. 2024)."""

    def __post_init__(self) -> None:
        if not finite(self.theta) or not 0 <= self.theta <= 1:
            raise wrong("LayerDrop.theta", self.theta, "a number from 0 to 1")
        if not finite(self.gamma) or self.gamma < 0:
            raise wrong("LayerDrop.gamma", self.gamma, "a finite number >= 0")
        if self.keep is not None:
            check_schedule("LayerDrop.keep", self.keep, 0, may_shrink=True)

    def at(self, step: int) -> float:
        """Return theta(t) at a step, counted from 0."""
        if self.keep is not None:
            return share_at("LayerDrop.keep", self.keep, step)
        return (1.0 - self.theta) * math.exp(-self.gamma * step) + self.theta


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One measure of difficulty in a curriculum."""

    schedule: Schedule
    """The most difficult samples of a step."""
    by: str = "percentile"
    """"value": samples whose metric is at most the schedule's value. "percentile": the first value / ``of`` of all samples."""
    of: float = 100
    samples_path: str | None = None
    """Samples by rising metric: an index of DeepSpeed's DataAnalyzer, without ``.idx`` and ``.bin``. None: the metric chooses no samples;
    the script applies it (``engine.set_data_post_process_func``)."""
    values_path: str | None = None
    """The metric's values in that order."""


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """The curriculum of a loader that zeropp makes, from DeepSpeed's JSON: ``zeropp.initialize(training_data=)``."""

    metrics: Mapping[str, Metric]
    order_path: str | None = None
    """Folder for the order in which samples are drawn."""
    epochs: int = 1000
    workers: int = 0


@refuses_unknown
@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The choice of what a training step leaves out. Evaluation and ``generate`` never leave out anything."""

    seq_length: Schedule | None = None
    """Length that batches are cut to (sequence-length warm-up, Li et al. 2022): ``zeropp.data.cut`` does it in a plain loop, Trainer
    and Lightning's strategy by themselves."""

    curriculum: Curriculum | None = None
    """Which samples a step draws, for loaders that ``zeropp.initialize`` makes. Elsewhere ``zeropp.data.CurriculumSampler`` is the
    ``batch_sampler`` of a loader, and nothing stands here."""

    token_drop: TokenDrop | None = None
    """Tokens that layers leave out."""

    layer_drop: LayerDrop | None = None
    """Layers that steps leave out."""

    attention: Any = None
    """Blocks of scores that the attention of a Hugging Face model computes: one pattern of ``zeropp.nn``, such as
    ``zeropp.nn.Longformer(block=64)``, for all layers; or a mapping of layers' numbers to patterns, in which a layer that is left out
    computes all scores. In JSON a pattern is a section ``sparse_attention`` of DeepSpeed's, such as {"mode": "fixed", "block": 64}.
    Unlike the others, it holds in evaluation and in ``generate``, too."""

    seed: int = 1234
    """Every random choice follows from it."""

    def __post_init__(self) -> None:
        if self.seq_length is not None:
            check_schedule("Efficiency.seq_length", self.seq_length, 1)
        for name, kind in (("curriculum", Curriculum), ("token_drop", TokenDrop), ("layer_drop", LayerDrop)):
            if getattr(self, name) is not None:
                instance(f"Efficiency.{name}", getattr(self, name), kind)
        if self.attention is not None:
            object.__setattr__(self, "attention", check_attention(self.attention, "Efficiency.attention"))
        whole("Efficiency.seed", self.seed, 0, "all random choices follow from it")
