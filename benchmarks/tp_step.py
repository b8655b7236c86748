# SPDX-License-Identifier: Apache-2.0
"""A training step of a tensor-parallel model of MLP blocks, tp 2 x dp 2: zeropp against FSDP2 over gloo, one thread a rank.

Both cut the same model by the same plan of torch (ColwiseParallel, RowwiseParallel), and both live in the same four processes, where they take
turns: forward, backward, clip to a norm, AdamW, zero_grad. FSDP2 over the dp dimension of a mesh whose groups are gloo's is what torch
offers on CPUs; ours has the groups of zeropp. Losses and norms of the first steps must agree before anything is timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness import Run
from meshes import RANKS, WAYS, in_turns, measured, mlp_blocks
from turns import alone

CLAIM = "tp 2 x dp 2: a step takes at most 1 / 1.3 of FSDP2's over gloo, at stages 2 and 3"
NEEDS = ()

Step = Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class Case:
    """A row a way of ours: width of the model, blocks, rows of a batch."""

    width: int
    blocks: int
    rows: int

    @property
    def name(self) -> str:
        return f"width {self.width}, {self.blocks} blocks, {self.rows} rows"


def cases(quick: bool) -> list[Case]:
    return [Case(512, 6, 128)] if quick else [Case(128, 8, 64), Case(512, 6, 128), Case(1024, 4, 128)]


def plan(case: Case) -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        f"{at}.{name}": style
        for at in range(case.blocks)
        for name, style in (("up", ColwiseParallel()), ("down", RowwiseParallel()))
    }


def steps(model: Any, optimizer: Any, clip: Callable[[], Any], rows: Any) -> Step:
    def step() -> tuple[float, float]:
        loss = (model(rows) - rows.flip(-1)).square().mean()
        loss.backward()
        norm = clip()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()), float(norm)

    return step


def fsdp2(case: Case, mesh: Any, rows: Any) -> Step:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    model = parallelize_module(mlp_blocks(case.width, case.blocks), mesh["tp"], plan(case))
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    over_both = [p for p in model.parameters() if p.device_mesh.ndim == 2]
    over_data = [p for p in model.parameters() if p.device_mesh.ndim == 1]

    def clip() -> Any:
        """Of two meshes, whose norms torch does not add up by itself."""
        norms = [torch.nn.utils.get_total_norm([p.grad for p in each]) for each in (over_both, over_data) if each]
        whole = torch.stack([one.full_tensor() if isinstance(one, DTensor) else one for one in norms])
        total = torch.linalg.vector_norm(whole)
        for each in (over_both, over_data):
            torch.nn.utils.clip_grads_with_norm_(each, 1.0, total)
        return total

    return steps(model, optimizer, clip, rows)


def ours(case: Case, mesh: Any, rows: Any, stage: int, host_copy: str) -> Step:
    import torch
    import zeropp

    model = zeropp.parallel.tensor(mlp_blocks(case.width, case.blocks), mesh["tp"], plan(case))
    model, optimizer = zeropp.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), zeropp.Config(stage=stage, host_copy=host_copy), mesh=mesh
    )  # fmt: skip
    return steps(model, optimizer, lambda: optimizer.clip_grad_norm_(1.0), rows)


def measure(case: Case, rounds: int, gloo: Any, fast: Any) -> dict[str, Any]:
    import torch

    draw = torch.Generator().manual_seed(gloo.get_local_rank("dp"))
    rows = torch.randn(case.rows, case.width, generator=draw)
    calls = {name: ours(case, fast, rows, *way) for name, way in WAYS.items()}
    if not alone():
        calls["FSDP2"] = fsdp2(case, gloo, rows)
    return in_turns(case.name, calls, rounds)


def worker(args: Mapping[str, Any]) -> list[Any]:
    cases = [Case(**case) for case in args["cases"]]
    return measured(("dp", "tp"), lambda case, meshes: measure(case, args["rounds"], *meshes), cases)


def run(bench: Run) -> None:
    chosen = cases(bench.quick)
    args = {"cases": [dataclasses.asdict(case) for case in chosen], "rounds": 7 if bench.quick else 25}
    results = bench.launch("worker", ranks=RANKS, args=args, timeout_s=600.0)
    for case, found in zip(chosen, results[0], strict=True):
        bench.check(not found["wrong"], found["wrong"])
        for name in WAYS:
            bench.compare(f"{name}, {case.name}", found["samples"], ours=name, peers=("FSDP2",), unit="ms")
