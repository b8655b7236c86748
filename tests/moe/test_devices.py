# SPDX-License-Identifier: Apache-2.0
"""Experts on GPUs: parity with one process, and what is refused. The other files of this folder run by device, too (`--device=sim`)."""

from __future__ import annotations

import pytest
import torch
import zeropp
from expert_parity import parity
from ranks import on_ranks
from zeropp.errors import ConfigError
from zeropp.zero.model.accelerator import check_experts


@on_ranks(2, devices=("sim", "sim-lazy", "sim-offload"))
def test_training_equals_one_process() -> None:
    parity("Mixtral", 2, stage=3)


def test_a_cache_is_refused_on_a_gpu() -> None:
    experts = zeropp.Experts(parallel=2, cache="1GiB")
    with pytest.raises(
        ConfigError, match=r"computes on cuda:0, where Experts\(cache=\) is .* leave it out, or train on the CPU"
    ):
        check_experts(torch.device("cuda:0"), experts)
    check_experts(torch.device("cpu"), experts)
    check_experts(torch.device("cuda:0"), zeropp.Experts(parallel=2))


def test_rows_without_values_are_refused() -> None:
    hidden, chosen = torch.ones(3, 16, device="meta"), torch.zeros(3, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"hidden is on meta, wanted a tensor with values, on the cpu or a GPU"):
        zeropp.moe.dispatch(hidden, chosen, 4)
