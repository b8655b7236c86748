# SPDX-License-Identifier: Apache-2.0
"""Weights in 8 or 4 bits beside a GPU: the values of the CPU, what plain torch computes with them there, memory and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import scratch
from ranks import on_ranks
from torch import nn
from zeropp import Config, Offload, Precision, Tier

WIDTH, LAYERS = 256, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def build(device: str | torch.device) -> nn.Module:
    with torch.device("cpu"):
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)


def config(stored: str, tier: Tier, device: str | torch.device, **more: Any) -> Config:
    precision = Precision(param="bf16", stored=stored)
    return Config(precision=precision, offload=Offload(params=tier), units=(Block,), device=device, **more)


def tiers(path: str) -> dict[str, Tier]:
    return {
        "memory": Tier("cpu"),
        "some in memory": Tier("cpu", fraction=0.5),
        "a file": Tier("nvme", path=path),
        "some in a file": Tier("nvme", path=path, fraction=0.5),
    }


@on_ranks(1, 2, devices=("sim", "sim-lazy"))
@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_values_are_those_of_the_cpu(stored: str) -> None:
    """Also where little is read ahead; and plain torch computes the same with them."""
    with scratch() as path:
        for where, tier in tiers(path).items():
            with torch.device("cpu"):
                wanted, _ = zeropp.prepare(build("cpu"), None, config(stored, tier, "cpu"))
                values = {name: value.clone() for name, value in zeropp.full_state_dict(wanted).items()}
            there = torch.get_default_device()
            model, _ = zeropp.prepare(build(there), None, config(stored, tier, there, prefetch=1 << 20))
            found = zeropp.full_state_dict(model)
            assert all(torch.equal(value.cpu(), values[name]) for name, value in found.items()), where
            plain = build(there).bfloat16()
            plain.load_state_dict(values)
            x = torch.linspace(-1, 1, 4 * WIDTH, device="cpu").view(4, WIDTH).bfloat16().to(there)
            with torch.no_grad():
                for _ in range(2):
                    assert torch.equal(model(x), plain(x)), where
            del model, wanted


@on_ranks(1, 2, devices=("sim",))
@pytest.mark.parametrize("stored, bits", [("int8", 8), ("int4", 4)])
def test_the_estimate_is_what_is_held(stored: str, bits: int) -> None:
    there = torch.get_default_device()
    with scratch() as path:
        for where, tier in tiers(path).items():
            chosen = config(stored, tier, there, prefetch=0)
            with torch.device("meta"):
                shapes = nn.Sequential(*(Block() for _ in range(LAYERS)))
                said = zeropp.estimate(shapes, chosen, ranks=dist.get_world_size(), optimizer="none")
            model, _ = zeropp.prepare(build(there), None, chosen)
            with torch.no_grad():
                model(torch.ones(4, WIDTH, dtype=torch.bfloat16))
            found = zeropp.memory(model)
            for name, kind in (("device", "gathered"), ("cpu", "params"), ("pinned", "page_locked")):
                held = found[name][kind]["held"]
                assert said[name][kind] == pytest.approx(held, rel=0.05, abs=8192 * LAYERS), (where, name, said, found)
            matrices = LAYERS * 4 * WIDTH * WIDTH * (bits / 8 + 4 / 64)
            kept = found["cpu"]["params"]["held"] + found.get("nvme", {}).get("params", {"held": 0})["held"]
            if tier.kind == "nvme" or tier.fraction == 1.0:
                assert kept * dist.get_world_size() == pytest.approx(matrices, rel=0.08), (where, found)
            del model
