# SPDX-License-Identifier: Apache-2.0
"""Bodies of the ranks of test_doctor.py."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import zeropp
from zeropp.cli import main
from zeropp.health import check


def come_late() -> None:
    """From now on this rank comes 20 ms late to every large exchange, as one with a busy core or a bad link would."""
    health = sys.modules[check.__module__]
    seconds_of, best_of = health._all_reduce_seconds, health._best

    def late(core: Any, size: int) -> float:
        def best(block: Callable[[], object], repeats: int) -> float:
            return best_of(lambda: (time.sleep(0.02 if size >= health.MIB else 0.0), block()), repeats)

        health._best = best
        try:
            return seconds_of(core, size)
        finally:
            health._best = best_of

    health._all_reduce_seconds = late


def doctor(rank: int, ranks: int, slow: int, *options: str) -> int:
    """Run the command; rank `slow` (-1: none) is late in every exchange."""
    if rank == slow:
        come_late()
    return main(["doctor", *options])


def doctor_with_one_that(rank: int, ranks: int, what: str, *options: str) -> int:
    """Rank 1 joins the group, then dies, or stays away from the check."""
    if rank != 1:
        return main(["doctor", *options])
    dist.init_process_group("zeropp", timeout=timedelta(seconds=30))
    if what == "dies":
        os._exit(7)
    time.sleep(8)
    os._exit(7)


def prepares(rank: int, ranks: int) -> list[str]:
    """Preflight before training, on one rank that is late; what rank 0 logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeropp").addHandler(handler)
    if rank == 2:
        come_late()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(preflight=True))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return lines
