# SPDX-License-Identifier: Apache-2.0
"""The delayed parameter update: ``Config(offload=Offload(optimizer=..., delayed_update=N))`` (ZeRO-Offload, arXiv:2101.06840,
section 5.2). docs/design/0023.

After N exact steps, the update with the gradients of one pass runs in a thread of its own while the next pass computes, so a
pass computes with the weights of the step before last. ``optimizer.step()`` gives the model what the thread made, and begins the
next update; whatever keeps or shows all of the training flushes first. Parameters and gradients that live in files have a second
place there (csrc/zero/offload/unit_file.h, grad_file.c).
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from zeropp.zero.engine import Engine, StepSchedule
from zeropp.zero.formulas import delayed_bytes, sizes_of
from zeropp.zero.model_state import Bytes, ModelState, Unit
from zeropp.zero.offload.storage import FileStore

Groups = list[tuple[Any, ...]]


class Delayed(StepSchedule):
    """The update of one engine that may be under way. Its methods are collective, but for :meth:`finish`.

    Args:
        exact_steps: steps of the optimizer that are waited for, before the first that is not.
    """

    def __init__(self, engine: Engine, exact_steps: int) -> None:
        self._engine = weakref.ref(engine)
        self._core = engine.core
        self.exact_steps = exact_steps
        self._back_buffers = {unit.index: _back_buffer(unit) for unit in engine.units if unit.trainable}
        for unit in engine.units:
            if unit.trainable:
                unit.core.set_back_buffer(self._back_buffers[unit.index].data_ptr())
        self._end = weakref.finalize(self, _end, engine.core, os.getpid())  # before the tier's, which was made earlier
        tiers = [part for part in (engine.states, engine.params, engine.grads) if isinstance(part, FileStore)]
        for tier in tiers:
            tier.traffic.stepped_beside(engine.core.delayed_figures if tier is tiers[0] else None)
        self._well = True  # True if the update ended well on every rank, when they last exchanged it

    @property
    def pending(self) -> bool:
        """True if the optimizer holds weights not yet published to the model. Equal on all ranks."""
        return bool(self._core.delayed_pending())

    def begin(self, engine: Engine) -> None:
        """Collective: no rank reads parameters any more, the update is over, and each rank knows whether it failed on one of them."""
        self._meet(False)

    def _meet(self, failed: bool) -> None:
        self._core.delayed_finish()
        self._well = not any(self._core.step_begin(int(failed or self._core.delayed_failed())))

    def _show(self) -> bool:
        """Publish the new values to the model; on no rank if the update failed on one. Raise its error where that is
        this rank."""
        self._core.delayed_wait()
        if self._well:
            self._core.delayed_publish()
        else:
            self._core.delayed_drop()
        return self._well

    def run(self, optimizer: Any) -> None:
        """Give the model what the last update made, and begin the next one, which takes the gradients."""
        engine: Engine = optimizer._engine
        groups, scale = engine.strategy.groups(optimizer), engine.grad_scale
        if not self._show():
            return  # the rank where it failed says it to all
        taken = max((int(u.steps.max()) for u in engine.units if u.steps is not None and u.steps.numel()), default=0)
        exact = taken < self.exact_steps
        if exact and engine.storage.can_fail:
            self._begin_exact(groups, scale)
        else:
            self._core.delayed_begin(groups, scale, exact)
        if exact and not self._show():
            return
        engine.clear_gradients()

    def _begin_exact(self, groups: Groups, scale: float) -> None:
        """Begin an exact update and wait for its end. Where files can fail, the ranks meet again before any publishes
        its values."""
        failure = None
        try:
            self._core.delayed_begin(groups, scale, True)
        except BaseException as error:  # raised when the others have heard of it
            failure = error
        self._meet(failure is not None)
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None

    def finish(self) -> None:
        """Wait, on this rank alone, for the update under way, so that the optimizer's states may be read; the model has the old values.

        What went wrong in it is raised by the next step, on every rank.
        """
        self._core.delayed_finish()

    def flush(self) -> None:
        """Let the model have all that the optimizer has.

        Raises:
            zeropp.TierError: the update failed on some rank; weights and states are inconsistent, as after a step that fails.
        """
        engine = self._engine()
        if engine is None or not self.pending:
            return
        failure = None
        if engine.storage.is_inconsistent:
            self.drop(states=True)  # a rank that failed has none; only a load goes on
            return
        self.begin(engine)
        try:
            self._show()
        except BaseException as error:
            failure = error
        finally:
            self._core.step_end()
        try:
            engine.storage.raise_on_all(failure)
        finally:
            failure = None

    def drop(self, states: bool) -> None:
        """Forget the update that is under way, where a load replaces all that it wrote."""
        if states:
            self._core.delayed_drop()

    def figures(self) -> dict[str, int]:
        """Return ``steps`` begun, ``step_ns`` that they ran, ``waited_ns`` that :meth:`step` and :meth:`flush` waited for them,
        ``held_bytes`` in memory: back buffers of values and of gradients."""
        seen: dict[str, int] = self._core.delayed_figures()
        held_bytes = sum(values.nbytes for values in self._back_buffers.values())
        return {**seen, "held_bytes": held_bytes + seen.pop("back_bytes")}

    def planned_bytes(self, engine: ModelState, paper: dict[str, int]) -> Bytes:
        exact = sizes_of(engine, padded=False)
        alone = engine.ranks == 1 and not engine.offloads
        held, in_files = delayed_bytes(exact, engine.params.fraction, engine.grads.fraction, alone=alone)
        found: Bytes = {("cpu", "delayed"): held}
        if any(in_files.values()):
            found["nvme", "delayed"] = round(sum(in_files.values()))
        return found

    def held_bytes(self, engine: ModelState) -> Bytes:
        in_files = engine.params.second_bytes(engine) + engine.grads.second_bytes(engine)
        return {
            ("cpu", "delayed"): self.figures()["held_bytes"],
            **({("nvme", "delayed"): in_files} if in_files else {}),
        }

    def close(self) -> None:
        """End the update under way, whose values are dropped: the model is gone."""
        self._end()


def _back_buffer(unit: Unit) -> torch.Tensor:
    """Return memory for new values of the resident part of a shard. fp32: the optimizer's own copy, which without the delay is the
    shard itself."""
    if not unit.in_file and unit.dtype == torch.float32:
        if unit.master is None:
            unit.master = unit.shard.clone()
        return unit.master
    return torch.empty(
        unit.params_in.resident_elems(unit), dtype=unit.dtype, device="cpu"
    )  # the file has another place for the rest


def _end(core: Any, owner: int) -> None:
    if os.getpid() == owner:  # the thread stayed in the parent of a forked child
        core.delayed_end()
