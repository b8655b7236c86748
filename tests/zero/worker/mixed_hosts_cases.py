# SPDX-License-Identifier: Apache-2.0
"""mixed_cases with every rank on a host of its own, over the loopback interface: gathers and sums are collectives there."""

from __future__ import annotations

import os

os.environ["ZEROPP_HOST_ID"] = os.environ["RANK"]  # before the communicator is made

import time
from functools import partial

import torch
import zeropp
from mixed_cases import FULL, LATE_S, batch, equal_to_torch, in_order, parts


def crossed() -> None:
    """The models have one shape, so only their numbers tell their weights apart. The second case: the first model has number 0,
    which is not named."""
    pairs = [
        zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(stage=3))
        for model in parts(2, **FULL)
    ]
    x, began = batch(0, 32), time.monotonic()
    try:
        sum(model(x).square().mean() for model, _ in in_order(pairs, crossed=True)).backward()
    except zeropp.CommError as error:
        assert "object 1 of model " in str(error) and "in the same order" in str(error), error
        assert time.monotonic() - began < LATE_S
        return
    raise AssertionError("one model's weights came for the other's")


CASES = {"same order": partial(equal_to_torch, 2, False, FULL, stage=3), "crossed": crossed}
