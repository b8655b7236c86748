# SPDX-License-Identifier: Apache-2.0
"""Experts on the (simulated) GPUs of several hosts, where NCCL moves the shards of each group of ranks with the same experts.

``aabb``: the ranks that exchange tokens share a host, and those with the same experts do not. ``abab``: the other way round.
"""

from __future__ import annotations

import gc
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks, start_on
from ranks import on_ranks, simulated

SLOW = pytest.mark.slow


def prepared(config: Any) -> tuple[Any, Any]:
    import zeropp

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(zeropp.moe.MoE(16, 4, 2, intermediate=8, shared=8) for _ in range(2)))
    return zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)


def steps(model: Any, optimizer: Any, first: int, rank: int) -> list[float]:
    """Return the loss and the norm of two steps."""
    found = []
    for step in range(first, first + 2):
        draw = torch.Generator().manual_seed(100 * step + rank)
        loss = model(torch.randn(12 + rank, 16, generator=draw, device="cpu").to("sim")).square().mean()
        loss.backward()
        found += [loss.item(), float(optimizer.clip_grad_norm_(0.05))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def bits_of(model: Any) -> int:
    import zeropp

    whole = [value.cpu().view(torch.uint8).numpy().tobytes() for value in zeropp.full_state_dict(model).values()]
    return zlib.crc32(b"".join(whole))


def trained(rank: int, ranks: int, hosts: str, gather: str, configs: list[dict[str, Any]], folder: str) -> Any:
    """Return what training gives with each configuration, and what a model gives that goes on from the last one's checkpoint."""
    start_on(hosts[rank], "sim")
    import zeropp
    from zeropp.zero.engine import engine_of

    found = []
    for number, given in enumerate(configs):
        parallel = given.pop("parallel")
        comm = zeropp.Comm(gather=gather, **given.pop("comm", {}))
        config = zeropp.Config(experts=zeropp.Experts(parallel=parallel), comm=comm, **given)
        model, optimizer = prepared(config)
        assert engine_of(model).core.gather_way()[0] == (1 if gather == "copy" else 2)
        found.append([*steps(model, optimizer, 0, rank), bits_of(model)])
        assert model[1].experts.forward.exchange.device == torch.device("sim:0")  # where tokens crossed
        if number:
            continue
        zeropp.save(folder, model, optimizer)
        wanted = steps(model, optimizer, 2, rank)
        model, optimizer = prepared(config)
        zeropp.load(folder, model, optimizer)
        assert steps(model, optimizer, 2, rank) == wanted
        found[-1] += wanted
    torch.distributed.destroy_process_group()
    return found


def all_of(hosts: str, gather: str, configs: list[dict[str, Any]], folder: Path) -> Any:
    outcomes = run_ranks(
        len(hosts), trained, hosts, gather, configs, str(folder), timeout=240, env=simulated("sim-lazy")
    )
    return [one.value for one in outcomes]


CONFIGS: list[dict[str, Any]] = [{"stage": 3, "parallel": 2}]
SELDOM: list[dict[str, Any]] = [
    {"stage": 2, "parallel": 2}, {"stage": 1, "parallel": 2}, {"stage": 0, "parallel": 2},
    {"stage": 3, "parallel": {"0.*": 1, "*": 2}},
    {"stage": 3, "parallel": 2, "comm": {"params": "int8", "grads": "int8", "block_elems": 64}},
]  # fmt: skip


@pytest.mark.parametrize("configs", [CONFIGS, pytest.param(SELDOM, marks=SLOW)], ids=["often", "seldom"])
def test_several_hosts_have_the_bits_of_one(configs: list[dict[str, Any]], tmp_path: Path) -> None:
    """Losses, norms, values, and what a checkpoint goes on to; seldom also by NCCL on one host."""
    wanted = all_of("aaaa", "copy", configs, tmp_path / "copy")
    assert all_of("aabb", "auto", configs, tmp_path / "hosts") == wanted
    assert configs is CONFIGS or all_of("aaaa", "nccl", configs, tmp_path / "nccl") == wanted


@pytest.mark.parametrize(
    ("name", "stage"),
    [("Mixtral", 3), *(pytest.param(*one, marks=SLOW) for one in (("Mixtral", 0), ("Mixtral", 1), ("DeepseekV3", 2)))],
)
@on_ranks("2 hosts", devices=("sim",))
def test_a_group_of_one_rank(name: str, stage: int) -> None:
    """Each rank has experts of its own, and tokens go to the other host in two pieces."""
    import zeropp
    from expert_parity import parity

    parity(name, zeropp.Experts(parallel=2, chunks=2), stage=stage)


@pytest.mark.parametrize(
    ("hosts", "tokens"),
    [
        ("aabb", "exact"),
        *(pytest.param(*one, marks=SLOW) for one in (("abcd", "exact"), ("aabb", "int8"), ("abcd", "int8"))),
    ],
)
@on_ranks(4, devices=("sim-lazy", pytest.param("sim", marks=SLOW)))
def test_rows_between_hosts_have_the_bits_of_the_cpu(hosts: str, tokens: str) -> None:
    """Rows, sums and gradients; and the host waits for the choices alone."""
    import sim
    import torch.distributed as dist
    import zeropp
    from expert_layer import OnDevice

    gc.collect()  # to free the memory of earlier exchanges waits
    os.environ["ZEROPP_HOST_ID"] = hosts[dist.get_rank()]
    exchanges = [zeropp.moe.Exchange(dist.new_group(list(range(4))), tokens) for _ in range(2)]
    del os.environ["ZEROPP_HOST_ID"]
    numbers = [exchange.layer("bits") for exchange in exchanges]
    exchanges[1]._where(torch.device("sim:0"))  # opens it
    for case in ("uneven", "one_without_tokens", "none_for_the_last", "dropped"):
        for dtype in (torch.float32, torch.bfloat16):
            wanted = OnDevice(case, dtype, "cpu").run(exchanges[0], numbers[0])
            layer, waits = OnDevice(case, dtype, "sim"), {}
            with sim.waits_of_the_host(waits):
                found = layer.run(exchanges[1], numbers[1])
            assert waits.pop("a copy to the host") == 1
            assert waits.keys() <= {"cuEventQuery, again and again"}, (
                waits
            )  # by the thread that watches NCCL, when it takes long
            for got, want in zip(found, wanted, strict=True):
                assert got.device.type == "sim"
                assert torch.equal(got.cpu(), want)
    assert [exchange.device for exchange in exchanges] == [None, torch.device("sim:0")]


@SLOW
@pytest.mark.parametrize("hosts", ["aabb", "abab", "abcd"])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4, devices=("sim",), alone=True)
def test_training_equals_one_process(hosts: str, stage: int) -> None:
    from expert_parity import parity

    os.environ["ZEROPP_HOST_ID"] = hosts[torch.distributed.get_rank()]
    parity("Mixtral", 2, stage=stage)
