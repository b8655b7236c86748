# SPDX-License-Identifier: Apache-2.0
"""The layer of experts against loops over tokens in float64, and under ZeRO against one process on the joined batch."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks
from reference import moe_gate as reference
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zeropp import Config, ConfigError
from zeropp.moe import Gate, MoE

U = 2.0**-24
H = 16


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(H, 24), nn.GELU(), nn.Linear(24, H))


def exact(layer: MoE, x: Tensor, mask: Tensor | None = None, **rule: Any) -> Tensor:
    """Return the layer's output in float64, token by token, from its own parameters."""
    tokens = x.reshape(-1, H)
    used = torch.ones(len(tokens), dtype=torch.bool) if mask is None else mask.reshape(-1).bool()
    weights, _, _ = reference.route(tokens[used] @ layer.gate.weight.t(), layer.gate.top_k, **rule)
    values = dict(layer.experts.named_parameters())

    def expert(e: int, row: Tensor) -> Tensor:
        if "gate_up_proj" in values:
            gate, up = (values["gate_up_proj"][e] @ row).chunk(2)
            return values["down_proj"][e] @ (F.silu(gate) * up)
        inner = F.gelu(values["0_weight"][e] @ row + values["0_bias"][e])
        return values["2_weight"][e] @ inner + values["2_bias"][e]

    y = torch.zeros_like(tokens)
    if bool(used.any()):
        y = y.index_copy(0, used.nonzero().squeeze(1), reference.layer(tokens[used], weights, expert))
    if layer.residual is not None and layer.coefficient is not None:
        share = torch.softmax(layer.coefficient(tokens), 1)
        y = y * share[:, :1] + layer.residual(tokens) * share[:, 1:]
    return (y if layer.shared is None else y + layer.shared(tokens)).view(x.shape)


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "swiglu": ({"experts": 6, "k": 2, "intermediate": 20}, {}),
    "any module": ({"experts": 4, "k": 1, "expert": two_layers}, {}),
    "residual": ({"experts": 4, "k": 1, "intermediate": 8, "residual": 12}, {}),
    "shared": ({"experts": 5, "k": 3, "intermediate": 8, "shared": 12}, {}),
    "capacity": ({"experts": 4, "k": 2, "gate": Gate(capacity=0.5, least=1)}, {"capacity": 0.5, "least": 1}),
    "by score": (
        {"experts": 8, "k": 4, "gate": Gate(capacity=0.5, least=1, drop="score")},
        {"capacity": 0.5, "least": 1, "by_score": True},
    ),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", LAYERS)
def test_equals_the_loop_over_tokens(case: str, masked: bool) -> None:
    """fp32 against fp64, each part of which differs by its sums of at most 4 H terms: relative to the largest, 4 H u and some."""
    torch.manual_seed(0)
    options, rule = LAYERS[case]
    layer = MoE(H, **options)
    twin = copy.deepcopy(layer).double()
    x = torch.randn(3, 11, H)
    mask = torch.rand(3, 11, generator=torch.Generator().manual_seed(1)) < 0.6 if masked else None
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    y, want = layer(mine, mask), exact(twin, theirs, mask, **rule)
    weigh = torch.randn_like(x)
    (y * weigh).sum().backward()
    (want * weigh.double()).sum().backward()
    near(y, want)
    near(mine.grad, theirs.grad)
    for (name, a), b in zip(layer.named_parameters(), twin.parameters(), strict=True):
        near(a.grad, b.grad, name)


def near(got: Tensor | None, want: Tensor | None, name: str = "") -> None:
    assert got is not None and want is not None, name
    most = want.detach().abs().max().item()
    off = (got.detach().double() - want.detach()).abs().max().item()
    assert off <= 16 * 4 * H * U * most + 1e-9, f"{name}: {off} of {most}"


def test_masked_tokens_count_nowhere() -> None:
    torch.manual_seed(0)
    layer = MoE(H, 4, 2, gate=Gate(capacity=0.5, least=1))
    x, mask = torch.randn(2, 20, H), torch.arange(20).expand(2, 20) < 8
    y = layer(x, mask)
    seen = layer.balance_loss, layer.z_loss, layer.counts
    alone = layer(x[:, :8])
    assert torch.equal(y[:, :8], alone) and not y[:, 8:].any()
    assert all(torch.equal(a, b) for a, b in zip(seen, (layer.balance_loss, layer.z_loss, layer.counts), strict=True))
    assert torch.equal(layer(x, mask.long())[:, :8], alone)
    nothing = layer(x, torch.zeros_like(mask))
    assert not nothing.any() and layer.balance_loss.item() == 0 and nothing.requires_grad


def test_experts_of_a_module_are_copies_and_of_a_callable_are_not() -> None:
    same, others = MoE(H, 3, expert=two_layers()), MoE(H, 3, expert=two_layers)
    first = dict(same.experts.named_parameters())["0_weight"]
    assert torch.equal(first[0], first[2])
    drawn = dict(others.experts.named_parameters())["0_weight"]
    assert not torch.equal(drawn[0], drawn[2])
    with torch.device("meta"):
        made = MoE(H, 3, expert=two_layers)
    made = made.to_empty(device="cpu")
    made.experts.reset_parameters()
    drawn = dict(made.experts.named_parameters())["0_weight"]
    assert drawn.isfinite().all() and not torch.equal(drawn[0], drawn[2]) and drawn.abs().max() <= H**-0.5


def test_dropout_and_buffers_of_experts() -> None:
    layer = MoE(H, 3, 2, expert=lambda: nn.Sequential(nn.BatchNorm1d(H), nn.Dropout(0.5)))
    x = torch.randn(60, H)
    assert not torch.equal(layer(x), layer(x))
    assert bool((dict(layer.experts.named_buffers())["0_num_batches_tracked"] == 2).all())
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_recomputation_counts_once_and_copies_work() -> None:
    torch.manual_seed(0)
    layer = MoE(H, 4, 2, gate=Gate(noise="gumbel"))
    x = torch.randn(30, H, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert zeropp.moe.load(nn.ModuleList([layer]))["0.experts"].sum() == 60
    copied = copy.deepcopy(layer)
    with pytest.raises(RuntimeError, match="MoE: there was no forward yet"):
        copied.balance_loss  # noqa: B018


class Block(nn.Module):
    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.norm, self.dense, self.moe = nn.LayerNorm(H), nn.Linear(H, H), moe

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x + self.moe(self.norm(x + self.dense(x)), mask)


class Net(nn.Module):
    """A pyramid with and without residual branches, of built-in experts and of others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([
            Block(MoE(H, 4, 2, intermediate=8, residual=8)),
            Block(MoE(H, 6, 1, expert=two_layers, shared=4, gate=Gate(capacity=1.0, least=2))),
            Block(MoE(H, 8, 3, intermediate=8, gate=Gate(scoring="sigmoid", groups=(4, 2), bias_rate=0.01))),
        ])  # fmt: skip
        self.head = nn.Linear(H, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        losses = [block.moe.balance_loss + 0.1 * block.moe.z_loss for block in self.blocks]  # type: ignore[union-attr, operator]
        return self.head(x).square().mean() + 0.01 * sum(losses, x.new_zeros(()))


MEMORY: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "gathering": {"stage": 3, "host_copy": "off", "prefetch": 0},
    "gathering ahead": {"stage": 3, "host_copy": "off", "prefetch": 1 << 20},
    "different experts": {"stage": 3, "experts": 2},
}


@on_ranks(1)
def test_one_rank_trains_as_plain_torch() -> None:
    trains_as_one_process("stage 3")


@pytest.mark.parametrize("case", MEMORY)
@on_ranks(2)
def test_trains_as_one_process_on_the_joined_batch(case: str) -> None:
    trains_as_one_process(case)


def trains_as_one_process(case: str) -> None:
    """SGD, whose step has no root to amplify rounding. The ranks' losses are averaged, and one rank may have no token at all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    reference_step = sgd(plain.parameters())
    model, optimizer = zeropp.prepare(model, sgd(model.parameters()), Config(**MEMORY[case]))
    for step in range(4):
        draws = [torch.Generator().manual_seed(10 * step + r) for r in range(ranks)]
        batches = [torch.randn(2, 9, H, generator=draw) for draw in draws]
        masks = [torch.rand(2, 9, generator=draw) < 0.7 if step else None for draw in draws]
        if step == 2:
            masks[-1] = torch.zeros(2, 9, dtype=torch.bool)
        loss = model(batches[rank], masks[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = [plain(batch, mask) for batch, mask in zip(batches, masks, strict=True)]
        reference_step.zero_grad()
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        reference_step.step()
        assert abs(loss.item() - losses[rank].item()) <= 64 * U * abs(loss.item()), f"step {step}"
    with zeropp.gathered(model):
        for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (got - want).abs().max().item() <= 256 * U * want.abs().max().item(), name
    bias = "blocks.2.moe.gate.e_score_correction_bias"
    assert torch.equal(model.get_buffer(bias), plain.get_buffer(bias)) and bool(plain.get_buffer(bias).any())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: MoE(H, 4, 5), "MoE.k: 5 is not allowed; wanted at most 4"),
        (lambda: MoE(0, 4), "MoE.hidden: 0 is not allowed"),
        (lambda: MoE(H, 4, gate="top2"), "MoE.gate: 'top2' is not allowed; wanted a zeropp.moe.Gate"),  # type: ignore[arg-type]
        (lambda: MoE(H, 4, intermediate=0), "MoE.intermediate: 0 is not allowed"),
        (lambda: MoE(H, 4, intermediate=8, expert=two_layers), "MoE.intermediate: 8 is not allowed; wanted None beside expert="),
        (lambda: MoE(H, 4, expert=3), "MoE.expert: 3 is not allowed"),  # type: ignore[arg-type]
        (lambda: MoE(H, 4, expert=lambda: 3), "MoE.expert: it made "),  # type: ignore[arg-type, return-value]
        (lambda: MoE(H, 4, expert=nn.ReLU()), "MoE.expert: ReLU has no parameters"),
        (lambda: MoE(H, 4, shared=0), "MoE.shared: 0 is not allowed"),
        (lambda: MoE(H, 4, residual="mlp"), "MoE.residual: 'mlp' is not allowed"),  # type: ignore[arg-type]
        (lambda: MoE(H, 4, expert=nn.Linear(H, 3))(torch.zeros(5, H)), r"Linear made shape \(\d, 3\) of tokens of shape"),
    ],
)  # fmt: skip
def test_a_layer_that_cannot_be_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("mask", "kind", "sentence"),
    [
        (torch.ones(2, 4, dtype=torch.bool), ValueError, r"mask is torch.bool \(2, 4\) on cpu, wanted bool or integers \(2, 5\)"),
        (torch.ones(2, 5), ValueError, r"mask is torch.float32 \(2, 5\)"),
        (torch.ones(2, 5, dtype=torch.bool, device="meta"), ValueError, "on meta, wanted .* on cpu"),
        ([[1] * 5] * 2, TypeError, "mask is .*, wanted a tensor"),
    ],
)  # fmt: skip
def test_a_mask_that_cannot_be_is_refused(mask: Any, kind: type[Exception], sentence: str) -> None:
    layer = MoE(H, 4)
    with pytest.raises(kind, match=sentence):
        layer(torch.zeros(2, 5, H), mask)
    with pytest.raises(ValueError, match=r"x has shape \(2, 5, 3\), wanted \(\.\.\., 16\)"):
        layer(torch.zeros(2, 5, 3))


def test_buffers_and_slices_of_experts_are_refused() -> None:
    whole = zeropp.Experts(parallel=1, slices=2)
    for layer, sentence in (
        (MoE(H, 4, expert=lambda: nn.BatchNorm1d(H)), "the experts of 'experts' have a buffer 'running_mean', .* leave Config.experts at None"),
        (MoE(H, 4, intermediate=8), "a Experts does not say what its intermediate size is, .* use slices=1"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=sentence):
            zeropp.prepare(layer, None, Config(experts=whole))
