# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of GPTs of 25M and 100M parameters on two and on four CPU ranks: stages 1 to 3 beside DDP, FSDP2
and DeepSpeed, one thread a rank. Model, data and checks are those of step.py.

Contenders of a small cell live at once and take turns. Those of a large one do not fit into a machine together: they
are launched one after the other in an order drawn anew each round, and a round's ratios are over minutes, not seconds.
"""

from __future__ import annotations

from functools import partial

import step
from harness import Run, alternate

CLAIM = "a step of stages 1 to 3 takes less time than FSDP2's and than DeepSpeed's, at 25M and 100M, on 2 and 4 ranks"
NEEDS = step.NEEDS
train = step.train

LARGE = step.Shape(12, 768, 12)  # 95M parameters
CELLS = (("25M", step.SMALL, 2), ("25M", step.SMALL, 4), ("100M", LARGE, 2), ("100M", LARGE, 4))
STAGES = (3, 2, 1)
LARGE_CHECKED_STEPS = 3


def one_launch(
    bench: Run, losses: dict[str, list[float]], ranks: int, shape: step.Shape, name: str, contender: tuple[str, int]
) -> float:
    """Milliseconds a step of a launch of its own."""
    with step.launched(bench, {name: contender}, ranks, shape) as teams:
        losses[name] = step.first_losses(teams[name], LARGE_CHECKED_STEPS)
        return teams[name].turn(2)


def launches(
    bench: Run, contenders: dict[str, tuple[str, int]], rounds: int, ranks: int, shape: step.Shape
) -> dict[str, list[float]]:
    """Milliseconds a step, one figure a contender and round, from launches that live one at a time."""
    losses: dict[str, list[float]] = {}
    calls = {name: partial(one_launch, bench, losses, ranks, shape, name, one) for name, one in contenders.items()}
    samples = alternate(calls, rounds=rounds, warmup=0)
    step.check_losses(bench, losses)
    return samples


def run(bench: Run) -> None:
    """Every cell of sizes and ranks; the quick one is 25M on four ranks at stage 3."""
    for size, shape, ranks in CELLS[1:2] if bench.quick else CELLS:
        ours = {f"stage {stage}": ("zeropp", stage) for stage in (STAGES[:1] if bench.quick else STAGES)}
        contenders = {**ours, **step.PEERS}
        bench.log(f"{size} on {ranks} ranks")
        if shape == step.SMALL:
            samples = step.measure_time(bench, contenders, 3 if bench.quick else 5, ranks, shape)
        else:
            samples = launches(bench, contenders, 3, ranks, shape)
        for name in ours:
            bench.compare(f"{name} {size} {ranks} ranks", samples, ours=name, peers=list(step.PEERS), unit="ms")
