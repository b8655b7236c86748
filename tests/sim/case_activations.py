# SPDX-License-Identifier: Apache-2.0
"""Train on the simulated GPU with activations in page-locked memory, once for each schedule, and compare with activations on the device.
Print what was found as JSON.

python case_activations.py CASE [without=WAITER,SOURCE] SCHEDULE...

CASE is a name of CASES. WAITER and SOURCE are of STREAMS; waits of one for the other are left out. SCHEDULE says which of the three
streams are lazy: bit 0 computation, 1 the copies down, 2 the copies up; a seed may follow, as in 7:1.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import sim
import torch
import zeropp
from torch import nn
from zeropp.zero.engine import engine_of
from zeropp.zero.offload import activations, activations_device

STEPS, BATCH, WIDTH, LAYERS = 3, 8, 96, 6
STREAMS, HOST = ("compute", "down", "up"), -1


class Attention(nn.Module):
    """Queries, keys and values are views of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(torch.softmax(q @ k.transpose(-1, -2) / WIDTH, dim=-1) @ v).tanh()


class Blocks(nn.Module):
    """Some blocks run on a second stream, or are checkpointed."""

    def __init__(self, two_streams: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.two_streams, self.checkpointed = two_streams, checkpointed
        self.side = torch.Stream(device="sim") if two_streams else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if self.side is not None and number % 2:
                current = torch.accelerator.current_stream()
                self.side.wait_stream(current)
                with self.side:
                    y = block(x)
                current.wait_stream(self.side)
                x.record_stream(self.side)
                y.record_stream(current)
                x = y
            elif self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


#: How to build the model, and how much may be on its way.
CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (Blocks, 1 << 15),
    "nothing waits": (Blocks, 1),
    "checkpointed": (lambda: Blocks(checkpointed=True), 1),
    "two streams": (lambda: Blocks(two_streams=True), 1 << 15),
    "two streams, nothing waits": (lambda: Blocks(two_streams=True), 1),
    "a stream for each micro-batch": (Blocks, 1),
    "reads the loss": (Blocks, 1),
    "a file": (Blocks, 1 << 15),
    "a file, checkpointed": (lambda: Blocks(checkpointed=True), 1),
    "a file, a stream for each micro-batch": (Blocks, 1),
}


def data(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to("sim")


def tier_for(case: str, offloads: bool) -> zeropp.Tier:
    if not offloads or "file" not in case:
        return zeropp.Tier("cpu" if offloads else "device")
    return zeropp.Tier("nvme", path=tempfile.mkdtemp())


def run(case: str, offloads: bool, schedule: str = "0", without: str = "") -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(0)
    model: Any = CASES[case][0]().to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    offload = zeropp.Offload(activations=tier_for(case, offloads))
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=2, offload=offload, accumulate=2))
    if offloads:
        set_streams(engine_of(model).activations, schedule, without)
    losses, waits, figures, side = [], {}, {}, torch.Stream(device="sim")
    with sim.waits_of_the_host(waits):
        for step in range(STEPS):
            for micro in range(2):
                # Both begin after the last step, and nothing orders them among themselves.
                if micro and "micro-batch" in case:
                    context: Any = side
                else:
                    side.wait_stream(torch.accelerator.current_stream())
                    context = contextlib.nullcontext()
                with context:
                    loss = (model(data(2 * step + micro)) ** 2).mean()
                    if offloads:
                        figures = engine_of(model).activations.figures()
                    if case == "reads the loss":
                        loss.item()
                    loss.backward()
                    losses.append(loss.detach())
            torch.accelerator.current_stream().wait_stream(side)
            optimizer.step()
            optimizer.zero_grad()
            del loss
    sim.driver.sim_leave_out_between(-2, 0)
    found = [loss.item() for loss in losses]
    params = [p.detach().cpu().tolist() for p in model.parameters()]
    if offloads:
        figures |= {"left": engine_of(model).activations.figures(), "memory": zeropp.memory(model)}
    sim.set_schedule(0, 0)
    del model, optimizer, losses
    gc.collect()
    return [found, params], {"waits": waits, "figures": figures}


def set_streams(tier: Any, schedule: str, without: str) -> None:
    streams = (torch.accelerator.current_stream(), tier.down, getattr(tier, "up", tier.down))
    numbers = dict(zip(STREAMS, (sim.stream_number(stream.stream_id) for stream in streams), strict=True))
    numbers["host"] = HOST
    lazy, _, seed = schedule.partition(":")
    bits = sum((int(lazy, 0) >> i & 1) << numbers[name] for i, name in enumerate(STREAMS))
    sim.set_schedule(bits, int(seed or 0))
    if without:
        sim.driver.sim_leave_out_between(*(numbers[name] for name in without.split(",")))


def wanted_elsewhere(schedule: str, without: str) -> bool:
    """Save on a second stream, which the first one waits for before the memory is freed, and use the bytes on the first one. Return
    True if they are right."""
    model = nn.Linear(WIDTH, WIDTH).to("sim")
    zeropp.prepare(model, None, zeropp.Config(offload=zeropp.Offload(activations="cpu")))
    tier: Any = engine_of(model).activations
    side, main_stream = torch.Stream(device="sim"), torch.accelerator.current_stream()
    set_streams(tier, schedule, without)
    with side:
        saved = torch.full((BATCH, WIDTH), 3.0, device="sim")
        packed = tier._pack(saved)
        main_stream.wait_stream(side)
        del saved
        tier._reap(patiently=True)
    found = tier._unpack(packed).cpu()
    sim.driver.sim_leave_out_between(-2, 0)
    sim.set_schedule(0, 0)
    return bool((found == 3.0).all())


def without_room() -> str:
    """Return what a forward says if the second piece of page-locked memory cannot be had."""
    empty, pieces = torch.empty, 0

    def no_second(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal pieces
        pieces += bool(options.get("pin_memory"))
        if options.get("pin_memory") and pieces == 2:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*arguments, **options)

    torch.empty = no_second
    try:
        run("plain", True)
    except zeropp.TierError as error:
        return str(error)
    finally:
        torch.empty = empty
    return ""


def main() -> None:
    case, schedules = sys.argv[1], sys.argv[2:]
    without = schedules.pop(0).removeprefix("without=") if schedules[0].startswith("without=") else ""
    torch.set_num_threads(1)
    activations.MIN_BYTES, activations.WAITING_BYTES = 1 << 10, CASES.get(case, (None, 1))[1]
    activations_device.SLAB_BYTES = 1 << 16
    if case == "no room":
        print(json.dumps({"said": without_room()}), flush=True)
        os._exit(0)
    if case == "wanted elsewhere":
        wrong = [schedule for schedule in schedules if not wanted_elsewhere(schedule, without)]
        print(json.dumps({"wrong": wrong, "error": sim.first_error()}), flush=True)
        os._exit(0)
    wanted, _ = run(case, False)
    wrong, last = [], {}
    for schedule in schedules:
        found, last = run(case, True, schedule, without)
        if found != wanted:
            wrong.append(schedule)
    print(json.dumps({"wrong": wrong, "error": sim.first_error(), **last}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
