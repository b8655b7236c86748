# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention in Hugging Face models: ``attn_implementation="zeropp"``.

transformers calls one function for the attention of a layer and one for the mask of all layers; :func:`register` makes both known under
the name "zeropp". Without the second one transformers would hand on no mask at all, and padding would be attended to.

Patterns follow positions in the key cache, so decoding sees for each token what one pass over the whole sequence sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.config import Config, wrong
from zeropp.config.attention import check_attention
from zeropp.errors import ConfigError
from zeropp.ops.block_sparse import SparseLayout, sparse_attention
from zeropp.ops.patterns import Dense, Pattern, from_section

NAME = "zeropp"
_PATTERN = "zeropp_pattern"  # of a model's attention modules
_WAY = 'leave the model at attn_implementation="sdpa", and Efficiency.attention at None'
#: Keyword arguments of a layer's attention that stand for scores changed in a way that these kernels do not know.
_REFUSED = {
    "sliding_window": "a sliding window of its own; zeropp.nn.Local(window=...) is one, in a model whose config has none",
    "softcap": "capped scores",
    "position_bias": "biased scores",
    "s_aux": "attention sinks",
    "output_attentions": 'the weights as a result, which are never made; attn_implementation="eager" gives them',
}


def sparsify_attention(model: nn.Module, patterns: Any, *, seed: int = 1234) -> nn.Module:
    """Let a Hugging Face model compute the blocks of patterns only; ``zeropp.Config(efficiency=...)`` does it at ``prepare``.

        model = AutoModelForCausalLM.from_pretrained(path)
        zeropp.nn.sparsify_attention(model, zeropp.nn.BigBird(block=64, window=9))

    Nothing of the model's parameters changes. Whether attention is causal is the model's: a causal one never looks ahead.

    Args:
        model: a transformers model, or a module around one.
        patterns: a pattern of :mod:`zeropp.nn` for all layers; or a mapping of layers' numbers, from 0, to patterns, in which a layer
            that is left out computes all scores, with torch's ``scaled_dot_product_attention``, as :class:`zeropp.nn.Dense` does. A
            section ``sparse_attention`` of DeepSpeed's JSON may stand for a pattern.
        seed: what the random blocks of such a section are drawn from.

    Returns:
        ``model`` itself.

    Raises:
        zeropp.ConfigError: the model's attention is none that this can replace, or a layer's number is not one of the model's.
    """
    path = "zeropp.nn.sparsify_attention"
    patterns = check_attention(patterns, path)
    check_model(model, patterns, path)
    _install(model, patterns, seed)
    return model


def check(model: nn.Module, config: Config) -> None:
    """Refuse a model that ``Efficiency.attention`` does not fit, before anything is partitioned."""
    assert config.efficiency is not None
    check_model(model, config.efficiency.attention, "Config.efficiency.attention")


def attach(model: nn.Module, engine: Any) -> None:
    """Give each layer its pattern, and the model the attention."""
    _install(model, engine.config.efficiency.attention, engine.config.efficiency.seed)


def check_model(model: nn.Module, patterns: Any, path: str) -> None:
    """Raise zeropp.ConfigError where ``patterns``, as check_attention gives them, cannot be put into ``model``."""
    if _has_its_own(model):
        return
    layers = layers_of(model)
    named = type(model).__name__
    if not layers or not models_of(model):
        raise ConfigError(
            f"{path}: {named} has no attention of transformers' interface; wanted a transformers model whose layers ask "
            "AttentionInterface, or zeropp.nn.SparseAttention in a model of your own"
        )
    for one in models_of(model):
        _check_config(one, path)
    unknown = sorted(set(patterns) - set(layers)) if _is_by_layer(patterns) else []
    if unknown:
        raise wrong(f"{path}[{unknown[0]}]", patterns[unknown[0]], f"layers from 0 to {max(layers)} of {named}")
    for layer, modules in layers.items():
        pattern = _pattern_of(patterns, layer, 0)
        if pattern is not None and pattern.causal and not all(module.is_causal for module in modules):
            raise wrong(f"{path}[{layer}]", pattern, f"causal=False: the attention of {named} is not causal")


def _has_its_own(model: nn.Module) -> bool:
    """True for a model that was built with DeepSpeed's SparseSelfAttention: it has its patterns already."""
    return any(hasattr(module, "sparsity_config") for module in model.modules())


def _check_config(model: Any, path: str) -> None:
    theirs = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    kinds = set(getattr(theirs, "layer_types", None) or ())
    sliding = getattr(theirs, "sliding_window", None) and (not kinds or kinds != {"full_attention"})
    reasons = {
        "an encoder and a decoder": getattr(model.config, "is_encoder_decoder", False),
        f"sliding windows (sliding_window={getattr(theirs, 'sliding_window', None)})": sliding,
        f"layers of the types {', '.join(sorted(kinds))}": kinds - {"full_attention"},
        "capped scores (attn_logit_softcapping)": getattr(theirs, "attn_logit_softcapping", None),
        "output_attentions=True": getattr(theirs, "output_attentions", False),
        "attention that set_attn_implementation cannot replace": not model._can_set_attn_implementation(),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(
                f"{path}: {type(model).__name__} has {reason}, which sparse attention does not do; {_WAY}"
            )


def models_of(model: nn.Module) -> list[Any]:
    """Return the transformers models in ``model`` that are not part of another one."""
    found: list[Any] = []
    for module in model.modules():
        if hasattr(module, "set_attn_implementation") and not any(
            module is part for whole in found for part in whole.modules()
        ):
            found.append(module)
    return found


def layers_of(model: nn.Module) -> dict[int, list[Any]]:
    """Return the modules of self-attention, by the number of their layer."""
    found: dict[int, list[Any]] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and isinstance(getattr(module, "is_causal", None), bool):
            found.setdefault(layer, []).append(module)
    return found


def _is_by_layer(patterns: Any) -> bool:
    return isinstance(patterns, Mapping) and "mode" not in patterns


def _pattern_of(patterns: Any, layer: int, seed: int) -> Pattern | None:
    if _is_by_layer(patterns):
        patterns = patterns.get(layer)
    if isinstance(patterns, Mapping):
        return from_section(patterns, seed)
    return patterns  # type: ignore[no-any-return]


def _install(model: nn.Module, patterns: Any, seed: int) -> None:
    if _has_its_own(model):
        return
    register()
    for layer, modules in layers_of(model).items():
        pattern = _pattern_of(patterns, layer, seed) or Dense()
        for module in modules:
            setattr(module, _PATTERN, dataclasses.replace(pattern, causal=module.is_causal))
    for one in models_of(model):
        one.set_attn_implementation(NAME)


# --- what transformers calls -----------------------------------------------------------------------------------------
def register() -> None:
    """Make ``attn_implementation="zeropp"`` known to transformers, which is imported here: it takes seconds."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, seen_keys)


def seen_keys(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, mask_function: Any = None,
    attention_mask: Tensor | None = None, device: Any = None, **_: Any,
) -> Tensor | None:  # fmt: skip
    """Return (batch, keys) bool, the keys that are no padding, up to the last query's position; None: all of them are seen.

    transformers calls it once a forward. Causality and the layer's pattern are added by :func:`attend`.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function not in (causal_mask_function, bidirectional_mask_function) or int(kv_offset):
        raise ConfigError(
            'attn_implementation="zeropp": this model, or this batch, has a mask beyond causality and padding (a sliding window, '
            "several sequences packed into a row, an image's tokens), which sparse attention does not know; pad each sequence to a "
            f"row of its own, or {_WAY}"
        )
    last = int(q_offset) + q_length if mask_function is causal_mask_function else kv_length
    if attention_mask is None:
        return None if last == kv_length else torch.ones(batch_size, last, dtype=torch.bool, device=device)
    seen = attention_mask[:, :last].bool()
    return nn.functional.pad(seen, (0, last - seen.shape[1]))  # keys that a mask says nothing about are padding


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the attention of one layer, (batch, queries, heads, dim), and no weights.

    Args:
        module: the layer's attention, which has its pattern.
        query: (batch, heads, queries, dim), at the last positions of the keys that the mask has.
        key: (batch, kv_heads, keys, dim).
        value: the same.
        attention_mask: what :func:`seen_keys` returned.
        dropout: the share of weights that are dropped.
        scaling: of the scores; None: 1 / sqrt(dim).
        is_causal: in place of the module's own.
        others: whatever else transformers hands on.

    Raises:
        zeropp.ConfigError: the layer asks for what sparse attention does not do, or has no pattern.
    """
    for name, why in _REFUSED.items():
        if others.get(name) not in (None, False):
            raise ConfigError(
                f'attn_implementation="zeropp": {type(module).__name__} asks for {name}: {why}; or {_WAY}'
            )
    pattern = getattr(module, _PATTERN, None)
    if pattern is None:
        raise ConfigError(
            f'attn_implementation="zeropp": {type(module).__name__} has no pattern; give the model one by '
            "zeropp.nn.sparsify_attention(model, zeropp.nn.Longformer(block=64)), or by "
            "zeropp.Config(efficiency=zeropp.Efficiency(attention=...)) and zeropp.prepare"
        )
    causal = pattern.causal if is_causal is None else is_causal
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise ConfigError(
                f'attn_implementation="zeropp": attention_mask has shape {tuple(attention_mask.shape)}; wanted (batch, keys), '
                f"1 for tokens and 0 for padding; or {_WAY}"
            )
        last = attention_mask.shape[1]
        key, value = key[:, :, :last], value[:, :, :last]  # a static cache has room for more
    if value.shape[3] != query.shape[3] or (not causal and key.shape[2] != query.shape[2]):
        raise ConfigError(
            f'attn_implementation="zeropp": {type(module).__name__} looks with {tuple(query.shape)} at keys {tuple(key.shape)} and '
            f"values {tuple(value.shape)}; wanted heads of one width, and self-attention; {_WAY}"
        )
    if isinstance(pattern, Dense):
        return _all_scores(module, query, key, value, attention_mask, dropout, scaling, causal), None
    if pattern.causal != causal:
        pattern = dataclasses.replace(pattern, causal=causal)
    layout = _layout(pattern, query.shape[1], key.shape[2])
    out = sparse_attention(
        query, key, value, layout, causal=causal, scale=scaling, key_mask=attention_mask, dropout=dropout
    )
    return out.transpose(1, 2).contiguous(), None


def _make_layout(pattern: Pattern, heads: int, seq: int) -> SparseLayout:
    return pattern.layout(heads, seq, growing=True)


_layout: Callable[[Pattern, int, int], SparseLayout] = torch.compiler.assume_constant_result(_make_layout)


def _all_scores(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, dropout: float,
    scaling: float | None, causal: bool,
) -> Tensor:  # fmt: skip
    """Return what attn_implementation="sdpa" computes, bit for bit."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    mask = sdpa_mask(
        batch_size=query.shape[0], q_length=query.shape[2], kv_length=key.shape[2], q_offset=key.shape[2] - query.shape[2],
        mask_function=causal_mask_function if causal else bidirectional_mask_function, attention_mask=seen,
        allow_is_causal_skip=causal, allow_is_bidirectional_skip=not causal, device=query.device,
    )  # fmt: skip
    out: Tensor = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal
    )[0]
    return out
