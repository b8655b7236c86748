# SPDX-License-Identifier: Apache-2.0
"""Settings that ``bench-io`` measured for each device: kept under the user's cache folder, read when an engine is made."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["IoSettings", "cache_file", "device_name", "measured", "shape", "store"]


MOST_DEPTH = 1024
"""Of an engine (ZPP_AIO_MAX_DEPTH, csrc/aio/engine.h)."""


@dataclass(frozen=True, kw_only=True)
class IoSettings:
    """The best settings of one device."""

    depth: int
    """Operations in flight."""
    block_bytes: int
    """Bytes of one operation."""
    read_gb_s: float
    """10^9 bytes a second read, as measured then. Shared disks drift: a hint, not a promise."""
    write_gb_s: float
    """The same for writing."""


def cache_file() -> Path:
    """Return ``io.json`` in ``$XDG_CACHE_HOME/zeropp`` or ``~/.cache/zeropp``.

    Raises:
        FileNotFoundError: there is no home, as for a container's nameless user.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(base) if base else Path.home() / ".cache"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None
    return folder / "zeropp" / "io.json"


def device_name(path: str | os.PathLike[str]) -> str:
    """Return the name of the device that holds a path: host, block device its size: another disk in its place is
    new."""
    number = Path(path).stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    name, sectors = f"{os.major(number)}:{os.minor(number)}", ""
    with contextlib.suppress(OSError):
        sectors = (block / "size").read_text().strip()
        name = block.resolve().name
    return f"{platform.node()}/{name}/{sectors}"


def _load() -> dict[str, object]:
    try:
        values = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}  # never measured, or a file of another program: measuring again repairs it
    return values if isinstance(values, dict) else {}


def measured(path: str | os.PathLike[str]) -> IoSettings | None:
    """Return the settings measured for the device of ``path``; None: never measured, or the path is not there."""
    try:
        values = _load().get(device_name(path))
        known = IoSettings(**values) if isinstance(values, dict) else None
    except (OSError, TypeError):
        return None
    return known if known is not None and _can_be(known) else None


def _can_be(known: IoSettings) -> bool:
    """True if an engine accepts the settings. The file is the user's and may contain anything."""
    whole = all(type(value) is int for value in (known.depth, known.block_bytes))
    return (
        whole
        and 1 <= known.depth <= MOST_DEPTH
        and known.block_bytes % 4096 == 0
        and 1 <= known.block_bytes >> 12 <= 1 << 18
    )


DEFAULT = IoSettings(depth=32, block_bytes=1 << 20, read_gb_s=0.0, write_gb_s=0.0)
"""Settings of a device that was not measured."""


def shape(folders: Sequence[str | os.PathLike[str]], stripe_bytes: int) -> tuple[int, int] | None:
    """Return depth and bytes of a block for files that are striped over folders; None: none of their devices was
    measured.

    An operation lies in one stripe, and is as large as all of the devices like. The depth gives each folder the bytes in flight
    that its device had when it was measured, so that together they have the sum.
    """
    known = [measured(folder) for folder in folders]
    if not any(known):
        return None
    each = [one or DEFAULT for one in known]
    if len(each) == 1:
        return each[0].depth, each[0].block_bytes
    block_bytes = min(stripe_bytes, *(one.block_bytes for one in each))
    flight_bytes = sum(one.depth * one.block_bytes for one in each)
    return min(MOST_DEPTH, -(-flight_bytes // block_bytes)), block_bytes


def store(path: str | os.PathLike[str], settings: IoSettings) -> Path:
    """Keep settings for the device of ``path``; the file they are in, replaced atomically."""
    target = cache_file()
    values = {**_load(), device_name(path): asdict(settings)}
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix="io.json.")
    with os.fdopen(handle, "w") as file:
        json.dump(values, file, indent=1, sort_keys=True)
    Path(partial).replace(target)
    return target
