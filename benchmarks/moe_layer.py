# SPDX-License-Identifier: Apache-2.0
"""A layer of gated experts on two ranks, forward and backward: exchange, products, activation, and all gradients.

The peers, over gloo: transformers' AllToAllEP around its own experts with grouped_mm, and what AutoEP of DeepSpeed does behind its
router, with its functions and its GroupedExperts. The limit is the products alone, six for each expert,
of the mean number of rows, in memory that is there. Choices are random, so that some experts have more rows than others. Figures are
milliseconds of the slower rank ("cpu": without waiting).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from harness import Need, Run, alternate

CLAIM = "a layer of experts over 2 ranks: >= 0.9 of its products alone, >= 1.6x (64 small experts) and 1.2x (8) transformers' AllToAllEP"
NEEDS = (Need("transformers AllToAllEP", module="transformers.distributed"), Need("AutoEP", module="deepspeed"))
CASES = ((1024, 512, 256, 64, 8), (1024, 512, 1024, 8, 2))
"""Tokens a rank, width, inner width of an expert, experts of both ranks, k."""
OURS, PEERS, LIMIT = "ours", ("transformers AllToAllEP", "AutoEP"), "products"


def run(bench: Run) -> None:
    for case in CASES:
        results = bench.launch("measure", ranks=2, args={"case": case, "rounds": 5 if bench.quick else 15})
        name = "{} x {}, {} inner, {} experts, k = {}, 2 ranks".format(*case)
        bench.check(not results[0]["wrong"], f"{name}: {results[0]['wrong']}")
        for what in ("cpu", "wall"):
            slower = {
                who: [max(both) for both in zip(*(one[what][who] for one in results), strict=True)]
                for who in results[0][what]
            }
            bench.compare(f"{name}, {what}", slower, ours=OURS, peers=PEERS, unit="ms", limit=LIMIT)


class Layer:
    """One rank's tokens, choices and experts, and the contenders."""

    def __init__(self, case: tuple[int, int, int, int, int]) -> None:
        import torch.distributed as dist
        import zeropp
        from transformers import MixtralConfig
        from transformers.distributed.expert_parallel import AllToAllEP
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        tokens, self.width, self.inner, self.experts, k = case
        self.ranks = dist.get_world_size()
        self.here = self.experts // self.ranks
        torch.manual_seed(dist.get_rank())
        config = MixtralConfig(hidden_size=self.width, intermediate_size=self.inner, num_local_experts=self.here)
        config._experts_implementation = "grouped_mm"
        self.module = MixtralExperts(config)
        for parameter in self.module.parameters():
            torch.nn.init.normal_(parameter, std=self.width**-0.5)
        self.x = torch.randn(tokens, self.width, requires_grad=True)
        self.chosen = torch.rand(tokens, self.experts).topk(k, dim=1)[1]
        self.weights = torch.softmax(torch.randn(tokens, k), 1).requires_grad_()
        self.grad = torch.randn(tokens, self.width)
        self.leaves = [self.x, self.weights, *self.module.parameters()]
        self.exchange = zeropp.moe.Exchange(dist.group.WORLD)
        self.layer = self.exchange.layer("benchmark")
        mesh = dist.device_mesh.init_device_mesh("cpu", (1, self.ranks), mesh_dim_names=("tp", "ep"))
        self.stock = AllToAllEP(self.module, mesh["ep"], mesh["tp"])
        self.autoep_experts = self.as_autoep()
        rows = tokens * k // self.here  # of an expert, in the mean: as many come from the peer as go there
        self.of = [torch.randn(rows, size) for size in (self.width, 2 * self.inner, self.inner, self.width)]
        self.made = [torch.empty(rows, size) for size in (2 * self.inner, self.width, self.inner)]
        self.to = [torch.empty_like(parameter[0]) for parameter in self.module.parameters()]

    def backward(self, y: torch.Tensor) -> list[torch.Tensor]:
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.grad)]

    def as_autoep(self) -> Any:
        """Return the same experts as AutoEP keeps them: gate, down and up apart."""
        from deepspeed.moe.ep_experts import GroupedExperts

        experts = GroupedExperts(dim=self.width, hidden_dim=self.inner, num_experts=self.here, use_grouped_mm=True)
        gate, up = self.module.gate_up_proj.detach().chunk(2, 1)
        for to, values in ((experts.w1, gate), (experts.w2, self.module.down_proj.detach()), (experts.w3, up)):
            to.data.copy_(values)
        return experts

    def autoep(self) -> list[torch.Tensor]:
        """AutoEPMoELayer.forward behind its router, and the backward."""
        import torch.distributed as dist
        from deepspeed.module_inject import auto_ep_layer

        experts, k = self.autoep_experts, self.chosen.shape[1]
        order = torch.argsort(self.chosen.view(-1), stable=True)
        plan = auto_ep_layer.compute_split_plan(
            selected_experts=self.chosen, num_experts=self.experts, ep_size=self.ranks, num_local_experts=self.here,
            ep_group=dist.group.WORLD, num_tokens_per_expert=torch.bincount(self.chosen.view(-1), minlength=self.experts),
        )  # fmt: skip
        to_all = auto_ep_layer._AllToAllV.apply
        rows = to_all(dist.group.WORLD, self.x[order // k], plan.input_splits, plan.output_splits)
        rows, places, counts, count = auto_ep_layer.permute_by_local_expert(rows, plan.local_counts_by_source)
        made = auto_ep_layer.unpermute_by_local_expert(experts(rows, counts), places, count)
        made = to_all(dist.group.WORLD, made, plan.output_splits, plan.input_splits)
        y = auto_ep_layer.combine_from_routed(
            made, top_scores=self.weights, token_indices_sorted=order, top_k=k, score_apply="post",
            combine_impl="weighted_sum", shape=(1, *self.x.shape),
        )[0]  # fmt: skip
        leaves = [self.x, self.weights, experts.w1, experts.w3, experts.w2]
        by_x, by_weights, by_gate, by_up, by_down = torch.autograd.grad(y, leaves, self.grad)
        return [y.detach(), by_x, by_weights, torch.cat((by_gate, by_up), 1), by_down]

    def ours(self) -> list[torch.Tensor]:
        from zeropp import moe
        from zeropp.moe.products import swiglu_experts

        module = self.module
        rows, plan = moe.dispatch(self.x, self.chosen, self.experts, exchange=self.exchange, layer=self.layer)
        made = swiglu_experts(rows, plan.ends, module.gate_up_proj, module.down_proj, exchange=self.exchange)
        return self.backward(moe.combine(made, plan, self.weights))

    def transformers(self) -> list[torch.Tensor]:
        return self.backward(self.stock(self.x, self.chosen, self.weights))

    def products(self) -> None:
        """Products of the same shapes, each into memory that none of them reads, so that no value grows."""
        rows, between, active, outputs = self.of
        with torch.no_grad():
            for gate_up, down in zip(self.module.gate_up_proj, self.module.down_proj, strict=True):
                torch.mm(rows, gate_up.t(), out=self.made[0])
                torch.mm(active, down.t(), out=self.made[1])
                torch.mm(outputs, down, out=self.made[2])
                torch.mm(outputs.t(), active, out=self.to[1])
                torch.mm(between.t(), rows, out=self.to[0])
                torch.mm(between, gate_up, out=self.made[1])

    def wrong(self) -> str:
        """Empty, or how far the others are from ours: each result is a sum of at most some thousand products in fp32."""
        mine = self.ours()
        for name, theirs in ((PEERS[0], self.transformers()), (PEERS[1], self.autoep())):
            pairs = zip(mine, theirs, strict=True)
            off = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
            if off > 2e-5:
                return f"ours and {name} differ by {off}"
        return ""


def measure(args: dict[str, Any]) -> dict[str, Any]:
    """One rank."""
    import torch.distributed as dist
    import zeropp

    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    layer, comm = Layer(tuple(args["case"])), zeropp.comm.Communicator()
    wrong: list[Any] = [None] * layer.ranks
    dist.all_gather_object(wrong, layer.wrong())

    def contender(call: Callable[[], Any]) -> Callable[[], tuple[float, float]]:
        def timed() -> tuple[float, float]:
            comm.barrier()
            wall, cpu = time.perf_counter_ns(), time.process_time_ns()
            call()
            cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
            return cpu / 1e6, wall / 1e6

        return timed

    calls = {OURS: layer.ours, PEERS[0]: layer.transformers, PEERS[1]: layer.autoep, LIMIT: layer.products}
    samples = alternate({name: contender(call) for name, call in calls.items()}, rounds=int(args["rounds"]))
    dist.destroy_process_group()
    split = {
        what: {name: [pair[at] for pair in of] for name, of in samples.items()}
        for at, what in enumerate(("cpu", "wall"))
    }
    return {"wrong": "; ".join(filter(None, wrong)), **split}
