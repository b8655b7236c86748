# SPDX-License-Identifier: Apache-2.0
"""Train with each optimizer, shards on the simulated GPU and on the CPU. Print by how much the parameters differ, as JSON.

python case_optimizers.py [NAME ...]     names of CASES; all if none
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import sim
import torch
import zeropp
from torch import Tensor, optim
from zeropp.config import Precision
from zeropp.optim import LAMB, Lion, Muon, OneBitAdam

WIDTH, STEPS = 32, 3
Make = Callable[[list[Tensor]], optim.Optimizer]
INT8 = {"precision": Precision(state="int8")}


def muon(params: list[Tensor]) -> optim.Optimizer:
    matrices, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    return Muon([{"params": matrices}, {"params": others, "use_muon": False}], lr=1e-2)


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "AdamW": (lambda p: optim.AdamW(p, 1e-2), {}),
    "Adam with amsgrad": (lambda p: optim.Adam(p, 1e-2, amsgrad=True, weight_decay=0.1), {}),
    "Lion": (lambda p: Lion(p, lr=1e-3), {}),
    "Adagrad": (lambda p: optim.Adagrad(p, 1e-2, initial_accumulator_value=0.1), {}),
    "SGD": (lambda p: optim.SGD(p, 1e-2, momentum=0.9, nesterov=True), {}),
    "SGD without momentum": (lambda p: optim.SGD(p, 1e-2), {}),
    "torch's RMSprop": (lambda p: optim.RMSprop(p, 1e-2), {}),
    "LAMB": (lambda p: LAMB(p, lr=1e-2), {}),
    "Muon": (muon, {}),
    "1-bit Adam": (lambda p: OneBitAdam(p, lr=1e-2, freeze_step=1), {"stage": 2}),
    "AdamW in bf16": (lambda p: optim.AdamW(p, 1e-2), {"precision": "bf16"}),
    "AdamW in fp16": (lambda p: optim.AdamW(p, 1e-2), {"precision": "fp16"}),
    "AdamW, states in bf16": (lambda p: optim.AdamW(p, 1e-2), {"precision": Precision(state="bf16")}),
    "AdamW, states in 8 bits": (lambda p: optim.AdamW(p, 1e-2), INT8),
    "Lion, states in 8 bits": (lambda p: Lion(p, lr=1e-3), INT8),
    "LAMB, states in 8 bits": (lambda p: LAMB(p, lr=1e-2), INT8),
}


def train(device: str, make: Make, options: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(3))
    )
    model = model.to(device)
    optimizer: Any = make(list(model.parameters()))
    config = zeropp.Config(device=device, **{"stage": 3, **options})
    zeropp.prepare(model, optimizer, config)
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.backward((model(x).float() - x).square().mean())
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu().float() for name, value in zeropp.full_state_dict(model).items()}


def difference(make: Make, options: dict[str, Any]) -> float:
    """Return the largest one, of any element."""
    wanted, found = train("cpu", make, options), train("sim", make, options)
    return max(float((wanted[name] - found[name]).abs().max()) for name in wanted)


torch.set_num_threads(1)
sim.set_schedule(1, 0)
differences = {name: difference(*CASES[name]) for name in sys.argv[1:] or CASES}
print(json.dumps({"differences": differences, "error": sim.first_error()}))
