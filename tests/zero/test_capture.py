# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: a prepared model refuses to run while its stream is captured, and goes on afterwards."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zeropp
from ranks import on_ranks

SENTENCE = "torch.cuda.graph captures this stream, and a forward, backward or step of a prepared model is not supported"


@contextlib.contextmanager
def captured(status: int = 1) -> Iterator[None]:
    driver: Any = importlib.import_module("sim").driver
    driver.sim_capture(status)
    try:
        yield
    finally:
        driver.sim_capture(0)


@on_ranks(1, 2, devices=("sim",))
@pytest.mark.parametrize("offload", [{}, {"params": "cpu", "optimizer": "cpu"}], ids=["on the device", "on the host"])
def test_a_capture_is_refused_at_every_call_and_training_goes_on(offload: dict[str, str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zeropp.prepare(model, optimizer, zeropp.Config(units=("Linear",), offload=zeropp.Offload(**offload)))
    x = torch.ones(2, 16)

    def step() -> float:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    first = step()
    for status in (1, 2):  # a capture that was invalidated is one, too
        with captured(status), pytest.raises(zeropp.Error, match=SENTENCE):
            step()
        optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    with captured(), pytest.raises(zeropp.Error, match=SENTENCE):  # begun in the middle of a step
        optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    assert step() < float(loss) < first


@on_ranks(2, devices=("sim",))
def test_a_capture_that_begins_before_the_backward_is_refused_there() -> None:
    model = torch.nn.Linear(16, 16)
    zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(stage=1))
    loss = model(torch.ones(2, 16)).sum()
    with captured(), pytest.raises(zeropp.Error, match=SENTENCE):
        loss.backward()
