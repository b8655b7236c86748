# SPDX-License-Identifier: Apache-2.0
"""Optimise a policy (GRPO) of a small model with TRL's GRPOTrainer: policy and reference are partitioned, and
gathered once for each generation. With zeropp it differs from an ordinary script in the line with TrainerFor and ArgumentsFor:

    torchrun --nproc-per-node 2 examples/trl_grpo.py --zeropp '{"stage": 3}'
"""

import argparse
import json
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_text import byte_tokenizer, lines, small_model
from zeropp.hf import ArgumentsFor, TrainerFor

GRPOTrainer, GRPOConfig = TrainerFor(GRPOTrainer), ArgumentsFor(GRPOConfig)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--zeropp", default='{"stage": 3}', help="a configuration: a file, or JSON text")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--data", help="folder or file; default: Python's own source")
parser.add_argument("--folder", type=Path, default=Path("out/trl_grpo"))
args = parser.parse_args()


def lower_case(completions: list[str], **more: object) -> list[float]:
    """Return the share of lower-case letters, a reward without a reward model."""
    return [sum("a" <= letter <= "z" for letter in one) / max(1, len(one)) for one in completions]


trainer = GRPOTrainer(
    model=small_model(args.folder),
    args=GRPOConfig(
        output_dir=str(args.folder), zeropp=args.zeropp, max_steps=args.steps, per_device_train_batch_size=8,
        num_generations=4, max_completion_length=12, beta=0.02, learning_rate=2e-3, logging_steps=2, bf16=False,
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, gradient_checkpointing=False,
    ),
    train_dataset=Dataset.from_dict({"prompt": lines(400, args.data)}),
    processing_class=byte_tokenizer(),
    reward_funcs=lower_case,
)  # fmt: skip
trainer.train()
trainer.save_model(str(args.folder / "final"))
if trainer.is_world_process_zero():
    for row in trainer.state.log_history:
        if "reward" in row:
            print(json.dumps({"step": row["step"], "reward": round(row["reward"], 4), "kl": round(row["kl"], 5)}))
