# SPDX-License-Identifier: Apache-2.0
"""Folders that ranks share, disks that are full, and bits that change."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    """A folder that all ranks share. At the end it must be empty: a model that is gone leaves nothing on the disk."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    yield shared[0]
    gc.collect()
    gc.collect()  # an exception's frames hold a loss, whose graph holds the model: two rounds
    dist.barrier()
    left = sorted(one.name for one in Path(shared[0]).iterdir() if one.name.startswith("zeropp-scratch-"))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(shared[0])
    assert not left, left


@contextlib.contextmanager
def full_disk(tier: Any, rank: int, room_bytes: int) -> Iterator[None]:
    """Files of one rank may not grow beyond that, from where the module `tier` has its scratch folder on. Before that the limit
    would reach the shared memory of the ranks, which are files too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class FullScratch(tier.Scratch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if dist.get_rank() == rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, before[1]))

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tier, "Scratch", FullScratch)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def change(path: Path, first: int, size: int = 4096) -> None:
    """Flip a bit in the exponent of each fp32 value of a part of a file."""
    descriptor = os.open(path, os.O_RDWR)
    values = bytearray(os.pread(descriptor, size // 4 * 4, first))
    values[3::4] = bytes(one ^ 1 for one in values[3::4])
    os.pwrite(descriptor, values, first)
    os.fsync(descriptor)
    os.close(descriptor)
