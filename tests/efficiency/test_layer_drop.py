# SPDX-License-Identifier: Apache-2.0
"""Layer dropping against plain torch that leaves out the same layers; what it draws; and what a layer that is left out costs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from helpers.disk import scratch
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zeropp import Config, Efficiency, Growth, LayerDrop, Offload
from zeropp.efficiency import layer_drop
from zeropp.zero.engine import engine_of

WIDTH, LAYERS, BATCH, SEED = 32, 6, 12, 5
DROP = LayerDrop(theta=0.4, gamma=50.0)  # all layers at step 0, then theta(t) is 0.4


class Whole(nn.Module):
    """A layer without children that are known to be residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def kept(self, x: Tensor, scale: float) -> Tensor:
        return x + (self(x) - x) * scale


class PreNorm(nn.Module):
    """A layer like those of a transformer; attention returns a tuple, as transformers' does."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = (
            Attention(width),
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))[0]
        return x + self.mlp(self.norm2(x))

    def kept(self, x: Tensor, scale: float) -> Tensor:
        x = x + self.attn(self.norm1(x))[0] * scale
        return x + self.mlp(self.norm2(x)) * scale


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(self.mix(x)), None


class Net(nn.Module):
    """``how``: which kind of activation checkpointing surrounds the layers."""

    def __init__(self, kind: type[nn.Module], how: str = "", layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.how = how
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(kind(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant") if self.how else block(x)
        return self.head(x)

    def without(self, x: Tensor, out: list[bool], rates: list[float]) -> Tensor:
        """The forward that leaves out layers, in plain torch."""
        x = self.enter(x)
        for block, gone, rate in zip(self.blocks, out, rates, strict=True):
            x = x if gone else block.kept(x, 1.0 / rate)
        return self.head(x)


def batch(step: int, width: int = WIDTH) -> Tensor:
    return torch.randn(BATCH, width, generator=torch.Generator().manual_seed(step))


def lora(model: Net) -> Net:
    """Freeze all but biases, as low-rank adapters do with the matrices of a layer."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name or "head" in name)
    return model


def train_plain(model: Net, steps: int, micro: int, drop: LayerDrop = DROP) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-5)
    losses = []
    for step in range(steps):
        for at, part in enumerate(batch(step).chunk(micro)):
            out = layer_drop.dropped(drop, SEED, step, at, [LAYERS])
            loss = model.without(part, out, layer_drop.keep_rates(drop.at(step), LAYERS)).square().mean() / micro
            loss.backward()
            losses.append(loss.item() * micro)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(model: nn.Module, optimizer: Any, steps: int, micro: int) -> list[float]:
    losses = []
    for step in range(steps):
        for part in batch(step).chunk(micro):
            mine = part.chunk(dist.get_world_size())[dist.get_rank()]
            loss = model(mine).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def same_as_plain(kind: type[nn.Module], how: str = "", *, micro: int = 1, frozen: bool = False, compiled: bool = False, **fields: Any) -> None:  # fmt: skip
    torch.manual_seed(0)
    plain = lora(Net(kind)) if frozen else Net(kind)
    model = copy.deepcopy(plain)
    model.how = how
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-5)
    config = Config(accumulate=micro, efficiency=Efficiency(layer_drop=DROP, seed=SEED), **fields)
    model, optimizer = zeropp.prepare(model, optimizer, config)
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    wanted, seen = train_plain(plain, 5, micro), train(model, optimizer, 5, micro)
    mean = torch.tensor(seen)
    dist.all_reduce(mean)
    assert torch.allclose(mean / dist.get_world_size(), torch.tensor(wanted), rtol=2e-5)
    whole = zeropp.full_state_dict(model)
    for name, value in plain.state_dict().items() if dist.get_rank() == 0 else ():
        assert torch.allclose(whole[name], value, rtol=0, atol=3e-5), name  # fp32 rounding, through five steps of AdamW


MEMORY = {
    "stage 0": dict(stage=0),
    "stage 1": dict(stage=1),
    "stage 2": dict(stage=2),
    "stage 3": dict(stage=3),
    "stage 3, gathered": dict(stage=3, host_copy="off"),
    "stage 3, gathered ahead": dict(stage=3, host_copy="off", prefetch=1 << 20),
    "step in backward": dict(stage=3, host_copy="off", step_in_backward=True),
}


@pytest.mark.parametrize("case", MEMORY)
@on_ranks(1, 2)
def test_equals_plain_torch_that_leaves_layers_out(case: str) -> None:
    same_as_plain(PreNorm, **MEMORY[case])


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@on_ranks(1, 2)
def test_recomputation_leaves_out_the_same_layers(how: str) -> None:
    same_as_plain(PreNorm, how, host_copy="off")
    same_as_plain(Whole, how, stage=2, micro=3)


@on_ranks(1, 2)
def test_accumulates_over_micro_steps_that_leave_out_different_layers() -> None:
    for fields in (
        dict(stage=1),
        dict(stage=3, host_copy="off", prefetch=1 << 20),
        dict(stage=3, step_in_backward=True),
    ):
        same_as_plain(Whole, micro=3, **fields)


@on_ranks(1, 2)
def test_frozen_weights_of_layers_that_are_left_out() -> None:
    same_as_plain(PreNorm, frozen=True, host_copy="off")


@on_ranks(1)
def test_compiled_layers() -> None:
    same_as_plain(PreNorm, compiled=True)
    same_as_plain(Whole, compiled=True)


TIERS = {
    "states": (dict(optimizer="nvme"), {}),
    "states, stage 1": (dict(optimizer="nvme"), dict(stage=1)),
    "parameters and states": (dict(params="nvme", optimizer="nvme"), {}),
    "everything": (dict(params="nvme", grads="nvme", optimizer="nvme"), {}),
    "parameters": (dict(params="nvme"), dict(micro=3)),
    "step in backward": (dict(params="nvme", optimizer="nvme"), dict(step_in_backward=True)),
    "states, step in backward": (dict(optimizer="nvme"), dict(step_in_backward=True, stage=2, micro=3)),
}


@pytest.mark.parametrize("case", TIERS)
@on_ranks(1, 2)
def test_tiers(case: str) -> None:
    where, more = TIERS[case]
    with scratch() as folder:
        same_as_plain(PreNorm, offload=Offload(**where, path=folder), **more)


@on_ranks(1, 2)
def test_theta_1_changes_no_bit() -> None:
    whole = []
    for efficiency in (None, Efficiency(layer_drop=LayerDrop(theta=1.0))):
        torch.manual_seed(0)
        model = Net(PreNorm)
        model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), Config(efficiency=efficiency))
        losses = train(model, optimizer, 3, 1)
        whole.append((losses, zeropp.full_state_dict(model)))
    assert whole[0][0] == whole[1][0]
    assert all(torch.equal(value, whole[1][1][name]) for name, value in whole[0][1].items())


# -- what is drawn ---------------------------------------------------------------------------------------------------------


def test_layers_are_kept_at_their_rates() -> None:
    draws, theta = 10_000, 0.5
    drop = LayerDrop(keep=lambda step: theta)
    gone = torch.zeros(12)
    for step in range(draws):
        gone += torch.tensor(layer_drop.dropped(drop, 1, step, 0, [12]), dtype=torch.float32)
    rates = torch.tensor(layer_drop.keep_rates(theta, 12))
    assert rates[0] == 1.0 and gone[0] == 0
    assert torch.allclose(rates[-1], torch.tensor(1 - 11 / 12 * (1 - theta)))
    error = (1 - gone / draws - rates).abs()
    assert (error <= 4.5 * (rates * (1 - rates) / draws).sqrt() + 1e-6).all(), error  # 4.5 standard deviations


def test_draws_differ_by_seed_step_micro_step_and_layer() -> None:
    draws = {
        layer_drop.layers.uniform(*key)
        for key in [(1, 2, 3, 4), (2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5)]
    }
    assert len(draws) == 5 and all(0 <= one < 1 for one in draws)


def test_schedules_go_either_way() -> None:
    falls, rises = LayerDrop(theta=0.5, gamma=0.01), LayerDrop(keep=Growth(0.5, 1.0, steps=100))
    assert falls.at(0) == 1.0 and falls.at(10_000) == 0.5
    assert rises.at(0) == 0.5 and rises.at(50) == 0.75 and rises.at(100) == 1.0


# -- what it costs ---------------------------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, sets: list[tuple[int, ...]], **fields: Any) -> list[dict[str, int]]:
    """Bytes of steps that leave out these layers of eight."""
    monkeypatch.setattr(
        layer_drop, "dropped", lambda drop, seed, step, micro, counts: [at in sets[step] for at in range(8)]
    )
    width = 192  # a layer's states are more than 65,536 elements on each of two ranks
    torch.manual_seed(0)
    model = Net(Whole, layers=8, width=width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = Config(efficiency=Efficiency(layer_drop=LayerDrop()), **fields)
    model, optimizer = zeropp.prepare(model, optimizer, config)
    seen = []
    for step in range(len(sets)):
        zeropp.traffic(reset=True)
        model(batch(step, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found = zeropp.traffic()
        seen.append(
            {f"{link} {kind}": what.get("bytes", 0) for link, kinds in found.items() for kind, what in kinds.items()}
        )
    return seen


def three_quarters(seen: list[dict[str, int]], first: int, kind: str) -> None:
    """Of two blocks of eight nothing moves; `first`: step of which all layers run, after which each step leaves out two."""
    full = seen[first][kind]
    for one in seen[first + 1 :]:
        block = (full - one[kind]) / 2
        rest = full - 8 * block  # of what lies outside of the layers: little, and never less than nothing
        assert 0 <= rest <= 0.04 * full, (kind, full, one[kind])


SETS = [(), (), (), (2, 5), (1, 7), (3, 4), (1, 2), (6, 7)]


@pytest.mark.parametrize("ahead", [0, 2 << 20])
@on_ranks(2)
def test_bytes_between_ranks_follow_the_layers(ahead: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen = counted(patch, SETS, host_copy="off", prefetch=ahead)
    three_quarters(seen, 2, "shm all_gather")
    three_quarters(seen, 2, "shm reduce_scatter")


@pytest.mark.parametrize("in_backward", [False, True])
@on_ranks(1)
def test_bytes_of_the_disk_follow_the_layers(in_backward: bool) -> None:
    with scratch() as folder, pytest.MonkeyPatch.context() as patch:
        offload = Offload(params="nvme", optimizer="nvme", path=folder)
        seen = counted(patch, SETS, offload=offload, prefetch=0, step_in_backward=in_backward)
        three_quarters(seen, 2, "nvme read")
        three_quarters(seen, 2, "nvme write")


@pytest.mark.parametrize("in_backward", [False, True])
@on_ranks(2)
def test_states_of_layers_that_are_left_out_do_not_move(in_backward: bool) -> None:
    with scratch() as folder, pytest.MonkeyPatch.context() as patch:
        seen = counted(
            patch, SETS, stage=2, offload=Offload(optimizer="nvme", path=folder), step_in_backward=in_backward
        )
        three_quarters(seen, 2, "shm all_gather")
        three_quarters(seen, 2, "nvme read")
        three_quarters(seen, 2, "nvme write")


# -- what it does not touch --------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_evaluation_leaves_out_nothing() -> None:
    torch.manual_seed(0)
    plain = Net(PreNorm)
    model, _ = zeropp.prepare(
        copy.deepcopy(plain), None, Config(efficiency=Efficiency(layer_drop=LayerDrop(keep=lambda step: 0.05)))
    )
    x = batch(0)
    wanted, dropped = plain(x), model(x)  # a training forward, whose graph stays
    assert not torch.allclose(wanted, dropped)
    with torch.no_grad():
        assert torch.equal(model(x), wanted)  # also in training mode, as generate() may run
    model.eval()
    assert torch.equal(model(x), wanted)
    model.train()
    assert torch.equal(model(x), dropped)


@on_ranks(1)
def test_a_recomputation_after_an_evaluation_is_still_of_training() -> None:
    grads = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        model, _ = zeropp.prepare(
            Net(PreNorm, "not reentrant"),
            None,
            Config(stage=0, efficiency=Efficiency(layer_drop=LayerDrop(keep=lambda step: 0.3))),
        )
        loss = model(batch(0)).square().mean()
        if evaluates:
            with torch.no_grad():
                model(batch(1))
        loss.backward()
        grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    assert any(one is None for one in grads[0])
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("in_backward", [False, True])
@on_ranks(2)
def test_an_evaluation_or_an_error_amid_a_step_changes_no_loss(in_backward: bool) -> None:
    """An evaluation reads all layers, before the backward of a pass that leaves some out; an error ends a pass in a layer."""
    curves = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        model = Net(PreNorm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        efficiency = Efficiency(layer_drop=LayerDrop(keep=lambda step: 0.3), seed=SEED)
        fields = dict(host_copy="off", prefetch=1 << 20, step_in_backward=in_backward)
        model, optimizer = zeropp.prepare(model, optimizer, Config(efficiency=efficiency, **fields))
        losses = []
        for step in range(5):
            x = batch(step).chunk(2)[dist.get_rank()]
            if disturbed:
                handle = model.blocks[0].register_forward_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    model(x)
                handle.remove()
            loss = model(x).square().mean()
            if disturbed:
                with torch.no_grad():
                    model(batch(99))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0] == curves[1]


def fail(*_: Any) -> None:
    raise ZeroDivisionError


@on_ranks(1)
def test_hidden_states_keep_their_count() -> None:
    from helpers import zoo

    torch.manual_seed(0)
    model, _ = zeropp.prepare(
        zoo.llama(), None, Config(efficiency=Efficiency(layer_drop=LayerDrop(keep=lambda step: 0.01), seed=9))
    )
    gone = layer_drop.dropped(engine_of(model).config.efficiency.layer_drop, 9, 0, 0, [3])
    assert any(gone)
    states = model.train()(input_ids=torch.arange(12).view(2, 6), output_hidden_states=True).hidden_states
    assert len(states) == 4
    for at, out in enumerate(gone[:-1]):  # the last one comes after the final norm
        assert torch.equal(states[at], states[at + 1]) == out


@on_ranks(1)
def test_transformers_own_checkpointing() -> None:
    from helpers import zoo

    grads = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = zoo.llama()
        if checkpoints:
            model.gradient_checkpointing_enable()
        model, _ = zeropp.prepare(
            model, None, Config(stage=0, efficiency=Efficiency(layer_drop=LayerDrop(keep=lambda step: 0.2), seed=4))
        )
        model.train()(input_ids=torch.arange(12).view(2, 6)).logits.square().mean().backward()
        grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    assert any(one is None for one in grads[0])
    assert all((a is None and b is None) or torch.allclose(a, b) for a, b in zip(*grads, strict=True))


# -- bad input -----------------------------------------------------------------------------------------------------------


class Two(Whole):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Pairs(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)[0]
        return self.head(x)


@on_ranks(1)
def test_refuses_a_layer_that_returns_more_than_hidden_states() -> None:
    model, _ = zeropp.prepare(
        Pairs(Two), None, Config(efficiency=Efficiency(layer_drop=LayerDrop(keep=lambda step: 0.01)))
    )
    for _ in range(2):
        with pytest.raises(zeropp.Error, match=r"layer 'blocks\.0' returns a tuple of 2, wanted hidden states alone"):
            model(batch(0))


@on_ranks(1)
def test_refuses_a_model_without_layers() -> None:
    with pytest.raises(zeropp.ConfigError, match="layer_drop: Linear has no layers"):
        zeropp.prepare(nn.Linear(4, 4), None, Config(efficiency=Efficiency(layer_drop=LayerDrop())))
