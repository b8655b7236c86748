# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's sections on data efficiency through ``zeropp.initialize``: what reaches the model, the loader and the rates."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig

SEQ = 16
LINEAR = {
    "min_difficulty": 4, "max_difficulty": SEQ, "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 4},
}  # fmt: skip
LENGTHS = [4, 8, 12, 16, 16]  # steps count from 1: 4 + 12 t / 4 is 7, 10, 13 and 16, rounded down to multiples of 4


class Model(nn.Module):
    """A model that notes what its forward gets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 1))
        self.seen: list[Any] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens.shape[1])
        return self.net(tokens).square().mean()


class ForDeepSpeed(Model):
    """A model with the keywords that DeepSpeed passes."""

    def forward(  # type: ignore[override]
        self, tokens: Tensor, curriculum_seqlen: int = 0, progressive_layer_drop: bool = False, pld_theta: float = 1.0
    ) -> Tensor:
        self.seen.append((tokens.shape[1], curriculum_seqlen, progressive_layer_drop, pld_theta))
        return self.net(tokens[:, : curriculum_seqlen or None]).square().mean()


def settings(**sections: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"lr": 1.0}}, **sections,
    }  # fmt: skip


def tokens() -> Tensor:
    return torch.arange(4 * SEQ).view(4, SEQ) % 11


def train(engine: Any, steps: int) -> None:
    for _ in range(2 * steps):
        engine.backward(engine(tokens()))
        engine.step()


def test_batches_are_cut_for_a_model_that_knows_nothing_of_it() -> None:
    model = Model()
    engine, *_ = zeropp.initialize(
        model=model, config=settings(curriculum_learning={"enabled": True, "curriculum_type": "seqlen", **LINEAR})
    )
    train(engine, 5)
    assert model.seen == [length for length in LENGTHS for _ in range(2)]
    engine.eval()
    engine(tokens())
    assert model.seen[-1] == SEQ
    assert engine.curriculum_enabled_legacy() and engine.curriculum_params_legacy()["max_difficulty"] == SEQ


def test_a_model_for_deepspeed_gets_its_keywords() -> None:
    model = ForDeepSpeed()
    sections = {
        "curriculum_learning": {"enabled": True, **LINEAR},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.1},
    }
    engine, *_ = zeropp.initialize(model=model, config=settings(**sections))
    train(engine, 3)
    thetas = [1.0, 1.0, 0.5 * math.exp(-0.1) + 0.5]  # DeepSpeed's engine sets theta(t) when step t ends
    assert model.seen == [(SEQ, LENGTHS[step], True, pytest.approx(thetas[step])) for step in (0, 0, 1, 1, 2, 2)]
    assert engine.pld_enabled() and engine.get_pld_theta() == pytest.approx(0.5 * math.exp(-0.2) + 0.5)
    engine.eval()
    engine(tokens())
    assert model.seen[-1] == (SEQ, 0, False, 1.0)


def sampling(folder: Path, **metric: Any) -> dict[str, Any]:
    metrics = {"seqlen": {"clustering_type": "single_cluster", "difficulty_type": "value", **LINEAR, **metric}}
    learning = {"enabled": True, "data_cluster_path": str(folder), "curriculum_metrics": metrics}
    return {"enabled": True, "data_sampling": {"enabled": True, "num_epochs": 3, "curriculum_learning": learning}}


@pytest.mark.parametrize("custom", [False, True])
def test_a_function_cuts_batches_by_the_difficulties(custom: bool, tmp_path: Path) -> None:
    model, states = Model(), []

    def cut(batch: Any, state: dict[str, Any]) -> Any:
        states.append(state)
        return [batch[0][:, : state["current_difficulties"]["seqlen"]]]

    dataset = torch.utils.data.TensorDataset(torch.arange(40 * SEQ).view(40, SEQ) % 11)
    keys = settings(data_efficiency=sampling(tmp_path, **({"schedule_type": "custom"} if custom else {})))
    engine, _, loader, _ = zeropp.initialize(model=model, config=keys, training_data=dataset)
    if custom:
        engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 2 * step})
    engine.set_data_post_process_func(cut)
    for batch in itertools.islice(loader, 10):
        engine.backward(engine(*batch))
        engine.step()
    wanted = [2, 4, 6, 8, 10] if custom else LENGTHS
    assert model.seen == [length for length in wanted for _ in range(2)]
    assert [state["curriculum_step"] for state in states] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert engine.curriculum_learning_enabled() and engine.data_efficiency_enabled() and engine.data_sampling_enabled()


def test_without_a_curriculum_there_is_nothing_to_change() -> None:
    engine, *_ = zeropp.initialize(model=Model(), config=settings())
    for call in (engine.set_data_post_process_func, engine.set_custom_curriculum_learning_schedule):
        with pytest.raises(zeropp.ConfigError, match="the engine's loader has no curriculum"):
            call(lambda *_: None)
    assert not engine.pld_enabled() and engine.get_pld_theta() is None and not engine.curriculum_learning_enabled()


RATES = {"enabled": True, "total_layer_tokens": 8 * 40 * SEQ, "warmup_type": "linear", "warmup_layer_tokens": 0}
LTD = {
    "enabled": True, "total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2], "model_mask_name": None,
    "model_type": "decoder", "hidden_state_order": "batch_seq_dim", "layer_token_lr_schedule": RATES,
    "random_ltd_schedule": {
        "min_value": 8, "max_value": SEQ, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 2, "seq_per_step": 4},
    },
}  # fmt: skip


def test_rates_follow_layer_tokens() -> None:
    from zeropp.deepspeed.efficiency import make_rates, take_rates

    keys = settings(data_efficiency={"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}})
    found = take_rates(keys)
    assert found is not None and "layer_token_lr_schedule" not in keys["data_efficiency"]["data_routing"]["random_ltd"]
    assert "layer_token_lr_schedule" in LTD, "the caller's mapping stays as it is"
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates, consumed = make_rates(found, optimizer, 8), [], 0
    for keep in (8, 12, 16, 16):
        rates.append(optimizer.param_groups[0]["lr"])
        assert rates[-1] == pytest.approx(1 - consumed / RATES["total_layer_tokens"])
        consumed += 8 * (2 * keep + 2 * SEQ)
        optimizer.step()
        scheduler.step()
    assert rates == sorted(rates, reverse=True)


def test_initialize_makes_these_rates() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, heads=2, width=16, context=SEQ))
    keys = settings(data_efficiency={"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}})
    engine, optimizer, _, scheduler = zeropp.initialize(model=model, config=keys)
    assert isinstance(scheduler, zeropp.optim.LayerTokenLR) and engine.lr_scheduler is scheduler
    for _ in range(4):
        engine.backward(engine(tokens(), tokens()))
        engine.step()
    consumed = 8 * ((2 * 8 + 2 * SEQ) + (2 * 12 + 2 * SEQ))  # of two steps, each of two micro-batches
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 - consumed / RATES["total_layer_tokens"])
    assert engine.random_ltd_enabled()


def test_two_schedules_of_rates_are_refused() -> None:
    keys = settings(data_efficiency={"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}})
    keys["scheduler"] = {"type": "WarmupLR", "params": {}}
    with pytest.raises(zeropp.ConfigError, match="there is another schedule of rates, too"):
        zeropp.initialize(model=Model(), config=keys)
