# SPDX-License-Identifier: Apache-2.0
"""Reports to Trainer's user: one table of memory at the start, and metrics beside the loss."""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import TrainerCallback
from transformers.utils import logging

import zeropp
from zeropp import zero
from zeropp.errors import counted

logger = logging.get_logger(f"transformers.{__name__}")


def memory_table(model: Any) -> str:
    """Return bytes a rank by kind of state: by the paper's formula, and held now."""
    engine, found = zero.engine.engine_of(model), zeropp.memory(model)
    lines = [
        f"zeropp: stage {engine.stage}, {counted(engine.ranks, 'rank')}, "
        f"{counted(found['parameters'], 'parameter')} in {counted(len(engine.units), 'unit')}; memory a rank:",
        f"  {'':<10} {'planned':>12} {'held now':>12}",
    ]
    for kind in ("params", "grads", "master", "optimizer"):
        one = _in_memory(found, kind)
        lines.append(f"  {kind:<10} {_size(one['planned']):>12} {_size(one['held']):>12}")
    a_parameter = found["bytes_per_parameter"]
    lines.append(f"  bytes a parameter {a_parameter['planned']:>4.1f} {a_parameter['held']:>12.1f}")
    return "\n".join(lines)


def _in_memory(found: dict[str, Any], kind: str) -> dict[str, int]:
    """Return planned and held bytes of a kind in the memory of the host and of an accelerator together."""
    tiers = [found[tier][kind] for tier in ("cpu", "pinned", "device") if kind in found.get(tier, {})]
    return {name: sum(one[name] for one in tiers) for name in ("planned", "held")}


def _size(bytes_: int) -> str:
    value = float(bytes_)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class MemoryTable(TrainerCallback):
    """Shows the table when training begins, once, on the main process: above the progress bar, or in the log without one.

    ``trainer.remove_callback(zeropp.hf.MemoryTable)`` removes it.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs.get("model")
        if model is None or not state.is_world_process_zero or not zero.prepare.is_prepared(model):
            return
        if args.disable_tqdm:
            logger.info(memory_table(model))
        else:
            tqdm.write(memory_table(model), file=sys.stderr)


class _Counted(NamedTuple):
    """Totals that only grow."""

    time_s: float
    read_bytes: int
    gather_ns: int
    disk_bytes: int


def _count(model: Any = None) -> _Counted:
    links = zeropp.traffic()
    disk = sum(one.get("bytes", 0) for one in links.pop("nvme", {}).values())
    read = sum(one["bytes"] for kinds in links.values() for one in kinds.values())
    gathers = 0 if model is None else zero.engine.engine_of(model).core.gather_ns()
    return _Counted(time.perf_counter(), read, gathers, disk)


class Metrics:
    """Numbers for ``Trainer.log``, all of this rank."""

    def __init__(self) -> None:
        self._before = _count()

    def collect(self, model: Any) -> dict[str, float]:
        """Since the last time: ``zeropp/traffic_bytes`` (read from other ranks), ``zeropp/gather_ms`` (for which modules waited for their
        parameters), and where something is on disk ``zeropp/disk_gbps`` (10^9 bytes a second, read and written). Now:
        ``zeropp/held_bytes``; with fp16 ``zeropp/loss_scale``."""
        now, before = _count(model), self._before
        self._before = now
        tiers = zeropp.memory(model)
        held = [
            one
            for tier in ("cpu", "pinned", "device")
            for kind, one in tiers.get(tier, {}).items()
            if kind != "page_locked"
        ]
        found: dict[str, float] = {
            "zeropp/traffic_bytes": now.read_bytes - before.read_bytes,
            "zeropp/gather_ms": round((now.gather_ns - before.gather_ns) / 1e6, 3),
            "zeropp/held_bytes": sum(one["held"] for one in held),
        }
        if now.disk_bytes:
            seconds = max(now.time_s - before.time_s, 1e-9)
            found["zeropp/disk_gbps"] = round((now.disk_bytes - before.disk_bytes) / 1e9 / seconds, 6)
        scaler = zero.engine.engine_of(model).scaler
        if scaler.enabled:
            found["zeropp/loss_scale"] = scaler.scale
        return found
