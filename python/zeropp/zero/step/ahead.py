# SPDX-License-Identifier: Apache-2.0
"""Steps that the host enqueues ahead of a GPU and does not wait for (docs/design/0044).

The GPU measures the norm, clips, skips a step whose gradients are not finite, and changes the loss scale of fp16. All ranks learn
how a step ended at the same later step, when each of them has seen it; at most eight steps are under way.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch

from zeropp.errors import Error
from zeropp.zero.engine import Engine, StepSchedule, StepStrategy
from zeropp.zero.model_state import tensor_over
from zeropp.zero.step.scaler import origins, some


class Ahead(StepSchedule):
    """The steps of one engine whose shards a GPU holds. Its methods are collective, but for those that say otherwise."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._core = engine.core
        self._norm: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None
        """Of the GPU: the norm, and the loss scale of the next backward. None before the first norm, and after a load."""

    def scaled(self, engine: Engine, loss: torch.Tensor) -> torch.Tensor:
        """Not collective: multiply by the loss scale that the GPU has."""
        return engine.scaler.scaled(loss, None if self._scale is None else self._scale.clone().to(loss.device))

    # -- the norm ------------------------------------------------------------------------------------------------------

    def _enqueue_norm(self, engine: Engine) -> torch.Tensor:
        """Enqueue the norm, and take the outcomes that all ranks have seen."""
        scaler = engine.scaler
        if self._norm is None:
            norm, scale, wide_norm = self._core.ahead_open(scaler.scale, scaler.good_steps)
            self._norm = tensor_over(self._core, norm, 1, torch.float32, engine.device)[0]
            if any(unit.dtype == torch.float64 for unit in engine.trained):
                self._norm = tensor_over(self._core, wide_norm, 1, torch.float64, engine.device)[0]
            self._scale = tensor_over(self._core, scale, 1, torch.float32, engine.device)[0]
        self._core.ahead_measure(engine.held_scale)
        self._take(engine)
        return self._norm.clone()

    def norm(self, engine: Engine) -> float | torch.Tensor:
        """Return the norm of the gradients before clipping: a number of the GPU, which ``float()`` waits for."""
        measured = engine.norm_now
        if not isinstance(measured, torch.Tensor):
            clip_scale = 1.0 if measured is None else engine.clip_scale
            measured = self._enqueue_norm(engine)
            engine.norm, engine.norm_at, engine.clip_scale = (measured, []), engine.core.backwards, clip_scale
            if clip_scale != 1.0:  # the host has clipped: by another norm, or before it read gradients
                self._core.ahead_limit(engine.held_scale, math.inf, clip_scale)
        return measured

    def clip(self, engine: Engine, max_norm: float, norm: float | torch.Tensor) -> None:
        if isinstance(norm, torch.Tensor):
            engine.max_norm = float(max_norm)
            self._core.ahead_limit(engine.held_scale, float(max_norm), 1.0)
        else:
            super().clip(engine, max_norm, norm)
            self._core.ahead_limit(engine.held_scale, math.inf, engine.clip_scale)

    # -- the step ------------------------------------------------------------------------------------------------------

    def admits(self, engine: Engine) -> bool:
        """Return True: the GPU decides."""
        self.norm(engine)
        return True

    def run(self, optimizer: Any) -> None:
        engine = optimizer._engine
        self._core.ahead_step(engine.strategy.groups(optimizer), *engine.scaler.rule)

    def taken(self, engine: Engine) -> None:
        """Nothing is known of the step yet."""

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def _who(self, engine: Engine, bad: list[tuple[int, int]]) -> list[str]:
        names = [(engine.units[unit].params[index].names[0], 0) for unit, index in bad]
        return origins(dict.fromkeys(names), engine.rank_names, known=False)

    def _take(self, engine: Engine) -> None:
        """Take the outcomes that are ready, equal on all ranks.

        Raises:
            zeropp.Error: gradients of an earlier step were not finite, and there is no loss scale to lower.
        """
        while (outcome := self._core.ahead_take()) is not None:
            skipped, norm, _, bad = outcome
            if not skipped:
                engine.scaler.taken()
                continue
            engine.clock.step -= 1
            who = self._who(engine, bad)
            if engine.scaler.enabled:
                engine.scaler.admits(norm, who)
                continue
            raise Error(
                f"optimizer.step: the gradients of {some(who)} were not finite (norm {norm}) in a step before this one, which the GPU "
                "skipped: weights and optimizer state are as without it; optimizer.zero_grad() forgets this batch, and "
                "optimizer.flush() after a step tells of it at once"
            )

    def _newest(self) -> Any:
        """Return the newest outcome that was not taken, or None; this rank waits for it."""
        return None if self._norm is None else self._core.ahead_newest()

    def loss_scale(self, engine: Engine) -> float:
        newest = self._newest()
        return engine.scaler.scale if newest is None else float(newest[2])

    def overflow(self, engine: Engine) -> list[str]:
        newest = self._newest()
        if newest is None:
            return super().overflow(engine)
        return self._who(engine, newest[3]) if newest[0] else []

    def flush(self) -> None:
        """Wait for all steps under way. Raise zeropp.Error as :meth:`admits` does."""
        engine = self._engine()
        if engine is not None and self._norm is not None:
            self._core.ahead_settle()
            self._take(engine)

    def drop(self, states: bool) -> None:
        """Forget the steps under way, and begin anew with the loss scale that the load brings."""
        if self._norm is None:
            return
        self._core.ahead_settle()
        while self._core.ahead_take() is not None:
            pass
        if states:
            self._norm = self._scale = None


def works(strategy: StepStrategy, engine: Engine) -> bool:
    """Return True if the steps of this engine can be enqueued ahead of their GPU.

    Not with fp16 where data or layers are chosen by the number of steps taken: all ranks have to know it at once.
    """
    counts = engine.config.scales_loss and engine.config.efficiency is not None
    return strategy.in_c and not counts and bool(engine.core.ahead_works())
