# SPDX-License-Identifier: Apache-2.0
"""Ranks of tests run on the simulated GPU: tensors are there, and what it does not support ends with the error that the test expects."""

from __future__ import annotations

import torch
from ranks import of_all_ranks, on_ranks
from zeropp.errors import ConfigError


@on_ranks(1, 2, devices=("cpu", "sim", "sim-lazy"))
def test_tensors_are_on_the_device() -> None:
    where = torch.ones(2).device.type
    values = torch.arange(4.0)
    assert of_all_ranks((where, (values * 2).tolist())) == [(where, [0.0, 2.0, 4.0, 6.0])] * len(of_all_ranks(0))


@on_ranks(1, devices=("cpu", "sim"), refused={"sim": "thing is not supported yet"})
def test_a_refusal_is_expected_on_that_device_only() -> None:
    if torch.ones(1).device.type != "cpu":
        raise ConfigError("the thing is not supported yet on a GPU")


@on_ranks(1, devices=("sim",))
def test_a_body_may_ask_for_its_only_device(device: str) -> None:
    assert device.startswith("sim") and torch.ones(1).device.type == "sim"
