# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of ZeRO-3 itself: forward and backward of many small units, beyond the same model without any of it.

Each Linear is a unit of its own in both libraries. On 100 x Linear(16, 16) the arithmetic is nothing and what is left
is hooks, gathers and reductions; on 12 x Linear(1024, 1024) bytes dominate. One process a rank holds all contenders:
they take turns, a barrier before each turn, and each turn is one step untimed and some timed. Clearing gradients is not
timed for any contender. Overhead = contender - plain, in one round; the ratio is that of the medians over rounds.

Before anything is timed, gradients are compared with the plain model's (mean over ranks), and the bytes that one step
gathers and reduces are counted: nothing is skipped; with two ranks each unit is gathered twice and reduced once.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from harness import Need, Row, Run, alone, alternate, quartiles

CLAIM = "ZeRO-3's cost per unit and step is below 1/30 of FSDP2's (tiny units), 1/10 (large ones)"
NEEDS = (Need("FSDP2", module="torch.distributed.fsdp"),)

#: name -> (layers, width, rows of the input)
CASES = {"tiny": (100, 16, 4), "big": (12, 1024, 32)}
TITLES = {"tiny": "100 x Linear(16,16)", "big": "12 x Linear(1024,1024)"}
OURS = {"gathered": "off", "host copy": "auto"}


def build(case: str) -> Any:
    """The plain model; the same on every rank."""
    import torch
    from torch import nn

    layers, width, _ = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    if width < 64:  # else activations, and with them all gradients, fade to nothing over 100 layers
        with torch.no_grad():
            for layer in model:
                layer.weight.mul_(1.7)
    return model


def check_gradients(plain: Any, model: Any, x: Any, ranks: int) -> str:
    """One step of both; empty where all gradients agree bit for bit, else what differs."""
    import torch
    import torch.distributed as dist
    import zeropp

    reference = copy.deepcopy(plain)
    reference(x).sum().backward()
    model(x).sum().backward()
    with zeropp.gathered(model, grads=True):
        for (name, expected), (_, mine) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
            mean = expected.grad.clone()
            if ranks > 1:
                dist.all_reduce(mean)
                mean /= ranks
            if mine.grad is None or not torch.equal(mine.grad, mean):
                return f"gradient of {name} differs from the plain model's"
            if not torch.count_nonzero(mean):
                return f"gradient of {name} is all zero, so nothing was compared"
    model.zero_grad()
    return ""


def moved_bytes(step: Callable[[], None]) -> dict[str, int]:
    """Bytes that this rank reads from peers in one step, by collective."""
    import zeropp

    zeropp.traffic(reset=True)
    step()
    totals: dict[str, int] = {}
    for kinds in zeropp.traffic(reset=True).values():
        for kind, counts in kinds.items():
            totals[kind] = totals.get(kind, 0) + counts["bytes"]
    return totals


def measure(args: dict[str, Any]) -> dict[str, Any]:
    """Worker: all cases on this rank, one after the other."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = {case: measure_case(case, args["rounds"], args["steps"]) for case in CASES}
    dist.barrier()
    dist.destroy_process_group()
    return results


def sharded_by_fsdp2(plain: Any) -> Any:
    """The peer: a copy with each layer as a unit."""
    from torch.distributed.fsdp import fully_shard

    fsdp = copy.deepcopy(plain)
    for layer in fsdp:
        fully_shard(layer)
    return fully_shard(fsdp)


def measure_case(case: str, rounds: int, steps: int) -> dict[str, Any]:
    """Measure all contenders of one case. Samples are milliseconds a step, one a round."""
    import torch
    import torch.distributed as dist
    import zeropp
    from torch import nn

    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain = build(case)
    layers, width, rows = CASES[case]
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) + rank

    models = {"plain": plain}
    if not alone():
        models["FSDP2"] = sharded_by_fsdp2(plain)
    for name, host_copy in OURS.items():
        config = zeropp.Config(stage=3, units=(nn.Linear,), host_copy=host_copy)
        models[name], _ = zeropp.prepare(copy.deepcopy(plain), None, config)

    def step(model: nn.Module) -> None:
        model(x).sum().backward()

    wrong = {name: check_gradients(plain, models[name], x, ranks) for name in OURS}
    moved = {}
    for name in OURS:
        moved[name] = moved_bytes(partial(step, models[name]))
        models[name].zero_grad()

    def contender(model: nn.Module) -> Callable[[], float]:
        def turn() -> float:
            dist.barrier()
            times = []
            for index in range(steps + 1):
                start = time.perf_counter_ns()
                step(model)
                end = time.perf_counter_ns()
                if index:
                    times.append((end - start) / 1e6)
                model.zero_grad()
            return statistics.median(times)

        return turn

    samples = alternate({name: contender(model) for name, model in models.items()}, rounds=rounds)
    return {
        "samples": samples, "wrong": wrong, "moved": moved,
        "unit_bytes": (width * width + width) * 4, "layers": layers,
    }  # fmt: skip


def check_moved(bench: Run, title: str, results: list[dict[str, Any]], ranks: int) -> None:
    """Each unit gathered in forward and backward, reduced once; padding adds less than a tenth and 128 bytes."""
    for rank, result in enumerate(results):
        slices = result["layers"] * result["unit_bytes"] * (ranks - 1) / ranks
        room = slices / 10 + 128 * result["layers"]
        for name, gathers in (("gathered", 2), ("host copy", 0)):
            for kind, wanted in (("all_gather", gathers * slices), ("reduce_scatter", slices)):
                moved = result["moved"][name].get(kind, 0)
                most = wanted + max(gathers, 1) * room if wanted else 0
                bench.check(
                    wanted <= moved <= most,
                    f"{title}: rank {rank}, {name}: a step moved {moved} bytes of {kind}, not {wanted:.0f}..{most:.0f}",
                )


def report(bench: Run, title: str, results: list[dict[str, Any]], name: str) -> None:
    """One row: our overhead per unit against FSDP2's, rank 0's clock."""
    layers, samples = results[0]["layers"], results[0]["samples"]

    def overhead(contender: str) -> list[float]:
        return [(v - p) / layers * 1e3 for v, p in zip(samples[contender], samples["plain"], strict=True)]

    if alone():  # an overhead near 0 is mostly noise, so the whole step of a unit has a row, too
        bench.own(title, overhead(name), "us")
        bench.own(f"{title} whole step", [v / layers * 1e3 for v in samples[name]], "us")
        return
    ours, peer = overhead(name), overhead("FSDP2")
    low, middle, high = quartiles(ours)
    peer_low, peer_middle, peer_high = quartiles(peer)
    # Where ours is lost in the noise of plain, half its spread stands for it: the ratio is then a lower bound.
    floor = (high - low) / 2
    best = {n: (min(samples[n]) - min(samples["plain"])) / layers * 1e3 for n in (name, "FSDP2")}
    bench.report(
        Row(
            bench=bench.name, case=title, ours=middle, peer=peer_middle, peer_name="FSDP2", unit="us", rounds=len(ours),
            ratio=peer_middle / max(middle, floor),
            ratio_low=peer_low / max(high, floor), ratio_high=peer_high / max(low, floor),
            extra={
                "ours_low": low, "ours_high": high, "ours_min": best[name], "peer_min": best["FSDP2"],
                "plain_us_per_unit": statistics.median(samples["plain"]) / layers * 1e3,
                "gathered_bytes": results[0]["moved"][name].get("all_gather", 0),
                "reduced_bytes": results[0]["moved"][name].get("reduce_scatter", 0),
            },
        )
    )  # fmt: skip


def run(bench: Run) -> None:
    launched = {}
    for ranks in (1, 2):
        launched[ranks] = bench.launch("measure", ranks=ranks, args={"rounds": 5 if bench.quick else 25, "steps": 3})
    for case, title in TITLES.items():
        for ranks, every in launched.items():
            results = [one[case] for one in every]
            full = f"{title} {ranks} rank{'s' if ranks > 1 else ''}"
            for rank, result in enumerate(results):
                for name, wrong in result["wrong"].items():
                    bench.check(not wrong, f"{full}: rank {rank}, {name}: {wrong}")
            if ranks > 1:
                check_moved(bench, full, results, ranks)
            for name in OURS:
                if ranks > 1 or name == "gathered":
                    report(bench, full if name == "gathered" else f"{full} host copy", results, name)
