# SPDX-License-Identifier: Apache-2.0
"""Ranks that come to a collective which their code does not name: they say so in the store first, and nobody waits for ever.

``tensor.cpu()`` of a model that is held in slices looks like a thing that one rank may do alone. It is none: so each rank
counts itself in, and the collective begins only when all have. A rank that has waited long enough takes the count below
zero in the same step in which it looks whether the others have come, and whoever comes later finds it there.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch.distributed as dist

LIMIT_S = 60.0
TELL_AFTER_S = 10.0
_GONE = -(1 << 30)
_log = logging.getLogger("zeropp")


def all_come(key: str, what: str) -> bool:
    """Has every rank of the default group called this with the same key? False on all of them where one did not in time.

    Args:
        key: fresh for each time, and the same on every rank.
        what: for the log.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    ranks, began, told = dist.get_world_size(), time.monotonic(), False
    here = store.add(key, 1)
    while 0 < here < ranks:
        waited = time.monotonic() - began
        if waited > LIMIT_S:
            return bool(store.add(key, _GONE) == ranks + _GONE)  # all came in this very moment
        if waited > TELL_AFTER_S and not told:
            told = True
            _log.warning("rank %d waits for %d more to %s", dist.get_rank(), ranks - here, what)
        time.sleep(min(0.02, 0.0005 + waited / 20))
        here = store.add(key, 0)
    return bool(here > 0)


__all__ = ["all_come"]
