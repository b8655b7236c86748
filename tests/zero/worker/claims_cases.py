# SPDX-License-Identifier: Apache-2.0
"""The paper's figures, counted: bytes held and bytes moved (Rajbhandari et al. 2020, sections 5 and 7)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import zeropp
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
                "kinds": found["cpu"],
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


CASES = {"held": held, "wire": wire}
