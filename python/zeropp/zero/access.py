# SPDX-License-Identifier: Apache-2.0
"""Whole values for a while, and what is held and moved: ``gathered``, ``no_sync``, ``memory``, ``traffic``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zeropp.errors import ConfigError, PartitionedParameterError
from zeropp.zero.engine import FILE, SHARD, Engine, Unit, engine_of
from zeropp.zero.memory_plan import delayed_bytes, shares_in_file
from zeropp.zero.model.init import is_sharded, whole_built
from zeropp.zero.model.parameter import ref_of
from zeropp.zero.model.strays import raise_strays
from zeropp.zero.offload import stored
from zeropp.zero.offload.storage import disk_traffic
from zeropp.zero.offload.tier_buffers import Slice, tier_buffers
from zeropp.zero.step.low_states import elem_bytes


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Backwards inside accumulate on this rank without communication, in every stage.

    The first backward outside reduces the sum. The price: whole gradients on every rank while they wait (2 or 4 bytes a
    parameter, instead of 1/N of it).
    """
    return engine_of(model).no_sync()


def _selected(what: Any) -> list[nn.Parameter]:
    if isinstance(what, nn.Module):
        return list(what.parameters())
    if isinstance(what, torch.Tensor):
        what = [what]
    return [p for item in what for p in (item.parameters() if isinstance(item, nn.Module) else [item])]


def _units_of(params: list[nn.Parameter]) -> list[Unit]:
    units: dict[int, Unit] = {}
    for parameter in params:
        ref = ref_of(parameter)
        if ref is not None:
            units.setdefault(id(ref.unit), ref.unit)
    return sorted(units.values(), key=lambda unit: unit.index)  # gathers are collective: one order on every rank


@contextlib.contextmanager
def gathered(
    params: nn.Module | Iterable[Any] | torch.Tensor, write: bool = False, grads: bool = False
) -> Iterator[None]:
    """Whole values inside the block, on every rank.

    Args:
        params: a module, a parameter, or any of them in a list. Those that are not partitioned are left alone. What was
            built inside :func:`zeropp.sharded_init` and is not prepared yet is gathered too.
        write: rank 0's changes are kept, on every rank and in the fp32 master; collective. Otherwise changes are an error
            (where ranks share one copy) or are lost.
        grads: ``p.grad`` shows the whole averaged gradient inside the block; collective.

    Cost: one gather of each unit concerned, N-1/N of its bytes; nothing where ranks of one host share a copy.
    """
    raise_strays()
    selected = _selected(params)
    units = _units_of(selected)
    engine = ref_of(units[0].params[0].param).engine if units else None  # type: ignore[union-attr]
    with contextlib.ExitStack() as stack:
        if any(map(is_sharded, selected)):
            stack.enter_context(whole_built(selected, write))
        if engine is None:
            yield
            return
        if write:
            engine.flush()
            if engine.stored is not None:
                stored.refuse("zeropp.gathered(..., write=True) was called", engine.stored)
        for unit in units:
            stack.enter_context(_whole(unit))
        if write:
            stack.enter_context(_written(engine, units))
        else:
            stack.enter_context(_unchanged(engine, units))
        if grads:
            stack.enter_context(_gradients(engine, units))
        yield


@contextlib.contextmanager
def _whole(unit: Unit) -> Iterator[None]:
    unit.core.need()
    unit.core.pin(1)
    try:
        yield
    finally:
        unit.core.pin(-1)
        unit.core.release()


@contextlib.contextmanager
def _unchanged(engine: Engine, units: list[Unit]) -> Iterator[None]:
    """One shared copy must not be written by every rank: notice it by torch's version counters."""
    shared = [e for u in units if u.shared for e in u.params]
    before = [e.param._version for e in shared]
    yield
    for entry, version in zip(shared, before, strict=True):
        if entry.param._version != version:
            raise PartitionedParameterError(
                f"parameter '{entry.names[0]}' was changed inside zeropp.gathered(...); pass write=True, which keeps rank 0's values"
            )


@contextlib.contextmanager
def _written(engine: Engine, units: list[Unit]) -> Iterator[None]:
    """Rank 0 writes; the others change a copy of their own, which is dropped."""
    private = []
    for unit in units:
        if unit.shared and engine.rank:
            private += [(e.param, e.param.data) for e in unit.params]
    for parameter, _ in private:
        parameter.data = parameter.data.clone()
    engine.core.step_begin(0)
    try:
        yield
    finally:
        for parameter, shared in private:
            parameter.data = shared
        try:
            _spread(engine, units)
        finally:
            engine.core.step_end()


def _spread(engine: Engine, units: list[Unit]) -> None:
    for unit in units:
        if engine.comm is not None and not unit.shared:
            engine.comm.broadcast(unit.whole.data_ptr(), unit.whole.numel() * unit.whole.element_size(), 0)
    if engine.comm is not None:
        engine.comm.barrier()
    for unit in units:
        if unit.place in (SHARD, FILE):
            unit.core.keep_shard()
        if unit.has_master:
            _refresh_master(unit)


def _refresh_master(unit: Unit) -> None:
    """Only what changed: the master has bits that the low-precision copy has not."""

    def change(first: int, master: torch.Tensor) -> bool:
        begin = unit.begin_elems + first
        own = unit.whole[begin : begin + master.numel()]
        changed = master.to(own.dtype) != own
        master[changed] = own[changed].float()
        return bool(changed.any())

    unit.update_master(change)


@contextlib.contextmanager
def _gradients(engine: Engine, units: list[Unit]) -> Iterator[None]:
    shown = []
    for unit in units:
        if not unit.trainable:
            continue
        for entry, gradient in zip(unit.params, engine.whole_gradients(unit), strict=True):
            shown.append((entry.param, entry.param.grad))
            entry.param.grad = gradient
    try:
        yield
    finally:
        for parameter, before in shown:
            parameter.grad = before


# -- what is held --------------------------------------------------------------------------------------------------------------


def _planned(engine: Engine) -> dict[str, int]:
    """The paper's formulas for this rank, in bytes: 2 or 4 a parameter, the same a gradient, K = 12 (8 without a master)."""
    n, stage = engine.ranks, engine.stage
    kinds = {"params": 0.0, "grads": 0.0, "master": 0.0, "optimizer": 0.0}
    for unit in engine.units:
        numel = sum(e.numel for e in unit.params)
        bytes_ = numel * unit.dtype.itemsize
        kinds["params"] += bytes_ / (n if stage == 3 else 1)
        if engine.sharers and unit.place == SHARD:
            kinds["params"] += bytes_ / engine.sharers
        if not unit.trainable:
            continue
        kinds["grads"] += numel * unit.grad_dtype.itemsize / (n if stage >= 2 else 1)
        delayed = engine.delayed is not None and unit.dtype == torch.float32
        kinds["master"] += 4 * numel / (n if stage >= 1 else 1) if unit.has_master and not delayed else 0
        held = unit.state if engine.away is None else engine.away.state_of(unit.index)
        states = len(held)
        if engine.inner is None and (engine.onebit is None or not states):
            states = max(engine.least_states, len(held))
        if unit.tiered is not None:
            states = max(engine.least_states, len(unit.tiered.kinds))
        state_bytes = elem_bytes(unit.state_kind) if unit.state_kind != "fp32" else unit.state_dtype.itemsize
        kinds["optimizer"] += state_bytes * states * numel / (n if stage >= 1 else 1)
    if engine.onebit is not None:
        kinds["optimizer"] += engine.onebit.planned_bytes()
    grad_pool = engine.backward_step is not None and engine.grads_tier is None  # those of two units at a time
    if grad_pool and (stage >= 2 or n == 1):
        sizes = [sum(e.numel for e in u.params) * u.grad_dtype.itemsize / n for u in engine.units if u.trainable]
        kinds["grads"] = sum(sorted(sizes)[-2:])
    return {kind: round(value) for kind, value in kinds.items()}


def _planned_delayed(engine: Engine) -> tuple[int, int]:
    """As zeropp.zero.memory_plan says it beforehand, of the parameters alone: without what rounds shards up."""
    units, ranks = engine.units, engine.ranks
    own = [sum(e.numel for e in unit.params) / ranks if unit.trainable else 0.0 for unit in units]
    sizes = [0 if unit.filed is None else unit.elems * unit.dtype.itemsize for unit in units]
    held, filed = delayed_bytes(
        [numel * unit.dtype.itemsize for numel, unit in zip(own, units, strict=True)],
        shares_in_file(sizes, 0.0 if engine.params_tier is None else engine.params_tier.fraction),
        [numel * unit.grad_dtype.itemsize for numel, unit in zip(own, units, strict=True)],
        0.0 if engine.grads_tier is None else engine.grads_tier.fraction, ranks,
    )  # fmt: skip
    return held, round(sum(filed.values()))


def _planned_buffers(engine: Engine) -> int:
    """As zeropp.zero.memory_plan says it beforehand."""
    if engine.optimizer_ref is None:  # nothing is stepped
        return 0
    shards = [
        Slice(u.shard.numel(), u.dtype.itemsize, u.grad_dtype.itemsize, u.has_master, u.filed is not None)
        for u in engine.units
        if u.trainable
    ]
    moments = engine.least_states if engine.states is None else sum(map(bool, engine.states.kinds[1:]))
    return tier_buffers(shards, engine.config.offload, moments, inside=engine.config.step_in_backward)


def _held(engine: Engine) -> dict[str, int]:
    core = engine.core.memory()
    in_memory = [unit for unit in engine.units if unit.tiered is None and engine.away is None]
    tensors = [t for u in in_memory for name, t in engine.optimizer_state(u).items() if name != "step"]
    tensors += [t for u in in_memory for t in u.scales.values()]
    gradients = core["grads"]
    if engine.ranks == 1 and engine.local_grads:
        with torch._C.DisableTorchFunctionSubclass():
            found = [e.param.grad for u in engine.units for e in u.params]
        gradients = sum(g.numel() * g.element_size() for g in found if g is not None)
    return {
        "params": core["params"],
        "grads": gradients,
        "master": sum(
            u.master.numel() * 4
            for u in in_memory
            if u.master is not None and (engine.delayed is None or u.dtype != torch.float32)
        ),
        "optimizer": sum(t.numel() * t.element_size() for t in tensors)
        + (0 if engine.onebit is None else engine.onebit.held_bytes()),
        **({} if engine.delayed is None else {"delayed": engine.delayed.figures()["held_bytes"]}),
        **({} if engine.onebit is None else {"scratch": engine.onebit.scratch_bytes()}),
        "gathered": core["gathered"],
        "buckets": core["buckets"],
        "buckets_peak": core["buckets_peak"],
    }


def _tiered(engine: Engine) -> tuple[dict[str, int], dict[str, int]]:
    """(held in memory, held in the file) of the states that live in a tier. Moments count once they exist."""
    assert engine.states is not None
    seen = engine.states.figures()
    stepped = any(unit.tiered is not None and unit.tiered.kinds for unit in engine.units)

    def by_kind(sizes: dict[str, int]) -> dict[str, int]:
        moments = sum(size for kind, size in sizes.items() if kind != "master")
        return {"master": sizes["master"], "optimizer": moments if stepped else 0}

    return {**by_kind(seen["held"]), "tier_buffers": seen["buffer_bytes"]}, by_kind(seen["file"])


def memory(model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Bytes of model states on this rank: ``{"cpu": {kind: {"planned": bytes, "held": bytes}}, "parameters": n, ...}``;
    with states or parameters offloaded also ``"nvme"``, the same of the scratch files.

    Kinds: ``params``, ``grads``, ``master`` (fp32 copy), ``optimizer``; and what comes and goes, held only: ``gathered`` (units
    whole now), ``buckets`` (memory of gradients on their way; it stays for the next ones; ``buckets_peak``: the most that were under
    way at once), ``tier_buffers`` (what an offloaded step streams through, planned, too), ``activations``
    (on their way to the disk or back, and there), ``scratch`` (of the steps of LAMB and the one-bit optimizers), ``delayed`` (values
    and gradients of an update that runs beside the next pass; planned, too), ``checksums`` (of files), ``away`` (states that
    :func:`zeropp.offload_states` put on the disk for a while).
    ``bytes_per_parameter`` compares the sum over the tiers with the paper's formula.
    """
    engine = engine_of(model)
    if optimizer is not None and getattr(optimizer, "_engine", None) is not engine:
        raise ConfigError("zeropp.memory: the optimizer belongs to another model")
    planned, held = _planned(engine), _held(engine)
    parameters = sum(e.numel for u in engine.units for e in u.params)
    states = ("params", "grads", "master", "optimizer")
    total = {"planned": sum(planned[k] for k in states), "held": sum(held[k] for k in states)}
    nvme: dict[str, dict[str, int]] = {}
    if engine.params_tier is not None:
        tier = engine.params_tier
        filed, images = (size // tier.ranks for size in (tier.bytes_in_file(engine.units), tier.images_held_bytes()))
        total["held"] += filed + images
        own = sum(e.numel * u.dtype.itemsize for u in engine.units if u.filed for e in u.params) / engine.ranks
        in_memory, in_file = tier.planned_bytes(engine.units)
        planned["params"] += round(in_memory / tier.ranks - own)
        held["params"] += images
        if not tier.in_memory:
            nvme["params"] = {"planned": round(in_file / tier.ranks), "held": filed}
        seen = tier.figures()
        held["tier_buffers"] = seen["window_bytes"] + seen["staging_bytes"]
    if engine.states is not None:
        streamed, in_files = _tiered(engine)
        streamed["tier_buffers"] += held.get("tier_buffers", 0)
        total["held"] += sum(v for k, v in streamed.items() if k in states) + sum(in_files.values())
        held = {**held, **streamed}
        for kind, value in in_files.items():
            share = round(planned[kind] * engine.states.fraction)
            nvme[kind] = {"planned": share, "held": value}
            planned[kind] -= share
    if engine.grads_tier is not None:
        seen = engine.grads_tier.figures()
        filed = engine.grads_tier.bytes_in_file(engine.units)
        share = round(planned["grads"] * engine.grads_tier.fraction)
        nvme["grads"] = {"planned": share, "held": filed}
        planned["grads"] -= share
        total["held"] += filed
        held["tier_buffers"] = held.get("tier_buffers", 0) + seen["window_bytes"] + seen["memory_bytes"]
    if "tier_buffers" in held:
        planned["tier_buffers"] = _planned_buffers(engine)
    if engine.delayed is not None:
        planned["delayed"], share = _planned_delayed(engine)
        if share:
            nvme["delayed"] = {"planned": share, "held": engine.delayed.bytes_in_files(engine)}
    if engine.activations is not None:
        seen = engine.activations.figures()
        held["activations"] = seen["waiting_bytes"] + seen["ahead_bytes"]
        nvme["activations"] = {"planned": 0, "held": seen["file_bytes"]}
    tiers = (engine.params_tier if engine.params_tier and not engine.params_tier.in_memory else None, engine.states,
             engine.grads_tier, engine.activations)  # fmt: skip
    sums = sum(tier.figures()["sums_bytes"] for tier in tiers if tier is not None)
    if sums:
        held["checksums"] = sums
    if engine.away is not None:
        nvme["away"] = {"planned": 0, "held": engine.away.size_bytes}
    cpu = {kind: {"planned": planned.get(kind, 0), "held": value} for kind, value in held.items()}
    return {
        "cpu": cpu,
        **({"nvme": nvme} if nvme else {}),
        "parameters": parameters,
        "bytes_per_parameter": {kind: value / parameters for kind, value in total.items()},
    }


_traffic_before: dict[tuple[str, str, str], int] = {}


def traffic(reset: bool = False) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes that this rank read from its peers, since the start or the last reset; with something offloaded to "nvme"
    also what it read from the disk and wrote to it.

    Returns:
        ``{"shm": {"all_gather": {"bytes": n, "calls": n}, ...}}``, by link class (``shm`` within a host, ``network``
        between hosts) and collective; ``"nvme"`` has ``read`` and ``write`` in bytes, ``read`` also ``waited_ns``: how
        long this rank waited for its files, in nanoseconds.
    """
    from zeropp.comm import all_traffic

    now = {
        (link, kind, what): value
        for link, kinds in all_traffic().items()
        for kind, counts in kinds.items()
        for what, value in counts.items()
    }
    for kind, value in (disk_traffic.totals() or {}).items():
        now[("nvme", "read", "waited_ns") if kind == "wait" else ("nvme", kind, "bytes")] = value
    answer: dict[str, dict[str, dict[str, int]]] = {}
    for (link, kind, what), value in now.items():
        answer.setdefault(link, {}).setdefault(kind, {})[what] = value - _traffic_before.get((link, kind, what), 0)
    if reset:
        _traffic_before.update(now)
    return answer
