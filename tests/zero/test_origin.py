# SPDX-License-Identifier: Apache-2.0
"""A gradient that is not finite is one rank's fault before it is everybody's: the error names that rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks, shards_tier
from tiny import Tiny, refused_step, sentence, trains_on, unchanged, values, vector

NAN, HUGE = float("nan"), 2.5e38


def names_ranks() -> bool:
    """Return False where GPUs add: their sums name parameters, and no ranks (design/0039)."""
    return shards_tier() == "cpu"


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
    found = refused_step(optimizer)
    unchanged(model, before)
    optimizer.zero_grad()
    if "accumulate" not in config:
        trains_on(model, optimizer)
    handle = spoil(model, (0,), NAN)
    for _ in range(config.get("accumulate", 1)):
        model(vector()).backward()
    handle.remove()
    again = refused_step(optimizer)  # another rank's this time
    assert ("'blocks.1.weight' (rank 0 before the sum)" if names_ranks() else says_of_gpus(config)) in again, again
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
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = zeropp.Config(units=("Linear", "Tiny"), stage=2, step_in_backward=True)
    model, optimizer = zeropp.prepare(model, optimizer, config)
    spoil(model, (1,), NAN)
    model(vector()).backward()
    return sentence(optimizer.step)


SAYS = {
    "one": "'blocks.1.weight' (rank 1 before the sum)",
    "two": "'blocks.1.weight' (rank 0 and rank 1 before the sum)",
    "none": "'blocks.1.weight' (finite on each rank, but not their sum)",
}


def says_of_gpus(config: dict[str, Any]) -> str:
    """Return what is said of GPUs. A block of quantised gradients is not finite as a whole, so the parameter that it ends in is named, too."""
    name = "'blocks.1.weight' (on some rank, or in the sum)"
    return name if "comm" in config else f"the gradients of {name} were not finite"


OF_TWO = [f"one, {place}" for place in PLACES] + [
    "two, stage 1",
    "two, gathered",
    "none, stage 1",
    "none, stage 3",
]
OF_THREE = [
    "one, stage 0",
    "one, stage 1",
    "one, stage 2",
    "one, gathered",
    "two, stage 0",
    "two, stage 3",
    "none, gathered",
]
OVER_HOSTS = ("one, stage 0", "one, stage 2", "two, stage 1", "two, gathered", "none, stage 3")
RANKS = {"one": (1,), "two": (0, 1), "none": (0, 1, 2)}
"""The ranks whose gradient is spoilt: by NaN, or by a number whose sum over ranks is infinite."""


@on_ranks()
@pytest.mark.parametrize(
    "case, ranks",
    [(case, 2) for case in OF_TWO] + [(case, 3) for case in OF_THREE] + [(case, "2 hosts") for case in OVER_HOSTS],
)
def test_who_had_it(case: str) -> None:
    who, place = case.split(", ", maxsplit=1)
    told = named(RANKS[who], HUGE if who == "none" else NAN, **PLACES[place])
    assert (SAYS[who] if names_ranks() else says_of_gpus(PLACES[place])) in told, told


@on_ranks(2)
def test_who_had_it_early() -> None:
    """A unit that is stepped inside of the backward."""
    told = backward_step()
    # A rank without a shard of it gets the error of another rank's failure.
    assert SAYS["one"] in told or dist.get_rank() > 0, told
