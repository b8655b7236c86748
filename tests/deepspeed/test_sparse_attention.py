# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's sparse attention through zeropp: its layouts, its JSON, its module.

sparse_layouts.json has the first digits of a SHA-256 of each layout that DeepSpeed 0.18.9 makes, in the order of cases().
To make it again, with that version's file:

    python tests/deepspeed/test_sparse_attention.py deepspeed/ops/sparse_attention/sparsity_config.py
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from torch import Tensor
from zeropp import Config, ConfigError
from zeropp.deepspeed import sparse_attention as ours
from zeropp.ops.patterns import from_section

EXPECTED = Path(__file__).with_name("sparse_layouts.json")
HEADS, BLOCK = 4, 16
Case = tuple[str, dict[str, Any], int]  # class, its arguments, blocks


def cases() -> Iterator[Case]:
    """Every mode, with numbers that cut windows short; none with random blocks."""
    both = ("unidirectional", "bidirectional")
    for blocks, window, last, patterns, attention, rows in itertools.product(
        (3, 4, 7, 8, 11), (2, 4), (1, 2), (1, 2), both, (False, True)
    ):
        if not (window % last or patterns > window // last or (attention == both[0] and rows)):
            yield "FixedSparsityConfig", {
                "different_layout_per_head": True, "num_local_blocks": window, "num_global_blocks": last, "attention": attention,
                "horizontal_global_attention": rows, "num_different_global_patterns": patterns,
            }, blocks  # fmt: skip
    globals_ = ({"global_block_indices": [0]}, {"global_block_indices": [1, 3]},
                {"global_block_indices": [0, 3], "global_block_end_indices": [2, 9]})  # fmt: skip
    for blocks, windows, chosen, attention, rows in itertools.product(
        (4, 7, 8), ([4], [1, 2], [2, 3, 1]), globals_, both, (False, True)
    ):
        if not (attention == both[0] and rows):
            yield "VariableSparsityConfig", {
                "num_random_blocks": 0, "local_window_blocks": windows, **chosen, "attention": attention,
                "horizontal_global_attention": rows,
            }, blocks  # fmt: skip
    for blocks, window, attention in itertools.product((4, 7, 8), (1, 3), both):
        sliding = {"num_sliding_window_blocks": window, "attention": attention}
        for chosen in globals_:
            yield "BSLongformerSparsityConfig", {**sliding, **chosen}, blocks
        for first in (1, 2):
            yield "BigBirdSparsityConfig", {**sliding, "num_random_blocks": 0, "num_global_blocks": first}, blocks
        yield "LocalSlidingWindowSparsityConfig", sliding, blocks
    yield "DenseSparsityConfig", {}, 5
    for name in ("Fixed", "Variable", "BSLongformer", "LocalSlidingWindow"):
        yield f"{name}SparsityConfig", {}, 8  # the defaults


def layout_of(module: Any, case: Case) -> Tensor:
    name, keys, blocks = case
    layout: Tensor = getattr(module, name)(HEADS, BLOCK, **keys).make_layout(blocks * BLOCK)
    return layout


def digest(layout: Tensor) -> str:
    return hashlib.sha256(layout.to(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def test_layouts_are_deepspeeds() -> None:
    """Where one of DeepSpeed's causal layouts has blocks above its diagonal, the file has it without them."""
    expected = json.loads(EXPECTED.read_text())
    assert len(list(cases())) == len(expected) >= 207
    differ = [case for case, one in zip(cases(), expected, strict=True) if digest(layout_of(ours, case)) != one]
    assert not differ


def test_causal_layouts_never_look_ahead() -> None:
    for case in cases():
        if case[1].get("attention") == "unidirectional":
            assert not layout_of(ours, case).triu(1).any()


def test_random_blocks_are_the_same_on_all_ranks_and_as_many_as_asked() -> None:
    made = [ours.BigBirdSparsityConfig(HEADS, BLOCK, num_random_blocks=2).make_layout(320) for _ in range(2)]
    assert torch.equal(*made)
    plain = ours.BigBirdSparsityConfig(HEADS, BLOCK, num_random_blocks=0).make_layout(320)
    more = (made[0] - plain).sum(2)
    assert int(more.min()) >= 0 and torch.equal(more[:, 1:], torch.full_like(more[:, 1:], 2))
    other = ours.BigBirdSparsityConfig(HEADS, BLOCK, num_random_blocks=2)
    other.seed = 1
    assert not torch.equal(other.make_layout(320), made[0])


SECTIONS: list[dict[str, Any]] = [
    {},
    {"mode": "dense", "block": 32},
    {
        "mode": "fixed",
        "different_layout_per_head": True,
        "num_different_global_patterns": 4,
        "attention": "unidirectional",
    },
    {
        "mode": "variable",
        "local_window_blocks": [1, 2],
        "global_block_indices": [0, 3],
        "global_block_end_indices": [1, 5],
    },
    {"mode": "bigbird", "num_sliding_window_blocks": 5, "num_global_blocks": 2},
    {"mode": "bslongformer", "global_block_indices": [0, 2]},
]
CLASSES = {
    "fixed": "Fixed",
    "dense": "Dense",
    "variable": "Variable",
    "bigbird": "BigBird",
    "bslongformer": "BSLongformer",
}


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_json_means_what_the_classes_mean(section: dict[str, Any]) -> None:
    config = Config.from_json({"train_batch_size": 1, "sparse_attention": section})
    assert config.efficiency is not None
    pattern = from_section(config.efficiency.attention)
    keys = {key: value for key, value in section.items() if key != "mode"}
    if section.get("mode") == "bigbird":
        keys["num_random_blocks"] = 0  # the JSON's default; the class has 1
    theirs = getattr(ours, f"{CLASSES[section.get('mode', 'fixed')]}SparsityConfig")(HEADS, **{"block": 16, **keys})
    assert torch.equal(pattern.mask(HEADS, 9), theirs.make_layout(9 * theirs.block).bool())


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"mode": "fixd"}, r"sparse_attention.mode: 'fixd' is not allowed; .*did you mean 'fixed'"),
        ({"mode": "dense", "num_local_blocks": 4}, "sparse_attention.num_local_blocks: unknown key .* of mode 'dense'"),
        ({"num_locl_blocks": 4}, "did you mean 'num_local_blocks'"),
        ({"block": 24}, "sparse_attention.block: 24 is not allowed; wanted 16, 32, 64 or 128"),
        ({"num_global_blocks": 3}, "a number that divides num_local_blocks, 4"),
        ({"num_different_global_patterns": 2}, "different_layout_per_head: False is not allowed; wanted true for 2"),
        ({"num_different_global_patterns": 5, "different_layout_per_head": True}, "wanted at most 4"),
        ({"attention": "causal"}, "wanted unidirectional or bidirectional"),
        ({"attention": "unidirectional", "horizontal_global_attention": True}, "false where attention is unidirectional"),
        ({"mode": "variable", "global_block_indices": [2], "global_block_end_indices": [2]}, "a larger number for each"),
        ({"mode": "variable", "local_window_blocks": []}, "a list of whole numbers"),
        ({"mode": "bigbird", "num_random_blocks": -1}, "sparse_attention.num_random_blocks"),
        ([], "a section such as"),
    ],
)  # fmt: skip
def test_a_section_that_cannot_be_is_refused(section: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Config.from_json({"train_batch_size": 1, "sparse_attention": section})


class Random(ours.SparsityConfig):
    """A layout drawn block by block, as DeepSpeed's own tests draw them; each row has its diagonal."""

    def make_layout(self, seq_len: int) -> Tensor:
        layout = self.setup_layout(seq_len)
        draw = torch.rand(layout.shape, generator=torch.Generator().manual_seed(0)) < 0.6
        return (draw | torch.eye(layout.shape[1], dtype=torch.bool)).long()


@pytest.mark.parametrize("masks", ["", "add", "mul"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("block", "width", "dim"), [(16, 256, 32), (32, 256, 32), (16, 576, 32), (32, 576, 32), (64, 256, 192)]
)
def test_attention_over_a_random_layout(block: int, width: int, dim: int, dtype: torch.dtype, masks: str) -> None:
    """DeepSpeed's test_softmax and test_matmul, which ask for its kernels one by one, as one attention: the same blocks, widths, types
    and masks, forward and backward, against dense float64. Bounds: a rounding of the type, some sums of it in fp16's case."""
    draw = torch.Generator().manual_seed(block + width)
    q, k, v, grad = (torch.randn(2, HEADS, width, dim, generator=draw).to(dtype).requires_grad_() for _ in range(4))
    module = ours.SparseSelfAttention(Random(HEADS, block), masks or "add", "mul" if masks == "add" else "add", width)
    seen = module.get_layout(width).bool().repeat_interleave(block, 1).repeat_interleave(block, 2)[None]
    given: dict[str, Any] = {}
    if masks:
        keys = torch.rand(2, width, generator=draw) < 0.8
        later = torch.ones(width, width, dtype=torch.bool).tril()
        given["key_padding_mask"] = (
            keys.to(dtype) if masks == "mul" else torch.zeros(2, width).masked_fill(~keys, -math.inf)
        )
        given["attn_mask"] = later.to(dtype) if masks == "add" else torch.zeros(width, width).masked_fill(~later, -1e4)
        seen = seen & later & keys[:, None, None]
    out = module(q, k.transpose(2, 3) if masks == "add" else k, v, **given)
    mine = torch.autograd.grad(out, (q, k, v), grad.detach())
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scores = (wide[0] @ wide[1].transpose(2, 3) / math.sqrt(dim)).masked_fill(~seen, -1e30)
    want = torch.where(seen.any(3, keepdim=True), scores.softmax(3), 0.0) @ wide[2]
    theirs = torch.autograd.grad(want, wide, grad.detach().double())
    unit = 2.0**-10 if dtype == torch.float16 else 2.0**-20
    for got, true in zip((out, *mine), (want, *theirs), strict=True):
        assert (got.double() - true).abs().max() <= 4 * unit * true.abs().max()


def test_a_short_sequence_sees_the_first_blocks_of_the_master_layout() -> None:
    module = ours.SparseSelfAttention(ours.FixedSparsityConfig(HEADS, BLOCK, num_local_blocks=4), max_seq_length=256)
    assert module.master_layout.shape == (HEADS, 16, 16) and list(module.state_dict()) == ["master_layout"]
    q = torch.randn(1, HEADS, 96, 16)
    layout = zeropp.ops.SparseLayout.from_mask(module.master_layout[:, :6, :6], BLOCK)
    assert torch.equal(module(q, q, q), zeropp.ops.sparse_attention(q, q, q, layout))


Q = torch.zeros(1, HEADS, 64, 16)


def module(**more: Any) -> Any:
    return ours.SparseSelfAttention(ours.FixedSparsityConfig(HEADS, BLOCK), max_seq_length=128, **more)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: module()(Q[:, :, :50], Q[:, :, :50], Q[:, :, :50]), ValueError, "50 long, wanted a multiple of the block, 16"),
        (lambda: module()(*[torch.zeros(1, HEADS, 256, 16)] * 3), ValueError, "at most 128"),
        (lambda: module()(Q, Q, Q, rpe=torch.zeros(64, 64)), ConfigError, "rpe is not supported"),
        (lambda: module()(Q, Q, Q, key_padding_mask=torch.full((1, 64), -0.5)), ConfigError, "changes scores; wanted 0, and -10000"),
        (lambda: module()(Q, Q, Q, attn_mask=torch.ones(64, 64).triu()), ConfigError, "hides more than later keys"),
        (lambda: module(attn_mask_mode="or"), ConfigError, "wanted 'add' or 'mul'"),
        (lambda: ours.SparsityConfig(HEADS).make_layout(64), ConfigError, "it has no layout"),
        (lambda: ours.FixedSparsityConfig(HEADS, num_global_blocks=3), ConfigError, "divides num_local_blocks"),
    ],
)  # fmt: skip
def test_misuse_is_refused(call: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()


def test_a_model_with_deepspeeds_module_keeps_its_own_patterns() -> None:
    """In DeepSpeed the section is for the script that builds such modules: it changes no model by itself."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.attention = torch.nn.Linear(16, 16), module()

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(self.project(x), x, x)  # type: ignore[no-any-return]

    model = Model()
    want = model(Q + 1)
    config = Config.from_json({"train_batch_size": 1, "sparse_attention": {"mode": "fixed"}})
    prepared, _ = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), config)
    assert torch.equal(prepared(Q + 1), want)


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("sparsity_config", sys.argv[1])
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    made = []
    for case in cases():
        layout = layout_of(theirs, case)
        made.append(digest(layout.tril() if case[1].get("attention") == "unidirectional" else layout))
    EXPECTED.write_text(json.dumps(made, indent=0) + "\n")
