# SPDX-License-Identifier: Apache-2.0
"""Ranks that come to a collective which their code does not name: they say so in the store first, and nobody waits for ever.

``tensor.cpu()`` of a model that is held in shards looks like a thing that one rank may do alone. It is none: so each rank
counts itself in, and the collective begins only when all have. A rank that has waited long enough takes the count below
zero in the same step in which it looks whether the others have come, and whoever comes later finds it there.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch.distributed as dist

from zeropp.comm.rendezvous import Reminder

LIMIT_S = 60.0
_GONE = -(1 << 30)


def all_come(key: str, what: str) -> bool:
    """True if every rank of the default group called this with the same key. False on all of them where one did not in time.

    Args:
        key: fresh for each time, and the same on every rank.
        what: for the log.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    ranks = dist.get_world_size()
    reminder = Reminder(f"rank {dist.get_rank()}", LIMIT_S)
    here = store.add(key, 1)
    while 0 < here < ranks:
        waited = reminder.waited_s()
        if waited > LIMIT_S:
            return bool(store.add(key, _GONE) == ranks + _GONE)  # all came in this very moment
        absent = ranks - here
        reminder.tell(functools.partial("{} more of {} ranks to {}".format, absent, ranks, what))
        time.sleep(min(0.02, 0.0005 + waited / 20))
        here = store.add(key, 0)
    return bool(here > 0)


__all__ = ["all_come"]
