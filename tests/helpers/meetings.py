# SPDX-License-Identifier: Apache-2.0
"""Let the ranks of a test meet again as if they were on other hosts."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

_meetings = itertools.count()


@contextlib.contextmanager
def over(hosts: str) -> Iterator[None]:
    """Let the ranks of the block be on hosts of these names, and on one host again after it."""
    backend = dist.get_backend()
    _meet(hosts, backend)
    yield
    _meet("aaaa", backend)


def _meet(hosts: str, backend: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ["ZEROPP_HOST_ID"] = hosts[rank]
    store = dist.FileStore(str(Path(tempfile.gettempdir(), f"meeting{next(_meetings)}")), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
