# SPDX-License-Identifier: Apache-2.0
"""From plans of units to an engine: the core in C, the stores, the units in memory, and the model's values in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zeropp import _C
from zeropp.comm.collective import broadcast, in_the_whole_job
from zeropp.comm.group import host_communicator
from zeropp.comm.job import JobRanks
from zeropp.config import GATHER_WAYS, Config
from zeropp.zero.engine import Engine
from zeropp.zero.formulas import READ_AHEAD_BYTES, has_master, loads_units, read_ahead_bytes, tier_of
from zeropp.zero.model.boxes import Boxes, boxes_of
from zeropp.zero.model.dtensor import boxes_of_dtensor, place
from zeropp.zero.model.init import become_plain, copy_own_part, drop_shard, is_sharded, materialise, plain_class
from zeropp.zero.model.parameter import (
    PartitionedParameter,
    Ref,
    ShardedGradParameter,
    is_dtensor,
    local_of,
    raise_strays,
    ref_of,
    released_dtensors,
)
from zeropp.zero.model.part import Parts, parts_of, shown, without_values
from zeropp.zero.model.spread import Group, Spread, make_groups
from zeropp.zero.model.units import UnitPlan, numbers
from zeropp.zero.model_state import (
    DTYPES,
    FILE,
    HOST,
    SHARD,
    WHOLE,
    Entry,
    ParamStore,
    Unit,
    has_params_on_host,
    shards_on_device,
    tensor_over,
)  # fmt: skip
from zeropp.zero.offload import weight_quant
from zeropp.zero.offload.activations import ActivationFile
from zeropp.zero.offload.activations_device import DeviceActivationFile, PinnedActivations
from zeropp.zero.offload.grad_file import GradFile
from zeropp.zero.offload.optim_file import OptimFile
from zeropp.zero.offload.param_file import ParamFile
from zeropp.zero.offload.storage import FileStorage
from zeropp.zero.step.moments import MemoryStates
from zeropp.zero.unfreeze import Unfreezing

_RELEASED_CLASS = (None, ShardedGradParameter, ShardedGradParameter, PartitionedParameter)
"""By stage: the class of parameters whose gradients, or values, are not whole."""


def make_engine(
    model: nn.Module, plans: list[UnitPlan], config: Config, ranks: JobRanks, host_copy: bool, moments: tuple[str, ...],
    device: torch.device, spreads: Sequence[Spread] = (),
) -> Engine:  # fmt: skip
    """Return an engine with all its stores, and its units without values; collective. ``moments``: of its optimizer; ``device``: where
    units are whole; ``spreads``: modules whose parameters differ between ranks.

    Raises:
        zeropp.TierError: a disk has no room; the model is as it was.
    """
    comm = ranks.data
    core, groups = in_the_whole_job(  # as where a GPU has no room, or a host no NCCL
        ranks.job, lambda: _make_core(model, plans, config, ranks, host_copy, device, spreads)
    )
    engine = Engine(config, ranks, core, host_copy, device)
    if config.comm.secondary_shard and comm is not None and comm.hosts > 1:
        engine.sharers = len(comm.host_ranks)
    engine.states = memory = MemoryStates()
    engine.unfreezing = Unfreezing(engine)

    def make_stores() -> None:
        _make_stores(engine, model, plans)
        in_memory = ParamStore()
        for index, plan in enumerate(plans):
            unit = _bind(engine, index, plan, groups[plan.spread])
            unit.held = plan.held
            if shards_on_device(config, device):
                unit.on_host, unit.locker = plan.on_host, core
            unit.states_in, unit.params_in = memory, engine.params if unit.in_file else in_memory
            engine.units.append(unit)
            if plan.trainable:
                engine.show_gradients(unit)
        _mark_experts(model)
        for unit in engine.units:
            _name_params(engine, unit)
        _make_late_stores(engine, moments)

    try:
        in_the_whole_job(engine.job, make_stores)  # as when a disk fails
    except BaseException:
        engine.close()
        raise
    engine.unfreezing.renew()
    if device.type != "cpu":
        core.set_moved(engine.bind_again)
    return engine


# -- the core ----------------------------------------------------------------------------------------------------------


def _make_core(
    model: nn.Module, plans: list[UnitPlan], config: Config, ranks: JobRanks, host_copy: bool, device: torch.device,
    spreads: Sequence[Spread],
) -> tuple[Any, list[Group]]:  # fmt: skip
    """Return the core in C with all units, sealed, and the groups of its units. Where hosts have copies of quantised weights, their
    ranks share one."""
    comm = ranks.data
    share_reads = comm is not None and comm.hosts > 1 and config.stored_name is not None
    core = _C.Zero(
        config.stage,
        comm,
        ranks.job,
        _prefetch_bytes(plans, config, comm, host_copy, device),
        config.bucket_bytes,
        config.accumulate,
        torch.get_num_threads(),
        _functions(),
        tier_of(config, "params").fraction if loads_units(config) else 0.0,
        host_communicator() if share_reads else None,
        None if device.type == "cpu" else device.type,
        device.index or 0,
        shards_on_device(config, device),
        GATHER_WAYS.index(config.comm.gather),
    )
    _set_options(core, config, comm)
    groups = make_groups(core, ranks, spreads)
    _add_units(core, model, plans, config, groups, host_copy, device)
    core.seal()
    if _uses_nvme(config):
        core.trim_gradients()
    return core, groups


def _set_options(core: Any, config: Config, comm: Any) -> None:
    """Set what the core's constructor does not take; the core wants it before its units."""
    if comm is not None:
        bits = {"exact": 0, "int8": 8, "int4": 4}
        core.set_wire(bits[config.comm.params], bits[config.comm.grads], config.comm.block_elems)
    if config.comm.secondary_shard and comm is not None and comm.hosts > 1:
        core.set_secondary(host_communicator())
    if tier_of(config, "grads").kind == "nvme":
        core.set_grads_fraction(tier_of(config, "grads").fraction)
    if config.step_in_backward:
        core.pool_grads()
    if config.offload.delayed_update is not None:
        core.delay_steps()


def _uses_nvme(config: Config) -> bool:
    return any(tier_of(config, kind).kind == "nvme" for kind in ("params", "grads", "optimizer"))


def _quantised(model: nn.Module, config: Config) -> set[nn.Parameter]:
    """Return the parameters that are kept in fewer bits."""
    return set() if config.stored_name is None else weight_quant.matrices(model)


def _add_units(
    core: Any,
    model: nn.Module,
    plans: list[UnitPlan],
    config: Config,
    groups: list[Group],
    host_copy: bool,
    device: torch.device,
) -> None:
    quantised = _quantised(model, config)
    if config.stored_name is not None:
        in_memory = tier_of(config, "params").kind != "nvme"
        core.set_weight_quant(weight_quant.BITS[config.stored_name], weight_quant.BLOCK_ELEMS, in_memory)
    for index, plan in enumerate(plans):
        group = groups[plan.spread]
        place = _place(plan, config, group.comm, host_copy, device)
        shared = any(len(names) > 1 for names in plan.names)
        core.add_unit(
            plan.name, DTYPES.index(plan.dtype), [numbers(p) for p in plan.params], plan.trainable,
            not plan.trainable and not plan.stays_frozen, place,
            *(DTYPES.index(dtype) for dtype in config.gradient_dtypes(plan.dtype)), group.index, plan.held, shared,
            has_params_on_host(plan.on_host, config, device),
        )  # fmt: skip
        for number, parameter in enumerate(plan.params):
            if place == FILE and shown(parameter) in quantised:
                core.quantise_param(index, number)


def _prefetch_bytes(plans: list[UnitPlan], config: Config, comm: Any, host_copy: bool, device: torch.device) -> int:
    if config.prefetch != "auto":
        return int(config.prefetch)
    if device.type != "cpu":  # copy engines gather
        return READ_AHEAD_BYTES if config.stage == 3 else 0
    if loads_units(config):
        return read_ahead_bytes(plan.numel * plan.dtype.itemsize for plan in plans)
    if comm is None or host_copy or config.stage < 3:
        return 0
    # Between hosts gathers are collectives: every rank must go equally far ahead, whatever its host has to spare.
    return READ_AHEAD_BYTES if comm.hosts > 1 else _idle_core_prefetch()


def _idle_core_prefetch() -> int:
    """Return how far ahead to gather in a thread of its own: it pays only where a core is idle."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    return READ_AHEAD_BYTES if cores > ranks_here * torch.get_num_threads() else 0


def _place(plan: UnitPlan, config: Config, comm: Any, host_copy: bool, device: torch.device) -> int:
    small = plan.replicates(config.units)
    if loads_units(config):
        return WHOLE if small else FILE
    alone = comm is None and (device.type == "cpu" or shards_on_device(config, device))
    if has_params_on_host(plan.on_host, config, device):
        return SHARD
    if config.stage < 3 or alone:
        return WHOLE
    if host_copy:
        return HOST
    return WHOLE if small else SHARD


def _functions() -> dict[str, Any]:
    autograd = torch._C._autograd
    return {
        "current_graph_task_id": torch._C._current_graph_task_id,
        "current_node": torch._C._current_autograd_node,
        "is_grad_enabled": torch.is_grad_enabled,
        "queue_callback": torch.autograd.Variable._execution_engine.queue_callback,
        "functorch_peek": torch._C._functorch.peek_interpreter_stack,
        "top_saved_hooks": autograd._top_saved_tensors_default_hooks,
        "push_saved_hooks": autograd._push_saved_tensors_default_hooks,
        "pop_saved_hooks": autograd._pop_saved_tensors_default_hooks,
        "raise_strays": raise_strays,
    }


# -- stores and units --------------------------------------------------------------------------------------------------


def _make_stores(engine: Engine, model: nn.Module, plans: list[UnitPlan]) -> None:
    """Make the stores whose files are laid out by the core: parameters and gradients."""
    config = engine.config
    if not (loads_units(config) or _uses_nvme(config) or config.step_in_backward):
        return
    engine.storage = storage = FileStorage(engine, [index for index, plan in enumerate(plans) if plan.trainable])
    if loads_units(config):
        engine.params = _param_store(engine, model, storage)
    if tier_of(config, "grads").kind == "nvme":
        engine.grads = GradFile(engine, tier_of(config, "grads"))
        engine.local_grads = False


def _param_store(engine: Engine, model: nn.Module, storage: FileStorage) -> ParamFile:
    tier = tier_of(engine.config, "params")
    if engine.config.stored_name is None:
        return ParamFile(engine, tier, storage)
    return weight_quant.QuantisedParams(engine, tier, storage, _quantised(model, engine.config))


def _make_late_stores(engine: Engine, moments: tuple[str, ...]) -> None:
    """Make the stores that are laid out by the units."""
    states, activations = tier_of(engine.config, "optimizer"), tier_of(engine.config, "activations")
    if states.kind == "nvme":
        assert isinstance(engine.storage, FileStorage)
        engine.states = OptimFile(engine, states, moments, engine.storage)
    if engine.device.type == "cpu":
        if activations.kind == "nvme":
            engine.activations = ActivationFile(engine, activations)
    elif activations.kind != "device":
        there = DeviceActivationFile if activations.kind == "nvme" else PinnedActivations
        engine.activations = there(engine, activations)


def _bind(engine: Engine, index: int, plan: UnitPlan, group: Group) -> Unit:
    released = released_dtensors() if is_dtensor(plan.params[0]) else _RELEASED_CLASS
    core = engine.core.bind_unit(index, plan.params, plain_class(plan.params[0]), released[engine.stage])
    layout = core.layout()
    elems, shard_elems = layout["elems"], layout["shard_elems"]
    whole = tensor_over(engine.core, layout["whole"], elems, plan.dtype, engine.device)
    local = engine.local
    own = whole if local else tensor_over(engine.core, layout["shard"], shard_elems, plan.dtype, engine.shard_device)
    if layout["place"] == FILE:
        own = torch.empty_like(own, device="meta")
    entries = [
        Entry(names, p, offset, numbers(p), local_of(p).shape, p.is_complex(), _boxes(p))
        for names, p, offset in zip(plan.names, plan.params, layout["offsets"], strict=True)
    ]
    unit = Unit(
        index, plan.name, core, plan.dtype, engine.config.gradient_dtypes(plan.dtype)[0], plan.trainable, layout["place"],
        elems, shard_elems, entries, whole, own, 0 if local else group.rank * shard_elems,
        stays_frozen=plan.stays_frozen, comm=group.comm, rank=group.rank, ranks=group.ranks, members=group.members,
        divisor=group.divisor, local=local,
    )  # fmt: skip
    for i, entry in enumerate(entries):
        entry.param._zeropp = Ref(engine, unit, i, entry.names[0])  # type: ignore[attr-defined]
        entry.shown._zeropp = entry.param._zeropp  # type: ignore[attr-defined]
    return unit


def _mark_experts(model: nn.Module) -> None:
    """Note which parameters count experts in their first dimension, for messages: those of modules that have ``num_experts`` and a
    parameter of three dimensions with as many."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        counts = [p for p in own if p.ndim >= 2 and p.shape[0] == getattr(module, "num_experts", None)]
        for parameter in counts if any(p.ndim == 3 for p in counts) else ():
            ref = ref_of(parameter)
            if ref is not None:  # it is not ignored
                ref.unit.params[ref.index].of_experts = True


def _name_params(engine: Engine, unit: Unit) -> None:
    """Tell the core what errors of a unit's file call its parameters, and the number of the first expert here of those that have some."""
    for index, entry in enumerate(unit.params if unit.in_file else ()):
        first = entry.first_expert(engine.rank)
        row = 0 if first is None else entry.numel // entry.shape[0]
        engine.core.name_param(unit.index, index, entry.names[0], row, first or 0)


def _boxes(parameter: nn.Parameter) -> Boxes | None:
    return boxes_of_dtensor(parameter) if is_dtensor(parameter) else boxes_of(parameter)


# -- values ------------------------------------------------------------------------------------------------------------


def fill(engine: Engine, unit: Unit, updated: bool) -> None:
    """Move rank 0's values of one unit into its flat buffer; the parameters become views of it.

    What was built in shards comes from all ranks: into one copy of the host each writes its own, and nothing is gathered. Where each of
    several hosts has a copy, one rank of each writes it, parameter by parameter.

    Args:
        updated: True if there is an optimizer, which wants an fp32 master of what is in fewer bits.
    """
    masters = unit.trainable and has_master(unit.dtype, engine.config)
    finer = masters and any(e.param.dtype == torch.float32 for e in unit.params)
    full = torch.zeros(unit.elems, dtype=torch.float32, device="cpu") if finer else None
    unit.core.need()
    _fill_whole(engine, unit, full)
    moves = unit.place in (SHARD, FILE)
    if moves or engine.offloads:
        unit.core.keep_shard()
    if masters:
        _give_master(engine, unit, full, updated)
    if moves:
        unit.core.release()  # or the whole model would be in memory at once


def _fill_whole(engine: Engine, unit: Unit, full: torch.Tensor | None) -> None:
    """Fill the unit's flat buffer on all ranks, and ``full``, the same in fp32, on this one."""
    comm = unit.comm
    came_whole = not all(is_sharded(entry.param) or parts_of(entry.param) is not None for entry in unit.params)
    _meet(engine, unit)  # no rank reads from the file any more into what is filled now
    for entry in unit.params:
        _fill_entry(engine, unit, entry, full)
    if comm is not None and not unit.shared and came_whole:
        broadcast(comm, unit.whole)
    _meet(engine, unit)


def _meet(engine: Engine, unit: Unit) -> None:
    if engine.comm is not None and unit.in_file:
        engine.comm.barrier()


def _fill_entry(engine: Engine, unit: Unit, entry: Entry, full: torch.Tensor | None) -> None:
    parts = parts_of(entry.param)
    if parts is not None:
        _fill_part(engine, unit, entry, parts, full)
        return
    sharded = is_sharded(entry.param)
    copies = engine.comm is not None and engine.comm.hosts > 1 and unit.shared  # each host has one
    view = entry.of(unit.whole[entry.offset_elems : entry.offset_elems + entry.numel])
    if sharded and unit.shared and full is None and not copies:
        copy_own_part(entry.param, view.view(-1))
    else:
        _copy_values(engine, unit, entry, _values_of(engine, entry, sharded, copies), full)
    place(entry.param, view)
    if sharded:
        become_plain(entry.param)
        drop_shard(entry.param)


def _fill_part(engine: Engine, unit: Unit, entry: Entry, parts: Parts, full: torch.Tensor | None) -> None:
    """Take this rank's part of rank 0's values, or of what was built in shards; the rest of them is freed."""
    if is_sharded(entry.shown):
        values = materialise(entry.shown)
    else:
        values = entry.shown.data.contiguous()
        broadcast(engine.comm, values)
    _copy_values(engine, unit, entry, parts.take(values), full)
    entry.param.data = entry.of(unit.whole[entry.offset_elems : entry.offset_elems + entry.numel])
    without_values(entry.shown)
    drop_shard(entry.shown)


def _values_of(engine: Engine, entry: Entry, sharded: bool, copies: bool) -> torch.Tensor:
    """Return the values of a parameter; where each host has a copy, rank 0's."""
    if sharded:
        return materialise(entry.param)
    own = local_of(entry.param.data)
    if not copies or not own.numel():
        return own
    values = own.contiguous()
    broadcast(engine.comm, values)
    return values


def _copy_values(engine: Engine, unit: Unit, entry: Entry, values: torch.Tensor, full: torch.Tensor | None) -> None:
    place = slice(entry.offset_elems, entry.offset_elems + entry.numel)
    if not unit.shared or unit.params_in.writes(unit.rank):
        entry.of(unit.whole[place]).copy_(values)
    if full is not None:
        entry.of(full[place]).copy_(values)


def _give_master(engine: Engine, unit: Unit, full: torch.Tensor | None, updated: bool) -> None:
    """Make the fp32 shard that the optimizer updates, exact where the model came in fp32; or let it wait for an optimizer."""
    if not updated and full is None and not (unit.states_in.in_file or unit.in_file):
        unit.master_waits = True
        return
    comm = unit.comm
    if comm is not None and full is None:
        comm.barrier()  # one shared copy: rank 0 must have filled it
    elif comm is not None and full is not None and parts_of(unit.params[0].param) is None:
        broadcast(comm, full)
    values = unit.whole if full is None else full
    unit.states_in.keep_master(unit, values[unit.begin_elems : unit.begin_elems + unit.shard.numel()].to(unit.device))
