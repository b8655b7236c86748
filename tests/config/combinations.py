# SPDX-License-Identifier: Apache-2.0
"""Which options combine, tried out through the public interface: every pair of values of Config, and every value with every optimizer.

    python tests/config/combinations.py      record the verdicts of this tree in combinations.json

A verdict is one letter: "." for allowed, else the initial of the exception's class (C: ConfigError, E: Error, T: TierError). The recorded
ones are those of the tree before zeropp/compat.py took the place of the checks; test_compat.py compares.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

RECORD = Path(__file__).with_name("combinations.json")
VALUES: dict[str, list[Any]] = {
    "stage": [0, 1, 2],
    "precision": ["fp32", "bf16", "fp16"],
    "precision.param": ["fp32", "bf16", "fp16"],
    "precision.compute": ["fp32", "bf16", "fp16"],
    "precision.reduce": ["fp32", "bf16", "fp16"],
    "precision.accumulate": ["fp32", "bf16", "fp16"],
    "precision.master": ["fp32", "bf16", "fp16"],
    "precision.state": ["bf16", "int8"],
    "precision.stored": ["int8", "int4"],
    "loss_scale": [8.0],
    "offload.params": ["cpu", "nvme"],
    "offload.grads": ["cpu", "nvme"],
    "offload.optimizer": ["cpu", "nvme"],
    "offload.activations": ["cpu", "nvme"],
    "offload.delayed_update": [0, 3],
    "offload.checksums": [True],
    "units": [1 << 20],
    "ignored": ["2"],
    "host_copy": ["off"],
    "prefetch": [0],
    "bucket_bytes": [0],
    "comm.params": ["int8", "int4"],
    "comm.grads": ["int8", "int4"],
    "comm.secondary_shard": ["host", 2],
    "accumulate": [4],
    "clip": [1.0],
    "sync_buffers": [False],
    "custom_optimizer": [True],
    "step_in_backward": [True],
    "device": ["cpu", "cuda:0"],
}
CHOICES: list[tuple[str, Any]] = [(name, value) for name, values in VALUES.items() for value in values]
BASES: list[dict[str, Any]] = [
    {},
    {"stage": 1},
    {"stage": 2},
    {"offload.optimizer": "cpu"},
    {"precision.param": "bf16"},
    {"precision.param": "fp16"},
    {"offload.params": "nvme"},
    {"offload.grads": "nvme", "accumulate": 4},
]
SAMPLES = 4000


def config_of(chosen: dict[str, Any], folder: str = "/tmp") -> Any:
    """Return zeropp.Config with these values, each at its dotted path."""
    import zeropp

    sections: dict[str, dict[str, Any]] = {"precision": {}, "offload": {}, "comm": {}}
    fields: dict[str, Any] = {}
    for name, value in chosen.items():
        section, _, key = name.partition(".")
        (sections[section] if key else fields)[key or section] = value
    if "nvme" in sections["offload"].values():
        sections["offload"]["path"] = folder
    for name, kind in (("precision", zeropp.Precision), ("offload", zeropp.Offload), ("comm", zeropp.Comm)):
        if sections[name]:
            fields[name] = kind(**sections[name])
    return zeropp.Config(**fields)


def verdict(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return type(error).__name__[0]
    return "."


def of_pairs() -> dict[str, str]:
    """Return a line for each base and first value: its verdicts with the second values, in order. Values of one option replace each other."""
    found = {}
    for base, (name, value) in itertools.product(BASES, CHOICES):
        pairs = [{**base, name: value, other: its_value} for other, its_value in CHOICES]
        found[f"{base} {name}={value!r}"] = "".join(verdict(functools.partial(config_of, pair)) for pair in pairs)
    return found


def of_samples() -> dict[str, str]:
    """Return verdicts of random choices of three to six values."""
    draw = random.Random(19)
    letters = []
    for _ in range(SAMPLES):
        chosen = dict(draw.sample(CHOICES, draw.randint(3, 6)))
        letters.append(verdict(functools.partial(config_of, chosen)))
    return {f"{SAMPLES} samples": "".join(letters)}


class Own(torch.optim.SGD):
    """An optimizer that zeropp does not know."""

    def step(self, closure: Any = None) -> None:
        return None


def _optimizers() -> dict[str, Any]:
    import zeropp.optim as ours
    from torch import optim

    return {
        "none": None,
        "AdamW": optim.AdamW,
        "Adam": optim.Adam,
        "Lion": ours.Lion,
        "Adagrad": optim.Adagrad,
        "SGD": lambda p: optim.SGD(p, lr=0.1),
        "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        "RMSprop": optim.RMSprop,
        "LBFGS": optim.LBFGS,
        "LAMB": ours.LAMB,
        "OneBitAdam": lambda p: ours.OneBitAdam(p, freeze_step=3),
        "ZeroOneAdam": ours.ZeroOneAdam,
        "ZeroOneAdam, local steps": lambda p: ours.ZeroOneAdam(p, local_step_clipper=1),
        "OneBitLamb": lambda p: ours.OneBitLamb(p, freeze_step=3),
        "Muon": lambda p: ours.Muon([{"params": list(p)}]),
        "torch's Muon": lambda p: optim.Muon([one for one in p if one.ndim == 2]),
        "own": lambda p: Own(p, lr=0.1),
        "differentiable": lambda p: optim.AdamW(p, differentiable=True),
    }


def _prepared(make: Any, config: Any, dtype: torch.dtype) -> str:
    """Return verdicts: of prepare, and of what is asked of the prepared pair."""
    import zeropp

    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False, dtype=dtype) for _ in range(3)))
    model[1].weight.requires_grad_(False)
    trained = [p for n, p in model.named_parameters() if p.requires_grad and not n.startswith(config.ignored or "none")]
    try:
        optimizer = None if make is None else make(trained)
    except Exception as error:
        return type(error).__name__
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = verdict(lambda: zeropp.prepare(model, optimizer, config))
        if first != ".":
            return first
        asked = (
            lambda: zeropp.offload_states(optimizer=optimizer, to="nvme", path=folder),
            lambda: zeropp.offload_states(optimizer=optimizer, to="cpu"),
            lambda: optimizer.add_param_group({"params": [model[1].weight]}),
            lambda: model[1].weight.requires_grad_(True),
            lambda: optimizer.clip_grad_norm_(1.0),
            lambda: optimizer.clip_grad_norm_(1.0, norm_type=1.0),
            lambda: optimizer.clip_grad_value_(1.0),
        )
        return "." + "".join(map(verdict, asked))


def of_optimizers() -> dict[str, str]:
    """Return a line for each optimizer, type of the model and stage: what prepare and the calls after it say, "-" where Config refuses."""
    models = [(torch.float32, 0), (torch.float32, 1), (torch.float32, 3), (torch.float64, 3)]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for (name, make), (dtype, stage) in itertools.product(_optimizers().items(), models):
            said = []
            for option, value in CHOICES:
                chosen = {"stage": stage, "device": "cpu", option: value}
                if option == "offload.delayed_update":
                    chosen["offload.optimizer"] = "cpu"
                if option == "precision.stored":
                    chosen["offload.params"] = "cpu"
                try:
                    config = config_of(chosen, folder)
                except ValueError:
                    said.append("-")
                    continue
                said.append(_prepared(make, config, dtype))
            found[f"{name}, {dtype}, stage {stage}"] = " ".join(said)
    return found


def verdicts() -> dict[str, str]:
    return {**of_pairs(), **of_samples(), **of_optimizers()}


if __name__ == "__main__":
    text = json.dumps(verdicts(), indent=0) + "\n"
    if "--print" in sys.argv:
        print(text)
    else:
        RECORD.write_text(text)
