# SPDX-License-Identifier: Apache-2.0
"""Small models of four families, and what they are given, for tests of sequences that are cut over ranks."""

from __future__ import annotations

from typing import Any

import torch

TOKENS = 31
FAMILIES = {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral", "gemma": "Gemma2"}


def model(family: str, heads: int, kv_heads: int, impl: str, *, window: bool = False, layers: int = 2) -> Any:
    """Return a model with the same weights at every call."""
    import transformers

    name = FAMILIES[family]
    sizes: dict[str, Any] = dict(
        vocab_size=64, hidden_size=heads * 16, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=16, use_cache=False, attn_implementation=impl,
    )  # fmt: skip
    if window:
        sizes["sliding_window"] = 4
    elif family in ("mistral", "gemma"):
        sizes["sliding_window"] = None if family == "mistral" else 4
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))


def batch(kind: str, seed: int = 1, rows: int = 2) -> dict[str, Any]:
    """Return ids, and positions or a mask, of sequences that are plain, packed, or padded on the left."""
    ids = torch.randint(1, 64, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))
    found = {"input_ids": ids, "labels": ids.clone()}
    found["labels"][:, :9] = -100
    if "packed" in kind:
        found["position_ids"] = torch.cat([torch.arange(10), torch.arange(TOKENS - 10)])[None].expand(rows, -1)
    if kind == "padding":
        found["attention_mask"] = torch.ones(rows, TOKENS, dtype=torch.long)
        found["attention_mask"][:, :6] = 0
        found["position_ids"] = (found["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return found


def cuts(ranks: int) -> list[int]:
    """Return where each rank's uneven part of the tokens begins, and the end."""
    return [0, 13, TOKENS] if ranks == 2 else [0, 9, 14, 25, TOKENS][: ranks + 1]
