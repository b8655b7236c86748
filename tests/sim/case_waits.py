# SPDX-License-Identifier: Apache-2.0
"""Train a small ZeRO-3 made by hand, without one of its waits. Print as JSON in which schedules it was wrong.

    python case_waits.py WAIT [SEEDS]

WAIT is a name of WAITS, or "none"; SEEDS is the number of random schedules beside the 8 others.
Layers' parameters live in flat shards. `gather` fills a layer's storage on a side stream, forward and backward use it,
its memory is released and taken again, gradients are summed on a third stream, and SGD steps on the first. There is one
process; what a peer would send is a second buffer. Three streams have eight schedules.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import sim
import torch

LAYERS, WIDTH, STEPS, LR = 5, 32, 3, 0.05
WAITS = (
    "compute waits for gather",
    "gather waits for released memory",
    "reduce waits for gradient",
    "gradient kept until it was read",
    "step waits for reduce",
    "gather waits for step",
    "host reads after the copy",
)
Result = tuple[list[float], torch.Tensor]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight).tanh()


def start() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the shards and the data of every step."""
    generator = torch.Generator().manual_seed(0)
    shards = [torch.randn(WIDTH * WIDTH, generator=generator) * 0.2 for _ in range(LAYERS)]
    return shards, [torch.randn(16, WIDTH, generator=generator) for _ in range(STEPS)]


def plainly() -> Result:
    """Train on the CPU without streams."""
    shards, data = start()
    weights = [shard.view(WIDTH, WIDTH).clone().requires_grad_() for shard in shards]
    losses = []
    for x in data:
        for weight in weights:
            x = torch.nn.functional.linear(x, weight).tanh()
        loss = (x * x).mean()
        loss.backward()
        with torch.no_grad():
            for weight in weights:
                weight.add_(weight.grad, alpha=-LR)
                weight.grad = None
        losses.append(loss.item())
    return losses, torch.cat([weight.detach().reshape(-1) for weight in weights])


class Zero3:
    """The streams, and what they hand over. A method leaves out the wait that `without` names."""

    def __init__(self, without: str, gather: torch.Stream, reduce: torch.Stream) -> None:
        self.without, self.gather, self.reduce = without, gather, reduce
        shards, self.data = start()
        self.shards = [shard.to("sim") for shard in shards]
        self.layers = [Layer().to("sim") for _ in range(LAYERS)]
        self.stores = [layer.weight.untyped_storage() for layer in self.layers]
        self.sums = [torch.zeros(WIDTH * WIDTH, device="sim") for _ in range(LAYERS)]
        self.ready: list[Any] = [None] * LAYERS
        self.stepped: list[Any] = [None] * LAYERS
        self.kept: list[torch.Tensor] = []
        self.in_backward = False
        for i, layer in enumerate(self.layers):
            self.stores[i].resize_(0)
            layer.weight.register_post_accumulate_grad_hook(lambda p, i=i: self.take_gradient(i, p))

    def has(self, wait: str) -> bool:
        assert wait in WAITS
        return wait != self.without

    def fetch(self, i: int) -> None:
        if not 0 <= i < LAYERS or self.stores[i].size():
            return
        self.stores[i].resize_(WIDTH * WIDTH * 4)  # in the order of the compute stream
        if self.has("gather waits for released memory"):
            self.gather.wait_stream(torch.accelerator.current_stream())
        if self.stepped[i] is not None and self.has("gather waits for step"):
            self.gather.wait_event(self.stepped[i])
        with self.gather, torch.no_grad():
            torch.empty(0, device="sim").set_(self.stores[i], 0, (WIDTH * WIDTH,)).copy_(self.shards[i])
            self.ready[i] = self.gather.record_event()

    def use(self, i: int) -> None:
        self.fetch(i)
        if self.has("compute waits for gather"):
            torch.accelerator.current_stream().wait_event(self.ready[i])
        self.fetch(i - 1 if self.in_backward else i + 1)

    def take_gradient(self, i: int, parameter: torch.nn.Parameter) -> None:
        grad = parameter.grad
        parameter.grad = None
        assert grad is not None
        if self.has("reduce waits for gradient"):
            self.reduce.wait_stream(torch.accelerator.current_stream())
        with self.reduce, torch.no_grad():
            self.sums[i].add_(grad.reshape(-1))
        if self.has("gradient kept until it was read"):
            self.kept.append(grad)
        del grad
        self.stores[i].resize_(0)

    def step(self) -> None:
        compute = torch.accelerator.current_stream()
        if self.has("step waits for reduce"):
            compute.wait_stream(self.reduce)
        with torch.no_grad():
            for i in range(LAYERS):
                self.shards[i].add_(self.sums[i], alpha=-LR)
                self.sums[i].zero_()
                self.stepped[i] = compute.record_event()
        if self.has("step waits for reduce"):
            self.reduce.wait_stream(compute)  # the sums are cleared before the next gradients come
        self.kept.clear()

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        self.in_backward = False
        for i, layer in enumerate(self.layers):
            self.use(i)
            x = layer(x)
            x.register_hook(lambda grad, i=i: self.use(i))
            self.stores[i].resize_(0)
        self.in_backward = True
        return (x * x).mean()

    def train(self) -> Result:
        losses = []
        for x in self.data:
            loss = self.loss_of(x.to("sim"))
            loss.backward()
            self.step()
            host = torch.empty((), pin_memory=True)
            host.copy_(loss.detach(), non_blocking=True)
            if self.has("host reads after the copy"):
                torch.accelerator.current_stream().record_event().synchronize()
            losses.append(host.item())
        sim.finish()
        return losses, torch.cat([shard.cpu() for shard in self.shards])


def main(without: str, seeds: int) -> None:
    gather, reduce = torch.Stream(device="sim"), torch.Stream(device="sim")
    wanted = plainly()
    wrong = []
    for schedule in [*((lazy, 0) for lazy in range(8)), *((0b111, seed) for seed in range(1, seeds + 1))]:
        sim.set_schedule(*schedule)
        losses, weights = Zero3(without, gather, reduce).train()
        if losses != wanted[0] or not torch.equal(weights, wanted[1]):
            wrong.append(schedule)
    print(json.dumps({"wrong": wrong, "error": sim.first_error()}), flush=True)
    os._exit(0)  # the backward's threads may ask for Python's lock while the interpreter ends, which aborts


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
