# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's cases of data efficiency and progressive layer dropping (docs/conformance.md), through what ``import deepspeed`` means in
``python -m zeropp run``.

They are the cases of ``tests/unit/runtime/test_data_efficiency.py`` and ``test_pld.py``, with their models, which take what DeepSpeed
passes as ``**kwargs``, their sections, and the values that they expect. Here they run on the CPU, on one and on two ranks.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import pytest
import torch
import zeropp
from ranks import of_all_ranks, on_ranks
from torch import Tensor, nn
from zeropp.deepspeed.efficiency import ProgressiveLayerDrop
from zeropp.deepspeed.names.modules import initialize

WIDTH = 10
DTYPES = ["bf16", "fp16"]
THETAS = [0, 0.1, 0.9, 1.0]


class Plain(nn.Module):
    """One linear layer and a cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        assert x.shape[1] == WIDTH, "the input was cut"
        return nn.functional.cross_entropy(self.linear(x), y)


class WithLength(Plain):
    def forward(self, x: Tensor, y: Tensor, **kwargs: Any) -> Any:
        return super().forward(x, y), kwargs.get("curriculum_seqlen")


class WithLayerDrop(Plain):
    def forward(self, x: Tensor, y: Tensor, **kwargs: Any) -> Any:
        self.got = kwargs["progressive_layer_drop"], kwargs["pld_theta"]
        return super().forward(x, y)


def settings(dtype: str, world: int, **sections: Any) -> dict[str, Any]:
    low = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8} if dtype == "fp16" else {"enabled": True}
    return {
        "train_batch_size": world, "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "weight_decay": 0.01}},
        "gradient_clipping": 1.0, dtype: low, **sections,
    }  # fmt: skip


def rows(count: int, dtype: str) -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, WIDTH, generator=draw).to(torch.bfloat16 if dtype == "bf16" else torch.float16)
    return torch.utils.data.TensorDataset(inputs, torch.randint(WIDTH, (count,), generator=draw))


def lengths(dtype: str, section: dict[str, Any]) -> list[int]:
    world = torch.distributed.get_world_size()
    learning = {"enabled": True, "curriculum_type": "seqlen", **section}
    engine, *_ = initialize(model=WithLength(), config=settings(dtype, world, curriculum_learning=learning))
    found = []
    for batch in torch.utils.data.DataLoader(rows(10, dtype), engine.train_micro_batch_size_per_gpu()):
        loss, length = engine(*batch)
        engine.backward(loss)
        engine.step()
        found.append(length)
    assert of_all_ranks(found) == [found] * world
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(1, 2)
def test_fixed_discrete(dtype: str) -> None:
    steps = {"difficulty": [1, 2, 3, 4, 5], "max_step": [2, 4, 6, 8]}
    section = {
        "min_difficulty": 1,
        "max_difficulty": 5,
        "schedule_type": "fixed_discrete",
        "schedule_config": steps,
    }
    assert lengths(dtype, section) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(1, 2)
def test_fixed_linear(dtype: str) -> None:
    steps = {"total_curriculum_step": 8, "difficulty_step": 2}
    section = {"min_difficulty": 2, "max_difficulty": 10, "schedule_type": "fixed_linear", "schedule_config": steps}
    assert lengths(dtype, section) == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]


class Units:
    """What a script with a model-parallel size of 1 gives as ``mpu``."""

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    get_model_parallel_group = get_model_parallel_rank

    def get_data_parallel_rank(self) -> int:
        return torch.distributed.get_rank()

    def get_data_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size()

    def get_data_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(1, 2)
def test_curriculum_learning(dtype: str) -> None:
    world = torch.distributed.get_world_size()
    metric = {
        "index_to_sample_path": "dummy", "index_to_metric_path": "dummy", "difficulty_type": "value", "clustering_type": "single_cluster",
        "min_difficulty": 2, "max_difficulty": 10, "schedule_type": "fixed_root",
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 2, "root_degree": 1},
    }  # fmt: skip
    seen = []

    def note(batch: Any, state: dict[str, Any]) -> Any:
        seen.append(state["current_difficulties"]["dummy_metric"])
        return batch

    with tempfile.TemporaryDirectory() as own:
        folder = of_all_ranks(own)[0]
        learning = {"enabled": True, "data_cluster_path": folder, "curriculum_metrics": {"dummy_metric": metric}}
        sampling = {"enabled": True, "num_workers": 0, "curriculum_learning": learning}
        model, data = Plain(), rows(20, dtype)
        engine, _, loader, _ = initialize(
            model=model, training_data=data, model_parameters=model.parameters(), mpu=Units(),
            config=settings(dtype, world, data_efficiency={"enabled": True, "seed": 1234, "data_sampling": sampling}),
        )  # fmt: skip
        engine.set_data_post_process_func(note)
        samples = []
        for step, batch in enumerate(loader):
            engine.backward(engine(*batch))
            engine.step()
            samples += [int((row == data.tensors[0]).all(1).nonzero()) for row in batch[0]]
            if step == 9:
                break
        drawn = [sample for part in of_all_ranks(samples) for sample in part]
    assert seen == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]
    assert len(set(drawn)) == len(drawn) == 10 * world


def test_pld_schedule() -> None:
    for theta in THETAS:
        schedule = ProgressiveLayerDrop(theta, 0.001)
        assert schedule.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
        for step in range(10):
            schedule.update_state(step)
            assert schedule.get_theta() == (1 - theta) * math.exp(-0.001 * step) + theta


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("theta", THETAS)
@on_ranks(1, 2)
def test_pld_model(theta: float, dtype: str) -> None:
    world = torch.distributed.get_world_size()
    model = WithLayerDrop()
    section = {"enabled": True, "theta": theta, "gamma": 0.001}
    engine, *_ = initialize(model=model, config=settings(dtype, world, progressive_layer_drop=section))
    before = 1.0
    for step, batch in enumerate(torch.utils.data.DataLoader(rows(20, dtype), 1)):
        engine.backward(engine(*batch))
        engine.step()
        assert model.got == (True, before)
        before = (1 - theta) * math.exp(-0.001 * step) + theta
        assert engine.get_pld_theta() == before


@on_ranks(2)
def test_groups_that_split_a_model_are_refused() -> None:
    class Halves(Units):
        def get_model_parallel_world_size(self) -> int:
            return 2

    with pytest.raises(zeropp.ConfigError, match="mpu, mesh_param"):
        initialize(model=Plain(), config=settings("bf16", 2), mpu=Halves())


@on_ranks(1, 2)
def test_non_pld_model() -> None:
    """DeepSpeed's keywords are a TypeError in such a model; here its layers would be dropped for it, but it has no stack of layers."""
    section = {"enabled": True, "theta": 0.5, "gamma": 0.001}
    config = settings("bf16", torch.distributed.get_world_size(), progressive_layer_drop=section)
    with pytest.raises(zeropp.ConfigError, match="layer"):
        initialize(model=Plain(), config=config)
