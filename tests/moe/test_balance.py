# SPDX-License-Identifier: Apache-2.0
"""Counts of tokens by expert, and the bias that moves by them after every step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import of_all_ranks, on_ranks
from torch import Tensor, nn
from zeropp import Config, ConfigError, moe
from zeropp.comm.job import over
from zeropp.moe import Gate, MoE
from zeropp.zero.prepare import prepare_over

transformers = pytest.importorskip("transformers")
EXPERTS = 8
RATE = 0.01


def deepseek() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
        vocab_size=64, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, n_shared_experts=1,
    )  # fmt: skip
    made: nn.Module = transformers.DeepseekV3ForCausalLM(config)
    return made


def tokens(step: int) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))


def biases(model: nn.Module) -> list[Tensor]:
    return [value.clone() for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")]


@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks(1, 2)
def test_the_bias_of_transformers_moves_once_a_step(accumulate: int) -> None:
    model = deepseek()
    assert [int(count.sum()) for count in moe.load(model).values()] == [0, 0]
    assert moe.balance_bias(model, RATE) == [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)]
    model, optimizer = zeropp.prepare(
        model, torch.optim.AdamW(model.parameters()), Config(stage=3, accumulate=accumulate)
    )
    for step in range(4):
        before = biases(model)
        ids = tokens(step)
        model(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            model.eval()(input_ids=ids)  # counts for load, and moves no bias
            model.train()
        counts = moe.load(model, group=dist.group.WORLD)
        if (step + 1) % accumulate == 0:
            moe.load(model, reset=True)
        optimizer.step()
        optimizer.zero_grad()
        assert all(int(count.sum()) for count in counts.values())
        for old, new, count in zip(before, biases(model), counts.values(), strict=True):
            # The evaluation saw the same tokens before the step, so that it doubles the counts.
            mean = count.float().mean()
            moved = RATE * torch.sign(mean - count) if (step + 1) % accumulate == 0 else torch.zeros(EXPERTS)
            assert torch.equal(new, old + moved)
    assert all(torch.equal(a, b) for a, b in zip(*[of_all_ranks(biases(model))[i] for i in (0, -1)], strict=True))


@on_ranks(4)
def test_a_stage_of_a_pipeline_moves_its_own_biases() -> None:
    """Ranks 0 and 1 have another layer than ranks 2 and 3, with another number of experts."""
    rank = dist.get_rank()
    mine = over([0, 1] if rank < 2 else [2, 3])
    torch.manual_seed(rank // 2)
    layer = MoE(16, 4 if rank < 2 else 6, 2, gate=Gate(bias_rate=RATE))
    model, optimizer = prepare_over(mine, layer, torch.optim.SGD(layer.parameters(), lr=0.1), Config(stage=3))
    model(torch.randn(9 + rank, 16, generator=torch.Generator().manual_seed(rank))).sum().backward()
    both = of_all_ranks(layer.counts.tolist())[rank // 2 * 2 :][:2]
    optimizer.step()
    counts = torch.tensor(both).sum(0).float()
    assert torch.equal(layer.gate.e_score_correction_bias, RATE * torch.sign(counts.mean() - counts))


def test_the_bias_of_a_layer_makes_its_experts_even() -> None:
    torch.manual_seed(0)
    layer = MoE(16, 4, 1, gate=Gate(scoring="sigmoid", bias_rate=0.02))
    x = torch.randn(400, 16) + 0.5 * torch.randn(16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    layer(x)
    uneven = layer.counts.max().item()
    for _ in range(60):
        layer(x).sum().backward()
        optimizer.step()
    layer(x)
    assert layer.counts.max().item() < 130 < uneven
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()  # one that has none of the layer's parameters
    assert int(layer.gate.tally.trained.sum()) == 400


def test_counts_by_layer() -> None:
    model = nn.ModuleDict({"a": MoE(16, 4, 2), "b": MoE(16, 3, 1)})
    model["b"](model["a"](torch.randn(10, 16)))
    found = moe.load(model, reset=True)
    assert {name: (len(count), int(count.sum())) for name, count in found.items()} == {
        "a.experts": (4, 20), "b.experts": (3, 10),
    }  # fmt: skip
    assert all(int(count.sum()) == 0 for count in moe.load(model).values())


def test_misuse_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"zeropp.moe.load: Linear has no layer of experts"):
        moe.load(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="no module of MoE has an e_score_correction_bias"):
        moe.balance_bias(MoE(16, 4))
    with pytest.raises(ConfigError, match="balance_bias: rate: 0 is not allowed"):
        moe.balance_bias(MoE(16, 4), 0)
    router = nn.Linear(2, 2)
    router.e_score_correction_bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigError, match=r"'0.e_score_correction_bias' is a parameter, .*; wanted a buffer"):
        moe.balance_bias(nn.Sequential(router))
