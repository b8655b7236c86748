# SPDX-License-Identifier: Apache-2.0
"""``zeropp.estimate`` of a model whose experts lie on different ranks: the formulas, what ``zeropp.memory`` says, and the batch where
bringing tokens costs as much as bringing weights."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import moe_models
import pytest
import torch
import torch.distributed as dist
import zeropp
from moe_models import batch, loss_of
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from zeropp.cli import main
from zeropp.moe.crossing import hit
from zeropp.parallel.tensor import own_plan

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


SHARED = zeropp.Experts(parallel=4, shared_by="tp")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_formulas_where_ranks_share_tokens(stage: int) -> None:
    """tp 2 x dp 2: each of four ranks has a quarter of the experts, and of the rest of the model a half, over two data ranks."""
    said = zeropp.estimate(on_meta("Mixtral"), zeropp.Config(stage=stage, precision="bf16", experts=SHARED),
                           mesh={"dp": 2, "tp": 2}, sequence=64)  # fmt: skip
    whole = sum(p.numel() for n, p in on_meta("Mixtral").named_parameters() if ".experts." in n)
    part = whole / 4
    assert said["experts"]["parameters"] == whole
    assert abs(said["experts"]["states"] - 16 * part) <= LARGEST * 16 * part  # one rank has them, whatever the stage
    halves = zeropp.Experts(parallel=2, shared_by="tp")
    said = zeropp.estimate(on_meta("Mixtral"), zeropp.Config(stage=stage, precision="bf16", experts=halves),
                           mesh={"dp": 2, "tp": 2})  # fmt: skip
    wanted = {1: 4 * whole / 2 + 12 * whole / 4, 2: 2 * whole / 2 + 14 * whole / 4, 3: 16 * whole / 4}[stage]
    assert abs(said["experts"]["states"] - wanted) <= LARGEST * wanted


def test_rows_that_a_rank_receives() -> None:
    """Of T = 64 tokens of width 32 in 2 layers, on 4 ranks of which two share tokens, in two bytes an element, forward and backward: T / 2
    are routed, to 3 other ranks with a chance of 1/2 each, and come back; T / 2 rows are gathered."""
    config = zeropp.Config(precision="bf16", experts=SHARED)
    said = zeropp.estimate(on_meta("Mixtral"), config, mesh={"dp": 2, "tp": 2}, sequence=64)
    assert said["traffic"]["experts"] == 2 * 2 * 32 * 2 * (2 * 32 * 3 * 0.5 + 32)
    config = zeropp.Config(precision="bf16", experts=4)
    said = zeropp.estimate(on_meta("Mixtral"), config, mesh={"dp": 2, "sp": 2}, sequence=64, micro_batches=3)
    assert said["traffic"]["experts"] == 3 * 2 * 2 * 32 * 2 * (2 * 32 * 3 * 0.5)


@on_ranks(4)
@pytest.mark.parametrize("parallel", [2, 4])
@pytest.mark.parametrize("named", [True, False])
def test_estimate_of_shared_tokens_is_what_memory_says(parallel: int, named: bool) -> None:
    """By the name of a dimension, and by a mesh that runs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = zeropp.Config(stage=2, experts=zeropp.Experts(parallel=parallel, shared_by="tp" if named else mesh["tp"]))
    said = zeropp.estimate(on_meta("Mixtral"), config, mesh={"dp": 2, "tp": 2} if named else mesh)
    model = moe_models.build("Mixtral", "grouped_mm")
    plan = {name: style for name, style in own_plan(model, 2, "test", "").items() if ".experts" not in name}
    zeropp.parallel.tensor(model, mesh["tp"], plan)
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config, mesh=mesh)
    loss_of(model, batch(0, mesh.get_local_rank("dp"))).backward()
    optimizer.step()
    held = zeropp.memory(model, optimizer)["cpu"]
    for kind in ("params", "grads", "optimizer"):
        assert abs(held[kind]["held"] - said["cpu"][kind]) <= LARGEST * said["cpu"][kind] + 256, kind


def test_speed_counts_the_experts_of_a_token() -> None:
    """With two ranks that share tokens each computes half of what a token passes, of experts as of all else."""
    given: dict[str, Any] = {"tokens": 100, "tflops": 1.0}
    alone = zeropp.estimate(on_meta("Mixtral"), zeropp.Config(experts=2), ranks=2, **given)
    experts = zeropp.Experts(parallel=2, shared_by="tp")
    both = zeropp.estimate(on_meta("Mixtral"), zeropp.Config(experts=experts), mesh={"tp": 2}, **given)
    idle = alone["experts"]["parameters"] - alone["experts"]["of_a_token"]
    assert alone["compute_seconds"] == pytest.approx(6 * (alone["parameters"] - idle) * 100 / 1e12)
    assert both["compute_seconds"] == pytest.approx(6 * (both["parameters"] - idle / 2) * 100 / 1e12)


@pytest.mark.parametrize(
    ("experts", "keywords", "sentence"),
    [
        (2, {"mesh": {"dp": 2, "tp": 2}}, "name the ranks that hold the same tokens, Experts(shared_by=mesh['tp'])"),
        (zeropp.Experts(shared_by="sp"), {"mesh": {"dp": 2, "tp": 2}}, "Experts.shared_by 'sp' is no dimension of the mesh {'dp': 2, 'tp': 2}"),
        (zeropp.Experts(shared_by="tp"), {"ranks": 2}, "Experts.shared_by 'tp' is no dimension of the mesh {}"),
        (zeropp.Experts(parallel=3, shared_by="tp"), {"mesh": {"dp": 2, "tp": 2}}, "it is no multiple of the 2 ranks of Experts.shared_by"),
    ],
)  # fmt: skip
def test_refusals_of_shared_tokens(experts: Any, keywords: dict[str, Any], sentence: str) -> None:
    with pytest.raises(zeropp.ConfigError, match=re.escape(sentence)):
        zeropp.estimate(on_meta("Mixtral"), zeropp.Config(experts=experts), **keywords)


@on_ranks(2)
def test_a_group_has_no_name() -> None:
    """Of a group that has as many ranks as tp; of another one; and without a mesh, where all ranks partition the model."""
    group = dist.group.WORLD
    config = zeropp.Config(experts=zeropp.Experts(shared_by=group))
    by_name = zeropp.Config(experts=zeropp.Experts(shared_by="tp"))
    mesh = {"dp": 2, "tp": 2}
    assert zeropp.estimate(on_meta("Mixtral"), config, mesh=mesh) == zeropp.estimate(
        on_meta("Mixtral"), by_name, mesh=mesh
    )
    with pytest.raises(zeropp.ConfigError, match=r"Experts.shared_by 2 ranks is no dimension of the mesh \{'tp': 4\}"):
        zeropp.estimate(on_meta("Mixtral"), config, mesh={"tp": 4})
    alone = zeropp.Config(experts=2)
    said = zeropp.estimate(
        on_meta("Mixtral"), zeropp.Config(experts=zeropp.Experts(parallel=2, shared_by=group)), ranks=2
    )
    assert said["cpu"] == zeropp.estimate(on_meta("Mixtral"), alone, ranks=2)["cpu"]


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    moe_models.build("Mixtral").config.save_pretrained(tmp_path)
    assert main(["estimate", str(tmp_path), "--ranks", "4", "--experts", "2"]) == 0
    said = capsys.readouterr().out
    assert "experts on 2 ranks" in said and "a rank both are equal" in said
    assert main(["estimate", str(tmp_path), "--mesh", "dp=2", "tp=2", "--experts", "4"]) == 0
    assert "experts on 4 ranks" in capsys.readouterr().out
