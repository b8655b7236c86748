# SPDX-License-Identifier: Apache-2.0
"""torch's default group: how ``init_process_group("zeropp")`` meets, and a call of it before a framework chooses gloo.

Accelerate knows gloo alone on machines without a GPU, and leaves a group that stands as it is. Under gloo a lost rank is noticed after
half an hour, and a script that ends without ``destroy_process_group``, as Trainer's do, can be aborted at its very end ("terminate
called without an active exception"): a thread of gloo's drops a tensor while the interpreter goes.

``import zeropp`` loads this file, so it loads nothing else of zeropp.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

__all__ = ["BACKEND", "begin", "install"]

BACKEND = "zeropp"
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Handler = Callable[..., Iterator[Any]]


def install() -> None:
    """Have ``init_process_group("zeropp")`` check the address first, whether it comes from the environment or from a ``tcp://`` URL,
    and meet in a store that lives as long as the group (job_store.py). Other backends meet as before. Where torch keeps its
    handlers elsewhere, nothing is checked.
    """
    # torch.distributed.rendezvous is the function of that name.
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", None)
    if not isinstance(handlers, dict):
        return
    for scheme in ("env", "tcp"):
        plain = handlers.get(scheme)
        if plain is not None and not hasattr(plain, "_zeropp"):
            handlers[scheme] = _guarded(plain, scheme)


def _guarded(plain: Handler, scheme: str) -> Handler:
    def meet(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if not _is_for_zeropp():
            yield from plain(url, *args, **kwargs)
            return
        from zeropp.comm import job_store  # `import zeropp` loads this file alone: its time is measured

        place = job_store.place_of(scheme, url)
        if place is not None:
            job_store.check(place)
        if place is None or place.exists or not 0 <= place.rank < place.ranks:
            yield from plain(url, *args, **kwargs)
            return
        timeout = kwargs.get("timeout") or dist.distributed_c10d.default_pg_timeout
        yield job_store.find_store(place, timeout), place.rank, place.ranks
        raise RuntimeError("comm: torch asks for a second meeting of one group, which env:// and tcp:// cannot give")

    meet._zeropp = True  # type: ignore[attr-defined]
    return meet


def _is_for_zeropp() -> bool:
    """True if an ``init_process_group`` that names this backend waits for the answer, which the handler is not told."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "init_process_group" and "backend" in frame.f_locals:
            return "zeropp" in str(frame.f_locals["backend"])
        frame = frame.f_back
    return False


def begin(timeout: timedelta) -> None:
    """Make the default group, where a launcher has started several ranks and there is none yet."""
    launched = all(os.environ.get(name) for name in _LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1
    if launched and dist.is_available() and not dist.is_initialized():
        dist.init_process_group(BACKEND, timeout=timeout)
