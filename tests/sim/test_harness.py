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


@on_ranks(1, devices=("sim", "sim-lazy"))
def test_a_generator_draws_the_same_numbers() -> None:
    first, second = (torch.randn(5, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    wanted = torch.randn(5, generator=torch.Generator().manual_seed(3), device="cpu")
    assert torch.equal(first.cpu(), wanted) and torch.equal(second.cpu(), wanted)


@on_ranks(1, devices=("sim",))
def test_norms_in_low_precision_have_a_backward() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for kind in (torch.nn.LayerNorm(8), torch.nn.GroupNorm(2, 8)):
            model, x = kind.to(dtype), torch.ones(2, 8, dtype=dtype, requires_grad=True)
            model(x).float().sum().backward()
            assert x.grad is not None and torch.isfinite(x.grad).all()
            assert model.weight.grad is not None and torch.isfinite(model.weight.grad).all()
