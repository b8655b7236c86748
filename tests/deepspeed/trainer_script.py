# SPDX-License-Identifier: Apache-2.0
"""A Trainer script that does not mention zeropp: trainer_script.py MODEL RESULT [arguments of Trainer]. The flag
``--deepspeed`` is Trainer's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """Arithmetic progressions, which a small model can learn."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        first, stride = torch.randint(96, (count, 1), generator=draw), torch.randint(1, 5, (count, 1), generator=draw)
        self.rows = (first + stride * torch.arange(24)) % 96

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trained(folder: str, arguments: TrainingArguments, resume: str | None = None) -> Trainer:
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(96, 1), eval_dataset=Rows(16, 2))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Trainer) -> list[list[float]]:
    kinds = ("loss", "grad_norm", "learning_rate", "eval_loss")
    rows = [[float(row[kind]) for kind in kinds if kind in row] for row in trainer.state.log_history]
    return [row for row in rows if row]


def main() -> None:
    folder, result, *rest = sys.argv[1:]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(rest)
    trainer = trained(folder, arguments)
    found = {
        "logged": logged(trainer),
        "deepspeed": trainer.is_deepspeed_enabled,
        "kind": type(trainer.model_wrapped).__name__,
    }
    trainer.save_model(f"{arguments.output_dir}/final")
    found["generated"] = trainer.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).tolist()
    if arguments.deepspeed:
        (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(rest)
        found["again"] = logged(trained(folder, arguments, f"{arguments.output_dir}/checkpoint-3"))
    if trainer.is_world_process_zero():
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
