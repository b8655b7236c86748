# SPDX-License-Identifier: Apache-2.0
"""Experts on GPUs: parity with one process, the bits of the CPU, the waits of the host, and what is refused. The other files of this folder
run by device, too (`--device=sim`)."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest
import torch
import zeropp
from expert_layer import CASES, OnDevice
from expert_parity import parity
from ranks import on_ranks
from zeropp.errors import ConfigError
from zeropp.zero.model.accelerator import check_experts


@on_ranks(2, devices=("sim", "sim-lazy", "sim-offload"))
def test_training_equals_one_process() -> None:
    parity("Mixtral", 2, stage=3)


@pytest.mark.parametrize("case", list(CASES))
@on_ranks(1, 2, devices=("sim", "sim-lazy"))
def test_rows_have_the_bits_of_the_cpu(case: str) -> None:
    """In device memory, and in host memory for want of it."""
    import torch.distributed as dist

    exchanges = [zeropp.moe.Exchange(dist.group.WORLD) for _ in range(3)]
    numbers = [exchange.layer("bits") for exchange in exchanges]
    exchanges[2].device = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wanted = OnDevice(case, dtype, "cpu").run(exchanges[0], numbers[0])
        for exchange, number in zip(exchanges[1:], numbers[1:], strict=True):
            for found, want in zip(OnDevice(case, dtype, "sim").run(exchange, number), wanted, strict=True):
                assert found.device.type == "sim"
                assert torch.equal(found.cpu(), want)
    assert [exchange.device for exchange in exchanges] == [None, torch.device("sim:0"), torch.device("cpu")]


@on_ranks(1, 2, devices=("sim", "sim-lazy"))
def test_the_host_waits_for_the_choices_alone() -> None:
    import torch.distributed as dist

    sim: Any = importlib.import_module("sim")
    exchange = zeropp.moe.Exchange(dist.group.WORLD)
    number = exchange.layer("waits")
    layer = OnDevice("uneven", torch.float32, "sim")
    wanted = [part.cpu() for part in layer.run(exchange, number)]
    for _ in range(3):
        waits: dict[str, int] = {}
        with sim.waits_of_the_host(waits):
            found = layer.run(exchange, number)
        assert waits == {"a copy to the host": 1}, waits
        assert all(torch.equal(one.cpu(), want) for one, want in zip(found, wanted, strict=True))


@on_ranks(2, devices=("sim", "sim-lazy"))
def test_a_layer_of_divided_experts_waits_once() -> None:
    sim: Any = importlib.import_module("sim")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), zeropp.moe.MoE(16, 4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(experts=2, stage=2))
    gc.collect()  # to free the memory of earlier models waits
    inputs, found = torch.ones(6, 16), []
    for _ in range(3):
        waits: dict[str, int] = {}
        with sim.waits_of_the_host(waits):
            model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(waits)
    assert found[2] == {"a copy to the host": 1}, found


@on_ranks(1, devices=("sim",))
def test_rows_may_come_back_on_the_cpu() -> None:
    hidden, chosen = torch.ones(3, 16), torch.zeros(3, 1, dtype=torch.long)
    rows, plan = zeropp.moe.dispatch(hidden, chosen, 4)
    assert plan.slots.device == hidden.device
    y = zeropp.moe.combine(rows.cpu(), plan)
    assert y.is_cpu
    assert torch.equal(y, hidden.cpu())


@pytest.mark.parametrize(
    ("kinds", "more", "ranks", "sentence"),
    [
        ({"optimizer": "nvme", "path": "/tmp"}, {"stage": 2}, 2, r"Offload\(optimizer='nvme'\)\) beside shards there is .*Offload\(optimizer='cpu'"),
        ({"params": "nvme", "path": "/tmp"}, {}, 2, r"Offload\(params='nvme'\)\) beside .*Offload\(params='cpu', optimizer='cpu'\)\), or the"),
        ({"params": "cpu"}, {"stage": 2}, 2, r"params='cpu'\)\) with stage 2, which keeps parameters whole there, is not .* leave params out"),
        ({"params": "cpu", "optimizer": "cpu"}, {}, 1, r"params='cpu'\)\) with one rank, which keeps"),
    ],
)  # fmt: skip
def test_what_tiers_of_experts_refuse_beside_a_gpu(kinds: Any, more: Any, ranks: int, sentence: str) -> None:
    config = zeropp.Config(experts=zeropp.Experts(offload=zeropp.Offload(**kinds)), **more)
    with pytest.raises(ConfigError, match=rf"computes on cuda:0, where Experts\(offload=.*{sentence}"):
        check_experts(config, torch.device("cuda:0"), ranks)
    check_experts(config, torch.device("cpu"), ranks)


def test_rows_without_values_are_refused() -> None:
    hidden, chosen = torch.ones(3, 16, device="meta"), torch.zeros(3, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"hidden is on meta, wanted a tensor with values, on the cpu or a GPU"):
        zeropp.moe.dispatch(hidden, chosen, 4)
