# SPDX-License-Identifier: Apache-2.0
"""Experts over the data ranks of each stage of a pipeline, against one process."""

from __future__ import annotations

from typing import Any

import pipelines
import pytest
import torch
import zeropp
from meetings import over
from pipelines import BOUND, CLASSES, WIDTH, mesh_of, require_close
from ranks import on_ranks
from torch import Tensor, nn

STEPS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), zeropp.moe.MoE(WIDTH, 4, 2, intermediate=8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, CLASSES))


def dense_first() -> nn.Sequential:
    """The first stage has no experts."""
    torch.manual_seed(0)
    blocks = [*(pipelines.Block() for _ in range(4)), *(Block() for _ in range(2))]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES))


@on_ranks(4)
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_pipeline_of_experts_equals_one_process(schedule: str, stage: int) -> None:
    """Losses, norms and weights: each expert has seen the tokens of both data ranks of its stage."""
    mesh = mesh_of(2, 2)
    run = pipelines.Run(mesh, schedule, build=net, stage=stage, experts=2)
    parts = [module.forward.exchange.ranks for module in run.chunks.modules() if type(module).__name__ == "Experts"]
    assert parts == [2, 2]
    values, norms = run.train(STEPS)
    wanted, wanted_norms = pipelines.plain(STEPS, 2, build=net)
    require_close(values, wanted, BOUND)
    for found, want in zip(norms, wanted_norms, strict=True):
        assert abs(float(found) - want) <= 1e-5 * want


@pytest.mark.slow
@on_ranks(4, devices=("sim",))
def test_stages_on_gpus_of_two_hosts() -> None:
    """Each stage is on one host, whose ranks divide its experts: the bits are those of one host."""
    options: dict[str, Any] = {"build": net, "stage": 3, "experts": 2}
    wanted, norms = pipelines.Run(mesh_of(2, 2), "1F1B", **options).train(STEPS)
    with over("aabb"):
        values, found = pipelines.Run(mesh_of(2, 2), "1F1B", **options).train(STEPS)
    assert [float(norm) for norm in found] == [float(norm) for norm in norms]
    assert all(torch.equal(value, wanted[name]) for name, value in values.items())


@on_ranks(4)
def test_a_stage_without_experts() -> None:
    mesh = mesh_of(2, 2)
    run = pipelines.Run(mesh, "1F1B", build=dense_first, experts=zeropp.Experts(parallel=2))
    values, _ = run.train(STEPS)
    require_close(values, pipelines.plain(STEPS, 2, build=dense_first)[0], BOUND)


@on_ranks(4)
def test_a_pipeline_without_experts_is_refused() -> None:
    """On all stages, with the sentence of a model without them; and a mistake of one stage ends all."""
    mesh = mesh_of(2, 2)
    with pytest.raises(zeropp.ConfigError, match=r"has no module that its ep_plan names as 'ep_dispatch_experts'"):
        pipelines.Run(mesh, "1F1B", experts=2)
    with pytest.raises(zeropp.ConfigError, match=r"Config.experts: 3 ranks with different experts"):
        pipelines.Run(mesh, "1F1B", build=dense_first, experts=3)


def test_an_estimate_of_a_pipeline_of_experts() -> None:
    said: Any = zeropp.estimate(net(), zeropp.Config(experts=2), mesh={"pp": 2, "dp": 2})
    assert len(said["stages"]) == 2
    assert said["experts"]["parameters"] * 2 == sum(
        p.numel() for m in net().modules() if isinstance(m, zeropp.moe.layer.Experts) for p in m.parameters()
    )
