# SPDX-License-Identifier: Apache-2.0
"""Try a GPU once before the first training on it: for each GPU, driver, torch and build of zeropp.

``ZEROPP_GPU_CHECK`` is ``auto`` (once, then remembered in the user's cache folder), ``always`` or ``off``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import torch

from zeropp import _C
from zeropp.errors import ConfigError
from zeropp.health.device import check_device, faults

VARIABLE = "ZEROPP_GPU_CHECK"
_CHOICES = ("auto", "always", "off")
NAMES = ("cuda",)
"""Devices that ``auto`` checks."""


def require_healthy(device: torch.device) -> None:
    """Raise zeropp.ConfigError where the GPU fails a quick check; return at once where it passed one before.

    Args:
        device: with its index. Devices other than CUDA are checked with ``ZEROPP_GPU_CHECK=always`` only.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in _CHOICES:
        raise ConfigError(f"{VARIABLE}={choice} is not allowed; wanted {', '.join(_CHOICES[:-1])} or {_CHOICES[-1]}")
    if choice == "off" or device.type == "cpu" or (choice == "auto" and device.type not in NAMES):
        return
    record = _folder() / f"{_key(device)}.json"
    if choice == "auto" and record.is_file():
        return
    failed = faults(check_device(device, quick=True))
    if failed:
        raise ConfigError(
            f"prepare: {device} fails the check of its first use: {failed}; `python -m zeropp doctor --device {device.type}` shows all, "
            f"and {VARIABLE}=off trains all the same"
        )
    _remember(record, device)


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "zeropp" / "gpu-checks"


def _key(device: torch.device) -> str:
    """Return a name for what the result depends on: the GPU, its driver, torch and this build."""
    built = Path(_C.__file__).stat()
    parts = [_C.version(), built.st_size, built.st_mtime_ns, torch.__version__, _C.cuda_driver(), device.type]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_properties(device).uuid)
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def _remember(record: Path, device: torch.device) -> None:
    """Write the record; in a home that cannot be written, the check is made again the next time."""
    partial = record.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"device": str(device), "torch": torch.__version__}), encoding="utf-8")
        partial.replace(record)
