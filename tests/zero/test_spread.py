# SPDX-License-Identifier: Apache-2.0
"""Modules whose parameters differ between ranks: a small mixture of experts by hand, against one process on the joined batch.

Each of N ranks has E / parts of the experts; the ranks exchange their tokens with torch's all-gather, each computes its experts on
all tokens of the ranks with which it shares them out, and the outputs are added with torch's reduce-scatter. One process has all
experts and all batches. Losses are means over a rank's tokens; the gradient is the mean over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import scratch
from ranks import of_all_ranks, on_ranks, shards_tier
from torch import Tensor, nn
from zeropp.zero.model.boxes import hold
from zeropp.zero.model.spread import Spread
from zeropp.zero.prepare import prepare_over

WIDTH, EXPERTS, TOKENS, STEPS, LR = 12, 4, 5, 4, 1e-2
CLIP = 0.05


class Experts(nn.Module):
    """Experts [first, first + count) of EXPERTS, with a parameter that nothing uses, and sizes that no rank count divides."""

    def __init__(self, layer: int, first: int = 0, count: int = EXPERTS) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(50 + layer)
        up = torch.randn(EXPERTS, WIDTH, 7, generator=draw) / 4
        down = torch.randn(EXPERTS, 7, WIDTH, generator=draw) / 4
        self.first = first
        self.up = nn.Parameter(up[first : first + count].clone())
        self.down = nn.Parameter(down[first : first + count].clone())
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        hidden = torch.einsum("th,ehi->tei", x, self.up).tanh()
        mine = gates[:, self.first : self.first + self.up.shape[0]]
        return torch.einsum("tei,eih,te->th", hidden, self.down, mine)


class _Joined(torch.autograd.Function):
    """All tokens of a group of ranks; the gradient of the rank's own ones is the sum of what the ranks computed for them."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any) -> Tensor:
        ctx.group = group
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        # A device without collectives of its own counts this as a write of its input.
        dist.all_gather(every, mine.clone(), group=group)
        return torch.cat(every)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_of_mine(grad, ctx.group), None


class _Returned(torch.autograd.Function):
    """A rank's own tokens, added over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, every: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _sum_of_mine(every, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Joined.apply(grad, ctx.group), None


def _sum_of_mine(every: Tensor, group: Any) -> Tensor:
    every = every.clone()
    dist.all_reduce(every, group=group)
    return every.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


class Layer(nn.Module):
    def __init__(self, layer: int, group: Any = None, parts: int = 1) -> None:
        super().__init__()
        torch.manual_seed(layer)
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        count = EXPERTS // parts
        self.experts = Experts(layer, count * (dist.get_rank() % parts) if parts > 1 else 0, count)
        self.group, self.parts = group, parts

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gates = self.router(h).softmax(-1)
        if self.parts == 1:
            return x + self.experts(h, gates)
        out = self.experts(_Joined.apply(h, self.group), _Joined.apply(gates, self.group))
        return x + _Returned.apply(out, self.group)


def _model(group: Any = None, parts: int = 1) -> nn.Sequential:
    return nn.Sequential(*(Layer(layer, group, parts) for layer in range(2)), nn.Linear(WIDTH, WIDTH))


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def _exchange(parts: int) -> Any:
    """Return the ranks among which this one shares its experts out: neighbours hold different ones."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = [dist.new_group(list(range(first, first + parts))) for first in range(0, ranks, parts)]
    return made[rank // parts]


def _whole(model: nn.Module, parts: int) -> dict[str, Tensor]:
    """Return all parameters with every expert, from the ranks that have them."""
    with zeropp.gathered(model):
        mine = {name: p.detach().clone() for name, p in model.named_parameters()}
    every = of_all_ranks(mine)
    shared = [name for name in mine if ".experts." not in name or name.endswith("unused")]
    for one in every[1:]:
        assert all(torch.equal(one[name], every[0][name]) for name in shared)
    for rank, one in enumerate(every):
        assert all(torch.equal(one[name], every[rank % parts][name]) for name in mine)
    return {
        name: every[0][name] if name in shared else torch.cat([one[name] for one in every[:parts]]) for name in mine
    }


def _prepared(parts: int, config: dict[str, Any], held: bool = False) -> tuple[nn.Sequential, Any]:
    model = _model(_exchange(parts), parts)
    for experts in (layer.experts for layer in model[:2] if held):
        hold(experts.up, (EXPERTS, *experts.up.shape[1:]), (experts.first, 0, 0))
        hold(experts.down, (EXPERTS, *experts.down.shape[1:]), (experts.first, 0, 0))
        hold(experts.unused, (3,), (0,))
    spreads = [Spread(name=f"experts of layer {at}", modules=(model[at].experts,), parts=parts) for at in range(2)]
    return prepare_over(None, model, torch.optim.AdamW(model.parameters(), lr=LR), zeropp.Config(**config), spreads)


def trains_as_one(parts: int, config: dict[str, Any], clip: bool = True) -> None:
    model, optimizer = _prepared(parts, config)
    plain = _model()
    adam = torch.optim.AdamW(plain.parameters(), lr=LR)
    accumulate, ranks = config.get("accumulate", 1), dist.get_world_size()
    in_backward = config.get("step_in_backward", False)
    for step in range(STEPS):
        for micro in range(accumulate):
            number = step * accumulate + micro
            x = torch.cat([_batch(number, rank) for rank in range(ranks)])
            want = (plain(x) ** 2).mean()
            (want / accumulate).backward()
            got = (model(_batch(number, dist.get_rank())) ** 2).mean()
            got.backward()
            assert sum(of_all_ranks(got.detach())).item() / ranks == pytest.approx(want.item(), rel=2e-5)
        if clip and not in_backward:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
            assert float(optimizer.clip_grad_norm_(CLIP)) == pytest.approx(float(norm), rel=2e-5), step
        adam.step()
        adam.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    got_values, wanted = _whole(model, parts), dict(plain.named_parameters())
    for name, value in wanted.items():  # fp32: sums in another order, through AdamW's division by small numbers
        torch.testing.assert_close(
            got_values[name], value.detach(), rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@on_ranks(2, 4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_expert_a_rank(stage: int) -> None:
    """As many parts as ranks: a group is one rank."""
    trains_as_one(dist.get_world_size(), {"stage": stage})


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parts_on_two_ranks_each(stage: int) -> None:
    trains_as_one(2, {"stage": stage})


@on_ranks(2, 4)
def test_shards_alone() -> None:
    trains_as_one(2, {"stage": 3, "host_copy": "off"})
    trains_as_one(2, {"stage": 3, "host_copy": "off", "prefetch": 1 << 20})


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_accumulate(stage: int) -> None:
    trains_as_one(2, {"stage": stage, "accumulate": 3})


@on_ranks(2, 4)
def test_files() -> None:
    """Gradients and states of a rank's own experts are in its own files."""
    with scratch() as path:
        for kinds in ({"optimizer": "nvme"}, {"grads": "nvme", "optimizer": "nvme"}):
            trains_as_one(2, {"stage": 3, "host_copy": "off", "offload": zeropp.Offload(path=path, **kinds)})


@on_ranks(4)
def test_delayed_update() -> None:
    """Steps are one late, with the gradients of one process: its values after n steps are those here after n + 1."""
    torch.manual_seed(0)
    model, optimizer = _prepared(2, {"stage": 2, "offload": zeropp.Offload(optimizer="cpu", delayed_update=0)})
    plain = _model()
    adam = torch.optim.AdamW(plain.parameters(), lr=LR)
    x = torch.cat([_batch(0, rank) for rank in range(4)])
    (plain(x) ** 2).mean().backward()
    adam.step()
    for _ in range(2):  # the second step publishes what the first one made, from the same values
        (model(_batch(0, dist.get_rank())) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    got_values = {name: value.clone() for name, value in _whole(model, 2).items()}
    for name, value in plain.named_parameters():
        torch.testing.assert_close(got_values[name], value.detach(), rtol=1e-3, atol=2e-4)


@on_ranks(4)
def test_step_in_backward() -> None:
    trains_as_one(2, {"stage": 3, "step_in_backward": True})


@on_ranks(4)
def test_gradients_are_those_of_one_process() -> None:
    """Divided by the number of data ranks, and not by that of the ranks that hold an expert."""
    for stage, parts in ((0, 2), (1, 4), (2, 2), (3, 4), (3, 2)):
        model, _ = _prepared(parts, {"stage": stage, "host_copy": "off"})
        plain = _model()
        (plain(torch.cat([_batch(0, rank) for rank in range(4)])) ** 2).mean().backward()
        (model(_batch(0, dist.get_rank())) ** 2).mean().backward()
        for layer in range(2):
            experts, wanted = model[layer].experts, plain[layer].experts
            own = slice(experts.first, experts.first + experts.up.shape[0])
            for name in ("up", "down"):
                got = zeropp.get_full(getattr(experts, name), "grad")
                torch.testing.assert_close(got, getattr(wanted, name).grad[own], rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_overflow_is_named() -> None:
    config = {"stage": 2, "precision": "fp16", "loss_scale": zeropp.LossScale(init=1024.0)}
    model, optimizer = _prepared(2, config)
    if dist.get_rank() == 1:
        model[0].experts.up.register_hook(lambda grad: grad * float("inf"))
    optimizer.backward((model(_batch(0, dist.get_rank()).half()) ** 2).mean())
    optimizer.step()
    scaler = optimizer._engine.scaler
    # Shards of a GPU learn of the overflow from their sum, which does not tell whose it is.
    origin = "rank 1 before the sum" if shards_tier() == "cpu" else "on some rank, or in the sum"
    assert scaler.overflow == [f"'0.experts.up' ({origin})"]
    assert scaler.skipped == 1


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_checkpoints_want_to_know_the_parts(stage: int) -> None:
    """Without boxes one part would be kept in silence; with them whole values come back, and load where no module is spread."""
    config = {"stage": stage}
    with scratch() as path:
        model, optimizer = _prepared(2, config)
        for keep in (lambda: zeropp.save(path, model, optimizer, step=1), lambda: zeropp.full_state_dict(model)):
            with pytest.raises(
                zeropp.CheckpointError,
                match=r"'0.experts.up' differs between ranks, .* call zeropp.zero.model.boxes.hold",
            ):
                keep()
        model, optimizer = _prepared(2, config, held=True)
        (model(_batch(0, dist.get_rank())) ** 2).mean().backward()
        optimizer.step()
        wanted = _whole(model, 2)
        zeropp.save(path, model, optimizer, step=1)
        plain = _model()
        plain, adam = zeropp.prepare(plain, torch.optim.AdamW(plain.parameters()), zeropp.Config(stage=2))
        zeropp.load(path, plain, adam)
        for found in (zeropp.full_state_dict(model), zeropp.full_state_dict(plain)):
            assert all(torch.equal(found[name], value) for name, value in wanted.items())


@on_ranks(2)
def test_refusals() -> None:
    model = _model()
    spread = [Spread(name="experts of layer 0", modules=(model[0].experts,), parts=3)]
    with pytest.raises(
        zeropp.ConfigError, match="experts of layer 0 in 3 parts on 2 data ranks; wanted a divisor of 2: 1, 2"
    ):
        prepare_over(None, model, None, zeropp.Config(stage=2), spread)
    spread = [Spread(name="experts of layer 0", modules=(Experts(0),), parts=2)]
    with pytest.raises(zeropp.ConfigError, match="has a Experts that is not in the model"):
        prepare_over(None, model, None, zeropp.Config(stage=2), spread)


@on_ranks(4, alone=True)
def test_ranks_with_other_parts_are_shown_both() -> None:
    model, rank = _model(), dist.get_rank()
    spread = Spread(name="experts of layer 0", modules=(model[0].experts,), parts=4 if rank == 3 else 2)
    with pytest.raises(ValueError, match="give every rank the same mesh") as info:
        prepare_over(None, model, torch.optim.AdamW(model.parameters()), zeropp.Config(stage=2), [spread])
    assert 'rank 0 has group "experts of layer 0" with parts 0 1 0 1, divisor 0, but rank 3 has' in str(info.value)
    assert "with parts 0 1 2 3, divisor 0;" in str(info.value)
