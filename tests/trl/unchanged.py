# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers in a script that does not mention zeropp: unchanged.py FOLDER [--deepspeed CFG]."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import datasets
import torch
import trl
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

LINES = [f"the number {i} comes before {i + 1} and after {i - 1}" for i in range(64)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--deepspeed")
    given = parser.parse_args()
    found = {}
    for kind, trainer_class, arguments_class, columns, more in (
        ("sft", trl.SFTTrainer, trl.SFTConfig, {"text": LINES}, {}),
        (
            "dpo",
            trl.DPOTrainer,
            trl.DPOConfig,
            {"prompt": LINES, "chosen": [" yes"] * 64, "rejected": [" no"] * 64},
            {},
        ),
    ):
        arguments = arguments_class(
            output_dir=str(given.folder / kind), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to="none",
            use_cpu=given.deepspeed is None, bf16=False, disable_tqdm=True, seed=3, save_strategy="no", learning_rate=1e-3,
            gradient_checkpointing=False, deepspeed=given.deepspeed, **more,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(given.folder / "model", dtype="float32")
        trainer = trainer_class(
            model=model, args=arguments, train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=PreTrainedTokenizerFast.from_pretrained(given.folder / "model"),
        )  # fmt: skip
        torch.manual_seed(11)
        trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row]
        found[kind] = [[float(row[name]) for name in ("loss", "grad_norm", "learning_rate")] for row in rows]
        found[f"{kind} engine"] = type(trainer.model_wrapped).__name__
    name = "stock" if given.deepspeed is None else "zeropp"
    (given.folder / f"{name}.{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
