# SPDX-License-Identifier: Apache-2.0
"""``zeropp.save`` of a model with AdamW's states (12 bytes a parameter), one rank: durable and with checksums, beside
torch's DCP (no checksums) and fio's sequential writes; and how long ``background=True`` blocks the training, beside a
copy of the same bytes.

A disk may take new bytes slower into blocks that it never held (thin provisioning, flash) than into old ones, here by
half. So like stands beside like: ``new files`` all write to fresh files; ``spare files`` is the middle of a run
(``keep=1, spare=True``), where zeropp and fio write over an old file, and DCP over its own folder.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from pathlib import Path

import torch
import zeropp
from aio_peers import fio
from checkpoint_peers import clear, dcp_load, dcp_save, size_of, tensors, trained
from harness import ROOT, Need, Run, alone, alternate, timed

CLAIM = (
    "A durable checkpoint with checksums beside DCP's without, and the disk; training waits for a copy in memory only"
)
NEEDS = (Need("fio", program="fio", install="apt-get install fio"),)


def run(bench: Run) -> None:
    """Durable saves, then the blocked part of background saves."""
    model, optimizer = trained(25_000_000 if bench.quick else 100_000_000)
    state = None if alone() else tensors(model, optimizer)  # what peers save; its names are this tree's own
    whole_bytes = 12 * sum(p.numel() for p in model.parameters()) if state is None else size_of(state)
    rounds = 3 if bench.quick else 5
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".checkpoint-bench-") as name:
        ours, theirs, scratch = Path(name) / "ours", Path(name) / "dcp", Path(name) / "fio"
        if state is None:
            check_alone(bench, model, optimizer, ours)
        else:
            check(bench, model, optimizer, state, ours, theirs)
        case = f"{whole_bytes / 1e6:.0f} MB"

        def fio_pass(new: bool) -> float:
            if new:
                scratch.unlink(missing_ok=True)
                os.sync()
            return fio("io_uring", scratch, whole_bytes, "write", over=not new).seconds * 1e3

        samples = alternate(
            {
                "ours": timed(lambda: zeropp.save(ours, model, optimizer, step=1), lambda: clear(ours)),
                "DCP": timed(lambda: dcp_save(state, theirs), lambda: clear(theirs)),
                "fio": lambda: fio_pass(new=True),
            },
            rounds,
            ours=["ours"],
        )
        bench.compare(f"{case} new files", samples, ours="ours", peers=["DCP"], unit="ms", limit="fio")
        step = itertools.count(1)
        samples = alternate(
            {
                "ours": timed(
                    lambda: zeropp.save(ours, model, optimizer, step=next(step), keep=1, spare=True), os.sync
                ),
                "DCP": timed(lambda: dcp_save(state, theirs), os.sync),
                "fio": lambda: fio_pass(new=False),
            },
            rounds,
            warmup=2,
            ours=["ours"],
        )
        bench.compare(f"{case} spare files", samples, ours="ours", peers=["DCP"], unit="ms", limit="fio")
        flat = torch.cat([value.reshape(-1).view(torch.uint8) for value in (state or {"": torch.empty(0)}).values()])
        room = torch.empty_like(flat)

        def blocked() -> float:
            begun = time.perf_counter()
            saving = zeropp.save(ours, model, optimizer, step=1, background=True)
            took = (time.perf_counter() - begun) * 1e3
            saving.wait()
            return took

        samples = alternate(
            {"ours": blocked, "memcpy": timed(lambda: room.copy_(flat))}, rounds, warmup=2, ours=["ours"]
        )
        bench.compare(f"{case} blocked", samples, ours="ours", peers=["memcpy"], unit="ms", limit="memcpy")


def check_alone(bench: Run, model: torch.nn.Module, optimizer: object, ours: Path) -> None:
    """Check that a load returns what was saved."""
    zeropp.save(ours, model, optimizer, step=1)
    wanted = zeropp.full_state_dict(model)
    zeropp.load_full_state_dict(model, {name: torch.zeros_like(value) for name, value in wanted.items()})
    zeropp.load(ours, model, optimizer)
    found = zeropp.full_state_dict(model)
    same = all(torch.equal(found[name], value) for name, value in wanted.items())
    bench.check(same, "what was loaded differs from what was saved")


def check(bench: Run, model: object, optimizer: object, state: dict, ours: Path, theirs: Path) -> None:
    """Both give back what they were given."""
    zeropp.save(ours, model, optimizer, step=1)
    dcp_save(state, theirs)
    wanted = {name: value.clone() for name, value in state.items()}
    for load in (lambda: zeropp.load(ours, model, optimizer), lambda: dcp_load(state, theirs)):
        for value in state.values():
            value.zero_()
        load()
        same = all(torch.equal(value, wanted[name]) for name, value in state.items())
        bench.check(same, "what was loaded differs from what was saved")
