# SPDX-License-Identifier: Apache-2.0
"""Construction of a GPT in bf16 on two CPU ranks inside ``zeropp.sharded_init``, with the values of plain construction:
peak memory summed over the ranks, beside what plain construction takes on the same ranks; the limit is the model itself,
which the ranks of one host hold once. The full case is the shape of a model of 7B parameters (14 GB): too large for its
peer on most machines, so that peer is a row of a smaller one.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from harness import BenchError, Run, alternate, memory_gib
from peak_memory import PeakMemory

CLAIM = "inside sharded_init a model of 7B parameters is built in the memory of its slices and at most 5 % more"
NEEDS = ()
RANKS = 2
CASES = {"0.4B": (8, 2048, 8192), "7B": (32, 4096, 32000)}
"""Layers, width, vocabulary: as Llama's, with an MLP of 8/3 of the width."""


def build(layers: int, width: int, vocabulary: int) -> Any:
    """Layers as a Llama's, in bf16, plain PyTorch."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            hidden = 256 * (-(-8 * width // 3) // 256)
            self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
            self.down = nn.Linear(hidden, width, bias=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Model()
    finally:
        torch.set_default_dtype(default)


def construct(args: dict[str, Any]) -> dict[str, Any]:
    """Worker: one rank. ``way``: sharded or plain."""
    import torch
    import torch.distributed as dist
    import zeropp

    torch.set_num_threads(1)
    dist.init_process_group("zeropp")
    torch.manual_seed(0)
    with zeropp.sharded_init():
        torch.nn.Linear(8, 8)  # what is imported late, is imported now
    dist.barrier()
    with PeakMemory() as memory:
        start = time.perf_counter_ns()
        if args["way"] == "sharded":
            with zeropp.sharded_init():
                model = build(*args["shape"])
        else:
            model = build(*args["shape"])
        dist.barrier()
        ms = (time.perf_counter_ns() - start) / 1e6
    names = ["blocks.0.q.weight", "head.weight"]
    parameters = dict(model.named_parameters())
    if args["way"] == "sharded":
        zeropp.prepare(model)
        with zeropp.gathered([parameters[name] for name in names]):
            sums = [float(parameters[name].double().sum()) for name in names]
    else:
        sums = [float(parameters[name].double().sum()) for name in names]
    whole_mib = sum(p.numel() * p.element_size() for p in parameters.values()) / 2**20
    dist.barrier()
    dist.destroy_process_group()
    return {"ms": ms, "peak_mib": memory.peak_mib - memory.base_mib, "sums": sums, "whole_mib": whole_mib}


def one(bench: Run, case: str, seen: dict[str, list[float]], way: str) -> dict[str, float]:
    """A launch: memory over the ranks, the slower rank's time, and what the model takes."""
    ranks = bench.launch("construct", ranks=RANKS, args={"way": way, "shape": CASES[case]}, timeout_s=1200.0)
    for rank in ranks:
        wanted = seen.setdefault(case, rank["sums"])
        bench.check(rank["sums"] == wanted, f"{case} {way}: sums of weights {rank['sums']} are not {wanted}")
    return {
        "MiB": sum(rank["peak_mib"] for rank in ranks),
        "ms": max(rank["ms"] for rank in ranks),
        "whole": ranks[0]["whole_mib"],
    }


def run(bench: Run) -> None:
    """Small with its peer; large, where memory allows, against the model's own size."""
    seen: dict[str, list[float]] = {}
    case = "0.4B"
    ways = {way: partial(one, bench, case, seen, way) for way in ("sharded", "plain")}
    samples = alternate(ways, rounds=1 if bench.quick else 3, warmup=0)
    report(bench, case, samples)
    if bench.quick:
        return
    wanted_gib = 2 * sum(
        2 * vocabulary * width + layers * (4 + 8) * width**2 for layers, width, vocabulary in (CASES["7B"],)
    ) / 2**30  # fmt: skip
    if wanted_gib * 1.3 > memory_gib():
        raise BenchError(f"init: the case 7B wants {wanted_gib * 1.3:.0f} GiB of memory, {memory_gib():.0f} are here")
    report(bench, "7B", {"sharded": [one(bench, "7B", seen, "sharded")]})


def report(bench: Run, case: str, samples: dict[str, list[dict[str, float]]]) -> None:
    """Memory, and time where there is a peer; without one, the peer is plain construction's own arithmetic."""
    memory = {way: [one["MiB"] for one in found] for way, found in samples.items()}
    memory["slices"] = [one["whole"] for one in samples["sharded"]]
    if "plain" not in memory:
        memory["plain, computed"] = [RANKS * one["whole"] for one in samples["sharded"]]
    peers = [way for way in memory if way.startswith("plain")]
    name = f"bf16 {case} {RANKS} ranks"
    bench.compare(f"{name} memory", memory, ours="sharded", peers=peers, unit="MiB", limit="slices")
    if "plain" in samples:
        times = {way: [one["ms"] for one in found] for way, found in samples.items()}
        bench.compare(name, times, ours="sharded", peers=["plain"], unit="ms")
