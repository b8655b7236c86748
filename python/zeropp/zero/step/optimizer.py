# SPDX-License-Identifier: Apache-2.0
"""A torch optimizer, adopted in place: the same object, whose step updates this rank's shards.

AdamW, Adam, Lion, Adagrad and SGD run fused kernels in C, wherever their shards lie (updates.py); the last three, with states in
fewer bits, our operators (low_step.py). Other element-wise optimizers, and float64, run torch's own code on the shards, one
1-D tensor a parameter piece. LAMB, Muon and the one-bit optimizers have parts of their own (lamb.py, muon.py, onebit_adam.py).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import optim

from zeropp import compat
from zeropp.compat import Named
from zeropp.errors import ConfigError, Error
from zeropp.optim import LAMB, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam
from zeropp.wording import counted
from zeropp.zero.engine import Engine, Unit
from zeropp.zero.model.parameter import Ref
from zeropp.zero.model.strays import raise_strays
from zeropp.zero.model.units import UnitPlan
from zeropp.zero.offload.offload_states import require_here
from zeropp.zero.offload.optim_tier import TieredStates
from zeropp.zero.step import custom, lamb, low_states, low_step, muon, onebit_adam, updates
from zeropp.zero.step.custom import ADAMS as _ADAMS
from zeropp.zero.step.custom import kind_of
from zeropp.zero.step.delayed import Delayed
from zeropp.zero.step.onebit import OneBit
from zeropp.zero.step.scaler import require_finite
from zeropp.zero.step.step_in_backward import StepInBackward
from zeropp.zero.unfreeze import add_group

_ONEBIT: dict[type, type[OneBit]] = {
    LAMB: lamb.Lamb, OneBitAdam: onebit_adam.OneBitAdam, ZeroOneAdam: onebit_adam.ZeroOneAdam, OneBitLamb: lamb.OneBitLamb,
    Muon: muon.Muon, optim.Muon: muon.Muon,
}  # fmt: skip


class ZeroOptimizer(optim.Optimizer):
    """What every adopted optimizer can do besides its own class. Never constructed: :func:`adopt` swaps classes."""

    _engine: Engine

    def step(self, closure: Any = None) -> Any:
        """One update from the gradients of the last backward(s). Between accumulation boundaries it does nothing.

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
        if engine.backward_step is not None:
            self._step_shards()
            engine.backward_step.check_rates(self)
        elif engine.scaler.admits(*engine.measure()):
            self._step_shards()
            engine.scaler.taken()
        else:
            engine.flush()
        engine.core.reset_uses()
        engine.stepped_at = engine.core.backwards
        return loss

    def flush(self) -> None:
        """Collective: with ``Offload(delayed_update=)``, the update under way ends, and the model has it. Nothing to do without.

        For an evaluation of the newest weights, and after the last step. Saving, loading and whole state dicts do it themselves.

        Raises:
            zeropp.TierError: the update failed on some rank; zeropp.load goes on from the last checkpoint.
        """
        self._engine.flush()

    def _step_shards(self) -> None:
        """Collective. Where storage can fail in the middle, all ranks hear of it before any goes on."""
        engine = self._engine
        failure: BaseException | None = None
        if engine.delayed is not None:
            engine.delayed.step_begin()
        else:
            engine.core.step_begin(0)
        try:
            self._update()
        except BaseException as error:
            failure = error
        finally:
            engine.core.step_end()
        try:
            engine.storage.agree(failure)
        finally:
            failure = None  # or this frame and the error would keep each other, and the model

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        """``loss.backward()``, scaled where the precision is fp16: the one way to say it for every precision.

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
        yield engine.scaler.scaled(loss)
        engine.scaler.backwards += engine.core.backwards - before

    @property
    def loss_scale(self) -> float:
        """What :meth:`backward` multiplies the loss with; 1 where the precision is not fp16."""
        return self._engine.scaler.scale

    @property
    def overflow(self) -> list[str]:
        """fp16: the parameters, each with its rank, for which the last step was skipped; empty if it was taken."""
        return list(self._engine.scaler.overflow)

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
        bound = float(clip_value) / self._grad_scale()
        for gradient in self._held_gradients(changes=True):
            gradient.clamp_(-bound, bound)
        if engine.clip_scale == 1.0:
            engine.norm = None  # it is another one now

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. Between accumulation boundaries it does nothing."""
        engine = self._engine
        if engine.accumulate > 1 and not engine.core.at_boundary and engine.core.backwards > engine.stepped_at:
            return
        if engine.backward_step is not None:
            engine.backward_step.require_ended("optimizer.zero_grad")
        engine.clear_gradients()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Scale all gradients so that their global norm is at most ``max_norm``. Collective.

        Args:
            max_norm: bound; ``float("inf")`` only measures.
            norm_type: 2.0; or any number above 0, or ``float("inf")`` for the largest element, at the price of a pass in torch.
            error_if_nonfinite: raise here; otherwise :meth:`step` will.

        Returns:
            The norm before clipping, over all parameters and ranks.
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
        if error_if_nonfinite:
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

    def _clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        norm, _ = self._engine.measure()
        if norm_type != 2.0:
            norm = self._other_norm(norm_type)
        # The same arithmetic as torch.nn.utils.clip_grad_norm_: never scales up.
        self._engine.clip_scale = min(1.0, float(max_norm) / (norm + 1e-6)) if norm == norm else 1.0
        return norm

    def _held_gradients(self, changes: bool = False) -> Iterator[torch.Tensor]:
        """What this rank holds of the reduced gradients, as they are stored. ``changes``: the caller writes to them."""
        engine = self._engine
        for unit in engine.units:
            if engine.local_grads:
                with torch._C.DisableTorchFunctionSubclass():
                    yield from (e.param.grad for e in unit.params if e.param.grad is not None)
                continue
            held = engine.gradient_shard(unit)
            if held is not None:
                shard, present = held
                yield from (shard[first : first + elems] for i, first, elems in unit.pieces() if present[i])
                if changes:
                    engine.keep_gradient_shard(unit, shard)

    def _refuse_complex(self, what: str) -> None:
        """Shards hold numbers; of a complex element they may hold half."""
        entries = (entry for unit in self._engine.units if unit.trainable for entry in unit.params)
        name = next((entry.names[0] for entry in entries if entry.is_complex), None)
        if name is not None:
            raise ConfigError(
                f"{what} no meaning for complex parameters, such as '{name}'; clip_grad_norm_ with norm_type=2.0 has"
            )

    def _other_norm(self, p: float) -> float:
        """Collective: (sum |g|^p)^(1/p) over all gradients, or the largest |g|; sums in fp64, rank after rank."""
        engine = self._engine
        if engine.core.hold:
            compat.check({**custom.facts_of(self), "clip_grad_norm_.norm_type": p})
        self._refuse_complex(f"clip_grad_norm_: norm_type {p} has")
        largest = p == float("inf")
        parts = [torch.zeros((), dtype=torch.float64)]
        for gradient in self._held_gradients():
            sizes = gradient.detach().abs().double()
            parts.append(sizes.max() if largest and sizes.numel() else sizes.pow(p).sum())
        own = torch.stack(parts).max() if largest else torch.stack(parts).sum()
        every = own.reshape(1)
        if not engine.local:  # on one rank its own are all
            every = torch.empty(engine.ranks, dtype=torch.float64)
            engine.comm.all_gather(every.data_ptr(), own.data_ptr(), 8)
        total = every.max() if largest else every.sum().pow(1 / p)
        return float(total) * engine.unscale

    def _require_gradients(self) -> None:
        if self._engine.core.closed:
            raise Error(
                "optimizer.step: the model of this optimizer is gone, and its parameters with it; keep the model alive"
            )
        if self._engine.optimizer_ref is None or self._engine.optimizer_ref() is not self:
            raise Error("optimizer.step: another optimizer has taken over the model of this one; step that one")
        self._engine.storage.require_whole()
        require_here(self._engine)
        if self._engine.stage == 0:
            self._engine.check_untouched()
        self._engine.unfreezing.require_awake()
        local = self._engine.onebit if self._engine.core.hold else None
        pending = self._engine.core.grads_pending()
        if pending if local is None else not self._engine.core.at_boundary and local.has_gradients():
            raise Error("optimizer.step: the gradients of the last backward were accumulated inside no_sync and not reduced; run the last "
                        "backward of a step outside of zeropp.no_sync(model)")  # fmt: skip
        self._engine.scaler.require_scaled(self._engine.core.backwards)
        if self._engine.backward_step is not None:
            if not self._engine.backward_step.pending:
                raise Error(
                    "optimizer.step: no backward has begun this step (step_in_backward=True); call loss.backward() first, the last one outside of "
                    "zeropp.no_sync(model)"
                )
            return
        found = self._engine.core.collect_grads()
        if local is not None:
            local.refuse_leftovers()
            found = local.has_gradients()
        if self._engine.grads_tier is not None:
            self._engine.grads_tier.require_whole()
        if not found:
            raise Error("optimizer.step: no parameter has a gradient; call loss.backward() first")

    def _grad_scale(self) -> float:
        return self._engine.clip_scale * self._engine.unscale

    def _update(self) -> None:
        if self._engine.backward_step is not None:
            self._engine.backward_step.end()
        elif self._engine.onebit is not None:
            self._engine.onebit.step(self, self._grad_scale())
        elif self._engine.update is not None:
            self._update_in_c()
        elif self._engine.inner is None:
            low_step.step(self, self._engine, self._grad_scale(), self._trainable())
        else:
            self._elementwise(self._trainable())

    def _trainable(self) -> list[Unit]:
        return [unit for unit in self._engine.units if unit.trainable]

    def _states_for_backward(self) -> list[tuple[Any, ...]]:
        """What a step inside the backward needs before the first unit: states that the kernel knows, and its groups."""
        return [] if self._engine.update is None else self._rates()

    def _step_unit(self, unit: Unit) -> None:
        """The update of one unit, inside the backward."""
        if self._engine.inner is None:
            low_step.step(self, self._engine, self._grad_scale(), [unit])
        else:
            self._elementwise([unit])

    # -- in C ------------------------------------------------------------------------------------------------------------

    def _rates(self) -> list[updates.Rates]:
        """Of each group; the moments that they want are there, and bound."""
        update = self._engine.update
        assert update is not None
        rates = [update.rates(group) for group in self.param_groups]
        for unit in self._trainable():
            bits = 0
            for number in set(unit.groups) - {-1}:
                bits |= rates[number][-1]
            self._bind_moments(unit, update.names(bits))
        return rates

    def _update_in_c(self) -> None:
        rates = self._rates()
        if self._engine.delayed is not None:
            self._engine.delayed.step(rates, self._grad_scale())
        else:
            self._engine.core.adam_step(rates, self._grad_scale())

    def _bind_moments(self, unit: Unit, names: tuple[str, ...]) -> None:
        """Moments exist from the first step on, or from a checkpoint."""
        if unit.bound == names:
            return
        assert unit.steps is not None
        wanted = tuple(filter(None, names))
        if unit.tiered is not None:
            self._require_room(unit.tiered, wanted)
            unit.core.set_states_in_file(unit.tiered.slice, unit.steps.data_ptr(), unit.groups)
            unit.tiered.kinds = wanted
        elif unit.state_kind != "fp32":
            low_states.bind(unit, wanted)
        else:
            for name in wanted:
                unit.state.setdefault(name, torch.zeros(unit.shard.numel(), dtype=unit.state_dtype))
            places = [place for name in names for place in (unit.state[name].data_ptr() if name else 0, 0)]
            master = 0 if unit.master is None else unit.master.data_ptr()
            unit.core.set_states(0, master, unit.steps.data_ptr(), unit.first_param, unit.groups, *places)
        unit.bound = names

    def _require_room(self, tiered: TieredStates, wanted: tuple[str, ...]) -> None:
        """The file has had room for moments since ``prepare``, or has none."""
        for name in wanted:
            if name not in tiered.tier.kinds:
                switch = "momentum" if name == "momentum_buffer" else "amsgrad"
                raise ConfigError(
                    f"optimizer.step: {switch} was switched on after zeropp.prepare; with offload.optimizer='nvme' the file "
                    f"has no room for its states; build the optimizer with {switch}"
                )

    # -- others ------------------------------------------------------------------------------------------------------------

    def _elementwise(self, units: list[Unit]) -> None:
        inner = self._engine.inner
        assert inner is not None
        for mine, theirs in zip(self.param_groups, inner.param_groups, strict=True):
            theirs.update({k: v for k, v in mine.items() if k != "params"})
        scale = self._grad_scale()
        for unit in units:
            self._lend_gradients(unit, scale)
        inner.step()  # pieces without a gradient stay as they are
        for unit in units:
            if unit.master is not None:
                unit.shard.copy_(unit.master)
        inner.zero_grad(set_to_none=True)

    def _lend_gradients(self, unit: Unit, scale: float) -> None:
        engine = self._engine
        gradients = engine.own_gradients(unit)
        for i, _, _ in unit.pieces():
            if i not in unit.grad_pool:  # in no group
                continue
            piece, values = unit.grad_pool[i], gradients[i]
            piece.grad = None if values is None else (values.to(piece.dtype) * scale).view(piece.shape)
            if unit.steps is not None and values is not None:
                unit.steps[i] += 1

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
    known = {id(p) for plan in plans for p in plan.params}
    _refuse_foreign(len(covered - known))
    named = [(p, names[0]) for plan in plans for p, names in zip(plan.params, plan.names, strict=True)]
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


def check_differentiable(what: str, group: dict[str, Any]) -> None:
    """Raises zeropp.ConfigError for a group whose steps autograd is to follow."""
    if group.get("differentiable"):
        raise ConfigError(f"{what} differentiable=True, which zeropp does not implement; leave it out")


@contextlib.contextmanager
def scaled_for(optimizers: Iterable[Any], loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """``optimizer.scaled(loss)`` for a framework that is not told which of its optimizers will step on ``loss``.

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
    """A scheduler built before ``prepare`` left its own wrapper of the old class's step on the instance; wrap the new one alike."""
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
    """One class for each adopted class, so that ``type(optimizer)`` is stable."""
    if original not in _classes:
        step = optim.Optimizer.profile_hook_step(ZeroOptimizer.step)
        step.hooked = True  # type: ignore[attr-defined]
        namespace = {"step": step, "__doc__": original.__doc__, "_adopted": original}
        _classes[original] = type(f"Zero{original.__name__}", (ZeroOptimizer, original), namespace)
    return _classes[original]


def adopt(optimizer: optim.Optimizer, engine: Engine) -> None:
    """Make a checked ``optimizer`` update the engine's shards from now on. Schedulers built before or after keep working."""
    group_of = _group_of(optimizer)
    number = 0
    for unit in engine.units:
        if unit.trainable:
            _take_unit(engine, unit, group_of)
        unit.first_param = number
        number += len(unit.params)
    part = _ONEBIT.get(kind_of(optimizer))
    low = engine.config.state_name != "fp32"  # the table of zeropp/compat.py knows for which
    engine.update = _update_of(optimizer, engine)
    engine.inner = None if engine.update or part or low else _inner_optimizer(optimizer, engine)
    kept = updates.moments_of(optimizer) if kind_of(optimizer) in updates.UPDATES else ("exp_avg", "exp_avg_sq")
    engine.least_states = min(2, len(list(filter(None, kept))))
    engine.core.hold = False
    if engine.config.offload.delayed_update is not None and engine.delayed is None:
        engine.delayed = Delayed(engine, engine.config.offload.delayed_update)
    if engine.config.step_in_backward:
        engine.backward_step = StepInBackward(engine, in_python=engine.update is None)
    engine.onebit = None if part is None else part(optimizer, engine)
    optimizer.state.clear()
    optimizer.__class__ = _class_for(type(optimizer))
    optimizer._engine = engine  # type: ignore[attr-defined]
    engine.optimizer_ref = weakref.ref(optimizer)
    engine.unfreezing.renew()
    _restore_scheduler_wrap(optimizer)


def _update_of(optimizer: optim.Optimizer, engine: Engine) -> updates.Update | None:
    """What C steps its shards with; None: Python does. A one-bit optimizer begins with steps of Adam."""
    if kind_of(optimizer) in _ONEBIT:
        return updates.ADAMS
    stepped = (unit for unit in engine.units if not unit.stays_frozen)
    plain = engine.config.state_name == "fp32" and all(unit.dtype != torch.float64 for unit in stepped)
    return updates.UPDATES.get(kind_of(optimizer)) if plain or kind_of(optimizer) in _ADAMS else None


def _group_of(optimizer: optim.Optimizer) -> dict[int, int]:
    return {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _take_unit(engine: Engine, unit: Unit, group_of: dict[int, int]) -> None:
    """A unit that is trained; those of its parameters that are frozen may be in no group, which is -1."""
    unit.make_master()
    unit.groups = [group_of.get(id(e.param), -1) for e in unit.params]
    unit.steps = torch.zeros(len(unit.params), dtype=torch.int64)
    unit.state_kind = engine.config.state_name


def adopt_unit(optimizer: optim.Optimizer, engine: Engine, unit: Unit) -> None:
    """A unit that was woken: what :func:`adopt` does for those that are trained from the beginning."""
    _take_unit(engine, unit, _group_of(optimizer))
    _lend_pieces(engine, unit)
    _renew_part(optimizer, engine)


def join_group(optimizer: optim.Optimizer, engine: Engine, refs: list[Ref]) -> None:
    """The last group is new, and has these parameters. Of units that sleep nothing is known until they are woken."""
    number = len(optimizer.param_groups) - 1
    if engine.inner is not None:
        rates = {k: v for k, v in optimizer.param_groups[number].items() if k != "params"}
        engine.inner.add_param_group({**rates, "params": [torch.zeros(0)]})
    awake = [ref for ref in refs if ref.unit.trainable]
    for ref in awake:
        ref.unit.groups[ref.index] = number
        ref.unit.bound = ()  # the kernel has a copy of the numbers
    for unit in {id(ref.unit): ref.unit for ref in awake}.values():
        _lend_pieces(engine, unit)
    _renew_part(optimizer, engine)


def _lend_pieces(engine: Engine, unit: Unit) -> None:
    """Those that torch's own optimizer has not yet, and that are in a group."""
    if engine.inner is None:
        return
    for i, first, elems in unit.pieces():
        if i not in unit.grad_pool and unit.groups[i] >= 0:
            unit.grad_pool[i] = _piece(engine.inner, engine, unit, i, unit.own[first : first + elems].detach())
            engine.inner.param_groups[unit.groups[i]]["params"].append(unit.grad_pool[i])
            engine.begin_inner_state(unit.grad_pool[i])


def _renew_part(optimizer: optim.Optimizer, engine: Engine) -> None:
    """LAMB's and Muon's knows its units; its states are theirs, and it counts in the first group."""
    if engine.onebit is not None:
        progress = engine.onebit.progress
        engine.onebit = type(engine.onebit)(optimizer, engine)
        optimizer.param_groups[0]["progress"] = progress


def _inner_optimizer(optimizer: optim.Optimizer, engine: Engine) -> optim.Optimizer:
    """torch's optimizer over this rank's pieces, in the same groups."""
    pieces: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
    for unit in engine.units:
        if unit.trainable:
            for i, first, elems in unit.pieces():
                if unit.groups[i] >= 0:
                    unit.grad_pool[i] = _piece(optimizer, engine, unit, i, unit.own[first : first + elems].detach())
                    pieces[unit.groups[i]].append(unit.grad_pool[i])
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": mine or [torch.zeros(0)]}
        for group, mine in zip(optimizer.param_groups, pieces, strict=True)
    ]
    if not custom.is_known(optimizer):
        return custom.over_pieces(optimizer, groups)
    return kind_of(optimizer)(groups, **_constructor_defaults(optimizer))  # type: ignore[no-any-return]


def _piece(optimizer: optim.Optimizer, engine: Engine, unit: Unit, index: int, flat: torch.Tensor) -> torch.Tensor:
    return flat if custom.is_known(optimizer) else custom.piece_of(engine, unit.params[index], flat)


def _constructor_defaults(optimizer: optim.Optimizer) -> dict[str, Any]:
    import inspect

    accepted = inspect.signature(kind_of(optimizer)).parameters
    return {k: v for k, v in optimizer.defaults.items() if k in accepted and k not in ("foreach", "fused")}
