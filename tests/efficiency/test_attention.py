# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in Hugging Face models, against transformers' own attention with the same mask written out.

Logits of these models are sums of up to 64 products of numbers about 1 in fp32, through up to three layers: a relative 1e-5.
"""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
import zeropp
from ranks import on_ranks
from torch import Tensor
from zeropp import Config, ConfigError, Efficiency, nn

SEQ, VOCABULARY = 100, 96
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
PATTERNS = {
    "local": nn.Local(block=16, window=3),
    "fixed": nn.Fixed(block=16, window=4, global_last=2, patterns=2),
    "bigbird": nn.BigBird(block=16, random=2, per_head=True),
    "fixed, global rows": nn.Fixed(block=16, window=3, global_rows=True),
    "variable": nn.Variable(block=16, windows=(1, 2), global_blocks=(1,), random=1),
    "mixed": {0: nn.Longformer(block=32, window=1), 2: {"mode": "fixed", "num_local_blocks": 2}},
}


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=256, **more,
        )
    ).eval()  # fmt: skip


def bert(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(
        transformers.BertConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCABULARY, **more
        )
    ).eval()  # fmt: skip


def tokens(seq: int = SEQ, batch: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, seq), generator=torch.Generator().manual_seed(seq))


def padded(seq: int = SEQ) -> Tensor:
    """The first row is padded on the left, the second on the right."""
    mask = torch.ones(2, seq, dtype=torch.long)
    mask[0, :37] = 0
    mask[1, -5:] = 0
    return mask


def written_out(patterns: Any, layer: int, heads: int, mask: Tensor, causal: bool) -> Tensor:
    """(batch, heads, queries, keys) bool: what a layer sees; a query that sees nothing is let to see itself."""
    one = patterns.get(layer) if isinstance(patterns, dict) else patterns
    if isinstance(one, dict):
        one = nn.Fixed(block=16, window=one["num_local_blocks"])
    seq = mask.shape[1]
    seen = torch.ones(heads, seq, seq, dtype=torch.bool)
    if one is not None:
        blocks = -(-seq // one.block)
        whole = -(-blocks // 12) * 12 if causal else blocks  # whole windows, whatever their size
        wide = (
            dataclasses.replace(one, causal=causal)
            .mask(heads, whole)
            .repeat_interleave(one.block, 1)
            .repeat_interleave(one.block, 2)
        )
        seen = wide[:, :seq, :seq]
    if causal:
        seen = seen.tril()
    seen = seen[None] & mask.bool()[:, None, None]
    return seen | (~seen.any(3, keepdim=True) & torch.eye(seq, dtype=torch.bool))


def expect(model: Any, patterns: Any, ids: Tensor, mask: Tensor, *, causal: bool) -> Any:
    """The model's own attention, each layer with its mask: patched in where the layer's attention is called."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    for module in twin.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
            seen = written_out(patterns, module.layer_idx, 4, mask, causal)
            bias = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
            module.register_forward_pre_hook(
                lambda module, args, kwargs, bias=bias: (args, {**kwargs, "attention_mask": bias}), with_kwargs=True
            )
    return twin


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("make", [llama, bert])
def test_equals_the_models_own_attention_with_the_mask_written_out(make: Any, name: str) -> None:
    """Logits of real tokens and gradients, with padding on both sides and, in Llama, grouped heads."""
    model, patterns, ids, mask = make(), PATTERNS[name], tokens(), padded()
    causal = make is llama
    model.config.use_cache = False
    twin = expect(model, patterns, ids, mask, causal=causal)
    assert nn.sparsify_attention(model, patterns) is model and model.config._attn_implementation == "zeropp"
    results = []
    for one in (model, twin):
        out = one(ids, attention_mask=mask)[0]
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)) * mask[..., None]
        (out * weights).sum().backward()
        results.append((out[mask.bool()], {n: p.grad for n, p in one.named_parameters()}))
    (mine, my_grads), (theirs, their_grads) = results
    torch.testing.assert_close(mine, theirs, **CLOSE)
    for parameter, grad in their_grads.items():
        if grad is not None:
            off = (my_grads[parameter] - grad).abs().max() / grad.abs().max().clamp(min=1e-3)
            assert off < 1e-4, f"gradient of {parameter} is off by {off}"


def test_padding_is_not_attended_to() -> None:
    """What stands in padding changes no bit of a real token. Without the mask function transformers would hand on no mask."""
    model, mask = llama(), padded()
    nn.sparsify_attention(model, PATTERNS["local"])
    ids = tokens()
    other = torch.where(mask.bool(), ids, (ids + 7) % VOCABULARY)
    assert not torch.equal(ids, other)
    first, second = (model(one, attention_mask=mask).logits[mask.bool()] for one in (ids, other))
    assert torch.equal(first, second)


def test_dense_is_plain_bit_for_bit() -> None:
    model, ids, mask = llama(), tokens(), padded()
    for given in (None, mask):
        plain = copy.deepcopy(model)(ids, attention_mask=given).logits
        for patterns in (nn.Dense(), {1: nn.Dense()}):
            twin = nn.sparsify_attention(copy.deepcopy(model), patterns)
            assert torch.equal(twin(ids, attention_mask=given).logits, plain)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", PATTERNS)
def test_generate_equals_a_full_forward(name: str, cache: str | None) -> None:
    """Decoding token by token over a cache, from within a block and over the ends of blocks and windows."""
    model, prompt, more = nn.sparsify_attention(llama(), PATTERNS[name]), 41, 60
    mask = torch.ones(2, prompt + more, dtype=torch.long)
    mask[0, :9] = 0
    out = model.generate(
        tokens(prompt), attention_mask=mask[:, :prompt], max_new_tokens=more, do_sample=False, output_logits=True,
        return_dict_in_generate=True, eos_token_id=None, pad_token_id=0, cache_implementation=cache,
    )  # fmt: skip
    whole = model(out.sequences, attention_mask=mask).logits[:, prompt - 1 : -1]
    torch.testing.assert_close(torch.stack(out.logits, 1), whole, **CLOSE)


def test_several_tokens_over_a_cache() -> None:
    model, ids = nn.sparsify_attention(llama(), PATTERNS["fixed"]), tokens()
    first = model(ids[:, :53], use_cache=True)
    second = model(ids[:, 53:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), model(ids).logits, **CLOSE)


def test_dropout_is_repeated_by_checkpointing() -> None:
    """attention_dropout in training mode: recomputed layers drop the same weights; evaluation drops none."""
    grads = []
    for checkpointed in (False, True):
        model = nn.sparsify_attention(llama(attention_dropout=0.3, use_cache=False), PATTERNS["local"]).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)
        model(tokens(), labels=tokens()).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    first, second = (model(tokens()).logits for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(tokens()).logits, model(tokens()).logits)


def train(model: Any, config: Config | None, micro: int) -> list[float]:
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if config else (0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if config:
        model, optimizer = zeropp.prepare(model, optimizer, config)
    losses = []
    for step in range(3):
        ids = tokens(SEQ + step, batch=4)[rank::ranks]
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if config:
            torch.distributed.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(1, 2)
def test_prepare_gives_each_layer_its_pattern(stage: int) -> None:
    """Losses of three steps are those of one process that made the model sparse by hand."""
    plain = train(nn.sparsify_attention(llama(), PATTERNS["mixed"]), None, 1)
    dense = train(llama(), None, 1)
    mine = train(llama(), Config(stage=stage, efficiency=Efficiency(attention=PATTERNS["mixed"])), 1)
    assert mine == pytest.approx(plain, rel=2e-5)
    assert mine != pytest.approx(dense, rel=2e-4), "the patterns have to show"


def test_import_registers_where_transformers_is_there() -> None:
    """``import zeropp`` imports no transformers; after it the name is known."""
    program = "import sys, {}zeropp; assert ('transformers' in sys.modules) == {}; {}"
    known = "from transformers import AttentionInterface as A; assert 'zeropp' in A().valid_keys()"
    for first, there, then in (("", False, ""), ("transformers.modeling_utils, ", True, known)):
        subprocess.run([sys.executable, "-c", program.format(first, there, then)], check=True, timeout=120)


def mistral() -> Any:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=32, sliding_window=16,
        )
    )  # fmt: skip


def gemma2() -> Any:
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, vocab_size=32, layer_types=["full_attention"],
        )
    )  # fmt: skip


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2, vocab_size=32)
    )


LOCAL = nn.Local(block=16)


def sparse(**more: Any) -> Any:
    return nn.sparsify_attention(llama(use_cache=False, **more), LOCAL)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: nn.sparsify_attention(mistral(), LOCAL), "has sliding windows .sliding_window=16., .*leave the model at"),
        (lambda: nn.sparsify_attention(gemma2(), LOCAL), "has capped scores .attn_logit_softcapping."),
        (lambda: nn.sparsify_attention(t5(), LOCAL), "has an encoder and a decoder"),
        (lambda: nn.sparsify_attention(torch.nn.Linear(2, 2), LOCAL), "zeropp.nn.SparseAttention in a model of your own"),
        (lambda: nn.sparsify_attention(llama(), {7: LOCAL}), "wanted layers from 0 to 2"),
        (lambda: nn.sparsify_attention(bert(), nn.Local(causal=True)), "the attention of BertModel is not causal"),
        (lambda: nn.sparsify_attention(llama(), "local"), "wanted a pattern such as zeropp.nn.Longformer"),
        (lambda: sparse()(tokens(), output_attentions=True), 'attn_implementation="eager" gives them'),
        (lambda: sparse()(tokens(), position_ids=torch.arange(SEQ).remainder(50)[None]), "packed into a row"),
        (lambda: sparse()(tokens(), attention_mask=torch.ones(2, 1, SEQ, SEQ).bool()), r"wanted \(batch, keys\)"),
        (lambda: nn.sparsify_attention(llama(), LOCAL).set_attn_implementation("sdpa") or zeropp.prepare(
            mistral(), None, Config(efficiency=Efficiency(attention=LOCAL))), "^Config.efficiency.attention: Mistral"),
    ],
)  # fmt: skip
def test_what_it_does_not_do_is_refused(call: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()


def test_a_model_without_patterns_is_told_how_to_get_them() -> None:
    nn.sparsify_attention(llama(), LOCAL)  # makes the name known
    model = transformers.LlamaForCausalLM._from_config(llama().config, attn_implementation="zeropp")
    with pytest.raises(ConfigError, match=r"has no pattern; give the model one by zeropp.nn.sparsify_attention"):
        model(tokens())
