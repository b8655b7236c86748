# SPDX-License-Identifier: Apache-2.0
"""Shallower copies, and distillation in tiles against the whole logits."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from zeropp import Config, ConfigError
from zeropp.moe import Distill, MoE, shallower

transformers = pytest.importorskip("transformers")
U = 2.0**-24
CLASSES, LAYERS = 64, 4


@functools.cache
def teacher() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=CLASSES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, initializer_range=0.2,
    )  # fmt: skip
    made: nn.Module = transformers.MixtralForCausalLM(config).eval()
    return made


def batch(rank: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, CLASSES, (2, 12), generator=torch.Generator().manual_seed(rank))
    labels = ids.clone()
    labels[0, : 5 + rank] = -100
    return ids, labels


def whole_loss(student: Any, ids: Tensor, labels: Tensor, weight: float, heat: float) -> Tensor:
    """Return the loss as the paper states it, from whole logits."""
    output = student(input_ids=ids, labels=labels)
    with torch.no_grad():
        theirs = teacher()(input_ids=ids).logits[:, :-1].flatten(0, 1)
    counts = labels[:, 1:].flatten() != -100
    ours = F.log_softmax(output.logits[:, :-1].flatten(0, 1)[counts] / heat, 1)
    apart = F.kl_div(ours, F.softmax(theirs[counts] / heat, 1), reduction="sum") / counts.sum()
    total: Tensor = output.loss + weight * heat**2 * apart
    return total


@pytest.mark.parametrize("tile", [1, 7, None])
def test_distill_equals_the_whole_logits(tile: int | None) -> None:
    student = shallower(teacher(), 3)
    ids, labels = batch(0)
    distill = Distill(student, teacher(), weight=0.7, temperature=2.0, until=5, tile=tile)
    loss = distill(step=4, input_ids=ids, labels=labels)
    mine = torch.autograd.grad(loss, list(student.parameters()))
    want = whole_loss(student, ids, labels, 0.7, 2.0)
    theirs = torch.autograd.grad(want, list(student.parameters()))
    # Sums over at most 24 tokens and 64 classes in another order.
    assert abs(loss.item() - want.item()) <= 32 * U * want.item()
    for (name, _), a, b in zip(student.named_parameters(), mine, theirs, strict=True):
        assert (a - b).abs().max().item() <= 256 * U * max(b.abs().max().item(), 1e-3), name
    alone = distill(step=5, input_ids=ids, labels=labels)
    assert abs(alone.item() - student(input_ids=ids, labels=labels).loss.item()) <= 32 * U * alone.item()
    assert alone.item() != loss.item()
    unlabelled = Distill(copy.deepcopy(teacher()), teacher())(input_ids=ids)
    balance = teacher()(input_ids=ids).aux_loss * teacher().config.router_aux_loss_coef  # type: ignore[operator, union-attr]
    assert abs(unlabelled.item() - balance.item()) <= 1e-6  # a student that is its teacher


@pytest.mark.parametrize("case", [{"stage": 1}, {"stage": 3}, {"stage": 3, "host_copy": "off", "prefetch": 0}])
@on_ranks(2)
def test_distill_with_both_models_prepared(case: dict[str, Any]) -> None:
    rank = dist.get_rank()
    student = shallower(teacher(), 3)
    plain = copy.deepcopy(student)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    student, optimizer = zeropp.prepare(student, sgd(student.parameters()), Config(**case))
    shared, _ = zeropp.prepare(copy.deepcopy(teacher()), None, Config(**case))
    distill = Distill(student, shared, weight=0.7, temperature=2.0, until=2, tile=7)
    reference = sgd(plain.parameters())
    for step in range(3):
        ids, labels = batch(rank)
        distill(step=step, input_ids=ids, labels=labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        losses = [whole_loss(plain, *batch(r), 0.7 if step < 2 else 0.0, 2.0) for r in range(2)]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        reference.step()
    with zeropp.gathered(student):
        for (name, got), want in zip(student.named_parameters(), plain.parameters(), strict=True):
            assert (got - want).abs().max().item() <= 256 * U * max(want.abs().max().item(), 1e-2), name


def test_a_shallower_model_has_the_teachers_layers_and_loads_again(tmp_path: Path) -> None:
    whole = teacher()
    student = shallower(whole, 3)
    assert whole.config.num_hidden_layers == LAYERS and student.config.num_hidden_layers == 3  # type: ignore[union-attr]
    theirs, ours = whole.state_dict(), student.state_dict()
    for new, old in enumerate((0, 2, 3)):  # the first and the last among them, the others even
        for name in [name for name in ours if name.startswith(f"model.layers.{new}.")]:
            assert torch.equal(ours[name], theirs[name.replace(f".{new}.", f".{old}.", 1)]), name
    student.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = type(student).from_pretrained(tmp_path).eval()  # type: ignore[attr-defined]
    ids = batch(0)[0]
    assert torch.equal(loaded(input_ids=ids).logits, student(input_ids=ids).logits)
    assert loaded.generate(ids, max_new_tokens=2).shape == (2, 14)
    chosen = shallower(whole, [1, 2])
    assert torch.equal(
        chosen.state_dict()["model.layers.0.input_layernorm.weight"], theirs["model.layers.1.input_layernorm.weight"]
    )


def test_a_stack_among_other_modules_is_cut() -> None:
    block = functools.partial(nn.TransformerEncoderLayer, 8, 2, 16)
    model = nn.Sequential(nn.Linear(4, 8), block(), block(), block(), nn.Linear(8, 2))
    cut = shallower(model, [0, 2])
    assert len(model) == 5 and len(cut) == 4 and cut(torch.zeros(3, 4)).shape == (3, 2)
    assert torch.equal(cut[2].linear1.weight, model[3].linear1.weight)


class Capped(nn.Module):
    """A model that changes its logits after its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.tanh(self.head(self.embed(input_ids)))


def test_misuse_is_refused() -> None:
    ids, labels = batch(0)
    for keywords, sentence in (
        ({"weight": -1.0}, r"Distill.weight: -1.0 is not allowed"),
        ({"temperature": 0}, r"Distill.temperature: 0 is not allowed"),
        ({"until": -1}, r"Distill.until: -1 is not allowed"),
        ({"tile": 0}, r"Distill.tile: 0 is not allowed"),
        ({"student": nn.Linear(2, 2)}, r"the student, a Linear, has no get_output_embeddings\(\)"),
        ({"student": 3}, r"the student is .*; wanted a torch.nn.Module"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Distill(**{"student": teacher(), "teacher": teacher(), **keywords})
    with pytest.raises(ConfigError, match="until is 3 and no step was given"):
        Distill(teacher(), teacher(), until=3)(input_ids=ids)
    with pytest.raises(ConfigError, match="no labels, and no teacher in this step"):
        Distill(teacher(), teacher(), until=3)(step=3, input_ids=ids)
    with pytest.raises(ConfigError, match=r"labels have shape \(2, 3\); wanted \(2, 12\)"):
        Distill(teacher(), teacher())(input_ids=ids, labels=labels[:, :3])
    with pytest.raises(ConfigError, match="the student, a Capped, does not return its head's logits as they are"):
        Distill(Capped(), Capped())(input_ids=ids, labels=labels)
    for layers, sentence in (
        (5, r"layers: 5 is not allowed; wanted at most 4"),
        (0, r"layers: 0 is not allowed"),
        ([2, 1], r"layers: \[2, 1\] is not allowed; wanted numbers of layers 0 to 3, ascending"),
        ([4], r"wanted numbers of layers 0 to 3"),
        ([], r"wanted numbers of layers"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            shallower(teacher(), layers)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"zeropp.moe.shallower: Linear has no layers"):
        shallower(nn.Linear(2, 2), 1)
    with pytest.raises(
        ConfigError, match=r"has several stacks of layers \('encoder.layers', 'decoder.layers'\); wanted one"
    ):
        shallower(nn.Transformer(8, 2, 2, 2, 16), 1)
    prepared, _ = zeropp.prepare(nn.ModuleList([MoE(8, 2) for _ in range(2)]), None)
    with pytest.raises(ConfigError, match=r"zeropp.moe.shallower: parameter '0.gate.weight' is prepared"):
        shallower(prepared, 1)
