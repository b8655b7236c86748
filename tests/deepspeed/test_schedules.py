# SPDX-License-Identifier: Apache-2.0
"""Learning rates of DeepSpeed's schedules, by update."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import zeropp
from warm import launch
from zeropp.deepspeed.schedules import build, explain

SECTIONS = [
    {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
    {"type": "WarmupLR", "params": {"warmup_min_lr": 0.002, "warmup_num_steps": 3, "warmup_type": "linear"}},
    {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_max_lr": 0.01, "warmup_num_steps": 4}},
    {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_min_lr": 0.001, "warmup_num_steps": 2, "warmup_type": "linear"}},
    {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_min_ratio": 0.1}},
    {"type": "WarmupCosineLR", "params": {"total_num_steps": 7, "warmup_type": "linear", "warmup_num_steps": 2, "cos_min_ratio": 0.2}},
    {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}},
    {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 4, "lr_range_test_staircase": True}},
    {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3}},
    {"type": "OneCycle", "params": {
        "cycle_min_lr": [0.01, 0.02], "cycle_max_lr": 0.1, "cycle_first_step_size": 5, "cycle_second_step_size": 2,
        "decay_step_size": 2, "decay_lr_rate": 0.5, "cycle_min_mom": 0.7, "cycle_max_mom": [0.9, 0.8], "decay_mom_rate": 0.01}},
    {"type": "OneCycle", "params": {
        "cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_first_stair_count": 2,
        "cycle_second_step_size": 6, "cycle_second_stair_count": 3, "cycle_momentum": False}},
    {"type": "OneCycle", "params": {
        "cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 4, "cycle_second_step_size": 0, "decay_lr_rate": 2.0}},
]  # fmt: skip


def rates(section, make):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.3}], lr=0.1)
    schedule, found = make(section, optimizer), []
    for _ in range(12):
        found.append([group["lr"] for group in optimizer.param_groups])
        if section["type"] == "OneCycle":
            found[-1] += [beta for group in optimizer.param_groups for beta in group["betas"]]
        optimizer.step()
        schedule.step()
    return found


def test_rates_by_hand():
    first = rates(SECTIONS[0], build)
    wanted = [0, 0, *(0.01 * math.log(k + 1) / math.log(4) for k in (1, 2, 3)), *[0.01] * 7]
    assert first == [[pytest.approx(one)] * 2 for one in wanted]
    cosine = rates(SECTIONS[5], build)
    assert cosine[3] == [pytest.approx(r * (0.2 + 0.8 * (1 + math.cos(math.pi / 5)) / 2)) for r in (0.1, 0.3)]
    assert cosine[-1] == [pytest.approx(0.02), pytest.approx(0.06)]


def test_rates_are_those_of_deepspeeds_own_classes():
    """In a process of its own: importing the real package changes a process."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import test_schedules as ours\n"
        "try:\n    from deepspeed.runtime import lr_schedules as theirs\n"
        "except ImportError:\n    print('absent'); raise SystemExit\n"
        "make = lambda section, optimizer: getattr(theirs, section['type'])(optimizer, **section['params'])\n"
        "print('found ' + json.dumps([ours.rates(section, make) for section in ours.SECTIONS]))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    done = launch(1, "-c", code, Path(__file__).parent, timeout=100, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("found ", "absent"))]
    assert lines, done.stderr[-2000:]
    if lines[0] == "absent":
        pytest.skip("deepspeed is not installed: pip install zeropp[bench]")
    for section, theirs in zip(SECTIONS, json.loads(lines[0].removeprefix("found ")), strict=True):
        assert rates(section, build) == [pytest.approx(one) for one in theirs], section


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"type": "OneCyle"}, "scheduler.type: 'OneCyle' is unknown; did you mean 'OneCycle'"),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 1}}, "scheduler.params.cycle_max_lr: missing"),
        (
            {"type": "OneCycle", "params": {"cycle_min_lr": [1, 2], "cycle_max_lr": 1}},
            "wanted a number, or 1: one a parameter group",
        ),
        (
            {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}},
            "lr_range_test_step_size: 0 is not allowed; wanted a number >= 1",
        ),
        (
            {"type": "LRRangeTest", "params": {"lr_range_min_lr": 1}},
            "unknown .value 1.; did you mean 'lr_range_test_min_lr'",
        ),
        ({"type": "WarmupDecayLR", "params": {}}, "scheduler.params.total_num_steps: missing"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "scheduler.params.warmup_type: 'cubic'"),
        ({"type": "WarmupLR", "params": {"warmup": 3}}, "scheduler.params.warmup: unknown"),
    ],
)
def test_what_cannot_be_says_why(section, said):
    with pytest.raises(zeropp.ConfigError, match=said):
        build(section, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))


def test_a_cycle_of_an_optimizer_without_betas_says_that_momentum_stays():
    section = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3}}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.5)
    with pytest.warns(UserWarning, match="cycle_momentum changes nothing: SGD has no betas"):
        build(section, optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_what_a_trainer_fills_is_explained():
    auto = {"total_num_steps": "auto", "warmup_num_steps": "auto"}
    assert explain({"type": "WarmupDecayLR", "params": auto}) == "WarmupDecayLR"
