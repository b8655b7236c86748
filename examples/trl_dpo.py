# SPDX-License-Identifier: Apache-2.0
"""Optimise preferences (DPO) of a small model with TRL's DPOTrainer: the policy and the reference model that it is held to
are both partitioned, the reference without an optimizer. With zeropp it differs from an ordinary script in the line with
TrainerFor and ArgumentsFor:

    torchrun --nproc-per-node 2 examples/trl_dpo.py --zeropp '{"stage": 3}'
"""

import argparse
import json
from pathlib import Path

from datasets import Dataset
from trl import DPOConfig, DPOTrainer
from trl_text import byte_tokenizer, lines, small_model
from zeropp.hf import ArgumentsFor, TrainerFor

DPOTrainer, DPOConfig = TrainerFor(DPOTrainer), ArgumentsFor(DPOConfig)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--zeropp", default='{"stage": 3}', help="a configuration: a file, or JSON text")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--data", help="folder or file; default: Python's own source")
parser.add_argument("--folder", type=Path, default=Path("out/trl_dpo"))
args = parser.parse_args()


def preferences(source: list[str]) -> Dataset:
    """Return pairs: the end of a line is preferred to the same letters in reverse, which needs no judge."""
    halves = [(line[:10], line[10:]) for line in source]
    return Dataset.from_dict(
        {
            "prompt": [begin for begin, _ in halves],
            "chosen": [end for _, end in halves],
            "rejected": [end[::-1] for _, end in halves],
        }
    )


trainer = DPOTrainer(
    model=small_model(args.folder),
    ref_model=small_model(args.folder),
    args=DPOConfig(
        output_dir=str(args.folder), zeropp=args.zeropp, max_steps=args.steps, per_device_train_batch_size=8,
        max_length=96, beta=0.1, learning_rate=1e-3, logging_steps=2, bf16=False, use_cpu=True, save_strategy="no",
        report_to="none", disable_tqdm=True, gradient_checkpointing=False,
    ),
    train_dataset=preferences(lines(400, args.data)),
    processing_class=byte_tokenizer(),
)  # fmt: skip
trainer.train()
trainer.save_model(str(args.folder / "final"))
if trainer.is_world_process_zero():
    for row in trainer.state.log_history:
        if "rewards/margins" in row:
            shown = {"loss": row["loss"], "margin": row["rewards/margins"], "accuracy": row["rewards/accuracies"]}
            print(json.dumps({"step": row["step"], **{name: round(float(value), 4) for name, value in shown.items()}}))
