# SPDX-License-Identifier: Apache-2.0
"""How often a training step on the simulated GPU lets its host wait for the GPU, by reason.

On "sim" each operation is over when its call returns, so what is left are calls that wait whatever the GPU does. On "sim-lazy" nothing
runs before somebody waits for it: an event that is asked for again and again counts as one wait.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
from typing import Any

import pytest
import torch
import zeropp
from ranks import on_ranks
from torch import nn

LAYERS = 6
ASKED = "cuEventQuery, again and again"


def waits_of_a_step(clip: float | None, **options: Any) -> dict[str, int]:
    sim: Any = importlib.import_module("sim")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(units=[nn.Linear], **options))
    gc.collect()  # to free the memory of earlier models waits
    inputs, found = torch.ones(4, 32), dict[str, int]()
    for step in range(3):
        waits: dict[str, int] = {}
        with sim.waits_of_the_host(waits):
            optimizer.backward(model(inputs).float().square().mean())
            if clip is not None:
                optimizer.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
        found = waits if step else {}
    return found


def check(waits: dict[str, int], asked: int, device: str) -> None:
    """No call waits by itself; an event is asked for until it is over at most so many times."""
    assert waits.keys() <= {ASKED}, waits
    assert waits.get(ASKED, 0) <= (asked if device == "sim-lazy" else 0), waits


@on_ranks(1, 2, "2 hosts", devices=("sim", "sim-lazy"))
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_shards_on_the_device(precision: str | None, clip: float | None, device: str) -> None:
    """The host waits for nothing: norm, clipping, skipped steps and the loss scale are the GPU's."""
    for stage in (0, 1, 2, 3):
        check(waits_of_a_step(clip, stage=stage, precision=precision), 0, device)


@on_ranks(1, 2, devices=("sim", "sim-lazy"))
def test_parameters_without_a_master(device: str) -> None:
    for state in ("fp32", "int8"):
        precision = zeropp.Precision(param="bf16", master="bf16", state=state)
        check(waits_of_a_step(1.0, precision=precision), 0, device)


@on_ranks(2, devices=("sim", "sim-lazy"))
def test_parameters_and_gradients_in_fewer_bits(device: str) -> None:
    """The GPUs quantise and dequantise, so the host still waits for nothing."""
    check(waits_of_a_step(1.0, comm=zeropp.Comm(params="int8", grads="int4")), 0, device)


@on_ranks(1, 2, devices=("sim", "sim-lazy"))
def test_a_step_inside_the_backward(device: str) -> None:
    """Units are checked and stepped by the GPU, and how that ended is looked at later."""
    for stage in (1, 2, 3):
        check(waits_of_a_step(None, stage=stage, step_in_backward=True), 0, device)


@on_ranks(1, 2, devices=("sim", "sim-lazy"))
def test_shards_on_the_host(device: str) -> None:
    """The host steps, so it waits for the gradients of each unit, and for gathers to be over."""
    offload = zeropp.Offload(params="cpu", optimizer="cpu")
    check(waits_of_a_step(None, offload=offload), LAYERS + 1, device)


HOOK = ctypes.c_char_p(b"a thread of hooks")


def name_the_thread(_: Any = None) -> None:
    """Let waits of this thread be counted under that name."""
    sim: Any = importlib.import_module("sim")
    sim.driver.sim_because(HOOK)


@on_ranks("2 hosts", devices=("sim-lazy",))
@pytest.mark.parametrize("stage", [2, 3])
def test_shards_on_the_hosts_of_several_hosts(stage: int) -> None:
    """The communicator's thread waits for gradients, and for copies up before it fills a staging again. Threads of hooks do not."""
    sim: Any = importlib.import_module("sim")
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(LAYERS)))
    offload = zeropp.Offload(params="cpu" if stage == 3 else "device", optimizer="cpu")
    config = zeropp.Config(stage=stage, units=[nn.Linear], offload=offload)
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    gc.collect()  # to free the memory of earlier models waits
    inputs, waits = torch.ones(4, 32), dict[str, int]()
    name_the_thread()
    try:
        with sim.waits_of_the_host(waits):
            for _ in range(3):
                y = model(inputs)
                y.register_hook(name_the_thread)  # the thread of the backward
                optimizer.backward(y.square().mean())
                optimizer.step()
                optimizer.zero_grad()
    finally:
        sim.driver.sim_because(None)
    assert waits.keys() == {ASKED} and waits[ASKED] >= LAYERS, waits


@on_ranks(1, devices=("sim",))
def test_a_wait_is_seen() -> None:
    sim: Any = importlib.import_module("sim")
    waits: dict[str, int] = {}
    with sim.waits_of_the_host(waits):
        torch.ones(2).sum().item()
    assert waits == {"aten::item": 1}
