# SPDX-License-Identifier: Apache-2.0
"""Small mixture-of-experts models of transformers, from configurations, and the same model in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY = 128
HEADS: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
}


def _configs() -> dict[str, tuple[str, dict[str, Any]]]:
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 4}
    two = {"num_hidden_layers": 2, "num_experts_per_tok": 2}
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8}
    return {
        "Mixtral": ("Mixtral", {**HEADS, **two, "intermediate_size": 24, "num_local_experts": 4}),
        "Qwen3Moe": ("Qwen3Moe", {
            **HEADS, **two, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8, "head_dim": 8,
            "norm_topk_prob": True,
        }),
        "GptOss": ("GptOss", {**HEADS, **two, "intermediate_size": 24, "num_local_experts": 4, "head_dim": 8}),
        "DeepseekV3": ("DeepseekV3", {
            **HEADS, **two, **latent, **groups, "num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 16,
        }),
        "NemotronH": ("NemotronH", {
            **HEADS, **mamba, "num_experts_per_tok": 2, "layers_block_type": ["moe", "attention", "moe"], "head_dim": 8,
            "intermediate_size": 48, "n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
            "n_group": 1, "topk_group": 1,
        }),
    }  # fmt: skip


def build(name: str, implementation: str = "eager") -> Any:
    """Return a model with random values, the same in every call."""
    import transformers
    import zeropp.hf  # noqa: F401  registers the implementation "zeropp"

    kind, fields = _configs()[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **fields, experts_implementation=implementation, attn_implementation="eager"
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().train()
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        for parameter in model.parameters():  # routers of some models begin with zeros, and choose by ties
            if not parameter.is_meta and not parameter.any():
                parameter.normal_(std=0.02)
    return model


def batch(step: int, rank: int, rows: int = 2, length: int = 12) -> Tensor:
    """Return the tokens of one rank at one step, (rows, length)."""
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss
