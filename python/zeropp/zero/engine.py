# SPDX-License-Identifier: Apache-2.0
"""One prepared model: its record, its stores, how and when its optimizer steps, and what the façade asks of them.

``prepare`` builds it (build.py); this module knows the classes that a store or a step has, and none that one may have.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from zeropp.comm.collective import all_gather, exchange
from zeropp.comm.job import JobRanks
from zeropp.config import Config, LossScale
from zeropp.efficiency.clock import Clock
from zeropp.errors import ConfigError, Error
from zeropp.files import folder_writer
from zeropp.zero.model.arrivals import Arrivals, HookOrder
from zeropp.zero.model.dtensor import like
from zeropp.zero.model.parameter import Ref, engines, local_of, raise_strays, ref_of
from zeropp.zero.model.tied import Ties
from zeropp.zero.model_state import DTYPES, ModelState, Part, Unit, tensor_over
from zeropp.zero.offload.storage import Storage
from zeropp.zero.step.scaler import NoScaler, Scaler, origins


class StepStrategy(Part):
    """How a step of the optimizer changes the units. This class stands for a model without an optimizer."""

    in_c = False
    """True if the core in C steps a unit, so that a thread or a backward can."""

    def groups(self, optimizer: Any) -> list[tuple[Any, ...]]:
        """Return the rates of each parameter group for a step in C; the moments that they want are bound then."""
        return []

    def step(self, optimizer: Any, scale: float, units: list[Unit]) -> None:
        """Step these units, or for a strategy that cannot step them one by one all units, with gradients times ``scale``."""
        raise NotImplementedError

    def adopt_unit(self, optimizer: Any, unit: Unit) -> None:
        """Take a unit that is trained from now on, or whose parameters have come to be in a group."""

    def add_group(self, optimizer: Any, group: dict[str, Any]) -> None:
        """Take a new parameter group, the last one."""

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise zeropp.ConfigError for a new parameter group that it cannot step."""

    # -- gradients -----------------------------------------------------------------------------------------------------

    def measure(self, engine: Engine) -> tuple[float, list[str]]:
        """Collective: return (squared norm of the gradients as they are held, the parameters and ranks with values that are not finite)."""
        squares, bad, of_job = engine.core.norm()
        named = [(engine.units[unit].params[index].name_at(elem, rank), bits) for unit, index, elem, rank, bits in bad]
        who = origins(named, engine.rank_names, known=engine.shard_device.type == "cpu")
        if of_job and engine.job is not None:  # every data rank names the same
            who = list(dict.fromkeys(name for names in exchange(engine.job, who) for name in names))
        return squares, who

    def gradients_pending(self, engine: Engine) -> bool:
        """Return True if gradients were accumulated inside ``no_sync`` and not reduced. Equal on all ranks."""
        return bool(engine.core.grads_pending())

    def collect_gradients(self, engine: Engine) -> bool:
        """Collective: return True if any rank has a gradient to step with."""
        found = bool(engine.core.collect_grads())
        return found if engine.job is None else any(engine.core.agree(int(found)))

    # -- states --------------------------------------------------------------------------------------------------------

    def states(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Return the states of a unit that this strategy keeps itself, of ``shard`` length, by torch's names."""
        return {}

    def states_in_place(self, unit: Unit) -> bool:
        """Return True if each state of the unit is one tensor of numbers in memory."""
        return unit.states_in.in_place(unit)

    def load_states(self, unit: Unit, values: dict[str, torch.Tensor]) -> None:
        """Take states of ``shard`` length, in place of those that the unit has. ``unit.steps`` is loaded by then."""
        unit.states_in.load(unit, values)

    def write_state(self, unit: Unit, kind: str, index: int, first: int, values: torch.Tensor) -> None:
        """Replace a state of parameter ``index``, of which this rank has elements from ``first`` of its shard on."""
        unit.states_in.write(unit, kind, index, first, values)

    def forget_states(self, unit: Unit) -> None:
        """Make states anew where the optimizer has some before its first step."""

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the states that this strategy keeps itself, for ``zeropp.offload_states``."""
        return []

    def replace_states(self, states: Any) -> Any:
        """Put a placeholder where :meth:`state_tensors` are, or what was there; return what was there before."""
        return None

    def check_saved(self, engine: Engine) -> None:
        """Raise zeropp.CheckpointError for states that a checkpoint has no place for."""

    def private(self) -> dict[str, torch.Tensor] | None:
        """Return states of this rank alone, for a checkpoint; None: the strategy never has any."""
        return None

    def restore(self, private: dict[str, torch.Tensor] | None) -> None:
        """Take :meth:`private` after a load; None: it was saved by another number of ranks."""

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def planned_moments(self, held: int) -> int:
        """Return how many moments a parameter will have, of a unit that has so many now."""
        return max(2, held)

    def planned_extra_bytes(self) -> float:
        """Return the planned bytes of states beside master weights and moments."""
        return 0.0


class StepSchedule(Part):
    """When the optimizer steps: after the backward, when ``optimizer.step()`` is called."""

    in_backward = False
    """True if backwards step the units."""

    def begin(self, engine: Engine) -> None:
        """Collective: no rank reads parameters any more. ``step_end`` of the core ends it."""
        engine.core.step_begin(0)

    def run(self, optimizer: Any) -> None:
        """Step; between :meth:`begin` and ``step_end``."""
        engine = optimizer._engine
        engine.strategy.step(optimizer, engine.grad_scale, engine.trained)

    def require_gradients(self, engine: Engine) -> None:
        """Collective: raise zeropp.Error where there is nothing to step with."""
        found = engine.strategy.collect_gradients(engine)
        engine.grads.require_whole()
        if not found:
            raise Error("optimizer.step: no parameter has a gradient; call loss.backward() first")

    def scaled(self, engine: Engine, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call ``backward`` of."""
        return engine.scaler.scaled(loss)

    def norm(self, engine: Engine) -> float | torch.Tensor:
        """Collective: return the norm of all gradients before clipping."""
        return engine.measure()[0]

    def clip(self, engine: Engine, max_norm: float, norm: float | torch.Tensor) -> None:
        """Let the step scale gradients of this norm to at most ``max_norm``."""
        # The same arithmetic as torch.nn.utils.clip_grad_norm_: never scales up.
        engine.clip_scale = min(1.0, float(max_norm) / (float(norm) + 1e-6)) if norm == norm else 1.0

    def admits(self, engine: Engine) -> bool:
        """Collective: return True if the step is to be taken, False if it is to be skipped."""
        return engine.scaler.admits(*engine.measure())

    def taken(self, engine: Engine) -> None:
        """Note that a step was taken."""
        engine.scaler.taken()

    def loss_scale(self, engine: Engine) -> float:
        """Return the factor of the loss of the next backward."""
        return engine.scaler.scale

    def overflow(self, engine: Engine) -> list[str]:
        """Return the parameters, each with its rank, for which the last step was skipped."""
        return list(engine.scaler.overflow)

    def finish(self) -> None:
        """Wait, on this rank alone, for an update under way that writes the optimizer's states."""

    def require_ended(self, what: str) -> None:
        """Raise zeropp.Error between a backward that began a step and ``optimizer.step()``."""

    def ended(self, optimizer: Any) -> None:
        """Note that a step was taken; raise zeropp.Error if its rates are not those that it was begun with."""

    def drop(self, states: bool) -> None:
        """Forget an update under way: a load replaces what it wrote. ``states``: also those of the optimizer."""


class Engine(ModelState):
    """The state of one prepared model. Held by its parameters and its optimizer, never by itself through the model."""

    def __init__(self, config: Config, ranks: JobRanks, core: Any, host_copy: bool, device: torch.device) -> None:
        super().__init__(config, ranks, core, device)
        self.host_copy = host_copy
        self._clip_scale = 1.0
        self.max_norm: float | None = None
        """What a GPU clips to, of which the host does not know the factor yet."""
        chosen = config.loss_scale if isinstance(config.loss_scale, LossScale) else LossScale()
        self.scaler = Scaler(chosen) if config.scales_loss else NoScaler()
        self.norm: tuple[float | torch.Tensor, list[str]] | None = None
        self.norm_at = -1
        self.stepped_at = 0
        self.writes = 0
        self.clock = Clock(self.rank, self.ranks, core)
        self.optimizer_ref: weakref.ref[torch.optim.Optimizer] | None = None
        self.shows_gradients = self.stage == 0
        self.storage = Storage()
        self.strategy = StepStrategy()
        self.schedule = StepSchedule()
        self.hook_order = HookOrder()
        self.arrivals: list[Arrivals] = []  # of the units of DTensors
        self.unfreezing: Any = None  # build.py makes it; it knows the strategies
        self.ties = Ties(self, ())
        self.expert_cache = Part()  # Experts(cache=) has one that holds experts

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return all that holds bytes of this model, in the order in which it is closed."""
        return (self.schedule, self.strategy, self.states, self.params, self.grads, self.activations, self.expert_cache)

    @property
    def rank_names(self) -> list[int]:
        """Return what messages call the data ranks: their numbers in the job."""
        return [0] if self.comm is None else list(self.comm.job_ranks)

    @property
    def steps_by_gradients(self) -> bool:
        """True if steps leave out layers, and change the units that have a gradient on some rank alone. Equal on all ranks."""
        drops = self.config.efficiency is not None and self.config.efficiency.layer_drop is not None
        return drops and self.strategy.in_c and not self.core.hold and self.config.offload.delayed_update is None

    @property
    def trained(self) -> list[Unit]:
        """Return the units that are trained now."""
        return [unit for unit in self.units if unit.trainable]

    def show_gradients(self, unit: Unit) -> None:
        """Stage 0: tell the core where the gradients lie of a unit that is trainable now."""
        if self.stage == 0 and self.ranks > 1:
            gradient = tensor_over(
                self.core, unit.core.layout()["gradient"], unit.elems, unit.grad_dtype, self.shard_device
            )
            views = [e.of(gradient[e.offset_elems : e.offset_elems + e.numel]) for e in unit.params]
            unit.core.set_grad_views([like(e.param, view) for e, view in zip(unit.params, views, strict=True)])

    def bind_again(self, index: int) -> None:
        """Make the parameters of a unit views of its whole memory, whose address has changed (csrc/zero/placement/wrapped.c)."""
        unit = self.units[index]
        unit.whole = tensor_over(self.core, unit.core.layout()["whole"], unit.elems, unit.dtype, self.device)
        with torch._C.DisableTorchFunctionSubclass():
            for entry in unit.params:
                entry.param.data = entry.of(unit.whole[entry.offset_elems : entry.offset_elems + entry.numel])

    # -- passes ----------------------------------------------------------------------------------------------------------

    @property
    def builds_loss(self) -> bool:
        """True if a forward's graph waits for its backward: then a parameter read outside a module is a part of the loss."""
        return bool(self.core.builds_loss)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank; the first one after reduces them all."""
        before, self.core.sync = self.core.sync, False
        try:
            yield
        finally:
            self.core.sync = before

    # -- gradients --------------------------------------------------------------------------------------------------------

    def has_gradient(self, ref: Ref) -> bool:
        """Return True if any rank holds a reduced gradient of this parameter."""
        found = ref.unit.core.grad()
        return found is not None and bool(found[2][ref.index])

    def clear_gradient(self, ref: Ref) -> None:
        """Forget the gradient of one parameter."""
        ref.unit.core.clear_grad(ref.index)
        self.norm = None
        with torch._C.DisableTorchFunctionSubclass():
            ref.unit.params[ref.index].param.grad = None

    def clear_gradients(self) -> None:
        """Forget all gradients, as ``optimizer.zero_grad()`` does."""
        self.core.clear_grads()
        self.ties.cleared()
        self.grads.forget()
        self.clip_scale = 1.0
        self.norm = None

    def restart_step(self) -> None:
        """Let the next backward be the first of ``accumulate``, which adds to nothing: after a load."""
        self.core.restart_step()
        self.stepped_at = self.core.backwards
        self.clock.restore(self.clock.step)
        self.clear_gradients()

    def gradient_shard(self, unit: Unit) -> tuple[torch.Tensor, list[bool]] | None:
        """Return (this rank's shard of the reduced gradient, which parameters have one); None without any. Not for local gradients.

        From a file it is a copy: ``engine.grads.write`` takes it back.
        """
        found = unit.core.grad()
        if found is None:
            return None
        address, dtype, present = found
        return self.grads.read(self, unit, address, DTYPES[dtype]), [bool(b) for b in present]

    def own_gradients(self, unit: Unit) -> list[torch.Tensor | None]:
        """Return this rank's part of each parameter's gradient, 1-D, as it is stored; None where there is none, or no part."""
        own: list[torch.Tensor | None] = [None] * len(unit.params)
        found = None if unit.local else self.gradient_shard(unit)
        for index, first, elems in unit.pieces():
            if unit.local:
                with torch._C.DisableTorchFunctionSubclass():
                    gradient = unit.params[index].param.grad
                own[index] = None if gradient is None else unit.params[index].numbers(local_of(gradient))
            elif found is not None and found[1][index]:
                own[index] = found[0][first : first + elems]
        return own

    def whole_gradients(self, unit: Unit) -> list[torch.Tensor | None]:
        """Return the averaged gradient of each parameter of the unit, or None, scaled as it will be stepped with.

        Collective where gradients are sharded.
        """
        scale = self.grad_scale
        if self.local_grads:
            with torch._C.DisableTorchFunctionSubclass():
                return [None if e.param.grad is None else e.param.grad * scale for e in unit.params]
        found = self.gradient_shard(unit)
        if found is None:
            return [None] * len(unit.params)
        shard, present = found
        whole = torch.empty(unit.elems, dtype=shard.dtype, device=shard.device)
        all_gather(unit.comm, whole, shard)
        whole = whole.mul_(scale).to(self.device)
        return [
            like(e.param, e.of(whole[e.offset_elems : e.offset_elems + e.numel])) if present[i] else None
            for i, e in enumerate(unit.params)
        ]

    @property
    def norm_now(self) -> float | torch.Tensor | None:
        """Return the norm of the gradients of the last backward, if it was measured."""
        return None if self.norm is None or self.norm_at != self.core.backwards else self.norm[0]

    @property
    def clip_scale(self) -> float:
        """Return the factor of clipping, 1 without; waits for a GPU that measures the norm."""
        if self.max_norm is not None and self.norm is not None:
            StepSchedule.clip(self.schedule, self, self.max_norm, float(self.norm[0]))
        return self._clip_scale

    @clip_scale.setter
    def clip_scale(self, factor: float) -> None:
        self._clip_scale, self.max_norm = factor, None

    @property
    def grad_scale(self) -> float:
        """Return the factor that a held gradient is stepped with: unscaled, and clipped."""
        return self.clip_scale * self.unscale

    @property
    def unscale(self) -> float:
        """Return the factor that makes a held gradient the gradient of the loss."""
        return self.held_scale / self.schedule.loss_scale(self)

    @property
    def held_scale(self) -> float:
        """Return the factor that makes a held gradient the gradient of the scaled loss."""
        unreduced = self.ranks == 1 and not self.offloads
        return 1.0 / (self.accumulate * (self.core.parts or 1)) if unreduced or self.core.hold else 1.0

    def measure(self) -> tuple[float, list[str]]:
        """Collective: return (norm of all gradients before clipping, parameters and ranks whose values were not finite)."""
        known = self.norm_now
        if self.norm is None or known is None or isinstance(known, torch.Tensor):
            self.clip_scale, self.norm_at = 1.0 if known is None else self.clip_scale, self.core.backwards
            squares, who = self.strategy.measure(self)
            self.norm = (math.sqrt(squares) * self.unscale, who)
        return cast("tuple[float, list[str]]", self.norm)

    def check_untouched(self) -> None:
        """Raise zeropp.Error for a plain parameter (stage 0) whose data were replaced: nothing would train it any more."""
        for unit in self.units:
            for entry in unit.params:
                at = unit.whole.data_ptr() + entry.offset_elems * unit.dtype.itemsize
                if entry.numel and local_of(entry.param).data_ptr() != at:
                    raise Error(f"the data of parameter '{entry.names[0]}' was replaced after zeropp.prepare (model.to, half, cuda, or "
                                "p.data = ...); convert the model before prepare")  # fmt: skip

    # -- writing ------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def write_shards(self) -> Iterator[None]:
        """Collective: inside, each rank may write its own shards, and no rank reads; afterwards all ranks see them."""
        self.flush()
        self.params.require_exact("parameters were to be written")
        self.core.step_begin(0)
        try:
            yield
        finally:
            self.core.step_end()
            self.writes += 1

    @property
    def version(self) -> tuple[int, int]:
        """Return what changes whenever values of parameters do: who keeps copies of some compares it."""
        return self.writes, int(self.core.step_state()[0])

    def flush(self) -> None:
        """Collective: end a delayed update, so that the model has it. Raise zeropp.Error if a backward has begun a step."""
        for part in self.parts:
            part.flush()
        self.schedule.require_ended("parameters or states were asked for")

    def close(self) -> None:
        """Give back all that the engine has: the model is gone."""
        folder_writer.leave(self)
        self.schedule.close()
        self.unfreezing.close()
        self.hook_order.close()
        for arrivals in self.arrivals:
            arrivals.close()
        self.core.close()
        for part in self.parts[1:]:
            part.close()
        for unit in self.units:
            for entry in unit.params:
                entry.param.__dict__.pop("_zeropp", None)
            unit.params = []

    # -- optimizer state, for checkpoints -------------------------------------------------------------------------------------

    def optimizer_state(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Return tensors of ``shard`` length by torch's names (``exp_avg``, ...), and ``step``: int64, one a parameter.

        From a file they are values to be streamed: they have a shape, slices and ``parts``. In 8 bits they are codes.
        """
        state = self.moments(unit)
        if unit.steps is not None:
            state["step"] = unit.steps
        return state

    def planned_moments(self, unit: Unit) -> int:
        return self.strategy.planned_moments(super().planned_moments(unit))

    def moments(self, unit: Unit) -> dict[str, torch.Tensor]:
        return {**super().moments(unit), **self.strategy.states(unit)}

    def states_in_place(self, unit: Unit) -> bool:
        """Return True if each state of the unit is one tensor of numbers in memory."""
        return unit.steps is not None and self.strategy.states_in_place(unit)

    def state_buffer(self, unit: Unit, kind: str) -> torch.Tensor:
        """Return a buffer of ``shard`` length to load one state into: the state tensor itself where it holds plain numbers,
        else a temporary in ``state_dtype``."""
        if self.states_in_place(unit):
            return unit.states_in.make(unit, kind)
        return torch.zeros(unit.shard.numel(), dtype=unit.state_dtype, device=unit.device)

    def load_optimizer_state(self, unit: Unit, state: dict[str, torch.Tensor]) -> None:
        """Copy into the unit's optimizer state, creating it where no step was taken yet."""
        if unit.steps is None:
            raise Error(f"unit {unit.name} has no optimizer, but the state of one is loaded into it")
        unit.steps.copy_(state["step"])
        self.strategy.load_states(unit, {name: values for name, values in state.items() if name != "step"})
        self.storage.loaded(unit.index)

    def forget_optimizer_state(self, unit: Unit) -> None:
        """Put the optimizer's state of a unit in memory back to before its first step."""
        assert unit.steps is not None
        unit.steps.zero_()
        unit.state.clear()
        unit.scales.clear()
        unit.bound = ()  # the kernel has their addresses
        self.storage.loaded(unit.index)
        self.strategy.forget_states(unit)


def register(model: nn.Module, engine: Engine) -> None:
    """Remember the engine of a model, and close it when the model dies."""
    engines[model] = engine
    weakref.finalize(model, engine.close).atexit = False


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a prepared model, or of one of its modules."""
    raise_strays()
    engine: Engine | None = engines.get(model)
    if engine is not None:
        return engine
    for parameter in model.parameters():
        ref = ref_of(parameter)
        if ref is not None:
            return cast(Engine, ref.engine)
    raise ConfigError(
        f"{type(model).__name__} was not prepared; call zeropp.prepare(model, optimizer, zeropp.Config(...)) first"
    )
