# SPDX-License-Identifier: Apache-2.0
"""The step inside the backward: ``Config(step_in_backward=True)`` ("optimizer in backward"; LOMO, arXiv:2306.09782, frees gradients
so; ZeRO-Infinity's states then move beside the computation). docs/design/0032.

A unit is stepped as soon as its gradients are reduced (csrc/bind/py_step_in_backward.c), with the bits of a step after the backward, and
``optimizer.step()`` ends what the backward began.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from zeropp.errors import Error
from zeropp.zero.engine import Engine, StepSchedule
from zeropp.zero.step.scaler import origins


class StepInBackward(StepSchedule):
    """The step of one engine whose backwards step each unit, in C or by the engine's strategy."""

    in_backward = True

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._rates: list[dict[str, Any]] = []
        self._on_device = engine.shard_device.type != "cpu"
        self._unsettled = False
        """A GPU may not have ended all steps. Equal on all ranks."""
        engine.core.set_backward_step(self._begin, self._mark_final, None if engine.strategy.in_c else self._step)

    def _optimizer(self) -> Any:
        engine = self._engine()
        optimizer = None if engine is None or engine.optimizer_ref is None else engine.optimizer_ref()
        if optimizer is None:
            raise Error(
                "backward: Config(step_in_backward=True) steps here, and the optimizer is gone; keep it, or give the model another "
                "with zeropp.prepare(model, optimizer)"
            )
        return optimizer

    def _begin(self) -> tuple[list[Any], float]:
        """Begin a step in a backward that reduces: return (groups for the kernels, the factor of gradients)."""
        optimizer, engine = self._optimizer(), self._engine()
        assert engine is not None
        engine.storage.require_whole()
        engine.states.require_loaded()
        self._rates = _rates(optimizer)
        return engine.strategy.groups(optimizer), engine.unscale

    def _mark_final(self, index: int) -> None:
        """Autograd keeps parameters without a copy: from now on what reads one of them must not be told its old version."""
        engine = self._engine()
        assert engine is not None
        with torch._C.DisableTorchFunctionSubclass():
            for entry in engine.units[index].params:
                torch.autograd.graph.increment_version(entry.param)

    def _step(self, index: int) -> None:
        engine = self._engine()
        assert engine is not None
        engine.strategy.step(self._optimizer(), engine.grad_scale, [engine.units[index]])

    @property
    def pending(self) -> bool:
        """True if a backward has begun a step that was not ended. Equal on all ranks, once the backward is over."""
        engine = self._engine()
        return engine is not None and bool(engine.core.backward_step_pending())

    def require_ended(self, what: str) -> None:
        if self.pending:
            raise Error(
                f"{what}: between a backward and optimizer.step(), with Config(step_in_backward=True), parameters and states are half "
                "new; call optimizer.step() first"
            )

    def require_gradients(self, engine: Engine) -> None:
        if not self.pending:
            raise Error(
                "optimizer.step: no backward has begun this step (step_in_backward=True); call loss.backward() first, the last one outside of "
                "zeropp.no_sync(model)"
            )

    def admits(self, engine: Engine) -> bool:
        return True  # the backward refuses what is not finite

    def run(self, optimizer: Any) -> None:
        """Write all that the backward stepped.

        Raises:
            zeropp.Error, zeropp.TierError: a gradient was not finite, a file failed. The states are inconsistent where a unit had been stepped before.
        """
        engine = optimizer._engine
        self._unsettled = self._on_device
        self._require_finite(engine, engine.core.backward_step_end())

    def _require_finite(self, engine: Engine, bad: tuple[int, int, int, int] | None) -> None:
        """Raise zeropp.Error with the gradient that was not finite: (unit, parameter, element, ranks)."""
        if bad is None:
            return
        name = engine.units[bad[0]].params[bad[1]].name_at(bad[2], engine.rank)
        what = (
            "weights and optimizer state are inconsistent, because other units had been stepped by then; zeropp.load brings back the last checkpoint"
            if engine.core.step_state()[1]
            else "nothing was stepped on this rank"
        )
        (where,) = origins([(name, bad[3])], engine.rank_names, known=not self._on_device)
        found = "was not finite in this step or one before it" if self._on_device else "is not finite"
        raise Error(f"optimizer.step: the gradient of {where} {found}; {what}")

    def flush(self) -> None:
        """Wait for the steps that a GPU has not ended. Collective. Raise zeropp.Error, on all ranks, as :meth:`run` does."""
        engine = self._engine()
        if engine is None or not self._unsettled or self.pending:
            return
        failure: BaseException | None = None
        self._unsettled = False
        try:
            self._require_finite(engine, engine.core.backward_step_settle())
        except Error as error:
            failure = error
        try:
            engine.storage.raise_on_all(failure)
        finally:
            failure = None  # or this frame and the error would keep each other, and the model

    def drop(self, states: bool) -> None:
        """Forget all that was stepped, and what failed in it: a load replaces it."""
        engine = self._engine()
        assert engine is not None
        self._unsettled = False
        engine.core.backward_step_drop()

    def ended(self, optimizer: Any) -> None:
        """Raise zeropp.Error where ``param_groups`` are not those that the backward stepped with."""
        for number, (then, now) in enumerate(zip(self._rates, _rates(optimizer), strict=True)):
            for name in then:
                if now.get(name) != then[name]:
                    raise Error(
                        f"optimizer.step: param_groups[{number}]['{name}'] was {then[name]!r} when the backward began, which stepped with "
                        f"it (step_in_backward=True), and is {now.get(name)!r} now; change it before the backward, or after step()"
                    )


def _rates(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return all of each group but its parameters, as plain values."""
    return [
        {
            k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v
            for k, v in group.items()
            if k != "params"
        }
        for group in optimizer.param_groups
    ]
