# SPDX-License-Identifier: Apache-2.0
"""The loss scale of fp16 (Micikevicius et al. 2018, section 3.2): gradients below 2^-24 would be zero, so the loss is
multiplied before backward and the gradients are divided in the step, in fp32.

Dynamic, by the rule of ``torch.amp.GradScaler``: a step whose gradients are not finite is skipped and the scale goes
down; after ``interval`` good steps in a row it goes up.
"""

from __future__ import annotations

import logging
from typing import Any

from zeropp.config import LossScale
from zeropp.errors import Error

_log = logging.getLogger("zeropp")


class Scaler:
    """The scale of one optimizer."""

    def __init__(self, config: LossScale) -> None:
        self.config = config
        self.scale = float(config.init)
        self.good_steps = 0
        self.skipped = 0
        self.overflow: list[str] = []
        """Parameters, each with its rank, whose gradients were not finite in the last step; empty if it was taken."""
        self.backwards = 0
        """Backwards that began from a scaled loss."""

    def taken(self) -> None:
        """A step was taken."""
        self.overflow = []
        self.good_steps += 1
        if self.config.dynamic and self.good_steps >= self.config.interval:
            self.good_steps = 0
            if self.scale * self.config.growth < 2.0**127:
                self.scale *= self.config.growth

    def overflowed(self, who: list[str]) -> None:
        """A step was skipped.

        Raises:
            zeropp.Error: the scale cannot go down any more.
        """
        before, self.overflow, self.good_steps = self.scale, who, 0
        self.skipped += 1
        more = f" and {len(who) - 3} more" if len(who) > 3 else ""
        names = ", ".join(who[:3]) + more
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

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def restore(self, state: dict[str, Any]) -> None:
        """What :meth:`state` gave. A fixed scale stays the one of the configuration."""
        if self.config.dynamic:
            self.scale = float(state["scale"])
        self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])
        self.overflow = []
