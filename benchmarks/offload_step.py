# SPDX-License-Identifier: Apache-2.0
"""The optimizer step with its states on disk, bf16 parameters and gradients, AdamW, one rank.

A step reads and writes 12 bytes a parameter (fp32 master and two moments). The limit moves the same bytes through the
same engine, records and buffers with nothing computed; the peer is the same step with its states in memory, so
``ratio`` says what the disk costs. Contenders end with the same parameters, bit for bit.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import zeropp
from harness import ROOT, Need, Run, alternate, timed
from torch import nn
from zeropp.aio import Engine

CLAIM = "A step with states on NVMe: >= 0.9 of the same bytes moved with nothing computed."
NEEDS: tuple[Need, ...] = ()
RECORD_ELEMS = 3 * 512 * 1024  # csrc/zero/tier.c: three kinds of a chunk
BUFFERS = 4
LAYER = 2000


def run(bench: Run) -> None:
    torch.set_num_threads(1)
    for millions in (20,) if bench.quick else (100, 500):
        measure(bench, millions, rounds=5)


def prepared(layers: int, **config: Any) -> tuple[nn.Module, Any]:
    """A stack of matrices with a bf16 gradient each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(LAYER, LAYER, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, adam = zeropp.prepare(model, adam, zeropp.Config(stage=1, device="cpu", **config))
    loss = sum((layer.weight * (0.5 + index)).sum() for index, layer in enumerate(model))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return model, adam


def copier(engine: Engine, path: str, elems: int) -> Any:
    """Every record read and written once, with two reads ahead and one write behind, as a step does."""
    buffers = [engine.empty(RECORD_ELEMS) for _ in range(BUFFERS)]
    for buffer in buffers:
        buffer.zero_()
    parts = [(first, min(RECORD_ELEMS, elems - first)) for first in range(0, elems, RECORD_ELEMS)]

    def part(index: int) -> torch.Tensor:
        return buffers[index % BUFFERS][: parts[index][1]]

    for index, (first, _) in enumerate(parts):
        engine.write(part(index), path, 4 * first)
    engine.flush()

    def copy() -> None:
        reads: dict[int, Any] = {}
        writes: dict[int, Any] = {}

        def begin(index: int) -> None:
            if index < len(parts):
                if index - BUFFERS in writes:
                    writes.pop(index - BUFFERS).wait()
                reads[index] = engine.read(part(index), path, 4 * parts[index][0])

        for index in range(BUFFERS - 1):
            begin(index)
        for index, (first, _) in enumerate(parts):
            reads.pop(index).wait()
            writes[index] = engine.write(part(index), path, 4 * first)
            begin(index + BUFFERS - 1)
        for write in writes.values():
            write.wait()

    return copy


def measure(bench: Run, millions: int, rounds: int) -> None:
    layers = max(1, millions * 1_000_000 // (LAYER * LAYER))
    elems = layers * LAYER * LAYER
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".offload-bench-") as folder:
        tier = zeropp.Offload(optimizer="nvme", path=folder)
        on_disk, disk_adam = prepared(layers, offload=tier)
        in_memory, memory_adam = prepared(layers)
        with Engine(32, 1 << 20) as engine:
            samples = alternate(
                {
                    "nvme": timed(disk_adam.step),
                    "states in memory": timed(memory_adam.step),
                    "aio, same bytes": timed(copier(engine, f"{folder}/copy", 3 * elems)),
                },
                rounds,
                warmup=2,  # the first step reads no moments
            )
        for mine, theirs in zip(on_disk.parameters(), in_memory.parameters(), strict=True):
            bench.check(torch.equal(mine, theirs), "the parameters differ after the same steps")
        held = zeropp.memory(on_disk)["cpu"]
        bench.compare(
            f"nvme bf16 {millions}M 1 rank", samples, ours="nvme", peers=["states in memory"], unit="ms",
            limit="aio, same bytes",
            extra={"bytes_read_and_written": 24 * elems, "buffer_bytes": held["tier_buffers"]["held"]},
        )  # fmt: skip
