# SPDX-License-Identifier: Apache-2.0
"""delayed_cases with every rank on a host of its own, over the loopback interface: gathers, reductions and votes are collectives there,
and parameters in a file are shards in each rank's rank file."""

from __future__ import annotations

import os

os.environ["ZEROPP_HOST_ID"] = os.environ["RANK"]  # before the communicator is made

from delayed_cases import (
    EXACT,
    a_disk_that_fails,
    a_full_disk_of_parameters,
    checkpoints,
    delayed,
    equals_its_definition,
    files,
    gradients_that_cannot_be_read,
    memory_of_files,
    parts_in_files,
    prepared,
    shards_of_whole_pages,
    values_of,
)
from state_cases import scratch
from training import Recipe, ours, same, train
from zeropp import Comm


def equal_everywhere() -> None:
    """Every stage, gathers that cross once a step, parameters, gradients and states in files, whole and in part."""
    recipe = Recipe(steps=EXACT + 3, clip=0.5, micro=2)
    with scratch() as path:
        for precision in (None, "bf16"):
            wanted = ours(recipe, stage=1, precision=precision, **delayed())
            for place in (
                {"stage": 2, **delayed(path)},
                {"stage": 3, **delayed()},
                {"stage": 3, "prefetch": 0, "comm": Comm(secondary_shard="host"), **delayed()},
                files(path, grads=0.0, states=0.0),
                files(path, params=0.0, states=0.0),
                files(path, 0.4, 0.7, 0.6),
                files(path, checksums=True),
            ):
                same(f"{precision}, {place}", ours(recipe, precision=precision, **place), wanted)


def in_eight_bits() -> None:
    """Transfers are rounded as without a delay: the second copy of a host holds what was published, and no older values."""
    wire = Comm(params="int8", grads="int8")
    kept = Comm(params="int8", grads="int8", secondary_shard="host")
    runs = []
    for comm in (wire, kept):
        model, optimizer = prepared(comm=comm, prefetch=0, **delayed(exact=1))
        runs.append((train(model, optimizer, 0, 6), values_of(model)))
        del model, optimizer
    assert runs[0][0] == runs[1][0]
    assert all((a == b).all() for a, b in zip(runs[0][1], runs[1][1], strict=True))


CASES = {
    function.__name__: function
    for function in (
        equals_its_definition, equal_everywhere, in_eight_bits, parts_in_files, shards_of_whole_pages, memory_of_files, checkpoints,
        a_disk_that_fails, a_full_disk_of_parameters, gradients_that_cannot_be_read,
    )
}  # fmt: skip
