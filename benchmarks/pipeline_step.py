# SPDX-License-Identifier: Apache-2.0
"""A training step of a pipeline of MLP blocks, pp 2 x dp 2, in torch's schedules: zeropp against FSDP2 over gloo, one thread a rank.

Both run the same chunks in the same schedule, and both live in the same four processes, where they take turns: all micro-batches, AdamW,
zero_grad. FSDP2 over the dp dimension of a mesh whose groups are gloo's, without resharding after a forward, is what torch offers on CPUs;
ours has the groups of zeropp. The losses of the first steps, which depend on the weights of both stages, must agree before anything is timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness import Run
from meshes import RANKS, WAYS, in_turns, measured, mlp_blocks
from turns import alone

CLAIM = "pp 2 x dp 2: a step takes at most 1 / 1.3 of FSDP2's over gloo at stages 2 and 3, and 1 / 2 for small blocks"
NEEDS = ()
MICRO = 8

Step = Callable[[], list[float]]


@dataclass(frozen=True)
class Case:
    """A row a way of ours: torch's schedule, width of the model, blocks, rows of a micro-batch."""

    schedule: str
    width: int
    blocks: int
    rows: int

    @property
    def name(self) -> str:
        return f"{self.schedule}, width {self.width}, {self.blocks} blocks, {self.rows} rows"


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case("1F1B", 128, 8, 16), Case("1F1B", 512, 6, 32)]
    return [Case("1F1B", 128, 8, 16), Case("Interleaved1F1B", 128, 8, 16), Case("1F1B", 512, 6, 32)]


def chunks_of(case: Case, mesh: Any) -> Any:
    """Return this rank's chunks of the model; the same values at each call."""
    import zeropp

    return zeropp.parallel.cut(mlp_blocks(case.width, case.blocks), mesh["pp"], schedule_of(case))


def schedule_of(case: Case) -> Any:
    from torch.distributed.pipelining import schedules

    return getattr(schedules, f"Schedule{case.schedule}")


def loss_of(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def scheduled(case: Case, stages: list[Any]) -> Any:
    return schedule_of(case)(stages if len(stages) > 1 else stages[0], MICRO, loss_fn=loss_of)


def steps(schedule: Any, stages: list[Any], optimizer: Any, rows: Any) -> Step:
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)

    def step() -> list[float]:
        losses: list[Any] = []
        schedule.step(
            *((rows,) if first else ()), target=rows.flip(-1) if last else None, losses=losses if last else None
        )
        optimizer.step()
        optimizer.zero_grad()
        return [float(loss.detach()) for loss in losses]

    return step


def fsdp2(case: Case, mesh: Any, rows: Any) -> Step:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage

    chunks = chunks_of(case, mesh)
    stages = []
    for index, chunk in zip(chunks.indices, chunks, strict=True):
        for block in chunk:
            if next(block.parameters(), None) is not None:
                fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(chunk, mesh=mesh["dp"], reshard_after_forward=False)
        example = torch.zeros(case.rows, case.width)
        stages.append(
            PipelineStage(
                chunk, index, 2 * len(chunks), torch.device("cpu"), group=mesh["pp"].get_group(),
                input_args=example.clone().requires_grad_(index > 0), output_args=example.clone().requires_grad_(),
            )
        )  # fmt: skip
    optimizer = torch.optim.AdamW(chunks.parameters(), lr=1e-3, fused=True)
    return steps(scheduled(case, stages), stages, optimizer, rows)


def ours(case: Case, mesh: Any, rows: Any, stage: int, host_copy: str) -> Step:
    import torch
    import zeropp

    chunks = chunks_of(case, mesh)
    chunks, optimizer = zeropp.prepare(
        chunks, torch.optim.AdamW(chunks.parameters(), lr=1e-3), zeropp.Config(stage=stage, host_copy=host_copy), mesh=mesh
    )  # fmt: skip
    stages = zeropp.parallel.stages(chunks, mesh["pp"])
    return steps(zeropp.parallel.pipeline(scheduled(case, stages)), stages, optimizer, rows)


def measure(case: Case, rounds: int, gloo: Any, fast: Any) -> dict[str, Any]:
    import torch

    draw = torch.Generator().manual_seed(gloo.get_local_rank("dp"))
    rows = torch.randn(MICRO * case.rows, case.width, generator=draw)
    calls = {name: ours(case, fast, rows, *way) for name, way in WAYS.items()}
    if not alone():
        calls["FSDP2"] = fsdp2(case, gloo, rows)
    return in_turns(case.name, calls, rounds)


def worker(args: Mapping[str, Any]) -> list[Any]:
    cases = [Case(**case) for case in args["cases"]]
    return measured(("pp", "dp"), lambda case, meshes: measure(case, args["rounds"], *meshes), cases)


def run(bench: Run) -> None:
    chosen = cases(bench.quick)
    args = {"cases": [dataclasses.asdict(case) for case in chosen], "rounds": 7 if bench.quick else 25}
    results = bench.launch("worker", ranks=RANKS, args=args, timeout_s=600.0)
    for case, *found in zip(chosen, *results, strict=True):
        wrong = next((one["wrong"] for one in found if one["wrong"]), "")  # the last stage has the losses
        bench.check(not wrong, wrong)
        for name in WAYS:
            bench.compare(f"{name}, {case.name}", found[0]["samples"], ours=name, peers=("FSDP2",), unit="ms")
