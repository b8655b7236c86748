# SPDX-License-Identifier: Apache-2.0
"""Optimizers other than Adam, and groups of parameters for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zeropp

SGD, Adagrad, Lion = torch.optim.SGD, torch.optim.Adagrad, zeropp.optim.Lion


def sgd_groups(model: torch.nn.Module) -> Any:
    """Make groups: of each three parameters one has no momentum, and one Nesterov's."""
    every = list(model.parameters())
    more = (
        {"momentum": 0.0},
        {"nesterov": True, "dampening": 0.0},
        {"weight_decay": 0.1, "lr": 0.05, "maximize": True},
    )
    return [{"params": every[i::3], **one} for i, one in enumerate(more)]


MADE: dict[str, Callable[[Any], Any]] = {
    "Lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
    "SGD": lambda params: SGD(params, lr=0.05, weight_decay=0.01),
    "SGD momentum": lambda params: SGD(params, lr=0.05, momentum=0.9, dampening=0.3),
    "SGD nesterov": lambda params: SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda params: Adagrad(params, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.25),
}


def muon_groups(model: torch.nn.Module) -> Any:
    every = list(model.parameters())
    return [
        {"params": [p for p in every if (p.ndim == 2) == matrices], "use_muon": matrices} for matrices in (True, False)
    ]
