# SPDX-License-Identifier: Apache-2.0
"""Steps of torch's own FSDP2 on two CPU ranks, over this backend and over gloo.

One launch holds a model for each backend, of the same values, sharded over a mesh of that backend's group; nothing else differs. They take
turns in an order drawn anew each round, with a barrier before each step, and a step's time is the slowest rank's: forward, backward, AdamW, zero_grad.
Two ranks' sums have one order, so losses must be equal bit for bit before anything is timed.

Cases: the GPT of the bench `step` (25M parameters, one unit a block), with the tokens of that bench and with a quarter of them, where
communication is more of a step; and a hundred small units, where latency is all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import step
from harness import Need, Run, alternate

CLAIM = "a step of FSDP2 over zeropp is at least 1.3x faster than over gloo"
NEEDS = (Need("gloo", module="torch.distributed"),)

RANKS = 2
CHECKED_STEPS = 3
SMALL_UNITS, SMALL_WIDTH = 100, 32
CASES = {
    "GPT 25M, 512 tokens a rank": {"model": "gpt", "tokens": 256},
    "GPT 25M, 128 tokens a rank": {"model": "gpt", "tokens": 64},
    "100 units of 1K": {"model": "small", "tokens": 4},
}

Step = Callable[[int], float]


def sharded_gpt(mesh: Any, tokens: int) -> Step:
    """`tokens`: of each of two sequences."""
    from torch.distributed.fsdp import fully_shard

    model = step.build_model(step.SMALL)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train = step.plain_step(model, step.adamw(model, fused=True))
    rank = int(os.environ["RANK"])

    def one(number: int) -> float:
        inputs, targets = step.batch_of(number, rank)
        return train(inputs[:, :tokens].contiguous(), targets[:, :tokens].contiguous())

    return one


def sharded_small(mesh: Any, rows: int) -> Step:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SMALL_WIDTH, SMALL_WIDTH) for _ in range(SMALL_UNITS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = step.adamw(model, fused=True)
    rank = int(os.environ["RANK"])

    def one(number: int) -> float:
        draw = torch.Generator().manual_seed(1000 * number + rank)
        loss = model(torch.randn(rows, SMALL_WIDTH, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return one


def worker(args: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One rank: of each case, losses of the first steps, and milliseconds a step by backend."""
    import torch
    import torch.distributed as dist
    import zeropp
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "ours": dist.new_group(list(range(RANKS)), backend="zeropp")}
    door = zeropp.comm.Communicator(groups["ours"])
    for name, case in args["cases"].items():
        make = sharded_gpt if case["model"] == "gpt" else sharded_small
        steps = {which: make(DeviceMesh.from_group(group, "cpu"), case["tokens"]) for which, group in groups.items()}
        done = dict.fromkeys(steps, CHECKED_STEPS)

        def turn(which: str, steps: Any = steps, done: Any = done) -> float:
            """Milliseconds of one step."""
            door.barrier()
            start = time.perf_counter_ns()
            steps[which](done[which])
            took = torch.tensor((time.perf_counter_ns() - start) / 1e6)
            done[which] += 1
            door.all_reduce(took, "max")
            return float(took)

        losses = {which: [one(number) for number in range(CHECKED_STEPS)] for which, one in steps.items()}
        contenders = {which: (lambda which=which: turn(which)) for which in steps}
        yield {"name": name, "losses": losses, "ms": alternate(contenders, rounds=args["rounds"])}
    dist.barrier()
    dist.destroy_process_group()


def run(bench: Run) -> None:
    chosen = dict(list(CASES.items())[1:]) if bench.quick else CASES
    arguments = {"cases": chosen, "rounds": 7 if bench.quick else 15}

    def report(result: Mapping[str, Any]) -> None:
        name, losses = result["name"], result["losses"]
        bench.check(losses["ours"] == losses["gloo"], f"{name}: losses over zeropp and over gloo differ: {losses}")
        bench.compare(f"{name} {RANKS} ranks", result["ms"], ours="ours", peers=["gloo"], unit="ms")

    bench.launch("worker", ranks=RANKS, args=arguments, threads=1, timeout_s=600.0, heard=report)
