# SPDX-License-Identifier: Apache-2.0
"""A layer of gated experts on two hosts with a slow network between them, forward and backward, and the bytes that cross it.

The hosts are network namespaces of this machine, joined by a cable whose ends a token bucket shapes (``tc tbf``). Tokens go in pieces,
so that one travels while the experts compute another. The peer is transformers' AllToAllEP around its own experts, over gloo and the
same cable, which sends a row for each pair of a token and an expert. The limit is the longer of two times: that of the products alone,
and that of our bytes at the rate of the cable. The row "bytes" compares what a rank of ours sends, counted by the transport, with a row
for each pair. Both ranks share the cores of this machine with the kernel that carries the bytes, so on few cores the time of the
products is the figure that moves.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Need, Run, alternate
from moe_layer import Layer
from tcp import STORE_PORT, enter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "comm"))
import netns

CLAIM = "a layer of experts on 2 hosts: <= 1.15 of the longer of products and bytes / bandwidth; 4x fewer bytes than a row a pair"
NEEDS = (
    Need("transformers AllToAllEP", module="transformers.distributed"),
    Need("namespaces", program="ip", install="apt-get install iproute2"),
    Need("a shaped link", program="tc", install="apt-get install iproute2"),
)
RATE_MBIT = 300
CASES = ((512, 1024, 128, 128, 8), (512, 1024, 1024, 8, 2))
"""Tokens a rank, width, inner width of an expert, experts of both hosts, k."""
OURS, PEER, PRODUCTS, LIMIT = "ours", "transformers AllToAllEP", "products", "products or bytes"


def shape(hosts: netns.TwoHosts, side: int) -> None:
    """Let a host send at RATE_MBIT."""
    words = f"tc qdisc add dev {hosts.links[side]} root tbf rate {RATE_MBIT}mbit burst 64kb latency 100ms".split()
    subprocess.run([*hosts.command(side), *words], check=True, timeout=20)


def run(bench: Run) -> None:
    reason = netns.why_not()
    bench.check(reason is None, str(reason))
    with netns.TwoHosts() as hosts:
        for side in range(2):
            shape(hosts, side)
        where = {"names": hosts.names, "links": hosts.links, "addresses": hosts.addresses}
        for case in CASES[:1] if bench.quick else CASES:
            args = {"case": case, "rounds": 3 if bench.quick else 9, **where}
            results = bench.launch("measure", ranks=2, args=args, timeout_s=400.0)
            report(bench, "{} x {}, {} inner, {} experts, k = {}, 2 hosts".format(*case), results)


def report(bench: Run, name: str, results: list[Any]) -> None:
    bench.check(not results[0]["wrong"], f"{name}: {results[0]['wrong']}")
    slower = {
        who: [max(both) for both in zip(*(one["wall"][who] for one in results), strict=True)]
        for who in results[0]["wall"]
    }
    sent = [one["bytes"] for one in results]
    on_the_cable = max(ours for ours, _ in sent) * 8 / RATE_MBIT / 1e3
    slower[LIMIT] = [max(products, on_the_cable) for products in slower.pop(PRODUCTS)]
    bench.compare(f"{name}, wall", slower, ours=OURS, peers=[PEER], unit="ms", limit=LIMIT)
    counted = {OURS: [ours / 1e6 for ours, _ in sent], "a row a pair": [pairs / 1e6 for _, pairs in sent]}
    bench.compare(f"{name}, bytes", counted, ours=OURS, peers=["a row a pair"], unit="MB")


class Hosts(Layer):
    """One rank, which is a host."""

    def as_autoep(self) -> Any:
        return None

    def ours(self) -> list[torch.Tensor]:
        from zeropp.moe.exchange import through
        from zeropp.moe.products import swiglu_experts

        def compute(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            both = self.module.gate_up_proj, self.module.down_proj
            return swiglu_experts(rows, ends, *both, exchange=self.exchange)

        y = through(self.exchange, self.layer, compute, self.x, self.chosen, self.weights, self.experts)
        return self.backward(y)

    def sent(self) -> tuple[int, int]:
        """Return the bytes that this rank sends in one call, and those of a row for each pair of a token and an expert elsewhere."""
        import torch.distributed as dist

        def network() -> int:
            return int(sum(row["network_bytes"] for row in self.exchange.comm.traffic().values()))

        before = network()
        self.ours()
        ours = network() - before
        mine = int((self.chosen // self.here != dist.get_rank()).sum())
        pairs: list[Any] = [None] * self.ranks
        dist.all_gather_object(pairs, mine)
        # A pair's token leaves its rank, and so does the gradient of its result; the result and the gradient of the token come back.
        return ours, 2 * sum(pairs) * self.width * 4


def measure(args: dict[str, Any]) -> dict[str, Any]:
    """One rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    enter(args["names"][rank])
    os.environ["GLOO_SOCKET_IFNAME"] = args["links"][rank]
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore(args["addresses"][0], STORE_PORT, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    layer = Hosts(tuple(args["case"]))
    ours, theirs = layer.ours(), layer.transformers()
    off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)]
    wrong: list[Any] = [None] * ranks
    dist.all_gather_object(wrong, "" if max(off) < 1e-4 else f"rank {rank} differs by {max(off)}")
    sent = layer.sent()

    def contender(call: Callable[[], Any]) -> Callable[[], float]:
        def timed() -> float:
            dist.barrier()
            start = time.perf_counter_ns()
            call()
            return (time.perf_counter_ns() - start) / 1e6

        return timed

    calls = {OURS: layer.ours, PEER: layer.transformers, PRODUCTS: layer.products}
    samples = alternate({name: contender(call) for name, call in calls.items()}, rounds=int(args["rounds"]))
    dist.barrier()
    dist.destroy_process_group()
    return {"wrong": "; ".join(filter(None, wrong)), "wall": samples, "bytes": sent}
