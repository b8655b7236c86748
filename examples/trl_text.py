# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the TRL examples: a tokenizer of bytes and a small model from a configuration; nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


def byte_tokenizer() -> Any:
    """Return a tokenizer with one token a byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    plain = Tokenizer(models.BPE(vocab=words, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def small_model(folder: Path) -> Any:
    """Write a model with random weights to a folder, as if it had been downloaded: TRL reads reference models from there."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=259, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    place = folder / f"start-{os.environ.get('RANK', '0')}"
    Qwen2ForCausalLM(config).save_pretrained(place)
    return AutoModelForCausalLM.from_pretrained(place, dtype="float32")


def lines(count: int, data: str | None = None) -> list[str]:
    """Return lines of source code."""
    text = bytes(Text(data).train[: 200 * count].tolist()).decode("utf-8", errors="replace")
    return [line.strip()[:80] for line in text.splitlines() if len(line.strip()) > 20][:count]
