# SPDX-License-Identifier: Apache-2.0
"""Compare the kernel's figure of what ranks hold (the proportional set size of smaps_rollup) with zeropp.estimate and zeropp.memory.

Growth is counted from a process that has done one plain forward and backward of a tiny model. The model's own activations are
four rows. Ranks meet before and after each reading, because what a rank has mapped changes what its peers are charged for."""

from __future__ import annotations

import ctypes
import functools
import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_cpu_only, on_ranks, shards_tier
from torch import Tensor, nn

WIDTH, LAYERS = 1024, 16
STEPS = 3
BOUNDS = {"bucket_bytes": 8 << 20, "prefetch": 16 << 20}
"""What waits for a slower rank, and what is read ahead, is bounded: by default both may be as large as this model."""
KINDS = {"p": "params", "g": "grads", "o": "optimizer", "a": "activations"}
SETTINGS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "nothing on nvme": ("", 1.0, {}), "gathering": ("", 1.0, {"host_copy": "off"}),
    "stage 1": ("", 1.0, {"stage": 1}), "stage 2": ("", 1.0, {"stage": 2}), "bf16": ("", 1.0, {"precision": "bf16"}),
    "all": ("pgoa", 1.0, {}), "all but activations, bf16": ("pgo", 1.0, {"precision": "bf16"}),
    "half of all": ("pgo", 0.5, {}), "params": ("p", 1.0, {}), "grads": ("g", 1.0, {}), "optimizer": ("o", 1.0, {}),
    "activations": ("a", 1.0, {}), "params, grads": ("pg", 1.0, {}), "params, optimizer": ("po", 1.0, {}),
    "grads, optimizer": ("go", 1.0, {}), "grads, optimizer, stage 2": ("go", 1.0, {"stage": 2}),
    "optimizer, stage 1": ("o", 1.0, {"stage": 1}), "half the grads, bf16": ("g", 0.5, {"precision": "bf16"}),
    "half the optimizer, bf16": ("o", 0.5, {"precision": "bf16"}), "half the params": ("p", 0.5, {}),
    "inside the backward": ("po", 1.0, {"step_in_backward": True}), "delayed": ("pgo", 1.0, {"delayed": True}),
}  # fmt: skip


class Rows(nn.Module):
    """Half of the layers, then a place to look, then the others."""

    def __init__(self) -> None:
        super().__init__()
        half = LAYERS // 2
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(half))
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(half))
        self.look: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.first:
            x = layer(x)
        self.look("in forward")
        x.register_hook(lambda grad: self.look("in backward"))
        for layer in self.second:
            x = layer(x)
        return x


def proportional_bytes() -> int:
    """Return this process's memory. A shared page counts by its share."""
    with Path("/proc/self/smaps_rollup").open() as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))


def _average(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _plain_step() -> None:
    tiny = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    adam = torch.optim.AdamW(tiny.parameters())
    tiny(torch.ones(4, 64)).sum().backward()
    adam.step()


def _config(name: str, folder: str) -> zeropp.Config:
    kinds, fraction, keywords = SETTINGS[name]
    keywords = dict(keywords)
    tiers: dict[str, Any] = {KINDS[kind]: zeropp.Tier("nvme", path=folder, fraction=fraction) for kind in kinds}
    if keywords.pop("delayed", False):
        tiers["delayed_update"] = 0
    return zeropp.Config(**{"stage": 3, **BOUNDS, **keywords}, offload=zeropp.Offload(**tiers))


def _held(model: nn.Module, optimizer: Any) -> float:
    found = zeropp.memory(model, optimizer)
    kinds = found.get("device") or found["cpu"]  # on the thread of a backward the default device is the CPU
    return float(sum(found["held"] for kind, found in kinds.items() if kind != "buckets_peak"))


def measure(config: zeropp.Config) -> dict[str, Any]:
    """Bytes of a rank on average: ``said`` by the estimate, ``most`` that the kernel saw, and at each quiet moment the kernel's figure
    beside zeropp.memory's."""
    with torch.device("meta"):
        said = zeropp.estimate(Rows(), config, ranks=dist.get_world_size())
    _plain_step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier cases left would be taken first, and no growth be seen
    dist.barrier()
    before = proportional_bytes()
    dist.barrier()
    torch.manual_seed(0)
    model = Rows()
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), config)
    seen: dict[str, list[tuple[float, float]]] = {}
    any_filed = any(getattr(config.offload, kind).kind == "nvme" for kind in ("params", "grads", "optimizer"))

    def look(moment: str) -> None:
        if not any_filed:  # zeropp leaves malloc its free pieces there, which come to 10 to 25 MiB of this model's
            ctypes.CDLL(None).malloc_trim(0)
        dist.barrier()
        grown = proportional_bytes() - before
        dist.barrier()
        seen.setdefault(moment, []).append((_average(grown), _average(_held(model, optimizer))))

    model.look = look
    for _ in range(STEPS):
        loss = model(torch.ones(4, WIDTH)).square().mean()
        look("after forward")
        loss.backward()
        look("after backward")
        optimizer.step()
        optimizer.zero_grad()
        look("after step")
    optimizer.flush()
    model.look = None
    last = {moment: values[-1] for moment, values in seen.items()}
    return {
        "said": said["cpu"],
        "most": max(grown for grown, _ in last.values()),
        "seen": last,
        "kinds": zeropp.memory(model)[shards_tier()],
    }


@functools.cache
def measured(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        found = measure(_config(name, folders[0]))
        gc.collect()
        dist.barrier()
        return found


ORDINARY = ("nothing on nvme", "gathering", "all", "half of all", "optimizer, stage 1")
CASES = [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
SLACK_BYTES = 16 << 20
"""Of a process: what was allocated in small pieces, stacks of threads, free pieces that malloc keeps."""


def close(told: float, kernel: float) -> bool:
    return abs(told - kernel) <= 0.05 * kernel + SLACK_BYTES


# A rank that was forked shares pages with its parent, which the kernel's figures would count as growth later.
@pytest.mark.timeout(400)
@on_ranks(2, cold=True, launch_s=300.0)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_agrees(case: str) -> None:
    """The estimate with the most that the kernel saw in a step, zeropp.memory with the kernel's figure at each moment."""
    on_cpu_only("the kernel counts the simulator's own memory, too")
    found = measured(case)
    said, most = sum(found["said"].values()), found["most"]
    assert close(said, most), (said, most, found)
    for moment, (grown, held) in found["seen"].items():
        assert close(held, grown), (moment, held, grown, found)


@pytest.mark.timeout(400)
@on_ranks(2, cold=True, launch_s=300.0)
@pytest.mark.parametrize("case", CASES)
def test_buffers_are_planned(case: str) -> None:
    on_cpu_only("the kernel counts the simulator's own memory, too")
    found = measured(case)
    if "tier_buffers" not in found["kinds"]:
        assert "tier_buffers" not in found["said"]
        return
    buffers = found["kinds"]["tier_buffers"]
    assert found["said"]["tier_buffers"] == buffers["planned"]
    assert buffers["held"] == pytest.approx(buffers["planned"], rel=0.03, abs=1 << 20), found
