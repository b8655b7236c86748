# SPDX-License-Identifier: Apache-2.0
"""step_in_backward_cases with every rank on a host of its own, over the loopback interface: gathers, reductions and the end of a step are
collectives there."""

from __future__ import annotations

import os

os.environ["ZEROPP_HOST_ID"] = os.environ["RANK"]  # before the communicator is made

from state_cases import scratch
from step_in_backward_cases import (
    BACKWARD_STEP,
    Steps,
    a_disk_that_fails,
    filed,
    gradients_come_and_go,
    not_finite,
    tiers,
)
from training import Recipe, ours, same
from zeropp import Comm


def equal(recipe: Recipe, **config: object) -> None:
    with scratch() as path:
        places: dict[str, Steps] = {
            "stage 1": {"stage": 1},
            "stage 2, states in a file": {"stage": 2, "offload": tiers(path, states=1.0)},
            "stage 3": {"stage": 3},
            "stage 3, a second copy": {"stage": 3, "comm": Comm(secondary_shard="host")},
            "stage 3, in 8 bits": {"stage": 3, "comm": Comm(params="int8", grads="int8")},
            "stage 3, both in files": {"stage": 3, "offload": tiers(path, params=1.0, states=1.0)},
            "stage 3, some parameters in a file": {"stage": 3, "prefetch": 0, "offload": tiers(path, params=0.5)},
        }
        if recipe.config.get("accumulate", 1) > 1:
            places["stage 2, gradients in a file"] = {"stage": 2, "offload": filed(path, 1.0)}
            in_bits: Steps = {"stage": 2, "comm": Comm(grads="int8")}
            filed_bits: Steps = {**in_bits, "offload": filed(path, 1.0)}
            once = Recipe(steps=2)  # in a file each backward of a step is reduced, and rounded, by itself
            same("8 bits, in memory", ours(once, **filed_bits, **config), ours(once, **in_bits, **config))
            places["stage 2, gradients in a file, sent in 8 bits"] = filed_bits
            places["stage 3, all in files"] = {"stage": 3, "offload": filed(path, 0.6, params=0.7, states=1.0)}
        for name, place in places.items():
            same(name, ours(recipe, **place, **config, **BACKWARD_STEP), ours(recipe, **place, **config))


def fp32() -> None:
    """With gradients that no_sync held back."""
    equal(Recipe(steps=3, micro=2))


def bf16() -> None:
    equal(Recipe(steps=2, micro=2, config={"accumulate": 2}), precision="bf16")


CASES = {function.__name__: function for function in (fp32, bf16, gradients_come_and_go, not_finite, a_disk_that_fails)}
