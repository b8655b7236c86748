# SPDX-License-Identifier: Apache-2.0
"""Models with fewer experts against the same model that may not choose the others; models joined; both saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zeropp import ConfigError, moe
from zeropp.moe.balance import experts_of

transformers = pytest.importorskip("transformers")
EXPERTS, CLASSES = 8, 64
SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=CLASSES)
GROUPED = dict(num_key_value_heads=2, head_dim=8, num_experts_per_tok=2, initializer_range=0.2)
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": dict(**SMALL, **GROUPED, num_local_experts=EXPERTS),
    "Qwen3Moe": dict(**SMALL, **GROUPED, num_experts=EXPERTS, moe_intermediate_size=16, norm_topk_prob=True),
    "GptOss": dict(
        **SMALL, **GROUPED, num_local_experts=EXPERTS,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "DeepseekV3": dict(
        **SMALL, moe_intermediate_size=16, num_key_value_heads=4, n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8,
        n_shared_experts=1, initializer_range=0.2,
    ),
    "NemotronH": dict(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=CLASSES,
        layers_block_type=["moe", "attention", "moe"], n_routed_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16, n_group=1, topk_group=1, initializer_range=0.2,
    ),
}  # fmt: skip


def model_of(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def ids() -> Tensor:
    return torch.randint(0, CLASSES, (2, 12), generator=torch.Generator().manual_seed(1))


def loads_again(made: Any, folder: Path) -> None:
    made.save_pretrained(folder)
    loaded, info = type(made).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(loaded.eval()(input_ids=ids()).logits, made(input_ids=ids()).logits)


def shut(model: nn.Module, kept: dict[str, Tensor]) -> None:
    """Let the routers choose among the kept experts alone, by a bias that no score outweighs."""
    for name, experts in kept.items():
        router = model.get_submodule(name.rpartition(".")[0])
        router = getattr(router, "gate", None) or router.router  # type: ignore[assignment]
        others = torch.full((EXPERTS,), -1e9).index_fill(0, experts, 0.0)
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.copy_(others)  # type: ignore[operator, union-attr]
        else:
            _bias_linear(router, others)


def _bias_linear(router: nn.Module, others: Tensor) -> None:
    plain = nn.functional.linear

    def forward(tokens: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return plain(tokens, weight, others if bias is None else bias + others)

    class Functional:
        linear = staticmethod(forward)

        def __getattr__(self, name: str) -> Any:
            return getattr(nn.functional, name)

    own = type(router).forward
    own = getattr(own, "__wrapped__", own)

    def call(*args: Any, **kwargs: Any) -> Any:
        space, before = own.__globals__, own.__globals__["F"]
        space["F"] = Functional()
        try:
            return own(router, *args, **kwargs)
        finally:
            space["F"] = before

    router.forward = call  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", MODELS)
def test_a_pruned_model_is_the_model_without_the_other_experts(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    moe.load(model)
    model(input_ids=ids())
    load = moe.load(model)
    pruned = moe.prune(model, 4, load)
    loads_again(pruned, tmp_path)
    kept = {}
    for name, count in load.items():
        parts = count.view(2, 4) if kind == "DeepseekV3" else count.view(1, EXPERTS)
        best = [sorted(range(len(part)), key=lambda e: (-int(part[e]), e))[: 4 // len(parts)] for part in parts]
        kept[name] = torch.tensor(sorted(e + 4 * g for g, part in enumerate(best) for e in part))
        ours, theirs = pruned.get_submodule(name), model.get_submodule(name)
        for (which, value), old in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(value, old[kept[name]]), f"{name}.{which}"
    shut(model, kept)
    want = model(input_ids=ids()).logits
    # The same operations on the same values; a softmax over fewer experts and products in other groups round otherwise.
    assert (pruned(input_ids=ids()).logits - want).abs().max().item() <= 1e-4 * want.abs().max().item()


@pytest.mark.parametrize("kind", ["Qwen3Moe", "DeepseekV3"])
def test_aggregated_models_have_all_experts(kind: str, tmp_path: Path) -> None:
    models = [model_of(kind, seed) for seed in range(2)]
    joined = moe.aggregate(models)
    loads_again(joined, tmp_path)
    states = [one.state_dict() for one in models]
    grown = 0
    for name, value in joined.state_dict().items():
        a, b = states[0][name], states[1][name]
        if value.shape == a.shape:
            assert torch.equal(value, ((a.double() + b.double()) / 2).to(a.dtype)), name
        else:
            grown += 1
            assert torch.equal(value, torch.cat([a, b])), name
    assert grown == len(experts_of(joined)) * (4 if kind == "DeepseekV3" else 3)
    again = moe.prune(joined, EXPERTS, {name: torch.arange(2 * EXPERTS).flip(0) for name in experts_of(joined)})
    if kind == "Qwen3Moe":  # those of the first model had the most tokens
        assert torch.equal(
            again.state_dict()["model.layers.1.mlp.gate.weight"], states[0]["model.layers.1.mlp.gate.weight"]
        )


def test_misuse_is_refused() -> None:
    model = model_of("Mixtral")
    load = moe.load(model)
    first = next(iter(load))
    for keep, given, sentence in (
        (1, load, r"keep: 1 is not allowed; wanted 2 \(experts a token\) to 8"),
        (9, load, r"keep: 9 is not allowed; wanted 2"),
        (0, load, r"keep: 0 is not allowed"),
        (4, {}, rf"load\['{first}'\] is missing"),
        (4, {**load, first: torch.zeros(3)}, r"has shape \(3,\); wanted \(8,\)"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            moe.prune(model, keep, given)
    grouped = model_of("DeepseekV3")
    with pytest.raises(ConfigError, match="keep: 5 is not allowed; wanted a multiple of 2, the groups of experts"):
        moe.prune(grouped, 5, moe.load(grouped))
    with pytest.raises(ConfigError, match="prune: Linear is no transformers' model with experts"):
        moe.prune(nn.Linear(2, 2), 1, {})
    with pytest.raises(ConfigError, match="aggregate: 1 models given; wanted at least two"):
        moe.aggregate([model])
    with pytest.raises(
        ConfigError, match="model 1 is a DeepseekV3ForCausalLM with other tensors; wanted a MixtralForCausalLM"
    ):
        moe.aggregate([model, grouped])
    wider = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**{**MODELS["Mixtral"], "intermediate_size": 56})
    )
    with pytest.raises(
        ConfigError, match=r"model 1 has '.*experts.gate_up_proj' of shape \(8, 112, 32\); wanted \(8, 96, 32\)"
    ):
        moe.aggregate([model, wider])
