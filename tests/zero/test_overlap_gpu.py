# SPDX-License-Identifier: Apache-2.0
"""What a GPU does at the same time, on a simulated one: torch's test_fully_shard_overlap.py without clocks.

A lazy stream runs only what somebody waits for. So what is there although the stream that computes has not run yet was made beside it.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import of_all_ranks, on_ranks
from torch import Tensor, nn
from zeropp.zero.engine import engine_of

WIDTH, LAYERS, COMPUTE_IS_LAZY = 32, 5, 1


def memory_of(tensor: Tensor) -> Tensor:
    """Return a copy of what the memory of a tensor of the simulated GPU has now, whatever is enqueued."""
    memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return torch.tensor(list(memory), device="cpu")


def trained(**options: Any) -> tuple[nn.Sequential, Any]:
    """Return a model whose order of units is known, because it was trained for two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = zeropp.Config(units=[nn.Linear], prefetch=1 << 20, **options)
    model, optimizer = zeropp.prepare(model, optimizer, config)
    for _ in range(2):
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def unit_of(model: nn.Module, layer: int) -> Tensor:
    """Return the whole unit of a layer: its weight, and what fills it up."""
    units = engine_of(model).units
    found = next(one for one in units if one.params[0].names[0] == f"{layer}.weight")
    return found.whole[: WIDTH * WIDTH]


@on_ranks(2, devices=("sim",))
@pytest.mark.parametrize("shards", ["device", "host"])
def test_the_next_unit_is_gathered_beside_the_computation_of_this_one(shards: str) -> None:
    sim: Any = importlib.import_module("sim")
    offload = zeropp.Offload(params="cpu", optimizer="cpu") if shards == "host" else zeropp.Offload()
    model, _ = trained(offload=offload)
    values = {name: value.cpu().flatten() for name, value in zeropp.full_state_dict(model).items()}
    begun, ahead = torch.zeros(1), list[bool]()

    def note(layer: int) -> None:
        if layer == 0:
            begun.fill_(1.0)  # the first that this pass computes
        elif layer + 1 < LAYERS:
            computes = bool(memory_of(begun)[0])
            ahead.append(
                not computes and torch.equal(memory_of(unit_of(model, layer + 1)), values[f"{layer + 1}.weight"])
            )

    for layer, module in enumerate(model):
        module.register_forward_pre_hook(lambda *_, layer=layer: note(layer))
    x = torch.ones(4, WIDTH)
    sim.set_schedule(COMPUTE_IS_LAZY, 0)
    loss = model(x).square().mean()
    sim.set_schedule(0, 0)
    assert ahead == [True] * (LAYERS - 2)
    loss.backward()


@on_ranks(2, devices=("sim",))
def test_at_most_the_unit_in_use_and_what_is_read_ahead_are_whole() -> None:
    """torch's test_fully_shard_training_memory: two blocks are whole at a time, in a forward and in a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    unit_bytes, grain_bytes = WIDTH * WIDTH * 4, 4096
    model, optimizer = zeropp.prepare(
        model, torch.optim.AdamW(model.parameters()), zeropp.Config(units=[nn.Linear], prefetch=unit_bytes)
    )
    for _ in range(3):
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gathered = zeropp.memory(model)["device"]
    assert gathered["gathered"]["held"] <= 3 * unit_bytes + grain_bytes  # R: two units, and what is read ahead
    assert engine_of(model).core.memory()["gathered_peak"] <= 2 * unit_bytes


class Tied(nn.Module):
    """The first layer and the last share their weight, so a backward needs it from its beginning to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)).tanh())


@on_ranks(2, devices=("sim",))
@pytest.mark.parametrize("shards", ["device", "host"])
def test_a_tied_unit_is_in_nobodys_way(shards: str) -> None:
    """It has memory of its own beside that of two other units."""
    offload = zeropp.Offload(params="cpu", optimizer="cpu") if shards == "host" else zeropp.Offload()
    losses = []
    for prefetch in (0, 1 << 20):
        torch.manual_seed(0)
        model = Tied()
        config = zeropp.Config(units=[nn.Linear], prefetch=prefetch, offload=offload)
        model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
        for _ in range(3):
            loss = model(torch.ones(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:] and losses[2] != losses[0]
    unit_bytes, grain_bytes = WIDTH * WIDTH * 4, 4096
    assert zeropp.memory(model)["device"]["gathered"]["held"] <= (LAYERS + 1) * unit_bytes + grain_bytes


@on_ranks(2, devices=("sim-lazy",))
def test_whole_gradients_may_be_changed() -> None:
    """At stage 0 a rank copies shards out of what the p.grad of its peers is. One that changes p.grad at once, as torch's clipping does,
    comes after the copies of a slower one."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    weight = model.weight.detach().cpu()
    model, _ = zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(stage=0))
    rows = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(one), device="cpu") for one in range(2)]
    model(rows[rank].to("sim")).square().sum().backward()
    gradient: Any = model.weight.grad
    if rank == 0:
        gradient.zero_()
        assert float(gradient.abs().max()) == 0
    else:
        time.sleep(0.5)
        wanted = sum(2 * (one @ weight.t()).t() @ one for one in rows) / 2
        torch.testing.assert_close(gradient.cpu(), wanted, rtol=1e-4, atol=1e-4)
    of_all_ranks(None)
