# SPDX-License-Identifier: Apache-2.0
"""A torch optimizer, adopted in place: the same object, whose step updates this rank's shards.

AdamW, Adam, Lion, Adagrad and SGD run fused kernels in C, wherever their shards lie (updates.py); the last three, with states in
fewer bits, our operators. Other element-wise optimizers, and float64, run torch's own code on the shards, one
1-D tensor a parameter piece. LAMB, Muon and the one-bit optimizers have parts of their own (lamb.py, muon.py, onebit_adam.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import optim

from zeropp import compat
from zeropp.comm.collective import all_gather
from zeropp.compat import Named
from zeropp.errors import ConfigError, Error, counted
from zeropp.optim import LAMB, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam
from zeropp.zero.engine import Engine, StepStrategy
from zeropp.zero.model.parameter import local_of, raise_strays
from zeropp.zero.model.part import shown
from zeropp.zero.model.units import UnitPlan
from zeropp.zero.step import ahead, custom, lamb, muon, onebit_adam, updates
from zeropp.zero.step.custom import ADAMS as _ADAMS
from zeropp.zero.step.custom import kind_of
from zeropp.zero.step.delayed import Delayed
from zeropp.zero.step.onebit import CollectiveStep
from zeropp.zero.step.scaler import require_finite
from zeropp.zero.step.step_in_backward import StepInBackward
from zeropp.zero.step.torch_step import TorchStep
from zeropp.zero.unfreeze import add_group, check_differentiable, group_of_params, take_unit

_COLLECTIVE: dict[type, type[CollectiveStep]] = {
    LAMB: lamb.Lamb, OneBitAdam: onebit_adam.OneBitAdam, ZeroOneAdam: onebit_adam.ZeroOneAdam, OneBitLamb: lamb.OneBitLamb,
    Muon: muon.Muon, optim.Muon: muon.Muon,
}  # fmt: skip


class ZeroOptimizer(optim.Optimizer):
    """Methods of every adopted optimizer besides those of its own class. Never constructed: :func:`adopt` swaps classes."""

    _engine: Engine

    def step(self, closure: Any = None) -> Any:
        """Update once from the gradients of the last backward(s); between accumulation boundaries do nothing.

        Raises:
            zeropp.Error: no gradient, gradients held back by ``no_sync``, or values that are not finite (parameter and rank are
                named); weights and optimizer state are as before in each case.
        """
        raise_strays()
        engine = self._engine
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if engine.accumulate > 1 and not engine.core.at_boundary:
            return loss
        self._require_gradients()
        if engine.config.clip is not None:
            self._clip(engine.config.clip)
        taken = engine.schedule.admits(engine)
        if taken:
            self._step_shards()
            engine.schedule.taken(engine)
            engine.schedule.ended(self)
        else:
            engine.flush()
        engine.core.reset_uses()
        engine.stepped_at = engine.core.backwards
        engine.clock.tick(taken)
        return loss

    def flush(self) -> None:
        """End what earlier steps left under way. Collective.

        With ``Offload(delayed_update=)`` the update under way ends, and the model has it. Where a GPU holds and steps the shards, wait for
        its steps, and learn whether one was skipped. There is nothing to do otherwise. Call it before an evaluation of the newest
        weights, and after the last step. Saving, loading and whole state dicts do it themselves.

        Raises:
            zeropp.Error: the gradients of an earlier step on a GPU were not finite; the step changed nothing.
            zeropp.TierError: the update failed on some rank; zeropp.load goes on from the last checkpoint.
        """
        self._engine.flush()

    def _step_shards(self) -> None:
        """Step; collective. Where storage can fail in the middle, all ranks learn it before any goes on."""
        engine = self._engine
        failure: BaseException | None = None
        engine.schedule.begin(engine)
        try:
            engine.schedule.run(self)
        except BaseException as error:
            failure = error
        finally:
            engine.core.step_end(engine.steps_by_gradients)
        try:
            engine.storage.raise_on_all(failure)
        finally:
            failure = None  # or this frame and the error would keep each other, and the model

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        """Call ``loss.backward()``, scaled where the precision is fp16: the one way to say it for every precision.

        Args:
            keywords: as ``torch.Tensor.backward`` takes them (``retain_graph``, ``create_graph``, ``inputs``).
        """
        if self._engine.scaler.enabled and keywords.get("gradient") is not None:
            raise Error("optimizer.backward: gradient= with fp16; multiply the loss with it, and take the sum")
        with self.scaled(loss) as scaled:
            scaled.backward(**keywords)

    @contextlib.contextmanager
    def scaled(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """:meth:`backward` for a framework that calls ``loss.backward()`` itself, inside: ``with optimizer.scaled(loss) as loss``."""
        engine = self._engine
        before = engine.core.backwards
        yield engine.schedule.scaled(engine, loss)
        engine.scaler.backwards += engine.core.backwards - before

    @property
    def loss_scale(self) -> float:
        """Return the factor by which :meth:`backward` multiplies the loss; 1 where the precision is not fp16. Waits for the last step."""
        return self._engine.schedule.loss_scale(self._engine)

    @property
    def overflow(self) -> list[str]:
        """fp16: the parameters, each with its rank, for which the last step was skipped; empty if it was taken. Waits for that step."""
        return self._engine.schedule.overflow(self._engine)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of the gradients to [-clip_value, clip_value]. Collective.

        What :meth:`clip_grad_norm_` scaled before counts as scaled; called before it, it measures what is left. A gradient
        that is not finite is left alone: :meth:`step` raises, or with fp16 skips the step.
        """
        engine = self._engine
        self._refuse_norm("clip_grad_value_()")
        if isinstance(clip_value, bool) or not 0 < float(clip_value) < float("inf"):
            raise ConfigError(
                f"clip_grad_value_: clip_value {clip_value!r} is not allowed; wanted a finite number above 0"
            )
        self._refuse_complex("clip_grad_value_ clamps elements, and has")
        if engine.accumulate > 1 and not engine.core.at_boundary:
            return
        self._require_gradients()
        if engine.measure()[1]:
            return
        bound = float(clip_value) / engine.grad_scale
        for gradient in self._held_gradients(changes=True):
            gradient.clamp_(-bound, bound)
        if engine.clip_scale == 1.0:
            engine.norm = None  # it is another one now

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. Between accumulation boundaries it does nothing."""
        engine = self._engine
        if engine.accumulate > 1 and not engine.core.at_boundary and engine.core.backwards > engine.stepped_at:
            return
        engine.schedule.require_ended("optimizer.zero_grad")
        engine.clear_gradients()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> float | torch.Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``. Collective.

        Args:
            max_norm: bound; ``float("inf")`` only measures.
            norm_type: 2.0; or any number above 0, or ``float("inf")`` for the largest element, at the price of a pass in torch.
            error_if_nonfinite: raise here; otherwise :meth:`step` will.

        Returns:
            The norm before clipping, over all parameters and ranks: a float; where a GPU holds and steps the shards, a tensor of that
            GPU, of shape ``()`` in fp32 (float64 where a trained parameter is), which ``float()`` waits for.
        """
        self._refuse_norm("clip_grad_norm_()")
        if self._engine.accumulate > 1 and not self._engine.core.at_boundary:
            return 0.0
        if isinstance(norm_type, bool) or not float(norm_type) > 0:
            raise ConfigError(
                f"clip_grad_norm_: norm_type {norm_type!r} is not allowed; wanted a number above 0, or float('inf')"
            )
        self._require_gradients()
        norm = self._clip(max_norm, float(norm_type))
        if error_if_nonfinite and not math.isfinite(float(norm)):
            require_finite(*self._engine.measure())
        return norm

    def _refuse_norm(self, call: str) -> None:
        config = self._engine.config
        if config.step_in_backward or config.clip is not None:
            compat.check(
                {
                    call: Named(True, call),
                    "Config.step_in_backward": config.step_in_backward,
                    "Config.clip": config.clip,
                }
            )

    def _clip(self, max_norm: float, norm_type: float = 2.0) -> float | torch.Tensor:
        schedule = self._engine.schedule
        norm = schedule.norm(self._engine)
        if norm_type != 2.0:
            norm = self._other_norm(norm_type)
        schedule.clip(self._engine, max_norm, norm)
        return norm

    def _held_gradients(self, changes: bool = False, counted: bool = False) -> Iterator[torch.Tensor]:
        """Yield this rank's reduced gradients, as they are stored. ``changes``: the caller writes to them. ``counted``: without those
        that another rank of a tensor-parallel mesh has as well, and counts."""
        engine = self._engine
        for unit in engine.units:
            if counted and unit.is_copy:
                continue
            if engine.local_grads:
                with torch._C.DisableTorchFunctionSubclass():
                    yield from (local_of(e.param.grad) for e in unit.params if e.param.grad is not None)
                continue
            held = engine.gradient_shard(unit)
            if held is not None:
                shard, present = held
                yield from (shard[first : first + elems] for i, first, elems in unit.pieces() if present[i])
                if changes:
                    engine.grads.write(unit, shard)

    def _refuse_complex(self, what: str) -> None:
        """Shards hold numbers; of a complex element they may hold half."""
        entries = (entry for unit in self._engine.units if unit.trainable for entry in unit.params)
        name = next((entry.names[0] for entry in entries if entry.is_complex), None)
        if name is not None:
            raise ConfigError(
                f"{what} no meaning for complex parameters, such as '{name}'; clip_grad_norm_ with norm_type=2.0 has"
            )

    def _check_norm_type(self, p: float) -> None:
        """Raise zeropp.ConfigError where the gradients of this engine have no norm but the Euclidean one."""
        engine = self._engine
        if engine.core.hold:
            compat.check({**custom.facts_of(self), "clip_grad_norm_.norm_type": p})
        self._refuse_complex(f"clip_grad_norm_: norm_type {p} has")
        if engine.local and any(unit.ranks < engine.ranks for unit in engine.units):
            raise ConfigError(
                f"clip_grad_norm_: norm_type {p} at stage 0, where each rank has whole gradients of its own experts, is not supported; use "
                "norm_type 2.0, or stage 1, 2 or 3"
            )

    def _other_norm(self, p: float) -> float:
        """Collective: (sum |g|^p)^(1/p) over all gradients, or the largest |g|; sums in fp64, rank after rank."""
        engine = self._engine
        self._check_norm_type(p)
        largest = p == float("inf")
        parts = [torch.zeros((), dtype=torch.float64, device=engine.shard_device)]
        for gradient in self._held_gradients(counted=True):
            sizes = gradient.detach().abs().double()
            parts.append(sizes.max() if largest and sizes.numel() else sizes.pow(p).sum())
        own = (torch.stack(parts).max() if largest else torch.stack(parts).sum()).cpu()
        every = own.reshape(1)
        if not engine.local:  # on one rank its own are all
            every = torch.empty(engine.ranks, dtype=torch.float64, device="cpu")
            all_gather(engine.comm, every, own)
        if engine.job is not None:  # the first data rank speaks for all of them
            own = every.max() if largest else every.sum() * (engine.rank == 0)
            every = torch.empty(engine.job.ranks, dtype=torch.float64, device="cpu")
            all_gather(engine.job, every, own)
        total = every.max() if largest else every.sum().pow(1 / p)
        return float(total) * engine.unscale

    def _require_gradients(self) -> None:
        engine = self._engine
        if engine.core.closed:
            raise Error(
                "optimizer.step: the model of this optimizer is gone, and its parameters with it; keep the model alive"
            )
        if engine.optimizer_ref is None or engine.optimizer_ref() is not self:
            raise Error("optimizer.step: another optimizer has taken over the model of this one; step that one")
        engine.storage.require_whole()
        engine.states.require_loaded()
        if engine.stage == 0:
            engine.check_untouched()
        engine.unfreezing.require_unfrozen()
        if engine.strategy.gradients_pending(engine):
            raise Error(
                "optimizer.step: the gradients of the last backward were accumulated inside no_sync and not reduced; run the last "
                "backward of a step outside of zeropp.no_sync(model)"
            )
        engine.scaler.require_scaled(engine.core.backwards)
        engine.schedule.require_gradients(engine)

    # -- refusals ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        raise Error("optimizer.state_dict: the state is split over ranks; zeropp.save(path, model, optimizer) keeps it")

    def load_state_dict(self, state_dict: Any) -> None:
        raise Error(
            "optimizer.load_state_dict: the state is split over ranks; zeropp.load(path, model, optimizer) restores it"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters of the model that were frozen when ``prepare`` saw them, and that this optimizer lacks (gradual unfreezing).

        Before or after ``requires_grad_(True)``, and before the next :meth:`step`; the same on every rank.

        Raises:
            zeropp.ConfigError: not the model's parameters, or a configuration in which they stay frozen; the optimizer is as before.
        """
        add_group(self, self._engine, param_group)


def _took_steps(state: dict[str, Any]) -> bool:
    """Adagrad makes its state when it is built, with step 0; the others make theirs in the first step."""
    return bool(state) and float(state.get("step", 1)) > 0


def check_optimizer(optimizer: optim.Optimizer, plans: list[UnitPlan]) -> None:
    """Refuse what :func:`adopt` cannot work with, before the model is touched."""
    if isinstance(optimizer, ZeroOptimizer):
        raise ConfigError("the optimizer was prepared already; make a new one for a new model")
    if any(_took_steps(state) for state in optimizer.state.values()):
        raise ConfigError(
            "the optimizer has state already; call zeropp.prepare before the first step, and zeropp.load to go on"
        )
    _check_parameters(optimizer, plans)
    for group in optimizer.param_groups:
        check_differentiable("the optimizer was built with", group)


def _check_parameters(optimizer: optim.Optimizer, plans: list[UnitPlan]) -> None:
    """Refuse an optimizer that has parameters of another model, or lacks some of this one."""
    covered = {id(p) for group in optimizer.param_groups for p in group["params"]}
    known = {id(shown(p)) for plan in plans for p in plan.params}
    _refuse_foreign(len(covered - known))
    named = [(shown(p), names[0]) for plan in plans for p, names in zip(plan.params, plan.names, strict=True)]
    _refuse_missing([name for p, name in named if p.requires_grad and id(p) not in covered])


def _refuse_foreign(count: int) -> None:
    if count:
        which = "that is" if count == 1 else "that are"
        raise ConfigError(
            f"the optimizer has {counted(count, 'parameter')} {which} not the model's; build it from model.parameters(), less those "
            "that Config(ignored=) leaves alone"
        )


def _refuse_missing(names: list[str]) -> None:
    if names:
        them = "it" if len(names) == 1 else "them"
        which = f"'{names[0]}'" if len(names) == 1 else f"first '{names[0]}'"
        raise ConfigError(
            f"the optimizer lacks {counted(len(names), 'trainable parameter')}, {which}; add {them}, or freeze {them} with "
            "requires_grad_(False) before zeropp.prepare"
        )


@contextlib.contextmanager
def scaled_for(optimizers: Iterable[Any], loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``optimizer.scaled(loss)`` for a framework that is not told which of its optimizers will step on ``loss``.

    Raises:
        zeropp.Error: several fp16 models were run forward since their last backward.
    """
    scaling = [one for one in optimizers if one._engine.scaler.enabled]
    if len(scaling) > 1:
        scaling = [one for one in scaling if one._engine.builds_loss]
        if len(scaling) != 1:
            raise Error(
                f"backward: {len(scaling)} fp16 models wait for a backward, each with a loss scale of its own; call "
                "optimizer.backward(loss) of the one that this loss is for"
            )
    with scaling[0].scaled(loss) if scaling else contextlib.nullcontext(loss) as scaled:
        yield scaled


def _restore_scheduler_wrap(optimizer: optim.Optimizer) -> None:
    """Wrap the new step as a scheduler that was built before ``prepare`` wrapped the old class's, on the instance."""
    old = optimizer.__dict__.pop("step", None)
    if old is None or not hasattr(old, "_wrapped_by_lr_sched"):
        return
    step = optimizer.step

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = wrapper  # type: ignore[method-assign]


_classes: dict[type, type] = {}


def _class_for(original: type) -> type:
    """Return one class for each adopted class, so that ``type(optimizer)`` is stable."""
    if original not in _classes:
        step = optim.Optimizer.profile_hook_step(ZeroOptimizer.step)
        step.hooked = True  # type: ignore[attr-defined]
        namespace = {"step": step, "__doc__": original.__doc__, "_adopted": original}
        _classes[original] = type(f"Zero{original.__name__}", (ZeroOptimizer, original), namespace)
    return _classes[original]


def adopt(optimizer: optim.Optimizer, engine: Engine) -> None:
    """Make a checked ``optimizer`` update the engine's shards from now on. Schedulers built before or after keep working."""
    group_of = group_of_params(optimizer)
    number = 0
    for unit in engine.units:
        if unit.trainable:
            take_unit(engine, unit, group_of)
        unit.first_param = number
        number += len(unit.params)
    engine.core.hold = False
    engine.strategy = _strategy_of(optimizer, engine)
    if engine.config.step_in_backward:
        engine.schedule = StepInBackward(engine)
    elif engine.config.offload.delayed_update is not None and not isinstance(engine.schedule, Delayed):
        engine.schedule = Delayed(engine, engine.config.offload.delayed_update)
    elif ahead.works(engine.strategy, engine):
        engine.schedule = ahead.Ahead(engine)
    optimizer.state.clear()
    optimizer.__class__ = _class_for(type(optimizer))
    optimizer._engine = engine  # type: ignore[attr-defined]
    engine.clock.restore(0)
    engine.optimizer_ref = weakref.ref(optimizer)
    engine.unfreezing.renew()
    _restore_scheduler_wrap(optimizer)


def _strategy_of(optimizer: optim.Optimizer, engine: Engine) -> StepStrategy:
    """Return what steps the shards: a part of its own, C, our operators, or torch's own code."""
    kind = kind_of(optimizer)
    if kind in _COLLECTIVE:
        return _COLLECTIVE[kind](optimizer, engine)
    stepped = (unit for unit in engine.units if not unit.stays_frozen)
    plain = engine.config.state_name == "fp32" and all(unit.dtype != torch.float64 for unit in stepped)
    if kind in updates.UPDATES and (plain or kind in _ADAMS):
        return updates.KernelStep(updates.UPDATES[kind], updates.least_moments(optimizer))
    if engine.config.state_name != "fp32":  # zeropp/compat.py says for which
        return updates.OperatorStep(updates.least_moments(optimizer))
    return TorchStep(optimizer, engine)
