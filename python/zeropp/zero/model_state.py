# SPDX-License-Identifier: Apache-2.0
"""The record of one prepared model on this rank: its units, their parameters, and the store of each kind of state.

A store says where one kind of state lives. The classes here are memory; zeropp.zero.offload has those on NVMe. docs/design/0035.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from zeropp import _C
from zeropp.comm.job import JobRanks
from zeropp.config import Config, Tier
from zeropp.zero.model.boxes import Boxes, whole_of
from zeropp.zero.model.part import parts_of, shown

#: csrc/base/dtype.h, in its order.
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.bool,
)  # fmt: skip
WHOLE, HOST, SHARD, FILE = range(4)  # enum zpp_place


CPU = torch.device("cpu")
_DLPACK = {"cpu": 1, "cuda": 2}  # what DLPack calls torch's device types; any other is torch's PrivateUse1
_DLPACK_PRIVATE_USE = 12


def tensor_over(
    owner: object, address: int, elems: int, dtype: torch.dtype, device: torch.device = CPU
) -> torch.Tensor:
    """Return a 1-D tensor over memory of ``device``, which ``owner`` keeps alive for as long as any view of it lives."""
    kind = _DLPACK.get(device.type, _DLPACK_PRIVATE_USE)
    return from_dlpack(_C.memory_capsule(owner, address, elems, DTYPES.index(dtype), kind, device.index or 0))


@dataclass
class Entry:
    """One parameter in a unit: ``params`` of :class:`Unit` lists them in order."""

    names: list[str]
    param: nn.Parameter
    offset_elems: int
    numel: int  # of a complex parameter twice as many: its numbers, real and imaginary part in turn
    shape: torch.Size
    is_complex: bool = False
    boxes: Boxes | None = None  # of a larger tensor that it is a part of; None: the parameter is the whole tensor
    of_experts: bool = False  # the first dimension of the whole tensor counts experts

    @property
    def shown(self) -> nn.Parameter:
        """Return what the model and the optimizer have in place of ``param``: of a part, the whole parameter, without values."""
        return shown(self.param)

    @property
    def held(self) -> Boxes:
        """Return which boxes of the whole tensor the parameter is."""
        return self.boxes or whole_of(self.shape)

    def name_at(self, elem: int, rank: int) -> str:
        """Return the name in messages about element ``elem`` (-1: unknown) of what data rank ``rank`` has of the parameter: with the
        number of the expert, where it has experts, which is that of the whole model."""
        held = self._experts_of(rank)
        return self.names[0] if elem < 0 or held is None else f"{self.names[0]}[{held.index_in_whole(elem)[0]}]"

    def first_expert(self, rank: int) -> int | None:
        """Return the number in the whole model of the first expert that data rank ``rank`` has of the parameter; None: it has none."""
        held = self._experts_of(rank)
        return None if held is None else held.index_in_whole(0)[0]

    def _experts_of(self, rank: int) -> Boxes | None:
        parts = parts_of(self.param)
        if not self.of_experts or (parts is None and self.boxes is not None):
            return None
        return self.held if parts is None else parts.of_rank(rank)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of the parameter's numbers, 1-D and real, as the parameter has them."""
        return torch.view_as_complex(flat.view(*self.shape, 2)) if self.is_complex else flat.view(self.shape)

    def numbers(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the parameter as 1-D real numbers."""
        if self.is_complex:
            values = torch.view_as_real(values.to(self.param.dtype).resolve_conj())
        return values.reshape(-1)


Bytes = dict[tuple[str, str], float]
"""Bytes by ("cpu" or "nvme", kind); the kinds are those of zeropp.memory."""


class Part:
    """A part of an engine that holds bytes: the store of one kind of state, or how and when its optimizer steps."""

    def planned_bytes(self, engine: ModelState, paper: dict[str, int]) -> Bytes:
        """Return the bytes that the formulas say of this part, by where it keeps them.

        Args:
            paper: by kind, what ``zeropp.zero.formulas.model_states`` says of this rank.
        """
        return {}

    def held_bytes(self, engine: ModelState) -> Bytes:
        """Return the bytes that this part holds on this rank now."""
        return {}

    def flush(self) -> None:
        """Collective: let the model have all that the optimizer has."""

    def close(self) -> None:
        """Give back files and threads: the model is gone."""


class ParamStore(Part):
    """Parameters in memory, where the core in C keeps them."""

    fraction = 0.0
    """Share of the parameters that lives in a file."""
    in_file = False
    """True if units are loaded where they are needed, from a file or from quantised copies."""

    def own_shard(self, unit: Unit) -> torch.Tensor:
        """Return this rank's shard of a unit; from a file, values to be streamed."""
        return unit.shard

    def write(self, unit: Unit, first: int, values: torch.Tensor) -> None:
        """Write elements of this rank's shard from ``first`` on; inside ``engine.write_shards()``."""
        unit.shard[first : first + values.numel()] = values.to(unit.dtype)

    def shares(self, unit: Unit) -> bool:
        """True if the ranks of the host share one gathered copy of the unit."""
        return unit.place == HOST

    def writes(self, rank: int) -> bool:
        """True if this rank is the one that fills a shared copy."""
        return rank == 0

    def require_exact(self, what: str) -> None:
        """Raise zeropp.Error where the weights are quantised, so that ``what`` cannot be done with them."""

    def refuse_training(self, model: nn.Module) -> None:
        """Let a backward that reaches a parameter raise zeropp.Error where the weights are quantised."""

    def resident_elems(self, unit: Unit) -> int:
        """Return the number of leading elements of this rank's shard that stay in memory."""
        return unit.shard.numel()

    def second_bytes(self, engine: ModelState) -> int:
        """Return the bytes in files, on this rank, of the copies that a delayed update writes."""
        return 0

    def planned_bytes(self, engine: ModelState, paper: dict[str, int]) -> Bytes:
        return {("cpu", "params"): paper["params"]}

    def held_bytes(self, engine: ModelState) -> Bytes:
        return {("cpu", "params"): engine.core.memory()["params"]}


class GradStore(Part):
    """Reduced gradients in memory: in ``p.grad`` on one rank, else in shards that the core in C keeps."""

    fraction = 0.0
    """Share of the gradients that lives in a file."""
    in_file = False

    def read(self, engine: ModelState, unit: Unit, address: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's shard of a reduced gradient, which the core has at ``address``."""
        return tensor_over(engine.core, address, unit.shard_elems, dtype, engine.shard_device)

    def write(self, unit: Unit, values: torch.Tensor) -> None:
        """Take this rank's shard, which :meth:`read` returned and which was changed."""

    def second_bytes(self, engine: ModelState) -> int:
        """Return the bytes in files, on this rank, of the places that a delayed update reads while a backward writes the others."""
        return 0

    def require_whole(self) -> None:
        """Collective, before a norm or a step: raise zeropp.TierError where a write of a backward failed on any rank."""

    def forget(self) -> None:
        """Note that all gradients were cleared."""

    def planned_bytes(self, engine: ModelState, paper: dict[str, int]) -> Bytes:
        return {("cpu", "grads"): paper["grads"]}

    def held_bytes(self, engine: ModelState) -> Bytes:
        if engine.ranks > 1 or not engine.local_grads or engine.offloads:
            return {("cpu", "grads"): engine.core.memory()["grads"]}
        with torch._C.DisableTorchFunctionSubclass():
            found = [entry.param.grad for unit in engine.units for entry in unit.params]
        return {("cpu", "grads"): sum(one.nbytes for one in found if one is not None)}


class StateStore(Part):
    """Master weights and moments in memory: in the fields of their unit."""

    fraction = 0.0
    """Share of the states that lives in a file."""
    in_file = False

    def check_capacity(self, optimizer: torch.optim.Optimizer, moments: tuple[str, ...]) -> None:
        """Raise zeropp.ConfigError where there is no room for the states of an optimizer that came after ``prepare``."""

    def own(self, unit: Unit) -> torch.Tensor:
        """Return what the optimizer updates of a unit."""
        return unit.params_in.own_shard(unit) if unit.master is None else unit.master

    def has_master(self, unit: Unit) -> bool:
        """True if the unit has an fp32 copy beside its shard."""
        return unit.master is not None

    def keep_master(self, unit: Unit, values: torch.Tensor) -> None:
        """Make the master of a unit, of these values of its shard."""
        unit.copy_to_master(values)

    def write_master(self, unit: Unit, first: int, values: torch.Tensor) -> None:
        """Write elements of the master from ``first`` on; do nothing where there is none."""
        if values.dtype == torch.float32:
            unit.make_master()
        if unit.master is not None:
            unit.master[first : first + values.numel()] = values.float()

    def update_master(self, unit: Unit, change: Callable[[int, torch.Tensor], bool]) -> None:
        """Pass the master to ``change(first, values)`` piece by piece; it returns True if it changed them in place."""
        if unit.master is not None:
            change(0, unit.master)

    def states(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Return the states of a unit by torch's names (``exp_avg``, ...): tensors, codes, or values to be streamed."""
        return dict(unit.state)

    def count(self, unit: Unit) -> int:
        """Return how many moments the unit has."""
        return len(unit.state)

    def in_place(self, unit: Unit) -> bool:
        """Return True if each moment of the unit is one tensor of numbers in memory."""
        raise NotImplementedError

    def make(self, unit: Unit, kind: str) -> torch.Tensor:
        """Return a moment, of zeros unless it is there."""
        raise NotImplementedError

    def load(self, unit: Unit, values: dict[str, torch.Tensor]) -> None:
        """Take moments of ``shard`` length in fp32."""
        raise NotImplementedError

    def write(self, unit: Unit, kind: str, index: int, first: int, values: torch.Tensor) -> None:
        """Replace a moment of parameter ``index``, of which this rank has elements from ``first`` of its shard on."""
        raise NotImplementedError

    def bind(self, unit: Unit, names: tuple[str, ...]) -> None:
        """Tell the core where the three moments of a unit are, and make those that are not there; "" names none."""
        raise NotImplementedError

    def planned_moments(self, least: int) -> int:
        """Return how many moments a parameter will have, of an optimizer that keeps at least so many."""
        return least

    def reload(self) -> int:
        """Collective: bring back offloaded states. Return the bytes that moved on this rank."""
        return 0

    def require_loaded(self) -> None:
        """Raise zeropp.Error while the states are offloaded by ``zeropp.offload_states``."""

    def planned_bytes(self, engine: ModelState, paper: dict[str, int]) -> Bytes:
        return {("cpu", kind): paper[kind] for kind in ("master", "optimizer")}

    def held_bytes(self, engine: ModelState) -> Bytes:
        held: Bytes = {("cpu", "master"): 0, ("cpu", "optimizer"): 0}
        for unit in engine.units:
            tier = "pinned" if "optimizer" in unit.on_host else "cpu"
            masters = [unit.master] if unit.dtype != torch.float32 else []
            # A float32 unit has a master only for a delayed update, which counts it.
            moments = (*engine.moments(unit).values(), *unit.scales.values())
            for kind, tensors in (("master", masters), ("optimizer", moments)):
                held[tier, kind] = held.get((tier, kind), 0) + sum(one.nbytes for one in tensors if one is not None)
        return held


class ActivationStore(Part):
    """Saved activations in memory, where autograd keeps them."""

    in_file = False

    def install(self, model: nn.Module) -> None:
        """Surround the model's forward with what offloads its activations."""


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
    state_name: str = "fp32"  # of the optimizer's states; moments.py has the others
    scales: dict[str, torch.Tensor] = field(default_factory=dict)  # of `state` in 8 bits
    comm: Any = None  # of the ranks that partition it; None: this rank has all of it
    rank: int = 0  # among them
    ranks: int = 1
    members: tuple[int, ...] = (0,)  # their numbers among the data ranks; shard i is that of members[i]
    divisor: float = 1.0  # its gradient is the sum over those ranks, divided by this
    local: bool = False  # its gradients are whole in p.grad
    is_copy: bool = (
        False  # another rank of the tensor-parallel mesh has the same parameters, and counts them in the norm
    )
    first_param: int = 0  # number of its first parameter in the model
    stays_frozen: str = ""  # of one that is not trainable: why it cannot be unfrozen; empty: it can
    held: bool = False  # it stays in memory, where other units have states in files
    on_host: tuple[str, ...] = ()  # params, optimizer: in page-locked memory of the host, for the GPU
    locker: Any = None  # the core in C, which makes such memory, and keeps it until it ends
    locked: dict[str, torch.Tensor] = field(default_factory=dict)  # what it made, by name; it is used again
    tied: tuple[int, ...] = ()  # the ranks of a pipeline that hold its one parameter, where several do
    params_in: ParamStore = field(default_factory=ParamStore)  # in a file `shard` has a size, and no values
    states_in: StateStore = field(default_factory=StateStore)  # in a file `master` and `state` stay empty

    @property
    def own(self) -> torch.Tensor:
        """Return what the optimizer updates: the fp32 master shard, or the shard itself; from a file, values to be streamed."""
        return self.states_in.own(self)

    @property
    def device(self) -> torch.device:
        """Return where the values of this rank's shard are, and its optimizer states where no file has them."""
        return CPU if self.shard.is_meta else self.shard.device

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the type of the optimizer's states, where they are not in fewer bits (`state_name`)."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def in_file(self) -> bool:
        """True if the parameters live in a unit file, or as quantised copies in its mapping."""
        return self.place == FILE

    @property
    def shared(self) -> bool:
        """True if the ranks of the host share one gathered copy."""
        return self.params_in.shares(self)

    def write_shard(self, first: int, values: torch.Tensor) -> None:
        """Write elements of this rank's shard from ``first`` on, inside ``engine.write_shards()``."""
        self.params_in.write(self, first, values)

    @property
    def has_master(self) -> bool:
        """True if there is an fp32 copy beside the shard."""
        return self.states_in.has_master(self)

    def make_master(self) -> None:
        """Make the fp32 copy that waited, if one did."""
        if self.master_waits:
            self.copy_to_master(self.shard)

    def copy_to_master(self, values: torch.Tensor) -> None:
        """Make the fp32 copy, of these values of the shard."""
        if "optimizer" in self.on_host:
            self.master = self.new_states("master", values.numel(), torch.float32).copy_(values)
        else:
            self.master = values.to(torch.float32, copy=True)
        self.master_waits = False

    def new_states(self, name: str, elems: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros for a state of the optimizer, where the unit has them."""
        if "optimizer" not in self.on_host or not elems:
            return torch.zeros(elems, dtype=dtype, device=self.device)
        found = self.locked.get(name)
        if found is None or (found.numel(), found.dtype) != (elems, dtype):
            address = self.locker.page_locked(elems * dtype.itemsize)
            found = self.locked[name] = tensor_over(self.locker, address, elems, dtype, self.device)
        return found.zero_()

    def write_master(self, first: int, values: torch.Tensor) -> None:
        """Write elements of the fp32 master from ``first`` on; do nothing where there is none."""
        self.states_in.write_master(self, first, values)

    def update_master(self, change: Callable[[int, torch.Tensor], bool]) -> None:
        """Pass the master to ``change(first, values)`` piece by piece; it may change them in place, and returns True if it did."""
        self.states_in.update_master(self, change)

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield (parameter, first element in ``shard``, elements) of each parameter that lies in it."""
        end = self.begin_elems + self.shard.numel()
        for i, entry in enumerate(self.params):
            first = max(entry.offset_elems, self.begin_elems)
            last = min(entry.offset_elems + entry.numel, end)
            if first < last:
                yield i, first - self.begin_elems, last - first


def shards_on_device(config: Config, device: torch.device) -> bool:
    """Return True if an accelerator holds the shards of parameters and gradients and the optimizer's states, and steps them."""
    tiers = (config.offload.params, config.offload.optimizer)
    return device.type != "cpu" and all(isinstance(tier, Tier) and tier.kind == "device" for tier in tiers)


class ModelState:
    """The state of one prepared model on this rank: the communicator, the units, and the stores of each kind of state."""

    def __init__(self, config: Config, ranks: JobRanks, core: Any, device: torch.device) -> None:
        comm = ranks.data
        self.config = config
        self.comm = comm  # of the ranks that partition the units; None: this rank alone
        self.job = ranks.job  # of all ranks that step together; None: those of `comm`
        self.core = core
        self.rank: int = comm.rank if comm is not None else 0
        self.ranks: int = comm.ranks if comm is not None else 1
        self.stage: int = config.stage
        self.accumulate: int = config.accumulate
        self.device = device  # where units are whole, and the model computes
        on_device = shards_on_device(config, device)
        self.shard_device = device if on_device else CPU  # where shards, reduced gradients and states are
        # Shards are on the host beside an accelerator, on one rank too.
        self.offloads = device.type != "cpu" and not on_device
        self.local = self.is_local(self.ranks)
        self.local_grads = self.local  # in p.grad, where autograd leaves them; not where they live in a file
        self.sharers = 0  # ranks that hold a second copy of the parameters together (hpZ)
        self.units: list[Unit] = []
        self.params = ParamStore()
        self.grads = GradStore()
        self.states = StateStore()
        self.activations = ActivationStore()

    def is_local(self, ranks: int) -> bool:
        """Return True for units that so many ranks partition if each of these holds all of it, and its gradients in p.grad."""
        return (ranks == 1 or self.stage == 0) and not self.offloads

    def planned_moments(self, unit: Unit) -> int:
        """Return how many moments a parameter of the unit has, or will have after its first step."""
        return self.states.count(unit)

    def moments(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Return the optimizer's states of one unit, of ``shard`` length, by torch's names."""
        return unit.states_in.states(unit)


def has_params_on_host(on_host: tuple[str, ...], config: Config, device: torch.device) -> bool:
    """Return True if a unit's shards are in memory of the host, where those of others are on the device."""
    return "params" in on_host and shards_on_device(config, device)
