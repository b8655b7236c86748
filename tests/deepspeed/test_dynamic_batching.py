# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's dynamic_batching: batches by tokens through the engine, rates by their samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from zeropp.deepspeed.dynamic_batching import get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed as make

LENGTHS = [3, 4, 9, 1, 1, 1, 5, 5, 2, 8, 6, 4]


def rows() -> list[torch.Tensor]:
    return [torch.full((length,), float(number)) for number, length in enumerate(LENGTHS)]


def start(folder: Path, **batching: Any) -> Any:
    section = {
        "enabled": True,
        "max_tokens": 10,
        "metrics_path": str(folder),
        "lr_scaling_method": "linear",
        **batching,
    }
    keys = {
        "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": section}},
    }  # fmt: skip
    return zeropp.initialize(model=torch.nn.Linear(1, 1), config=keys)[0]


@pytest.mark.filterwarnings("ignore:.*dynamic_batching")
def test_the_engine_gets_batches_by_tokens_and_their_rates(tmp_path: Path) -> None:
    engine = start(tmp_path)

    def lengths_of(batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([len(row) for row in batch])

    loader, scheduler, arguments = make(rows(), engine, dataloader_collate_fn=list, batch_seqlens_fn=lengths_of)
    packed = [[0, 1], [2, 3], [4, 5, 6], [7, 8], [9], [10, 11]]
    assert [[int(row[0]) for row in batch] for batch in loader] == packed
    again = engine.deepspeed_io(**arguments)
    assert [[int(row[0]) for row in batch] for batch in again] == packed
    assert (tmp_path / "seqlen" / "seqlen_sample_to_metric.idx").exists()
    engine.lr_scheduler = scheduler
    rates = []
    for batch in [*again, *again]:
        rates.append(engine.optimizer.param_groups[0]["lr"])
        engine.backward(engine(torch.cat(batch)[:, None]).mean())
        engine.step()
    assert rates[::2] == rates[1::2] == [4 / 2, 5 / 2, 3 / 2] * 2
    assert len(list(make(rows(), engine, LENGTHS, dataset_filter_ids=[0, 1, 2, 3])[0])) == 2


def test_rates_of_a_scheduler_are_scaled(tmp_path: Path) -> None:
    sampler = zeropp.data.TokenBatchSampler(LENGTHS, max_tokens=10, micro_batches=2, scaling="sqrt")
    factors = [(samples / 2) ** 0.5 for samples in sampler.batch_sizes]

    def pair() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=8.0)
        inner = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return optimizer, zeropp.deepspeed.dynamic_batching.VariableBatchSizeLR(inner, sampler)

    optimizer, scheduler = pair()
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([8.0 * 0.5 ** (step // 2) * factors[step % 3] for step in range(8)])
    first, scheduler = pair()
    for _ in range(3):
        first.step()
        scheduler.step()
    second, later = pair()
    later.load_state_dict(scheduler.state_dict())
    assert second.param_groups[0]["lr"] == pytest.approx(rates[3]) and later.get_last_lr() == [4.0]


def test_bad_sections_are_named(tmp_path: Path) -> None:
    bad = {
        "max_tokens": 0,
        "sequence_picking_order": "longest",
        "lr_scaling_method": "cubic",
        "min_batch_size": 1.5,
        "tokens": 3,
    }
    for name, value in bad.items():
        with pytest.raises(zeropp.ConfigError, match=f"dynamic_batching.{name}"):
            start(tmp_path, **{name: value})
    with pytest.warns(UserWarning, match="get_dataloader_and_lr_scheduler"):
        engine = start(tmp_path)
    with pytest.raises(zeropp.ConfigError, match="give dataset_seqlens"):
        make(rows(), engine)
