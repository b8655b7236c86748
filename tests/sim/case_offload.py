# SPDX-License-Identifier: Apache-2.0
"""Train with zeropp on the simulated GPU, shards on the host, once for each schedule. Print what was found as JSON.

python case_offload.py RANK RANKS FOLDER CASE [without=WAITER,SOURCE | without=WORD] SCHEDULE...

CASE is a name of CASES; SCHEDULE is LAZY or LAZY:SEED. Waits of stream WAITER (-1: the host) for stream SOURCE, or for the counter
WORD, are left out. SIM_HOSTS in the environment has a letter a rank for its host, and SIM_GATHER is Comm(gather=).

The streams are: 0 torch's default stream, which computes; 1 gathers; 2 copies gradients down.
The reference is plain torch on the same device with the gradients of all ranks, and zeropp's AdamW on the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import sim
import torch
import torch.distributed as dist
import zeropp
from fsdp2_model import WIDTH, Block
from zeropp.config import Offload
from zeropp.ops import adam_step_

STEPS, BATCH, LR, DECAY = 3, 4, 1e-2, 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train."""

    stage: int = 3
    on_device: bool = False  # shards, and the step
    precision: str | None = None
    accumulate: int = 1
    clip: float | None = None
    prefetch: int | str = "auto"
    units: str | tuple[str, ...] = ("Block",)
    evaluates: bool = False  # once more before each step
    in_file: bool = False  # parameters
    reloads: bool = False  # the parameters, after each step
    steps_inside: bool = False  # the backward
    flushes: bool = False  # the update, which is delayed but for the first one, after one more evaluation
    torch_steps: bool = False  # its own code, of an optimizer that has no kernel here
    late: bool = False  # the second rank, with each backward: the first one's host is far ahead of its steps
    two_streams: bool = False  # every other batch on a stream of its own
    build: Callable[[], torch.nn.Module] = lambda: blocks()


class Tied(torch.nn.Module):
    """The first and the last layer share their weight; one block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


class Detached(torch.nn.Module):
    """The last block has no gradient on ranks but the first one, and they come to it late."""

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        if self.rank:
            with torch.no_grad():
                slow = torch.ones(512, 512, device=x.device)
                for _ in range(20):
                    slow = slow @ slow * 0.0
        last = self.blocks[2](x)
        return x + (last.detach() if self.rank else last)


class Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


def blocks() -> torch.nn.Module:
    return torch.nn.Sequential(*(Block() for _ in range(4)))


CASES = {
    "stage 3": Case(),
    "in a file, flushes": Case(in_file=True, units="auto", flushes=True),
    "small units whole": Case(units="auto"),
    "no prefetch": Case(prefetch=0),
    "little prefetch": Case(prefetch=1 << 17),
    "stage 2": Case(stage=2),
    "stage 1": Case(stage=1),
    "stage 2, evaluates": Case(stage=2, evaluates=True),
    "bf16": Case(precision="bf16"),
    "accumulate": Case(accumulate=2),
    "clip": Case(clip=0.05),
    "evaluates": Case(evaluates=True),
    "two streams": Case(two_streams=True, accumulate=2),
    "in a file": Case(in_file=True),
    "in a file, evaluates": Case(in_file=True, evaluates=True),
    "in a file, reloads": Case(in_file=True, reloads=True),
    "reloads": Case(reloads=True),
    "torch steps": Case(torch_steps=True, late=True),
    "tied and frozen": Case(build=Tied),
    "checkpointed": Case(build=Checkpointed),
    "detached": Case(build=Detached),
}

INSIDE = (
    "stage 3",
    "small units whole",
    "stage 2",
    "stage 1",
    "accumulate",
    "bf16",
    "two streams",
    "tied and frozen",
    "torch steps",
    "detached",
)

CASES |= {f"inside: {name}": dataclasses.replace(CASES[name], steps_inside=True) for name in INSIDE}
CASES |= {f"device: {name}": dataclasses.replace(case, on_device=True) for name, case in CASES.items()}
CASES["device: stage 0"] = Case(stage=0, on_device=True)


def model_of(case: Case) -> torch.nn.Module:
    """Return the model of a case on the device, with the same values each time."""
    torch.manual_seed(0)
    model = case.build()
    tied = isinstance(model, Tied)
    model = model.to("sim")
    if tied:
        model.last.weight = model.first.weight
    return model


def batches(case: Case, rank: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS * case.accumulate):
        yield torch.randn(BATCH, WIDTH, generator=generator).to("sim")


def loss_of(model: torch.nn.Module, x: torch.Tensor, case: Case) -> torch.Tensor:
    return (model(x.to(torch.bfloat16) if case.precision else x).float() ** 2).mean()


def evaluated(model: torch.nn.Module, x: torch.Tensor, case: Case) -> torch.Tensor:
    with torch.no_grad():
        return loss_of(model, x, case)


def reference(case: Case, rank: int, ranks: int) -> tuple[list[float], list[torch.Tensor]]:
    """Return this rank's losses and the parameters at the end, without zeropp's coordinator."""
    model = model_of(case)
    if case.precision:
        model.to(torch.bfloat16)
        if isinstance(model, Tied):
            model.last.weight = model.first.weight
    masters = [p.detach().cpu().float() for p in model_of(case).parameters()]
    params = list(model.parameters())
    trained = [i for i, p in enumerate(params) if p.requires_grad]
    states = [(torch.zeros_like(m), torch.zeros_like(m)) for m in masters]
    optimizer = optimizer_of(case, [masters[i] for i in trained])
    losses, data = [], [list(batches(case, r)) for r in range(ranks)]
    for step in range(STEPS):
        grads: list[list[torch.Tensor | None]] = []
        for r in range(ranks):
            for p in params:
                p.grad = None
            model.rank = r
            for micro in range(case.accumulate):
                loss = loss_of(model, data[r][step * case.accumulate + micro], case)
                loss.backward()
                if r == rank:
                    losses.append(loss.item())
            grads.append([None if params[i].grad is None else params[i].grad.cpu() for i in trained])
            if case.evaluates and r == rank:
                losses.append(evaluated(model, data[r][step], case).item())
        if case.flushes and step > 0:
            losses.append(evaluated(model, data[rank][step], case).item())
        hosts = "" if case.on_device else os.environ.get("SIM_HOSTS", "")
        total = [sum_by_hosts(one, hosts, 1 / ranks / case.accumulate) for one in zip(*grads, strict=True)]
        scale = 1.0
        if case.clip is not None:
            norm = sum(float((g.double() ** 2).sum()) for g in total) ** 0.5
            scale = min(1.0, case.clip / (norm + 1e-6))
        if case.torch_steps:
            torch_step(optimizer, [masters[i] for i in trained], total)
        else:
            adam_step_(
                [masters[i] for i in trained], total, [states[i][0] for i in trained], [states[i][1] for i in trained],
                step=step + 1, lr=LR, weight_decay=DECAY, grad_scale=scale,
            )  # fmt: skip
        with torch.no_grad():
            for i in trained:
                params[i].copy_(masters[i])
        if case.flushes and step == 0:
            losses.append(evaluated(model, data[rank][step], case).item())
    return losses, [p.detach().cpu() for p in params]


def optimizer_of(case: Case, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    if case.torch_steps:
        return torch.optim.RMSprop(params, lr=LR, foreach=False)
    return torch.optim.AdamW(params, lr=LR, weight_decay=DECAY)


def torch_step(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.dtype)
    optimizer.step()


def sum_in_order(grads: tuple[torch.Tensor | None, ...], factor: float) -> torch.Tensor:
    """Return the sum in fp32, in the order of ranks, rounded once."""
    there = [one for one in grads if one is not None]
    total = there[0].float()
    for one in there[1:]:
        total = total + one.float()
    return (total * factor).to(there[0].dtype)


def sum_by_hosts(grads: tuple[torch.Tensor | None, ...], hosts: str, factor: float) -> torch.Tensor:
    """Return the sum of what the ranks of each host add first (docs/design/0016). ``hosts``: a letter a rank; empty: one host."""
    if len(set(hosts)) == len(hosts):
        return sum_in_order(grads, factor)
    sums = []
    for host in dict.fromkeys(hosts):
        here = tuple(one for one, its_host in zip(grads, hosts, strict=True) if its_host == host)
        if any(one is not None for one in here):
            sums.append(sum_in_order(here, 1.0))
    return sum_in_order(tuple(sums), factor)


def train(case: Case, schedule: str) -> dict[str, Any]:
    model = model_of(case)
    model.rank = dist.get_rank() if dist.is_initialized() else 0
    lazy, _, seed = schedule.partition(":")
    sim.set_schedule(int(lazy, 0), int(seed or 0))
    optimizer = optimizer_of(case, list(model.parameters()))
    offload = Offload(params="cpu", optimizer="cpu") if case.stage == 3 else Offload(optimizer="cpu")
    if case.on_device:
        offload = Offload()
    if case.in_file:
        offload = Offload(
            params=zeropp.Tier("nvme", path=sys.argv[3]), optimizer="cpu", delayed_update=1 if case.flushes else None
        )
    config = zeropp.Config(
        stage=case.stage, offload=offload, precision=case.precision, accumulate=case.accumulate, prefetch=case.prefetch,
        units=case.units, step_in_backward=case.steps_inside, comm=zeropp.Comm(gather=os.environ.get("SIM_GATHER", "auto")),
    )  # fmt: skip
    zeropp.prepare(model, optimizer, config)
    losses, waits, counts = [], {}, []
    side = torch.Stream(device="sim")
    data = batches(case, dist.get_rank() if dist.is_initialized() else 0)
    for _ in range(STEPS):
        before = sim.counts()
        with sim.waits_of_the_host(waits):
            for micro in range(case.accumulate):
                with side if case.two_streams and micro % 2 else contextlib.nullcontext():
                    x = next(data)
                    loss = loss_of(model, x, case)
                    if case.late and dist.get_rank():
                        time.sleep(0.5)
                    loss.backward()
                    losses.append(loss.detach())
            if case.evaluates:
                losses.append(evaluated(model, x, case))
            if case.clip is not None:
                optimizer.clip_grad_norm_(case.clip)
            optimizer.step()
            optimizer.zero_grad()
            if case.flushes:
                losses.append(evaluated(model, x, case))
                optimizer.flush()
            if case.reloads:
                evaluated(model, x, case)
                zeropp.load_full_state_dict(model, zeropp.full_state_dict(model))
        after = sim.counts()
        counts.append({name: after[name] - before[name] for name in after})
    torch.accelerator.current_stream().wait_stream(side)
    found = [loss.item() for loss in losses]
    state = zeropp.full_state_dict(model) if hasattr(zeropp, "full_state_dict") else {}
    sim.set_schedule(0, 0)
    del model, optimizer, loss, losses, data
    gc.collect()
    return {"losses": found, "state": state, "waits": waits, "counts": counts[-1]}


def main() -> None:
    rank, ranks, folder, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], CASES[sys.argv[4]]
    if hosts := os.environ.get("SIM_HOSTS"):
        os.environ["ZEROPP_HOST_ID"] = hosts[rank]
    if ranks > 1:
        dist.init_process_group("zeropp", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    wanted, values = reference(case, rank, ranks)
    names = [name for name, _ in model_of(case).named_parameters()]
    wrong: dict[str, Any] = {}
    last: dict[str, Any] = {}
    schedules = sys.argv[5:]
    if schedules[0].startswith("without="):
        between = list(map(int, schedules.pop(0).removeprefix("without=").split(",")))
        leave_out = sim.driver.sim_leave_out_between if len(between) == 2 else sim.driver.sim_leave_out_word
        leave_out(*between)
    for schedule in schedules:
        try:
            last = train(case, schedule)
        except zeropp.errors.Error as error:
            # Gradients that are not finite, on every rank. The streams of the next model would have other numbers.
            wrong[schedule] = {"error": str(error)}
            break
        if last["losses"] != wanted:
            wrong[schedule] = {"losses": last["losses"], "wanted": wanted}
            continue
        differs = [
            name
            for name, value in zip(names, values, strict=True)
            if not torch.equal(last["state"][name].cpu().to(value.dtype), value)
        ]
        if differs:
            wrong[schedule] = {"params": differs}
    found = {name: last.get(name) for name in ("waits", "counts")}
    print(json.dumps({"wrong": wrong, "error": sim.first_error(), **found}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
