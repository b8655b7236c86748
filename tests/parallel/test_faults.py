# SPDX-License-Identifier: Apache-2.0
"""A disk that fails on one stage of a pipeline: all ranks of the job hear of it."""

from __future__ import annotations

import zeropp
from disk import full_disk, scratch
from pipelines import Run, mesh_of
from ranks import of_all_ranks, on_ranks
from tiny import sentence
from zeropp.zero.offload import optim_file


@on_ranks(2)
def test_a_disk_that_fails_on_one_stage() -> None:
    """The states of the second stage have no room: both stages raise an error, with its rank."""
    with scratch() as folder, full_disk(optim_file, 1, 1 << 14):
        offload = zeropp.Offload(optimizer=zeropp.Tier("nvme", path=folder))
        told = of_all_ranks(sentence(lambda: Run(mesh_of(2, 1), "1F1B", stage=2, offload=offload), zeropp.TierError))
    assert 'states": 32768 bytes at offset 0' in told[1] and folder in told[1], told
    assert "rank 1: aio: cannot reserve" in told[0], told
