# SPDX-License-Identifier: Apache-2.0
"""How many bytes each kind of state takes: one arithmetic for ``zeropp.estimate``, which has no model yet, and for ``zeropp.memory``.

Model states are the formulas of Rajbhandari et al. 2020. The sizes of what files on NVMe need in memory are those of
csrc/zero/offload: optim_file.c (buffers), unit_file_step.c (windows) and grad_file.c (gradients).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from zeropp import _C
from zeropp.config import TORCH_DTYPES, Config, Offload, Tier
from zeropp.zero.model_state import SHARD, ModelState, Unit

PAGE_BYTES = mmap.PAGESIZE
READ_AHEAD_BYTES = 64 << 20
"""With prefetch="auto", this much may be in memory ahead of need: gathered units, and of loaded ones at least this much."""
_STATES_OF = {"params": ("params",), "optimizer": ("master", "optimizer")}
"""By kind of ``zeropp.Offload``: the kinds of bytes that follow it to memory of the host, of experts beside an accelerator."""
_WINDOWS = 4
"""ZPP_UNIT_FILE_WINDOWS of csrc/zero/offload/unit_file.h."""
_WINDOW_ELEMS = 512 << 10
"""WINDOW_ELEMS of csrc/zero/offload/unit_file_step.c: of a step over states in memory."""
_GRADS_BYTES = 32 << 20
"""LEAST_BOUND_BYTES of csrc/zero/offload/grad_file.c."""


@dataclass(frozen=True)
class UnitSizes:
    """One unit as the formulas see it, on one rank: with or without what pads its shards."""

    trainable: bool
    in_file: bool
    """True if its parameters are loaded where they are needed, from NVMe or from quantised copies."""
    held: bool
    """True if it stays in memory, where other units have states in files."""
    has_master: bool
    whole_bytes: int
    params_bytes: float
    """Bytes of its parameters that stay in memory between passes."""
    grads_bytes: float
    """Bytes of its reduced gradients."""
    own_elems: float
    """Elements that this rank steps."""
    param_bytes: int
    """Bytes of an element of the parameters."""
    grad_bytes: int
    """Bytes of an element of the gradients that are accumulated and kept."""
    moment_bytes: float
    """Bytes of all moments of an element."""


def rounded(size: int, multiple: int) -> int:
    """Return the least multiple of a number that is no less than ``size``."""
    return -(-size // multiple) * multiple


def in_pages(size_bytes: int) -> int:
    """Return the bytes of as many whole pages as hold so many."""
    return rounded(size_bytes, PAGE_BYTES)


def tier_of(config: Config, kind: str) -> Tier:
    """Return where the configuration wants one kind of state."""
    tier = getattr(config.offload, kind)
    assert isinstance(tier, Tier)
    return tier


def loads_units(config: Config) -> bool:
    """Return True if units are loaded where they are needed: from NVMe, or from quantised copies."""
    return tier_of(config, "params").kind == "nvme" or config.stored_name is not None


def shares_host_copy(config: Config, ranks: int, hosts: int) -> bool:
    """Return True if the ranks of the host share one copy of the parameters. docs/design/0015."""
    one_host = ranks > hosts == 1 and config.host_copy == "auto" and config.stage == 3
    return one_host and not loads_units(config) and config.comm.params == "exact"


def wire_bytes(kind: str, dtype: torch.dtype, elems: int, config: Config) -> int:
    """Return what elements take on their way to another rank: exactly, or as a quantised copy of "int8" or "int4"."""
    if kind == "exact":
        return elems * dtype.itemsize
    return elems * int(kind.removeprefix("int")) // 8 + 4 * -(-elems // config.comm.block_elems)


def has_master(dtype: torch.dtype, config: Config) -> bool:
    """Return True if an optimizer keeps an fp32 copy beside parameters of this type."""
    return dtype in (torch.bfloat16, torch.float16) and TORCH_DTYPES[config.master_name] != dtype


def read_ahead_bytes(unit_bytes: Iterable[int]) -> int:
    """Return how much of the units that are loaded may be in memory ahead of need: the next one at least, whatever its size."""
    return max(READ_AHEAD_BYTES, 2 * max(unit_bytes, default=0))


def elem_bytes(kind: str) -> float:
    """Return the bytes of one moment of one element, with its share of a scale."""
    return {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256}[kind]


def sizes_of(engine: ModelState, *, padded: bool) -> list[UnitSizes]:
    """Return the units of a prepared model; without padding as if they were divided exactly, which is the paper's formula."""
    return [_size_of(engine, unit, padded) for unit in engine.units]


def _size_of(engine: ModelState, unit: Unit, padded: bool) -> UnitSizes:
    ranks, stage = unit.ranks, engine.stage
    numel = sum(entry.numel for entry in unit.params)
    params_bytes = numel * unit.dtype.itemsize
    second = params_bytes / engine.sharers if engine.sharers and unit.place == SHARD else 0
    each = elem_bytes(unit.state_name) if unit.state_name != "fp32" else unit.state_dtype.itemsize
    return UnitSizes(
        unit.trainable,
        unit.in_file,
        unit.held,
        unit.has_master and (padded or unit.dtype.itemsize < 4),  # a delayed update counts its copy of float32 itself
        unit.elems * unit.dtype.itemsize,
        params_bytes / (ranks if stage == 3 else 1) + second,
        numel * unit.grad_dtype.itemsize / (ranks if stage >= 2 else 1),
        unit.shard.numel() if padded else numel / (ranks if stage >= 1 else 1),
        unit.dtype.itemsize,
        unit.grad_dtype.itemsize,
        each * engine.planned_moments(unit) if unit.trainable else 0,
    )


def model_states(units: Sequence[UnitSizes], pooled: bool, extra_bytes: float = 0.0) -> dict[str, int]:
    """Return the bytes of each kind of model state on one rank.

    Args:
        pooled: True if the gradients of two units at a time are held.
        extra_bytes: states of the optimizer beside moments.
    """
    trained = [unit for unit in units if unit.trainable]
    grads = [unit.grads_bytes for unit in trained]
    kinds = {
        "params": sum(unit.params_bytes for unit in units),
        "grads": sum(sorted(grads)[-2:] if pooled else grads),
        "master": sum(4 * unit.own_elems for unit in trained if unit.has_master),
        "optimizer": sum(unit.moment_bytes * unit.own_elems for unit in trained) + extra_bytes,
    }
    return {kind: round(value) for kind, value in kinds.items()}


def pools_grads(in_backward: bool, grads_in_file: bool, stage: int, ranks: int) -> bool:
    """Return True if the gradients of two units at a time are held: a step inside the backward uses their memory again."""
    return in_backward and not grads_in_file and (stage >= 2 or ranks == 1)


def split(engine: ModelState, paper: dict[str, int], kind: str, fraction: float) -> tuple[int, int]:
    """Return (bytes in memory, bytes in the file) of a kind of state of which a fraction is offloaded, of units that are not held."""
    return split_units(sizes_of(engine, padded=False), paper, kind, fraction)


def states_on_host(units: Iterable[tuple[tuple[str, ...], UnitSizes]]) -> dict[str, int]:
    """Return what units keep in memory of the host beside an accelerator, by kind of bytes; ``units``: each with its ``on_host``."""
    pairs = list(units)
    found: dict[str, int] = {}
    for on_host, kinds in _STATES_OF.items():
        theirs = model_states([size for has, size in pairs if on_host in has], False)
        found.update((kind, theirs[kind]) for kind in kinds if theirs[kind])
    return found


def split_units(units: Sequence[UnitSizes], total: dict[str, int], kind: str, fraction: float) -> tuple[int, int]:
    """Do as :func:`split`, for units before they exist; ``total``: bytes by kind."""
    moving = total
    if any(unit.held for unit in units):
        moving = model_states([unit for unit in units if not unit.held], False)
    in_file = round(moving[kind] * fraction)
    return total[kind] - in_file, in_file


def shares_in_file(units: Sequence[UnitSizes], fraction: float) -> list[float]:
    """Return which share of each unit lies in the file, where units lie one after the other and the first bytes are resident."""
    sizes = [unit.whole_bytes if unit.in_file and not unit.held else 0 for unit in units]
    resident_bytes, begin, shares = (1 - fraction) * sum(sizes), 0, []
    for size in sizes:
        shares.append(min(1.0, max(0.0, (begin + size - resident_bytes) / size)) if size else 0.0)
        begin += size
    return shares


def delayed_bytes(
    units: Sequence[UnitSizes], params_share: float, grads_share: float, *, alone: bool
) -> tuple[int, dict[str, float]]:
    """Return (bytes in memory, bytes in files by kind) of a delayed update, each where its kind lives: the new values of this rank's
    shards, and its gradients. ``alone``: one rank, whose shards are where it computes."""
    shares = shares_in_file(units, params_share)
    values = [unit.own_elems * unit.param_bytes * unit.trainable for unit in units]
    grads = sum(unit.own_elems * unit.grad_bytes for unit in units if unit.trainable)
    back = 0.0 if alone and not grads_share else grads  # one rank alone hands over its p.grad
    held = sum(unit.own_elems * unit.grad_bytes for unit in units if unit.trainable and unit.held)
    in_files = {
        "params": sum(own * share for own, share in zip(values, shares, strict=True)),
        "grads": max(0.0, back - held) * grads_share,
    }
    return round(sum(values) + back - sum(in_files.values())), in_files


# -- what files need in memory -----------------------------------------------------------------------------------------


def tier_buffers(units: Sequence[UnitSizes], offload: Offload, moments: int, *, inside: bool) -> int:
    """Return the bytes, at most, that a rank streams its states, parameters and gradients through, and those of the shards of gradients
    that stay in memory for the next backward.

    Args:
        units: padded.
        moments: tensors of states that the optimizer keeps for each parameter, without the master.
        inside: True with ``Config(step_in_backward=True)``: units are stepped where they are gathered, without windows.
    """
    shards = _trained(units)
    moving = [unit for unit in shards if not unit.held]
    total, window_elems = 0, _WINDOW_ELEMS
    if _is_on_disk(offload.optimizer):
        fraction = _share(offload.optimizer)
        pairs = [(int(one.own_elems), one.has_master, one.held) for one in shards]
        total, record_elems = _C.optim_file_plan(pairs, fraction, (1 << moments) - 1, inside)
        window_elems = max(record_elems, _WINDOW_ELEMS if fraction < 1 else 0)
    grads = moving if _is_on_disk(offload.grads) else []
    total += _shards_in_memory(grads, _share(offload.grads))
    if not inside:
        total += _windows([(int(one.own_elems), one.param_bytes) for one in moving if one.in_file], window_elems)
        total += _windows([(int(one.own_elems), one.grad_bytes) for one in grads], window_elems)
    return total


def _trained(units: Sequence[UnitSizes]) -> list[UnitSizes]:
    return [unit for unit in units if unit.trainable]


def _is_on_disk(tier: Tier | str) -> bool:
    return isinstance(tier, Tier) and tier.kind == "nvme"


def _share(tier: Tier | str) -> float:
    return float(tier.fraction) if isinstance(tier, Tier) else 0.0


def _windows(sizes: Sequence[tuple[int, int]], window_elems: int) -> int:
    """Return the bytes of the windows of (elements, bytes of one) that are stepped in a file."""
    elems = min(sum(elems for elems, _ in sizes), _WINDOWS * window_elems)
    return elems * max((size for _, size in sizes), default=0)


def _shards_in_memory(grads: Sequence[UnitSizes], fraction: float) -> int:
    """Return the bytes of as many whole shards as there is room for: those under way, then those that wait for the next backward."""
    sizes = [in_pages(int(one.own_elems) * one.grad_bytes) for one in grads]
    capacity, held = max(_GRADS_BYTES, 2 * max(sizes, default=0)), 0
    for size in sizes:
        if held + size > capacity:
            break
        held += size
    return min(held, round(fraction * sum(sizes)))
