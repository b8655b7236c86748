# SPDX-License-Identifier: Apache-2.0
"""Layer dropping with parameters and optimizer states on NVMe: a step that leaves out 2 of 8 layers, others in each step.

The peer is the same step with all layers. Each row says how many bytes were read and written, as parts of the full step's. A step
that is bound by the disk takes 3/4 of the time in the limit of large layers: 1.33x.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import zeropp
from harness import ROOT, Need, Run, alternate
from infinity_step import WARM_STEPS, Trainer
from zeropp.efficiency import layer_drop

CLAIM = "2 of 8 layers left out, bound by the disk: 3/4 of the bytes of a full step, and >= 1.28x its speed."
NEEDS: tuple[Need, ...] = ()
LAYERS, SETS = 8, ((2, 5), (1, 7), (3, 4), (2, 6))


def run(bench: Run) -> None:
    torch.set_num_threads(1)
    for row, config in {"step after": {}, "step inside": {"step_in_backward": True}}.items():
        measure(bench, row, config, width=384 if bench.quick else 768, rounds=7 if bench.quick else 9)


def chosen(drop: Any, seed: int, step: int, micro_step: int, counts: list[int]) -> list[bool]:
    """Leave out two layers in each step, in place of a random number of them."""
    return [at in SETS[step % len(SETS)] for at in range(LAYERS)]


def measure(bench: Run, row: str, config: dict[str, Any], width: int, rounds: int) -> None:
    drop = zeropp.Efficiency(layer_drop=zeropp.LayerDrop())
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".layer-drop-bench-") as folder:
        tiers = zeropp.Offload(params="nvme", optimizer="nvme", path=folder)
        full = Trainer(LAYERS, width, 1, offload=tiers, prefetch=0, **config)
        with_drop = Trainer(LAYERS, width, 1, offload=tiers, prefetch=0, efficiency=drop, **config)
        before, layer_drop.dropped = layer_drop.dropped, lambda *args: [False] * LAYERS
        try:
            full_bytes = full.bytes_of_a_step()
            for _ in range(WARM_STEPS):
                with_drop.step()  # all layers get their moments, without which nothing is read
            layer_drop.dropped = chosen
            dropped_bytes = with_drop.bytes_of_a_step()
            parts = [dropped / whole for dropped, whole in zip(dropped_bytes, full_bytes, strict=True)]
            bench.check(
                all(0.74 < part < 0.78 for part in parts), f"{row}: {parts} of the full step's bytes, wanted 3/4"
            )
            samples = alternate({"2 of 8 left out": with_drop.step, "all layers": full.step}, rounds, warmup=2)
        finally:
            layer_drop.dropped = before
        bench.compare(
            f"fp32 {full.parameters / 1e6:.0f}M 128 tokens 1 rank, {row}", samples, ours="2 of 8 left out", peers=["all layers"],
            unit="ms", extra={"of_bytes_read": parts[0], "of_bytes_written": parts[1]},
        )  # fmt: skip
        del full, with_drop
