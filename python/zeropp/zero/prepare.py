# SPDX-License-Identifier: Apache-2.0
"""``zeropp.prepare``: from a plain model and optimizer to a partitioned one, the same objects."""

from __future__ import annotations

import functools
import importlib
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropp import _C, compat
from zeropp.comm import job
from zeropp.comm.collective import in_the_whole_job
from zeropp.compat import Named
from zeropp.config import TORCH_DTYPES, Config, as_config, facts_of, with_tiers
from zeropp.config.experts import with_sharers
from zeropp.efficiency import attach as efficiency
from zeropp.errors import CommError, ConfigError, what_it_is
from zeropp.files.heap_trim import give_back
from zeropp.health import preflight
from zeropp.health.first_use import require_healthy
from zeropp.parallel.mesh import is_pipelined, places_in_pipeline, ranks_along, ranks_of, tensor_mesh
from zeropp.zero.build import fill, make_engine
from zeropp.zero.device_plan import require_host_memory
from zeropp.zero.engine import Engine, engine_of, register
from zeropp.zero.formulas import shares_host_copy
from zeropp.zero.model import buffers, dtensor, meta, tied
from zeropp.zero.model.accelerator import (
    check_accelerator,
    check_experts,
    check_parameter_device,
    device_of,
)
from zeropp.zero.model.forward import AutocastCall, cast_inputs, install_triggers
from zeropp.zero.model.gpus import bring, refuse_shared, require_gpu
from zeropp.zero.model.init import data_sharers, is_sharded, share_among
from zeropp.zero.model.parameter import engines, is_dtensor, raise_strays, ref_of
from zeropp.zero.model.part import Division
from zeropp.zero.model.same import check_same_config, check_same_lines, check_same_model, gather_bytes
from zeropp.zero.model.spread import Spread, check_spreads, mark_plans, mark_tiers, modules_of, spreads_of
from zeropp.zero.model.units import UnitPlan, entries_of, ignored_parameters, plan_units, refuse_lazy
from zeropp.zero.model_state import DTYPES
from zeropp.zero.step import custom
from zeropp.zero.step.optimizer import adopt, check_optimizer
from zeropp.zero.step.updates import moments_of
from zeropp.zero.unfreeze import facts_of_parameter, hook_unit, why_frozen

if TYPE_CHECKING:
    from torch.optim import Optimizer

M = TypeVar("M", bound=nn.Module)


def prepare(
    model: M,
    optimizer: Optimizer | None = None,
    config: Config | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    data_dims: Sequence[str] | None = None,
) -> tuple[M, Any]:
    """Partition a model and its optimizer over the ranks, in place (ZeRO, Rajbhandari et al. 2020).

    Args:
        model: any module; rank 0's values are taken on every rank. Stays the same object. One that was prepared without
            an optimizer (to evaluate first) takes one now; its own config stays. What is on the meta device draws its
            values here, shard by shard, by its modules' ``reset_parameters()`` and its models' ``_init_weights(module)``;
            so build on meta what is loaded next (``zeropp.load``, ``load_full_state_dict``).
        optimizer: built from ``model.parameters()``; stays the same object. None: a model that is only evaluated, or
            only gives gradients.
        config: a :class:`zeropp.Config`, or what ``Config.from_json`` reads: a dict of its fields or of DeepSpeed's keys, JSON text, or a
            path; default stage 3.
        mesh: all ranks of the job, with names: the model is partitioned over the data dimensions (dp, dp_replicate, dp_shard, fsdp,
            data_parallel, cp, sp), and ranks that differ in others (tp, tensor_parallel, pp) hold different parameters. Norm,
            finite check and loss scale are those of the whole mesh. None: all ranks hold the same model.
        data_dims: the data dimensions of ``mesh``, in place of those names.

    Returns:
        ``(model, optimizer)``, the objects given.

    Raises:
        zeropp.ConfigError: what cannot work, named: no parameters, parameters on meta without a way to draw them, models that
            differ between ranks, an optimizer that lacks parameters, ...
        zeropp.CommError: a rank died or did not come.
    """
    config = with_sharers(as_config(config, "prepare"), mesh, "prepare")
    ranks = None if mesh is None and data_dims is None else ranks_of(mesh, data_dims, "prepare")
    cut_over = None if mesh is None else tensor_mesh(mesh)
    if mesh is None or ranks is None or not is_pipelined(mesh):
        return prepare_over(ranks, model, optimizer, config, cut_over=cut_over)
    _check_arguments(model, optimizer)
    CommError._places.update(places_in_pipeline(mesh))
    ties = tied.find_ties(model, ranks, mesh.get_local_rank("pp"), ranks_along(mesh, ("pp",)))
    prepared = prepare_over(ranks, model, optimizer, config, cut_over=cut_over, ties=ties)
    engine_of(model).core.require_pass()
    return prepared


def prepare_over(
    ranks: job.JobRanks | None, model: M, optimizer: Optimizer | None, config: Any, spreads: Sequence[Spread] = (),
    cut_over: DeviceMesh | None = None, ties: Sequence[tied.Tie] = (),
) -> tuple[M, Any]:  # fmt: skip
    """Do as :func:`prepare`, with the ranks that the caller names; None: those of the default group, all of them data ranks.

    Ranks with other data ranks may prepare other models, such as the stages of a pipeline: units are partitioned and gradients averaged
    over ``ranks.data``; norm, clipping, loss scale, skipped steps and votes are those of all of ``ranks.job``.
    ``spreads``: modules whose parameters differ between data ranks, such as experts (spread.py). ``cut_over``: the ranks that
    may hold slices of one parameter, as DTensors; plain parameters are equal on all of them. ``ties``: parameters that other stages
    of a pipeline hold as well.
    """
    _check_arguments(model, optimizer)
    raise_strays()
    if optimizer is not None and is_prepared(model):
        _attach_first(model, optimizer)
        return model, optimizer
    config = as_config(config, "prepare")
    device = device_of(model, config)
    mistake = _mistake_of(model, config, device)
    ranks = job.world() if ranks is None else ranks
    comm = ranks.data
    count = 1 if comm is None else comm.ranks
    _check_ranks(ranks, config, optimizer, device, mistake)
    share_among(model.named_parameters(), data_sharers(ranks))
    mesh = dtensor.mesh_of(model.named_parameters(), ranks) or cut_over
    division = _divide(model, config, ranks)
    if division is not None:
        check_experts(config, device, count)
        spreads = [*spreads, *spreads_of(division)]
    config = with_tiers(config)
    plans = in_the_whole_job(ranks.job, lambda: _plan(model, optimizer, config, ranks, division, spreads, ties))
    require_host_memory(plans, config, device, comm)
    dtensor.check_copies(plans, mesh)
    meta.give_values(model, getattr(config.offload.params, "path", None), ranks)
    bring(model, device, set(ignored_parameters(model, config.ignored)), getattr(division, "parts", {}).values())
    host_copy = _has_host_copy(config, comm, device)
    engine = make_engine(model, plans, config, ranks, host_copy, moments_of(optimizer), device, spreads)
    engine.ties = tied.Ties(engine, ties)
    for unit in engine.units:
        fill(engine, unit, optimizer is not None)
    dtensor.note_copies(engine.units, mesh)
    _share_buffers(model, engine, optimizer is not None or bool(engine.trained))
    engine.core.publish()
    if comm is not None:
        comm.barrier()
    _install(model, engine, plans)
    if division is not None:
        division.install(engine)
    if optimizer is not None:
        adopt(optimizer, engine)
    register(model, engine)
    _watch(model)
    engine.core.release_all()
    give_back()  # malloc would keep the memory of the parameters whose values were copied
    return model, optimizer


def _has_host_copy(config: Config, comm: Any, device: torch.device) -> bool:
    """Return whether the ranks of a host share one copy of the parameters, in memory of the CPU."""
    return device.type == "cpu" and comm is not None and shares_host_copy(config, comm.ranks, comm.hosts)


def _divide(model: nn.Module, config: Config, ranks: job.JobRanks) -> Division | None:
    """Return how ``Config.experts`` divides a model's experts; few models have any, so what knows them is loaded here."""
    if config.experts is None:
        return None
    compat.check({**facts_of(config), **_job_facts(ranks, ())})  # before ranks meet that may not
    module = importlib.import_module("zeropp.moe.division")
    found: Division | None = in_the_whole_job(ranks.job, lambda: module.divide(model, config, ranks))
    return found


def _param_dtype(config: Config) -> torch.dtype | None:
    """Return the type that parameters are converted to; None: they stay as they are."""
    return None if config.dtype_name is None else TORCH_DTYPES[config.dtype_name]


def _plan(
    model: nn.Module,
    optimizer: Optimizer | None,
    config: Config,
    ranks: job.JobRanks,
    division: Division | None,
    spreads: Sequence[Spread],
    ties: Sequence[tied.Tie],
) -> list[UnitPlan]:
    """Return the units of a model; raise zeropp.ConfigError where they do not go with the options, or differ between ranks."""
    comm = ranks.data
    facts = {**facts_of(config), **_host_facts(config, comm), **_job_facts(ranks, spreads)}
    compat.check(facts)
    efficiency.check(model, config)
    meta.check_draws(model)
    check_spreads(spreads, model, comm)
    parts, apart = (None, []) if division is None else (division.parts, division.apart)
    apart = [*modules_of(spreads), *apart]
    alone = [tie.param for tie in ties]
    plans = plan_units(model, config.units, _param_dtype(config), config.ignored, parts, apart, alone)
    mark_plans(plans, spreads)
    mark_tiers(plans, division)
    tied.mark_plans(plans, ties)
    facts |= _cut_facts(plans)
    compat.check(facts)
    _check_plans(plans, facts)
    if config.stored_name is not None and optimizer is None:
        for plan in plans:
            plan.trainable = False
    if optimizer is not None:
        check_optimizer(optimizer, plans)
        facts |= custom.facts_of(optimizer)
        compat.check(facts)
    _check_trained(plans, facts, torch.float64)
    trains = optimizer is not None or any(plan.trainable for plan in plans)
    for plan in plans:
        plan.stays_frozen = "" if plan.trainable else why_frozen(plan, config, trains)
    if comm is not None:
        check_same_model(comm, plans)
        check_same_lines(comm, buffers.descriptions(model), "buffer")
    return plans


def _share_buffers(model: nn.Module, engine: Engine, trains: bool) -> None:
    """Give all ranks rank 0's buffers, now and, where the configuration says so, in every pass that trains."""
    buffers.hand_over(model, engine.comm)
    if engine.comm is not None and trains:
        if engine.config.sync_buffers:
            buffers.follow(model, engine.core)
        buffers.explain_sync_batch_norm(model)


def _install(model: nn.Module, engine: Engine, plans: list[UnitPlan]) -> None:
    """Install all hooks: triggers of units, what surrounds the model's forward, and those of gradients."""
    config, param_dtype = engine.config, _param_dtype(engine.config)
    install_triggers(model, engine, plans)
    engine.activations.install(model)
    if config.autocast_name is not None:
        for entry in entries_of(model):
            entry._compiled_call_impl = AutocastCall(entry, TORCH_DTYPES[config.autocast_name])
    for unit in engine.trained:
        hook_unit(engine, unit)
    for entry in entries_of(model) if any(is_dtensor(plan.params[0]) for plan in plans) else []:
        entry.register_forward_hook(engine.hook_order)
    engine.params.refuse_training(model)
    efficiency.attach(model, engine)
    for entry in entries_of(model) if param_dtype is not None else []:
        entry.register_forward_pre_hook(functools.partial(cast_inputs, param_dtype), with_kwargs=True, prepend=True)


def is_prepared(model: nn.Module) -> bool:
    """True if this very model was given to :func:`prepare`."""
    return isinstance(model, nn.Module) and model in engines


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let another method of a prepared model, or of one of its modules, be called as ``forward`` is, such as
    ``generate_features``.

    Inside it parameters that belong to the module itself may be read. (Submodules that it calls need nothing.)

    Raises:
        zeropp.ConfigError: the module is not of a prepared model, or has no such method.
    """
    engine = engine_of(module)
    method = getattr(module, name, None)
    if not callable(method):
        raise ConfigError(f"register_forward_method: {type(module).__name__} has no method '{name}'")
    if not isinstance(method, _C.Trigger):
        module.__dict__[name] = _C.Trigger(engine.core, (), method, None)


def attach(model: nn.Module, optimizer: Optimizer) -> None:
    """Give a prepared model an optimizer, in place of the one it may have: that one's state is gone, and it steps no
    more.

    Frameworks make a new optimizer for each of their runs.
    """
    engine = engine_of(model)
    check_accelerator(engine.config, engine.device, None)
    plans = [
        UnitPlan(u.name, [e.param for e in u.params], [e.names for e in u.params], [], u.dtype, u.trainable)
        for u in engine.units
    ]
    check_optimizer(optimizer, plans)
    facts = {**facts_of(engine.config), **custom.facts_of(optimizer)}
    _check_trained(plans, facts, torch.float64)
    replaces = any(unit.steps is not None for unit in engine.units)
    compat.check({**facts, compat.ANOTHER: Named(True, compat.ANOTHER)} if replaces else facts)
    engine.states.check_capacity(optimizer, moments_of(optimizer))
    engine.flush()
    for unit in engine.units:
        unit.state.clear()
        unit.scales.clear()
        unit.grad_pool.clear()
        unit.bound = ()
    engine.clear_gradients()
    adopt(optimizer, engine)


# -- checks ----------------------------------------------------------------------------------------------------------------


def _check_arguments(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"prepare: model is {what_it_is(model)}; wanted a torch.nn.Module")
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return
    if isinstance(optimizer, (Config, Mapping, os.PathLike)):
        raise ConfigError(
            f"prepare: optimizer is {what_it_is(optimizer)}; wanted a torch optimizer or None: the configuration is the third argument, "
            "as in zeropp.prepare(model, optimizer, config)"
        )
    raise ConfigError(
        f"prepare: optimizer is {what_it_is(optimizer)}; wanted a torch.optim.Optimizer, such as "
        "torch.optim.AdamW(model.parameters(), lr=3e-4), or None"
    )


def _mistake_of(model: nn.Module, config: Config, device: torch.device) -> ConfigError | None:
    """Return what this rank cannot train: all ranks have to hear of it, because the others would wait for this one."""
    try:
        require_gpu(device, kernels=True)
        require_healthy(device)
        _check_model(model, config, device)
    except ConfigError as error:
        return error
    return None


def _check_ranks(
    ranks: job.JobRanks, config: Config, optimizer: Optimizer | None, device: torch.device, mistake: ConfigError | None
) -> None:
    if ranks.all is not None:
        check_same_config(ranks.all, config, optimizer, device, mistake)
    elif mistake is not None:
        raise mistake
    # one stage may be on several hosts, and another on one
    in_the_whole_job(ranks.job, lambda: check_accelerator(config, device, ranks, optimizer is not None))
    refuse_shared(device, ranks.all, config.device is not None)
    if ranks.all is not None and config.preflight:
        preflight()


def _host_facts(config: Config, comm: Any) -> dict[str, Any]:
    """Return how many ranks and hosts there are. Collective."""
    if comm is None:
        return {"ranks": Named(1, "one rank"), "hosts": Named(1, "one host")}
    facts = {"ranks": Named(comm.ranks, f"{comm.ranks} ranks"), "hosts": Named(comm.hosts, f"{comm.hosts} hosts")}
    if config.comm.secondary_shard and comm.hosts > 1:
        counts = [int.from_bytes(b, "little") for b in gather_bytes(comm, len(comm.host_ranks).to_bytes(8, "little"))]
        least, most = min(counts), max(counts)
        facts["ranks of a host"] = Named((least, most), f"{least} ranks on one host and {most} on another")
    return facts


def _attach_first(model: nn.Module, optimizer: Optimizer) -> None:
    if engine_of(model).optimizer_ref is not None:
        raise ConfigError("prepare: the model was prepared with an optimizer already; prepare each model once")
    attach(model, optimizer)


def _cut_facts(plans: list[UnitPlan]) -> dict[str, Any]:
    """Return whether parameters are DTensors."""
    cut = any(is_dtensor(plan.params[0]) for plan in plans)
    return {compat.CUT: Named(True, compat.CUT)} if cut else {}


def _job_facts(ranks: job.JobRanks, spreads: Sequence[Spread]) -> dict[str, Any]:
    """Return whether only some ranks of the job partition the model, or some of its modules."""
    every = None if ranks.job is None else ranks.job.ranks
    facts = {} if every is None else {compat.JOB: Named(every, f"a model on some of {every} ranks")}
    if every is not None and every != ranks.stages * (1 if ranks.data is None else ranks.data.ranks):
        facts[compat.IN_STAGE] = Named(every, f"a model on some of {every // ranks.stages} ranks")
    apart = next((s for s in spreads if s.parts > 1), None)
    return (
        facts if apart is None else {**facts, compat.SPREAD: Named(apart.parts, f"{apart.name} in {apart.parts} parts")}
    )


def _check_model(model: nn.Module, config: Config, device: torch.device) -> None:
    refuse_lazy(model, "prepare")
    ignored = ignored_parameters(model, config.ignored)
    for parameter, name in ignored.items():
        if is_sharded(parameter) or parameter.is_meta:
            raise ConfigError(
                f"prepare: parameter '{name}' is ignored, and {'built in shards' if is_sharded(parameter) else 'on meta'}: nothing would "
                "give it values; build its module plainly, or do not ignore it"
            )
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter not in ignored]
    if not named and ignored:
        raise ConfigError("prepare: every parameter is ignored, so there is nothing to partition")
    if not named:
        raise ConfigError(f"prepare: {type(model).__name__} has no parameters, so there is nothing to partition")
    for name, parameter in named:
        _check_parameter(name, parameter)
        check_parameter_device(name, parameter, device)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if ref_of(parameter) is not None:
        raise ConfigError(f"prepare: parameter '{name}' belongs to a prepared model already; prepare each model once")
    if type(parameter) is not nn.Parameter and not is_sharded(parameter) and not is_dtensor(parameter):
        raise ConfigError(
            f"prepare: parameter '{name}' is a {type(parameter).__name__}, a class of its own, which is not supported; wanted "
            "a plain torch.nn.Parameter, or a DTensor"
        )


def _check_plans(plans: list[UnitPlan], facts: compat.Facts) -> None:
    for plan in plans:
        if plan.dtype not in DTYPES:
            raise ConfigError(
                f"prepare: parameter '{plan.names[0][0]}' has dtype {plan.dtype}, which is not supported; convert it"
            )
        if is_dtensor(plan.params[0]) and plan.params[0].dtype != plan.dtype:
            raise ConfigError(
                f"prepare: parameter '{plan.names[0][0]}' is a DTensor of {plan.params[0].dtype}, and Config.precision wants {plan.dtype}; "
                f"convert the model (model.to({plan.dtype})) before it is cut"
            )
        if plan.trainable and plan.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise ConfigError(
                f"prepare: trainable parameter '{plan.names[0][0]}' has dtype {plan.dtype}; wanted float32, bfloat16, float16 or "
                "float64, so pass Config(precision='bf16') or convert the model"
            )
    _check_trained(plans, facts, torch.float16)


def _check_trained(plans: list[UnitPlan], facts: compat.Facts, dtype: torch.dtype) -> None:
    """Refuse what does not combine with parameters that are trained in `dtype`."""
    name = next((plan.names[0][0] for plan in plans if plan.trainable and plan.dtype == dtype), None)
    if name is not None:
        compat.check({**facts, **facts_of_parameter(name, dtype)})


# -- parameters that come too late ------------------------------------------------------------------------------------------

_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _refuse_late(module: nn.Module, name: str, added: Any) -> None:
    if module not in _watched or added is None:
        return
    if isinstance(added, nn.Module):
        late = next((n for n, p in added.named_parameters() if ref_of(p) is None), None)
        if late is None:
            return
        name = f"{name}.{late}"
    elif ref_of(added) is not None:
        return
    raise ConfigError(
        f"parameter '{name}' was added to {type(module).__name__} after zeropp.prepare, and would be neither partitioned nor trained; "
        "add it before prepare"
    )


@functools.cache
def _install_watch() -> None:
    nn.modules.module.register_module_parameter_registration_hook(_refuse_late)
    nn.modules.module.register_module_module_registration_hook(_refuse_late)


def _watch(model: nn.Module) -> None:
    _install_watch()
    _watched.update(model.modules())
