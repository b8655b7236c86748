# SPDX-License-Identifier: Apache-2.0
"""``zeropp.estimate`` of a model whose experts lie on different ranks: the formulas, what ``zeropp.memory`` says, and the batch where
bringing tokens costs as much as bringing weights."""

from __future__ import annotations

import itertools
import math
from typing import Any

import moe_models
import pytest
import torch
import torch.distributed as dist
import zeropp
from moe_models import batch, loss_of
from ranks import on_ranks
from zeropp.cli import main
from zeropp.moe.crossing import hit

LARGEST = 0.03
"""What estimate may be off, as in tests/zero/test_estimate.py."""


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return moe_models.build(name)


@pytest.mark.parametrize(("ranks", "parallel"), [(4, 1), (4, 2), (4, 4), (8, 4)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_formulas(stage: int, ranks: int, parallel: int) -> None:
    """bf16 with Adam: stage 1 4 P/parallel + 12 P/N bytes, 2: 2 P/parallel + 14 P/N, 3: 16 P/N."""
    config = zeropp.Config(stage=stage, precision="bf16", experts=zeropp.Experts(parallel=parallel, slices=2))
    said = zeropp.estimate(on_meta("Mixtral"), config, ranks=ranks)["experts"]
    whole = sum(p.numel() for n, p in on_meta("Mixtral").named_parameters() if ".experts." in n)
    assert said["parameters"] == whole and said["of_a_token"] == whole // 2
    part = whole / parallel
    wanted = {1: 4 * part + 12 * whole / ranks, 2: 2 * part + 14 * whole / ranks, 3: 16 * whole / ranks}[stage]
    assert abs(said["states"] - wanted) <= LARGEST * wanted


@on_ranks(2, 4)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_estimate_is_what_memory_says(stage: int) -> None:
    for precision in ("bf16", None):
        config = zeropp.Config(stage=stage, precision=precision, experts=2)
        said = zeropp.estimate(on_meta("Mixtral"), config, ranks=dist.get_world_size())
        model = moe_models.build("Mixtral", "grouped_mm")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = zeropp.prepare(model, optimizer, config)
        loss_of(model, batch(0, dist.get_rank())).backward()
        optimizer.step()
        held = zeropp.memory(model, optimizer)["cpu"]
        for kind in ("params", "grads", "master", "optimizer"):
            # A unit is padded to a multiple of the ranks, each of its parameters to 64 bytes.
            assert abs(held[kind]["held"] - said["cpu"][kind]) <= LARGEST * said["cpu"][kind] + 256, (kind, precision)


def test_files_of_experts_alone() -> None:
    experts = zeropp.Experts(parallel=2, offload=zeropp.Offload(optimizer="nvme", path="."))
    plain = zeropp.estimate(on_meta("Mixtral"), zeropp.Config(precision="bf16", experts=2), ranks=2)
    said = zeropp.estimate(on_meta("Mixtral"), zeropp.Config(precision="bf16", experts=experts), ranks=2)
    whole = said["experts"]["parameters"]
    assert said["nvme"] == {"master": 4 * whole // 2, "optimizer": 8 * whole // 2}
    assert said["cpu"]["master"] == plain["cpu"]["master"] - said["nvme"]["master"]


@pytest.mark.parametrize(("experts", "ranks", "choices"), [(8, 2, 2), (8, 4, 3), (6, 3, 2)])
def test_ranks_that_a_token_meets(experts: int, ranks: int, choices: int) -> None:
    """Counted over all choices."""
    every = list(itertools.combinations(range(experts), choices))
    own = experts // ranks
    met = sum(len({expert // own for expert in one}) for one in every) / len(every)
    assert math.isclose(ranks * hit(experts, ranks, choices), met)


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 74_000), (8, 28_000)])
def test_crossing_of_qwen3_30b(ranks: int, tokens: int) -> None:
    """The figures of the paper's formula for 128 experts of 768, k 8, in any number of layers."""
    import transformers

    with torch.device("meta"):
        config = transformers.Qwen3MoeConfig(num_experts=128, num_hidden_layers=2, num_experts_per_tok=8)
        config.update({"hidden_size": 2048, "moe_intermediate_size": 768, "vocab_size": 512})
        model = transformers.Qwen3MoeForCausalLM(config)
    said = zeropp.estimate(model, zeropp.Config(experts=ranks), ranks=ranks)["experts"]
    assert abs(said["crossing"] - tokens) <= 500
    assert math.isclose(said["weight_bytes"] / said["token_bytes"], said["crossing"], rel_tol=1e-4)


def test_several_numbers_of_ranks() -> None:
    """The second layer alone is divided."""
    experts = zeropp.Experts(parallel={"*.layers.0.*": 1, "*": 2})
    one = zeropp.estimate(on_meta("Mixtral"), zeropp.Config(experts=experts), ranks=2)["experts"]
    both = zeropp.estimate(on_meta("Mixtral"), zeropp.Config(experts=2), ranks=2)["experts"]
    assert one["weight_bytes"] * 2 == both["weight_bytes"] and one["crossing"] == both["crossing"]


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    moe_models.build("Mixtral").config.save_pretrained(tmp_path)
    assert main(["estimate", str(tmp_path), "--ranks", "4", "--experts", "2"]) == 0
    said = capsys.readouterr().out
    assert "experts on 2 ranks" in said and "a rank both are equal" in said
