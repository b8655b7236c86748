# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama, byte by byte, with Hugging Face's Trainer; no hub, no download.

With zeropp it differs from an ordinary Trainer script in the one import line below, and takes one more flag:

    torchrun --nproc-per-node 2 examples/hf_causal_lm.py --output_dir out/hf --zeropp '{"stage": 3}'
"""

from dataclasses import dataclass, field

import torch
from text import Text
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, set_seed
from zeropp.hf import Trainer, TrainingArguments  # in place of: from transformers import Trainer, TrainingArguments


@dataclass
class ModelArguments:
    width: int = field(default=128, metadata={"help": "hidden size"})
    layers: int = field(default=4, metadata={"help": "decoder layers"})
    context: int = field(default=64, metadata={"help": "bytes a sequence"})
    data: str | None = field(default=None, metadata={"help": "folder or file; default: Python's own source"})


class Windows(torch.utils.data.Dataset):
    """Sequences as consecutive windows of the text."""

    def __init__(self, text: torch.Tensor, context: int, count: int) -> None:
        self.text, self.context = text, context
        self.count = min(count, len(text) // context)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.text[index * self.context : (index + 1) * self.context].long()
        return {"input_ids": tokens, "labels": tokens}


arguments, sizes = HfArgumentParser((TrainingArguments, ModelArguments)).parse_args_into_dataclasses()
set_seed(arguments.seed)
text = Text(sizes.data)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256, hidden_size=sizes.width, intermediate_size=3 * sizes.width, num_hidden_layers=sizes.layers,
        num_attention_heads=4, max_position_embeddings=sizes.context,
    )
)  # fmt: skip
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Windows(text.train, sizes.context, 100_000),
    eval_dataset=Windows(text.validation, sizes.context, 256),
)
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
trainer.log_metrics("eval", trainer.evaluate())
trainer.save_model()
