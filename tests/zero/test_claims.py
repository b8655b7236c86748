# SPDX-License-Identifier: Apache-2.0
"""Bytes held and bytes moved equal the formulas of the paper (Rajbhandari et al. 2020, sections 5 and 7)."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks, shards_tier
from torch import nn
from training import STAGES, batch, gpt
from zeropp.zero.engine import engine_of


def _prepared(stage: str, precision: str | None = None, width: int = 128, **more: Any) -> tuple[nn.Module, Any]:
    model = gpt(width=width, layers=3)
    return zeropp.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        zeropp.Config(
            precision=precision, units=more.pop("units", ("Block", "Embedding", "LayerNorm")), **STAGES[stage], **more
        ),
    )


def _step(model: nn.Module, optimizer: Any, micro: int = 1) -> None:
    for i in range(micro):
        with contextlib.nullcontext() if i == micro - 1 else zeropp.no_sync(model):
            model(*batch(0, i)).backward()
    optimizer.step()


@functools.cache
def held() -> dict[str, Any]:
    """zeropp.memory after a step, and how many of those bytes are padding."""
    ranks, answer = dist.get_world_size(), {}
    for precision in ("bf16", "fp32"):
        for stage in STAGES:
            model, optimizer = _prepared(stage, precision)
            _step(model, optimizer)
            found = zeropp.memory(model, optimizer)
            real = sum(p.numel() for p in model.parameters())
            padded = sum(u.elems for u in engine_of(model).units)
            answer[f"{precision}, {stage}"] = {
                "held": found["bytes_per_parameter"]["held"],
                "planned": found["bytes_per_parameter"]["planned"],
                "kinds": found[shards_tier()],
                "parameters": found["parameters"],
                "padding": padded / real - 1,
                "real": real,
                "ranks": ranks,
            }
    return answer


def _moved() -> dict[str, int]:
    """Bytes read from peers since the last call, by collective."""
    total: dict[str, int] = {}
    for kinds in zeropp.traffic(reset=True).values():
        for kind, counts in kinds.items():
            total[kind] = total.get(kind, 0) + counts["bytes"]
    return total


@functools.cache
def wire() -> dict[str, Any]:
    """Bytes of the second step of every stage, with one micro-step and with four."""
    answer = {}
    for stage in STAGES:
        for micro in (1, 4):
            model, optimizer = _prepared(stage)
            _step(model, optimizer, micro)
            optimizer.zero_grad()
            dist.barrier()
            _moved()
            _step(model, optimizer, micro)
            units = engine_of(model).units
            answer[f"{stage}, {micro} micro-steps"] = {
                "moved": _moved(),
                "psi": sum(u.elems * u.dtype.itemsize for u in units),
                "tied": sum(u.elems * u.dtype.itemsize for u in units if any(len(e.names) > 1 for e in u.params)),
                "units": len(units),
            }
            optimizer.zero_grad()
    return answer


def _states(precision: str, stage: int, ranks: int) -> float:
    """Bytes a parameter: 2 + 2 + K=12 in bf16 (4 master, 8 moments), 4 + 4 + 8 in fp32."""
    param, grad, rest = (2, 2, 12) if precision == "bf16" else (4, 4, 8)
    return {
        0: param + grad + rest,
        1: param + grad + rest / ranks,
        2: param + (grad + rest) / ranks,
        3: (param + grad + rest) / ranks,
    }[stage]


@on_ranks(2, 4)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_held(stage: str, precision: str) -> None:
    answer, ranks = held(), dist.get_world_size()
    found = answer[f"{precision}, {stage}"]
    formula = _states(precision, int(stage[6]), ranks)
    assert found["planned"] == pytest.approx(formula, rel=1e-6)
    # Parameters begin at 64 bytes and slices at 64 bytes or a page; buckets end at a page. `padding` is what the
    # layout says; the rest is one page for each unit and kind (6 units here, at most 5 kinds).
    most = formula * (1 + found["padding"]) + 6 * 5 * 4096 / found["real"]
    assert formula <= found["held"] <= most, found
    assert found["padding"] < 0.05


@on_ranks(2, 4)
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_on_the_wire(stage: str) -> None:
    """A rank reads, with f = (N-1)/N: 2 f Psi in stages 0 to 2, 3 f Psi in stage 3, f Psi where a host has one
    copy."""
    answer, ranks = wire(), dist.get_world_size()
    found, four = answer[f"{stage}, 1 micro-steps"], answer[f"{stage}, 4 micro-steps"]
    share = found["psi"] * (ranks - 1) // ranks
    gathers, scatters, reduces = {
        "stage 0": (0, 0, 2), "stage 1": (1, 1, 0), "stage 2": (1, 1, 0), "stage 3": (0, 1, 0),
        "stage 3, gathering": (2, 1, 0), "stage 3, gathering ahead": (2, 1, 0),
    }[stage]  # fmt: skip
    if stage == "stage 3" and shards_tier() == "device":
        gathers = 2  # the CPU reads one copy in place, a GPU fetches what its peers have
    # The tied matrix is needed at both ends of the forward, so it is gathered once more than the formula says. A
    # step begins with a vote of 8 bytes, and each unit's norm with its worst element, its parameter and the mask of its ranks is 32.
    tied = found["tied"] * (ranks - 1) // ranks
    gathered = gathers * share + (tied if gathers == 2 else 0)
    # A GPU reads one number of a unit's norm from each peer, and ranks tell which steps they have seen end.
    votes, norm = (8, 32) if shards_tier() == "cpu" else (16, 8)
    small = (votes + (0 if stage == "stage 0" else norm * found["units"])) * (ranks - 1)
    assert 0 < found["tied"] < 0.1 * found["psi"]
    assert found["moved"]["all_gather"] == gathered + small
    assert found["moved"]["reduce_scatter"] == scatters * share
    assert found["moved"]["all_reduce"] == reduces * share
    # Four micro-steps a step: gradients and, where parameters stay whole, parameters travel once for all four.
    assert four["moved"]["all_gather"] == gathered * (4 if gathers == 2 else 1) + small
    assert four["moved"]["reduce_scatter"] == scatters * share
    assert four["moved"]["all_reduce"] == reduces * share
