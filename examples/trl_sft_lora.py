# SPDX-License-Identifier: Apache-2.0
"""Fine-tune adapters (LoRA) of a small model with TRL's SFTTrainer; its frozen weights are partitioned too. With zeropp
it differs from an ordinary script in the two lines with TrainerFor and ArgumentsFor:

    torchrun --nproc-per-node 2 examples/trl_sft_lora.py --zeropp '{"stage": 3}'
"""

import argparse
import json
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
from trl_text import byte_tokenizer, lines, small_model
from zeropp.hf import ArgumentsFor, TrainerFor

SFTTrainer, SFTConfig = TrainerFor(SFTTrainer), ArgumentsFor(SFTConfig)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--zeropp", default='{"stage": 3}', help="a configuration: a file, or JSON text")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--data", help="folder or file; default: Python's own source")
parser.add_argument("--folder", type=Path, default=Path("out/trl_sft_lora"))
args = parser.parse_args()

trainer = SFTTrainer(
    model=small_model(args.folder),
    args=SFTConfig(
        output_dir=str(args.folder), zeropp=args.zeropp, max_steps=args.steps, per_device_train_batch_size=8,
        learning_rate=2e-3, max_length=80, logging_steps=2, gradient_checkpointing=True, bf16=False, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"text": lines(2000, args.data)}),
    processing_class=byte_tokenizer(),
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"),
)  # fmt: skip
trainer.train()
trainer.save_model(str(args.folder / "final"))
if trainer.is_world_process_zero():
    for row in trainer.state.log_history:
        if "loss" in row:
            print(json.dumps({"step": row["step"], "loss": row["loss"], "held_bytes": row["zeropp/held_bytes"]}))
