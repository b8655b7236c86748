# SPDX-License-Identifier: Apache-2.0
"""zeropp.memory on a machine with an accelerator: what is on the device, page-locked, and in plain memory of the host."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_cpu_only, on_ranks
from torch import nn
from zeropp.zero import device_plan

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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


ON_HOST = zeropp.Offload(params="cpu", optimizer="cpu")
PLANS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "stage 3": {"stage": 3},
    "stage 3, bf16, no prefetch": {"stage": 3, "precision": "bf16", "prefetch": 0},
    "stage 2, few buckets": {"stage": 2, "bucket_bytes": 1},
    "stage 1, reduces bf16": {"stage": 1, "precision": zeropp.Precision(reduce="bf16")},
    "stage 3, int8 gradients": {"stage": 3, "comm": zeropp.Comm(grads="int8")},
    "stage 3, int8 parameters": {"stage": 3, "comm": zeropp.Comm(params="int8")},
    "stage 3, bf16, int4 parameters": {"stage": 3, "precision": "bf16", "comm": zeropp.Comm(params="int4", block_elems=64)},
    "stage 3, step in the backward": {"stage": 3, "step_in_backward": True},
    "host, stage 1": {"stage": 1, "offload": zeropp.Offload(optimizer="cpu")},
    "host, stage 2": {"stage": 2, "offload": zeropp.Offload(optimizer="cpu")},
    "host, stage 3": {"stage": 3, "offload": ON_HOST},
    "host, stage 3, bf16, no prefetch": {"stage": 3, "offload": ON_HOST, "precision": "bf16", "prefetch": 0},
    "host, stage 3, int8 parameters": {"stage": 3, "offload": ON_HOST, "comm": zeropp.Comm(params="int8", block_elems=64)},
    "host, accumulates": {"stage": 3, "offload": ON_HOST, "accumulate": 2},
}  # fmt: skip


@on_ranks(1, 2, devices=("sim",))
@pytest.mark.parametrize("name", PLANS)
def test_the_estimate_is_what_is_held(name: str) -> None:
    check_estimate(zeropp.Config(**PLANS[name], units=(Block, nn.Linear), device="sim"))


ON_HOSTS = (
    "stage 0", "stage 2", "stage 2, few buckets", "stage 3, int8 gradients", "stage 3, bf16, int4 parameters", "host, stage 2",
    "host, stage 3", "host, stage 3, int8 parameters",
)  # fmt: skip


@on_ranks("2 hosts", devices=("sim",))
@pytest.mark.parametrize("name", ON_HOSTS)
def test_over_hosts_the_estimate_is_what_is_held(name: str) -> None:
    check_estimate(zeropp.Config(**PLANS[name], units=(Block, nn.Linear), device="sim"), hosts=2)


def check_estimate(config: zeropp.Config, hosts: int = 1) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), *(Block() for _ in range(5)), nn.LayerNorm(128))

    with torch.device("meta"):
        said = zeropp.estimate(build(), config, ranks=dist.get_world_size(), hosts=hosts)
    model = build()
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    for _ in range(2):
        for _ in range(config.accumulate):
            model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = zeropp.memory(model, optimizer)
    assert {"device"} <= said.keys() and ("pinned" in said) == ("pinned" in found)
    for tier in ("device", "pinned", "cpu"):
        for kind, size in said.get(tier, {}).items():
            held = found.get(tier, {}).get(kind, {"held": 0})["held"]
            if kind == "autograd" or (kind == "grads" and dist.get_world_size() == 1 and tier == "device"):
                continue  # torch's own, and one rank's p.grad
            if (tier, kind) == ("pinned", "buckets"):  # of those that may wait
                assert held <= size * 1.03
                continue
            assert size == pytest.approx(held, rel=0.03, abs=4096), (tier, kind, said, found)


@on_ranks(1, devices=("sim",))
def test_more_page_locked_memory_than_the_host_has() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_plan, "host_memory", lambda: (1000, "the memory of the machine"))
        with pytest.raises(zeropp.ConfigError) as error:
            zeropp.prepare(model, optimizer, zeropp.Config(offload=ON_HOST))
    said = str(error.value)
    assert said.startswith("prepare: 1 rank of this host is to page-lock ") and "bytes of its memory (" in said
    assert "the memory of the machine is 1000 bytes; start fewer ranks here, lower bucket_bytes" in said
    zeropp.prepare(model, optimizer, zeropp.Config(offload=ON_HOST))  # nothing was changed


@on_ranks(1, 2, devices=("sim",))
def test_the_driver_page_locks_no_more() -> None:
    gc.collect()  # models of the tests before hold page-locked memory, which the limit counts too
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIM_PINNED_BYTES", str(1200 << 10))  # the parameters of all ranks, and not the buckets
        with pytest.raises(MemoryError) as error:
            zeropp.prepare(model, optimizer, zeropp.Config(offload=ON_HOST, units=(nn.Linear,), precision="fp32"))
    said = str(error.value)
    assert "page-locking" in said and "CUDA_ERROR_OUT_OF_MEMORY" in said and "ulimit -l" in said, said
    assert "this rank page-locked 10" in said, said
    assert "bytes of shards and buckets before; lower Config(bucket_bytes=)" in said, said
