# SPDX-License-Identifier: Apache-2.0
"""Whole steps of ZeRO-3 on all GPUs of this machine, against torch's FSDP2: eager and with compiled blocks, and the peak of memory."""

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

CLAIM = "on GPUs a ZeRO-3 step takes <= 1/1.02 of FSDP2's time (0.5B to 8B), <= 1/1.3 where units are small (0.1B)"
NEEDS = (Need("FSDP2", module="torch.distributed.fsdp"),)
_BYTES_EACH = 2 * 18  # of both contenders: parameters, gradients, fp32 copies, states


def run(bench: Run) -> None:
    ranks = require_gpus(bench)
    for size in (TINY,) if kind() == "sim" else SIZES[: 2 if bench.quick else None]:
        for compiled in (False,) if bench.quick or kind() == "sim" else (False, True):
            (first, *_) = on_gpus(bench, "worker", ranks, size=vars(size), compiled=compiled)
            case = f"{size.name}, {ranks} GPUs{', compiled blocks' if compiled else ''}"
            if first["no room"]:
                bench.log(f"{case}: left out: both contenders need more memory than {first['no room']} bytes a GPU")
                continue
            bench.check(not first["wrong"], f"{case}: {first['wrong']}")
            peaks = {"peak_bytes": first["peaks"]["ours"], "peer_peak_bytes": first["peaks"]["FSDP2"]}
            bench.compare(case, first["samples"], ours="ours", peers=["FSDP2"], unit="ms", extra=peaks)


def worker(args: dict[str, Any]) -> dict[str, Any]:
    """One rank."""
    import torch.distributed as dist
    import zeropp

    device, size = this_device(), Size(**args["size"])
    open_group(args["folder"])
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 62
    if size.parameters * _BYTES_EACH / dist.get_world_size() > 0.6 * free:
        return {"no room": free, "wrong": "", "peaks": {}, "samples": {}}
    tokens = batch(size, device)
    model = build(size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    zeropp.prepare(model, optimizer, zeropp.Config(stage=3, units=("Block",), device=device))
    pairs = {"ours": (model, optimizer), "FSDP2": sharded(size, device)}
    for one, _ in pairs.values() if args["compiled"] else ():
        for block in one.blocks:
            block.compile()
    steps = {name: stepper(*pair, tokens) for name, pair in pairs.items()}
    losses, peaks = {}, {}
    for name, step in steps.items():
        if device.type == "cuda":
            torch.accelerator.reset_peak_memory_stats()
        losses[name], *_ = [float(step()) for _ in range(3)]
        peaks[name] = torch.accelerator.max_memory_allocated() if device.type == "cuda" else 0
    ours, peer = losses["ours"], losses["FSDP2"]
    wrong = "" if abs(ours - peer) <= 2e-2 * abs(peer) else f"the first loss is {ours}, and FSDP2's {peer}"
    return {"no room": 0, "wrong": wrong, "peaks": peaks, "samples": in_turns(steps, 3 if args["quick"] else 9)}
