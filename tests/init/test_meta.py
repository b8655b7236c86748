# SPDX-License-Identifier: Apache-2.0
"""Models on the meta device: prepare draws their values, shard by shard; they are trained and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import zeropp
from memory import Peak, resident_bytes
from ranks import on_ranks
from torch import nn
from zeropp.errors import ConfigError


class Scale(nn.Module):
    """A module of the user's own, with a way to draw its values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(24))
        self.register_buffer("ramp", torch.arange(24), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.5)
        if not self.ramp.is_meta:
            self.ramp.copy_(torch.arange(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.ramp


class Tied(nn.Module):
    """A tied head with a bias of its own, torch's attention, a norm with running statistics, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(101, 24)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(24, 2, 48, batch_first=True) for _ in range(3))
        self.scale, self.norm, self.frozen = Scale(), nn.BatchNorm1d(24), nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(24, 101)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(self.norm(self.scale(x).transpose(1, 2)).transpose(1, 2)))


class Initialised(nn.Module):
    """A model whose own initialiser draws again what reset_parameters() drew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def drawn_by_hand(model: nn.Module) -> nn.Module:
    """Draw the same values on a plain model: children first; a tied weight by its first owner."""
    done: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in done:
            return
        done.add(module)
        for child in module.children():
            visit(child)
        tied = None if not isinstance(model, Tied) or module is not model.head else model.tokens.weight.detach().clone()
        for name in ("reset_parameters", "_reset_parameters"):
            if next(module.parameters(recurse=False), None) is not None and hasattr(module, name):
                getattr(module, name)()
        if isinstance(model, Initialised) and next(module.parameters(recurse=False), None) is not None:
            model._init_weights(module)
        if tied is not None:
            model.tokens.weight.data.copy_(tied)

    visit(model)
    return model


@on_ranks(1, 2, backend="zeropp")
def test_values() -> None:
    """Rank 0's draws, bit for bit those made by hand, whatever other ranks would draw; the optimizer's parameters stay
    the same objects; and it trains as the plain model does."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    configs = [{"stage": 3, "host_copy": "off"}, {"stage": 2}, {"precision": "bf16"}]
    for make, config in [(Tied, one) for one in configs] + [(Initialised, {"stage": 3})]:
        torch.manual_seed(5)
        plain = drawn_by_hand(make())
        torch.manual_seed(5)
        make()  # as many draws as above
        model = on_meta(make)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
        before = [p for group in optimizer.param_groups for p in group["params"]]
        if rank:
            torch.manual_seed(100 + rank)
        model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(**config))
        assert all(a is b for a, b in zip(before, (p for p in model.parameters() if p.requires_grad), strict=True))
        wanted = plain.state_dict()
        for name, values in zeropp.full_state_dict(model).items():
            assert torch.equal(values, wanted[name].to(values.dtype)), (make, config, name)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, dict(plain.named_buffers())[name]), (make, name)
        if make is Tied:
            assert model.head.weight is model.tokens.weight
            torch.manual_seed(1)
            ids = torch.randint(0, 101, (2, 5))
            model.train(False), plain.train(False)
            loss, theirs = model(ids).float().square().mean(), plain(ids).square().mean()
            bound = 1e-5 if "precision" not in config else 0.05
            assert abs(float(loss) - float(theirs)) <= bound * float(theirs), (config, float(loss), float(theirs))
            loss.backward()
            optimizer.step()
            assert not torch.equal(zeropp.full_state_dict(model)["tokens.weight"].float(), wanted["tokens.weight"])


@on_ranks(1, 2, backend="zeropp")
def test_loaded() -> None:
    """A state dict goes into a model from meta; what of it had values before keeps them."""
    torch.manual_seed(7)
    wanted = {name: values.clone() for name, values in Initialised().state_dict().items()}
    model, _ = zeropp.prepare(on_meta(Initialised), None, zeropp.Config(stage=3, host_copy="off"))
    zeropp.load_full_state_dict(model, wanted)
    assert all(torch.equal(values, wanted[name]) for name, values in zeropp.full_state_dict(model).items())
    half = on_meta(Initialised)
    half.layers[1].weight = nn.Parameter(torch.full((8, 8), 3.0))
    model, _ = zeropp.prepare(half, None, zeropp.Config(stage=3))
    assert bool((zeropp.full_state_dict(model)["layers.1.weight"] == 3).all())


class Without(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.loose = nn.Parameter(torch.zeros(4))


class Partly(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            self.weight.detach()[1:].zero_()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.register_buffer("table", torch.arange(4))


@on_ranks(1, 2, backend="zeropp")
def test_refuses() -> None:
    """A model that has no way to its values is left as it was, and the sentence names what lacks them."""
    wanted = {
        Without: "prepare: 'loose' is on the meta device and has no values, and Without has no reset_parameters(), nor a model around",
        Partly: "'weight' is on the meta device and has no values, and Partly draws others only",
        Table: "'inner.table' is on the meta device and has no values, and Linear draws others only",
    }
    for make, sentence in wanted.items():
        model = on_meta(make) if make is not Partly else on_meta(lambda: Partly(4, 4))
        try:
            zeropp.prepare(model)
        except ConfigError as error:
            assert sentence in str(error) and "zeropp.sharded_init()" in str(error), error
        else:
            raise AssertionError(f"{make} was not refused")
        if make is Without:
            assert all(p.is_meta for p in model.parameters())
    copied = copy.deepcopy(on_meta(Without))
    assert copied.loose.is_meta


@on_ranks(2, backend="zeropp", alone=True)
def test_memory() -> None:
    """Peak memory: the shards and a window, as with sharded_init."""
    layers, width = 12, 2560
    layer_bytes = 4 * width * (width + 1)
    whole = layers * layer_bytes

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    config = zeropp.Config(stage=3, host_copy="off")
    zeropp.prepare(on_meta(lambda: nn.Linear(width, width)), None, config)  # warm up code and allocator
    before = resident_bytes()
    with Peak() as peak:
        model, _ = zeropp.prepare(on_meta(make), None, config)
    grown, held = peak.bytes - before, whole // dist.get_world_size()
    assert held * 0.9 < grown < held + 5 * layer_bytes, f"peak {grown} bytes; slices {held}, a layer {layer_bytes}"
    del model


def test_a_model_of_transformers():
    """The model's own _init_weights sets all values, buffers included."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    plain = transformers.AutoModelForCausalLM.from_config(config)
    model, _ = zeropp.prepare(model, None, zeropp.Config())
    values = zeropp.full_state_dict(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 0.015 < float(values["model.layers.0.mlp.up_proj.weight"].std()) < 0.025
    assert bool((values["model.norm.weight"] == 1).all())
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
    zeropp.load_full_state_dict(model, plain.state_dict(), strict=False)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
