# SPDX-License-Identifier: Apache-2.0
"""What ``tests/unit/moe`` of DeepSpeed asks, of our layers: routes with its logits, training with residual branches and experts on
different ranks, gradients in every layout. docs/conformance.md has a row for each of its cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import of_all_ranks, on_ranks
from torch import Tensor, nn
from zeropp.deepspeed import moe
from zeropp.moe import Gate
from zeropp.moe.gate import Router

FOUR = [[0.11, 0.2, 0.1, 0.3], [0.3, 0.4, 0.11, 0.1], [0.11, 0.1, 0.6, 0.5], [0.1, 0.11, 0.7, 0.8]]
SIX = [
    [0.5858, 0.4801, 0.6269, 0.5397, 0.9722, 0.7034], [0.5445, 0.6332, 0.4519, 0.6308, 0.0519, 0.6450],
    [0.4874, 0.8110, 0.7467, 0.8474, 0.0277, 0.3068], [0.8570, 0.6714, 0.5310, 0.3274, 0.4836, 0.9892],
]  # fmt: skip
FALLING = [[0.95, 0.85, 0.90, 0.80], [0.70, 0.65, 0.75, 0.60], [0.50, 0.55, 0.45, 0.40], [0.35, 0.30, 0.25, 0.20]]
BY_SCORE = {"capacity": 1.0, "least": 1, "drop": "score"}


def places(logits: Any, k: int, **rule: Any) -> set[tuple[int, int, int]]:
    """Return (token, expert, place among the expert's tokens) of what the gate keeps."""
    rows = torch.tensor(logits)
    gate = Router(rows.shape[1], rows.shape[1], k, Gate(**rule))
    with torch.no_grad():
        gate.weight.copy_(torch.eye(rows.shape[1]))
    chosen = gate(rows).chosen
    plan = zeropp.ops.moe_plan(
        chosen.clamp_min(-1) % (rows.shape[1] + 1), rows.shape[1] + 1
    )  # the last expert has what is dropped
    first = (plan.kept.cumsum(0) - plan.kept).tolist()
    found = set()
    for token, row in enumerate(plan.slots.view(-1, k).tolist()):
        for expert, slot in zip(chosen[token].tolist(), row, strict=True):
            if expert >= 0:
                found.add((token, expert, slot - first[expert]))
    return found


@pytest.mark.parametrize("scale", [1, 2])
def test_routes_of_the_topk_gate(scale: int) -> None:
    """TestTopkGate.test: an expert keeps its greatest scores, in order of tokens; without a capacity it keeps all."""
    scaled = [[[scale * x for x in row] for row in rows] for rows in (FOUR, SIX, FALLING)]
    assert places(scaled[0], 2, **BY_SCORE) == {
        (0, 1, 0), (1, 0, 0), (1, 1, 1), (2, 2, 0), (2, 3, 0), (3, 2, 1), (3, 3, 1)
    }  # fmt: skip
    assert places(scaled[1], 3, **BY_SCORE) == {
        (0, 2, 0), (0, 4, 0), (1, 1, 0), (1, 3, 0), (1, 5, 0), (2, 1, 1), (2, 2, 1), (2, 3, 1), (3, 0, 0), (3, 5, 1)
    }  # fmt: skip
    assert places(scaled[2], 2) == {
        (0, 0, 0), (0, 2, 0), (1, 0, 1), (1, 2, 1), (2, 0, 2), (2, 1, 0), (3, 0, 3), (3, 1, 1)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("k", "rule"),
    [
        (2, {"capacity": 2.0, "least": 1, "drop": "score"}), (1, {"capacity": 4.0, "least": 1}),
        (1, {"capacity": 1.0, "least": 8}),
    ],
)  # fmt: skip
def test_a_capacity_beyond_the_tokens_keeps_all(k: int, rule: dict[str, Any]) -> None:
    """test_topkgating_probs_capacity_exceeds_num_tokens and its neighbours."""
    torch.manual_seed(0)
    assert len(places(torch.randn(8, 2).tolist(), k, **rule)) == 8 * k


# -- training --------------------------------------------------------------------------------------------------------------

H, SAMPLES = 16, 4


class Net(nn.Module):
    """Two layers of experts between others; a pyramid has more experts in the second."""

    def __init__(self, residual: bool, pyramid: bool) -> None:
        super().__init__()
        torch.manual_seed(11)
        made = [
            moe.MoE(H, nn.Sequential(nn.Linear(H, H), nn.Linear(H, H)), count, k=1, use_residual=residual, use_rts=False, min_capacity=2)
            for count in ((2, 4) if pyramid else (2, 2))
        ]  # fmt: skip
        self.first, self.moe_1, self.moe_2, self.head = nn.Linear(H, H), made[0], made[1], nn.Linear(H, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in (self.moe_1, self.moe_2):
            out, loss, _ = layer(x)
            x = x + out + 0 * loss.to(out.dtype)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), y.flatten())


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, SAMPLES, H, generator=draw), torch.randint(5, (2, SAMPLES), generator=draw)


def engine_with(ep: Any, stage: int, residual: bool, pyramid: bool, **more: Any) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, **more,
    }  # fmt: skip
    if ep:
        config["expert_parallel"] = {"enabled": True, "autoep_size": ep}
    return zeropp.initialize(model=Net(residual, pyramid), config=config)[0]


def grads_of(engine: Any) -> dict[str, Tensor]:
    x, y = batch(0, dist.get_rank())
    engine.backward(engine(x, y))
    found = {name: zeropp.get_full(parameter, "grad") for name, parameter in engine.module.named_parameters()}
    return {name: one.clone() for name, one in found.items() if one is not None}


# Sums of two ranks' gradients in another order: a few roundings of fp32, of the largest element.
BOUND = 1e-5


@pytest.mark.parametrize(
    ("stage", "residual", "pyramid"),
    [(2, True, True), (3, False, False), *(pytest.param(s, r, p, marks=pytest.mark.slow) for s in (0, 1) for r, p in ((True, False), (False, True)))],
)  # fmt: skip
@on_ranks(2)
def test_gradients_of_experts_do_not_depend_on_their_ranks(stage: int, residual: bool, pyramid: bool) -> None:
    """TestExpertWeightGradWithZero and TestAutoEPGradParity, at stage 3 too, which DeepSpeed refuses for this layer."""
    wanted = grads_of(engine_with(None, 0, residual, pyramid))
    got = grads_of(engine_with(2, stage, residual, pyramid))
    assert got.keys() == wanted.keys() and any(".experts." in name for name in wanted)
    for name, theirs in wanted.items():
        assert (got[name] - theirs).abs().max().item() <= BOUND * max(theirs.abs().max().item(), 1e-3), name


@pytest.mark.parametrize(
    ("stage", "ep", "residual", "pyramid"),
    [
        (2, 2, True, True),
        *(pytest.param(s, e, r, p, marks=pytest.mark.slow) for s in (0, 1, 3) for e in (None, 2) for r, p in ((True, False), (False, True))),
    ],
)  # fmt: skip
@on_ranks(2)
def test_training_in_fp16(stage: int, ep: int | None, residual: bool, pyramid: bool) -> None:
    """TestSimpleMoE, TestMoE, TestPRMoE: they train in fp16; here no step may be skipped once the scale has settled, and the loss falls."""
    engine = engine_with(ep, stage, residual, pyramid, fp16={"enabled": True, "initial_scale_power": 8})
    losses = []
    for step in range(12):
        x, y = batch(step % 2, dist.get_rank())
        loss = engine(x.half(), y)
        engine.backward(loss)
        engine.step()
        losses.append(sum(of_all_ranks(loss.item())) / 2)
    assert sum(losses[-2:]) < sum(losses[:2]), losses
