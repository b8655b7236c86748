# SPDX-License-Identifier: Apache-2.0
"""Small models and data for Trainer, from configurations: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 96


class Rows(torch.utils.data.Dataset):
    """Arithmetic progressions modulo the vocabulary, which a small model can learn."""

    def __init__(self, count: int, seed: int, length: int = 24) -> None:
        draw = torch.Generator().manual_seed(seed)
        first = torch.randint(VOCABULARY, (count, 1), generator=draw)
        stride = torch.randint(1, 5, (count, 1), generator=draw)
        self.rows = (first + stride * torch.arange(length)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2(**more: Any) -> Any:
    """Return a GPT-2 whose embedding and head are one matrix; dropout draws random numbers."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=4, n_positions=64,
        bos_token_id=0, eos_token_id=0, **more,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def lora(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    wanted = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, wanted)


def arguments(cls: Any, folder: Path, **more: Any) -> Any:
    """Return arguments with accumulation, clipping, warm-up and decay, which could differ from DDP."""
    wanted = {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5, "learning_rate": 3e-3, "weight_decay": 0.1, "warmup_steps": 2, "logging_steps": 1,
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": [], "seed": 7, **more,
    }  # fmt: skip
    return cls(**wanted)
