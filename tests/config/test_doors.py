# SPDX-License-Identifier: Apache-2.0
"""A Config, a dict of its fields, a dict of DeepSpeed's keys, JSON text and a path are one thing at every door."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
import zeropp
from torch import nn
from zeropp.cli import main
from zeropp.zero.engine import engine_of

WANTED = zeropp.Config(stage=2, bucket_bytes=1 << 20)
FIELDS = {"stage": 2, "bucket_bytes": 1 << 20}
DEEPSPEED = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1 << 18}, "gradient_clipping": 0}


def ways(folder):
    path = folder / "c.json"
    path.write_text(json.dumps(FIELDS))
    return [WANTED, FIELDS, DEEPSPEED, {"zero_optimization": {"stage": 2}, "gradient_clipping": 0, "bucket_bytes": 1 << 20},
            json.dumps(FIELDS), path, str(path)]  # fmt: skip


def prepared(config):
    model, _ = zeropp.prepare(nn.Linear(3, 2), None, config)
    return engine_of(model).config


def initialized(config):
    model = nn.Linear(3, 2)
    zeropp.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    return engine_of(model).config


def of_accelerate(config):
    pytest.importorskip("accelerate")
    return zeropp.accelerate.ZeroppAccelerator(zeropp=config).zeropp_config


def of_lightning(config):
    pytest.importorskip("lightning")
    return zeropp.lightning.ZeroppStrategy(config=config).zeropp_config


def of_fabric(config):
    pytest.importorskip("lightning")
    return zeropp.lightning.ZeroppFabricStrategy(config=config).zeropp_config


DOORS = [prepared, initialized, of_accelerate, of_lightning, of_fabric]


@pytest.mark.parametrize("door", DOORS)
def test_every_way_to_give_one(door, tmp_path):
    for given in ways(tmp_path):
        assert door(given) == WANTED, given


def test_the_trainer_takes_a_path(tmp_path):
    pytest.importorskip("transformers")
    arguments = importlib.import_module("zeropp.hf").TrainingArguments
    for given in [one for one in ways(tmp_path) if "gradient_clipping" not in str(one)]:  # --max_grad_norm says it too
        found = arguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], zeropp=given)
        assert found.zeropp_config == WANTED
    with pytest.raises(zeropp.ConfigError, match=r"zeropp: 3, an int; wanted a path"):
        arguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], zeropp=3)


def test_estimate_and_the_command_line(tmp_path, capsys):
    model = nn.Linear(300, 200)
    wanted = zeropp.estimate(model, WANTED, ranks=2)
    for given in ways(tmp_path):
        assert zeropp.estimate(model, given, ranks=2) == wanted
    for given in ways(tmp_path)[4:]:
        assert main(["config", str(given)]) == 0
        assert "zeropp.Config(stage=2" in capsys.readouterr().out
    with pytest.raises(zeropp.ConfigError, match=r"estimate: model is 'gpt2', a str; wanted a torch.nn.Module"):
        zeropp.estimate("gpt2", ranks=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("door", [*DOORS, lambda config: zeropp.estimate(nn.Linear(2, 2), config, ranks=1)])
def test_what_is_no_configuration_is_named(door):
    for given, says in (
        (3, "3, an int"),
        ([WANTED], "list"),
        (zeropp.Config, "the class Config"),
        (zeropp.Tier(), "Tier"),
    ):
        with pytest.raises(zeropp.ConfigError) as caught:
            door(given)
        assert says in str(caught.value) and "JSON text" in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("model", "optimizer", "says"),
    [
        (nn.Linear(2, 2), "adam", "prepare: optimizer is 'adam', a str; wanted a torch.optim.Optimizer, such as"),
        (nn.Linear(2, 2), torch.optim.AdamW, "prepare: optimizer is the class AdamW; wanted"),
        (nn.Linear(2, 2), {"stage": 3}, "the configuration is the third argument"),
        (nn.Linear(2, 2), zeropp.Config(), "the configuration is the third argument"),
        (nn.Linear, None, "prepare: model is the class Linear; wanted a torch.nn.Module"),
        (None, None, "prepare: model is None; wanted a torch.nn.Module"),
        ([1], "adam", "prepare: model is [1], a list"),
    ],
)
def test_other_arguments_of_prepare(model, optimizer, says):
    with pytest.raises(zeropp.ConfigError) as caught:
        zeropp.prepare(model, optimizer)
    assert says in str(caught.value)
    if isinstance(model, nn.Module):  # and nothing was begun
        zeropp.prepare(model, torch.optim.AdamW(model.parameters()))
