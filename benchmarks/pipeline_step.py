# SPDX-License-Identifier: Apache-2.0
"""A training step of a pipeline of MLP blocks, pp 2 x dp 2, in torch's schedules: zeropp against FSDP2 over gloo, one thread a rank.

Both run the same chunks in the same schedule, and both live in the same four processes, where they take turns: all micro-batches, AdamW,
zero_grad. FSDP2 over the dp dimension of a mesh whose groups are gloo's, without resharding after a forward, is what torch offers on CPUs;
ours has the groups of zeropp. The losses of the first steps, which depend on the weights of both stages, must agree before anything is timed.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness import Run
from turns import TWINS, alone

CLAIM = "pp 2 x dp 2: a step takes at most 1 / 1.3 of FSDP2's over gloo at stages 2 and 3, and 1 / 2 for small blocks"
NEEDS = ()
RANKS, CHECKED, MICRO = 4, 3, 8
#: fp32 sums in another order, over a few steps.
TOLERANCE = 1e-4
WAYS = {"stage 3": (3, "auto"), "stage 3, gathers": (3, "off"), "stage 2": (2, "auto")}

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
    """Return this rank's chunks of residual blocks of a norm and two matrices; the same values at each call."""
    import torch
    import zeropp
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(case.width)
            self.up, self.down = nn.Linear(case.width, 4 * case.width), nn.Linear(4 * case.width, case.width)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(case.blocks)))
    return zeropp.parallel.cut(model, mesh["pp"], schedule_of(case))


def schedule_of(case: Case) -> Any:
    from torch.distributed.pipelining import schedules

    return getattr(schedules, f"Schedule{case.schedule}")


def loss_of(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def scheduled(case: Case, stages: list[Any]) -> Any:
    return schedule_of(case)(stages if len(stages) > 1 else stages[0], MICRO, loss_fn=loss_of)


def steps(chunks: Any, schedule: Any, stages: list[Any], optimizer: Any, rows: Any) -> Step:
    """Return a function that trains a step, and keeps the chunks alive: a schedule holds their modules alone."""
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)

    def step() -> list[float]:
        losses: list[Any] = []
        schedule.step(
            *((rows,) if first else ()), target=rows.flip(-1) if last else None, losses=losses if last else None
        )
        optimizer.step()
        optimizer.zero_grad()
        assert chunks.training
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
    return steps(chunks, scheduled(case, stages), stages, optimizer, rows)


def ours(case: Case, mesh: Any, rows: Any, stage: int, host_copy: str) -> Step:
    import torch
    import zeropp

    chunks = chunks_of(case, mesh)
    chunks, optimizer = zeropp.prepare(
        chunks, torch.optim.AdamW(chunks.parameters(), lr=1e-3), zeropp.Config(stage=stage, host_copy=host_copy), mesh=mesh
    )  # fmt: skip
    stages = zeropp.parallel.stages(chunks, mesh["pp"])
    return steps(chunks, zeropp.parallel.pipeline(scheduled(case, stages)), stages, optimizer, rows)


def measure(case: Case, rounds: int, gloo: Any, fast: Any) -> dict[str, Any]:
    """Milliseconds of the slowest rank, by contender, and what they disagree about."""
    import torch
    import torch.distributed as dist

    draw = torch.Generator().manual_seed(gloo.get_local_rank("dp"))
    rows = torch.randn(MICRO * case.rows, case.width, generator=draw)
    calls = {name: ours(case, fast, rows, *way) for name, way in WAYS.items()}
    if not alone():
        calls["FSDP2"] = fsdp2(case, gloo, rows)
    seen = {name: torch.tensor([call() for _ in range(CHECKED)]) for name, call in calls.items()}
    first = seen["stage 3"]
    wrong = next(
        (f"{case.name}: {name} {found.tolist()}, stage 3 {first.tolist()}" for name, found in seen.items()
         if not torch.allclose(found, first, rtol=TOLERANCE)), "",
    )  # fmt: skip
    order, rng = list(calls), random.Random(case.name)  # the same on every rank
    samples: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            with TWINS.turn():
                dist.barrier()
                start = time.perf_counter_ns()
                calls[name]()
                took = torch.tensor((time.perf_counter_ns() - start) / 1e6)
                dist.all_reduce(took, dist.ReduceOp.MAX)
            samples[name].append(float(took))
    return {"wrong": wrong, "samples": samples}


def worker(args: Mapping[str, Any]) -> list[Any]:
    import torch
    import torch.distributed as dist
    import zeropp  # noqa: F401  (its backend)
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = ("pp", "dp")
    gloo = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    fast = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=dict.fromkeys(names, "zeropp"))
    rows = [measure(Case(**case), args["rounds"], gloo, fast) for case in args["cases"]]
    dist.barrier()
    return rows


def run(bench: Run) -> None:
    chosen = cases(bench.quick)
    args = {"cases": [dataclasses.asdict(case) for case in chosen], "rounds": 7 if bench.quick else 25}
    results = bench.launch("worker", ranks=RANKS, args=args, timeout_s=600.0)
    for case, *found in zip(chosen, *results, strict=True):
        wrong = next((one["wrong"] for one in found if one["wrong"]), "")  # the last stage has the losses
        bench.check(not wrong, wrong)
        for name in WAYS:
            bench.compare(f"{name}, {case.name}", found[0]["samples"], ours=name, peers=("FSDP2",), unit="ms")
