# SPDX-License-Identifier: Apache-2.0
"""Optimizers on shards that the GPUs of several ranks hold: the bits of the same shards on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks

WIDTH, STEPS = 32, 3


def build() -> torch.nn.Module:
    there = torch.get_default_device()
    with torch.device("cpu"):
        torch.manual_seed(0)
        layers = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
        return torch.nn.Sequential(*layers).to(there)


def muon(model: torch.nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return zeropp.optim.Muon([{"params": matrices, "lr": 0.02}, {"params": others, "use_muon": False, "lr": 1e-2}])


MAKE: dict[str, Any] = {
    "LAMB": lambda model: zeropp.optim.LAMB(model.parameters(), lr=1e-2),
    "Muon": muon,
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9),
}


class Halved(torch.optim.SGD):
    """An element-wise optimizer that zeropp does not know."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-0.5 * group["lr"])


MAKE["custom"] = lambda model: Halved(model.parameters(), lr=0.1)


def trained(name: str, stage: int, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build()
    optimizer = MAKE[name](model)
    if name == "custom":
        options["custom_optimizer"] = True
    zeropp.prepare(model, optimizer, zeropp.Config(stage=stage, units=("Linear",), **options))
    losses = []
    for number in range(STEPS):
        draw = torch.Generator("cpu").manual_seed(10 * number + dist.get_rank())
        x = torch.randn(4, WIDTH, generator=draw, device="cpu").to(torch.get_default_device())
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [float(one) for one in losses], {k: v.cpu() for k, v in zeropp.full_state_dict(model).items()}


CASES = [("LAMB", 2), ("LAMB", 3), ("Muon", 3), ("RMSprop", 3), ("custom", 3)]


@on_ranks(2, devices=("sim-lazy",))
@pytest.mark.parametrize("name, stage", CASES)
def test_shards_on_the_device_have_the_bits_of_shards_on_the_host(name: str, stage: int) -> None:
    found = trained(name, stage)
    host = {"params": "cpu", "optimizer": "cpu"} if stage == 3 else {"optimizer": "cpu"}
    losses, params = trained(name, stage, offload=zeropp.Offload(**host))
    assert found[0] == losses
    assert all(torch.equal(value, params[key]) for key, value in found[1].items())
