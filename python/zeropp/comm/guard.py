# SPDX-License-Identifier: Apache-2.0
"""torch's rendezvous, guarded: ``init_process_group("zeropp")`` checks the job's address (address.py) and meets in a store that lives
as long as the group (start.py). ``import zeropp`` installs this, so the file loads nothing else of zeropp."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist

Handler = Callable[..., Iterator[Any]]


def install() -> None:
    """Have ``init_process_group("zeropp")`` check the address first, whether it comes from the environment or from a ``tcp://`` URL,
    and meet in a store that lives as long as the group (start.py). Other backends meet as before. Where torch keeps its
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
        from zeropp.comm import address, start  # `import zeropp` loads this file alone: its time is measured

        place = address.place_of(scheme, url)
        if place is not None:
            address.check(place)
        if place is None or place.exists or not 0 <= place.rank < place.ranks:
            yield from plain(url, *args, **kwargs)
            return
        timeout = kwargs.get("timeout") or dist.distributed_c10d.default_pg_timeout
        yield start.find_store(place, timeout), place.rank, place.ranks
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
