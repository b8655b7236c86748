# SPDX-License-Identifier: Apache-2.0
"""The flag: every way to give a configuration, and what it says where file and arguments disagree."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install zeropp[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zeropp[hf]")

import zeropp  # noqa: E402
from zeropp.hf import ArgumentsFor, Trainer, TrainerFor, TrainingArguments  # noqa: E402


@dataclass
class Special(transformers.TrainingArguments):
    """Somebody's own arguments, as TRL's are."""

    extra: int = 5


def make(tmp_path, **more):
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **more)


def test_file_text_dict_and_config_say_the_same(tmp_path):
    keys = {"stage": 2, "bucket_bytes": 1 << 20}
    path = tmp_path / "zeropp.json"
    path.write_text(json.dumps(keys))
    wanted = zeropp.Config(stage=2, bucket_bytes=1 << 20)
    for given in (str(path), json.dumps(keys), keys, wanted):
        assert make(tmp_path, zeropp=given).zeropp_config == wanted
    assert make(tmp_path).zeropp_config is None


def test_the_command_line(tmp_path):
    parser = transformers.HfArgumentParser(TrainingArguments)
    for given in ('{"stage": 1}', str(tmp_path / "z.json")):
        (tmp_path / "z.json").write_text('{"stage": 1}')
        command = ["--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none", "--zeropp", given]
        (found,) = parser.parse_args_into_dataclasses(command)
        assert found.zeropp_config == zeropp.Config(stage=1)
    assert "--zeropp" in parser.format_help()


def test_deepspeeds_auto_values_come_from_the_arguments(tmp_path):
    keys = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    }  # fmt: skip
    found = make(tmp_path, zeropp=keys, bf16=True, gradient_accumulation_steps=4).zeropp_config
    assert found == zeropp.Config(stage=3, precision="bf16")
    assert found.accumulate == 1 and found.clip is None, "Trainer does both"


def test_all_that_differs_is_one_error(tmp_path):
    keys = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "gradient_clipping": 0.7,
        "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
    }  # fmt: skip
    with pytest.raises(zeropp.ConfigError) as caught:
        make(tmp_path, zeropp=keys)
    said = str(caught.value)
    for line in (
        "train_micro_batch_size_per_gpu is 3, and --per_device_train_batch_size is 8",
        "gradient_accumulation_steps is 2, and --gradient_accumulation_steps is 1",
        "gradient_clipping is 0.7, and --max_grad_norm is 1.0",
        "optimizer.params.lr is 1.0, and --learning_rate is 5e-05",
    ):
        assert line in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"zeropp": {"stge": 3}}, "did you mean 'stage'"),
        ({"zeropp": "nowhere.json"}, "nowhere.json: cannot be read"),
        ({"zeropp": {"stage": 3, "clip": 0.5}}, "clip is 0.5, and --max_grad_norm is 1.0"),
        ({"zeropp": {"stage": 3, "precision": "bf16"}}, "arguments without --bf16"),
        ({"zeropp": {"stage": 3, "precision": "fp16"}}, "arguments without --fp16"),
        ({"zeropp": {"stage": 3}, "auto_find_batch_size": True}, "--per_device_train_batch_size"),
        ({"zeropp": {"stage": 3, "precision": "bf16"}, "fp16": True}, "arguments without --bf16"),
        ({"zeropp": {"stage": 3, "precision": "fp32"}, "fp16": True}, "give one type"),
        ({"zeropp": {"stage": 3}, "bf16_full_eval": True}, "--bf16_full_eval does not combine with --zeropp"),
        ({"zeropp": {"zero_optimization": {"stage": 3}, "scheduler": {"type": "WarmupLR"}}}, "--lr_scheduler_type"),
        ({"zeropp": {"zero_optimization": {"stage": 3}, "optimizer": {"type": "Lamb"}}}, "choose with --optim"),
    ],
)
def test_what_cannot_be_says_why(more, said, tmp_path):
    with pytest.raises(zeropp.ConfigError, match=said.replace("(", r"\(").replace(")", r"\)")):
        make(tmp_path, **more)


def test_any_arguments_and_any_trainer(tmp_path):
    cls = ArgumentsFor(Special)
    assert cls is ArgumentsFor(Special) and ArgumentsFor(cls) is cls and TrainerFor(Trainer) is Trainer
    made = cls(output_dir=str(tmp_path), use_cpu=True, report_to=[], zeropp={"stage": 2}, extra=7)
    assert isinstance(made, Special) and made.extra == 7 and made.zeropp_config.stage == 2
    assert json.loads(made.to_json_string())["zeropp"] == {"stage": 2}
    assert issubclass(TrainerFor(transformers.Seq2SeqTrainer), transformers.Seq2SeqTrainer)


def test_arguments_pickle_by_their_base(tmp_path):
    made = make(tmp_path, zeropp=zeropp.Config(stage=1), learning_rate=0.25)
    again = pickle.loads(pickle.dumps(made))
    assert (
        type(again) is TrainingArguments and again.zeropp_config == made.zeropp_config and again.learning_rate == 0.25
    )


def test_without_the_flag_nothing_differs(tmp_path):
    class Linear(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

        def __init__(self, config):
            super().__init__(config)
            import torch

            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x)

    trainer = Trainer(model=Linear(transformers.LlamaConfig()), args=make(tmp_path))
    assert type(trainer.accelerator).__name__ == "Accelerator"
