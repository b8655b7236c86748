# SPDX-License-Identifier: Apache-2.0
"""sharded_init: models built in it against the same models built plainly, 1/N of the memory, and clear refusals."""

from __future__ import annotations

import copy
import math

import torch
import torch.distributed as dist
import zeropp
from memory import Peak, resident_bytes
from ranks import on_ranks
from torch import nn
from zeropp.errors import ConfigError, PartitionedParameterError
from zeropp.zero.model.init import is_sharded, materialise, sharded_init


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 96)
        self.down = nn.Linear(96, 24)
        self.register_buffer("table", torch.arange(7.0))


class TiedGPT(nn.Module):
    """Tied weights and an initialiser of its own, applied to the whole model after its construction."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(101, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(24, 101, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self.initialise)

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(6))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data[0].zero_()  # padding row: a write to a part


class Odd(nn.Module):
    """A module with what real constructors do: partial writes, views held for a while, reads, sharing, scalars, other dtypes,
    copies."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.low = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.arange(10), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.first = nn.Linear(33, 65)
        held = self.first.weight.data  # a view that outlives many registrations
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        held.mul_(2.0)
        with torch.no_grad():
            self.first.weight[:3].fill_(7.0)
            self.layers[0].weight.copy_(self.layers[1].weight)
            self.layers[2].weight.add_(self.layers[3].weight @ self.layers[0].weight)
        nn.init.trunc_normal_(self.layers[3].weight, std=0.1)
        nn.init.orthogonal_(self.layers[1].weight)
        self.copied = copy.deepcopy(self.layers[2])
        self.replaced = nn.Linear(8, 8)
        self.replaced.weight.data = torch.randn(8, 8)
        self.sum = float(self.layers[0].weight.detach().sum())


def lstm() -> nn.Module:
    return nn.LSTM(12, 20, num_layers=2)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3)


def built(make, seed: int = 0, **keywords) -> nn.Module:
    torch.manual_seed(seed)
    with sharded_init(**keywords):
        return make()


@on_ranks(1, 2, 3)
def test_values_are_those_of_plain_construction() -> None:
    """Bit for bit plain construction, whatever the window; tied weights stay one; buffers stay whole; the stream goes
    on alike."""
    for make in (TiedGPT, Odd, lstm, encoder):
        torch.manual_seed(0)
        plain = make()
        drawn_next = torch.rand(3)
        for window_bytes in (0, 3000, 1 << 20):
            sharded = built(make, window_bytes=window_bytes)
            assert torch.equal(torch.rand(3), drawn_next), make
            names = dict(plain.named_parameters(remove_duplicate=False))
            ours = dict(sharded.named_parameters(remove_duplicate=False))
            assert list(names) == list(ours), make
            for name, parameter in names.items():
                mine = ours[name]
                assert (mine.shape, mine.dtype, mine.requires_grad) == (
                    parameter.shape,
                    parameter.dtype,
                    parameter.requires_grad,
                )
                assert is_sharded(mine) == (dist.get_world_size() > 1), name
                whole = materialise(mine) if is_sharded(mine) else mine
                assert torch.equal(whole, parameter), (make, name, window_bytes)
            for name, buffer in plain.named_buffers():
                assert torch.equal(dict(sharded.named_buffers())[name], buffer)
    tied = built(TiedGPT)
    assert tied.head.weight is tied.tokens.weight
    assert built(Odd).sum == Odd_sum()


def Odd_sum() -> float:
    torch.manual_seed(0)
    return Odd().sum


@on_ranks(2)
def test_refuses() -> None:
    """Outside of the context a read is refused with the parameter's full name; metadata and optimizers work."""
    model = built(TiedGPT)
    weight = model.blocks[1].up.weight
    reads = [
        lambda: weight.sum(),
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight.detach(),
        lambda: weight.numpy(),
        lambda: model.blocks[1].up(torch.zeros(24)),
        lambda: copy.deepcopy(model.blocks[1].up),
        lambda: model.state_dict(),
        lambda: model.half(),
        lambda: weight.tolist(),
    ]
    for index, read in enumerate(reads):
        try:
            read()
        except PartitionedParameterError as error:
            assert "was built inside zeropp.sharded_init(), this rank holds 1/2 of it" in str(error), error
            assert "zeropp.prepare(model, ...)" in str(error), error
            if index != 7 and index != 8:
                assert "'blocks.1.up.weight'" in str(error), error
        else:
            raise AssertionError(f"read {index} was not refused")
    assert weight.shape == (96, 24) and weight.numel() == 96 * 24 and len(weight) == 96 and weight.is_floating_point()
    assert repr(weight) == "ShardedParameter('blocks.1.up.weight', shape=(96, 24), dtype=torch.float32)"
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in TiedGPT().parameters())
    torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.requires_grad_(False)
    assert not weight.requires_grad
    values = torch.ones(96, 24)
    weight.data = values  # what prepare does
    assert type(weight) is nn.Parameter and weight.data_ptr() == values.data_ptr() and weight.sum() == 96 * 24


@on_ranks(2)
def test_seeds() -> None:
    """Ranks that draw different values raise, and so do ranks that build different models."""
    try:
        built(TiedGPT, seed=dist.get_rank())
    except ConfigError as error:
        assert "rank 1 drew other values than rank 0" in str(error) and "'tokens.weight'" in str(error), error
    else:
        raise AssertionError("different seeds went unnoticed")
    try:
        built(lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(2 + dist.get_rank())))
    except ConfigError as error:
        assert "ranks built [4, 6] parameters" in str(error), error
    else:
        raise AssertionError("different models went unnoticed")


@on_ranks(2, backend="zeropp")
def test_prepared() -> None:
    """prepare takes the shards over, in every way of holding them: the weights are those of plain construction, and
    train."""
    torch.manual_seed(0)
    wanted = TiedGPT().state_dict()
    for config in ({"stage": 3, "host_copy": "off"}, {"stage": 3}, {"stage": 2}, {"stage": 0}, {"precision": "bf16"}):
        model = built(TiedGPT)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(**config))
        assert model.head.weight is model.tokens.weight
        for name, values in zeropp.full_state_dict(model).items():
            assert torch.equal(values, wanted[name].to(values.dtype)), (config, name)
        hidden = model.tokens(torch.arange(7))
        for block in model.blocks:
            hidden = hidden + block.down(block.up(block.norm(hidden)))
        model.head(hidden).float().square().mean().backward()
        optimizer.step()
        assert not torch.equal(zeropp.full_state_dict(model)["tokens.weight"], wanted["tokens.weight"]), config


@on_ranks(2)
def test_raises() -> None:
    """A constructor that fails leaves no hook behind, and plain construction plain."""
    try:
        with sharded_init():
            broken = nn.Linear(4, 4)
            raise ValueError("in the middle")
    except ValueError:
        pass
    assert type(broken.weight) is nn.Parameter
    after = nn.Linear(4, 4)
    assert type(after.weight) is nn.Parameter and after.weight.isfinite().all()


@on_ranks(2, alone=True)
def test_memory() -> None:
    """Peak memory of construction: the shards, and a window; a plain model of the same size takes all of it."""
    layers, width = 12, 2560
    layer_bytes = 4 * width * (width + 1)
    whole = layers * layer_bytes

    def make() -> nn.Module:
        return nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    built(lambda: nn.Linear(width, width))  # warm up code and allocator
    before = resident_bytes()
    with Peak() as peak:
        model = built(make, window_bytes=layer_bytes)
    grown = peak.bytes - before
    held = whole // dist.get_world_size()
    assert grown < held + 3 * layer_bytes, f"peak {grown} bytes; the slices are {held}, a layer {layer_bytes}"
    assert grown > held * 0.9, "the model was not built"
    assert all(is_sharded(p) for p in model.parameters())
    del model
    with Peak() as peak:
        torch.manual_seed(0)
        plain = make()
    assert peak.bytes - before > whole * 0.9, "the measure does not see memory"
    del plain


def test_one_process_without_a_group_changes_nothing():
    torch.manual_seed(0)
    plain = nn.Linear(5, 7)
    torch.manual_seed(0)
    with sharded_init():
        ours = nn.Linear(5, 7)
    assert type(ours.weight) is nn.Parameter and not is_sharded(ours.weight)
    assert torch.equal(plain.weight, ours.weight) and torch.equal(plain.bias, ours.bias)
