# SPDX-License-Identifier: Apache-2.0
"""Count the checks of a device's first use under each setting. The simulated GPU stands for a CUDA device here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import sim  # noqa: F401  (makes the device)
import torch
import zeropp
import zeropp.ops
from zeropp.health import first_use

CHECKS: list[torch.device] = []
check_device = first_use.check_device


def counted(device: torch.device, quick: bool) -> Any:
    CHECKS.append(device)
    return check_device(device, quick)


def checks(choice: str) -> int:
    os.environ["ZEROPP_GPU_CHECK"] = choice
    before = len(CHECKS)
    first_use.require_healthy(torch.device("sim", 0))
    return len(CHECKS) - before


def error(choice: str) -> str:
    try:
        checks(choice)
    except zeropp.ConfigError as wrong:
        return str(wrong)
    return "no error"


first_use.check_device = counted
found: dict[str, Any] = {choice: checks(choice) for choice in ("auto", "always", "off")}
found["records"] = len(list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.json")))
first_use.NAMES = ("cuda", "sim")
found["remembered"] = checks("auto")
right = zeropp.ops.norm_squares
zeropp.ops.norm_squares = lambda tensors: tuple(x if x.is_cpu else x + 1 for x in right(tensors))
found["broken"], found["wrong"] = error("always"), error("maybe")
print(json.dumps(found))
