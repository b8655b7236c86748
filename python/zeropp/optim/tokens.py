# SPDX-License-Identifier: Apache-2.0
"""Learning rates by consumed tokens, for training whose steps have different numbers of tokens.

With sequence-length warm-up, or with tokens dropped in layers, the first steps see fewer tokens than the last ones. A decay by steps
then falls too early (Li et al. 2022, section 3; Yao et al. 2022, section 3.3), so the decay goes by tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from zeropp.config import wrong
from zeropp.config.values import whole
from zeropp.errors import ConfigError

_LENGTHS = ("T_max", "total_steps", "total_iters")
"""Where torch's schedulers keep their number of steps."""


def by_tokens(
    scheduler: LRScheduler,
    *,
    total: int,
    tokens: Callable[[int], int] | None = None,
    steps: int | None = None,
    warmup: int = 0,
) -> ByTokens:
    """Let a scheduler go on by the tokens consumed, so that it ends when ``total`` tokens are.

        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000)
        scheduler = zeropp.optim.by_tokens(scheduler, total=10**9)
        ...
        scheduler.step(tokens)  # of this step, over all ranks and micro-steps

    Args:
        scheduler: any scheduler of torch that was not stepped yet.
        total: tokens of the whole run.
        tokens: the tokens of a step, counted from 0, for frameworks that call ``step()`` without arguments.
        steps: the scheduler's steps; default: ``T_max``, ``total_steps`` or ``total_iters`` of it.
        warmup: so many first steps go by steps, as the authors advise for a warm-up.

    Raises:
        zeropp.ConfigError: an argument that is not allowed, or a scheduler whose number of steps is not known.
    """
    return ByTokens(scheduler, total, tokens, steps, warmup)


class ByTokens(LRScheduler):
    """A scheduler with torch's methods around another one, which :func:`by_tokens` makes."""

    def __init__(
        self, scheduler: LRScheduler, total: int, tokens: Callable[[int], int] | None, steps: int | None, warmup: int
    ) -> None:
        if not isinstance(scheduler, LRScheduler) or getattr(scheduler, "last_epoch", None) != 0:
            raise wrong(
                "by_tokens: scheduler",
                scheduler,
                "one of torch's schedulers that counts its steps, which ChainedScheduler does not, before its first step",
            )
        found: Any = next((getattr(scheduler, name) for name in _LENGTHS if hasattr(scheduler, name)), None)
        if steps is None and not isinstance(found, int):
            raise wrong(
                "by_tokens: steps",
                None,
                f"the number of steps of the {type(scheduler).__name__}, which does not say it",
            )
        self.steps: int = found if steps is None else steps
        whole("by_tokens: total", total, 1, "tokens of the whole run")
        whole("by_tokens: steps", self.steps, 1, "steps of the scheduler")
        whole("by_tokens: warmup", warmup, 0, "steps")
        if warmup >= self.steps:
            raise wrong("by_tokens: warmup", warmup, f"fewer than the scheduler's {self.steps} steps")
        self.scheduler, self.optimizer = scheduler, scheduler.optimizer
        self.total, self.tokens, self.warmup = total, tokens, warmup
        self.taken = self.consumed = self._warm = 0

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Number of the step of the scheduler inside."""
        return self.scheduler.last_epoch

    @property
    def finished(self) -> bool:
        """True when all tokens are consumed."""
        return self.consumed >= self.total

    def step(self, tokens: Any = None) -> None:
        """Count a step of so many tokens, over all ranks and micro-steps, and set the next step's rates.

        Raises:
            zeropp.ConfigError: neither this call nor :func:`by_tokens` says how many tokens.
        """
        if tokens is None and self.tokens is None:
            raise ConfigError(
                "by_tokens: step() does not know the step's tokens; call step(tokens), or give by_tokens(..., tokens=function of the step)"
            )
        count = self.tokens(self.taken) if tokens is None and self.tokens is not None else tokens
        count = int(count.item()) if isinstance(count, torch.Tensor) else count
        whole("by_tokens: tokens", count, 0, f"tokens of step {self.taken}")
        self.taken += 1
        self.consumed += count
        if self.taken <= self.warmup:
            self._warm = self.consumed
        while self.scheduler.last_epoch < self._target():
            self.scheduler.step()

    def _target(self) -> int:
        if self.taken <= self.warmup:
            return self.taken
        if self.consumed >= self.total:
            return self.steps
        return self.warmup + (self.steps - self.warmup) * (self.consumed - self._warm) // (self.total - self._warm)

    def get_last_lr(self) -> list[Any]:
        """Return the rates of the groups."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state and the tokens consumed."""
        inner = self.scheduler.state_dict()
        return {"taken": self.taken, "consumed": self.consumed, "warm": self._warm, "scheduler": inner}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self.taken, self.consumed, self._warm = (state_dict[name] for name in ("taken", "consumed", "warm"))
        self.scheduler.load_state_dict(state_dict["scheduler"])


class LayerTokenLR(LambdaLR):
    """The LayerToken rate of random-LTD (Yao et al. 2022, section 3.3): a warm-up and a linear decay to 0 by consumed layer tokens.

    A token that a layer works on is one layer token. With c of them consumed before a step, w of the warm-up and T in all, the groups'
    rates are multiplied by c / w ("linear") or log(1 + c) / log(w) ("log") while c < w, and by (T - c) / (T - w) after.

    Args:
        optimizer: whose groups' rates are those after the warm-up.
        layer_tokens: layer tokens of a step, counted from 0, over all ranks; pure. ``zeropp.efficiency.token_drop.layer_tokens`` counts them.
        total: layer tokens of the whole run.
        warmup: layer tokens of the warm-up.
        warmup_type: "linear" or "log".

    Raises:
        zeropp.ConfigError: a number that is not allowed.
    """

    def __init__(
        self,
        optimizer: Any,
        layer_tokens: Callable[[int], int],
        *,
        total: int,
        warmup: int = 0,
        warmup_type: str = "linear",
    ) -> None:
        whole("LayerTokenLR.total", total, 1, "layer tokens of the whole run")
        whole("LayerTokenLR.warmup", warmup, 0, "layer tokens")
        if warmup >= total:
            raise wrong("LayerTokenLR.warmup", warmup, f"fewer than total, which is {total}")
        if warmup_type not in ("linear", "log"):
            raise wrong("LayerTokenLR.warmup_type", warmup_type, "'linear' or 'log'")
        if warmup_type == "log" and warmup == 1:
            raise wrong("LayerTokenLR.warmup", warmup, "0, or 2 and more, because log(1) is 0")
        self._layer_tokens, self._counted = layer_tokens, (0, 0)
        self._shape = (total, warmup, warmup_type)
        super().__init__(optimizer, self._factor)

    def _factor(self, step: int) -> float:
        total, warmup, kind = self._shape
        consumed = self.consumed(step)
        if consumed < warmup:
            return consumed / warmup if kind == "linear" else math.log1p(consumed) / math.log(warmup)
        return max(0.0, (total - consumed) / (total - warmup))

    def consumed(self, step: int) -> int:
        """Return the layer tokens of all steps before ``step``."""
        at, found = self._counted if self._counted[0] <= step else (0, 0)
        found += sum(self._layer_tokens(one) for one in range(at, step))
        self._counted = (step, found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state; the function is the caller's."""
        return {
            key: value
            for key, value in super().state_dict().items()
            if key not in ("_layer_tokens", "_counted", "lr_lambdas")
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self.__dict__.update({**state_dict, "_shape": tuple(state_dict["_shape"])})
