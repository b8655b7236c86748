# SPDX-License-Identifier: Apache-2.0
"""Steps whose states, then parameters too, are on the host (ZeRO-Offload), against torch's FSDP2 with CPUOffloadPolicy."""

from __future__ import annotations

from typing import Any

import torch
from gpus import (
    SIZES,
    TINY,
    Size,
    batch,
    build,
    in_turns,
    kind,
    on_gpus,
    open_group,
    require_gpus,
    sharded,
    stepper,
    this_device,
)
from harness import Need, Run

CLAIM = "with states on the host a step on GPUs takes <= 1/3 of the time of FSDP2's CPU offload (3B, 8B)"
NEEDS = (Need("FSDP2", module="torch.distributed.fsdp"),)
WAYS = {"states on the host": {"stage": 2}, "all on the host": {"stage": 3}}


def run(bench: Run) -> None:
    ranks = require_gpus(bench)
    for size in (TINY,) if kind() == "sim" else SIZES[1:2] if bench.quick else SIZES[2:]:
        for name, way in WAYS.items():
            (first, *_) = on_gpus(bench, "worker", ranks, size=vars(size), stage=way["stage"])
            case = f"{size.name}, {ranks} GPUs, {name}"
            bench.check(not first["wrong"], f"{case}: {first['wrong']}")
            tokens = {"tokens": size.tokens * ranks}
            bench.compare(case, first["samples"], ours="ours", peers=["FSDP2"], unit="ms", limit="copies", extra=tokens)


def worker(args: dict[str, Any]) -> dict[str, Any]:
    """One rank. The limit is the copies of a step: parameters up twice and gradients down once, from page-locked memory."""
    import torch.distributed as dist
    import zeropp

    device, size = this_device(), Size(**args["size"])
    open_group(args["folder"])
    tokens = batch(size, device)
    model = build(size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    where = {"params": "cpu"} if args["stage"] == 3 else {}
    offload = zeropp.Offload(optimizer="cpu", **where)
    zeropp.prepare(
        model, optimizer, zeropp.Config(stage=args["stage"], units=("Block",), offload=offload, device=device)
    )
    steps = {"ours": stepper(model, optimizer, tokens), "FSDP2": stepper(*sharded(size, device, True), tokens)}
    losses = {name: float(step()) for name, step in steps.items()}
    ours, peer = losses["ours"], losses["FSDP2"]
    wrong = "" if abs(ours - peer) <= 2e-2 * abs(peer) else f"the first loss is {ours}, and FSDP2's {peer}"
    elems = size.parameters // (dist.get_world_size() if args["stage"] < 3 else 1)
    pinned = torch.zeros(elems, dtype=torch.bfloat16, device="cpu")
    pinned = pinned.pin_memory() if device.type == "cuda" else pinned
    there = torch.zeros(elems, dtype=torch.bfloat16, device=device)

    def copies() -> None:
        for _ in range(2):
            there.copy_(pinned, non_blocking=True)
        pinned.copy_(there, non_blocking=True)

    samples = in_turns({**steps, "copies": copies}, 3 if args["quick"] else 7)
    return {"wrong": wrong, "samples": samples}
