# SPDX-License-Identifier: Apache-2.0
"""One prepared model: its units in memory, the hooks on its modules, and what the façade asks of both."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zeropp import _C
from zeropp.config import Config, LossScale, Tier
from zeropp.errors import ConfigError, Error
from zeropp.files import folder_writer
from zeropp.zero.memory_plan import READ_AHEAD_BYTES
from zeropp.zero.model.parameter import PartitionedParameter, Ref, ShardedGradParameter, ref_of
from zeropp.zero.model.strays import raise_strays
from zeropp.zero.model.units import REPLICATE_BYTES, UnitPlan, numbers
from zeropp.zero.offload import stored
from zeropp.zero.offload.grads_tier import GradsTier
from zeropp.zero.offload.optim_tier import StateTier, TieredStates
from zeropp.zero.offload.params_tier import ParamsTier
from zeropp.zero.offload.storage import FileStorage, Storage
from zeropp.zero.step import low_states, origins
from zeropp.zero.step.custom import is_known
from zeropp.zero.step.scaler import NoScaler, Scaler
from zeropp.zero.unfreeze import Unfreezeing

if TYPE_CHECKING:
    from zeropp.zero.offload.activations import ActivationTier
    from zeropp.zero.offload.offload_states import Away
    from zeropp.zero.step.delayed import Delayed
    from zeropp.zero.step.onebit import OneBit
    from zeropp.zero.step.step_in_backward import StepInBackward
    from zeropp.zero.step.updates import Update

#: csrc/base/dtype.h, in its order.
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.bool,
)  # fmt: skip
WHOLE, HOST, SHARD, FILE = range(4)  # enum zpp_place


def tensor_over(owner: object, address: int, elems: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor over memory that ``owner`` keeps alive for as long as any view of it lives."""
    if elems == 0:
        return torch.empty(0, dtype=dtype)
    buffer_type: Any = type("Buffer", (ctypes.c_char * (elems * dtype.itemsize),), {})
    buffer = buffer_type.from_address(address)
    buffer.owner = owner
    return torch.frombuffer(buffer, dtype=dtype)


@dataclass
class Entry:
    """One parameter in a unit: ``params`` of :class:`Unit` lists them in order."""

    names: list[str]
    param: nn.Parameter
    offset_elems: int
    numel: int  # of a complex parameter twice as many: its numbers, real and imaginary part in turn
    shape: torch.Size
    is_complex: bool = False

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """A view of the parameter's numbers, 1-D and real, as the parameter has them."""
        return torch.view_as_complex(flat.view(*self.shape, 2)) if self.is_complex else flat.view(self.shape)

    def numbers(self, values: torch.Tensor) -> torch.Tensor:
        """Of values that stand for the parameter: 1-D and real."""
        if self.is_complex:
            values = torch.view_as_real(values.to(self.param.dtype).resolve_conj())
        return values.reshape(-1)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.names, self.param, self.offset_elems, self.numel, self.shape))


@dataclass
class Unit:
    """A unit in memory. ``shard`` is this rank's own shard in the parameters' dtype; on one rank, and in stage 0, all of it."""

    index: int
    name: str
    core: Any  # _C.Unit
    dtype: torch.dtype
    grad_dtype: torch.dtype  # of gradients on this rank: p.grad, what waits, and the reduced shard
    trainable: bool
    place: int
    elems: int
    shard_elems: int
    params: list[Entry]
    whole: torch.Tensor
    shard: torch.Tensor
    begin_elems: int
    master: torch.Tensor | None = None
    master_waits: bool = False  # there will be one, as soon as there is an optimizer, or values finer than `dtype`
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: torch.Tensor | None = None
    groups: list[int] = field(default_factory=list)
    grad_pool: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # what torch's own optimizers step: one tensor a piece
    bound: tuple[str, ...] = ()  # the three moments whose addresses C has, "" for none; empty: it has none yet
    state_kind: str = "fp32"  # of the optimizer's states; low_states.py has the others
    scales: dict[str, torch.Tensor] = field(default_factory=dict)  # of `state` in 8 bits
    first_param: int = 0  # number of its first parameter in the model
    tiered: TieredStates | None = None  # in place of `master` and `state`, where they live in a file
    stays_frozen: str = ""  # of one that is not trainable: why it cannot be unfrozen; empty: it can
    filed: ParamsTier | None = None  # where the parameters live; then `shard` has a size, and no values

    @property
    def own(self) -> torch.Tensor:
        """What the optimizer updates: the fp32 master shard, or the shard itself. Of a tier: values to be streamed."""
        if self.tiered is not None:
            self.tiered.tier.require_whole()
            if self.tiered.has_master:
                return cast(torch.Tensor, self.tiered.view("master"))
        if self.master is None and self.filed is not None:
            return cast(torch.Tensor, self.filed.shard_of(self))
        return self.shard if self.master is None else self.master

    @property
    def state_dtype(self) -> torch.dtype:
        """Of the optimizer's states, where they are not in fewer bits (`state_kind`)."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def shared(self) -> bool:
        """Is the gathered copy one for all ranks of the host?"""
        return self.place == HOST or (self.filed is not None and self.filed.shared)

    def write_shard(self, first: int, values: torch.Tensor) -> None:
        """Elements of this rank's shard from ``first`` on, inside ``engine.write_shards()``."""
        if self.filed is not None:
            self.filed.write(self, first, values)
        else:
            self.shard[first : first + values.numel()] = values.to(self.dtype)

    @property
    def has_master(self) -> bool:
        """Is there an fp32 copy beside the shard?"""
        return self.master is not None or (self.tiered is not None and self.tiered.has_master)

    def make_master(self) -> None:
        """The fp32 copy that waited."""
        if self.master_waits:
            self.master, self.master_waits = self.shard.to(torch.float32, copy=True), False

    def write_master(self, first: int, values: torch.Tensor) -> None:
        """Elements of the fp32 master from ``first`` on; nothing where there is none."""
        if values.dtype == torch.float32:
            self.make_master()
        if self.tiered is not None and self.tiered.has_master:
            self.tiered.write("master", first, values)
        elif self.master is not None:
            self.master[first : first + values.numel()] = values.float()

    def update_master(self, change: Callable[[int, torch.Tensor], bool]) -> None:
        """Piece after piece: ``change(first, values)`` may change the master in place, and says whether it did."""
        if self.tiered is not None and self.tiered.has_master:
            self.tiered.update("master", change)
        elif self.master is not None:
            change(0, self.master)

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(parameter, first element in ``shard``, elements) of every parameter that this rank owns a part of."""
        end = self.begin_elems + self.shard.numel()
        for i, entry in enumerate(self.params):
            first = max(entry.offset_elems, self.begin_elems)
            last = min(entry.offset_elems + entry.numel, end)
            if first < last:
                yield i, first - self.begin_elems, last - first


class Engine:
    """The state of one prepared model. Held by its parameters and its optimizer, never by itself through the model."""

    def __init__(self, model: nn.Module, plans: list[UnitPlan], config: Config, comm: Any, host_copy: bool) -> None:
        self.config = config
        self.comm = comm
        self.rank: int = comm.rank if comm is not None else 0
        self.ranks: int = comm.ranks if comm is not None else 1
        self.stage: int = config.stage
        self.accumulate: int = config.accumulate
        self.host_copy = host_copy
        self.model_ref = weakref.ref(model)
        self.clip_scale = 1.0
        chosen = config.loss_scale if isinstance(config.loss_scale, LossScale) else LossScale()
        self.scaler = Scaler(chosen) if config.scales_loss else NoScaler()
        self.norm: tuple[float, list[str]] | None = None
        self.norm_at = -1
        self.stepped_at = 0
        self.optimizer_ref: weakref.ref[torch.optim.Optimizer] | None = None
        self.least_states = 2  # of a parameter, as soon as there are any: for what is planned
        self.update: Update | None = None  # what C steps shards with; else:
        self.inner: torch.optim.Optimizer | None = None  # torch's own optimizer over the shards
        self.onebit: OneBit | None = None  # in place of both, for optimizers that send or sum something of their own
        self.local = self.ranks == 1 or self.stage == 0
        self.shows_gradients = self.stage == 0
        offload = config.offload
        tiers = [tier for tier in (offload.params, offload.grads, offload.optimizer) if isinstance(tier, Tier)]
        self.stored = config.stored_name  # weights in fewer bits, of a model that is only evaluated
        self._params = tiers[0] if tiers[0].kind == "nvme" or self.stored is not None else None
        grads = tiers[1] if tiers[1].kind == "nvme" else None
        self.local_grads = self.local and grads is None  # in p.grad, where autograd leaves them
        near = self._copy_of_host()
        self.core = _C.Zero(
            self.stage,
            comm,
            self._prefetch_bytes(plans),
            config.bucket_bytes,
            config.accumulate,
            torch.get_num_threads(),
            _functions(),
            self._params.fraction if self._params is not None else 0.0,
            near,
        )
        if self.ranks > 1:
            bits = {"exact": 0, "int8": 8, "int4": 4}
            self.core.set_wire(bits[config.comm.params], bits[config.comm.grads], config.comm.block_elems)
        self.sharers = 0  # ranks that hold a second copy of the parameters together (hpZ)
        if config.comm.secondary_shard and comm is not None and comm.hosts > 1:
            from zeropp.comm.group import host_communicator

            self.core.set_secondary(host_communicator())
            self.sharers = len(comm.host_ranks)
        if grads is not None:
            self.core.set_grads_fraction(grads.fraction)
        if config.step_in_backward:
            self.core.pool_grads()
        if offload.delayed_update is not None:
            self.core.delay_steps()
        low = self._store_low(model)
        for index, plan in enumerate(plans):
            place = self._place(plan)
            self.core.add_unit(
                plan.name, DTYPES.index(plan.dtype), [numbers(p) for p in plan.params], plan.trainable,
                not plan.trainable and not plan.stays_frozen, place,
                *(DTYPES.index(dtype) for dtype in config.gradient_dtypes(plan.dtype)),
            )  # fmt: skip
            for number, parameter in enumerate(plan.params):
                if place == FILE and parameter in low:
                    self.core.store_low(index, number)
        self.core.seal()
        self.storage = Storage()  # of the tiers below
        self.states: StateTier | None = None  # where the optimizer's states are, unless in memory
        self.params_tier: ParamsTier | None = None  # where the parameters are, unless in memory
        self.grads_tier: GradsTier | None = None  # where the reduced gradients are, unless in memory
        self.activations: ActivationTier | None = None  # where what autograd saves goes, unless it stays in memory
        self.delayed: Delayed | None = None  # updates that run beside the next pass
        self.backward_step: StepInBackward | None = None  # updates inside the backward
        self.away: Away | None = None  # where the optimizer's states are for a while (offload_states)
        if any(tier.kind == "nvme" for tier in tiers):
            self.core.trim_gradients()
        if self._params is not None or any(tier.kind == "nvme" for tier in tiers) or config.step_in_backward:
            self.storage = FileStorage(self, [i for i, plan in enumerate(plans) if plan.trainable])
            if self._params is not None:
                self.params_tier = ParamsTier(self, self._params, self.storage, low)
            if grads is not None:
                self.grads_tier = self._make_grads_tier(grads)
        self.units: list[Unit] = [self._bind(i, plan) for i, plan in enumerate(plans)]
        self.unfreezing = Unfreezeing(self)  # of what is frozen, or in no group of the optimizer

    # -- construction --------------------------------------------------------------------------------------------------

    def _copy_of_host(self) -> Any:
        """Over several hosts each has a copy of weights that are only read, which its ranks share: their communicator, or None."""
        if self.stored is None or self.comm is None or self.comm.hosts == 1:
            return None
        from zeropp.comm.group import host_communicator

        return host_communicator()

    def _store_low(self, model: nn.Module) -> set[nn.Parameter]:
        """The parameters that are kept in fewer bits."""
        if self.stored is None:
            return set()
        assert self._params is not None
        self.core.set_stored(stored.BITS[self.stored], stored.BLOCK_ELEMS, self._params.kind != "nvme")
        return stored.matrices(model)

    def _make_grads_tier(self, tier: Tier) -> GradsTier:
        try:
            return GradsTier(self, tier)
        except BaseException:
            if self.params_tier is not None:
                self.params_tier.close()
            raise

    def _prefetch_bytes(self, plans: list[UnitPlan]) -> int:
        if self.config.prefetch != "auto":
            return int(self.config.prefetch)
        if self._params is not None:  # the next one at least, whatever its size
            return max(READ_AHEAD_BYTES, *(2 * plan.numel * plan.dtype.itemsize for plan in plans))
        if self.ranks == 1 or self.host_copy or self.stage < 3:
            return 0
        # Between hosts gathers are collectives: every rank must go equally far ahead, whatever its host has to spare.
        return _BETWEEN_HOSTS_PREFETCH_BYTES if self.comm.hosts > 1 else _idle_core_prefetch()

    def _place(self, plan: UnitPlan) -> int:
        small = plan.alone and plan.numel * plan.dtype.itemsize < REPLICATE_BYTES and self.config.units == "auto"
        if self._params is not None:
            return WHOLE if small else FILE
        if self.ranks == 1 or self.stage < 3:
            return WHOLE
        if self.host_copy:
            return HOST
        return WHOLE if small else SHARD

    def _released_class(self) -> type | None:
        return {0: None, 1: ShardedGradParameter, 2: ShardedGradParameter, 3: PartitionedParameter}[self.stage]

    def _bind(self, index: int, plan: UnitPlan) -> Unit:
        core = self.core.bind_unit(index, plan.params, nn.Parameter, self._released_class())
        layout = core.layout()
        elems, shard_elems = layout["elems"], layout["shard_elems"]
        whole = tensor_over(self.core, layout["whole"], elems, plan.dtype)
        own = whole if self.local else tensor_over(self.core, layout["shard"], shard_elems, plan.dtype)
        if layout["place"] == FILE:
            own = torch.empty_like(own, device="meta")
        entries = [
            Entry(names, p, offset, numbers(p), p.shape, p.is_complex())
            for names, p, offset in zip(plan.names, plan.params, layout["offsets"], strict=True)
        ]
        unit = Unit(
            index, plan.name, core, plan.dtype, self.config.gradient_dtypes(plan.dtype)[0], plan.trainable, layout["place"],
            elems, shard_elems, entries, whole, own, 0 if self.local else self.rank * shard_elems,
            stays_frozen=plan.stays_frozen, filed=self.params_tier if layout["place"] == FILE else None,
        )  # fmt: skip
        for i, entry in enumerate(entries):
            entry.param._zeropp = Ref(self, unit, i, entry.names[0])  # type: ignore[attr-defined]
        if plan.trainable:
            self.show_gradients(unit)
        return unit

    def show_gradients(self, unit: Unit) -> None:
        """Stage 0: where the gradients of a unit lie that is trainable now."""
        if self.stage == 0 and self.ranks > 1:
            gradient = tensor_over(self.core, unit.core.layout()["gradient"], unit.elems, unit.grad_dtype)
            unit.core.set_grad_views([e.of(gradient[e.offset_elems : e.offset_elems + e.numel]) for e in unit.params])

    # -- passes ----------------------------------------------------------------------------------------------------------

    @property
    def builds_loss(self) -> bool:
        """Is a forward's graph waiting for its backward? Then a parameter read outside a module is a part of the loss."""
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
        """Does any rank hold a reduced gradient of this parameter?"""
        found = ref.unit.core.grad()
        return found is not None and bool(found[2][ref.index])

    def clear_gradient(self, ref: Ref) -> None:
        """Forget the gradient of one parameter."""
        ref.unit.core.clear_grad(ref.index)
        self.norm = None
        with torch._C.DisableTorchFunctionSubclass():
            ref.unit.params[ref.index].param.grad = None

    def clear_gradients(self) -> None:
        """What ``optimizer.zero_grad()`` does."""
        self.core.clear_grads()
        if self.grads_tier is not None:
            self.grads_tier.forget()
        self.clip_scale = 1.0
        self.norm = None

    def restart_step(self) -> None:
        """A load within ``accumulate`` backwards: the next one is the first of a step, and adds to nothing."""
        self.core.restart_step()
        self.stepped_at = self.core.backwards
        self.clear_gradients()

    def gradient_shard(self, unit: Unit) -> tuple[torch.Tensor, list[bool]] | None:
        """(this rank's shard of the reduced gradient, which parameters have one); None without any. Not for local gradients.

        Of a tier it is a copy: :meth:`keep_gradient_shard` writes it back.
        """
        found = unit.core.grad()
        if found is None:
            return None
        address, dtype, present = found
        if self.grads_tier is not None:
            return self.grads_tier.read(unit, DTYPES[dtype]), [bool(b) for b in present]
        return tensor_over(self.core, address, unit.shard_elems, DTYPES[dtype]), [bool(b) for b in present]

    def own_gradients(self, unit: Unit) -> list[torch.Tensor | None]:
        """Of each parameter, this rank's part of its gradient, 1-D, as it is stored; None where there is none, or no part."""
        own: list[torch.Tensor | None] = [None] * len(unit.params)
        found = None if self.local else self.gradient_shard(unit)
        for index, first, elems in unit.pieces():
            if self.local:
                with torch._C.DisableTorchFunctionSubclass():
                    gradient = unit.params[index].param.grad
                own[index] = None if gradient is None else unit.params[index].numbers(gradient)
            elif found is not None and found[1][index]:
                own[index] = found[0][first : first + elems]
        return own

    def keep_gradient_shard(self, unit: Unit, shard: torch.Tensor) -> None:
        """What :meth:`gradient_shard` returned was changed."""
        if self.grads_tier is not None:
            self.grads_tier.write(unit, shard)

    def whole_gradients(self, unit: Unit) -> list[torch.Tensor | None]:
        """Collective where sliced: the averaged gradient of each parameter of the unit, or None; scaled as it will be stepped with."""
        scale = self.clip_scale * self.unscale
        if self.local_grads:
            with torch._C.DisableTorchFunctionSubclass():
                return [None if e.param.grad is None else e.param.grad * scale for e in unit.params]
        found = self.gradient_shard(unit)
        if found is None:
            return [None] * len(unit.params)
        shard, present = found
        whole = torch.empty(unit.elems, dtype=shard.dtype) if self.ranks > 1 else shard.clone()
        if self.ranks > 1:
            self.comm.all_gather(whole.data_ptr(), shard.data_ptr(), shard.numel() * shard.element_size())
        whole.mul_(scale)
        return [
            e.of(whole[e.offset_elems : e.offset_elems + e.numel]) if present[i] else None
            for i, e in enumerate(unit.params)
        ]

    @property
    def unscale(self) -> float:
        """What a held gradient is multiplied with to be the gradient of the loss."""
        scale = 1.0 / self.accumulate if self.ranks == 1 or self.core.hold else 1.0
        return scale / self.scaler.scale

    def measure(self) -> tuple[float, list[str]]:
        """Collective: (norm of all gradients before clipping, parameters and ranks whose values were not finite)."""
        if self.norm is None or self.norm_at != self.core.backwards:
            self.clip_scale, self.norm_at = 1.0, self.core.backwards
            if self.core.hold and self.onebit is not None:
                squares, who = self.onebit.measure()
            else:
                squares, bad = self.core.norm()
                who = origins.describe([(self.units[u].params[p].names[0], bits) for u, p, bits in bad], self.ranks)
            self.norm = (squares**0.5 * self.unscale, who)
        return self.norm

    def check_untouched(self) -> None:
        """Stage 0 leaves plain parameters to the user: notice what would silently stop training them."""
        for unit in self.units:
            for entry in unit.params:
                at = unit.whole.data_ptr() + entry.offset_elems * unit.dtype.itemsize
                if entry.numel and entry.param.data_ptr() != at:
                    raise Error(f"the data of parameter '{entry.names[0]}' was replaced after zeropp.prepare (model.to, half, cuda, or "
                                "p.data = ...); convert the model before prepare")  # fmt: skip

    # -- writing ------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def write_shards(self) -> Iterator[None]:
        """Collective: inside, each rank may write its own shards, and nobody reads; afterwards all ranks see them."""
        self.flush()
        if self.stored is not None:
            stored.refuse("parameters were to be written", self.stored)
        self.core.step_begin(0)
        try:
            yield
        finally:
            self.core.step_end()

    def flush(self) -> None:
        """Collective: an update that is delayed ends, and the model has it. Nothing to do without. One that a backward began is
        refused."""
        if self.delayed is not None:
            self.delayed.flush()
        if self.backward_step is not None:
            self.backward_step.require_ended("parameters or states were asked for")

    def close(self) -> None:
        """The model is gone."""
        folder_writer.leave(self)
        if self.delayed is not None:
            self.delayed.close()
        self.unfreezing.close()
        self.core.close()
        for tier in (self.states, self.params_tier, self.grads_tier, self.activations):
            if tier is not None:
                tier.close()
        for unit in self.units:
            for entry in unit.params:
                entry.param.__dict__.pop("_zeropp", None)
            unit.params = []

    # -- optimizer state, for checkpoints -------------------------------------------------------------------------------------

    def optimizer_state(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Tensors of ``shard`` length by torch's names (``exp_avg``, ...), and ``step``: int64, one a parameter.

        Of a tier they are values to be streamed: they have a shape, shards and ``parts`` (zero/offload.py). In 8 bits they
        are codes (zero/low_states.py).
        """
        state = dict(unit.state)
        if unit.tiered is not None:
            state = {kind: cast(torch.Tensor, unit.tiered.view(kind)) for kind in unit.tiered.kinds}
        for i, first, elems in unit.pieces():
            piece = unit.grad_pool.get(i)
            for name, value in self._inner_state(piece).items():
                if name != "step" and value.numel() == elems:
                    state.setdefault(name, torch.zeros(unit.shard.numel(), dtype=value.dtype))[
                        first : first + elems
                    ] = value.reshape(-1)
        if unit.steps is not None:
            state["step"] = unit.steps
        return state

    def states_in_place(self, unit: Unit) -> bool:
        """Is each state of the unit one tensor of numbers in memory?"""
        return unit.tiered is None and self.inner is None and unit.steps is not None and unit.state_kind != "int8"

    def room_for_state(self, unit: Unit, kind: str) -> torch.Tensor:
        """Where values for :meth:`load_optimizer_state` go: of ``shard`` length, unrounded unless it is the place itself."""
        if self.states_in_place(unit):
            low_states.make(unit, kind)
            return unit.state[kind]
        return torch.zeros(unit.shard.numel(), dtype=unit.state_dtype)

    def load_optimizer_state(self, unit: Unit, state: dict[str, torch.Tensor]) -> None:
        """Copy into the unit's optimizer state, creating it where no step was taken yet."""
        if unit.steps is None:
            raise Error(f"unit {unit.name} has no optimizer, but the state of one is loaded into it")
        unit.steps.copy_(state["step"])
        names = [n for n in state if n != "step"]
        if unit.tiered is not None:
            for name in names:
                unit.tiered.write(name, 0, state[name])
            unit.tiered.kinds = tuple(names)
        elif unit.state_kind == "int8":
            for name in names:
                low_states.write_all(unit, name, state[name])
        elif self.inner is None:
            for name in names:
                low_states.make(unit, name)
                unit.state[name].copy_(state[name])
        self.storage.loaded(unit.index)
        if self.inner is None:
            return
        for i, first, elems in unit.pieces():
            if i not in unit.grad_pool:
                continue
            if int(unit.steps[i]):
                mine = {n: state[n][first : first + elems].clone().view(unit.grad_pool[i].shape) for n in names}
                step = torch.tensor(float(unit.steps[i])) if is_known(self.inner) else int(unit.steps[i])
                self.inner.state[unit.grad_pool[i]] = {"step": step, **mine}
            else:
                self.begin_inner_state(unit.grad_pool[i])

    def forget_optimizer_state(self, unit: Unit) -> None:
        """As before the unit's first step. Not of a tier."""
        assert unit.steps is not None
        unit.steps.zero_()
        unit.state.clear()
        unit.scales.clear()
        unit.bound = ()  # the kernel has their addresses
        self.storage.loaded(unit.index)
        for piece in unit.grad_pool.values():
            self.begin_inner_state(piece)

    def begin_inner_state(self, piece: torch.Tensor) -> None:
        """As it is before the first step of a piece: for most of torch's optimizers there is none, Adagrad makes some at once."""
        assert self.inner is not None
        if not is_known(self.inner):
            self.inner.state.pop(piece, None)
            return
        group = next(g for g in self.inner.param_groups if any(one is piece for one in g["params"]))
        accepted = inspect.signature(type(self.inner).__init__).parameters.keys() - {"foreach", "fused"}
        how = {name: value for name, value in self.inner.defaults.items() if name in accepted}
        fresh = type(self.inner)([{**group, "params": [piece]}], **how)
        self.inner.state.pop(piece, None)
        self.inner.state.update(fresh.state)

    def _inner_state(self, piece: torch.Tensor | None) -> dict[str, torch.Tensor]:
        if self.inner is None or piece is None:
            return {}
        return {n: v for n, v in self.inner.state.get(piece, {}).items() if isinstance(v, torch.Tensor)}


def _functions() -> dict[str, Any]:
    autograd = torch._C._autograd
    return {
        "current_graph_task_id": torch._C._current_graph_task_id,
        "is_grad_enabled": torch.is_grad_enabled,
        "queue_callback": torch.autograd.Variable._execution_engine.queue_callback,
        "functorch_peek": torch._C._functorch.peek_interpreter_stack,
        "top_saved_hooks": autograd._top_saved_tensors_default_hooks,
        "push_saved_hooks": autograd._push_saved_tensors_default_hooks,
        "pop_saved_hooks": autograd._pop_saved_tensors_default_hooks,
        "raise_strays": raise_strays,
    }


_BETWEEN_HOSTS_PREFETCH_BYTES = 64 << 20


def _idle_core_prefetch() -> int:
    """Prefetch copies in a thread of its own: worth it only where a core is idle."""
    import os

    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    return 64 << 20 if cores > ranks_here * torch.get_num_threads() else 0


_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def register(model: nn.Module, engine: Engine) -> None:
    """Remember the engine of a model, and close it when the model dies."""
    _engines[model] = engine
    weakref.finalize(model, engine.close).atexit = False


def engine_of(model: nn.Module) -> Engine:
    """The engine of a prepared model, or of one of its modules."""
    raise_strays()
    engine = _engines.get(model)
    if engine is not None:
        return engine
    for parameter in model.parameters():
        ref = ref_of(parameter)
        if ref is not None:
            return ref.engine
    raise ConfigError(
        f"{type(model).__name__} was not prepared; call zeropp.prepare(model, optimizer, zeropp.Config(...)) first"
    )
