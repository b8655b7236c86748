# SPDX-License-Identifier: Apache-2.0
"""Requirements of transformers for DeepSpeed under its Trainer, on one rank and a straight line: the cases of its
tests/trainer/distributed/test_trainer_distributed_deepspeed.py, written anew. This script does not mention zeropp:
regression_script.py FOLDER [CASE...]."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled
from transformers.trainer_utils import get_last_checkpoint

FOLDER = Path(sys.argv[1])
SECTIONS: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 2000, "wall_clock_breakdown": False,
}  # fmt: skip
STAGES = {
    2: {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"},
    3: {
        "stage": 3, "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}  # fmt: skip
runs = 0


class LineConfig(transformers.PretrainedConfig):
    def __init__(self, hidden_size: int = 1, **more: Any) -> None:
        super().__init__(**more)
        self.hidden_size = hidden_size


class Line(transformers.PreTrainedModel):
    config_class = LineConfig

    def __init__(self, config: LineConfig) -> None:
        super().__init__(config)
        self.a, self.b = (torch.nn.Parameter(torch.tensor(0.0)) for _ in range(2))
        self.post_init()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * self.a + self.b
        return torch.nn.functional.mse_loss(y, labels.to(y.dtype)), y


def keys(stage: int, **more: Any) -> dict[str, Any]:
    found = {**copy.deepcopy(SECTIONS), "zero_optimization": {**STAGES[stage], **more.pop("zero", {})}, **more}
    return {name: value for name, value in found.items() if value is not None}


def arguments(config: Any = None, **more: Any) -> transformers.TrainingArguments:
    global runs
    runs += 1
    more.setdefault("output_dir", str(FOLDER / f"run-{runs}"))
    return transformers.TrainingArguments(
        deepspeed=config, report_to="none", disable_tqdm=True, per_device_train_batch_size=more.pop("batch", 8), **more
    )


def trainer(config: Any, rows: int = 64, **more: Any) -> transformers.Trainer:
    draw = torch.Generator().manual_seed(42)
    x = torch.randn(rows, generator=draw)
    y = 2 * x + 3 + 0.1 * torch.randn(rows, generator=draw)
    data = [{"x": one, "labels": other} for one, other in zip(x, y, strict=True)]
    model = Line(LineConfig())
    return transformers.Trainer(model, arguments(config, **more), train_dataset=data, eval_dataset=data[:8])


def line(one: transformers.Trainer) -> list[float]:
    """There: read as they are, because DeepSpeed keeps small parameters whole at stage 3 too."""
    return line_of(one.model)


def line_of(model: Any) -> list[float]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [model.a.item(), model.b.item()]


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing"


# -- cases, by the names that they have there ---------------------------------------------------------------------------------


def test_hf_ds_config_mismatch() -> Any:
    """All that differs is in one error."""
    config = keys(
        2, train_micro_batch_size_per_gpu=4, train_batch_size=1000, gradient_accumulation_steps=4, gradient_clipping=1.1
    )
    config["optimizer"]["params"]["betas"] = [0.8, 0.89]
    config["fp16"]["enabled"] = False
    more = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.99, "fp16": True}
    text = said(lambda: trainer(config, batch=2, **more).train())
    wanted = (
        "per_device_train_batch_size", "train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "betas", "fp16",
    )  # fmt: skip
    assert all(one in text for one in wanted), text


def test_auto_value_resolution() -> Any:
    args = arguments(keys(2), learning_rate=3e-4, batch=4, gradient_accumulation_steps=2, bf16=True)
    found = args.hf_deepspeed_config.config
    assert (found["train_micro_batch_size_per_gpu"], found["train_batch_size"], args.deepspeed_plugin.zero_stage) == (
        4,
        8,
        2,
    )
    assert found["optimizer"]["params"]["lr"] == 3e-4 and found["bf16"]["enabled"] and not found["fp16"]["enabled"]


def test_ds_config_dtype_resolution() -> Any:
    for more, dtype in (({"bf16": True}, torch.bfloat16), ({"fp16": True}, torch.float16), ({}, torch.float32)):
        assert (
            arguments(keys(2), bf16=more.get("bf16", False), fp16=more.get("fp16", False)).hf_deepspeed_config.dtype()
            == dtype
        )


def test_ds_config_file_path_vs_dict_equivalent() -> Any:
    (FOLDER / "three.json").write_text(json.dumps(keys(3)))
    one, other = arguments(keys(3)), arguments(str(FOLDER / "three.json"))
    assert one.hf_deepspeed_config.config == other.hf_deepspeed_config.config


def test_ds_config_no_optimizer_no_scheduler() -> Any:
    one = trainer(keys(2, optimizer=None, scheduler=None), fp16=True)
    assert not {"optimizer", "scheduler"} & set(one.args.hf_deepspeed_config.config)
    one.train()


def test_ds_config_auto_vs_missing_fields() -> Any:
    none = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping", "gradient_accumulation_steps")
    )
    found = arguments(keys(2, **none), gradient_accumulation_steps=2).hf_deepspeed_config.config
    assert not {"train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping"} & set(found)
    assert found.get("gradient_accumulation_steps", 1) != 2


def test_mixed_precision_model_and_optimizer_dtypes() -> Any:
    """There: names of DeepSpeed's own optimizers; here its public accessor."""
    for stage in (2, 3):
        one = trainer(keys(stage), bf16=True)
        one.train()
        assert {p.dtype for p in one.model.parameters()} == {torch.bfloat16}
        assert {safe_get_full_fp32_param(p).dtype for p in one.model.parameters()} == {torch.float32}


def test_ds_config_object() -> Any:
    """Configurations live as long as their trainer, one after the other."""
    one = trainer(keys(3), rows=8, fp16=True)
    one.train()
    assert is_deepspeed_zero3_enabled()
    one = trainer(keys(2), rows=8, fp16=True)
    assert not is_deepspeed_zero3_enabled() and deepspeed_config()
    one.accelerator.state._reset_state()
    del one
    gc.collect()
    assert not is_deepspeed_zero3_enabled() and not deepspeed_config()


def test_basic_training() -> Any:
    for stage, low in ((2, "bf16"), (3, "fp16")):
        one = trainer(keys(stage), learning_rate=0.1, **{low: True})
        one.train()
        assert abs(line(one)[0]) > 0.5


def test_optimizer_scheduler_combos() -> Any:
    for less in ({}, {"optimizer": None}, {"scheduler": None}, {"optimizer": None, "scheduler": None}):
        one = trainer(keys(2, zero={"offload_optimizer": {"device": "none"}}, **less), bf16=True, learning_rate=1e-2)
        one.train()
        assert line(one)[0] != 0.0, less


def test_gradient_accumulation() -> Any:
    for stage, low in ((2, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp16")):
        found = []
        for batch, steps in ((16, 1), (4, 4)):
            one = trainer(keys(stage), batch=batch, gradient_accumulation_steps=steps, **{low: True})
            loss = one.train().training_loss
            found.append([*line(one), loss])
        (a, b, loss), (a_4, b_4, loss_4) = found
        assert a != 0.0 and abs(a - a_4) < 1e-4 and abs(b - b_4) < 1e-4 and (loss - loss_4) / loss <= 1e-3, found


def test_optimizer_with_cpu_offload() -> Any:
    for stage in (2, 3):
        for less in ({}, {"optimizer": None, "zero_force_ds_cpu_optimizer": False}):
            trainer(keys(stage, zero={"offload_optimizer": {"device": "cpu"}}, **less), bf16=True).train()


def test_stage3_nvme_offload() -> Any:
    disk = {"device": "nvme", "nvme_path": str(FOLDER / "disk")}
    one = trainer(keys(3, zero={"offload_optimizer": disk, "offload_param": disk}), fp16=True)
    one.train()
    one.save_model()
    assert (Path(one.args.output_dir) / "model.safetensors").exists()


def test_early_get_last_lr() -> Any:
    """The first step is skipped for its overflow, and logged all the same."""
    one = trainer(
        keys(2, fp16={**SECTIONS["fp16"], "initial_scale_power": 32}),
        rows=8,
        fp16=True,
        logging_steps=1,
        num_train_epochs=1,
    )
    one.train()
    assert line(one)[0] == 0.0 and "learning_rate" in one.state.log_history[0]


def test_save_checkpoints() -> Any:
    """There: names of DeepSpeed's files; here the folder that Trainer looks for, and zeropp's."""
    for stage in (2, 3):
        one = trainer(keys(stage), save_steps=5, bf16=True)
        one.train()
        for step in range(5, 24, 5):
            folder = Path(one.args.output_dir) / f"checkpoint-{step}"
            wanted = ("model.safetensors", "training_args.bin", "trainer_state.json", "config.json", "latest")
            assert all((folder / name).is_file() for name in wanted), list(folder.iterdir())
            assert list((folder / f"global_step{step}").rglob("manifest.json"))
        last = get_last_checkpoint(one.args.output_dir)
        trainer(keys(stage), save_steps=5, bf16=True, output_dir=one.args.output_dir).train(resume_from_checkpoint=last)


def test_can_resume_training_errors() -> Any:
    for stage in (2, 3):
        one = trainer(keys(stage), bf16=True)
        assert "No valid checkpoint found in output directory" in said(lambda: one.train(resume_from_checkpoint=True))  # noqa: B023
        assert said(lambda: one.train(resume_from_checkpoint=f"{one.args.output_dir}/checkpoint-5-bogus")) != "nothing"  # noqa: B023


def test_can_resume_training_normal() -> Any:
    """Equal to the uninterrupted run, optimizer and schedule of the file or of Trainer (which upstream skips)."""
    ways = (
        (2, "bf16", {}), (3, "fp16", {}), (2, "fp16", {"optimizer": None}), (3, "bf16", {"scheduler": None}),
        (2, "bf16", {"optimizer": None, "scheduler": None}),
    )  # fmt: skip
    for stage, low, less in ways:
        config = keys(stage, **less)
        config["fp16"]["initial_scale_power"] = 1
        more = {
            "rows": 128,
            "save_steps": 5,
            "learning_rate": 0.1,
            "logging_steps": 5,
            low: True,
            "num_train_epochs": 1.2,
        }
        one = trainer(config, **more)
        one.train()
        for checkpoint in ("checkpoint-5", "checkpoint-15"):
            again = trainer(config, **more)
            again.train(resume_from_checkpoint=str(Path(one.args.output_dir) / checkpoint))
            assert line(again) == line(one), (stage, low, less, checkpoint, line(again), line(one))
            differs = {k: (v, state(one)[k]) for k, v in state(again).items() if v != state(one)[k]}
            assert not differs, (stage, low, less, checkpoint, differs)


def state(one: transformers.Trainer) -> Any:
    """Return the state without times and folders."""
    found = dataclasses.asdict(one.state)
    found.pop("best_model_checkpoint")
    times = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss")
    found["log_history"] = [{k: v for k, v in row.items() if k not in times and v == v} for row in found["log_history"]]
    return found


def test_load_state_dict_from_zero_checkpoint() -> Any:
    for stage in (2, 3):
        one = trainer(keys(stage), rows=4, num_train_epochs=1, save_steps=1, learning_rate=0.1, bf16=True)
        one.train()
        before = line(one)
        assert (
            line_of(load_state_dict_from_zero_checkpoint(one.model, get_last_checkpoint(one.args.output_dir))) == before
        )
        fresh = Line(LineConfig()).bfloat16()
        assert line_of(load_state_dict_from_zero_checkpoint(fresh, get_last_checkpoint(one.args.output_dir))) == before


def test_load_best_model() -> Any:
    for stage in (2, 3):
        more = {
            "max_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_steps": 1,
            "load_best_model_at_end": True,
        }
        one = trainer(keys(stage, optimizer=None, scheduler=None), bf16=True, learning_rate=0.1, **more)
        one.train()
        assert one.evaluate()["eval_loss"] == min(
            row["eval_loss"] for row in one.state.log_history if "eval_loss" in row
        )


def test_eval() -> Any:
    """Inference at stage 3, before and without any training; at stage 2 there is no such thing, and transformers says so."""
    assert trainer(keys(3), bf16=True).evaluate()["eval_loss"] > 1
    assert "ZeRO Stage 3" in said(lambda: trainer(keys(2), bf16=True).evaluate())


CASES = [name for name in dict(globals()) if name.startswith("test_")]

if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.training_args.is_torch_bf16_gpu_available = lambda: (
        True
    )  # it allows --bf16 on GPUs, or with --use_cpu alone
    transformers.utils.logging.set_verbosity_error()
    wrong = {}
    asked = sys.argv[2:] or CASES
    for name in asked:
        try:
            globals()[name]()
        except Exception:
            wrong[name] = traceback.format_exc()
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
    (FOLDER / "wrong.json").write_text(json.dumps({"ran": asked, "wrong": wrong}))
