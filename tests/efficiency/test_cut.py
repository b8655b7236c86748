# SPDX-License-Identifier: Apache-2.0
"""Sequence-length warm-up: what is cut of a batch, when, and that a run is the same at any number of ranks."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zeropp
from torch import Tensor, nn
from zeropp import Config, Efficiency, Growth
from zeropp.data import cut
from zeropp.data.cutting import cut_to

S = 12


def ids(rows: int = 2, seq: int = S) -> Tensor:
    return torch.arange(rows * seq).view(rows, seq)


def prepared(schedule: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return zeropp.prepare(model, optimizer, Config(efficiency=Efficiency(seq_length=schedule)))


def test_cuts_every_tensor_along_its_sequence() -> None:
    batch = {
        "input_ids": ids(),
        "labels": ids(),
        "attention_mask": torch.ones(2, S),
        "position_ids": torch.arange(S).expand(3, 2, S),
        "cache_position": torch.arange(S),
        "causal_mask": torch.zeros(2, 1, S, S),
        "inputs_embeds": torch.zeros(2, S, 5),
        "scores": torch.zeros(2),
        "features": torch.zeros(2, 7),
        "names": ["a", "b"],
    }
    short = cut_to(batch, 5)
    shapes = {name: tuple(one.shape) for name, one in short.items() if isinstance(one, Tensor)}
    assert shapes == {
        "input_ids": (2, 5), "labels": (2, 5), "attention_mask": (2, 5), "position_ids": (3, 2, 5), "cache_position": (5,), "causal_mask": (2, 1, 5, 5),
        "inputs_embeds": (2, 5, 5), "scores": (2,), "features": (2, 7),
    }  # fmt: skip
    assert torch.equal(short["input_ids"], ids()[:, :5])
    assert short["labels"].is_contiguous()
    assert short["names"] == ["a", "b"]
    assert batch["input_ids"].shape == (2, S)


def test_labels_of_an_encoder_decoder_model_have_a_length_of_their_own() -> None:
    short = cut_to({"input_ids": ids(), "labels": ids(seq=7), "decoder_input_ids": ids(seq=7)}, 5)
    assert [tuple(one.shape) for one in short.values()] == [(2, 5)] * 3
    assert cut_to({"input_ids": ids(), "labels": ids(seq=3)}, 5)["labels"].shape == (2, 3)


@dataclasses.dataclass
class Batch:
    tokens: Tensor
    name: str


Pair = collections.namedtuple("Pair", "inputs targets")


def test_labels_of_classes_are_not_cut() -> None:
    """Several classes a sample: transformers takes their labels as fractions."""
    model, _ = prepared(Growth(4, S, steps=10, multiple=4))
    batch = zeropp.data.cut({"input_ids": ids(), "labels": torch.ones(2, S + 5)}, model)
    assert batch["input_ids"].shape == (2, 4) and batch["labels"].shape == (2, S + 5)


@pytest.mark.parametrize("form", ["tuple", "list", "named", "dataclass", "tensor", "nested", "encoding"])
def test_keeps_the_form_of_the_batch(form: str) -> None:
    whole: dict[str, Callable[[], Any]] = {
        "tuple": lambda: (ids(), ids()), "list": lambda: [ids(), ids()], "named": lambda: Pair(ids(), ids()),
        "dataclass": lambda: Batch(ids(), "a"), "tensor": ids, "nested": lambda: {"a": (ids(), {"b": ids()})},
        "encoding": lambda: pytest.importorskip("transformers").BatchEncoding({"input_ids": ids()}),
    }  # fmt: skip
    batch = whole[form]()
    short = cut_to(batch, 5)
    assert type(short) is type(batch)
    found = {
        "tuple": lambda: short[1], "list": lambda: short[1], "named": lambda: short.targets, "dataclass": lambda: short.tokens,
        "tensor": lambda: short, "nested": lambda: short["a"][1]["b"], "encoding": lambda: short["input_ids"],
    }  # fmt: skip
    assert torch.equal(found[form](), ids()[:, :5])


def test_a_dimension_that_is_named_is_cut() -> None:
    short = cut(
        {"input_ids": ids(), "audio": torch.zeros(2, 3, S)}, prepared(Growth(4, S, steps=10))[0], dims={"audio": 2}
    )
    assert short["audio"].shape == (2, 3, 4)


def test_a_batch_that_is_short_enough_is_the_same_object() -> None:
    batch = {"input_ids": ids(seq=4)}
    assert cut_to(batch, 5) is batch
    assert cut_to(batch, None) is batch


def test_follows_the_step_and_leaves_evaluation_alone() -> None:
    model, optimizer = prepared(Growth(4, S, steps=4, multiple=4))
    seen = []
    for _ in range(6):
        seen.append(cut(ids(), model).shape[1])
        model.eval()
        assert cut(ids(), model).shape[1] == S
        model.train()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [4, 4, 8, 8, 12, 12]


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no sequence": (Growth(4, S, steps=4), torch.zeros(2, S), "has no tensor (batch, sequence) of whole numbers"),
    "packed": (
        Growth(4, S, steps=4),
        {"input_ids": ids(), "cu_seq_lens_q": torch.tensor([0, 3])},
        "the batch is packed",
    ),
    "left": (
        Growth(4, S, steps=4),
        {"input_ids": ids(), "attention_mask": torch.tensor([[0] * 6 + [1] * 6] * 2)},
        "padded on the left",
    ),
    "function": (
        lambda step: 2.5,
        ids(),
        "Efficiency.seq_length: 2.5 at step 0 is not allowed; wanted a whole number >= 1",
    ),
    "zero": (lambda step: 0, ids(), "Efficiency.seq_length: 0 at step 0 is not allowed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    schedule, batch, sentence = REFUSED[name]
    with pytest.raises(zeropp.ConfigError) as caught:
        cut(batch, prepared(schedule)[0])
    assert sentence in str(caught.value)


def test_refuses_a_model_that_is_not_prepared() -> None:
    with pytest.raises(zeropp.ConfigError, match="was not prepared"):
        cut(ids(), nn.Linear(2, 2))


def test_refuses_a_length_above_the_models() -> None:
    model = nn.Linear(2, 2)
    model.config = type("Config", (), {"max_position_embeddings": 16})()
    with pytest.raises(zeropp.ConfigError, match="an end of at most 16, the longest sequence of the model"):
        zeropp.prepare(model, None, Config(efficiency=Efficiency(seq_length=Growth(8, 32, steps=4))))
