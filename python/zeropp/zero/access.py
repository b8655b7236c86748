# SPDX-License-Identifier: Apache-2.0
"""Whole values for a while, and what is held and moved: ``gathered``, ``no_sync``, ``memory``, ``traffic``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zeropp.comm.collective import broadcast
from zeropp.comm.group import all_traffic
from zeropp.errors import ConfigError, PartitionedParameterError
from zeropp.zero.engine import Engine, engine_of
from zeropp.zero.formulas import model_states, pools_grads, sizes_of, states_on_host, tier_buffers
from zeropp.zero.model.init import is_sharded, whole_built
from zeropp.zero.model.parameter import raise_strays, ref_of
from zeropp.zero.model.part import Parts, parts_of, with_values, without_values
from zeropp.zero.model.tied import require_untied
from zeropp.zero.model_state import FILE, SHARD, Bytes, Unit
from zeropp.zero.offload.storage import disk_traffic


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
            require_untied(units, "gathered(write=True)")
            engine.flush()
            engine.params.require_exact("zeropp.gathered(..., write=True) was called")
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
        for whole, parts, part in _parts(unit):
            with_values(whole, parts.gather(part))
        yield
    finally:
        for whole, _, _ in _parts(unit):
            without_values(whole)
        unit.core.pin(-1)
        unit.core.release()


def _parts(unit: Unit) -> Iterator[tuple[nn.Parameter, Parts, torch.Tensor]]:
    """Yield what the model shows, how it is cut, and this rank's part, of each parameter of which this rank has a part."""
    for entry in unit.params:
        parts = parts_of(entry.param)
        if parts is not None:
            yield (
                entry.shown,
                parts,
                unit.whole[entry.offset_elems : entry.offset_elems + entry.numel].view(entry.shape),
            )


@contextlib.contextmanager
def _unchanged(engine: Engine, units: list[Unit]) -> Iterator[None]:
    """Raise if a shared copy was written, which torch's version counters tell: not every rank may write it."""
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
        if unit.shared and unit.rank:
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


def _spread_parts(engine: Engine, unit: Unit) -> bool:
    """Take this rank's parts of what rank 0 wrote; return True if the unit has parts."""
    parted = False
    for whole, parts, part in _parts(unit):
        broadcast(engine.comm, whole.data)
        if not unit.shared or not unit.rank:
            part.copy_(parts.take(whole.data))
        parted = True
    return parted


def _spread(engine: Engine, units: list[Unit]) -> None:
    for unit in units:
        parted = _spread_parts(engine, unit)
        if not unit.shared and not parted:
            broadcast(unit.comm, unit.whole)
    if engine.comm is not None:
        engine.comm.barrier()
    for unit in units:
        if unit.place in (SHARD, FILE) or engine.offloads:
            unit.core.keep_shard()
        if unit.has_master:
            _refresh_master(unit)


def _refresh_master(unit: Unit) -> None:
    """Copy what changed to the master, and nothing else: the master has bits that the low-precision copy has not."""

    def change(first: int, master: torch.Tensor) -> bool:
        begin = unit.begin_elems + first
        own = unit.whole[begin : begin + master.numel()].to(master.device)
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
            parts = parts_of(entry.param)
            shown.append((entry.shown, entry.shown.grad))
            entry.shown.grad = gradient if parts is None else parts.gather_some(gradient, unit.grad_dtype)
    try:
        yield
    finally:
        for parameter, before in shown:
            parameter.grad = before


# -- what is held --------------------------------------------------------------------------------------------------------------

_STATES = ("params", "grads", "master", "optimizer")
_PASSING = ("gathered", "buckets", "buckets_peak")


def _summed(found: Iterable[Bytes]) -> Bytes:
    total: Bytes = {}
    for one in found:
        for key, size in one.items():
            total[key] = total.get(key, 0) + size
    return {key: round(size) for key, size in total.items()}


def memory(model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Return bytes of model states on this rank: ``{"cpu": {kind: {"planned": bytes, "held": bytes}}, "parameters":
    n, ...}``; with states or parameters offloaded also ``"nvme"``, the same of the scratch files.

    Beside an accelerator there are ``"device"``, its memory, and where shards are on the host ``"pinned"``: page-locked
    memory, of which kind ``page_locked`` is all that this rank locked, the shards and buckets of all ranks.

    Kinds: ``params``, ``grads``, ``master`` (fp32 copy), ``optimizer``; and what comes and goes, held only: ``gathered`` (units
    whole now), ``buckets`` (memory of gradients on their way; it stays for the next ones; ``buckets_peak``: the most that were under
    way at once), ``tier_buffers`` (what an offloaded step streams through, planned, too), ``activations``
    (on their way to the disk or back, and there), ``scratch`` (of the steps of LAMB and the one-bit optimizers), ``delayed`` (values
    and gradients of an update that runs beside the next pass; planned, too), ``checksums`` (of files), ``away`` (states that
    :func:`zeropp.offload_states` put on the disk for a while), ``expert_cache`` (of ``Experts(cache=)``; planned: the most that experts may
    take; held: with memory that waits for the next ones, and in ``"pinned"`` what experts on their way to a GPU are read to).
    ``bytes_per_parameter`` compares the sum over the tiers with the paper's formula.
    """
    engine = engine_of(model)
    if optimizer is not None and getattr(optimizer, "_engine", None) is not engine:
        raise ConfigError("zeropp.memory: the optimizer belongs to another model")
    pooled = pools_grads(engine.schedule.in_backward, engine.grads.in_file, engine.stage, engine.ranks)
    paper = model_states(sizes_of(engine, padded=False), pooled, engine.strategy.planned_extra_bytes())
    planned, held = _planned(engine, paper), _held(engine)
    if ("cpu", "tier_buffers") in held:
        planned["cpu", "tier_buffers"] = _planned_buffers(engine)
    parameters = sum(e.numel for u in engine.units for e in u.params)
    held_states = sum(size for (_, kind), size in held.items() if kind in _STATES)
    planned, held = _tiers(engine, planned), _tiers(engine, held)
    total = {"planned": sum(paper.values()), "held": held_states}
    return {
        **_by_tier(planned, held),
        "parameters": parameters,
        "bytes_per_parameter": {kind: value / parameters for kind, value in total.items()},
    }


#: Kinds in memory of an accelerator, where shards are there; and those in page-locked memory where shards are beside it.
_ON_DEVICE = {*_STATES, *_PASSING, "scratch"}
_PINNED = {"params", "grads", "buckets", "buckets_peak"}


def _tiers(engine: Engine, sizes: Bytes) -> Bytes:
    """Return sizes under the tiers that they have beside an accelerator; those that the stores call "cpu" are on the device or pinned."""
    if engine.device.type == "cpu":
        return sizes
    locked = _PINNED if engine.config.stored_name is None else set()  # rounded weights are not page-locked
    named = {"pinned": locked, "device": {"gathered"}} if engine.offloads else {"device": _ON_DEVICE}
    tier_of = {kind: tier for tier, kinds in named.items() for kind in kinds}
    return {(tier_of.get(kind, tier) if tier == "cpu" else tier, kind): size for (tier, kind), size in sizes.items()}


def _held(engine: Engine) -> Bytes:
    held = _summed(part.held_bytes(engine) for part in engine.parts)
    held |= {("cpu", kind): engine.core.memory()[kind] for kind in _PASSING}
    if not held.get(("cpu", "checksums")):
        held.pop(("cpu", "checksums"), None)
    if engine.offloads:
        memory = engine.core.memory()
        held |= {("device", "params"): memory["resident"], ("device", "buckets"): memory["blocks"]}
        held["pinned", "page_locked"] = memory["pinned"]
    elif any(unit.on_host for unit in engine.units):
        memory = engine.core.memory()
        held["cpu", "params"] -= memory["on_host"]
        held |= {("pinned", "params"): memory["on_host"], ("pinned", "page_locked"): memory["pinned"]}
    return held


def _planned(engine: Engine, paper: dict[str, int]) -> Bytes:
    planned = _summed(part.planned_bytes(engine, paper) for part in engine.parts)
    sizes = sizes_of(engine, padded=False)
    for kind, size in states_on_host((u.on_host, of_it) for u, of_it in zip(engine.units, sizes, strict=True)).items():
        planned["cpu", kind] -= size
        planned["pinned", kind] = size
    return planned


def _by_tier(planned: Bytes, held: Bytes) -> dict[str, dict[str, dict[str, float]]]:
    tiers: dict[str, dict[str, dict[str, float]]] = {}
    for tier, kind in sorted({**held, **{key: 0 for key in planned if key[0] == "nvme"}}, key=_order):
        both = {"planned": planned.get((tier, kind), 0), "held": held.get((tier, kind), 0)}
        tiers.setdefault(tier, {})[kind] = both
    return tiers


def _order(key: tuple[str, str]) -> tuple[str, int]:
    return key[0], _STATES.index(key[1]) if key[1] in _STATES else len(_STATES)


def _planned_buffers(engine: Engine) -> int:
    if engine.optimizer_ref is None:  # nothing is stepped
        return 0
    moments = engine.states.planned_moments(engine.strategy.planned_moments(0))
    inside = engine.config.step_in_backward
    return tier_buffers(sizes_of(engine, padded=True), engine.config.offload, moments, inside=inside)


_traffic_before: dict[tuple[str, str, str], int] = {}


def traffic(reset: bool = False) -> dict[str, dict[str, dict[str, int]]]:
    """Return bytes that this rank read from its peers, since the start or the last reset; with something offloaded to
    "nvme" also what it read from the disk and wrote to it.

    Returns:
        ``{"shm": {"all_gather": {"bytes": n, "calls": n}, ...}}``, by link class (``shm`` within a host, ``network``
        between hosts) and collective; ``"nvme"`` has ``read`` and ``write`` in bytes, ``read`` also ``waited_ns``: how
        long this rank waited for its files, in nanoseconds.
    """
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
