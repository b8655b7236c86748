# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed inside a layer of experts: the others name it within seconds, whichever phase they are in."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks

PHASES = ("dispatch", "combine", "backward of combine", "backward of dispatch")
VICTIM = 1


def killed_before(rank: int, ranks: int, phase: int, folder: str, hosts: str) -> dict[str, Any]:
    os.environ["ZEROPP_HOST_ID"] = hosts[rank]
    import torch
    import torch.distributed as dist
    import zeropp

    dist.init_process_group("gloo")
    exchange = zeropp.moe.Exchange(dist.group.WORLD)
    layer = exchange.layer("blocks.0.experts")

    def arrive(at: int) -> None:
        if rank == VICTIM and at == phase:
            Path(folder, "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    class Between(torch.autograd.Function):
        """Experts that change nothing."""

        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
            return rows.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            arrive(3)
            return grad.clone()

    try:
        hidden = torch.randn(8, 16, requires_grad=True)
        weights = torch.rand(8, 2, requires_grad=True)
        arrive(0)
        chosen = torch.rand(8, 6).topk(2, dim=1)[1]
        rows, plan = zeropp.moe.dispatch(hidden, chosen, 6, exchange=exchange, layer=layer)
        arrive(1)
        y = zeropp.moe.combine(Between.apply(rows), plan, weights)
        arrive(2)
        y.sum().backward()
    except zeropp.CommError as error:
        return {"at": time.time(), "rank": error.rank, "text": str(error)}
    return {"at": 0.0, "rank": None, "text": "no error"}


@pytest.mark.parametrize(
    ("hosts", "phase"),
    [
        ("aaa", 0), pytest.param("aaa", 1, marks=pytest.mark.slow), ("aaa", 2), pytest.param("aaa", 3, marks=pytest.mark.slow),
        pytest.param("aba", 0, marks=pytest.mark.slow), ("aba", 1), pytest.param("aba", 2, marks=pytest.mark.slow),
        pytest.param("aba", 3, marks=pytest.mark.slow), pytest.param("aab", 0, marks=pytest.mark.slow),
        pytest.param("aab", 1, marks=pytest.mark.slow), pytest.param("aab", 2, marks=pytest.mark.slow), ("aab", 3),
    ],
)  # fmt: skip
def test_it_is_named_in_every_phase(hosts: str, phase: int, tmp_path: Path) -> None:
    """The victim is one of three ranks of a host, alone on its host, or beside another one."""
    outcomes = run_ranks(3, killed_before, phase, str(tmp_path), hosts, timeout=90, check=False)
    assert outcomes[VICTIM].code == -signal.SIGKILL, str(outcomes[VICTIM])
    killed_at = float((tmp_path / "killed").read_text())
    for outcome in outcomes:
        if outcome.rank == VICTIM:
            continue
        assert outcome.code == 0, str(outcome)
        value = outcome.value
        assert value["rank"] == VICTIM, value
        assert f"rank {VICTIM}" in value["text"]
        if hosts != "aaa":
            assert value["text"], value  # whoever waits for the network knows the phase there
        elif "socket closed" not in value["text"]:  # whoever sends it the descriptor of an arena may notice first
            assert f"{PHASES[phase]} #1 of layer 0 (blocks.0.experts)" in value["text"]
        assert value["at"] - killed_at < 5.0
