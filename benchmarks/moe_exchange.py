# SPDX-License-Identifier: Apache-2.0
"""The exchange of a mixture of experts on two ranks: dispatch to the experts' ranks, grouped by expert, and the weighted sum back.

There are no experts between the two, and no gradients. From one token a rank, which is decoding, to 4096, which is prefill. Peers:

  transformers AllToAllEP   as shipped, over gloo, around the sorting and indexing that its grouped experts do
  zeropp all-to-all         zeropp.ops.moe_* and all-to-alls of zeropp's communicator, in memory that peers read in place

The limit is what one rank moves with as many rows, tokens and experts, without a peer: zeropp.ops.moe_dispatch and moe_combine into memory
that is there. The exchange has to copy its tokens once more, to where peers can read them, 1 / (k + 1) of the limit's work.
Figures are CPU milliseconds of the slower rank ("cpu"), which do not count waiting, and wall milliseconds ("wall").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from harness import Need, Run, alternate

CLAIM = "rows of experts over 2 ranks: >= 10x transformers' AllToAllEP, >= 1.5x all-to-alls, <= 1.6x one rank's moves (k 2), 1.4x (k 8)"
NEEDS = (Need("transformers AllToAllEP", module="transformers.distributed"),)
CASES = (
    *((tokens, 2048, 64, 8) for tokens in (1, 8, 64)),
    *((tokens, 1024, experts, k) for tokens in (512, 2048, 4096) for experts, k in ((8, 2), (64, 8))),
)
QUICK = ((1, 2048, 64, 8), (512, 1024, 8, 2), (512, 1024, 64, 8), (2048, 1024, 8, 2))
OURS, PEERS, LIMIT = "ours", ("transformers AllToAllEP", "zeropp all-to-all"), "moves on one rank"


def run(bench: Run) -> None:
    for case in QUICK if bench.quick else CASES:
        results = bench.launch("measure", ranks=2, args={"case": case, "rounds": 9 if bench.quick else 25})
        name = "{} x {}, {} experts, k = {}, 2 ranks".format(*case)
        bench.check(not results[0]["wrong"], f"{name}: {results[0]['wrong']}")
        for what in ("cpu", "wall"):
            slower = {
                who: [max(both) for both in zip(*(one[what][who] for one in results), strict=True)]
                for who in results[0][what]
            }
            bench.compare(f"{name}, {what}", slower, ours=OURS, peers=PEERS, unit="ms", limit=LIMIT)


def grouped(rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """Return what transformers' grouped_mm_experts_forward does around its products: sort by expert, and back."""
    sorted_ids, order = torch.sort(expert_ids.reshape(-1))
    here = rows[order]
    counts = torch.histc(sorted_ids.float(), bins=experts, min=0, max=experts - 1)
    torch.cumsum(counts, dim=0, dtype=torch.int32)
    weighted = here * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel())
    return weighted[back]


class Identity(torch.nn.Module):
    """Experts that change nothing, as AllToAllEP calls them."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return grouped(rows, ids, weights, self.num_experts)


class Layer:
    """One rank's tokens and choices, and the contenders."""

    def __init__(self, case: tuple[int, int, int, int]) -> None:
        import torch.distributed as dist
        import zeropp
        from transformers.distributed.expert_parallel import AllToAllEP

        self.tokens, self.width, self.experts, self.k = case
        self.ranks = dist.get_world_size()
        torch.manual_seed(dist.get_rank())
        self.x = torch.randn(self.tokens, self.width)
        self.chosen = torch.rand(self.tokens, self.experts).topk(self.k, dim=1)[1]
        self.small = self.chosen.to(torch.int32)
        self.weights = torch.softmax(torch.randn(self.tokens, self.k), 1)
        self.exchange = zeropp.moe.Exchange(dist.group.WORLD)
        self.layer = self.exchange.layer("benchmark")
        mesh = dist.device_mesh.init_device_mesh("cpu", (1, self.ranks), mesh_dim_names=("tp", "ep"))
        self.stock = AllToAllEP(Identity(self.experts // self.ranks), mesh["ep"], mesh["tp"])
        comm = self.comm = zeropp.comm.Communicator()
        rows = self.tokens * self.k
        self.sent, self.back = comm.empty(rows, self.width), comm.empty(rows, self.width)
        self.got, self.made = (comm.empty(self.ranks * rows, self.width) for _ in range(2))
        self.sorted, self.y = torch.zeros(self.ranks * rows, self.width), torch.zeros(self.tokens, self.width)
        self.buffer, self.local_y = torch.zeros(rows, self.width), torch.zeros(self.tokens, self.width)

    def ours(self) -> torch.Tensor:
        from zeropp import moe

        rows, plan = moe.dispatch(self.x, self.small, self.experts, exchange=self.exchange, layer=self.layer)
        return moe.combine(rows, plan, self.weights)

    def transformers(self) -> torch.Tensor:
        result: torch.Tensor = self.stock(self.x, self.chosen, self.weights)
        return result

    def all_to_alls(self) -> torch.Tensor:
        """Counts, rows there, rows by expert, rows back."""
        from zeropp import ops

        here = self.experts // self.ranks
        plan = ops.moe_plan(self.small, self.experts)
        ops.moe_dispatch(self.x, plan, out=self.sent)
        counts = torch.empty(self.ranks, here, dtype=torch.int64)
        self.comm.all_to_all(counts.view(-1), plan.kept)
        send, receive = plan.kept.view(self.ranks, -1).sum(1).tolist(), counts.sum(1).tolist()
        ids = torch.arange(here, dtype=torch.int32).repeat(self.ranks).repeat_interleave(counts.flatten())
        by_expert = ops.moe_plan(ids[:, None], here)
        n = sum(receive)
        self.comm.all_to_all(self.got[:n], self.sent, receive, send)
        ops.moe_dispatch(self.got[:n], by_expert, out=self.sorted[:n])
        ops.moe_combine(self.sorted[:n], by_expert, out=self.made[:n])
        self.comm.all_to_all(self.back, self.made[:n], send, receive)
        return ops.moe_combine(self.back, plan, self.weights, out=self.y)

    def moves(self) -> torch.Tensor:
        from zeropp import ops

        plan = ops.moe_plan(self.small, self.experts)
        ops.moe_dispatch(self.x, plan, out=self.buffer)
        return ops.moe_combine(self.buffer, plan, self.weights, out=self.local_y)

    def wrong(self, calls: dict[str, Callable[[], torch.Tensor]]) -> str:
        """Empty, or who returns something else. All experts are the identity, so a token comes back times the sum of its weights."""
        want = self.x * self.weights.sum(1, keepdim=True)
        off = {name: float((call() - want).abs().max()) for name, call in calls.items()}
        bound = (self.k + 2) * 2.0**-24 * float(want.abs().max()) * 2
        return "; ".join(f"{name} is off by {value}" for name, value in off.items() if value > bound)


def measure(args: dict[str, Any]) -> dict[str, Any]:
    """One rank."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo")
    layer = Layer(tuple(args["case"]))
    calls = {OURS: layer.ours, PEERS[0]: layer.transformers, PEERS[1]: layer.all_to_alls, LIMIT: layer.moves}
    wrong: list[Any] = [None] * layer.ranks
    dist.all_gather_object(wrong, layer.wrong(calls))
    repeat = max(1, min(50, 4096 // (layer.tokens * layer.k)))

    def contender(call: Callable[[], torch.Tensor]) -> Callable[[], tuple[float, float]]:
        def timed() -> tuple[float, float]:
            layer.comm.barrier()
            wall, cpu = time.perf_counter_ns(), time.process_time_ns()
            for _ in range(repeat):
                call()
            cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
            return cpu / 1e6 / repeat, wall / 1e6 / repeat

        return timed

    samples = alternate({name: contender(call) for name, call in calls.items()}, rounds=int(args["rounds"]), warmup=2)
    dist.destroy_process_group()
    split = {
        what: {name: [pair[at] for pair in of] for name, of in samples.items()}
        for at, what in enumerate(("cpu", "wall"))
    }
    return {"wrong": "; ".join(filter(None, wrong)), **split}
