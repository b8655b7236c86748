# SPDX-License-Identifier: Apache-2.0
"""The step inside the backward: ``Config(step_in_backward=True)`` ("optimizer in backward"; LOMO, arXiv:2306.09782, frees gradients
so; ZeRO-Infinity's states then move beside the computation). docs/design/0032.

A unit is stepped as soon as its gradients are reduced (csrc/bind/py_step_in_backward.c), with the bits of a step after the backward, and
``optimizer.step()`` ends what the backward began.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from zeropp.errors import Error
from zeropp.zero.offload.offload_states import require_here
from zeropp.zero.step import origins

if TYPE_CHECKING:
    from zeropp.zero.engine import Engine
    from zeropp.zero.step.optimizer import ZeroOptimizer


class StepInBackward:
    """What the backwards of one engine call, and what its optimizer asks.

    Args:
        in_python: the update of a unit is :meth:`ZeroOptimizer._step_unit`, and not one in C.
    """

    def __init__(self, engine: Engine, in_python: bool) -> None:
        self._engine = weakref.ref(engine)
        self._rates: list[dict[str, Any]] = []
        engine.core.set_backward_step(self._begin, self._leave, self._step if in_python else None)

    def _optimizer(self) -> ZeroOptimizer:
        engine = self._engine()
        optimizer = None if engine is None or engine.optimizer_ref is None else engine.optimizer_ref()
        if optimizer is None:
            raise Error(
                "backward: Config(step_in_backward=True) steps here, and the optimizer is gone; keep it, or give the model another "
                "with zeropp.prepare(model, optimizer)"
            )
        return optimizer  # type: ignore[return-value]

    def _begin(self) -> tuple[list[Any], float]:
        """A backward that reduces has begun: (groups of ``adam_step``, what gradients are multiplied with)."""
        optimizer, engine = self._optimizer(), self._engine()
        assert engine is not None
        engine.storage.require_whole()
        require_here(engine)
        self._rates = _rates(optimizer)
        return optimizer._states_for_backward(), engine.unscale

    def _leave(self, index: int) -> None:
        """Autograd keeps parameters without a copy: from now on what reads one of them must not be told its old version."""
        engine = self._engine()
        assert engine is not None
        with torch._C.DisableTorchFunctionSubclass():
            for entry in engine.units[index].params:
                torch.autograd.graph.increment_version(entry.param)

    def _step(self, index: int) -> None:
        engine = self._engine()
        assert engine is not None
        self._optimizer()._step_unit(engine.units[index])

    @property
    def pending(self) -> bool:
        """Has a backward begun a step that was not ended? The same on every rank, once it is over."""
        engine = self._engine()
        return engine is not None and bool(engine.core.backward_step_pending())

    def require_ended(self, what: str) -> None:
        """Raises zeropp.Error between a backward and ``optimizer.step()``."""
        if self.pending:
            raise Error(
                f"{what}: between a backward and optimizer.step(), with Config(step_in_backward=True), parameters and states are half "
                "new; call optimizer.step() first"
            )

    def end(self) -> None:
        """Inside ``optimizer.step()``: all that was stepped is written.

        Raises:
            zeropp.Error, zeropp.TierError: a gradient was not finite, a file failed. Torn, where a unit had been stepped before.
        """
        engine = self._engine()
        assert engine is not None
        bad = engine.core.backward_step_end()
        if bad is None:
            return
        name = engine.units[bad[0]].params[bad[1]].names[0]
        what = (
            "weights and optimizer state are torn, because other units had been stepped by then; zeropp.load brings back the last checkpoint"
            if engine.core.step_state()[1]
            else "nothing was stepped on this rank"
        )
        (where,) = origins.describe([(name, bad[2])], engine.ranks)
        raise Error(f"optimizer.step: the gradient of {where} is not finite; {what}")

    def drop(self) -> None:
        """A load replaces all that was stepped, and what failed in it."""
        engine = self._engine()
        assert engine is not None
        engine.core.backward_step_drop()

    def check_rates(self, optimizer: ZeroOptimizer) -> None:
        """Raises zeropp.Error where ``param_groups`` are not those that the backward stepped with."""
        for number, (then, now) in enumerate(zip(self._rates, _rates(optimizer), strict=True)):
            for name in then:
                if now.get(name) != then[name]:
                    raise Error(
                        f"optimizer.step: param_groups[{number}]['{name}'] was {then[name]!r} when the backward began, which stepped with "
                        f"it (step_in_backward=True), and is {now.get(name)!r} now; change it before the backward, or after step()"
                    )


def _rates(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group all but its parameters, as plain values."""
    return [
        {
            k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v
            for k, v in group.items()
            if k != "params"
        }
        for group in optimizer.param_groups
    ]
