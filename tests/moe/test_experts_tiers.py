# SPDX-License-Identifier: Apache-2.0
"""Experts of different ranks in files and in memory: the same bits in every tier."""

from __future__ import annotations

from typing import Any

import moe_models
import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import scratch
from moe_models import batch, loss_of
from ranks import on_ranks
from torch import Tensor

SLOW = pytest.mark.slow
STEPS = 3


def prepared(experts: Any, **config: Any) -> tuple[Any, Any]:
    model = moe_models.build("Mixtral", "grouped_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return zeropp.prepare(
        model, optimizer, zeropp.Config(stage=3, experts=experts, units=("MixtralExperts",), **config)
    )  # type: ignore[no-any-return]


def trained(experts: Any, **config: Any) -> tuple[dict[str, Tensor], list[float], Any]:
    """Return values and losses after some steps, and what zeropp.memory says then."""
    model, optimizer = prepared(experts, **config)
    losses = []
    for step in range(STEPS):
        for micro in range(config.get("accumulate", 1)):
            loss = loss_of(model, batch(10 * step + micro, dist.get_rank()))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return zeropp.full_state_dict(model), losses, zeropp.memory(model, optimizer)


def same(got: tuple[dict[str, Tensor], list[float], Any], wanted: tuple[dict[str, Tensor], list[float], Any]) -> None:
    assert got[1] == wanted[1]
    assert [name for name, value in wanted[0].items() if not torch.equal(got[0][name], value)] == []


KINDS = {
    "params": {"params": "nvme"},
    "all": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    "a half": {"params": 0.5, "grads": 0.5, "optimizer": 0.5},
    "delayed": {"params": "nvme", "optimizer": "nvme", "delayed_update": 0},
}


def offload(kind: str, path: str) -> zeropp.Offload:
    fields: dict[str, Any] = dict(KINDS[kind])
    for name, value in fields.items():
        if isinstance(value, float):
            fields[name] = zeropp.Tier("nvme", path=path, fraction=value)
    return zeropp.Offload(**fields, **({"path": path} if "nvme" in fields.values() else {}))


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_files_have_the_bits_of_memory(kind: str, ranks: int) -> None:
    """The parameters of each part lie in the file that the ranks of the host share."""
    more = {"offload": zeropp.Offload(optimizer="cpu", delayed_update=0)} if kind == "delayed" else {}
    wanted = trained(2, **more)
    with scratch() as path:
        got = trained(2, offload=offload(kind, path))
        same(got, wanted)
    for tier in ("cpu", "nvme"):
        for name in ("params", "grads", "optimizer"):
            figures = got[2][tier].get(name)
            if figures is not None and kind != "a half":  # pages, and what pads 9 units' shards
                assert abs(figures["planned"] - figures["held"]) <= 9 * 4096, (tier, name, figures)
    assert got[2]["nvme"]["params"]["held"] > 0


@on_ranks(2)
@pytest.mark.parametrize("more", [{"step_in_backward": True}, {"accumulate": 2}, {"clip": 0.1}])
def test_steps_of_files(more: dict[str, Any]) -> None:
    wanted = trained(2, **more)
    with scratch() as path:
        kind = "all" if "clip" in more else "params"  # gradients in a file are added once for each micro-step
        same(trained(2, offload=offload(kind, path), **more), wanted)
