# SPDX-License-Identifier: Apache-2.0
"""Training whose checkpointed activations go to disk, against plain checkpointing, which keeps them in memory.

Launches alternate, each a fresh process, because what a process once took it may keep: ``peak`` is the most that it ever held
above what it held after its imports, model and optimizer included. Both train the same stack of blocks with
``torch.utils.checkpoint`` around every one; the losses are equal, bit for bit. ``ratio`` of ``step`` below 1 is what the disk
costs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import zeropp
from harness import ROOT, Need, Run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLAIM = "Checkpointed activations on disk: peak memory does not grow with depth, at the time of plain checkpointing."
NEEDS: tuple[Need, ...] = ()
STEPS, WIDTH = 3, 256


class Stack(nn.Module):
    """Blocks that keep nothing but their inputs."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(blocks))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + checkpoint(block, inputs, use_reentrant=False)
        return inputs.square().mean()


def status(kind: str) -> int:
    """Bytes of this process now (VmRSS), or at their peak since `forget_peak` (VmHWM)."""
    rows = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith(kind))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def train(args: dict[str, Any]) -> dict[str, Any]:
    """Worker: milliseconds of a step (median without the first), the peak in MiB, and the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = status("VmRSS")
    forget_peak()
    model = Stack(args["blocks"])
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".activation-bench-") as folder:
        offload = zeropp.Offload(activations="nvme", path=folder) if args["nvme"] else zeropp.Offload()
        config = zeropp.Config(stage=1, device="cpu", offload=offload)
        prepared: tuple[Any, Any] = zeropp.prepare(model, adam, config)
        inputs = torch.randn(args["rows"], WIDTH, generator=torch.Generator().manual_seed(1))
        took, losses = [], []
        for _ in range(STEPS):
            started = time.perf_counter()
            loss = prepared[0](inputs)
            loss.backward()
            prepared[1].step()
            prepared[1].zero_grad()
            took.append((time.perf_counter() - started) * 1e3)
            losses.append(loss.item())
            del loss
        peak = status("VmHWM") - before
        del model, adam, prepared
    return {"ms": statistics.median(took[1:]), "mib": peak / 2**20, "losses": losses}


def run(bench: Run) -> None:
    """Entry of run.py."""
    for blocks, rows in ((48, 1024),) if bench.quick else ((48, 8192), (96, 8192)):
        samples: dict[str, dict[str, list[float]]] = {what: {"ours": [], "in memory": []} for what in ("mib", "ms")}
        for _ in range(2 if bench.quick else 5):
            losses = []
            for name in ("ours", "in memory"):
                args = {"blocks": blocks, "rows": rows, "nvme": name == "ours"}
                (seen,) = bench.launch("train", ranks=1, args=args)
                losses.append(seen["losses"])
                for what, of_kind in samples.items():
                    of_kind[name].append(seen[what])
            bench.check(losses[0] == losses[1], f"losses {losses[0]} and {losses[1]} differ")
        inputs_mib = blocks * rows * WIDTH * 4 / 2**20
        for what, case, unit in (("mib", "peak", "MiB"), ("ms", "step", "ms")):
            bench.compare(
                f"{case} {blocks} blocks {inputs_mib:.0f} MB inputs 1 rank", samples[what], ours="ours",
                peers=["in memory"], unit=unit,
            )  # fmt: skip
