# SPDX-License-Identifier: Apache-2.0
"""``doctor --device``: steps of each stage and tier on one GPU, against plain torch on that very GPU.

The model, its loss and its gradients are torch's in both, and the update is zeropp's AdamW. So losses and parameters have to be equal
bit for bit, whatever the stage, and wherever shards and states are.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeropp.checkpoint.full_state import full_state_dict
from zeropp.config import Config, Offload, Tier
from zeropp.errors import Error, one_line
from zeropp.health.device import Finding
from zeropp.health.first_use import VARIABLE
from zeropp.ops import adam_step_
from zeropp.zero.prepare import prepare

_STEPS, _WIDTH, _ROWS = 2, 64, 4
_RATES: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
_ON_HOST = "keep states on the GPU: leave out Config(offload=)"
_HERE = (
    "keep shards on the host with Offload(params='cpu', optimizer='cpu'), or train on the CPU with Config(device='cpu')"
)

Run = tuple[list[float], list[torch.Tensor]]
"""Losses, and parameters at the end."""


def check_steps(device: torch.device) -> Iterator[Finding]:
    """Train a small model for two steps in each way; yield what was found of each. Takes some seconds.

    Args:
        device: with its index.
    """
    wanted = {precision: _plain(device, precision) for precision in (None, "bf16")}
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "off"  # this is the check
    try:
        with tempfile.TemporaryDirectory(prefix="zeropp-doctor-") as folder:
            for name, options, instead in _ways(Path(folder)):
                began = time.perf_counter()
                why = _compare(device, options, wanted[options.get("precision")])
                seconds = time.perf_counter() - began
                yield Finding(name=f"steps, {name}", why=why, instead=instead if why else "", seconds=seconds)
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _ways(folder: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (name, fields of Config, what to use where it fails)."""
    for stage in range(4):
        yield f"stage {stage}", {"stage": stage}, _HERE
    yield "stage 3 in bf16", {"precision": "bf16"}, _HERE
    for stage in (1, 2):
        yield (f"stage {stage}, states on the host", {"stage": stage, "offload": Offload(optimizer="cpu")}, _ON_HOST)
    host = Offload(params="cpu", optimizer="cpu")
    yield "stage 3, all on the host", {"offload": host}, _ON_HOST
    yield "stage 3 in bf16, all on the host", {"offload": host, "precision": "bf16"}, _ON_HOST
    yield (
        "stage 3, stepped inside the backward",
        {"offload": host, "step_in_backward": True},
        "leave step_in_backward out",
    )
    nvme = Tier("nvme", path=str(folder))
    yield (
        "stage 3, all in files",
        {"offload": Offload(params=nvme, grads=nvme, optimizer=nvme)},
        "use Offload(params='cpu', optimizer='cpu')",
    )


def _compare(device: torch.device, options: dict[str, Any], wanted: Run) -> str:
    """Return what is not as in plain torch; empty: nothing."""
    try:
        losses, params = _prepared(device, options)
    except (Error, RuntimeError, ValueError) as error:
        return one_line(error)
    for step, (found, right) in enumerate(zip(losses, wanted[0], strict=True)):
        if found != right:
            return f"the loss of step {step + 1} is {found!r}, and in plain torch {right!r}"
    differ = sum(not torch.equal(one, other) for one, other in zip(params, wanted[1], strict=True))
    return f"{differ} of {len(params)} parameters have other bits than in plain torch" if differ else ""


def _model(device: torch.device, precision: str | None) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = nn.Sequential(
            nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        )
    return model.to(device, torch.bfloat16 if precision else torch.float32)


def _losses(model: nn.Module, device: torch.device, precision: str | None) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(_STEPS):
        rows = torch.randn(_ROWS, _WIDTH, generator=draw, device="cpu").to(device)
        yield model(rows.bfloat16() if precision else rows).float().square().mean()


def _plain(device: torch.device, precision: str | None) -> Run:
    model = _model(device, precision)
    params = list(model.parameters())
    masters = [p.detach().float().clone() for p in params]
    moments = [[torch.zeros_like(one) for one in masters] for _ in range(2)]
    losses = []
    for step, loss in enumerate(_losses(model, device, precision)):
        loss.backward()
        losses.append(float(loss.detach()))
        adam_step_(masters, [p.grad for p in params if p.grad is not None], *moments, step=step + 1, **_RATES)
        with torch.no_grad():
            for parameter, master in zip(params, masters, strict=True):
                parameter.copy_(master)
                parameter.grad = None
    return losses, [p.detach().cpu() for p in params]


def _prepared(device: torch.device, options: dict[str, Any]) -> Run:
    precision = options.get("precision")
    model = _model(device, precision)
    optimizer = torch.optim.AdamW(model.parameters(), **_RATES)
    model, stepped = prepare(model, optimizer, Config(device=device, units=("Linear",), **options))
    losses = []
    for loss in _losses(model, device, precision):
        loss.backward()
        losses.append(float(loss.detach()))
        stepped.step()
        stepped.zero_grad()
    found = full_state_dict(model)
    return losses, [found[name].cpu() for name, _ in model.named_parameters()]
