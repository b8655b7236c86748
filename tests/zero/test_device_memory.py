# SPDX-License-Identifier: Apache-2.0
"""zeropp.memory on a machine with an accelerator: what is on the device, page-locked, and in plain memory of the host."""

from __future__ import annotations

import torch
import torch.distributed as dist
import zeropp
from ranks import on_cpu_only, on_ranks
from torch import nn

WIDTH = 64


@on_ranks(1, 2, devices=("sim",))
def test_offloaded_shards_are_pinned_and_gathered_units_are_on_the_device() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = zeropp.Config(offload=zeropp.Offload(params="cpu", optimizer="cpu"), units=[nn.Linear], prefetch=0)
    model, optimizer = zeropp.prepare(model, optimizer, config)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    found, ranks = zeropp.memory(model), dist.get_world_size()
    shards = 6 * WIDTH * WIDTH * 4 // ranks
    pinned, device = found["pinned"], found["device"]
    assert pinned["params"] == {"planned": shards, "held": shards}
    assert pinned["grads"]["planned"] == shards <= pinned["grads"]["held"]
    assert found["cpu"]["optimizer"] == {"planned": 2 * shards, "held": 2 * shards}
    assert "params" not in found["cpu"] and "optimizer" not in device
    assert pinned["page_locked"]["held"] >= ranks * (shards + shards)  # of all ranks
    assert WIDTH * WIDTH * 4 <= device["gathered"]["held"] < 6 * WIDTH * WIDTH * 4  # not the whole model
    assert device["buckets"]["held"] >= WIDTH * WIDTH * 4
    total = sum(found["bytes_per_parameter"].values())
    assert total == sum(16 / ranks for _ in range(2))


@on_ranks(1, devices=("cpu",))
def test_the_cpu_has_one_tier() -> None:
    on_cpu_only("the test is of memory without an accelerator")
    model, _ = zeropp.prepare(nn.Linear(4, 4), None, zeropp.Config())
    assert {"device", "pinned"}.isdisjoint(zeropp.memory(model))


@on_ranks(1, 2, devices=("sim",))
def test_shards_of_a_device_are_there() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(units=[nn.Linear], prefetch=0))
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    found, shards = zeropp.memory(model), 6 * WIDTH * WIDTH * 4 // dist.get_world_size()
    device = found["device"]
    assert device["params"] == {"planned": shards, "held": shards}
    assert device["optimizer"] == {"planned": 2 * shards, "held": 2 * shards}
    assert "pinned" not in found and not found.get("cpu", {}).get("params")
