# SPDX-License-Identifier: Apache-2.0
"""An Accelerator without arguments, then a Trainer, in one process: frameworks_script.py RESULT --deepspeed CFG [arguments of Trainer]."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def facts(engine: Any) -> dict[str, Any]:
    config = engine.zeropp_config
    return {
        "kind": type(engine).__name__, "stage": config.stage, "clip": config.clip, "bucket_bytes": config.bucket_bytes,
        "accumulate": config.accumulate, "dtype": config.dtype_name,
    }  # fmt: skip


def with_accelerate() -> dict[str, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)  # a model that begins near its minimum would not improve
    model = torch.nn.Linear(4, 1)
    rows = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 1))
    made = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), torch.utils.data.DataLoader(rows, 4)
    )
    engine, optimizer, loader = made
    losses = []
    for x, y in loader:
        with accelerator.accumulate(engine):
            loss = torch.nn.functional.mse_loss(engine(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return {**facts(engine), "losses": losses, "steps": engine.global_steps}


def with_trainer(words: list[str]) -> dict[str, Any]:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
    )
    row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=[row] * 8)
    trainer.train()
    return {**facts(trainer.model_wrapped), "steps": trainer.state.global_step}


if __name__ == "__main__":
    found = {"accelerate": with_accelerate()}
    AcceleratorState._reset_state(True)
    found["trainer"] = with_trainer(sys.argv[2:])
    Path(sys.argv[1]).write_text(json.dumps(found))
