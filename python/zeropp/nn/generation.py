# SPDX-License-Identifier: Apache-2.0
"""``model.generate`` of a partitioned model: its parameters are gathered once a call, not once a token and layer.

While they are whole the ranks need not meet, so one may generate longer than another. Where the whole model does not fit
into free memory, layers are gathered as they come, and the ranks go on together until the last one has finished
(``synced_gpus``).
"""

from __future__ import annotations

import functools
import os
import weakref
from pathlib import Path
from typing import Any

from torch import nn

from zeropp.comm.collective import Ranks
from zeropp.zero.access import gathered
from zeropp.zero.engine import Engine, engine_of
from zeropp.zero.model_state import SHARD

BUDGET = 0.5
"""Share of the free memory that the gathered parameters of all ranks of the host may take."""


def gather_for_generation(model: nn.Module) -> None:
    """Have ``model.generate``, if there is one, gather first. Calls of ``generate`` become collective. A second call does nothing."""
    plain = getattr(type(model), "generate", None)
    if plain is None or "generate" in model.__dict__:
        return
    engine = engine_of(model)
    if not any(unit.place == SHARD for unit in engine.units):
        return
    this = weakref.ref(model)

    @functools.wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        held = this()
        assert held is not None
        engine_of(held).flush()  # texts of the newest weights, also where a delayed update is under way
        if not all(Ranks(engine_of(held)).exchange(_fits(engine_of(held)))):
            kwargs.setdefault("synced_gpus", True)
            return plain(held, *args, **kwargs)
        with gathered(held):
            return plain(held, *args, **kwargs)

    model.__dict__["generate"] = generate


def _fits(engine: Engine) -> bool:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    whole_bytes = sum(unit.elems * unit.dtype.itemsize for unit in engine.units if unit.place == SHARD)
    return whole_bytes * ranks_here <= BUDGET * _free_bytes()


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
