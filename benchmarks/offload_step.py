# SPDX-License-Identifier: Apache-2.0
"""The optimizer step with its states in host memory or on disk, bf16 parameters and gradients, AdamW, one rank.

``cpu``: all of ``optimizer.step()``, which looks at every gradient before it changes anything, against what peers do with
bf16: cast the gradients, step fp32 masters, cast back. The peers take turns on one set of buffers.

``nvme``: a step reads and writes 12 bytes a parameter (fp32 master and two moments). The limit moves the same bytes through the
same engine, records and buffers with nothing computed; the peer is the same step with its states in memory, so
``ratio`` says what the disk costs. Contenders end with the same parameters, bit for bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import zeropp
from harness import ROOT, Need, Run, alternate, timed
from torch import nn
from zeropp.aio import Engine

CLAIM = (
    "A step on the CPU: >= 1.5x torch's fused one between casts; with states on NVMe: >= 0.9 of the same bytes moved with "
    "nothing computed."
)
NEEDS = (Need("DeepSpeedCPUAdam", module="deepspeed"),)
RECORD_ELEMS = 3 * 512 * 1024  # csrc/zero/offload/optim_file.c: three kinds of a chunk
BUFFERS = 4
LAYER = 2000


def run(bench: Run) -> None:
    torch.set_num_threads(1)
    check_peers(bench)
    for millions in (20,) if bench.quick else (100, 500):
        measure_cpu(bench, millions, rounds=7)
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


class Peers:
    """fp32 masters and moments of the same matrices, for steppers that know fp32 only."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        first = [nn.Linear(LAYER, LAYER, bias=False, dtype=torch.bfloat16).weight.detach() for _ in range(layers)]
        self.low, self.low_grads = first, [torch.full_like(one, 0.5 + index) for index, one in enumerate(first)]
        self.masters = [nn.Parameter(one.float()) for one in first]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in self.masters]

    def step_of(self, optimizer: torch.optim.Optimizer, count: Any) -> Callable[[], None]:
        """Cast, step, cast, with these masters and moments."""
        for master, (mean, square) in zip(self.masters, self.moments, strict=True):
            optimizer.state[master] = {"step": count, "exp_avg": mean, "exp_avg_sq": square}

        def step() -> None:
            for master, gradient in zip(self.masters, self.low_grads, strict=True):
                assert master.grad is not None
                master.grad.copy_(gradient)
            optimizer.step()
            with torch.no_grad():
                for low, master in zip(self.low, self.masters, strict=True):
                    low.copy_(master)

        return step

    def torch(self) -> Callable[[], None]:
        adam = torch.optim.AdamW(self.masters, lr=1e-3, fused=True)
        step = self.step_of(adam, None)
        for state in adam.state.values():
            state["step"] = torch.tensor(0.0)
        return step

    def deepspeed(self) -> Callable[[], None]:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return self.step_of(DeepSpeedCPUAdam(self.masters, lr=1e-3, weight_decay=1e-2, adamw_mode=True), 0)


def check_peers(bench: Run) -> None:
    """Two steps of one matrix: bf16 parameters within one of their units."""
    model, adam = prepared(1)
    for _ in range(2):
        adam.step()
    (ours,) = (one.detach().float() for one in model.parameters())
    for name in ("torch", "deepspeed"):
        peers = Peers(1)
        step = getattr(peers, name)()
        for _ in range(2):
            step()
        over = ((ours - peers.low[0].float()).abs() - 2e-6 - ours.abs() * 2**-7).max().item()
        bench.check(over <= 0, f"after 2 steps ours and {name}'s parameters differ by more than one unit of bf16")


def measure_cpu(bench: Run, millions: int, rounds: int) -> None:
    layers = max(1, millions * 1_000_000 // (LAYER * LAYER))
    _, adam = model_and_adam = prepared(layers)
    peers = Peers(layers)
    contenders = {
        "ours": adam.step, "torch AdamW fused with casts": peers.torch(), "DeepSpeedCPUAdam with casts": peers.deepspeed(),
    }  # fmt: skip
    samples = alternate({name: timed(step) for name, step in contenders.items()}, rounds, warmup=2)
    names = [name for name in contenders if name != "ours"]
    bench.compare(f"cpu bf16 {millions}M 1 rank", samples, ours="ours", peers=names, unit="ms")
    del model_and_adam


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
