# SPDX-License-Identifier: Apache-2.0
"""Experts on GPUs: what would exchange rows is refused, with the way out."""

from __future__ import annotations

import pytest
import torch
import zeropp
from zeropp.errors import ConfigError, NotBuiltError
from zeropp.zero.model.accelerator import check_experts


def test_experts_on_a_gpu_are_refused() -> None:
    """By prepare where they would be divided; a rank with all experts exchanges nothing."""
    sentence = r"computes on cuda:0, where experts on different ranks, .* leave Config\.experts at None"
    with pytest.raises(ConfigError, match=sentence):
        check_experts(torch.device("cuda:0"), True)
    check_experts(torch.device("cuda:0"), False)
    check_experts(torch.device("cpu"), True)


def test_rows_on_a_device_are_refused() -> None:
    hidden, chosen = torch.ones(3, 16, device="meta"), torch.zeros(3, 1, dtype=torch.long)
    with pytest.raises(
        NotBuiltError, match=r"hidden is on meta; rows are exchanged in host memory only.*ep_implementation='auto'"
    ):
        zeropp.moe.dispatch(hidden, chosen, 4)
