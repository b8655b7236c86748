# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts' gate, dispatch and combine against DeepSpeed's MOELayer and torch's index operations.

The experts between dispatch and combine are left out on all sides. All write their large results into memory that is
there, where they can (MOELayer cannot): fresh memory costs more in page faults than the copy. The gate's product with the tokens is
left out as well; MOELayer is what DeepSpeed 0.19 runs, which gathers rows where older versions multiplied by a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness import Need, Run, alternate, timed
from torch import Tensor

CLAIM = "MoE gate + dispatch + combine: >= 10x DeepSpeed's MOELayer, >= 3x torch's index operations."
NEEDS = (Need("DeepSpeed", module="deepspeed"),)
TOKENS, WIDTH = 8192, 1024


@dataclass(frozen=True)
class Room:
    """Memory that ours and the index version write to."""

    rows: Tensor
    y: Tensor
    weighted: Tensor

    @staticmethod
    def of(rows: int) -> Room:
        return Room(torch.zeros(rows, WIDTH), torch.zeros(TOKENS, WIDTH), torch.zeros(rows, WIDTH))


def ours(x: Tensor, logits: Tensor, k: int, capacity: int | None, room: Room) -> Tensor:
    """Our gate, plan, dispatch and combine."""
    import zeropp

    gate = zeropp.ops.moe_gate(logits, k, normalise=k > 1)
    plan = zeropp.ops.moe_plan(gate, logits.shape[1], capacity=capacity)
    rows = zeropp.ops.moe_dispatch(x, plan, out=room.rows)
    return zeropp.ops.moe_combine(rows, plan, gate.weights, out=room.y)


def indexed(x: Tensor, logits: Tensor, k: int, room: Room) -> Tensor:
    """Compute the same, dropless, with topk, argsort, index_select and index_add, into existing memory."""
    scores = torch.softmax(logits, dim=1)
    weights, chosen = torch.topk(scores, k, dim=1)
    if k > 1:
        weights = weights / weights.sum(1, keepdim=True)
    share = torch.bincount(chosen.flatten(), minlength=logits.shape[1]) / (logits.shape[0] * k)
    logits.shape[1] * (share * scores.mean(0)).sum()  # balance loss
    torch.logsumexp(logits, 1).square().mean()  # z loss
    order = torch.argsort(chosen.flatten(), stable=True)
    tokens = order // k
    torch.index_select(x, 0, tokens, out=room.rows)
    torch.mul(room.rows, weights.flatten()[order, None], out=room.weighted)
    return room.y.zero_().index_add_(0, tokens, room.weighted)


def moe_layer(logits: Tensor, k: int, factor: float) -> Callable[[Tensor], Tensor]:
    """Return DeepSpeed's MOELayer, as shipped, on one rank, with given logits and with experts that change nothing."""
    from deepspeed.moe import sharded_moe

    class Gate(torch.nn.Module):
        """TopKGate behind its product."""

        def forward(self, x: Tensor, used: Any, sparse: bool, tutel: bool) -> Any:
            if k == 1:
                return sharded_moe.top1gating(logits, factor, 4, use_rts=False, sparse_routes=True)
            if k == 2:
                return sharded_moe.top2gating(
                    logits.clone(), factor, 4, top2_2nd_expert_sampling=False, sparse_routes=True
                )
            return sharded_moe.topkgating(logits, k, factor, 4, sparse_routes=True)

    experts = logits.shape[1]
    layer = sharded_moe.MOELayer(Gate(), torch.nn.Identity(), None, 1, experts)

    def call(x: Tensor) -> Tensor:
        result: Tensor = layer(x, None)
        return result

    return call


def close(bench: Run, case: str, mine: Tensor, theirs: Tensor) -> None:
    """k + 2 roundings of values below 8, and weights that differ by a few ulp.

    Of an expert's tokens beyond its capacity DeepSpeed drops those that torch.topk names among equals, ours the last ones:
    as many, but not the same.
    """
    kept = [(y != 0).any(1) for y in (mine, theirs)]
    bench.check(int(kept[0].sum()) == int(kept[1].sum()), f"{case}: {kept[0].sum()} and {kept[1].sum()} tokens kept")
    both = kept[0] & kept[1]
    off = (mine[both] - theirs[both]).abs().max().item()
    bench.check(off <= 64 * 8 * 2.0**-24, f"{case}: differs from the peer by {off}")


def run(bench: Run) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    for experts in (8,) if bench.quick else (8, 16, 64):
        logits = torch.randn(TOKENS, experts)
        for k in (1, 2):
            against_indices(bench, x, logits, k)
    for experts, k in [(8, 1), (64, 2)] if bench.quick else [*((e, k) for e in (8, 16, 64) for k in (1, 2)), (64, 8)]:
        against_moe_layer(bench, x, torch.randn(TOKENS, experts), k)


def against_indices(bench: Run, x: Tensor, logits: Tensor, k: int) -> None:
    """Dropless: every assignment is moved."""
    case = f"{TOKENS} x {WIDTH}, {logits.shape[1]} experts, k = {k}, dropless"
    room, theirs = Room.of(TOKENS * k), Room.of(TOKENS * k)
    close(bench, case, ours(x, logits, k, None, room), indexed(x, logits, k, theirs))
    moved = torch.zeros(TOKENS * (k + 1), WIDTH)
    contenders: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours(x, logits, k, None, room),
        "torch index": lambda: indexed(x, logits, k, theirs),
        # Dispatch reads T and writes k T rows, combine the other way round: 2 (k + 1) T rows, a copy of (k + 1) T.
        "copy": lambda: moved.copy_(moved_from),
    }
    moved_from = torch.ones_like(moved)
    samples = alternate({name: timed(call) for name, call in contenders.items()}, rounds=5 if bench.quick else 15)
    bench.compare(case, samples, ours="ours", peers=["torch index"], unit="ms", limit="copy")


def against_moe_layer(bench: Run, x: Tensor, logits: Tensor, k: int) -> None:
    """Measure against MOELayer, with a capacity of 1.25 times the mean."""
    import zeropp

    factor, experts = 1.25, logits.shape[1]
    capacity = zeropp.ops.moe_capacity(TOKENS, experts, k, factor)
    case = f"{TOKENS} x {WIDTH}, {experts} experts, k = {k}, capacity {factor}"
    room, theirs = Room.of(experts * capacity), moe_layer(logits, k, factor)
    # Dispatch reads T and writes E C rows, combine reads k T and writes T.
    moved = torch.zeros(((2 + k) * TOKENS + experts * capacity) // 2, WIDTH)
    moved_from = torch.ones_like(moved)
    with torch.no_grad():
        if k <= 2:  # of more choices DeepSpeed keeps those with the greatest score, ours the first choices
            close(bench, case, ours(x, logits, k, capacity, room), theirs(x))
        samples = alternate(
            {
                "ours": timed(lambda: ours(x, logits, k, capacity, room)),
                "DeepSpeed MOELayer": timed(lambda: theirs(x)),
                "copy": timed(lambda: moved.copy_(moved_from)),
            },
            rounds=5 if bench.quick else 15,
        )
    bench.compare(case, samples, ours="ours", peers=["DeepSpeed MOELayer"], unit="ms", limit="copy")
