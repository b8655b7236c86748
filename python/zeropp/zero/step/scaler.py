# SPDX-License-Identifier: Apache-2.0
"""Gradients that are not finite: whose they are, and the loss scale of fp16 that gives way to them.

The scale (Micikevicius et al. 2018, section 3.2): gradients below 2^-24 would be zero, so the loss is multiplied before
backward and the gradients are divided in the step, in fp32.

Dynamic, by the rule of ``torch.amp.GradScaler``: a step whose gradients are not finite is skipped and the scale goes
down; after ``interval`` good steps in a row it goes up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zeropp.config import LossScale
from zeropp.errors import Error

_log = logging.getLogger("zeropp")
_LAST_BIT = 63
"""The bit of this rank stands for all ranks above, too (csrc/zero/origin.c)."""


class NoScaler:
    """fp32 and bf16: the loss is not scaled, and a step whose gradients are not finite raises."""

    enabled = False
    """True if losses are scaled."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.good_steps = 0
        """Steps taken since the scale changed, or one was skipped."""
        self.backwards = 0
        """Backwards that began from a scaled loss."""
        self.overflow: list[str] = []
        """Parameters, each with its rank, whose gradients were not finite in the last step; empty if it was taken."""

    def scaled(self, loss: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss to call ``backward`` of. ``scale``: the loss scale, where a GPU has it."""
        return loss

    @property
    def rule(self) -> tuple[float, float, float, int]:
        """Return (growth, backoff, least, interval), by which the scale changes; growth and backoff 1: it is fixed."""
        return 1.0, 1.0, 0.0, 1 << 62

    def require_scaled(self, backwards: int) -> None:
        """Raise zeropp.Error unless all of so many backwards began from a scaled loss."""

    def admits(self, norm: float, who: list[str]) -> bool:
        """Return True if a step with these gradients is to be taken, False if it is to be skipped.

        Args:
            who: the parameters, each with its rank, whose gradients are not finite.

        Raises:
            zeropp.Error: they are not finite, and there is no scale to lower.
        """
        require_finite(norm, who)
        return True

    def taken(self) -> None:
        """Note that a step was taken."""

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps; None: nothing."""
        return None

    def restore(self, state: dict[str, Any] | None) -> None:
        """Take what :meth:`state` gave."""


def require_finite(norm: float, who: list[str]) -> None:
    """Raise zeropp.Error that names the parameters whose gradients are not finite, if there are any."""
    if who:
        raise Error(
            f"optimizer.step: the gradients of {some(who)} are not finite (norm {norm}); weights and optimizer "
            "state are unchanged; optimizer.zero_grad() forgets this batch"
        )


def some(who: list[str]) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(who[:3]) + (f" and {len(who) - 3} more" if len(who) > 3 else "")


class Scaler(NoScaler):
    """The scale of one optimizer in fp16."""

    enabled = True

    def __init__(self, config: LossScale) -> None:
        super().__init__()
        self.config = config
        self.scale = float(config.init)
        self.skipped = 0

    def scaled(self, loss: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if loss.numel() != 1:
            raise Error(
                f"optimizer.backward: a loss of shape {tuple(loss.shape)} with fp16; wanted one number: take its mean or sum"
            )
        # In fp32, as GradScaler does. A model that returns its loss in fp16 overflows by itself at a scale above 65504, and
        # the first step is skipped: better return the loss in fp32.
        return loss.float() * (self.scale if scale is None else scale)

    def require_scaled(self, backwards: int) -> None:
        if self.backwards != backwards:
            raise Error(
                "optimizer.step: a backward did not begin from optimizer.backward(loss), so its gradients are not scaled, and fp16 "
                "needs that they are; call optimizer.backward(loss) in place of loss.backward()"
            )

    def admits(self, norm: float, who: list[str]) -> bool:
        if who:
            self._overflowed(who)
        return not who

    def taken(self) -> None:
        self.overflow = []
        self.good_steps += 1
        if self.config.dynamic and self.good_steps >= self.config.interval:
            self.good_steps = 0
            if self.scale * self.config.growth < 2.0**127:
                self.scale *= self.config.growth

    def _overflowed(self, who: list[str]) -> None:
        """Skip a step. Raises zeropp.Error where the scale cannot go down any more."""
        before, self.overflow, self.good_steps = self.scale, who, 0
        self.skipped += 1
        names = some(who)
        if not self.config.dynamic or self.scale <= self.config.least:
            kind = "which is fixed" if not self.config.dynamic else "which is the least"
            raise Error(
                f"optimizer.step: the gradients of {names} are not finite at loss scale {before:g}, {kind}; weights and "
                "optimizer state are unchanged; lower the learning rate, clip, or use precision='bf16'"
            )
        self.scale = max(self.config.least, self.scale * self.config.backoff)
        _log.warning(
            "step skipped: the gradients of %s are not finite at loss scale %g; it is %g now", names, before, self.scale
        )

    @property
    def rule(self) -> tuple[float, float, float, int]:
        rule = self.config
        return (rule.growth, rule.backoff, rule.least, rule.interval) if rule.dynamic else super().rule

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Take what :meth:`state` gave. A fixed scale stays the one of the configuration."""
        if state is None:
            return
        if self.config.dynamic:
            self.scale = float(state["scale"])
        self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])
        self.overflow = []


def origins(bad: Iterable[tuple[str, int]], ranks: Sequence[int], known: bool = True) -> list[str]:
    """Return the parameters, each with the ranks whose gradients were not finite before the sum.

    Args:
        bad: (name, bits of the ranks) of each shard with such values, in the order of the shards.
        ranks: the names of the ranks, in the order of the bits.
        known: False: the gradients of each rank were not looked at before the sum, so there are no bits.
    """
    found: dict[str, int] = {}
    for name, bits in bad:
        found[name] = found.get(name, 0) | bits
    if known or len(ranks) == 1:
        return [f"'{name}' ({_where(bits if known else 1, ranks)})" for name, bits in found.items()]
    return [f"'{name}' (on some rank, or in the sum)" for name in found]


def _where(bits: int, ranks: Sequence[int]) -> str:
    numbers = [at for at in range(_LAST_BIT + 1) if bits >> at & 1]
    if not numbers:
        return "finite on each rank, but not their sum"
    more = len(ranks) > _LAST_BIT + 1
    names = [f"rank {ranks[at]}{' or above' if at == _LAST_BIT and more else ''}" for at in numbers]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{listed}{' before the sum' if len(ranks) > 1 else ''}"
