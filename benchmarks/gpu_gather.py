# SPDX-License-Identifier: Apache-2.0
"""A unit gathered between the GPUs of this machine, against NCCL's all-gather and a copy between two GPUs; and a matmul beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpus import in_turns, kind, on_gpus, open_group, require_gpus, this_device
from harness import Run
from torch import nn

CLAIM = "a gather between GPUs reaches >= 0.9 of a peer copy's bandwidth, and slows a matmul beside it by <= 5% (NCCL: 30-40%)"
NEEDS = ()
WIDTHS = (1024, 4096, 8192)


def run(bench: Run) -> None:
    ranks = require_gpus(bench, least=2)
    for width in (64,) if kind() == "sim" else WIDTHS[: 2 if bench.quick else None]:
        (first, *_) = on_gpus(bench, "worker", ranks, width=width)
        case = f"bf16 {width} x {width}, {ranks} GPUs"
        bench.compare(case, first["gathers"], ours="ours", peers=["NCCL all-gather"], unit="ms", limit="peer copies")
        bench.compare(f"matmul beside a gather, {case}", first["beside"], ours="ours", peers=["NCCL all-gather"], unit="ms",
                      limit="matmul alone")  # fmt: skip


def worker(args: dict[str, Any]) -> dict[str, Any]:
    """One rank."""
    import torch.distributed as dist
    import zeropp
    from zeropp.zero.engine import engine_of

    device, width = this_device(), args["width"]
    open_group(args["folder"])
    ranks = dist.get_world_size()
    with torch.device("cpu"):
        plain = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
    model, _ = zeropp.prepare(plain.to(device), None, zeropp.Config(stage=3, units=("Linear",), device=device))
    (unit,) = engine_of(model).units
    shard, whole = (
        torch.zeros(n, dtype=torch.bfloat16, device=device) for n in (width * width // ranks, width * width)
    )
    others = peers_of(device, ranks, shard)
    square = torch.ones(width, width, dtype=torch.bfloat16, device=device)

    def ours() -> None:
        unit.core.need()
        unit.core.release()

    def copies() -> None:
        for place, other in enumerate(others):
            whole[place * shard.numel() : (place + 1) * shard.numel()].copy_(other, non_blocking=True)

    side = torch.Stream(device=device)

    def beside(call: Callable[[], Any] | None) -> Callable[[], None]:
        def both() -> None:
            if call is not None:
                with side:
                    call()
            for _ in range(4):
                square @ square

        return both

    def nccl() -> None:
        dist.all_gather_into_tensor(whole, shard)

    rounds, repeat = (3, 1) if args["quick"] else (9, 10)
    gathers = {"ours": ours, "NCCL all-gather": nccl, "peer copies": copies}
    pairs = {"ours": beside(ours), "NCCL all-gather": beside(nccl), "matmul alone": beside(None)}
    return {"gathers": in_turns(gathers, rounds, repeat), "beside": in_turns(pairs, rounds, repeat)}


def peers_of(device: torch.device, ranks: int, shard: torch.Tensor) -> list[torch.Tensor]:
    """Return what the copies read: a shard on each of the other GPUs. The simulated GPU has one a process."""
    if device.type != "cuda":
        return [shard.clone() for _ in range(ranks - 1)]
    return [shard.to(torch.device("cuda", other)) for other in range(ranks) if other != device.index]
