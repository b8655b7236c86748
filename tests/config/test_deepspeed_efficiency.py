# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's sections on data efficiency: every schedule has the values of DeepSpeed's own classes, and every key is read or refused.

    python tests/config/test_deepspeed_efficiency.py    record the values of the DeepSpeed that is installed

The recorded values of curricula and of random-LTD are those of DeepSpeed 0.19.8, of progressive layer dropping those of 0.18.9. Where
DeepSpeed is installed the classes themselves are asked, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zeropp
from zeropp.config import Config
from zeropp.config.efficiency import Curriculum, Metric

STORED = Path(__file__).with_name("deepspeed_schedules.json")
RECORDED, ALL = 150, 10_000
Case = tuple[dict[str, Any], list[int]]
"""A section, and steps counted from 0, rising."""


def steps_until(draw: random.Random, last: int) -> list[int]:
    return sorted({0, last - 1, last, last + 1, *(draw.randrange(2 * last + 2) for _ in range(4))} - {-1})


def curriculum(seed: int) -> Case:
    draw = random.Random(seed)
    low = draw.choice([1, 8, 64, draw.randrange(1, 500)])
    section: dict[str, Any] = {
        "min_difficulty": low,
        "max_difficulty": low + draw.choice([0, 1, 56, draw.randrange(3000)]),
    }
    section["schedule_type"] = kind = draw.choice(["fixed_linear", "fixed_root", "fixed_discrete"])
    if kind == "fixed_discrete":
        count = draw.randrange(2, 6)
        ends = sorted(draw.randrange(30) for _ in range(count - 1))
        values = sorted(draw.randrange(low, section["max_difficulty"] + 2) for _ in range(count))
        section["schedule_config"] = {"difficulty": values, "max_step": ends}
        return section, list(range(ends[-1] + 3))
    total = draw.choice([1, 2, 10, draw.randrange(1, 5000)])
    section["schedule_config"] = {
        "total_curriculum_step": total,
        "difficulty_step": draw.choice([1, 8, 16, draw.randrange(1, 50)]),
    }
    if kind == "fixed_root":
        section["schedule_config"]["root_degree"] = draw.choice([1, 2, 3, 0.5, 2.5])
    return section, steps_until(draw, total)


def random_ltd(seed: int) -> Case:
    draw = random.Random(-1 - seed)
    multiple = draw.choice([1, 8, 16, draw.randrange(1, 50)])
    low = multiple + draw.randrange(300)
    steps = draw.choice([1, 10, draw.randrange(1, 5000)])
    config = {"require_steps": steps, "seq_per_step": multiple}
    schedule = {
        "min_value": low,
        "max_value": low + draw.randrange(2000),
        "schedule_type": "fixed_linear",
        "schedule_config": config,
    }
    return schedule, steps_until(draw, steps)


def layer_drop(seed: int) -> Case:
    draw = random.Random(seed)
    return {"theta": draw.uniform(0.05, 1.0), "gamma": draw.choice([0.0, 0.001, draw.uniform(0, 0.1)])}, steps_until(
        draw, 5000
    )


# -- ours ------------------------------------------------------------------------------------------------------------------


def our_curriculum(section: dict[str, Any]) -> Callable[[int], float]:
    found = Config.from_json(
        {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", **section}}
    ).efficiency
    assert found is not None and found.seq_length is not None
    return found.seq_length


def our_random_ltd(section: dict[str, Any]) -> Callable[[int], float]:
    from zeropp.config.deepspeed_efficiency import ltd_schedule

    return ltd_schedule(section)


def our_layer_drop(section: dict[str, Any]) -> Callable[[int], float]:
    found = Config.from_json({"progressive_layer_drop": {"enabled": True, **section}}).efficiency
    assert found is not None and found.layer_drop is not None
    return found.layer_drop.at


# -- theirs ----------------------------------------------------------------------------------------------------------------


def is_there(name: str) -> bool:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return False
    removed = importlib.util.find_spec("deepspeed.runtime.progressive_layer_drop") is None
    return removed == name.startswith(
        "data_pipeline"
    )  # 0.19 raised curricula to their start, and removed layer dropping


def their_curriculum(section: dict[str, Any], steps: list[int]) -> list[float]:
    theirs: Any = importlib.import_module("deepspeed.runtime.data_pipeline.curriculum_scheduler").CurriculumScheduler(
        section
    )
    return [theirs.update_difficulty(step + 1) for step in steps]


def their_random_ltd(section: dict[str, Any], steps: list[int]) -> list[float]:
    module: Any = importlib.import_module("deepspeed.runtime.data_pipeline.data_routing.scheduler")
    whole = {
        "total_layer_num": 12, "random_ltd_layer_num": 10, "random_ltd_schedule": section, "global_batch_size": 8,
        "layer_token_lr_schedule": {"enabled": False},
    }  # fmt: skip
    theirs, found = module.RandomLTDScheduler(whole), []
    for step in steps:
        theirs.update_seq(step)
        found.append(theirs.get_current_seq())
    return found


def their_layer_drop(section: dict[str, Any], steps: list[int]) -> list[float]:
    theirs: Any = importlib.import_module("deepspeed.runtime.progressive_layer_drop").ProgressiveLayerDrop(**section)
    found = []
    for step in steps:
        if step:
            theirs.update_state(step)
        found.append(float(theirs.get_theta()))
    return found


KINDS: dict[str, tuple[Any, Any, Any, str]] = {
    "curriculum": (curriculum, our_curriculum, their_curriculum, "data_pipeline.curriculum_scheduler"),
    "random_ltd": (random_ltd, our_random_ltd, their_random_ltd, "data_pipeline.data_routing.scheduler"),
    "layer_drop": (layer_drop, our_layer_drop, their_layer_drop, "progressive_layer_drop"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_equal_the_recorded_values_of_deepspeed(kind: str) -> None:
    make, ours, _, _ = KINDS[kind]
    for seed, wanted in enumerate(json.loads(STORED.read_text())[kind]):
        section, steps = make(seed)
        values = ours(section)
        assert [values(step) for step in steps] == pytest.approx(wanted, rel=1e-15, abs=0), (section, steps)


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_equal_the_classes_of_deepspeed(kind: str) -> None:
    make, ours, theirs, module = KINDS[kind]
    if not is_there(module):
        pytest.skip(
            f"deepspeed.runtime.{module} is not installed: pip install deepspeed==0.19.8 (0.18.9 for layer dropping)"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for seed in range(ALL):
        section, steps = make(seed)
        values = ours(section)
        # numpy's exp may differ from that of the C library by the last bit
        assert [values(step) for step in steps] == pytest.approx(theirs(section, steps), rel=1e-15, abs=0), (
            section,
            steps,
        )


def test_layer_drop_begins_with_all_layers() -> None:
    assert our_layer_drop({"theta": 0.5})(0) == 1.0
    assert math.isclose(our_layer_drop({"theta": 0.5, "gamma": 1.0})(100), 0.5)


# -- keys ------------------------------------------------------------------------------------------------------------------

DISCRETE = {
    "min_difficulty": 1,
    "max_difficulty": 9,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [1, 9], "max_step": [5]},
}
LINEAR = {
    "min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}  # fmt: skip
LTD = {
    "min_value": 8,
    "max_value": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"require_steps": 10, "seq_per_step": 8},
}


def sampling(**metrics: Any) -> dict[str, Any]:
    learning = {"enabled": True, "data_cluster_path": "clusters", "curriculum_metrics": metrics}
    section = {"enabled": True, "num_epochs": 3, "num_workers": 2, "pin_memory": False, "curriculum_learning": learning}
    return {"data_efficiency": {"enabled": True, "seed": 7, "data_sampling": section}}


def routing(**changed: Any) -> dict[str, Any]:
    drop = {
        "enabled": True, "total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2], "model_mask_name": "attention_mask",
        "model_type": "decoder", "hidden_state_order": "batch_seq_dim", "random_ltd_schedule": LTD,
    }  # fmt: skip
    return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {**drop, **changed}}}}


def test_reads_a_curriculum() -> None:
    rarity = {"difficulty_type": "percentile", "index_to_sample_path": "a", "index_to_metric_path": "b", **DISCRETE}
    found = Config.from_json(sampling(rarity=rarity, seqlen={"clustering_type": "single_cluster", **LINEAR})).efficiency
    assert found is not None and found.seed == 7 and isinstance(found.curriculum, Curriculum)
    assert (found.curriculum.order_path, found.curriculum.epochs, found.curriculum.workers) == ("clusters", 3, 2)
    metrics = found.curriculum.metrics
    schedule = zeropp.Growth.at({0: 1, 5: 9})
    assert metrics["rarity"] == Metric(schedule=schedule, by="percentile", of=9, samples_path="a", values_path="b")
    assert metrics["seqlen"].samples_path is None and metrics["seqlen"].schedule(100) == 64


def test_inner_switches_decide_as_in_deepspeed() -> None:
    keys = sampling(seqlen={"clustering_type": "single_cluster", **LINEAR})
    keys["data_efficiency"]["enabled"] = False
    with pytest.warns(UserWarning, match="data_sampling is on, as in DeepSpeed"):
        assert Config.from_json(keys).efficiency is not None
    keys["data_efficiency"]["data_sampling"]["curriculum_learning"]["enabled"] = False
    with pytest.warns(UserWarning, match="data_sampling is on"):
        assert Config.from_json(keys).efficiency is None


@pytest.mark.parametrize("section", [None, False, "auto", {}, {"enabled": False}])
@pytest.mark.parametrize("name", ["data_efficiency", "curriculum_learning", "progressive_layer_drop"])
def test_what_is_switched_off_says_nothing(name: str, section: Any) -> None:
    assert Config.from_json({name: section}).efficiency is None


SEQLEN = {"enabled": True, "curriculum_type": "seqlen", **LINEAR}
METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shrinks": ({"curriculum_learning": {**SEQLEN, "max_difficulty": 4}}, "curriculum_learning.max_difficulty: 4 is not allowed; wanted at least"),
    "steps": (
        {"curriculum_learning": {**SEQLEN, "schedule_config": {"total_curriculum_step": 0, "difficulty_step": 8}}},
        "curriculum_learning.schedule_config.total_curriculum_step: 0 is not allowed",
    ),
    "unknown": ({"curriculum_learning": {**SEQLEN, "max_dificulty": 4}}, "did you mean 'max_difficulty'?"),
    "custom lengths": ({"curriculum_learning": {**SEQLEN, "schedule_type": "custom"}}, "give zeropp.Efficiency(seq_length=function of the step)"),
    "theta": ({"progressive_layer_drop": {"enabled": True, "theta": 2}}, "progressive_layer_drop.theta: 2 is not allowed"),
    "no index": (sampling(a=LINEAR), f"{METRICS}.a.index_to_sample_path: None is not allowed"),
    "no metric": (sampling(), f"{METRICS}: {{}} is not allowed; wanted at least one metric"),
    "max_step": (
        sampling(a={**DISCRETE, "schedule_config": {"difficulty": [1, 2], "max_step": [3, 4]}}),
        f"{METRICS}.a.schedule_config.max_step: [3, 4] is not allowed; wanted a list of 1 rising steps",
    ),
    "order": (routing(hidden_state_order="seq_batch_dim"), "random_ltd.hidden_state_order: 'seq_batch_dim' is not supported"),
    "count": (routing(random_ltd_layer_num=3), "random_ltd.random_ltd_layer_num: 3 is not allowed; wanted 2"),
    "beyond": (routing(random_ltd_layer_id=[1, 4]), "wanted numbers below total_layer_num, which is 4"),
    "no tokens": (
        routing(random_ltd_schedule={**LTD, "schedule_config": {"require_steps": 10, "seq_per_step": 16}}),
        "random_ltd_schedule.min_value: 8 is not allowed; wanted at least seq_per_step, 16: rounded down to a multiple it is 0 tokens",
    ),
    "rates": (
        routing(layer_token_lr_schedule={"enabled": True, "total_layer_tokens": 10}),
        "random_ltd.layer_token_lr_schedule: {'enabled': True, 'total_layer_tokens': 10} is not supported; zeropp.initialize builds it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    keys, sentence = REFUSED[name]
    with pytest.raises(zeropp.ConfigError) as caught:
        Config.from_json(keys)
    assert sentence in str(caught.value)


if __name__ == "__main__":
    recorded = json.loads(STORED.read_text()) if STORED.exists() else {}
    for kind, (make, _, theirs, module) in KINDS.items():
        if is_there(module):
            recorded[kind] = [theirs(*make(seed)) for seed in range(RECORDED)]
    STORED.write_text(json.dumps(recorded, indent=None, separators=(",", ":")).replace("]],", "]],\n") + "\n")
    sys.stderr.write(f"{STORED}: {', '.join(f'{len(rows)} of {kind}' for kind, rows in recorded.items())}\n")
