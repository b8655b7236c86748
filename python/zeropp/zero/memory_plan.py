# SPDX-License-Identifier: Apache-2.0
"""What a run will hold and move, before it runs: ``zeropp.estimate(model, config, ranks=8)``.

The model may be on the meta device, so that one of any size can be asked about. The same code that ``prepare`` uses says
which units there are, and the same arithmetic how they are padded, so states agree with ``zeropp.memory`` to within
rounding. Activations are not in it.

Formulas (Rajbhandari et al. 2020; N ranks, Psi = bytes of all parameters, f = (N-1)/N), per rank:

    params     Psi           stage 3: Psi / N
    grads      Psi           stages 2, 3: Psi / N
    master     4 a parameter in 16 bit, optimizer: 4 a state and parameter (bf16: 2, int8: 1 + 4/256);    stages 1 to 3: / N
    gathered   whole units beside the slices (stage 3 without a shared copy)
    wire       stages 0 to 2: 2 f Psi; stage 3: 3 f Psi; stage 3 with one shared copy a host: f Psi

With ``Offload(params="nvme")`` one of the ranks of a host reads each unit where it is used, in forward and in backward, so
on average a rank reads 2 Psi / N, and each rank reads and writes its slice for the step (16 bit: writes only, the master
has the values). Gradients on NVMe are written in each of n backwards and read in all but the first, for the norm and for the step;
with a step inside the backward n - 1 times each, and for neither.

With ``Precision(stored=...)``, for a model that is only evaluated, the matrices of linear layers and experts count as their codes and
scales, NVMe is read once in a forward, each host has a copy, and nothing crosses the network.

Over H hosts of L ranks a gather brings (H-1) slices over the network, a reduction as much, stage 0's 2 (H-1)/H of a rank's L-th
part (docs/design/0016); parameters on NVMe lie in a file of each rank's own, and are gathered.

With ``Comm(params=..., grads=...)`` what travels is an image of b bits an element and 4 bytes a block, and a slice is held
with its image beside it (docs/design/0015).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeropp import _C, compat
from zeropp.config import TORCH_DTYPES, Config, Tier, as_config
from zeropp.errors import ConfigError
from zeropp.wording import counted, shown, what_it_is
from zeropp.zero.model.units import REPLICATE_BYTES, UnitPlan, numbers, plan_units, refuse_lazy
from zeropp.zero.offload import stored
from zeropp.zero.offload.tier_buffers import Slice, tier_buffers
from zeropp.zero.step.low_states import elem_bytes

STATES = {
    "AdamW": 2, "Adam": 2, "LAMB": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Lion": 1, "Adagrad": 1,
    "RMSprop": 1, "SGD": 0, "SGD with momentum": 1, "none": 0,
}  # fmt: skip
"""Values that each optimizer keeps a parameter."""

_PAGE_BYTES = 4096
_SMALL_BYTES = 32 << 10  # of an all-reduce that every host sums whole (csrc/comm/tcp/hier_reduce.c)
READ_AHEAD_BYTES = 64 << 20
"""At least this much of the parameters on NVMe may be in memory ahead of need, with prefetch="auto" (zero/engine.py)."""


@dataclass(frozen=True)
class _Sizes:
    """One unit: bytes whole and of a slice, elements of what this rank updates."""

    plan: UnitPlan
    whole_bytes: int
    slice_bytes: int
    own_elems: int
    moves: bool
    filed: bool
    """Its values live on NVMe."""
    params_wire_bytes: int
    """What one slice takes on its way to a rank that gathers it."""
    grad_bytes: int
    """Of an element of the gradients that add up and stay."""
    grads_wire_bytes: int
    """What the gradients of one slice take on their way to the rank that owns it."""

    @property
    def elems(self) -> int:
        return self.whole_bytes // self.plan.dtype.itemsize

    @property
    def grad_slice_bytes(self) -> int:
        return self.slice_bytes // self.plan.dtype.itemsize * self.grad_bytes


def estimate(
    model: nn.Module,
    config: Config | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    ranks: int,
    hosts: int = 1,
    optimizer: str = "AdamW",
    tokens: int | None = None,
    tflops: float | None = None,
) -> dict[str, Any]:
    """Bytes that each rank will hold and move; nothing is prepared or allocated.

    Args:
        model: plain, on any device, also meta.
        config: as for :func:`zeropp.prepare`: a :class:`zeropp.Config`, a dict, JSON text or a path; default stage 3.
        ranks: how many, on all hosts together.
        hosts: on how many of them, each with as many ranks.
        optimizer: one of ``zeropp.zero.memory_plan.STATES``, such as "AdamW", "SGD with momentum", "none" (evaluation only).
        tokens: tokens (rows of the batch, for other models) a rank and step; with ``tflops``, which 10^12 operations a
            second a rank's computation reaches, the bandwidths are estimated too.

    Returns:
        ``{"cpu": {kind: bytes}, "nvme": {kind: bytes}, "parameters": n, "units": n, "largest_unit": bytes,
        "traffic": {"gather": bytes, "reduce": bytes, "nvme": bytes}, "bandwidth": {...}}``; with several hosts ``traffic`` has also
        ``network``: what of it a rank receives from other hosts. Kinds: ``params``, ``grads``,
        ``master``, ``optimizer``; ``gathered`` (memory for whole units beside the slices) and ``buckets`` (gradients on
        their way: at most); ``autograd`` (gradients of the two largest parameters, before they are in a bucket);
        ``tier_buffers`` (with something on NVMe: what a step streams through, and slices of gradients that wait for the next
        backward); with ``step_in_backward`` the ``grads`` of two units; ``delayed`` (with ``delayed_update``: new values
        and gradients of the update under way). Where a tier has several folders, ``folders`` says the bytes in each (``{folder: bytes}``), and
        each moves its share of ``traffic["nvme"]``. ``traffic``: bytes a rank reads from peers, and reads and writes on NVMe, in one
        step of one micro-batch; of gradients on NVMe in all ``accumulate`` of a step; of parameters on NVMe on average over the ranks,
        as long as they are at the same unit.
        ``bandwidth``: bytes/s at which each of them takes as long as the computation
        does: with that much, what overlaps is hidden; what does not (NVMe inside the step) doubles the step, and ten times as
        much costs a tenth.

    Raises:
        zeropp.ConfigError: something that :func:`prepare` would refuse, or that cannot be estimated yet.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"estimate: model is {what_it_is(model)}; wanted a torch.nn.Module, which may be on the meta device"
        )
    refuse_lazy(model, "estimate")
    config = as_config(config, "estimate")
    _check(config, ranks, hosts, optimizer, tokens, tflops)
    plans = plan_units(
        model, config.units, None if config.dtype_name is None else TORCH_DTYPES[config.dtype_name], config.ignored
    )
    if not plans:
        raise ConfigError(f"estimate: {type(model).__name__} has no parameters, so there is nothing to partition")
    filed = _kind(config, "params") == "nvme" or config.stored_name is not None
    if config.stored_name is not None:
        for plan in plans:
            plan.trainable = False
    host_copy = ranks > hosts == 1 and config.host_copy == "auto" and config.stage == 3 and not filed
    host_copy = host_copy and config.comm.params == "exact"
    units = [_sizes(plan, config, ranks, host_copy) for plan in plans]
    # Ranks that have one copy of what is filed together:
    sharers = ranks if config.stored_name is None else ranks // hosts
    largest_bytes = max(unit.whole_bytes for unit in units)
    units, as_values = _held_as_values(units, config)
    in_file: dict[str, int] = {}
    beside = dict.fromkeys(("params", "grads"), 0.0)
    held = {
        "params": _params(units, ranks, hosts, host_copy),
        "grads": _grads(units, config, ranks),
        "master": sum(4 * u.own_elems for u in units if _has_master(u, config, optimizer)),
        "optimizer": _states(units, config, optimizer),
        "gathered": _gathered(model, units, config, ranks, hosts),
        "buckets": _buckets(units, config, ranks),
        "autograd": _autograd(units, config, ranks),
    }
    if any(_kind(config, what) == "nvme" for what in ("params", "grads", "optimizer")):
        held["tier_buffers"] = _tier_buffers(units, config, optimizer)
    if config.offload.delayed_update is not None:
        held["delayed"], beside = _delayed(units, config, ranks)
        in_file["delayed"] = round(sum(beside.values()))
    if config.comm.secondary_shard and hosts > 1:
        held["params"] += sum(unit.whole_bytes for unit in units if unit.moves) // (ranks // hosts)
    if filed:
        values = sum(_on_disk_bytes(model, unit, config) for unit in units if unit.filed) / sharers
        held["params"] += as_values // sharers
        on_disk = _fraction(config, "params") * values if _kind(config, "params") == "nvme" else 0.0
        in_file["params"] = round(on_disk)
        held["params"] += round(values) - in_file["params"]
    for kind, tier in (("grads", "grads"), ("master", "optimizer"), ("optimizer", "optimizer")):
        if _kind(config, tier) == "nvme":
            in_file[kind] = round(held[kind] * _fraction(config, tier))
            held[kind] -= in_file[kind]
    if not in_file.get("delayed", 1):
        del in_file["delayed"]
    traffic = _traffic(units, config.stage, ranks, host_copy)
    traffic["nvme"] = _nvme_traffic(units, config, ranks, hosts, optimizer, in_file)
    if config.stored_name is not None:  # a forward reads each unit wherever it is used
        reads = sum(_on_disk_bytes(model, unit, config) * len(unit.plan.triggers) for unit in units if unit.filed)
        traffic["nvme"] = round(_fraction(config, "params") * reads / sharers) if in_file["params"] else 0
    if hosts > 1:
        traffic["network"] = 0 if config.stored_name is not None else _network_traffic(units, config, ranks, hosts)
    parameters = sum(plan.numel for plan in plans)
    answer = {
        "cpu": held, "nvme": in_file, "parameters": parameters, "units": len(plans),
        "largest_unit": largest_bytes, "traffic": traffic,
    }  # fmt: skip
    if any(len(getattr(config.offload, kind).folders) > 1 for kind in ("params", "grads", "optimizer")):
        answer["folders"] = _folders(config, in_file, beside)
    if tokens is not None and tflops is not None:
        seconds = 6 * parameters * tokens / (tflops * 1e12)  # 2 in forward, 4 in backward
        answer["compute_seconds"] = seconds
        answer["bandwidth"] = {kind: value / seconds for kind, value in traffic.items()}
    return answer


def _check(config: Config, ranks: int, hosts: int, optimizer: str, tokens: int | None, tflops: float | None) -> None:
    for name, value in (("ranks", ranks), ("hosts", hosts), ("tokens", tokens)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 62):
            raise ConfigError(f"estimate: {name} {shown(value)} is not allowed; wanted a whole number above 0")
    if ranks % hosts:
        raise ConfigError(
            f"estimate: {counted(ranks, 'rank')} on {counted(hosts, 'host')} is not estimated yet; wanted as many on each"
        )
    if tflops is not None and not 0 < tflops < float("inf"):
        raise ConfigError(f"estimate: tflops {tflops!r} is not allowed; wanted a number above 0")
    if (tokens is None) != (tflops is None):
        raise ConfigError("estimate: tokens and tflops go together; give both, or none")
    if optimizer not in STATES:
        raise ConfigError(f"estimate: optimizer {optimizer!r} is not known; wanted one of {', '.join(STATES)}")
    said = compat.clash(_facts(config, optimizer))
    if said:
        raise ConfigError(f"estimate: {said}")


def _facts(config: Config, optimizer: str) -> dict[str, Any]:
    """Return what an estimate depends on. It may be asked of combinations that cannot be trained."""
    facts: dict[str, Any] = {"Precision.stored": config.stored_name, "Precision.state": config.state_name}
    if optimizer != "none":
        facts[compat.OPTIMIZER] = compat.Named(optimizer.partition(" ")[0], f"optimizer {optimizer}")
    if optimizer == "SGD":
        facts["SGD.momentum"] = compat.Named(0, "SGD without momentum")
    return facts


def _kind(config: Config, what: str) -> str:
    tier = getattr(config.offload, what)
    assert isinstance(tier, Tier)
    return tier.kind


def _fraction(config: Config, what: str) -> float:
    return float(getattr(config.offload, what).fraction)


def _sizes(plan: UnitPlan, config: Config, ranks: int, host_copy: bool) -> _Sizes:
    layout: tuple[int, int] = _C.unit_layout([numbers(p) for p in plan.params], plan.dtype.itemsize, ranks)
    elems, shard_elems = layout
    small = plan.alone and plan.numel * plan.dtype.itemsize < REPLICATE_BYTES and config.units == "auto"
    filed = (_kind(config, "params") == "nvme" or config.stored_name is not None) and not small
    moves = config.stage == 3 and ranks > 1 and not host_copy and not small and not filed
    own = elems if config.stage == 0 or ranks == 1 else shard_elems
    slice_bytes = shard_elems * plan.dtype.itemsize

    stays, travels = config.gradient_dtypes(plan.dtype)

    def wire_bytes(kind: str, exact: torch.dtype) -> int:
        if kind == "exact" or ranks == 1:
            return shard_elems * exact.itemsize
        return shard_elems * int(kind.removeprefix("int")) // 8 + 4 * -(-shard_elems // config.comm.block_elems)

    return _Sizes(
        plan, elems * plan.dtype.itemsize, slice_bytes, own, moves, filed, wire_bytes(config.comm.params, plan.dtype),
        stays.itemsize, wire_bytes(config.comm.grads if config.stage >= 2 else "exact", travels),
    )  # fmt: skip


def _has_master(unit: _Sizes, config: Config, optimizer: str) -> bool:
    finest = {torch.float64, torch.float32, TORCH_DTYPES[config.master_name]}
    return unit.plan.trainable and unit.plan.dtype not in finest and optimizer != "none"


def _states(units: list[_Sizes], config: Config, optimizer: str) -> int:
    fewer = elem_bytes(config.state_name)
    trained = [unit for unit in units if unit.plan.trainable]
    each = sum(unit.own_elems * (8 if unit.plan.dtype == torch.float64 else fewer) for unit in trained)
    return round(STATES[optimizer] * each)


def _params(units: list[_Sizes], ranks: int, hosts: int, host_copy: bool) -> int:
    if host_copy:
        return sum(unit.whole_bytes for unit in units) // ranks
    units = [unit for unit in units if not unit.filed]
    images = sum(unit.params_wire_bytes for unit in units if unit.moves and unit.params_wire_bytes < unit.slice_bytes)
    images = images if hosts == 1 else 0  # between hosts they are made on the way
    return images + sum(unit.slice_bytes if unit.moves else unit.whole_bytes for unit in units)


def _grads(units: list[_Sizes], config: Config, ranks: int) -> int:
    trainable = [unit for unit in units if unit.plan.trainable]
    if ranks == 1:
        sizes = [unit.plan.numel * unit.grad_bytes for unit in trainable]
    elif config.stage <= 1:
        return sum(_bucket_bytes(unit) for unit in trainable)
    else:
        sizes = [unit.grad_slice_bytes for unit in trainable]
    grad_pool = config.step_in_backward and _kind(config, "grads") != "nvme"
    return sum(sorted(sizes)[-2:] if grad_pool else sizes)


def shares_in_file(sizes: list[int], fraction: float) -> list[float]:
    """Of units that lie one after the other and are cut once: which share of each is behind the cut."""
    cut, begin, shares = (1 - fraction) * sum(sizes), 0, []
    for size in sizes:
        shares.append(min(1.0, max(0.0, (begin + size - cut) / size)) if size else 0.0)
        begin += size
    return shares


def delayed_bytes(
    values: Sequence[float], shares: Sequence[float], grads: Sequence[float], grads_share: float, ranks: int
) -> tuple[int, dict[str, float]]:
    """(in memory, in files by kind) of what a delayed update takes, each where its kind lives: of every unit new values of this rank's
    slice, of which a share is in a file, and its gradients."""
    taken = sum(grads) if ranks > 1 or grads_share else 0.0  # one rank alone hands over its p.grad
    filed = {
        "params": sum(own * share for own, share in zip(values, shares, strict=True)),
        "grads": taken * grads_share,
    }
    return round(sum(values) + taken - sum(filed.values())), filed


def _delayed(units: list[_Sizes], config: Config, ranks: int) -> tuple[int, dict[str, float]]:
    shares = shares_in_file([unit.whole_bytes if unit.filed else 0 for unit in units], _fraction(config, "params"))
    trained = [unit.plan.trainable for unit in units]
    return delayed_bytes(
        [unit.own_elems * unit.plan.dtype.itemsize * one for unit, one in zip(units, trained, strict=True)], shares,
        [unit.grad_slice_bytes * one for unit, one in zip(units, trained, strict=True)],
        _fraction(config, "grads") if _kind(config, "grads") == "nvme" else 0.0, ranks,
    )  # fmt: skip


def _folders(config: Config, in_file: dict[str, int], beside: dict[str, float]) -> dict[str, int]:
    """Bytes in each folder: every file is shared out over those of its tier. `beside`: of a delayed update."""
    shares: dict[str, float] = {}
    for kind in ("params", "grads", "optimizer"):
        tier = getattr(config.offload, kind)
        size = in_file.get(kind, 0) + beside.get(kind, 0.0) + (in_file.get("master", 0) if kind == "optimizer" else 0)
        for folder in tier.folders:
            shares[folder] = shares.get(folder, 0.0) + size / len(tier.folders)
    return {folder: round(share) for folder, share in shares.items()}


def _bucket_bytes(unit: _Sizes) -> int:
    return (unit.elems * unit.grad_bytes + len(unit.plan.params) + 63) // 64 * 64


def _buckets(units: list[_Sizes], config: Config, ranks: int) -> int:
    """As many as may wait, and one more that is being filled."""
    sizes = sorted((_bucket_bytes(unit) for unit in units if unit.plan.trainable), reverse=True)
    if ranks == 1 or config.stage <= 1 or not sizes:
        return 0
    bound = config.bucket_bytes or sum(sizes)
    return max(_most_within(sizes, bound), sizes[0])


def _most_within(sizes: list[int], bound_bytes: int) -> int:
    """The most that some of these buckets take together within the bound: only whole ones wait."""
    if sum(sizes) <= bound_bytes:
        return sum(sizes)
    align = max(64, bound_bytes >> 20)  # of the size of a bucket; with large bounds a millionth
    reached, bound = 1, (1 << bound_bytes // align + 1) - 1  # bit n: some of them take n * align bytes
    for size in sizes:
        reached |= reached << size // align & bound
    return (reached.bit_length() - 1) * align


def _autograd(units: list[_Sizes], config: Config, ranks: int) -> int:
    """One gradient that autograd makes, and the one before, whose memory it has just let go of. One rank's own stay, and are counted
    where they are."""
    if ranks == 1 and _kind(config, "grads") != "nvme":
        return 0
    sizes = [numbers(p) * unit.plan.dtype.itemsize for unit in units if unit.plan.trainable for p in unit.plan.params]
    return sum(sorted(sizes)[-2:])


def _tier_buffers(units: list[_Sizes], config: Config, optimizer: str) -> int:
    if optimizer == "none":
        return 0
    shards = [
        Slice(u.own_elems, u.plan.dtype.itemsize, u.grad_bytes, _has_master(u, config, optimizer), u.filed)
        for u in units
        if u.plan.trainable
    ]
    return tier_buffers(shards, config.offload, STATES[optimizer], inside=config.step_in_backward)


def _on_disk_bytes(model: nn.Module, unit: _Sizes, config: Config) -> int:
    """Of parameters that live in a file, as they are kept there, on all ranks together."""
    if config.stored_name is None:
        return unit.whole_bytes
    low, bits = stored.matrices(model), stored.BITS[config.stored_name]
    kept = sum(
        stored.low_bytes(numbers(p), bits) if p in low else numbers(p) * unit.plan.dtype.itemsize
        for p in unit.plan.params
    )
    return -(-kept // _PAGE_BYTES) * _PAGE_BYTES


def _held_as_values(units: list[_Sizes], config: Config) -> tuple[list[_Sizes], int]:
    """(the other units, bytes of those that are held as they are) where weights in fewer bits, on "cpu", are a fraction of all: whole
    units, the first ones (csrc/zero/offload/unit_file_qcopy.c)."""
    if config.stored_name is None or _kind(config, "params") == "nvme":
        return units, 0
    sizes = [-(-unit.whole_bytes // _PAGE_BYTES) * _PAGE_BYTES if unit.filed else 0 for unit in units]
    room, kept, held = (1 - _fraction(config, "params")) * sum(sizes), [], 0
    for unit, size in zip(units, sizes, strict=True):
        room -= size
        if unit.filed and room >= 0:
            held += unit.whole_bytes
        else:
            kept.append(unit)
    return kept, held


def _gathered(model: nn.Module, units: list[_Sizes], config: Config, ranks: int, hosts: int) -> int:
    """The most that is whole at once (the units of a module and of all that it stands in, and what is fetched ahead), or
    the slots that are kept warm for it, two of the largest unit: whichever is more."""
    triggered: dict[nn.Module, list[_Sizes]] = {}
    for unit in units:
        if unit.moves or unit.filed:
            for module in unit.plan.triggers:
                triggered.setdefault(module, []).append(unit)

    def most(module: nn.Module, open_bytes: int) -> int:
        open_bytes += sum(unit.whole_bytes for unit in triggered.get(module, ()))
        return max([open_bytes, *(most(child, open_bytes) for child in module.children())])

    ahead = _read_ahead(units, config, hosts)
    filed = any(unit.filed for unit in units)
    sizes = [unit.whole_bytes for unit in units if unit.moves or unit.filed]
    whole = min(sum(sizes), max(most(model, 0), 2 * max(sizes, default=0)) + ahead)
    if not filed:
        return whole
    if config.stored_name is not None:
        return whole // (ranks // hosts)
    # The ranks of a host share what was read; over several hosts there is what a rank has read, too, until it is gathered.
    return whole // ranks if hosts == 1 else whole + _shards_under_way(units, config, ahead // ranks)


def _shards_under_way(units: list[_Sizes], config: Config, ahead_bytes: int) -> int:
    """The most that a rank has read of its own file and is not gathered yet: all but the unit in use, if there is room."""
    sizes = [-(-unit.slice_bytes // _PAGE_BYTES) * _PAGE_BYTES for unit in units if unit.filed]
    most = max(max(sizes), min(sum(sizes) - min(sizes), ahead_bytes))
    return min(most, round(_fraction(config, "params") * sum(sizes)))


def _read_ahead(units: list[_Sizes], config: Config, hosts: int) -> int:
    """The most that is fetched ahead of need, or kept for the backward."""
    if isinstance(config.prefetch, int):
        return config.prefetch
    filed = [unit.whole_bytes for unit in units if unit.filed]
    if filed:
        return max(READ_AHEAD_BYTES, 2 * max(filed))
    return READ_AHEAD_BYTES if hosts > 1 else 0


def _kept(units: list[_Sizes], config: Config, hosts: int) -> int:
    """Of units in a file, those that the forward ends with are kept for the backward, which begins with them."""
    room, kept = _read_ahead(units, config, hosts) if hosts == 1 else 0, 0
    for unit in reversed(units):
        if unit.filed and kept + unit.whole_bytes > room:
            break
        kept += unit.whole_bytes if unit.filed else 0
    return kept


def _traffic(units: list[_Sizes], stage: int, ranks: int, host_copy: bool) -> dict[str, int]:
    gather = reduce = 0
    for unit in units:
        others = unit.slice_bytes * (ranks - 1)
        trainable = unit.plan.trainable
        if unit.moves:
            # once for each place in forward, once in backward
            gather += unit.params_wire_bytes * (ranks - 1) * (len(unit.plan.triggers) + 1)
        elif trainable and stage > 0 and not host_copy and not unit.filed:
            gather += others  # after the step
        if trainable:
            reduce += (unit.grads_wire_bytes + (unit.grad_slice_bytes if stage == 0 else 0)) * (ranks - 1)
    return {"gather": gather, "reduce": reduce}


def _network_traffic(units: list[_Sizes], config: Config, ranks: int, hosts: int) -> int:
    """Of a step, bytes that a rank receives from other hosts."""
    elsewhere, total = hosts - 1, 0
    for unit in units:
        if unit.moves or unit.filed:
            times = 1 if config.comm.secondary_shard else len(unit.plan.triggers) + 1
            total += elsewhere * unit.params_wire_bytes * times
        elif unit.plan.trainable and config.stage > 0:
            total += elsewhere * unit.slice_bytes
        if unit.plan.trainable and config.stage > 0:
            total += elsewhere * unit.grads_wire_bytes
        elif unit.plan.trainable:
            sent = unit.grads_wire_bytes * ranks
            total += elsewhere * sent if sent <= _SMALL_BYTES else 2 * elsewhere * sent // ranks
    return total


def _nvme_traffic(
    units: list[_Sizes], config: Config, ranks: int, hosts: int, optimizer: str, in_file: dict[str, int]
) -> int:
    """Bytes read and written by one rank: states once each way, parameters where they are used, gradients in each backward (but in the
    first nothing is read), for the norm and for the step; a step inside the backward moves none in the last one and after it."""
    gradients = 2 * config.accumulate + (-2 if config.step_in_backward else 1)
    total = 2 * (in_file.get("master", 0) + in_file.get("optimizer", 0)) + gradients * in_file.get("grads", 0)
    used = stepped = 0.0
    for unit in (unit for unit in units if unit.filed):
        used += unit.whole_bytes * (len(unit.plan.triggers) + 1) / ranks
        if unit.plan.trainable and optimizer != "none":
            once = config.step_in_backward or _has_master(unit, config, optimizer)
            stepped += (1 if once else 2) * unit.whole_bytes / ranks
    if optimizer != "none":
        used -= _kept(units, config, hosts) / ranks
    return total + round(_fraction(config, "params") * (used + stepped))
