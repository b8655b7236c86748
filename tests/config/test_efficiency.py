# SPDX-License-Identifier: Apache-2.0
"""``zeropp.Efficiency`` and its schedules: values, refusals, JSON."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import zeropp
from zeropp import Config, Efficiency, Growth, LayerDrop, TokenDrop


def test_a_growth_rounds_down_to_its_multiple_and_ends_at_its_end() -> None:
    growth = Growth(64, 2048, steps=100, multiple=8)
    assert [growth(step) for step in (0, 1, 50, 99, 100, 10**6)] == [64, 80, 1056, 2024, 2048, 2048]


def test_a_growth_begins_at_the_first_multiple_from_its_start_on() -> None:
    assert Growth(8, 64, steps=10, root=2, multiple=16)(0) == 16


def test_fractions_are_not_rounded() -> None:
    assert Growth(1.0, 0.5, steps=10)(5) == 0.75


def test_steps_of_values() -> None:
    steps = Growth.at({5000: 512, 0: 64})
    assert [steps(step) for step in (0, 4999, 5000, 10**6)] == [64, 64, 512, 512]


def test_layer_drop_goes_from_1_to_theta_or_as_its_schedule_says() -> None:
    assert LayerDrop(theta=0.5, gamma=0.1).at(0) == 1.0
    assert LayerDrop(theta=0.5, gamma=0.1).at(1000) == pytest.approx(0.5)
    assert LayerDrop(keep=Growth(0.5, 1.0, steps=10)).at(5) == 0.75


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "never ends": (
        lambda: Growth(64, 2047, steps=10, multiple=8),
        "Growth.end: 2047 is not allowed; wanted a multiple of 8, or it is never reached: 2040 or 2048",
    ),
    "no steps": (lambda: Growth(1, 2, steps=0), "Growth.steps: 0 is not allowed; wanted a whole number >= 1"),
    "steps left out": (lambda: Growth(1, 2), "Growth.steps: 0 is not allowed"),
    "root": (lambda: Growth(1, 2, steps=3, root=0), "Growth.root: 0 is not allowed; wanted a number above 0"),
    "not finite": (lambda: Growth(1, float("inf"), steps=3), "Growth.end: inf is not allowed; wanted a finite number"),
    "multiple of fractions": (lambda: Growth(0.5, 1.0, steps=3, multiple=8), "Growth.multiple: 8 is not allowed"),
    "no first step": (lambda: Growth.at({3: 1}), "wanted a mapping of steps to values that has step 0"),
    "shrinks": (lambda: Efficiency(seq_length=Growth(10, 5, steps=3)), "wanted a schedule that never shrinks"),
    "shrinking steps": (lambda: Efficiency(seq_length=Growth.at({0: 8, 3: 4})), "wanted a schedule that never shrinks"),
    "zero tokens": (lambda: Efficiency(seq_length=Growth(0, 5, steps=3)), "wanted values of at least 1"),
    "no schedule": (
        lambda: Efficiency(seq_length=5),
        "Efficiency.seq_length: 5 is not allowed; wanted a zeropp.Growth",
    ),  # type: ignore[arg-type]
    "unknown": (lambda: Efficiency(seq_len=1), "did you mean 'seq_length'?"),  # type: ignore[call-arg]
    "seed": (lambda: Efficiency(seed=-1), "Efficiency.seed: -1 is not allowed"),
    "config": (lambda: Config(efficiency=3), "wanted a zeropp.Efficiency(...)"),  # type: ignore[arg-type]
    "theta": (lambda: LayerDrop(theta=-0.1), "LayerDrop.theta: -0.1 is not allowed"),
    "keep above 1": (lambda: LayerDrop(keep=lambda step: 2.0).at(3), "LayerDrop.keep: 2.0 at step 3 is not allowed"),
    "layers": (lambda: TokenDrop(keep=Growth(1, 2, steps=3), layers=()), "TokenDrop.layers: () is not allowed"),
    "json": (
        lambda: Config.from_json('{"efficiency": {"seq_length": {"start": 1, "end": 2, "steps": -1}}}'),
        "efficiency.seq_length.steps: -1 is not allowed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    act, sentence = REFUSED[name]
    with pytest.raises(zeropp.ConfigError) as caught:
        act()
    assert sentence in str(caught.value)


def test_reads_json() -> None:
    grown = Config.from_json(
        '{"efficiency": {"seq_length": {"start": 8, "end": 64, "steps": 10, "multiple": 8}, "seed": 7}}'
    )
    assert grown.efficiency == Efficiency(seq_length=Growth(8, 64, steps=10, multiple=8), seed=7)
    steps = Config.from_json('{"efficiency": {"seq_length": {"0": 8, "10": 64}}}')
    assert steps.efficiency == Efficiency(seq_length=Growth.at({0: 8, 10: 64}))
    assert pickle.loads(pickle.dumps(steps)) == steps
