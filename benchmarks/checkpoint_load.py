# SPDX-License-Identifier: Apache-2.0
"""``zeropp.load`` of a model with AdamW's states (12 bytes a parameter), one rank, from a disk that has it no more in
memory: every byte verified, beside torch's DCP, which verifies nothing, and fio's sequential reads."""

from __future__ import annotations

import tempfile
from pathlib import Path

import zeropp
from aio_peers import fio
from checkpoint_peers import dcp_load, dcp_save, forget, size_of, tensors, trained
from checkpoint_save import check
from harness import ROOT, Need, Run, alternate, timed

CLAIM = "A load that verifies every byte beside DCP's, which verifies nothing, and the disk"
NEEDS = (Need("fio", program="fio", install="apt-get install fio"),)


def run(bench: Run) -> None:
    """Cold loads."""
    model, optimizer = trained(25_000_000 if bench.quick else 100_000_000)
    state = tensors(model, optimizer)
    whole_bytes = size_of(state)
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".checkpoint-bench-") as name:
        ours, theirs, scratch = Path(name) / "ours", Path(name) / "dcp", Path(name) / "fio"
        check(bench, model, optimizer, state, ours, theirs)
        zeropp.save(ours, model, optimizer, step=1)
        dcp_save(state, theirs)
        fio("io_uring", scratch, whole_bytes, "write")
        samples = alternate(
            {
                "ours": timed(lambda: zeropp.load(ours, model, optimizer), lambda: forget(ours)),
                "DCP": timed(lambda: dcp_load(state, theirs), lambda: forget(theirs)),
                "fio": lambda: fio("io_uring", scratch, whole_bytes, "read").seconds * 1e3,
            },
            3 if bench.quick else 5,
        )
        bench.compare(f"{whole_bytes / 1e6:.0f} MB cold", samples, ours="ours", peers=["DCP"], unit="ms", limit="fio")
