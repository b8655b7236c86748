# SPDX-License-Identifier: Apache-2.0
"""How GPUs that hold shards would exchange them: the choice of ``Comm(gather="auto")``, and why (docs/design/0052)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeropp import _C
from zeropp.errors import Error, counted


@dataclass(frozen=True)
class GatherWay:
    """The way, "copy" or "nccl", and what decides."""

    way: str
    why: str
    nccl: str
    """The NCCL that is found here, or why there is none."""

    def __str__(self) -> str:
        return f"shards on GPUs: Comm(gather='auto') is {self.way!r}, because {self.why}; {self.nccl}"

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON takes."""
        return {"way": self.way, "why": self.why, "nccl": self.nccl}


def gather_way(devices: Sequence[torch.device], hosts: int = 1) -> GatherWay:
    """Return what ranks on these GPUs of each of so many hosts would do. ``prepare`` tries it; this asks the driver."""
    if hosts > 1:
        return GatherWay("nccl", f"GPUs of {hosts} hosts cannot map each other's memory", _nccl())
    for one in devices:
        for other in devices:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return GatherWay("nccl", f"{one} cannot map the memory of {other}", _nccl())
    if len(devices) == 1:
        return GatherWay("copy", "there is one GPU on this host (over several hosts it is 'nccl')", _nccl())
    maps = f"each of {counted(len(devices), 'GPU')} of this host can map the memory of the others (over several hosts it is 'nccl')"
    return GatherWay("copy", maps, _nccl())


def _nccl() -> str:
    try:
        value = _C.nccl_version()
    except Error as error:
        return f"no NCCL is found: {error}"
    return f"NCCL {value // 10000}.{value % 10000 // 100}.{value % 100} is found"
