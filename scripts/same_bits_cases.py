# SPDX-License-Identifier: Apache-2.0
"""The cases of same_bits.py: what is trained how. Plain data; zeropp is imported when a case's Config is built, by its public names."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Case = dict[str, str]
"""A value for every axis."""

#: Every combination of these is tried. The first value of an axis is the usual one.
CORE: dict[str, tuple[str, ...]] = {
    "stage": ("3", "2", "1", "0"),
    "place": ("memory", "nvme"),
    "step": ("after", "in backward", "delayed"),
    "types": ("fp32", "bf16", "bf16 states", "int8 states"),
    "world": ("1 rank", "2 ranks", "2 hosts"),
}

#: Every pair of values of two axes, these or those of CORE, is tried at least once.
FURTHER: dict[str, tuple[str, ...]] = {
    "optimizer": ("AdamW", "amsgrad", "Lion", "Adagrad", "SGD", "LAMB", "RMSprop"),
    "micro": ("1", "accumulate", "no_sync"),
    "clip": ("none", "config", "call"),
    "share": ("all", "part"),
    "wire": ("exact", "int8"),
    "gather": ("auto", "off"),
}
#: Further values of an axis of CORE, which are tried in pairs only.
MORE_TYPES = ("no master", "fp16")

AXES = {**CORE, "types": (*CORE["types"], *MORE_TYPES), **FURTHER}
RANKS = {"1 rank": 1, "2 ranks": 2, "2 hosts": 2}
EXACT_STEPS = 3
"""Steps before a delayed update begins."""


def name_of(case: Case) -> str:
    """Return the values that tell a case from the others: those of CORE, and what is unusual of the rest."""
    words = [f"stage {case['stage']}", *(case[axis] for axis in CORE if axis != "stage")]
    words += [f"{axis} {case[axis]}" for axis in FURTHER if case[axis] != FURTHER[axis][0]]
    return ", ".join(words)


def core() -> list[Case]:
    """Return every combination of CORE, the rest usual."""
    usual = {axis: values[0] for axis, values in FURTHER.items()}
    return [dict(zip(CORE, values, strict=True)) | usual for values in itertools.product(*CORE.values())]


def pairs_of(case: Case) -> set[tuple[str, str, str, str]]:
    """Return each two axes with their values."""
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(AXES, 2)}


def cover(accepts: Callable[[Case], bool], works: Callable[[Case], bool], seed: int = 0, tries: int = 60) -> list[Case]:
    """Return few cases that have every pair of values that a case can have which is accepted and works.

    ``accepts`` is asked of every case that is drawn, the slower ``works`` of those that would be taken. A pair for which no case
    is found in ``tries`` draws is taken for one that is refused. Another seed gives other cases.
    """
    draw = random.Random(seed)
    wanted = [(a, x, b, y) for a, b in itertools.combinations(AXES, 2) for x, y in itertools.product(AXES[a], AXES[b])]
    missing, found = set(wanted), []
    for a, x, b, y in wanted:
        if (a, x, b, y) not in missing:
            continue
        drawn = [{axis: draw.choice(values) for axis, values in AXES.items()} | {a: x, b: y} for _ in range(tries)]
        usable = sorted(filter(accepts, drawn), key=lambda case: len(pairs_of(case) & missing), reverse=True)
        best = next(filter(works, usable), None)
        if best is not None:
            missing -= pairs_of(best)
            found.append(best)
    return found


def sample(cases: Iterable[Case], axes: Sequence[str]) -> list[Case]:
    """Return the first cases that have, together, every value of these axes in pairs with every value of the others that occurs."""
    chosen, seen = [], set()
    for case in cases:
        new = {pair for pair in pairs_of(case) if pair[0] in axes and pair[2] in axes} - seen
        if new:
            chosen.append(case)
            seen |= new
    return chosen


def config(case: Case, folder: str) -> Any:
    """Return the ``zeropp.Config`` of a case, with its files under ``folder``.

    Raises:
        zeropp.ConfigError: the combination is refused.
    """
    import zeropp

    chosen: dict[str, Any] = {"stage": int(case["stage"]), "precision": precision(case["types"])}
    if case["types"] == "fp16":
        chosen["loss_scale"] = zeropp.LossScale(init=2.0**17, interval=5)  # the first steps overflow, later ones grow
    chosen["offload"] = offload(case, folder)
    if case["step"] == "in backward":
        chosen["step_in_backward"] = True
    if accumulates(case):
        chosen["accumulate"] = 2
    if case["clip"] == "config":
        chosen["clip"] = 0.5
    if case["wire"] == "int8":
        gathers = case["stage"] == "3" and case["place"] == "memory"
        chosen["comm"] = zeropp.Comm(params="int8" if gathers else "exact", grads="int8")
    if case["gather"] == "off":
        chosen["host_copy"] = "off"
    return zeropp.Config(**chosen)


def accumulates(case: Case) -> bool:
    """Return True where Config(accumulate=2) makes the step; with gradients on NVMe a step in the backward needs it."""
    return case["micro"] == "accumulate" or (case["place"] == "nvme" and case["step"] == "in backward")


def precision(types: str) -> Any:
    """Return the value of Config.precision."""
    import zeropp

    known: Mapping[str, Any] = {
        "fp32": None,
        "bf16": "bf16",
        "fp16": "fp16",
        "bf16 states": zeropp.Precision(state="bf16"),
        "int8 states": zeropp.Precision(state="int8"),
        "no master": zeropp.Precision(param="bf16", master="bf16", state="bf16"),
    }
    return known[types]


def offload(case: Case, folder: str) -> Any:
    """Return the tiers: on NVMe is all that the stage partitions, or about half of each."""
    import zeropp

    least = {"params": 3, "grads": 2, "optimizer": 1}
    chosen: dict[str, Any] = {}
    if case["place"] == "nvme":
        share = 1.0 if case["share"] == "all" else 0.55
        kinds = [kind for kind, stage in least.items() if int(case["stage"]) >= stage] or ["optimizer"]
        chosen = {kind: zeropp.Tier("nvme", path=folder, fraction=share) for kind in kinds}
    if case["step"] == "delayed":
        chosen = {"optimizer": "cpu"} | chosen | {"delayed_update": EXACT_STEPS}
    return zeropp.Offload(**chosen)
