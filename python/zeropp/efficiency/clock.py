# SPDX-License-Identifier: Apache-2.0
"""The clock of a prepared model: what the choices of all techniques are functions of, besides the seed.

Its only state is the number of steps taken, which a checkpoint has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Clock:
    """Step, micro-step and place in the global batch of one prepared model. ``engine.clock``; equal on all ranks but for ``rank``."""

    def __init__(self, rank: int, ranks: int, core: Any) -> None:
        self.rank, self.ranks = rank, ranks
        self.step = 0
        """Optimizer steps taken so far: the number of the step at hand, counted from 0. One that fp16 skipped does not count."""
        self._core = core
        self._ended_at = 0
        self._inside: bool | None = None
        self.place: int | None = None
        """The place in the global batch of the next forward's first sample, where the loop says it: ``zeropp.elastic.place``."""

    @property
    def micro_step(self) -> int:
        """Number of the micro-step in its step, counted from 0. It stays the same until the end of its backward."""
        return int(self._core.backwards) - self._ended_at

    def training(self, module: nn.Module) -> bool:
        """True where ``module`` works for a backward: neither in evaluation, nor in ``generate``.

        Inside the model's forward it is asked whether that forward began in training mode with gradients enabled: checkpointing
        with ``use_reentrant=True`` runs blocks without gradients at first, and must not see another choice in its second run.
        """
        return module.training and (torch.is_grad_enabled() if self._inside is None else self._inside)

    def first_sample(self, batch: int) -> int:
        """Return the place in the global batch of this rank's first sample, for a micro-batch of ``batch`` samples on every rank.

        Micro-steps follow one another, and ranks within them: sample i of this micro-batch has the place first_sample + i. A loop
        that splits batches otherwise sets :attr:`place`.
        """
        if self.place is not None:
            return self.place
        return (self.micro_step * self.ranks + self.rank) * batch

    def tick(self, taken: bool) -> None:
        """Note the end of a step of the optimizer, and whether it was taken."""
        self.step += int(taken)
        self.place = None
        self._ended_at = int(self._core.backwards)

    def restore(self, step: int) -> None:
        """Continue at a step: after a load, or with another optimizer."""
        self.step, self._ended_at = step, int(self._core.backwards)

    def watch(self, model: nn.Module) -> None:
        """Follow the model's own forward, for :meth:`training`."""
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Clock:
        return self  # a copy of a prepared model has the same core

    def _enter(self, model: nn.Module, args: Any) -> None:
        if self._inside is None:
            self._inside = model.training and torch.is_grad_enabled()

    def _leave(self, model: nn.Module, args: Any, result: Any) -> None:
        self._inside = None
