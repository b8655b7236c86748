# SPDX-License-Identifier: Apache-2.0
"""Random layer-token dropping in transformers' models, against the layers run on all tokens with the others hidden from attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
import zeropp
from helpers import zoo
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zeropp import Config, Efficiency, Growth, LayerDrop, TokenDrop, ops
from zeropp.efficiency import layer_drop, layers, token_drop

SEQ, KEEP, BATCH, SEED = 16, 6, 6, 11
SIZES = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=4, vocab_size=64, intermediate_size=48)
DROP = TokenDrop(keep=lambda step: KEEP)


def gpt2() -> nn.Module:
    pdrop = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=64, n_positions=32, **pdrop))


MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "gpt2": gpt2,
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0)),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SIZES)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2)
    ),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            hidden_size=32, num_attention_heads=4, num_hidden_layers=4, vocab_size=64, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0
        )
    ),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)),
}  # fmt: skip


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


class Reference:
    """A layer that works on all tokens, hides those that are dropped from attention, and gives them back as they came."""

    def __init__(self, model: nn.Module) -> None:
        self.step, self.first = 0, 0
        stack = layers.stacks(model)[0]
        for number, (_, layer) in list(enumerate(stack))[1:-1]:
            layer.forward = self.around(layer.forward, number)

    def around(self, forward: Any, number: int) -> Any:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            batch, seq = x.shape[:2]
            seed = token_drop.seed_of(SEED, self.step)
            kept = torch.zeros(batch, seq, dtype=torch.bool)
            kept.scatter_(1, ops.token_sample(batch, seq, KEEP, seed=seed, layer=number, first=self.first).long(), True)
            args = tuple(self.hide(one, kept) for one in args)
            kwargs = {name: self.hide(one, kept) if "mask" in name else one for name, one in kwargs.items()}
            return torch.where(kept[:, :, None], forward(x, *args, **kwargs), x)

        return run

    @staticmethod
    def hide(mask: Any, kept: Tensor) -> Any:
        if not isinstance(mask, Tensor) or mask.dim() != 4:
            return mask
        assert mask.dtype == torch.bool  # sdpa's
        self_only = torch.eye(kept.shape[1], dtype=torch.bool) & ~kept[:, :, None]  # no query without a key
        return (mask & kept[:, None, None, :]) | self_only[:, None]


def batch(step: int, padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (BATCH, SEQ), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[::2, 12:] = 0  # in every micro-step, or transformers hands over no mask for the reference to change
    return {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}


@pytest.mark.parametrize("name", MODELS)
@on_ranks(1)
def test_equals_layers_that_hide_the_other_tokens(name: str) -> None:
    plain = make(name)
    model, _ = zeropp.prepare(
        copy.deepcopy(plain), None, Config(stage=0, efficiency=Efficiency(token_drop=DROP, seed=SEED))
    )
    before = list(plain.state_dict())
    Reference(plain)
    wanted, got = plain(**batch(0)).logits, model(**batch(0)).logits
    real = batch(0)["attention_mask"].bool()
    assert torch.allclose(got[real], wanted[real], atol=2e-6)
    wanted[real].square().mean().backward()
    got[real].square().mean().backward()
    for (key, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=2e-6), key
    assert list(model.state_dict()) == before


def train(
    model: nn.Module, step_of: Any, micro: int, ranks: int, rank: int, reference: Reference | None = None
) -> list[float]:
    losses = []
    for step in range(3):
        parts = {name: value.chunk(micro) for name, value in batch(step).items()}
        for at in range(micro):
            if reference is not None:
                reference.step, reference.first = step, at * (BATCH // micro)
            mine = {name: value[at].chunk(ranks)[rank] for name, value in parts.items()}
            loss = model(**mine).logits.square().mean()
            (loss / micro if reference is not None else loss).backward()
            losses.append(loss.item())
            if reference is None or at == micro - 1:
                step_of()
    return losses


@pytest.mark.parametrize("stage, micro", [(0, 1), (1, 3), (2, 1), (3, 1), (3, 3)])
@on_ranks(1, 2)
def test_ranks_and_micro_steps_keep_the_same_tokens(stage: int, micro: int) -> None:
    plain = make("gpt2")
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3, eps=1e-5) for one in (plain, model)]
    model, optimizer = zeropp.prepare(
        model,
        optimizers[1],
        Config(stage=stage, accumulate=micro, host_copy="off", efficiency=Efficiency(token_drop=DROP, seed=SEED)),
    )

    def step_plain() -> None:
        optimizers[0].step()
        optimizers[0].zero_grad()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    wanted = train(plain, step_plain, micro, 1, 0, Reference(plain))
    mine = torch.tensor(train(model, step, micro, dist.get_world_size(), dist.get_rank()))
    dist.all_reduce(mine)
    assert torch.allclose(mine / dist.get_world_size(), torch.tensor(wanted), rtol=2e-5)


@on_ranks(1)
def test_all_tokens_change_no_bit() -> None:
    for keep in (SEQ, 10 * SEQ):
        plain = make("llama")
        model, _ = zeropp.prepare(
            copy.deepcopy(plain),
            None,
            Config(stage=0, efficiency=Efficiency(token_drop=TokenDrop(keep=lambda step, keep=keep: keep))),
        )
        wanted, got = plain(**batch(0)).logits, model(**batch(0)).logits
        assert torch.equal(wanted, got)


@on_ranks(1)
def test_keep_grows_with_the_step() -> None:
    drop = TokenDrop(keep=Growth(4, 12, steps=4, multiple=4), layers=(2,))
    model = make("llama")
    model, optimizer = zeropp.prepare(
        model, torch.optim.AdamW(model.parameters()), Config(efficiency=Efficiency(token_drop=drop))
    )
    seen: list[tuple[int, int]] = []
    for at in (1, 2):
        model.model.layers[at].mlp.register_forward_pre_hook(lambda m, args, at=at: seen.append((at, args[0].shape[1])))
    for step in range(5):
        model(**batch(step)).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [length for at, length in seen if at == 2] == [4, 4, 8, 8, 12]
    assert {length for at, length in seen if at == 1} == {SEQ}


# -- recomputation -------------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Calls its layers through torch's activation checkpointing, hooks and all."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@on_ranks(1, 2)
def test_recomputation_keeps_the_same_tokens() -> None:
    grads = []
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        model, _ = zeropp.prepare(
            Checkpointed(reentrant), None, Config(stage=0, efficiency=Efficiency(token_drop=DROP))
        )
        x = torch.randn(2, SEQ, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
        model(x).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


@on_ranks(1)
def test_transformers_checkpointing_recomputes_the_kept_tokens_only() -> None:
    grads, seen = [], []
    for checkpoints in (False, True):
        model = make("llama")
        if checkpoints:
            model.gradient_checkpointing_enable()
            model.model.layers[1].mlp.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[1]))
        model, _ = zeropp.prepare(model, None, Config(stage=0, efficiency=Efficiency(token_drop=DROP)))
        model.train()(**batch(0), use_cache=False).logits.square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert seen == [KEEP, KEEP]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@on_ranks(1)
def test_compiled_layers() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, _ = zeropp.prepare(Checkpointed(None), None, Config(stage=0, efficiency=Efficiency(token_drop=DROP)))
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager")
        results.append(model(torch.ones(2, SEQ, 8).cumsum(1)))
    assert torch.allclose(*results, atol=1e-6)


# -- with the other techniques ---------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_together_with_layer_dropping() -> None:
    """A kept layer's tokens are scaled, those that it does not see come back as they were."""
    torch.manual_seed(0)
    efficiency = Efficiency(token_drop=DROP, layer_drop=LayerDrop(keep=lambda step: 0.9999))
    model, _ = zeropp.prepare(Checkpointed(None), None, Config(stage=0, efficiency=efficiency))
    seen: list[tuple[Tensor, Tensor]] = []
    model.blocks[1].register_forward_hook(lambda m, args, out: seen.append(out))
    x: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda m, args, out: x.append(out))
    model(torch.ones(2, SEQ, 8).cumsum(1))
    same = (seen[0] == x[0]).all(-1).sum(1)
    assert same.tolist() == [SEQ - KEEP] * 2


class ByHand:
    """A model whose layers get the kept tokens by torch's indexing, and are left out and scaled by hand."""

    def __init__(self, model: nn.Module, drop: LayerDrop) -> None:
        self.drop, self.step, self.ran = drop, 0, []
        self.stack = [layer for _, layer in layers.stacks(model)[0]]
        for number, layer in enumerate(self.stack):
            layer.forward = self.around(layer.forward, number)
            rate = layer_drop.keep_rates(drop.at(0), len(self.stack))[number]
            layer.self_attn.register_forward_hook(lambda m, args, out, rate=rate: (out[0] / rate, *out[1:]))
            layer.mlp.register_forward_hook(lambda m, args, out, rate=rate: out / rate)

    def around(self, forward: Any, number: int) -> Any:
        def run(x: Tensor, **kwargs: Any) -> Tensor:
            if layer_drop.dropped(self.drop, SEED, self.step, 0, [len(self.stack)])[number]:
                return x
            self.ran.append(number)
            if number in (0, len(self.stack) - 1):
                return forward(x, **kwargs)
            batch, seq = x.shape[:2]
            kept = ops.token_sample(batch, seq, 40, seed=token_drop.seed_of(SEED, self.step), layer=number).long()
            row = torch.arange(batch)[:, None]
            kwargs["attention_mask"] = kwargs["attention_mask"][row, kept]
            rotary = kwargs["position_embeddings"]
            kwargs["position_embeddings"] = tuple(one.expand(batch, -1, -1)[row, kept] for one in rotary)
            return x.index_put((row, kept), forward(x[row, kept], **kwargs))

        return run


@on_ranks(1, 2)
def test_together_with_layer_dropping_and_sparse_attention() -> None:
    """Tokens are dropped first, so the blocks of a pattern are counted over the kept ones."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    drop, pattern = LayerDrop(keep=lambda step: 0.4), zeropp.nn.Local(block=16, window=1)
    plain = zeropp.nn.sparsify_attention(make("llama"), pattern)
    by_hand = ByHand(plain, drop)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = make("llama")
    efficiency = Efficiency(token_drop=TokenDrop(keep=lambda step: 40), layer_drop=drop, attention=pattern, seed=SEED)
    model, ours = zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), Config(efficiency=efficiency))
    for step in range(6):
        by_hand.step, ids = step, torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(step))
        mask = torch.arange(64) < torch.tensor([[64], [50]])
        wanted = plain(input_ids=ids, attention_mask=mask).logits
        mine = slice(rank * 2 // ranks, (rank + 1) * 2 // ranks)
        got = model(input_ids=ids[mine], attention_mask=mask[mine]).logits
        assert torch.allclose(got[mask[mine]], wanted[mine][mask[mine]], atol=1e-5), step
        for logits, optimizer in ((wanted, theirs), (got, ours)):
            logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert 6 < len(by_hand.ran) < 24 and {1, 2} & set(by_hand.ran), by_hand.ran


@on_ranks(1)
def test_evaluation_and_generation_keep_all_tokens() -> None:
    plain = make("llama").eval()
    model, _ = zeropp.prepare(copy.deepcopy(plain), None, Config(efficiency=Efficiency(token_drop=DROP)))
    wanted = plain(**batch(0)).logits
    assert torch.equal(model.eval()(**batch(0)).logits, wanted)
    model.train()
    with torch.no_grad():
        assert torch.equal(model(**batch(0)).logits, wanted)
    ids = batch(0)["input_ids"][:, :5]
    assert torch.equal(
        model.generate(ids, max_new_tokens=4, do_sample=False), plain.generate(ids, max_new_tokens=4, do_sample=False)
    )


@on_ranks(1)
def test_a_copy_is_a_plain_module() -> None:
    model, _ = zeropp.prepare(Checkpointed(None), None, Config(stage=0, efficiency=Efficiency(token_drop=DROP)))
    twin = copy.deepcopy(model)
    x = torch.randn(2, SEQ, 8)
    with torch.no_grad():
        wanted = model(x)
    assert torch.equal(twin(x), wanted) and not torch.equal(model(x), wanted)


def test_layer_tokens_of_a_step() -> None:
    drop = TokenDrop(keep=Growth(128, 512, steps=4, multiple=128))
    assert token_drop.layer_tokens(drop, 0, 8, 512, 10, 12) == 8 * (128 * 10 + 512 * 2)
    assert token_drop.layer_tokens(drop, 100, 8, 512, 10, 12) == 8 * 512 * 12
    assert token_drop.layer_tokens(drop, 100, 8, 256, 10, 12) == 8 * 256 * 12  # shorter sequences


def test_tokens_are_kept_evenly() -> None:
    """Over 10,000 draws, each token equally often, and each pair of tokens."""
    draws, seq, keep = 10_000, 12, 5
    stays, pairs = torch.zeros(seq), torch.zeros(seq, seq)
    for step in range(draws // 100):
        kept = ops.token_sample(100, seq, keep, seed=token_drop.seed_of(3, step), layer=4, first=100)
        chosen = torch.zeros(100, seq).scatter_(1, kept.long(), 1.0)
        stays += chosen.sum(0)
        pairs += chosen.T @ chosen
    rate, both = keep / seq, keep * (keep - 1) / (seq * (seq - 1))
    assert ((stays / draws - rate).abs() < 4.5 * (rate * (1 - rate) / draws) ** 0.5).all()
    off = pairs[~torch.eye(seq, dtype=torch.bool)] / draws
    assert ((off - both).abs() < 4.5 * (both * (1 - both) / draws) ** 0.5).all()


# -- bad input -----------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.inner, self.answer = nn.Linear(8, 8), answer

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.inner(x) if self.answer is None else self.answer(x)


class Stack(nn.Module):
    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(answer) for _ in range(3))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, **kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return x


ARGUMENTS = {
    "packed": (dict(cu_seq_lens_q=torch.tensor([0, 5])), "'cu_seq_lens_q' of layer 'layers.1' says where packed sequences begin"),
    "alibi": (dict(alibi=torch.zeros(4, 1, SEQ)), "'alibi' of layer 'layers.1' biases the scores of all tokens"),
    "position bias": (dict(position_bias=torch.zeros(1, 2, SEQ, SEQ)), "take a model with rotary or learned positions"),
    "unknown": (dict(gates=torch.zeros(2, SEQ, 3)), "'gates' of layer 'layers.1' has shape (2, 16, 3), and may belong to all 16 tokens"),
    "mask of three dimensions": (dict(attention_mask=torch.ones(2, SEQ, SEQ)), "'attention_mask' of layer 'layers.1' has shape (2, 16, 16)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
@on_ranks(1)
def test_refuses_arguments(name: str) -> None:
    given, sentence = ARGUMENTS[name]
    model, _ = zeropp.prepare(Stack(), None, Config(stage=0, efficiency=Efficiency(token_drop=DROP)))
    with pytest.raises(zeropp.Error) as caught:
        model(torch.zeros(2, SEQ, 8), **given)
    assert sentence in str(caught.value) and "leave out Efficiency(token_drop=)" in str(caught.value)
    model(torch.zeros(2, SEQ, 8), scale=torch.ones(3), flag=True, nothing=None)  # what has no sequence is handed on


@on_ranks(1)
def test_refuses_results_and_shapes() -> None:
    model, _ = zeropp.prepare(Stack(lambda x: (x, x)), None, Config(stage=0, efficiency=Efficiency(token_drop=DROP)))
    with pytest.raises(zeropp.Error, match=r"layer 'layers\.1' returns a tuple of 2, wanted hidden states alone"):
        model(torch.zeros(2, SEQ, 8))
    model, _ = zeropp.prepare(Stack(), None, Config(stage=0, efficiency=Efficiency(token_drop=DROP)))
    with pytest.raises(zeropp.Error, match=r"layer 'layers.1' was given \(16, 8\) first"):
        model(torch.zeros(SEQ, 8))


@on_ranks(1)
def test_refuses_models() -> None:
    drop = Config(efficiency=Efficiency(token_drop=DROP))
    with pytest.raises(zeropp.ConfigError, match="token_drop: Linear has no layers"):
        zeropp.prepare(nn.Linear(2, 2), None, drop)
    with pytest.raises(zeropp.ConfigError, match="relative_attention_bias' biases the scores of all tokens"):
        zeropp.prepare(
            zoo.switch(), None, Config(efficiency=Efficiency(token_drop=TokenDrop(keep=lambda step: 2, layers=(1,))))
        )
    with pytest.raises(zeropp.ConfigError, match=r"token_drop.layers: 7 is not allowed; the model has layers 0 to 2"):
        zeropp.prepare(
            Stack(), None, Config(efficiency=Efficiency(token_drop=TokenDrop(keep=lambda step: 2, layers=(1, 7))))
        )
    short = Stack()
    del short.layers[2]
    with pytest.raises(
        zeropp.ConfigError, match="Stack has 2 layers, and the first and the last of a stack work on all tokens"
    ):
        zeropp.prepare(short, None, drop)


# -- DeepSpeed's names ---------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_deepspeeds_functions() -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from zeropp.deepspeed.random_ltd import convert_to_random_ltd, remove_random_ltd_state_dict, save_without_random_ltd

    schedule = {
        "min_value": 4,
        "max_value": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 4, "seq_per_step": 4},
    }
    ltd = {"enabled": True, "total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2], "model_mask_name": None,
           "model_type": "decoder", "hidden_state_order": "batch_seq_dim", "random_ltd_schedule": schedule}  # fmt: skip
    json = {"train_batch_size": BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 0},
            "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}}}  # fmt: skip
    model = make("llama")
    names = list(model.state_dict())
    engine = zeropp.initialize(model=model, config=json)[0]
    assert convert_to_random_ltd(engine, LlamaDecoderLayer) is engine
    with pytest.raises(zeropp.ConfigError, match=r"layer 1, 'model\.layers\.1', is a LlamaDecoderLayer; wanted Linear"):
        convert_to_random_ltd(engine, nn.Linear)
    seen: list[int] = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[1]))
    for step in range(3):
        engine.backward(engine(**batch(step)).logits.square().mean())
        engine.step()
    assert seen == [4, 4, 8]
    assert list(save_without_random_ltd(engine)) == names
    assert list(remove_random_ltd_state_dict({"h.1.random_ltd_layer.w": 1, "b": 2})) == ["h.1.w", "b"]
    with pytest.raises(zeropp.ConfigError, match="random_ltd is not enabled in the configuration"):
        convert_to_random_ltd(zeropp.prepare(make("llama"))[0], LlamaDecoderLayer)
