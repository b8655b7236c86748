# SPDX-License-Identifier: Apache-2.0
"""Tiles of the sequence and of matrices against the plain computation: values, gradients, dropout, autocast, and how much
memory they take. Under ZeRO: tests/tiers/test_tiling.py."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from zeropp.nn import TiledLinear, tile_linears, tile_sequence, tiled_call, tiled_cross_entropy

transformers = pytest.importorskip("transformers")

QUIET = settings(deadline=None, max_examples=15)


class MLP(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


def gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(value, leaves))


def near(got: Tensor, wanted: Tensor, terms: int = 1) -> bool:
    """Within the rounding of `terms` terms that are added in another order."""
    unit = torch.finfo(wanted.dtype).eps
    return bool((got - wanted).abs().max() <= 4 * unit * max(4, terms) ** 0.5 * wanted.abs().max() + 1e-300)


@QUIET
@given(rows=st.integers(1, 3), length=st.integers(1, 40), tile=st.integers(1, 50), seed=st.integers(0, 1000))
def test_mlp_in_tiles(rows: int, length: int, tile: int, seed: int) -> None:
    torch.manual_seed(seed)
    mlp = MLP(6).double()
    x = torch.randn(rows, length, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(rows, length, 6, dtype=torch.float64)
    leaves = [x, *mlp.parameters()]
    plain, tiled = mlp(x), tiled_call(mlp, x, tile=tile, params=mlp.parameters())
    assert near(tiled, plain)
    for got, wanted in zip(
        gradients((tiled * weights).sum(), leaves), gradients((plain * weights).sum(), leaves), strict=True
    ):
        assert near(got, wanted, rows * length)


@QUIET
@given(count=st.integers(1, 60), classes=st.integers(2, 30), tile=st.integers(1, 70), seed=st.integers(0, 1000),
       bias=st.booleans(), reduction=st.sampled_from(["mean", "sum"]), smoothing=st.sampled_from([0.0, 0.1]))  # fmt: skip
def test_cross_entropy_in_tiles(
    count: int, classes: int, tile: int, seed: int, bias: bool, reduction: str, smoothing: float
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(count, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(classes, 5, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(classes, dtype=torch.float64, requires_grad=True) if bias else None
    targets = torch.randint(0, classes, (count,))
    targets[1::3] = -100
    leaves = [one for one in (hidden, weight, offset) if one is not None]
    plain = F.cross_entropy(F.linear(hidden, weight, offset), targets, reduction=reduction, label_smoothing=smoothing)
    tiled = tiled_cross_entropy(
        hidden, weight, targets, offset, tile=tile, reduction=reduction, label_smoothing=smoothing
    )
    assert near(tiled, plain, count)
    for got, wanted in zip(gradients(tiled, leaves), gradients(plain, leaves), strict=True):
        assert near(got, wanted, count)


def test_gradients_by_differences() -> None:
    mlp = MLP(3).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    params = tuple(mlp.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: tiled_call(mlp, x, tile=2, params=params), (x, *params))


def test_nothing_counts() -> None:
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(7, 3)
    assert torch.isnan(tiled_cross_entropy(hidden, weight, torch.full((4,), -100)))
    assert tiled_cross_entropy(hidden, weight, torch.full((4,), -100), reduction="sum") == 0


def test_dropout_is_drawn_once() -> None:
    """Backward drops what forward dropped, and leaves the generator where it was."""
    x = torch.ones(2, 50, 4, requires_grad=True)
    torch.manual_seed(1)
    y = tiled_call(nn.Dropout(0.5), x, tile=7)
    state = torch.get_rng_state()
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach()) and 0 < (y == 0).sum() < y.numel()
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast_in_backward_is_that_of_forward() -> None:
    torch.manual_seed(0)
    mlp = MLP(8)
    x = torch.randn(1, 12, 8, requires_grad=True)
    found = []
    for tiled in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            y = tiled_call(mlp, x, tile=12, params=mlp.parameters()) if tiled else mlp(x)
        assert y.dtype == torch.bfloat16
        found.append(gradients(y.float().sum(), [x, *mlp.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "one tile: the same operations"


def test_partial_gradients() -> None:
    """Frozen parameters and inputs get none; without gradients nothing is kept; empty sequences pass."""
    mlp = MLP(4)
    mlp.up.requires_grad_(False)
    x = torch.randn(3, 9, 4)
    y = tiled_call(mlp, x, tile=2, params=mlp.parameters())
    y.sum().backward()
    assert mlp.up.weight.grad is None and mlp.down.weight.grad is not None
    with torch.no_grad():
        assert tiled_call(mlp, x, tile=2, params=mlp.parameters()).grad_fn is None
    assert tiled_call(mlp, x[:, :0], tile=2, params=mlp.parameters()).shape == (3, 0, 4)


def test_memory_is_that_of_a_tile() -> None:
    """Logits of 2,000 tokens and 5,000 classes are 40 MB; 16 tokens at a time are never that."""
    hidden = torch.randn(2000, 8, requires_grad=True)
    weight = torch.randn(5000, 8, requires_grad=True)
    targets = torch.randint(0, 5000, (2000,))
    largest = [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(one, Tensor):
                    largest[0] = max(largest[0], one.untyped_storage().nbytes())
            return out

    with Watch():
        tiled_cross_entropy(hidden, weight, targets, tile=16).backward()
    assert largest[0] <= max(16 * 5000 * 4, weight.numel() * 4), largest


def test_tiled_linear() -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        plain = nn.Linear(13, 29, bias=bias, dtype=torch.float64)
        for out_tiles, in_tiles in ((1, 1), (4, 1), (1, 3), (5, 2), (29, 13)):
            tiled = TiledLinear.from_linear(plain, out_tiles=out_tiles, in_tiles=in_tiles)
            weight, offset = tiled.whole()
            assert torch.equal(weight, plain.weight) and (offset is None) == (not bias)
            assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in plain.parameters())
            x = torch.randn(2, 7, 13, dtype=torch.float64, requires_grad=True)
            assert near(tiled(x), plain(x), 13)
            (got,), (wanted,) = gradients(tiled(x).square().sum(), [x]), gradients(plain(x).square().sum(), [x])
            assert near(got, wanted, 13 * 29)
            tiled.zero_grad()
            tiled(x).square().sum().backward()
            plain.zero_grad()
            plain(x).square().sum().backward()
            of_tiles = torch.cat([tile.weight.grad.reshape(-1) for tile in tiled.tiles])
            assert near(of_tiles.abs().sum(), plain.weight.grad.abs().sum(), 13 * 29)
    with pytest.raises(ValueError, match="out_tiles is 30, wanted 1 to 29"):
        TiledLinear(13, 29, out_tiles=30)


def test_tile_linears_leaves_small_and_tied_ones() -> None:
    model = nn.ModuleDict(
        {"large": nn.Linear(64, 100), "small": nn.Linear(4, 4), "head": nn.Linear(64, 100, bias=False)}
    )
    model["embedding"] = nn.Embedding(100, 64)
    model["embedding"].weight = model["head"].weight
    x = torch.randn(3, 64)
    before = model["large"](x)
    assert tile_linears(model, 8192) == ["large"]
    tiled = model["large"]
    assert isinstance(tiled, TiledLinear) and max(t.weight.numel() * 4 for t in tiled.tiles) <= 8192
    assert torch.allclose(tiled(x), before)


# -- Hugging Face models ---------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def causal(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config)
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
    }[kind]
    more = {"head_dim": 8} if kind == "gemma" else {}
    return model(config(**SMALL, num_key_value_heads=1, pad_token_id=0, **more))


class Reads(nn.Module):
    """One layer in three places, and what reads a layer's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.again, self.blocks = self.first, nn.ModuleList([nn.Sequential(self.first)])

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.again(self.blocks[0](self.first(x)))
        return value


def test_tile_linears_keeps_one_layer_one() -> None:
    model = Reads()
    x = torch.randn(3, 64)
    wanted = gradients(model(x).sum(), [model.first.weight])[0]
    assert tile_linears(model, 64 * 4 * 16) == ["first", "again", "blocks.0.0"]
    assert model.first is model.again is model.blocks[0][0] and len(list(model.parameters())) == 8
    got = torch.cat(gradients(model(x).sum(), [tile.weight for tile in model.first.tiles]))
    assert near(got, wanted, 64)
    with pytest.raises(AttributeError, match=r"no weight of its own, only tiles; whole\(\) gives a copy"):
        model.first.weight.dtype  # noqa: B018


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_tile_linears_loses_nothing() -> None:
    """A matrix that is computed stays; hooks would be gone."""
    normed = nn.Sequential(nn.utils.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64))
    assert tile_linears(normed, 1024) == ["1"]
    hooked = nn.Sequential(nn.Linear(64, 64))
    hooked[0].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(zeropp.ConfigError, match="0 has hooks or a forward of its own"):
        tile_linears(hooked, 1024)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "gpt2"])
def test_models_are_patched_and_restored(kind: str) -> None:
    model = causal(kind).double().train()
    rows = torch.randint(1, 50, (2, 21))
    labels = rows.clone()
    labels[:, :3] = -100
    found = []
    for turn in ("plain", "tiled", "tiled with num_items_in_batch", "restored"):
        if turn == "tiled":
            done = tile_sequence(model, mlp_tile=4, loss_tile=5)
            assert len(done.mlps) == 2 and done.loss
        if turn == "restored":
            done.remove()
        more = {"num_items_in_batch": torch.tensor(36)} if "num" in turn else {}
        model.zero_grad()
        out = model(input_ids=rows, labels=labels, **more)
        out.loss.backward()
        found.append((out.loss.detach(), [p.grad.clone() for p in model.parameters()]))
        assert (out.logits is None) == ("tiled" in turn)
    for loss, grads in found[1:]:
        assert near(loss, found[0][0], 100), (loss, found[0][0])  # fp32 inside, as transformers' own
        for got, wanted in zip(grads, found[0][1], strict=True):
            assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max() + 1e-9
    with_tiles = tile_sequence(model)
    model.eval()
    assert model(input_ids=rows, labels=labels).logits.shape == (2, 21, 50)
    model.train()
    assert model(input_ids=rows).logits.shape == (2, 21, 50)
    assert isinstance(model(input_ids=rows, labels=labels, return_dict=False), tuple)
    with_tiles.remove()


def test_a_forward_that_was_there_comes_back() -> None:
    """A forward that replaced a module's, as Accelerate's hooks do, is restored."""
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    own = []
    for module in (model.model.layers[0].mlp, model.lm_head):
        module.forward = functools.partial(module.forward)
        own.append(module.forward)
    tile_sequence(model).remove()
    assert [model.model.layers[0].mlp.forward, model.lm_head.forward] == own


def test_a_model_inside_of_another() -> None:
    """A model inside of another, as under PEFT: the loss is that of the inner one."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

        def forward(self, **more: Any) -> Any:
            return self.inner(**more)

    rows = torch.randint(1, 50, (2, 21))
    model = Outer(causal("llama").train())
    wanted = model(input_ids=rows, labels=rows).loss
    done = tile_sequence(model, mlp_tile=4, loss_tile=5)
    out = model(input_ids=rows, labels=rows)
    assert out.logits is None and near(out.loss, wanted, 100)
    done.remove()
    assert torch.equal(model(input_ids=rows, labels=rows).loss, wanted)


def test_what_cannot_be_tiled_says_so() -> None:
    config = transformers.Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=8, pad_token_id=0)
    model = transformers.Gemma2ForCausalLM(config)
    with pytest.raises(zeropp.ConfigError, match="final_logit_softcapping"):
        tile_sequence(model)
    assert "forward" not in model.model.layers[0].mlp.__dict__, "what was done is taken back"
    assert tile_sequence(model, loss=False).mlps
    with pytest.raises(zeropp.ConfigError, match="no lm_head"):
        tile_sequence(nn.Sequential(MLP(4)))
    with pytest.raises(zeropp.ConfigError, match="no module named mlp"):
        tile_sequence(nn.Linear(3, 3), loss=False)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=50, d_model=64, d_kv=8, d_ff=16, num_layers=1)
    )
    with pytest.raises(zeropp.ConfigError, match="T5ForConditionalGeneration has no lm_head"):
        tile_sequence(t5)  # its forward has a loss of its own, which would take hidden values for logits
    llama = causal("llama").train()
    for wrong in ({"mlp_tile": 0}, {"loss_tile": "8"}, {"mlp_tile": True}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*, wanted a whole number of tokens"):
            tile_sequence(llama, **wrong)  # type: ignore[arg-type]
    done = tile_sequence(llama)
    for again in ({"loss": False}, {"mlp": False}):
        with pytest.raises(zeropp.ConfigError, match="tiled already"):
            tile_sequence(llama, **again)
    plain_loss, llama.loss_function = llama.loss_function, lambda logits, labels, vocab_size, **more: logits.sum()
    rows = torch.randint(1, 50, (1, 9))
    with pytest.raises(zeropp.Error, match="did not come from its loss_function"):
        llama(input_ids=rows, labels=rows)
    llama.loss_function = plain_loss
    done.remove()
    tile_sequence(llama)
    plain = llama.lm_head.forward
    llama.lm_head.forward = lambda hidden: plain(hidden) * 2.0
    rows = torch.randint(1, 50, (1, 9))
    with pytest.raises(zeropp.Error, match="changes its logits between lm_head and the loss"):
        llama(input_ids=rows, labels=rows)


def test_wrong_arguments() -> None:
    x = torch.randn(2, 4, 3)
    for tile in (0, True, 2.0):
        with pytest.raises(ValueError, match="wanted a whole number of tokens"):
            tiled_call(nn.Identity(), x, tile=tile)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stands beside tokens"):
        tiled_call(lambda a, b: a, x, torch.zeros(2, 5), tile=1, dim=1)
    with pytest.raises(ValueError, match="must keep that dimension"):
        tiled_call(lambda a: a.sum(1), x, tile=2)
    with pytest.raises(ValueError, match="reduction is 'none'"):
        tiled_cross_entropy(x, torch.randn(5, 3), torch.zeros(2, 4, dtype=torch.long), reduction="none")
    with pytest.raises(ValueError, match="targets have shape"):
        tiled_cross_entropy(x, torch.randn(5, 3), torch.zeros(2, 5, dtype=torch.long))
