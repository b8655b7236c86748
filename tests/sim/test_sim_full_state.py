# SPDX-License-Identifier: Apache-2.0
"""Whole values of a model on the simulated GPU are copies on the CPU, at every stage."""

from __future__ import annotations

import pytest
import torch
import zeropp
from ranks import on_ranks
from torch import nn


def values(rank: float) -> dict[str, torch.Tensor]:
    """Return what the model has: parameters are the same on every rank, buffers are not."""
    weight = torch.arange(32.0, device="cpu").view(4, 8)
    bias = torch.arange(4.0, device="cpu")
    return {"0.weight": weight, "0.bias": bias, "1.running_mean": bias + rank}


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2, devices=("sim",))
def test_whole_values_are_on_the_cpu(stage: int) -> None:
    rank = torch.distributed.get_rank()
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    model.load_state_dict(values(rank), strict=False)
    model, _ = zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(stage=stage))
    model[1].running_mean += 10.0 * (rank + 1)  # after prepare, which gives every rank rank 0's

    def check(found: dict[str, torch.Tensor], of_rank: int) -> None:
        wanted = values(0)
        wanted["1.running_mean"] += 10.0 * (of_rank + 1)
        assert {name: one.device.type for name, one in found.items()} == dict.fromkeys(found, "cpu")
        for name, one in wanted.items():
            assert torch.equal(found[name], one), name
            found[name].zero_()  # a copy: the model keeps its values

    check(dict(zeropp.named_full_tensors(model)), rank)
    check({name: one for pack in zeropp.packed_full_tensors(model) for name, one in pack.tensors()}, rank)
    check(zeropp.full_state_dict(model), 0)
    zeropp.load_full_state_dict(model, zeropp.full_state_dict(model))
    check(zeropp.full_state_dict(model), 0)
