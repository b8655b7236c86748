# SPDX-License-Identifier: Apache-2.0
"""Measure what ZeRO-3 costs the host on the simulated GPU, beside torch's FSDP2 in the same process. Print it as JSON.

python case_overhead.py RANK RANKS FOLDER ROUNDS

The time is the processor time of this process less that of the executor, which plays the GPU, for a forward and a backward.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from typing import Any

import sim
import torch
import zeropp
from torch.distributed.fsdp import fully_shard
from zeropp.config import Offload

LAYERS, WIDTH, STEPS, LAZY = 100, 16, 3, (1 << 63) - 1
COUNTS = ("kernels", "copies", "records", "waits", "counters", "host_waits")


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(1.7)
    return model.to("sim")


def contenders(ranks: int) -> dict[str, torch.nn.Module]:
    models = {"plain": build(), "FSDP2": build()}
    mesh = torch.distributed.device_mesh.init_device_mesh("sim", (ranks,))
    for layer in models["FSDP2"]:
        fully_shard(layer, mesh=mesh)
    fully_shard(models["FSDP2"], mesh=mesh)
    for name, offload in (("on the device", Offload()), ("on the host", Offload(params="cpu", optimizer="cpu"))):
        config = zeropp.Config(stage=3, units=(torch.nn.Linear,), offload=offload)
        models[name], _ = zeropp.prepare(build(), None, config)
    return models


def turn(model: torch.nn.Module, x: torch.Tensor) -> dict[str, float]:
    """Return milliseconds and counts of a step, the median of some after one that is not measured."""
    rows: list[list[float]] = []
    for _ in range(STEPS + 1):
        sim.finish()
        before, began = sim.counts(), time.process_time()
        model(x).sum().backward()
        spent, after = time.process_time() - began, sim.counts()
        sim.finish()
        model.zero_grad()
        executor_s = (after["executor_ns"] - before["executor_ns"]) * 1e-9
        rows.append([(spent - executor_s) * 1e3, *(after[name] - before[name] for name in COUNTS)])
    columns = zip(*rows[1:], strict=True)
    return dict(zip(("ms", *COUNTS), map(statistics.median, columns), strict=True))


def gradients(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).sum().backward()
    if hasattr(model[0].weight, "_zeropp"):
        with zeropp.gathered(model, grads=True):
            found = [p.grad.cpu() for p in model.parameters()]
    else:
        found = [p.grad.cpu() for p in model.parameters()]
    model.zero_grad()
    return found


def main() -> None:
    rank, ranks, folder, rounds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    sim.init_process_group(folder, rank, ranks)
    models = contenders(ranks)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to("sim")  # the same on all ranks
    wanted = gradients(models["plain"], x)
    wrong = [
        name
        for name in ("on the device", "on the host")
        if not all(map(torch.equal, gradients(models[name], x), wanted))
    ]
    sim.set_schedule(LAZY, 0)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            samples[name].append(turn(model, x))
    print(json.dumps({"samples": samples, "wrong": copy.copy(wrong), "error": sim.first_error()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
