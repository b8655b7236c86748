# SPDX-License-Identifier: Apache-2.0
"""A gradient that is not finite on some of the ranks before the sum: the error names them, not the owner of the shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import zeropp
from bad_input_cases import same, sentence, trains_on, values
from reads_cases import Tiny, vector

NAN, HUGE = float("nan"), 2.5e38


def spoil(model: Tiny, ranks: tuple[int, ...], value: float) -> Any:
    """On these ranks the first element of one parameter's gradient, and the last, which other ranks own, are ``value``."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone()
        if dist.get_rank() in ranks:
            changed.view(-1)[0] = changed.view(-1)[-1] = value
        return changed

    return model.blocks[1].weight.register_hook(hook)


def named(ranks: tuple[int, ...], value: float = NAN, **config: Any) -> str:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(units=("Linear", "Tiny"), **config))
    before = values(model)
    handle = spoil(model, ranks, value)
    for _ in range(config.get("accumulate", 1)):
        model(vector()).backward()
        handle.remove()  # of an accumulated step, the first backward alone
    found = sentence(optimizer.step)
    same(model, before)
    optimizer.zero_grad()
    if "accumulate" not in config:
        trains_on(model, optimizer)
    handle = spoil(model, (0,), NAN)
    for _ in range(config.get("accumulate", 1)):
        model(vector()).backward()
    handle.remove()
    again = sentence(optimizer.step)  # another rank's this time
    assert "'blocks.1.weight' (rank 0 before the sum)" in again, again
    return found


PLACES = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "gathered": {"stage": 3, "host_copy": "off"},
    "bf16 on the wire": {"stage": 1, "precision": zeropp.Precision(reduce="bf16")},
    "int8 on the wire": {"stage": 2, "comm": zeropp.Comm(grads="int8")},
    "accumulated, stage 1": {"stage": 1, "accumulate": 2},
    "accumulated": {"stage": 3, "accumulate": 2},
}


def backward_step() -> str:
    """A unit that is stepped inside of the backward."""
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = zeropp.Config(units=("Linear", "Tiny"), stage=2, step_in_backward=True)
    model, optimizer = zeropp.prepare(model, optimizer, config)
    spoil(model, (1,), NAN)
    model(vector()).backward()
    return sentence(optimizer.step)


CASES: dict[str, Callable[[], Any]] = {
    **{f"one, {name}": (lambda c=c: named((1,), **c)) for name, c in PLACES.items()},
    **{f"two, {name}": (lambda c=c: named((0, 1), **c)) for name, c in PLACES.items()},
    **{f"none, {name}": (lambda c=c: named((0, 1, 2), HUGE, **c)) for name, c in PLACES.items() if "wire" not in name},
    "early": backward_step,
}
