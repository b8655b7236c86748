# SPDX-License-Identifier: Apache-2.0
"""Count what a rank with an accelerator will hold, by tier: ``"device"``, ``"pinned"`` (page-locked memory of the host) and ``"cpu"``.

The arithmetic is that of csrc/zero: placement/wrapped.c (memory of gathered units), reduce_device.c (buckets on the device),
grad_offload.c (blocks of gradients that go down) and zero.c (what is page-locked).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from zeropp import _C
from zeropp.config import Config
from zeropp.errors import ConfigError, counted
from zeropp.zero.formulas import PAGE_BYTES, READ_AHEAD_BYTES, loads_units, rounded, wire_bytes
from zeropp.zero.model.units import UnitPlan, numbers
from zeropp.zero.model_state import shards_on_device

_WRAP_ALIGN_BYTES = 512  # ALIGN_BYTES of csrc/base/wrap.c
_BUCKET_ALIGN_BYTES = 64  # ZPP_BUCKET_ALIGN_BYTES of csrc/zero/reduce.h
_STAGINGS = 2  # ZPP_STAGINGS of csrc/zero/internal.h


class PlannedUnit(Protocol):
    """Describe one unit on one rank, as ``zeropp.zero.memory_plan`` counts it."""

    @property
    def plan(self) -> UnitPlan: ...
    @property
    def ranks(self) -> int: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def in_file(self) -> bool: ...
    @property
    def moves(self) -> bool: ...
    @property
    def whole_bytes(self) -> int: ...
    @property
    def shard_bytes(self) -> int: ...
    @property
    def params_wire_bytes(self) -> int: ...
    @property
    def bucket_bytes(self) -> int: ...
    @property
    def grads_wire_bytes(self) -> int: ...


Tiers = dict[str, dict[str, int]]


def laid_out(sizes: Iterable[int]) -> int:
    """Return the bytes of units that lie one after the other (zpp_unit_next_offset of csrc/zero/unit.c)."""
    used = 0
    for size in sizes:
        used = rounded(used, PAGE_BYTES if size >= 64 << 10 else 64) + size
    return used


def params_bytes(units: Sequence[PlannedUnit]) -> int:
    """Return the memory of parameters on the device, between passes, where their shards are there. Behind a shard lies its quantised
    copy, if parameters travel so."""
    sizes: list[int] = []
    for unit in units:
        sizes.append(unit.shard_bytes if unit.moves else unit.whole_bytes)
        if unit.moves and unit.params_wire_bytes < unit.shard_bytes:
            sizes.append(unit.params_wire_bytes)
    return laid_out(sizes)


def _is_tied(unit: PlannedUnit) -> bool:
    """Return True if several modules share a parameter of the unit."""
    return any(len(names) > 1 for names in unit.plan.names)


def gathered_bytes(units: Sequence[PlannedUnit], config: Config, device: torch.device) -> int:
    """Return the memory of whole units that move: of two of the largest and what is read ahead, and of each tied unit."""
    moving = [unit for unit in units if unit.moves or unit.in_file]
    tied = [unit for unit in moving if _is_tied(unit)]
    wrapping = [unit.whole_bytes for unit in moving if unit not in tied]
    ahead = config.prefetch if isinstance(config.prefetch, int) else READ_AHEAD_BYTES
    grain = 2 << 20 if device.type == "cuda" else PAGE_BYTES
    addresses = sum(rounded(size, _WRAP_ALIGN_BYTES) for size in wrapping)
    memory = min(rounded(2 * max(wrapping, default=0) + ahead, grain), rounded(addresses, grain))
    return memory + sum(unit.whole_bytes for unit in tied)


def _arrival_bytes(units: Sequence[PlannedUnit], config: Config, ranks: int) -> int:
    """Return the memory on the device to which quantised copies of shards on the host come, one after the other."""
    if ranks == 1 or config.comm.params == "exact":
        return 0
    return max((unit.params_wire_bytes for unit in units if unit.moves), default=0)


def sent_bucket_bytes(unit: PlannedUnit, config: Config) -> int:
    """Return the bytes of a bucket on the device, with the area in which its gradients travel in fewer bits."""
    stays, travels = config.gradient_dtypes(unit.plan.dtype)
    if unit.ranks == 1:
        return unit.bucket_bytes
    if config.stage >= 2 and config.comm.grads != "exact":
        area = unit.ranks * rounded(unit.grads_wire_bytes, _BUCKET_ALIGN_BYTES)
    else:
        area = unit.ranks * unit.grads_wire_bytes if travels != stays else 0
    return unit.bucket_bytes + rounded(area, _BUCKET_ALIGN_BYTES)


def _stride_bytes(unit: PlannedUnit, config: Config) -> int:
    """Return the bytes from one rank's gradients to the next, as they travel (zpp_device_stride of csrc/zero/reduce_device.c)."""
    quantised = config.stage >= 2 and config.comm.grads != "exact"
    return rounded(unit.grads_wire_bytes, _BUCKET_ALIGN_BYTES) if quantised else unit.grads_wire_bytes


def came_bytes(units: Sequence[PlannedUnit], config: Config) -> int:
    """Return the memory on the device where NCCL moves the shards: for one bucket as it comes, and for the zeros of a rank without a
    gradient (make_own_buckets of csrc/zero/reduce_device.c)."""
    trained = [unit for unit in units if unit.trainable]
    strides = [_stride_bytes(unit, config) for unit in trained]
    came = [unit.ranks * stride for unit, stride in zip(trained, strides, strict=True)]
    return max(came, default=0) + max(strides, default=0)


def came_params_bytes(units: Sequence[PlannedUnit]) -> int:
    """Return the memory on the device for the quantised copies of one unit that NCCL brings."""
    quantised = [unit for unit in units if unit.moves and unit.params_wire_bytes < unit.shard_bytes]
    return max((unit.ranks * rounded(unit.params_wire_bytes, _BUCKET_ALIGN_BYTES) for unit in quantised), default=0)


def bucket_bytes(units: Sequence[PlannedUnit], config: Config, ranks: int) -> int:
    """Return the memory on the device of gradients on their way to the ranks that own them."""
    sizes = [sent_bucket_bytes(unit, config) for unit in units if unit.trainable]
    if ranks == 1 or config.stage <= 1 or not sizes:
        return 0
    return min(sum(sizes), max(config.bucket_bytes or sum(sizes), max(sizes))) + max(sizes)


def block_bytes(units: Sequence[PlannedUnit], config: Config) -> int:
    """Return the memory on the device in which gradients collect before they go down, one unit after the other; with accumulation all
    units wait."""
    sizes = [unit.bucket_bytes for unit in reversed(units) if unit.trainable]
    if config.accumulate > 1:
        return sum(sizes)
    blocks: list[int] = []
    for size in sizes:  # a unit takes the smallest block that fits
        if not any(block >= size for block in blocks):
            blocks.append(size)
    return sum(blocks)


def page_locked(plans: Sequence[UnitPlan], config: Config, ranks: int, hosts: int) -> dict[str, int]:
    """Return the bytes of the host that each rank brings to what is page-locked: its shards, with their quantised copies, its buckets, and
    what units are read to, or come to from other hosts."""
    buckets = largest = 0
    shards: list[int] = []
    for plan in plans:
        elems, shard_elems = _layout(plan, ranks)
        in_file = loads_units(config) and not plan.replicates(config.units)
        if not in_file:
            shards.append(shard_elems * plan.dtype.itemsize)
        if in_file or (hosts > 1 and not loads_units(config)):
            largest = max(largest, elems * plan.dtype.itemsize)
        if plan.trainable:
            size = elems * config.gradient_dtypes(plan.dtype)[0].itemsize + len(plan.params)
            buckets += rounded(size, _BUCKET_ALIGN_BYTES)
    if config.stage >= 2:
        buckets = min(rounded(buckets, PAGE_BYTES), rounded(config.bucket_bytes or buckets, PAGE_BYTES))
    copies = _quantised_copies(plans, config, ranks) if hosts == 1 else 0
    return {"params": laid_out(shards) + copies, "buckets": buckets, "stagings": _STAGINGS * largest}


def _layout(plan: UnitPlan, ranks: int) -> tuple[int, int]:
    """Return (elements of the unit, of a shard)."""
    elems, shard_elems = _C.unit_layout(
        [numbers(p) for p in plan.params], plan.dtype.itemsize, ranks // max(1, plan.parted)
    )
    return elems, shard_elems


def _quantised_copies(plans: Sequence[UnitPlan], config: Config, ranks: int) -> int:
    """Return the bytes of the quantised copies of a rank's shards, which the ranks of one host read."""
    if ranks == 1 or config.comm.params == "exact":
        return 0
    moving = [plan for plan in plans if not plan.replicates(config.units)]
    sizes = (wire_bytes(config.comm.params, plan.dtype, _layout(plan, ranks)[1], config) for plan in moving)
    return sum(rounded(size, _BUCKET_ALIGN_BYTES) for size in sizes)


def beside(
    units: Sequence[PlannedUnit], held: dict[str, int], config: Config, ranks: int, hosts: int, device: torch.device
) -> Tiers:
    """Return what is held by tier where shards are on the host.

    Args:
        held: by kind, as if all were in memory of the CPU.
    """
    locked = page_locked([unit.plan for unit in units], config, ranks, hosts)
    staying = sum(unit.whole_bytes for unit in units if not unit.moves and not unit.in_file)
    gathered = gathered_bytes(units, config, device) + (_arrival_bytes(units, config, ranks) if hosts == 1 else 0)
    pinned = {"params": locked["params"], "grads": held["grads"], "buckets": held["buckets"]}
    mapped = ranks if hosts == 1 else 1  # ranks whose shards this one reads
    pinned["page_locked"] = locked["params"] * mapped + locked["buckets"] + locked["stagings"]
    there = {
        "params": staying,
        "gathered": gathered,
        "buckets": block_bytes(units, config),
        "autograd": held["autograd"],
    }
    elsewhere = {*pinned, *there}
    if config.stored_name is not None:  # rounded weights are not page-locked, and units go up through staging memory
        pinned = {"page_locked": pinned["page_locked"]}
        elsewhere.remove("params")
    rest = {kind: size for kind, size in held.items() if kind not in elsewhere}
    return {"device": there, "pinned": pinned, "cpu": rest}


def require_host_memory(plans: Sequence[UnitPlan], config: Config, device: torch.device, comm: Any) -> None:
    """Raise zeropp.ConfigError where the ranks of this host would page-lock more memory than it has. ``comm``: of the ranks that partition
    the model; None: one."""
    if device.type == "cpu" or shards_on_device(config, device):
        return
    count, hosts, ranks = (1, 1, 1) if comm is None else (comm.ranks, comm.hosts, len(comm.host_ranks))
    locked, (total, where) = page_locked(plans, config, count, hosts), host_memory()
    wanted = ranks * sum(locked.values())
    if wanted > total:
        raise ConfigError(
            f"prepare: {counted(ranks, 'rank')} of this host {'is' if ranks == 1 else 'are'} to page-lock {wanted} bytes of its memory "
            f"({locked['params']} bytes of parameters a rank, {locked['buckets']} for gradients on their way, {locked['stagings']} for units "
            f"that are read), and {where} is {total} bytes; start fewer ranks here, lower bucket_bytes, keep shards on the device (leave "
            "Offload out), or put them on a disk with Offload(params='nvme', grads='nvme', optimizer='nvme', path=...)"
        )


def host_memory() -> tuple[int, str]:
    """Return (bytes, what they are): of the machine, or the limit of the container if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(path).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < total:
            return int(limit), "the container's limit of memory"
    return total, "the memory of the machine"
