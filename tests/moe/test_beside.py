# SPDX-License-Identifier: Apache-2.0
"""Shared experts are computed while tokens travel between hosts: in what order things happen, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import moe_models
import pytest
import torch
import torch.distributed as dist
import zeropp
from expert_parity import parity
from moe_models import batch, loss_of
from ranks import on_ranks
from torch import Tensor, nn
from zeropp.moe.hosts import Phase


def watched(forward: Any, shared: Any, events: list[str]) -> None:
    """Note when moves of tokens begin and are waited for, and when the shared experts compute, forward and backward."""
    network = forward.exchange.network
    swap, compute = network.swap, forward.beside._compute

    def swapped(out: Any, came: Any, sends: Any, receives: Any, tag: int, later: bool) -> Any:
        work, phase = swap(out, came, sends, receives, tag, later), tag & 0xFF
        names = {Phase.DISPATCH: "forward", Phase.DISPATCH_BACK: "backward"}
        if phase not in names:
            return work
        assert later
        events.append(f"{names[phase]} begins")
        return Noted(work, names[phase], events)

    def computed(x: Any) -> Any:
        y = compute(x)
        events.append("shared forward")
        y.register_hook(lambda _: events.append("shared backward"))
        return y

    network.swap, forward.beside._compute = swapped, computed


class Noted:
    def __init__(self, work: Any, name: str, events: list[str]) -> None:
        self.work, self.name, self.events = work, name, events

    def wait(self) -> None:
        self.events.append(f"{self.name} is waited for")
        self.work.wait()


@on_ranks("2 hosts")
@pytest.mark.parametrize("chunks", ["auto", 2])
def test_shared_experts_of_deepseek_v3_are_computed_on_the_way(chunks: Any) -> None:
    """One layer of DeepSeek-V3 has experts. Between the start of a move and its wait lies the work of the shared experts, both ways."""
    model = moe_models.build("DeepseekV3", "grouped_mm")
    model, _ = zeropp.prepare(model, None, zeropp.Config(experts=zeropp.Experts(parallel=2, chunks=chunks)))
    block = model.model.layers[1].mlp
    events: list[str] = []
    watched(block.experts.forward, block.shared_experts, events)
    loss_of(model, batch(0, dist.get_rank())).backward()
    first = [events.index(name) for name in ("forward begins", "shared forward", "forward is waited for")]
    assert first == sorted(first) and events.count("shared forward") == 1, events
    last = [
        len(events) - 1 - events[::-1].index(name)
        for name in ("backward begins", "shared backward", "backward is waited for")
    ]
    assert last == sorted(last) and events.count("shared backward") == 1, events
    assert block.experts.forward.beside.ahead == 1


@on_ranks("2 hosts")
@pytest.mark.parametrize("name", ["DeepseekV3", "NemotronH"])
def test_gradients_are_those_of_one_process(name: str) -> None:
    parity(name, 2, stage=3)


class Otherwise(zeropp.moe.MoE):
    """It gives its shared experts something else than its input."""

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return self._routed(x) + self.shared(x.clone())  # type: ignore[misc]


class First(zeropp.moe.MoE):
    """It asks its shared experts first, as Qwen2-MoE does."""

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return self.shared(x) + self._routed(x)  # type: ignore[misc, no-any-return]


@on_ranks("2 hosts")
def test_blocks_that_ask_otherwise() -> None:
    """Shared experts that have hooks, that are asked for first, or that get another tensor are computed when they are asked for."""
    torch.manual_seed(0)
    x = torch.randn(5, 16)
    for way, kind, ahead in (
        ("ahead", zeropp.moe.MoE, 2),
        ("hooks", zeropp.moe.MoE, 0),
        ("", Otherwise, 1),
        ("", First, 0),
    ):
        torch.manual_seed(1)
        moe = kind(16, 4, 2, intermediate=8, shared=8)
        wanted = moe(x).detach()
        config = zeropp.Config(experts=2, units=(kind.__name__,))
        model, _ = zeropp.prepare(nn.Sequential(moe), None, config)
        calls: list[int] = []
        if way == "hooks":
            moe.shared.register_forward_hook(lambda *_, calls=calls: calls.append(1))  # type: ignore[union-attr]
        for _ in range(2):
            torch.testing.assert_close(model(x).detach(), wanted, rtol=1e-5, atol=1e-6)
        assert moe.experts.forward.beside.ahead == ahead, (way, kind)  # type: ignore[union-attr]
        assert len(calls) == (2 if way == "hooks" else 0)
